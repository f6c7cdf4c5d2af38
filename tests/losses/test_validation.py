"""Every error of the functions: its text says what was expected, what came and what to do.

Shapes: N = 3 tokens, K = 2 components, V = 5 classes, d = 4 features.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tables import every_backend

import sigsoftmax
from sigsoftmax.contract import value_checks

N, K, V, D = 3, 2, 5, 4
Call = Callable[..., Any]


def cross_entropy(**changes: Any) -> Any:
    options: dict[str, Any] = {"input": torch.zeros(N, V), "target": torch.zeros(N, dtype=torch.long)}
    return sigsoftmax.cross_entropy(**{**options, "function": "sigsoftmax", **changes})


def linear(**changes: Any) -> Any:
    options: dict[str, Any] = {
        "input": torch.zeros(N, D),
        "linear_weight": torch.zeros(V, D),
        "target": torch.zeros(N, dtype=torch.long),
    }
    return sigsoftmax.linear_cross_entropy(**{**options, "function": "sigsoftmax", **changes})


def mixture(**changes: Any) -> Any:
    options: dict[str, Any] = {
        "input": torch.zeros(N, K, D),
        "prior_logits": torch.zeros(N, K),
        "linear_weight": torch.zeros(V, D),
        "target": torch.zeros(N, dtype=torch.long),
    }
    return sigsoftmax.mixture_cross_entropy(**{**options, "function": "sigsoftmax", **changes})


def mixture_log_probs(**changes: Any) -> Any:
    options: dict[str, Any] = {
        "input": torch.zeros(N, K, D),
        "prior_logits": torch.zeros(N, K),
        "linear_weight": torch.zeros(V, D),
    }
    return sigsoftmax.mixture_log_probs(**{**options, "function": "sigsoftmax", **changes})


def log_probs(**changes: Any) -> Any:
    return sigsoftmax.log_probs(**{"input": torch.zeros(N, V), "function": "sigsoftmax", **changes})


LOSSES = (cross_entropy, linear, mixture)
every_loss = pytest.mark.parametrize("call", LOSSES, ids=lambda call: call.__name__)


def refuses(call: Call, text: str, **changes: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        call(**changes)


@pytest.mark.parametrize("call", [*LOSSES, mixture_log_probs, log_probs], ids=lambda call: call.__name__)
def test_the_unchanged_calls_are_fine(call: Call) -> None:
    """So that what the tests below change is what is refused; all logits are equal."""
    expected = -math.log(V) if "log_probs" in call.__name__ else math.log(V)
    torch.testing.assert_close(call(), torch.full_like(call(), expected))


# Targets


@every_backend
@every_loss
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bad", [-1, V, -101, 2**40])
def test_a_target_out_of_range_is_named_with_its_row(call: Call, reduction: str, bad: int, backend: str) -> None:
    refuses(
        call,
        f"target {bad} at row 1 is out of range: expected a class in [0, 5) or ignore_index=-100 (2 such targets); "
        "check the vocabulary, or pass ignore_index",
        target=torch.tensor([0, bad, bad]),
        reduction=reduction,
        backend=backend,
    )


@every_backend
def test_the_row_of_a_bad_target_counts_through_all_dimensions(backend: str) -> None:
    target = torch.zeros(2, 3, dtype=torch.long)
    target[1, 1] = 9
    refuses(
        cross_entropy, "target 9 at row 4 is out of range", input=torch.zeros(2, V, 3), target=target, backend=backend
    )


@every_backend
@pytest.mark.parametrize("weight", [None, torch.ones(V)], ids=["no weight", "class weight"])
def test_a_bad_target_is_reported_whatever_else_is_asked(weight: torch.Tensor | None, backend: str) -> None:
    refuses(
        cross_entropy,
        "target 5 at row 0 is out of range: expected a class in [0, 5) or ignore_index=-7 (1 such targets)",
        target=torch.tensor([V, -7, 0]),
        ignore_index=-7,
        weight=weight,
        label_smoothing=0.1,
        backend=backend,
    )


@given(st.lists(st.integers(-10, 12), min_size=1, max_size=6))
def test_exactly_the_targets_out_of_range_are_refused(targets: list[int]) -> None:
    bad = [row for row, target in enumerate(targets) if target != -3 and not 0 <= target < V]
    options: dict[str, Any] = {"input": torch.zeros(len(targets), V), "target": torch.tensor(targets)}
    if bad:
        text = f"target {targets[bad[0]]} at row {bad[0]} "
        refuses(cross_entropy, text, ignore_index=-3, **options)
    else:
        assert cross_entropy(ignore_index=-3, reduction="sum", **options).isfinite()


@every_backend
@every_loss
def test_nan_probability_targets_are_refused_with_their_row(call: Call, backend: str) -> None:
    target = torch.full((N, V), 0.2)
    target[2, 1] = math.nan
    refuses(
        call,
        "probability targets must not be NaN, but row 2 has a NaN; check how the targets were made",
        target=target,
        backend=backend,
    )


@every_loss
def test_targets_of_a_wrong_dtype_or_shape(call: Call) -> None:
    refuses(call, "one class index per token, shape (3,), got (2,)", target=torch.zeros(2, dtype=torch.long))
    refuses(call, "one class index per token, shape (3,), got (3, 1)", target=torch.zeros(N, 1, dtype=torch.long))
    refuses(
        call,
        "probability targets must have a number per token and class, shape (3, 5) (classes last), got (3,); "
        "class indices must be integers, got torch.float32",
        target=torch.zeros(N),
    )
    refuses(call, "shape (3, 5) (classes last), got (3, 4)", target=torch.zeros(N, 4))
    for dtype in (torch.bool, torch.complex64):
        text = f"target must hold class indices (int64) or probabilities (floating), got {dtype}"
        refuses(call, text, target=torch.zeros(N, dtype=dtype))


@every_loss
def test_something_that_is_no_tensor(call: Call) -> None:
    refuses(call, "input must be a tensor, got list", input=[[0.0] * D])
    refuses(call, "target must be a tensor, got list", target=[0, 0, 0])
    refuses(call, "weight must be a tensor, got list", weight=[1.0] * V)
    refuses(call, "token_weights must be a tensor, got float", token_weights=1.0)


@every_loss
def test_ignore_index_goes_with_indices_alone(call: Call) -> None:
    text = "ignore_index goes with class indices, not with probability targets"
    refuses(call, text, target=torch.full((N, V), 0.2), ignore_index=0)


# Weights


@every_backend
@every_loss
@pytest.mark.parametrize("bad", [-0.5, math.nan, math.inf])
def test_class_weights_that_are_negative_or_not_finite_are_refused(call: Call, bad: float, backend: str) -> None:
    weight = torch.ones(V)
    weight[3] = bad
    text = f"class weights must be finite and not negative, but weight[3] is {bad:g}"
    refuses(call, text, weight=weight, backend=backend)


@every_loss
def test_weights_of_a_wrong_shape_or_dtype(call: Call) -> None:
    refuses(call, "weight must hold one number per class, shape (5,), got (4,)", weight=torch.ones(4))
    refuses(
        call, "weight must be floating point, got torch.int64; convert it with .float()", weight=torch.ones(V).long()
    )
    text = "token_weights must have the shape (3,), one number per token, got (3, 1)"
    refuses(call, text, token_weights=torch.ones(N, 1))
    refuses(call, "token_weights must be floating point, got torch.int64", token_weights=torch.ones(N).long())


# Numbers and names


@every_loss
def test_options_out_of_their_range(call: Call) -> None:
    refuses(call, "reduction must be one of 'none', 'mean', 'sum', got 'average'", reduction="average")
    for smoothing in (-0.1, 1.1, math.nan):
        refuses(call, f"label_smoothing must lie in [0, 1], got {smoothing}", label_smoothing=smoothing)
    for z_loss in (-1.0, math.inf, math.nan):
        refuses(call, f"z_loss must be a finite number >= 0, got {z_loss}", z_loss=z_loss)
    for chunk_bytes in (0, -1, 2.5, True, "32M"):
        refuses(call, f"chunk_bytes must be a positive number of bytes, got {chunk_bytes!r}", chunk_bytes=chunk_bytes)
    refuses(call, "unknown backend 'fast' (the argument backend=); known: reference, ", backend="fast")
    refuses(call, "unknown extra 'perplexity'; known: log_normalizer, argmax, entropy", extras=("perplexity",))
    refuses(call, "unknown output function 'sofmax' (did you mean 'softmax'?); the known ones are", function="sofmax")


def test_log_probabilities_know_the_log_normalizer_alone() -> None:
    refuses(mixture_log_probs, "unknown extra 'argmax'; known: log_normalizer", extras=("log_normalizer", "argmax"))


@every_loss
@pytest.mark.parametrize("name", ["label_smoothing", "z_loss"])
def test_what_only_reads_as_a_number_is_none(call: Call, name: str) -> None:
    for value in (True, "0.1", None, [0.1]):
        refuses(call, f"{name} must be a number, got {value!r}", **{name: value})
    # Its gradient would be missing, and nobody would hear of it.
    learned = torch.tensor(0.1, requires_grad=True)
    refuses(call, f"pass {name}.item() or detach it", **{name: learned})
    assert torch.equal(call(**{name: learned.detach()}), call(**{name: learned.item()}))


@every_loss
def test_an_ignored_index_has_64_bits(call: Call) -> None:
    refuses(call, f"ignore_index must be a whole number of 64 bits, got {2**63}", ignore_index=2**63)


@every_loss
def test_extras_given_as_one_name_are_not_taken_for_letters(call: Call) -> None:
    refuses(call, "extras must be a sequence of names, like ('log_normalizer',), got 'argmax'", extras="argmax")


@pytest.mark.parametrize("call", [linear, mixture], ids=lambda call: call.__name__)
def test_unknown_ways_to_sum_the_weights_gradient(call: Call) -> None:
    text = "weight_gradient must be one of 'auto', 'fast', 'buffered', 'exact', got 'quick'"
    refuses(call, text, weight_gradient="quick")


@pytest.mark.parametrize("call", [mixture, mixture_log_probs], ids=lambda call: call.__name__)
@pytest.mark.parametrize("floor", [-1e-8, math.inf, math.nan])
def test_floor_out_of_its_range(call: Call, floor: float) -> None:
    refuses(call, f"floor must be a finite number >= 0, got {floor}", floor=floor)


def test_other_functions_refuse_what_the_losses_refuse() -> None:
    refuses(log_probs, "unknown backend 'fast' (the argument backend=)", backend="fast")
    refuses(mixture_log_probs, "unknown backend 'fast' (the argument backend=)", backend="fast")
    refuses(mixture_log_probs, "chunk_bytes must be a positive number of bytes, got 0", chunk_bytes=0)
    refuses(log_probs, "unknown output function 'nothing'", function="nothing")
    refuses(mixture, "unknown output function 'nothing'", prior_function="nothing")
    refuses(log_probs, "function must be a name or an OutputFunction, got NoneType", function=None)


# Shapes and dtypes of the inputs


def test_logits_of_a_wrong_shape_or_dtype() -> None:
    refuses(cross_entropy, "input must be floating point, got torch.int64", input=torch.zeros(N, V).long())
    refuses(cross_entropy, "input must have a dimension of classes, got a scalar", input=torch.tensor(1.0))
    refuses(cross_entropy, "input has no classes; the dimension of classes must not be empty", input=torch.zeros(N, 0))
    refuses(log_probs, "input has no classes; the dimension of classes must not be empty", input=torch.zeros(N, 0))
    refuses(log_probs, "input must be floating point, got torch.int32", input=torch.zeros(N, V).int())
    refuses(log_probs, "input must be a tensor, got list", input=[1.0, 2.0])


@pytest.mark.parametrize("dim", [2, -3, 5])
def test_dim_out_of_range(dim: int) -> None:
    refuses(cross_entropy, f"dim must lie in [-2, 1] for a tensor of shape (3, 5), got {dim}", dim=dim)
    refuses(log_probs, f"dim must lie in [-2, 1] for a tensor of shape (3, 5), got {dim}", dim=dim)


@pytest.mark.parametrize("call", [linear, mixture, mixture_log_probs], ids=lambda call: call.__name__)
def test_output_matrices_of_a_wrong_shape_or_dtype(call: Call) -> None:
    shape = "(..., features)" if call is linear else "(..., components, features)"
    size = "(3, 4)" if call is linear else "(3, 2, 4)"
    refuses(
        call,
        f"input has 4 features but linear_weight has 6: expected {shape} and (classes, features), "
        f"got {size} and (5, 6)",
        linear_weight=torch.zeros(V, 6),
    )
    text = "linear_weight must have the shape (classes, features), got (4,)"
    refuses(call, text, linear_weight=torch.zeros(D))
    refuses(call, "linear_weight must be floating point, got torch.int64", linear_weight=torch.zeros(V, D).long())
    refuses(call, "linear_weight has no classes", linear_weight=torch.zeros(0, D))
    text = "linear_bias must hold one number per class, shape (5,), got (1, 5)"
    refuses(call, text, linear_bias=torch.zeros(1, V))
    refuses(call, "linear_bias must be floating point, got torch.int64", linear_bias=torch.zeros(V).long())
    refuses(call, "input must be floating point, got torch.int64", input=torch.zeros(N, K, D).long())


def test_inputs_with_too_few_dimensions() -> None:
    refuses(linear, "input must have the shape (..., features), got ()", input=torch.tensor(1.0))
    refuses(mixture, "input must have the shape (..., components, features), got (4,)", input=torch.zeros(D))


@pytest.mark.parametrize("call", [mixture, mixture_log_probs], ids=lambda call: call.__name__)
def test_mixtures_whose_components_differ(call: Call) -> None:
    refuses(
        call,
        "prior_logits must hold one number per token and component, shape (3, 2) for an input of shape (3, 2, 4) "
        "(..., components, features), got (3, 3)",
        prior_logits=torch.zeros(N, 3),
    )
    refuses(call, "prior_logits must be floating point, got torch.int64", prior_logits=torch.zeros(N, K).long())
    refuses(
        call,
        "a mixture needs at least one component, got an input with none",
        input=torch.zeros(N, 0, D),
        prior_logits=torch.zeros(N, 0),
    )


def test_parameters_per_class_must_fit() -> None:
    function = sigsoftmax.OutputFunction("shifted_sigsoftmax", b=torch.zeros(V + 1))
    for call in (cross_entropy, linear, mixture, mixture_log_probs, log_probs):
        refuses(call, "parameter 'b' of 'shifted_sigsoftmax' has 6 values, but there are 5 classes", function=function)


# Devices


@every_loss
def test_tensors_on_another_device_are_named(call: Call) -> None:
    elsewhere = {
        "target": torch.zeros(N, dtype=torch.long, device="meta"),
        "weight": torch.ones(V, device="meta"),
        "token_weights": torch.ones(N, device="meta"),
    }
    if call is not cross_entropy:
        elsewhere["linear_weight"] = torch.zeros(V, D, device="meta")
        elsewhere["linear_bias"] = torch.zeros(V, device="meta")
    if call is mixture:
        elsewhere["prior_logits"] = torch.zeros(N, K, device="meta")
    for name, tensor in elsewhere.items():
        refuses(call, f"{name} is on meta, but the input is on cpu; move it there", **{name: tensor})


def test_full_messages_on_other_devices_are_asked_for_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the CPU a value is not read back, unless the environment says so."""
    condition = torch.zeros((), dtype=torch.bool)
    with pytest.raises(ValueError, match="the message"):
        value_checks._require(condition, lambda: "the message")
    elsewhere = torch.zeros((), dtype=torch.bool, device="meta")
    monkeypatch.delenv("SIGSOFTMAX_CHECK", raising=False)
    read: list[str] = []
    value_checks._require(elsewhere, lambda: read.append("message") or "the message")
    assert read == []
    monkeypatch.setenv("SIGSOFTMAX_CHECK", "yes")
    with pytest.raises(ValueError, match="SIGSOFTMAX_CHECK must be 1 or 0, got 'yes'"):
        value_checks._require(elsewhere, lambda: "the message")
