"""Singular values and numerical ranks of log-output matrices, in memory, streamed, or bounded from a block."""

from sigsoftmax._moved import forward_names

__getattr__ = forward_names(__name__)
