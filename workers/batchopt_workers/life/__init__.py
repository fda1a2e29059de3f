"""The life of a worker process."""
