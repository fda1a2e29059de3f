"""This machine: its cores, torch's threads, and which process and thread may use an optimizer."""
