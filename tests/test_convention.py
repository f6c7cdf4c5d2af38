"""One convention of arguments: functions, criteria, layers, distributed losses and token statistics."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sigsoftmax
from sigsoftmax import distributed, layers

COUNTERPARTS: dict[Callable[..., Any], Callable[..., Any]] = {
    sigsoftmax.sigsoftmax: F.softmax,
    sigsoftmax.log_sigsoftmax: F.log_softmax,
    sigsoftmax.probs: F.softmax,
    sigsoftmax.log_probs: F.log_softmax,
    sigsoftmax.cross_entropy: F.cross_entropy,
    layers.Sigsoftmax: nn.Softmax,
    layers.LogSigsoftmax: nn.LogSoftmax,
    layers.Probs: nn.Softmax,
    layers.LogProbs: nn.LogSoftmax,
    layers.CrossEntropyLoss: nn.CrossEntropyLoss,
}
"""the callables of torch whose arguments ours have"""
PUBLIC = [
    *(getattr(sigsoftmax, name) for name in sigsoftmax.__all__ if name != "register_function"),
    *(getattr(layers, name) for name in layers.__all__),
    distributed.linear_cross_entropy,
    distributed.mixture_cross_entropy,
]
TAKE_A_FUNCTION = [
    call for call in dict.fromkeys(PUBLIC) if callable(call) and "function" in inspect.signature(call).parameters
]
LOSSES = (
    sigsoftmax.cross_entropy,
    sigsoftmax.linear_cross_entropy,
    sigsoftmax.mixture_cross_entropy,
    distributed.linear_cross_entropy,
    distributed.mixture_cross_entropy,
)


def name_of(call: Callable[..., Any]) -> str:
    return f"{call.__module__.split('.')[1]}.{call.__name__}"


def positional(call: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [key for key, parameter in inspect.signature(call).parameters.items() if parameter.kind in kinds]


def test_all_that_take_a_function_are_here() -> None:
    assert len(TAKE_A_FUNCTION) == 15


@pytest.mark.parametrize("call", TAKE_A_FUNCTION, ids=name_of)
def test_the_function_is_given_by_name_and_is_sigsoftmax_otherwise(call: Callable[..., Any]) -> None:
    function = inspect.signature(call).parameters["function"]
    assert function.kind is inspect.Parameter.KEYWORD_ONLY
    assert function.default == "sigsoftmax"


@pytest.mark.parametrize(("ours", "torchs"), COUNTERPARTS.items(), ids=lambda call: call.__qualname__)
def test_positional_arguments_are_those_of_torch(ours: Callable[..., Any], torchs: Callable[..., Any]) -> None:
    own = positional(ours)
    assert own == positional(torchs)[: len(own)]


@pytest.mark.parametrize("call", LOSSES, ids=name_of)
def test_defaults_of_the_losses_are_those_of_torch(call: Callable[..., Any]) -> None:
    known = inspect.signature(F.cross_entropy).parameters
    for key in ("weight", "ignore_index", "reduction", "label_smoothing"):
        assert inspect.signature(call).parameters[key].default == known[key].default


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has no linear_cross_entropy before 2.13")
def test_linear_losses_are_placed_as_torchs() -> None:
    for call in (sigsoftmax.linear_cross_entropy, distributed.linear_cross_entropy):
        assert positional(call) == positional(F.linear_cross_entropy)
        assert inspect.signature(F.linear_cross_entropy).parameters.keys() - {"options"} <= (
            inspect.signature(call).parameters.keys()
        )


def test_layers_begin_as_nn_linear() -> None:
    assert positional(sigsoftmax.OutputLayer) == ["in_features", "num_classes", "bias"]
    sizes = ["in_features", "latent_features", "num_classes", "components"]
    assert positional(sigsoftmax.MixtureOutputLayer) == [*sizes, "bias"]


def test_a_criterion_takes_every_option_of_its_function() -> None:
    options = inspect.signature(sigsoftmax.cross_entropy).parameters.keys() - {"input", "target", "token_weights"}
    assert inspect.signature(layers.CrossEntropyLoss).parameters.keys() - options == {"num_classes"}


def test_without_a_function_all_of_them_are_sigsoftmax() -> None:
    logits, target = torch.randn(4, 7), torch.randint(7, (4,))
    expected = F.nll_loss(sigsoftmax.log_sigsoftmax(logits), target)
    weight = torch.eye(7)
    for loss in (
        sigsoftmax.cross_entropy(logits, target),
        layers.CrossEntropyLoss()(logits, target),
        sigsoftmax.linear_cross_entropy(logits, weight, target),
        sigsoftmax.mixture_cross_entropy(logits[:, None], torch.zeros(4, 1), weight, target),
        -sigsoftmax.linear_token_statistics(logits, weight, target).log_probs.mean(),
    ):
        torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(layers.LogProbs(1)(logits), sigsoftmax.log_sigsoftmax(logits, 1))
    torch.testing.assert_close(layers.Probs()(logits), sigsoftmax.probs(logits, -1))
