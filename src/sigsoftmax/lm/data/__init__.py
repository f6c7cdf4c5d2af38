"""Text: corpora, fetched or one's own, and the ids, columns and windows that models read."""

from sigsoftmax._moved import forward_names

__getattr__ = forward_names(__name__)
