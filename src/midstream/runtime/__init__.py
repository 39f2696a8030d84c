"""Runs plans and traces in a worker. No file of this folder imports vLLM; the transformers backend uses the folder as well."""
