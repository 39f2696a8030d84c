"""Read, change and save a language model's activations in the middle of its forward pass, on stock vLLM."""

__version__ = "0.1.0"
