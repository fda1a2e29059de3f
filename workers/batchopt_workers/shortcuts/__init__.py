"""Evaluations in place of eager ones."""
