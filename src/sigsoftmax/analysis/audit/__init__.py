"""The parts of an audit of an output layer: unreachable classes, nonlinearity of phi, truncation, gradients."""

from sigsoftmax._moved import forward_names

__getattr__ = forward_names(__name__)
