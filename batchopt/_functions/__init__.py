"""Functions of the loaded batch other than f: derivatives, least squares, tasks, predictions."""
