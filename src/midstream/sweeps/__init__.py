"""Sweeps: activation patching over layers, positions, sites and heads.

`request` is what was asked for, `running` runs it as requests to the model, `events` is what comes as it runs, and `results` is what the
user holds.
"""
