"""The function of one batch, f(X), and its derivatives, as requested by the user."""
