"""Decides where the code of a trace runs: it is recorded (`trace.record`), and becomes a plan or a program where that is possible.

`tiers` decides. `recordings` caches recordings for later calls. `linear` finds linear functions of a site's value, `row_programs` and
`row_tensors` find functions of its rows, and `client_traces` makes saved values from captured rows.
"""
