"""Output functions for PyTorch: sigsoftmax and its relatives, with losses and mixtures that are right everywhere."""

from sigsoftmax import _moved
from sigsoftmax._version import __version__
from sigsoftmax.family import Learned, OutputFunction, register_function
from sigsoftmax.layers.mixture import MixtureOutputLayer
from sigsoftmax.layers.output_layer import OutputLayer
from sigsoftmax.losses.functional import (
    cross_entropy,
    linear_cross_entropy,
    log_probs,
    log_sigsoftmax,
    mixture_cross_entropy,
    mixture_log_probs,
    probs,
    sigsoftmax,
)
from sigsoftmax.losses.lowering import explain
from sigsoftmax.losses.token_statistics import linear_token_statistics, mixture_token_statistics

_moved.install()

__all__ = [
    "Learned",
    "MixtureOutputLayer",
    "OutputFunction",
    "OutputLayer",
    "__version__",
    "cross_entropy",
    "explain",
    "linear_cross_entropy",
    "linear_token_statistics",
    "log_probs",
    "log_sigsoftmax",
    "mixture_cross_entropy",
    "mixture_log_probs",
    "mixture_token_statistics",
    "probs",
    "register_function",
    "sigsoftmax",
]
