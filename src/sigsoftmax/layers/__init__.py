"""Output layers, losses and output functions as modules of torch, named as their counterparts in ``torch.nn``."""

from sigsoftmax.layers.mixture import MixtureOutputLayer
from sigsoftmax.layers.output_layer import CrossEntropyLoss, LogProbs, LogSigsoftmax, OutputLayer, Probs, Sigsoftmax

__all__ = [
    "CrossEntropyLoss",
    "LogProbs",
    "LogSigsoftmax",
    "MixtureOutputLayer",
    "OutputLayer",
    "Probs",
    "Sigsoftmax",
]
