"""The only folder that imports vLLM: its launch, its patches, and midstream's worker and scheduler inside of it."""
