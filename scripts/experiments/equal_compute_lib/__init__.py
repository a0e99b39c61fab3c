"""Equal compute, equal quality: N cells in one process, stacked on a leading dimension."""
