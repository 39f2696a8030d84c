"""Where traces run: transformers in this process, or a vLLM engine."""
