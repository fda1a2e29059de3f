"""The function of one batch, f(X) and its derivatives, as the user asks for it."""
