"""Training and evaluation."""

from sigsoftmax._moved import forward_names

__getattr__ = forward_names(__name__)
