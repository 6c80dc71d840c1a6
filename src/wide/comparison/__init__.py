"""Comparisons of pruning methods on one model and one text: the grid, its cells, the run over them, its results."""
