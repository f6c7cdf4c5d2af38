"""Losses by fused paths, against the reference in float64, and calls that no fused path computes.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.backends.triton.device import DEVICE, IS_INTERPRETED
from tests.backends.triton.test_losses import DTYPES, check, cross_entropy, linear, mixture, strided
from tests.tables import LEAST, gradients
from torch import Tensor

import sigsoftmax
from sigsoftmax import OutputFunction
from sigsoftmax.backends.chunked import chunk_plan
from sigsoftmax.backends.triton import fused_loss
from sigsoftmax.contract.problem import LossPath

N, K, V, D = 7, 3, 48, 5
"""V is a multiple of what rows are aligned to."""
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "z-loss": {"z_loss": 0.05},
    "ignored": {"ignore_index": 3},
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
pytestmark = pytest.mark.usefixtures("_fresh_memory_is_nan", "fused_paths")


def target() -> Tensor:
    y = torch.randint(V, (N,))
    y[::3] = -100
    y[1] = 3
    return y


# Right results


@every_dtype
@every_option
@pytest.mark.parametrize("member", ["softmax(alpha=1.5)", "sigsoftmax", "shifted_sigsoftmax(b=1.3)"])
def test_logits(member: str, options: dict[str, Any], dtype: torch.dtype, fused_paths: list[LossPath]) -> None:
    y = target()
    if "ignore_index" in options:
        y[y == -100] = 3

    def loss(logits: Tensor, function: OutputFunction, **options: Any) -> Any:
        return cross_entropy(logits, function=member, **options)

    check(loss, [3.0 * torch.randn(N, V)], dtype, target=y, **options)
    assert len(fused_paths) == 1


@every_dtype
@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products(has_bias: bool, scale: float, dtype: torch.dtype, fused_paths: list[LossPath]) -> None:
    inputs = [scale * torch.randn(N, D), torch.randn(V, D), torch.randn(V)]
    if has_bias:
        check(linear, inputs, dtype, target=target(), z_loss=0.01)
    else:
        check(sigsoftmax.linear_cross_entropy, inputs[:2], dtype, target=target())
    assert len(fused_paths) == 1


@every_dtype
@every_option
@pytest.mark.parametrize("chunk_tokens", [N, 3, 1])
def test_mixtures(chunk_tokens: int, options: dict[str, Any], dtype: torch.dtype, fused_paths: list[LossPath]) -> None:
    y = target()
    if "ignore_index" in options:
        y[y == -100] = 3
    inputs = [torch.randn(N, K, D), 2.0 * torch.randn(N, K), torch.randn(V, D), torch.randn(V)]
    check(
        mixture,
        inputs,
        dtype,
        target=y,
        prior_function="sigsoftmax",
        chunk_bytes=chunk_tokens * K * V * dtype.itemsize,
        weight_gradient="buffered",
        **options,
    )
    assert len(fused_paths) == 1


@pytest.mark.parametrize("options", [{"floor": 1e-3}, {"weight_gradient": "fast"}], ids=["floor", "fast"])
@pytest.mark.parametrize("prior", ["softmax", "gss(k=0.3)", "relu"])
def test_mixtures_with_other_priors(prior: str, options: dict[str, Any], fused_paths: list[LossPath]) -> None:
    inputs = [torch.randn(N, K, D), 2.0 * torch.randn(N, K), torch.randn(V, D), torch.randn(V)]
    check(mixture, inputs, torch.float32, target=target(), prior_function=prior, **options)
    assert len(fused_paths) == 1


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_any_number_of_classes(
    has_bias: bool, alignment: int, fused_paths: list[LossPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits with aligned rows, which have room after the last class."""
    monkeypatch.setattr(chunk_plan, "row_alignment", lambda device: alignment)
    odd, y = V - 11, torch.randint(V - 11, (N,))
    inputs = [torch.randn(N, D), torch.randn(odd, D), torch.randn(odd)]
    mixed = [torch.randn(N, K, D), torch.randn(N, K), *inputs[1:]]
    if has_bias:
        check(linear, inputs, torch.float32, target=y)
        check(mixture, mixed, torch.float32, target=y, chunk_bytes=2 * K * V * 4)
    else:
        check(sigsoftmax.linear_cross_entropy, inputs[:2], torch.float32, target=y)
        check(sigsoftmax.mixture_cross_entropy, mixed[:3], torch.float32, target=y, chunk_bytes=2 * K * V * 4)
    assert len(fused_paths) == 2


