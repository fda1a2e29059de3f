"""Batches, modules and vectors: their layout in memory, and how they are sent."""
