"""What runs beside and inside vLLM: the worker, its runners' adapters, and the channel that carries results out."""
