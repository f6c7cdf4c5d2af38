"""One run from its recipe to its records, and what can be done with a trained one."""
