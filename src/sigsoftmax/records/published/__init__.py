"""Published results of others: the paper's tables, and the curves of reference implementations."""
