"""Calls in their old forms: they do what they did, and say how they are written now."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sigsoftmax
from sigsoftmax import OutputFunction
from sigsoftmax.layers import CrossEntropyLoss, LogProbs, MixtureOutputLayer, OutputLayer, Probs

D, V, K = 5, 8, 3
WEIGHT = torch.linspace(0.5, 2.0, V)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (lambda: CrossEntropyLoss("softmax"), lambda: CrossEntropyLoss(function="softmax")),
        (lambda: CrossEntropyLoss("softmax", WEIGHT), lambda: CrossEntropyLoss(WEIGHT, function="softmax")),
        (
            lambda: CrossEntropyLoss(OutputFunction("gss", k=0.2), reduction="sum"),
            lambda: CrossEntropyLoss(function="gss(k=0.2)", reduction="sum"),
        ),
        (lambda: LogProbs("gss(k=0.2)", 0), lambda: LogProbs(0, function="gss(k=0.2)")),
        (lambda: Probs("relu", dim=0), lambda: Probs(0, function="relu")),
    ],
)
def test_a_module_reads_the_function_at_its_old_place(old: Callable[[], Any], new: Callable[[], Any]) -> None:
    with pytest.warns(DeprecationWarning, match=r"takes the output function by its name: write \w+\(\.\.\., function="):
        before = old()
    now = new()
    arguments = [torch.randn(4, V)]
    if isinstance(now, CrossEntropyLoss):
        arguments.append(torch.randint(V, (4,)))
    assert torch.equal(before(*arguments), now(*arguments))
    assert repr(before) == repr(now)


def test_a_layer_reads_its_arguments_in_the_old_order() -> None:
    tied = nn.Parameter(torch.randn(V, D))
    with pytest.warns(DeprecationWarning, match=r"write OutputLayer\(\.\.\., function='softmax'\)"):
        layer = OutputLayer(D, V, "softmax", False, tied)
    assert layer.bias is None
    assert layer.weight is tied
    assert layer.function == OutputFunction("softmax")
    with pytest.warns(DeprecationWarning, match="MixtureOutputLayer takes the output function by its name"):
        mixture = MixtureOutputLayer(D, D, V, K, "softmax", "sigsoftmax", False, tied, None, 1e-8, latent="linear")
    assert mixture.weight is tied
    assert (mixture.bias, mixture.prior_function, mixture.floor) == (None, "sigsoftmax", 1e-8)
    assert mixture.latent_kind == "linear"


def test_too_many_or_the_same_argument_twice() -> None:
    by_name = pytest.warns(DeprecationWarning, match="LogProbs takes the output function by its name")
    with by_name, pytest.raises(TypeError, match="at most 2 positional arguments, got 3"):
        LogProbs("softmax", 1, 2)  # type: ignore[misc, arg-type]
    by_name = pytest.warns(DeprecationWarning, match="LogProbs takes the output function by its name")
    with by_name, pytest.raises(TypeError, match="multiple values for argument 'dim'"):
        LogProbs("softmax", 1, dim=2)  # type: ignore[misc, arg-type]


@pytest.mark.parametrize("call", [sigsoftmax.log_probs, sigsoftmax.probs], ids=lambda call: call.__name__)
def test_logits_are_the_input(call: Callable[..., torch.Tensor]) -> None:
    logits = torch.randn(3, V)
    with pytest.warns(
        DeprecationWarning, match=rf"{call.__name__}\(logits=\.\.\.\) is {call.__name__}\(input=\.\.\.\)"
    ):
        before = call(logits=logits, function="relu", dim=0)
    assert torch.equal(before, call(logits, 0, function="relu"))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: OutputLayer(D, V, nn.Softmax(-1)),
            "bias must be True or False, got Softmax; an output function is given",
        ),
        (lambda: MixtureOutputLayer(D, D, V, K, 1), "bias must be True or False, got int; an output function is given"),
        (lambda: CrossEntropyLoss(nn.Softmax(-1)), "weight must be a tensor with one weight per class, got Softmax"),
        (lambda: CrossEntropyLoss(torch.ones(2, V)), "one weight per class, got the shape (2, 8)"),
        (lambda: CrossEntropyLoss(WEIGHT, num_classes=9), "weight has 8 numbers, but num_classes is 9"),
    ],
)
def test_other_things_at_these_places_are_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        call()
