"""Singular values and numerical ranks of log-output matrices, in memory, streamed, or bounded from a block."""
