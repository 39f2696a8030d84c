"""Where captured rows go: onto the output, into files, to the user's consumers.

The engine hands over `RowChunk`s, the rows that a step captured. `rows.routes` says which rows go where, and `rows.gather`
puts a request's rows together as `Captured`, which the user finds on the output. `sinks.Sinks` hands them on to `consumers`,
each behind a queue and a thread of its own (`consumer_thread`). `directory.DirectorySink` is the consumer that writes files, which
`store.open_captures` reads.
"""
