"""Batches in memory, and the pieces that they are cut into."""
