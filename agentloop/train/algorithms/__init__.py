"""Losses over rows, one algorithm a file. None holds a model or an optimiser."""
