"""Plans in the engine: kernels, device tables, and what follows each planned request."""
