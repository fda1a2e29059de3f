"""Saving and resuming: one file of plain data, written completely or not at all."""
