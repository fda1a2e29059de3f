"""Nodes: processes on one or several machines that evaluate together over torch.distributed."""
