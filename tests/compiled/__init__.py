"""Compiled evaluations."""
