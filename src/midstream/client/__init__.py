"""What users hold: `VLLM`, `LanguageModel` and what they share."""
