"""What others have published: the paper's tables, and the curves of reference implementations."""
