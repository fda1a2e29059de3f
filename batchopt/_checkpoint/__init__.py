"""Saving and resuming: one file of plain data, written whole or not at all."""
