"""The map function: partial losses and gradients of chunks, summed along the tree of chunks."""
