"""The language model: embedding, LSTM layers, regularisation and head."""

from sigsoftmax._moved import forward_names

__getattr__ = forward_names(__name__)
