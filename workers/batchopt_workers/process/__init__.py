"""The life of a worker process, and the messages between it and its parent."""
