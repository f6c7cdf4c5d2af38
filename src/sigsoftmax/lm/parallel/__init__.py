"""Parallel strategies: the division of one run over processes."""
