"""The user's program (module, criterion, losses, hooks): its parameters as one vector, its state, and its pickling."""
