"""The backend that computes, who chose it, and the message when one cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from tests.recording import record_results
from tests.tables import BACKENDS, every_backend
from torch import Tensor

import sigsoftmax
from sigsoftmax.backends import blocked
from sigsoftmax.backends.triton import lowering as triton_lowering
from sigsoftmax.contract.problem import Refusal
from sigsoftmax.contract.signature import BACKEND_VARIABLE
from sigsoftmax.losses import lowering

Z = torch.randn(3, 5)
TARGET = torch.tensor([0, 1, 2])


def loss(backend: str | None = None, **options: Any) -> Tensor:
    return sigsoftmax.cross_entropy(Z, TARGET, function="sigsoftmax", backend=backend, **options)


def mixture(backend: str | None = None) -> Tensor:
    return sigsoftmax.mixture_cross_entropy(
        torch.randn(3, 2, 4), torch.randn(3, 2), torch.randn(5, 4), TARGET, function="sigsoftmax", backend=backend
    )


def mixture_log_probs(backend: str | None = None) -> Tensor:
    return sigsoftmax.mixture_log_probs(
        torch.randn(3, 2, 4), torch.randn(3, 2), torch.randn(5, 4), function="sigsoftmax", backend=backend
    )


def linear(backend: str | None = None) -> Tensor:
    return sigsoftmax.linear_cross_entropy(
        torch.randn(3, 4), torch.randn(5, 4), TARGET, function="sigsoftmax", backend=backend
    )


def log_probs(backend: str | None = None) -> Tensor:
    return sigsoftmax.log_probs(Z, function="sigsoftmax", backend=backend)


every_operation = pytest.mark.parametrize(
    "operation", [loss, linear, mixture, mixture_log_probs, log_probs], ids=lambda operation: operation.__name__
)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(lowering, "_last", None)
    monkeypatch.setattr(lowering, "_lowered", {})


def test_nothing_to_explain_before_the_first_operation() -> None:
    assert sigsoftmax.explain() is None


def test_the_backends_of_the_table_exist() -> None:
    assert set(BACKENDS) <= {lowering.REFERENCE, *lowering.BACKENDS}


@every_operation
def test_the_default_is_the_fast_one(operation: Callable[..., Tensor]) -> None:
    operation()
    assert str(sigsoftmax.explain()).startswith("blocked (chosen by default)")


@every_operation
@every_backend
def test_the_argument_picks(operation: Callable[..., Tensor], backend: str) -> None:
    operation(backend=backend)
    decision = sigsoftmax.explain()
    assert decision is not None
    assert (decision.backend, decision.chosen_by, decision.refused) == (backend, "the argument backend=", {})
    assert str(decision) == f"{backend} (chosen by the argument backend=): {decision.path}"


@every_operation
@every_backend
def test_the_environment_picks(operation: Callable[..., Tensor], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGSOFTMAX_BACKEND", backend)
    operation()
    assert str(sigsoftmax.explain()).startswith(f"{backend} (chosen by the environment variable SIGSOFTMAX_BACKEND): ")


def test_the_argument_outweighs_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "reference")
    loss(backend="blocked")
    assert str(sigsoftmax.explain()).startswith("blocked (chosen by the argument backend=)")


def test_an_empty_environment_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "")
    loss()
    assert str(sigsoftmax.explain()).startswith("blocked (chosen by default)")


@every_operation
def test_an_unknown_backend_is_refused_and_the_known_ones_are_listed(
    operation: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"^unknown backend 'cuda' \(the argument backend=\); known: reference, "):
        operation(backend="cuda")
    monkeypatch.setenv(BACKEND_VARIABLE, "quick")
    with pytest.raises(ValueError, match=r"^unknown backend 'quick' \(the environment variable SIGSOFTMAX_BACKEND\);"):
        operation()


def test_explain_says_why_a_fast_backend_was_refused() -> None:
    torch.func.vmap(lambda z: sigsoftmax.log_sigsoftmax(z))(Z)
    decision = sigsoftmax.explain()
    assert decision is not None
    assert (decision.backend, decision.chosen_by) == ("reference", "the inputs")
    lines = str(decision).splitlines()
    assert lines[0] == "reference (chosen by the inputs): plain torch with the logits of all tokens at once"
    reason = "the inputs are inside torch.func (vmap, grad, jvp, ...), which the fast backends do not support"
    assert lines[1:] == [f"  not {name}: {reason}" for name in lowering.BACKENDS]


def test_the_kernels_are_refused_on_gpus_that_they_are_not_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    problem = mock.Mock(device=torch.device("cuda"))
    refusal = triton_lowering.lower_loss(problem)
    assert isinstance(refusal, Refusal)
    assert "this torch is built for AMD's" in refusal.reason


def test_targets_with_a_gradient_go_to_the_reference_or_are_refused() -> None:
    target = torch.softmax(Z, -1).requires_grad_()
    result = sigsoftmax.cross_entropy(Z, target, function="softmax")
    assert result.requires_grad
    decision = sigsoftmax.explain()
    assert decision is not None
    assert decision.backend == "reference"
    assert "require a gradient need plain autograd" in decision.refused["blocked"]
    with pytest.raises(ValueError, match=r"backend 'blocked' cannot be used: .*; pass backend='reference'"):
        sigsoftmax.cross_entropy(Z, target, function="softmax", backend="blocked")
    with torch.no_grad():
        sigsoftmax.cross_entropy(Z, target, function="softmax")
    assert str(sigsoftmax.explain()).startswith("blocked (chosen by default)")


def test_tensors_from_outside_a_transform() -> None:
    """torch.func sees them all the same. The member is used here for the first time, and works outside afterwards."""
    z, member = Z.clone().requires_grad_(), "gss(k=0.31718)"

    def by_factor(factor: Tensor) -> Tensor:
        return factor * sigsoftmax.cross_entropy(z, TARGET, function=member)

    slopes = [torch.func.grad(by_factor)(torch.tensor(2.0)), torch.func.vmap(by_factor)(torch.ones(2))[0]]
    assert str(sigsoftmax.explain()).startswith("reference")
    expected = sigsoftmax.cross_entropy(z, TARGET, function=member)
    assert str(sigsoftmax.explain()).startswith("blocked (chosen by default)")
    for slope in slopes:
        torch.testing.assert_close(slope, expected)


def test_an_environment_that_asks_for_a_fast_backend_is_not_overridden_silently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "blocked")
    with pytest.raises(ValueError, match=r"backend 'blocked' cannot be used: the inputs are inside torch\.func"):
        torch.func.vmap(lambda z: sigsoftmax.log_sigsoftmax(z))(Z)


@every_backend
def test_the_backend_that_is_named_is_the_one_that_runs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The routines of a fast backend are made, or not made."""
    made = record_results(monkeypatch, blocked, "routines")
    loss(backend=backend)
    assert len(made) == (1 if backend == "blocked" else 0)
