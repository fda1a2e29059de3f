"""Functions of a batch other than f."""
