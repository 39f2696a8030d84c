"""What a worker does with plans and traces. Nothing here imports vLLM; the transformers backend uses it as well."""
