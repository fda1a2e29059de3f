"""Compiled evaluations: f of a piece and its gradient as one C++ program, in place of hundreds of calls from Python."""
