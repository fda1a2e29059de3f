"""Nodes: processes on one machine or on many that evaluate together, over torch.distributed."""
