"""Sends values from a worker to its client, by shared memory or a socket."""