HALF = torch.float16 if IS_INTERPRETED else torch.bfloat16


@pytest.mark.parametrize("is_autocast", [True, False])
def test_weights_of_another_dtype(is_autocast: bool, fused_paths: list[LossPath]) -> None:
    """Their gradients are theirs, and so is the loss under autocast."""
    hidden = torch.randn(N, K, D).to(HALF).to(DEVICE, torch.float32 if is_autocast else HALF).requires_grad_()
    prior, weight, bias = leaves(N, K), leaves(V, D), leaves(V)
    tensors, y = [hidden, prior, weight, bias], target().to(DEVICE)

    def results(backend: str) -> list[Tensor]:
        with torch.autocast(DEVICE.type, HALF, enabled=is_autocast):
            options: dict[str, Any] = {"function": "sigsoftmax", "linear_bias": bias, "backend": backend}
            mixed = sigsoftmax.mixture_cross_entropy(hidden, prior, weight, y, chunk_bytes=K * V * 4, **options)
            alone = sigsoftmax.linear_cross_entropy(hidden[:, 0].contiguous(), weight, y, **options)
        total = mixed + alone
        return [mixed.detach(), alone.detach(), *torch.autograd.grad(total, tensors)]

    expected = results("reference")
    for a, b in zip(results("triton"), expected, strict=True):
        assert a.dtype == b.dtype
        assert a.dtype == (torch.float32 if is_autocast or a.shape in (weight.shape, bias.shape, prior.shape) else HALF)
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert len(fused_paths) == 2


def test_masks_and_rows_that_do_not_count(fused_paths: list[LossPath]) -> None:
    logits = torch.randn(N, V)
    logits[:, 5:9] = LEAST
    logits[0] = torch.nan
    y = target()
    y[1:] = y[1:].where(~((y[1:] >= 5) & (y[1:] < 9)), torch.tensor(4))
    _, (by_logits,) = check(cross_entropy, [logits], torch.float32, target=y)
    assert (by_logits[0] == 0).all()
    assert (by_logits[:, 5:9] == 0).all()
    assert len(fused_paths) == 1


