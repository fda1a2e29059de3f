"""The life of a worker process, and what it exchanges with its parent."""
