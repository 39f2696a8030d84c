"""Sweeps: activation patching over layers, positions, sites and heads.

`cells` has the arguments and the grid of cells. `sweep_run` runs the cells as requests to the model, and `paths` those of path patching.
`edges` computes edge attribution. `events` defines the events of a running sweep, and `results` the result.
"""
