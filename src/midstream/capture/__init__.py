"""Where captured rows go: onto the output, into files, to consumers of the user's.

The engine hands over `Segment`s, rows as a step left them. `segment.gather` puts a request's together as `Captured`, which
is what the user finds on the output. `sinks.Sinks` hands them on to `consumers`, each behind a queue and a thread of its own
(`lane`); one of them is `directory.DirectorySink`, whose files `store.open_captures` reads. `wanted` says which rows go where.
"""
