"""Worker processes on this machine, over shared memory."""
