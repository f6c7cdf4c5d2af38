"""The least KL that each output head can reach at a width, on distributions that are known."""

from sigsoftmax._moved import forward_names

__getattr__ = forward_names(__name__)
