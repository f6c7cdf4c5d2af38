"""Experiments: the parts of the package put together, each started by one verb of the command line."""
