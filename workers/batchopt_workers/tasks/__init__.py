"""Functions of a batch other than f: predictions, totals, Jacobians, products."""
