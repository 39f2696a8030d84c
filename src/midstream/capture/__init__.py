"""Delivers captured rows to the output, to files and to the user's consumers.

The engine hands over the `Rows` that a step captured. `rows` finds the destination of each row, and puts a request's rows together
as `Captured` for the output. `sinks.Sinks` hands rows on to `consumers`, each with its own queue and thread. `directory.DirectorySink` is
the consumer that writes files; `directory.open_captures` reads them, and `loading` makes batches for training.
"""
