"""Decides where the code of a trace runs: it is recorded (`trace.record`), and becomes a plan or a program where that is possible.

`tiers` decides. `recordings` caches recordings for later calls. `row_programs` and `row_tensors` find functions of a site's rows, `linear`
finds those that one edit can do, and `client_traces` makes saved values from captured rows. `taping` runs all of this in a separate
process (`taper`), also for the functions in plans (`functions`). `validation` compares each tape with the code itself.
"""
