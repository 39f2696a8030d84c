"""Where the code of a trace runs: it is recorded (`trace.record`), and what can be a plan or a program becomes one.

`tiers` decides. `recordings` keeps what was recorded for later calls. `passes` finds linear functions of the value that was read, `rowwise`
and `blocks` find functions of its rows, and `kept` finds what is only kept.
"""
