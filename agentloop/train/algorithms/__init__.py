"""Loss functions over rows, one algorithm per file. None holds a model or an optimiser."""
