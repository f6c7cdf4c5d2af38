"""Models that contain output functions and output layers, for the tests of exports: from (batch, 10)."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from sigsoftmax import MixtureOutputLayer, OutputLayer
from sigsoftmax.layers.output_layer import LogProbs, LogSigsoftmax, Probs, Sigsoftmax


def _ending(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(10, 30), *layers)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LogProbs": lambda: _ending(LogProbs(function="sigsoftmax")),
    "relu, whose eps must stay": lambda: _ending(LogProbs(function="relu")),
    "Probs": lambda: _ending(Probs(function="gss(k=0.2)")),
    "Sigsoftmax": lambda: _ending(Sigsoftmax()),
    "LogSigsoftmax over another dimension": lambda: _ending(nn.Unflatten(-1, (5, 6)), LogSigsoftmax(dim=1)),
    "OutputLayer": lambda: _ending(nn.Tanh(), OutputLayer(30, 20, function="shifted_sigsoftmax(b=per_class:1)")),
    "MixtureOutputLayer": lambda: _ending(MixtureOutputLayer(30, 4, 20, components=3, floor=1e-8)),
    "a residual mixture": lambda: _ending(MixtureOutputLayer(30, 30, 20, 2, function="softmax", latent="residual")),
    "a mixture of sequences": lambda: _ending(
        nn.Unflatten(-1, (5, 6)), MixtureOutputLayer(6, 4, 20, components=2, function="gss(k=0.2)", latent="linear")
    ),
}
