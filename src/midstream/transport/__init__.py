"""From a worker to its client: device memory, pinned memory, shared memory or a socket."""
