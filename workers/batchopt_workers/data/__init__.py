"""Batches, modules and vectors: how they lie in memory, and how they travel."""
