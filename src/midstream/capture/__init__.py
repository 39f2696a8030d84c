"""Where captured rows go: onto the output, into files, to the user's consumers.

The engine hands over `Rows`, those that a step captured. `rows` says which rows go where, and puts a request's rows together
as `Captured`, which the user finds on the output. `sinks.Sinks` hands them on to `consumers`, each behind a queue and a thread of its
own. `directory.DirectorySink` is the consumer that writes files; `directory.open_captures` reads them.
"""
