"""Traces: a with-block or a function that runs inside the forward pass."""
