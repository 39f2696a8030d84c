"""Sweeps: activation patching over layers, positions, sites and heads.

`request` has the arguments, `running` runs the sweep as requests to the model, `events` defines the events of a running sweep, and
`results` has its result.
"""