@pytest.mark.parametrize("alignment", [1, 16])
def test_a_single_token(alignment: int, fused_paths: list[LossPath], monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, or left for the last chunk; one row is contiguous, whatever comes after it."""
    monkeypatch.setattr(chunk_plan, "row_alignment", lambda device: alignment)
    odd = V - 11
    for options in ({}, {"reduction": "sum"}):
        check(
            linear,
            [torch.randn(1, D), torch.randn(odd, D), torch.randn(odd)],
            torch.float32,
            target=torch.tensor([7]),
            **options,
        )
    inputs = [torch.randn(3, 1, D), torch.randn(3, 1), torch.randn(odd, D), torch.randn(odd)]
    check(mixture, inputs, torch.float32, target=torch.tensor([2, -100, odd - 1]), chunk_bytes=2 * V * 4)
    assert len(fused_paths) == 3


@pytest.mark.parametrize("features", [0, 1])
def test_features_that_are_few_or_none(features: int, fused_paths: list[LossPath]) -> None:
    inputs = [torch.randn(N, K, features), torch.randn(N, K), torch.randn(V, features), torch.randn(V)]
    check(mixture, inputs, torch.float32, target=target())
    assert len(fused_paths) == 1


def test_a_prior_of_the_users_own(fused_paths: list[LossPath]) -> None:
    sigsoftmax.register_function("cubic_prior", lambda z: z + z**3)
    inputs = [torch.randn(N, K, D), torch.randn(N, K), torch.randn(V, D), torch.randn(V)]
    check(mixture, inputs, torch.float32, target=target(), prior_function="cubic_prior")
    assert not fused_paths


def test_leading_dimensions(fused_paths: list[LossPath]) -> None:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Any:
        shaped = hidden.view(7, 1, D)
        return sigsoftmax.linear_cross_entropy(shaped, weight, target.view(7, 1), **options)

    check(loss, [torch.randn(N, D), torch.randn(V, D)], torch.float32, target=target())
    assert len(fused_paths) == 1


@pytest.mark.parametrize("chunk_tokens", [1, 3])
@pytest.mark.parametrize("steps", [3, 6])
def test_leading_dimensions_of_a_mixture_in_several_chunks(
    steps: int, chunk_tokens: int, fused_paths: list[LossPath]
) -> None:
    """A chunk begins at a token, not at a time step."""

    def loss(hidden: Tensor, prior: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Any:
        shaped = hidden.view(steps, 2, K, D), prior.view(steps, 2, K)
        return sigsoftmax.mixture_cross_entropy(*shaped, weight, target.view(steps, 2), **options)

    inputs = [torch.randn(2 * steps, K, D), torch.randn(2 * steps, K), torch.randn(V, D)]
    y = torch.randint(V, (2 * steps,))
    check(loss, inputs, torch.float32, target=y, chunk_bytes=chunk_tokens * K * V * 4)
    assert len(fused_paths) == 1


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_token_counts(reduction: str, fused_paths: list[LossPath]) -> None:
    hidden, prior, weight = leaves(N, K, D), leaves(N, K), leaves(V, D)
    y = torch.full((N,), -100, device=DEVICE)
    options: dict[str, Any] = {"function": "sigsoftmax", "reduction": reduction, **TRITON}
    for loss in (
        sigsoftmax.mixture_cross_entropy(hidden, prior, weight, y, **options),
        sigsoftmax.linear_cross_entropy(hidden[:, 0].contiguous(), weight, y, **options),
    ):
        assert loss.isnan() if reduction == "mean" else loss == 0
        for gradient in torch.autograd.grad(loss, [hidden, weight]):
            assert (gradient == 0).all()
    assert len(fused_paths) == 2


# The same call again

TRITON: dict[str, Any] = {"backend": "triton"}


def leaves(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype).requires_grad_()


def test_a_repeated_call_gives_the_same_bits_and_says_who_computed_it(fused_paths: list[LossPath]) -> None:
    hidden, weight, y = leaves(N, D), leaves(V, D), target().to(DEVICE)

    def results() -> list[Tensor]:
        loss = sigsoftmax.linear_cross_entropy(hidden, weight, y, function="sigsoftmax", **TRITON)
        return [loss.detach(), *torch.autograd.grad(loss, [hidden, weight])]

    first = results()
    sigsoftmax.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]), function="softmax", backend="reference")
    for found, expected in zip(results(), first, strict=True):
        assert torch.equal(found, expected)
    decision = sigsoftmax.explain()
    assert decision is not None
    assert decision.backend == "triton"
    assert len(fused_paths) == 2
    assert fused_paths[0] is fused_paths[1]


def test_gradients_are_scaled_and_kept(fused_paths: list[LossPath]) -> None:
    inputs = [leaves(N, K, D), leaves(N, K), leaves(V, D)]
    loss = sigsoftmax.mixture_cross_entropy(*inputs, target().to(DEVICE), function="sigsoftmax", **TRITON)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    half = torch.autograd.grad(0.5 * loss, inputs, retain_graph=True)
    again = torch.autograd.grad(loss, inputs)
    for a, b, c in zip(first, half, again, strict=True):
        assert torch.equal(0.5 * a, b)
        assert torch.equal(a, c)
    assert fused_paths


def test_a_loss_that_its_owner_changes(fused_paths: list[LossPath]) -> None:
    logits = leaves(N, V)
    loss = sigsoftmax.cross_entropy(logits, target().to(DEVICE), function="sigsoftmax", **TRITON)
    (expected,) = torch.autograd.grad(loss, [logits], retain_graph=True)
    loss /= 2.0
    loss += 1.0
    (found,) = torch.autograd.grad(loss, [logits])
    assert torch.equal(found, 0.5 * expected)
    assert fused_paths


def test_numbers_in_tensors_are_read_anew(fused_paths: list[LossPath]) -> None:
    logits, y, z_loss = leaves(N, V), target().to(DEVICE), torch.tensor(0.1)

    def loss() -> float:
        return sigsoftmax.cross_entropy(logits, y, function="sigsoftmax", z_loss=z_loss, **TRITON).item()

    first = loss()
    z_loss.zero_()
    assert loss() < first
    before, after = fused_paths
    assert before is not after


@pytest.mark.parametrize("wanted", range(4))
def test_gradients_that_are_not_wanted(wanted: int, fused_paths: list[LossPath]) -> None:
    inputs = [leaves(N, K, D), leaves(N, K), leaves(V, D), leaves(V)]
    y = target().to(DEVICE)

    def loss() -> Tensor:
        hidden, prior, weight, bias = inputs
        options: dict[str, Any] = {"function": "sigsoftmax", "linear_bias": bias, **TRITON}
        return sigsoftmax.mixture_cross_entropy(hidden, prior, weight, y, **options)

    expected = torch.autograd.grad(loss(), inputs)[wanted]
    for i, tensor in enumerate(inputs):
        tensor.requires_grad_(i == wanted)
    (found,) = torch.autograd.grad(loss(), [inputs[wanted]])
    assert torch.equal(found, expected)
    assert len(fused_paths) == 2


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_of_logits(reduction: str) -> None:
    logits, y = leaves(N, V), target().to(DEVICE)
    options: dict[str, Any] = {"function": "sigsoftmax", "reduction": reduction}
    found = []
    for backend in ("triton", "reference"):
        loss = sigsoftmax.cross_entropy(logits, y, backend=backend, **options)
        assert sigsoftmax.explain().backend == backend
        (by_logits,) = torch.autograd.grad(loss.sum(), [logits], create_graph=True)
        found += torch.autograd.grad(by_logits.square().sum(), [logits])
    assert torch.equal(*found)


def test_there_is_no_second_derivative_of_a_product(fused_paths: list[LossPath]) -> None:
    hidden, weight = leaves(N, D), leaves(V, D)
    loss = sigsoftmax.linear_cross_entropy(hidden, weight, target().to(DEVICE), function="sigsoftmax", **TRITON)
    (by_hidden,) = torch.autograd.grad(loss, [hidden], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(by_hidden.sum(), [hidden])
    assert fused_paths


# Calls that are computed in another way

Change = Callable[[dict[str, Any]], None]


def other(name: str, value: Any) -> Change:
    return lambda call: call.__setitem__(name, value)


OTHERS: dict[str, Change] = {
    "strided input": lambda call: call.update(input=strided(call["input"])),
    "strided targets": lambda call: call.update(target=strided(call["target"])),
    "no gradient": lambda call: call.update(input=call["input"].detach(), linear_weight=call["linear_weight"].detach()),
    "class weights": lambda call: call.update(weight=torch.ones(V, device=DEVICE)),
    "token weights": lambda call: call.update(token_weights=torch.ones(N, device=DEVICE)),
    "none": other("reduction", "none"),
    "extras": other("extras", ("argmax",)),
    "a parameter in a tensor": other("function", OutputFunction("gss", k=torch.tensor(0.3))),
    "a view of negative numbers": lambda call: call.update(
        input=torch._neg_view(call["input"].detach()).requires_grad_()
    ),
    "another member": other("function", "gss(k=0.3)"),
    "narrow targets": lambda call: call.update(target=call["target"].int()),
    "chunks": other("chunk_bytes", V * 4 * 2),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_other_calls_are_not_fused(change: Change, fused_paths: list[LossPath]) -> None:
    call: dict[str, Any] = {
        "input": leaves(N, D),
        "linear_weight": leaves(V, D),
        "target": target().to(DEVICE),
        "function": "sigsoftmax",
    }
    sigsoftmax.linear_cross_entropy(**call, **TRITON)
    assert len(fused_paths) == 1
    change(call)
    for _ in range(2):
        found = sigsoftmax.linear_cross_entropy(**call, **TRITON)
        expected = sigsoftmax.linear_cross_entropy(**call, backend="reference")
        if isinstance(found, tuple):
            found, expected = found[0], expected[0]
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-5)
    assert len(fused_paths) == 1


def test_many_tokens_with_short_rows_are_not_fused(
    fused_paths: list[LossPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_loss, "MOST_TOKENS", N - 1)
    logits, hidden, weight, y = leaves(N, V), leaves(N, D), leaves(V, D), target().to(DEVICE)
    for _ in range(2):
        loss = sigsoftmax.cross_entropy(logits, y, function="softmax", **TRITON)
        product = sigsoftmax.linear_cross_entropy(hidden, weight, y, function="softmax", **TRITON)
    assert gradients(loss, [logits])[0].isfinite().all()
    assert gradients(product, [hidden])[0].isfinite().all()
    assert not fused_paths


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("member", ["softmax", "sigsoftmax"])
def test_many_tokens_with_long_rows(
    member: str, reduction: str, fused_paths: list[LossPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_loss, "MOST_TOKENS", N - 1)
    # More tokens than a block has, the last of them not full.
    monkeypatch.setattr(fused_loss, "MANY_BLOCK", 8)
    classes = 33_001 if IS_INTERPRETED else 133_001
    y = torch.randint(classes, (21,))
    y[::5] = -100

    def loss(logits: Tensor, function: OutputFunction, **options: Any) -> Any:
        return cross_entropy(logits, function=member, **options)

    check(loss, [3.0 * torch.randn(21, classes)], torch.float32, target=y, reduction=reduction)
    assert len(fused_paths) == 1


def test_no_more_tokens_than_can_be_counted(fused_paths: list[LossPath], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_loss, "MOST_TOKENS", 1)
    monkeypatch.setattr(fused_loss, "MANY_TOKENS", N - 1)
    logits = leaves(N, 133_001)
    sigsoftmax.cross_entropy(logits, target().to(DEVICE), function="softmax", **TRITON)
    assert not fused_paths


def test_a_wrong_call_after_a_right_one() -> None:
    hidden, weight, y = leaves(N, D), leaves(V, D), target().to(DEVICE)
    options: dict[str, Any] = {"function": "sigsoftmax", **TRITON}
    sigsoftmax.linear_cross_entropy(hidden, weight, y, chunk_bytes=1 << 20, **options)
    for wrong, message in (
        ({"input": leaves(N, D + 1)}, "features"),
        ({"target": y[1:]}, "one class index per token"),
        ({"target": y.bool()}, "class indices"),
        ({"linear_weight": [1.0]}, "must be a tensor"),
        ({"reduction": "avg"}, "reduction"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"chunk_bytes": True}, "chunk_bytes"),
        ({"function": ["sigsoftmax"]}, "function"),
    ):
        call = {"input": hidden, "linear_weight": weight, "target": y, "chunk_bytes": 1 << 20, **options, **wrong}
        with pytest.raises(ValueError, match=message):
            sigsoftmax.linear_cross_entropy(**call)
