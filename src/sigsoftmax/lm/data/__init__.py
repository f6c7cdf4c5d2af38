"""Where text comes from, and how it becomes the ids that models read."""

from sigsoftmax._moved import forward_names

__getattr__ = forward_names(__name__)
