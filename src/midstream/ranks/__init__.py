"""What makes the ranks of one engine act as one: pipeline stages and tensor parallelism."""
