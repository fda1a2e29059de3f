"""A worker's evaluation of chunks."""
