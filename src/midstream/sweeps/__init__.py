"""Sweeps: activation patching over layers, positions, sites and heads, as data. `client.sweeping` runs them."""
