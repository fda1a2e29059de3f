"""The engine: f of a batch, on workers, and the steps of an optimizer on it."""
