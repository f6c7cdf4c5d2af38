"""Second derivatives of losses and log-probabilities of logits that the caller holds, as torch's own have them.

Shapes: N tokens, V classes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tables import Member, assert_same, every_member
from torch import Tensor, nn
from torch.nn import functional as F

import sigsoftmax
from sigsoftmax import OutputFunction, torch_internals

N, V = 5, 6
TARGET = torch.tensor([0, 3, -100, 5, 1])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "class weights": {"weight": torch.linspace(0.0, 2.0, V, dtype=torch.float64)},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.05},
    "all": {"weight": torch.linspace(0.1, 2.0, V, dtype=torch.float64), "label_smoothing": 0.2, "z_loss": 0.01},
    "probability targets": {"target": torch.softmax(torch.linspace(-2.0, 2.0, N * V).double().view(N, V), -1)},
}
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def loss_of(logits: Tensor, function: str | OutputFunction = "sigsoftmax", **options: Any) -> Tensor:
    options = {"target": TARGET, "backend": "blocked", **options}
    found: Tensor = sigsoftmax.cross_entropy(logits, function=function, **options)
    return found


@every_reduction
@every_option
@every_member
def test_gradgradcheck(member: Member, options: dict[str, Any], reduction: str) -> None:
    """By logits, token weights and learned parameters, and by the incoming gradient."""
    z, t, learned = leaf(N, V), torch.rand(N, dtype=torch.float64).requires_grad_(), member.learned(V)
    if member.name == "relu":
        # Logits on one side of its corner.
        z = z.detach().abs().add(0.1).requires_grad_()

    def call(z: Tensor, t: Tensor, *values: Tensor) -> Tensor:
        function = member.make(V, **dict(zip(learned, values, strict=True)))
        return loss_of(z, function, token_weights=t, reduction=reduction, **options)

    assert torch.autograd.gradgradcheck(call, (z, t, *learned.values()), fast_mode=True)


def test_gradgradcheck_of_log_probabilities() -> None:
    assert torch.autograd.gradgradcheck(
        lambda z: sigsoftmax.log_probs(z, function="sigsoftmax", backend="blocked"), (leaf(2, N, V),)
    )


@every_reduction
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_gradient_penalty_is_that_of_torch(reduction: str, smoothing: float) -> None:
    """The logits are those of a model, and nobody else holds them."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, V)).double()
    x = leaf(N, 3)

    def penalised(loss: Tensor) -> list[Tensor]:
        (by_x,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
        total = loss.sum() + by_x.square().sum()
        return list(torch.autograd.grad(total, [x, *model.parameters()]))

    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    actual = penalised(loss_of(model(x), "softmax", **options))
    for a, e in zip(actual, penalised(F.cross_entropy(model(x), TARGET, **options)), strict=True):
        assert_same(a, e, tolerance=1e-12)


def test_classes_in_another_dimension_and_extras() -> None:
    z, target = leaf(2, V, 3), torch.randint(V, (2, 3))

    def second(loss: Tensor) -> Tensor:
        (by_z,) = torch.autograd.grad(loss, z, create_graph=True)
        return torch.autograd.grad(by_z.square().sum(), z)[0]

    loss, extras = sigsoftmax.cross_entropy(z, target, function="softmax", extras=("argmax",), backend="blocked")
    assert not extras.argmax.requires_grad
    assert_same(second(loss), second(F.cross_entropy(z, target)), tolerance=1e-12)


@every_reduction
def test_an_operand_that_is_a_function_of_another_counts_once(reduction: str) -> None:
    found = []
    for backend in ("blocked", "reference"):
        z = torch.linspace(-2.0, 2.0, N * V, dtype=torch.float64).view(N, V).requires_grad_()
        loss = loss_of(z, token_weights=z.sigmoid().mean(-1), reduction=reduction, backend=backend)
        (by_z,) = torch.autograd.grad(loss.sum(), z, create_graph=True)
        found += [by_z, *torch.autograd.grad(by_z.square().sum(), z)]
    assert_same(found[0], found[2], tolerance=1e-12)
    assert_same(found[1], found[3], tolerance=1e-12)


@pytest.mark.parametrize("vectorize", [False, True])
def test_hessians(vectorize: bool) -> None:
    z = torch.randn(N, V, dtype=torch.float64)
    actual = torch.autograd.functional.hessian(lambda z: loss_of(z, "softmax"), z, vectorize=vectorize)
    assert_same(actual, torch.autograd.functional.hessian(lambda z: F.cross_entropy(z, TARGET), z), tolerance=1e-12)


def test_third_derivatives() -> None:
    def third(loss: Tensor, z: Tensor) -> Tensor:
        for _ in range(2):
            (by_z,) = torch.autograd.grad(loss, z, create_graph=True)
            loss = by_z.pow(3).sum()
        return torch.autograd.grad(loss, z)[0]

    z = leaf(N, V)
    assert_same(third(loss_of(z, "softmax"), z), third(F.cross_entropy(z, TARGET), z), tolerance=1e-12)


@every_reduction
def test_only_create_graph_leaves_the_fast_backend(reduction: str) -> None:
    z = leaf(N, V)
    loss = loss_of(z, reduction=reduction).sum()
    for retain in (True, False):
        (first,) = torch.autograd.grad(loss, z, retain_graph=retain)
        assert not first.requires_grad
    assert sigsoftmax.explain().backend == "blocked"
    (first,) = torch.autograd.grad(loss_of(z, reduction=reduction).sum(), z, create_graph=True)
    assert first.requires_grad
    decision = sigsoftmax.explain()
    assert (decision.backend, decision.chosen_by) == ("reference", "create_graph=True")
    assert "not blocked: its gradients cannot be differentiated again" in str(decision)


@pytest.mark.parametrize("create_graph", [False, True])
def test_logits_that_changed_after_the_loss_matter_to_second_derivatives_alone(create_graph: bool) -> None:
    z = leaf(N, V)
    logits = z * 1.0
    loss = loss_of(logits)
    (expected,) = torch.autograd.grad(loss_of(z * 1.0), z)
    with torch.no_grad():
        logits.mul_(3.0)
    # The public fallback refuses a change of any saved tensor, needed or not.
    if create_graph or torch_internals._unpack_saved is None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, z, create_graph=create_graph)
    else:
        assert torch.equal(torch.autograd.grad(loss, z)[0], expected)


def test_low_precision_under_autocast() -> None:
    z = torch.randn(N, V).bfloat16().requires_grad_()
    exact = z.detach().double().requires_grad_()
    found = []
    for logits in (z, exact):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(logits)
        (by_logits,) = torch.autograd.grad(loss, logits, create_graph=True)
        assert by_logits.dtype == logits.dtype
        found += torch.autograd.grad(by_logits.square().sum(), logits)
    assert found[0].dtype == torch.bfloat16
    assert_same(found[0], found[1], tolerance=0.02)


def test_a_compiled_loss_raises() -> None:
    """Operations inside torch.compile have no second derivative, and never one of zeros."""
    torch.compiler.reset()
    z = leaf(N, V)
    # The gradient that torch 2.12 returns has no graph; other versions of torch raise in the second backward.
    of_torch = "support double backward|does not require grad"
    for backend, message in (("eager", "no second derivative"), ("aot_eager", of_torch)):
        compiled = torch.compile(lambda z: sigsoftmax.cross_entropy(z, TARGET, function="sigsoftmax"), backend=backend)
        (by_z,) = torch.autograd.grad(compiled(z), z, create_graph=True)
        with pytest.raises(RuntimeError, match=message):
            by_z.square().sum().backward()
    torch.compiler.reset()
