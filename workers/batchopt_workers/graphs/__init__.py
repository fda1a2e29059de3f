"""Evaluations on a card as graphs: what it did once is done again, without Python and with the same bits."""
