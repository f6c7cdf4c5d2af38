"""The public functions against torch (softmax) and against plain computations (every member), option by option.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tables import (
    BACKENDS,
    LEAST,
    MEMBERS,
    Member,
    assert_same,
    by_label,
    every_backend,
    every_dtype,
    every_member,
    frobenius_error,
    gradients,
    learned_members,
    option_grid,
    plain_log_prior,
    plain_loss,
    plain_token_losses,
)
from torch import Tensor
from torch.nn import functional as F

import sigsoftmax
from sigsoftmax import OutputFunction
from sigsoftmax.backends.chunked.chunk_plan import automatic_weight_gradient
from sigsoftmax.losses.extras import Extras

N, K, V, D = 7, 3, 5, 4
ALL_EXTRAS = ("log_normalizer", "argmax", "entropy")
FEW = [by_label[label] for label in ("softmax", "sigsoftmax", "shifted(b per class)", "relu", "user, phi alone")]
few_members = pytest.mark.parametrize("member", FEW, ids=str)


def normal(*shape: int, deviation: float = 2.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (deviation * torch.randn(*shape, dtype=torch.float64)).to(dtype)


def leaf(*shape: int, deviation: float = 2.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(*shape, deviation=deviation, dtype=dtype).requires_grad_()


def plain_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return hidden @ weight.t() + (0.0 if bias is None else bias)


# Probabilities


@every_backend
@every_member
def test_log_probs_are_phi_less_its_logsumexp(member: Member, backend: str) -> None:
    z = leaf(N, V, deviation=4.0)
    function = member.make(V)
    expected = torch.log_softmax(member.phi(z), -1)
    actual = sigsoftmax.log_probs(z, function=function, backend=backend)
    assert_same(actual, expected, tolerance=1e-11)
    assert_same(gradients(actual, [z])[0], gradients(expected, [z])[0], "gradient")
    assert_same(sigsoftmax.probs(z, function=function, backend=backend), expected.exp(), "probs")


@every_backend
def test_sigsoftmax_and_its_logarithm(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGSOFTMAX_BACKEND", backend)
    z = normal(N, V, 3)
    g = z.exp() * torch.sigmoid(z)
    for dim in (-1, 0, 1, 2):
        expected = g / g.sum(dim, keepdim=True)
        assert_same(sigsoftmax.sigsoftmax(z, dim), expected, f"dim {dim}", tolerance=1e-12)
        assert_same(sigsoftmax.log_sigsoftmax(z, dim=dim), expected.log(), f"log, dim {dim}", tolerance=1e-12)


@every_backend
@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2, -3, -4])
def test_dim_of_log_probs_is_torchs(backend: str, dim: int) -> None:
    z = leaf(2, 3, 4, 5)
    actual = sigsoftmax.log_probs(z, function="softmax", dim=dim, backend=backend)
    expected = torch.log_softmax(z, dim)
    assert_same(actual, expected, tolerance=1e-12)
    assert_same(gradients(actual, [z])[0], gradients(expected, [z])[0], "gradient")


@every_backend
@every_dtype
def test_log_probs_come_in_the_dtype_of_the_logits(dtype: torch.dtype, backend: str) -> None:
    z = normal(N, V, dtype=dtype).requires_grad_()
    actual = sigsoftmax.log_probs(z, function="softmax", backend=backend)
    expected = torch.log_softmax(z, -1)
    assert actual.dtype == dtype
    assert_same(actual, expected, tolerance=4 * torch.finfo(dtype).eps)
    (by_z,) = gradients(actual, [z])
    assert by_z.dtype == dtype


@every_backend
def test_log_probs_of_edge_shapes(backend: str) -> None:
    def log_probs(z: Tensor) -> Tensor:
        return sigsoftmax.log_probs(z, function="sigsoftmax", backend=backend)

    assert log_probs(torch.tensor(3.0)).shape == ()
    assert log_probs(torch.tensor(3.0)) == 0.0
    assert torch.equal(log_probs(torch.tensor([[-7.0], [7.0]])), torch.zeros(2, 1))
    assert log_probs(torch.empty(0, 4)).shape == (0, 4)
    assert log_probs(torch.empty(3, 0, 4)).shape == (3, 0, 4)


@every_backend
@pytest.mark.parametrize("member", [m for m in MEMBERS if not m.per_class], ids=str)
def test_a_mask_removes_its_class_whatever_phi_says(member: Member, backend: str) -> None:
    z = leaf(N, V)
    masked = z.detach().clone()
    masked[:, 2] = LEAST
    masked.requires_grad_()
    function = member.make(V)
    others = [0, 1, 3, 4]
    actual = sigsoftmax.log_probs(masked, function=function, backend=backend)
    expected = sigsoftmax.log_probs(z[:, others], function=function, backend="reference")
    assert (actual[:, 2] == LEAST).all()
    assert_same(actual[:, others], expected, tolerance=1e-12)
    probs = sigsoftmax.probs(masked, function=function, backend=backend)
    assert (probs[:, 2] == 0.0).all()
    by = torch.rand(N, 4, dtype=torch.float64)
    (by_masked,) = torch.autograd.grad(actual[:, others], masked, by)
    (by_z,) = torch.autograd.grad(expected, z, by)
    assert (by_masked[:, 2] == 0.0).all()
    assert_same(by_masked[:, others], by_z[:, others], "gradient")


# softmax is torch's

SHAPES: tuple[tuple[int, ...], ...] = ((6,), (4, 6), (1, 6), (2, 6, 3), (2, 6, 3, 4))


def index_target(shape: tuple[int, ...], classes: int) -> Tensor:
    return torch.randint(classes, shape[:1] * 0 if len(shape) == 1 else (shape[0], *shape[2:]))


@every_backend
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_softmax_cross_entropy_is_torchs(shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    """Shapes, kinds of targets, class weights, smoothing, ignored targets, reductions; values and gradients."""
    classes = shape[0] if len(shape) == 1 else shape[1]
    index = index_target(shape, classes)
    probabilities = torch.softmax(normal(*shape), 0 if len(shape) == 1 else 1).to(dtype)
    class_weight = (torch.rand(classes, dtype=torch.float64) + 0.1).to(dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype, 3 * torch.finfo(dtype).eps)
    for kind, weight, smoothing, reduction in itertools.product(
        ("index", "ignored", "probabilities"), (None, class_weight), (0.0, 0.2), ("mean", "sum", "none")
    ):
        z = leaf(*shape, dtype=dtype)
        options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
        target = probabilities if kind == "probabilities" else index
        if kind == "ignored":
            options["ignore_index"] = int(index.flatten()[0])
        label = f"{kind}, weight {weight is not None}, smoothing {smoothing}, {reduction}"
        expected = F.cross_entropy(z, target, weight, **options)
        actual = sigsoftmax.cross_entropy(z, target, weight, function="softmax", backend=backend, **options)
        assert actual.shape == expected.shape, label
        assert actual.dtype == expected.dtype == dtype, label
        if kind == "ignored" and index.numel() == 1 and dtype in (torch.bfloat16, torch.float16):
            continue
        assert_same(actual, expected, label, tolerance=tolerance)
        if expected.isnan().any():
            continue
        assert_same(gradients(actual, [z])[0], gradients(expected, [z])[0], f"{label}: gradient", tolerance=tolerance)


@every_backend
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_softmax_linear_cross_entropy_is_torchs(shape: tuple[int, ...], has_bias: bool, backend: str) -> None:
    classes = 9
    hidden, weight = leaf(*shape), leaf(classes, shape[-1])
    bias = leaf(classes) if has_bias else None
    inputs = [hidden, weight] + ([] if bias is None else [bias])
    index = torch.randint(classes, shape[:-1])
    probabilities = torch.softmax(normal(*shape[:-1], classes), -1)
    class_weight = torch.rand(classes, dtype=torch.float64) + 0.1
    for target, weighted, smoothing, reduction in itertools.product(
        (index, probabilities), (None, class_weight), (0.0, 0.2), ("mean", "sum", "none")
    ):
        options: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction, "weight": weighted}
        flat = F.linear(hidden, weight, bias).reshape(-1, classes)
        flat_target = target.reshape(-1, classes) if target.is_floating_point() else target.reshape(-1)
        expected = F.cross_entropy(flat, flat_target, **options)
        expected = expected.view(shape[:-1]) if reduction == "none" else expected
        actual = sigsoftmax.linear_cross_entropy(
            hidden, weight, target, function="softmax", linear_bias=bias, backend=backend, **options
        )
        label = f"{target.dtype}, weight {weighted is not None}, smoothing {smoothing}, {reduction}"
        assert_same(actual, expected, label)
        for position, (a, e) in enumerate(zip(gradients(actual, inputs), gradients(expected, inputs), strict=True)):
            assert_same(a, e, f"{label}: gradient of input {position}")


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has no linear_cross_entropy before 2.13")
@every_backend
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_names_and_places_are_those_of_torchs_linear_cross_entropy(reduction: str, backend: str) -> None:
    hidden, weight, bias = (
        leaf(N, D, dtype=torch.float32),
        leaf(V, D, dtype=torch.float32),
        leaf(V, dtype=torch.float32),
    )
    target = torch.randint(V, (N,))
    target[2] = -1
    options: dict[str, Any] = {"linear_bias": bias, "reduction": reduction, "ignore_index": -1, "label_smoothing": 0.1}
    expected = F.linear_cross_entropy(hidden, weight, target, **options)
    actual = sigsoftmax.linear_cross_entropy(hidden, weight, target, function="softmax", backend=backend, **options)
    assert_same(actual, expected, tolerance=2e-6)
    inputs = [hidden, weight, bias]
    for a, e in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_same(a, e, "gradient", tolerance=5e-6)


@every_backend
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_masks_of_softmax_are_torchs(smoothing: float, reduction: str, backend: str) -> None:
    """A masked class, a masked target (loss inf, the gradient torch gives), and a row masked throughout (NaN)."""
    rows = {
        "a masked class": [1.0, LEAST, 0.5, -1.0],
        "a masked target": [LEAST, 0.3, 0.5, -1.0],
        "all but the target masked": [0.3, LEAST, LEAST, LEAST],
        "all masked": [LEAST] * 4,
    }
    for label, row in rows.items():
        z = torch.tensor([row, [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64, requires_grad=True)
        target = torch.tensor([0, 3])
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        expected = F.cross_entropy(z, target, **options)
        actual = sigsoftmax.cross_entropy(z, target, function="softmax", backend=backend, **options)
        assert_same(actual, expected, label)
        assert_same(gradients(actual, [z])[0], gradients(expected, [z])[0], f"{label}: gradient")


@every_backend
@every_member
def test_a_masked_target_has_loss_inf_and_the_slope_one(member: Member, backend: str) -> None:
    """As torch does for softmax: the target's gradient is f - 1 with f = 0, the others' phi' f."""
    z = normal(3, V)
    z[0, 1] = LEAST
    z.requires_grad_()
    target = torch.tensor([1, 0, 4])
    losses = sigsoftmax.cross_entropy(z, target, function=member.make(V), reduction="none", backend=backend)
    expected = plain_loss(member.phi(z).unsqueeze(1), target, reduction="none")
    assert losses[0] == math.inf
    assert_same(losses, expected)
    (by_z,) = torch.autograd.grad(losses.sum(), z)
    assert by_z[0, 1] == -1.0
    assert not by_z.isnan().any()
    log_f = torch.log_softmax(member.phi(z.detach()), -1)
    others = [0, 2, 3, 4]
    assert_same(by_z[0, others], (member.make(V).slope(z.detach()) * log_f.exp())[0, others], "gradient")


@every_backend
@pytest.mark.parametrize("function", ["softmax", "sigsoftmax", "relu"])
def test_all_targets_ignored(function: str, backend: str) -> None:
    """mean is NaN as in torch, with a gradient of zeros or NaN as torch's; sum is 0 and none zeros."""
    z = leaf(N, V)
    target = torch.full((N,), -100)
    for reduction in ("mean", "sum", "none"):
        expected = F.cross_entropy(z, target, reduction=reduction)
        actual = sigsoftmax.cross_entropy(z, target, function=function, reduction=reduction, backend=backend)
        assert_same(actual, expected, reduction)
        assert_same(gradients(actual, [z])[0], gradients(expected, [z])[0], f"{reduction}: gradient")


@every_backend
def test_zero_rows(backend: str) -> None:
    hidden, weight, bias = leaf(0, D), leaf(V, D), leaf(V)
    z = leaf(0, V)
    target = torch.empty(0, dtype=torch.long)
    for reduction in ("mean", "sum", "none"):
        expected = F.cross_entropy(z, target, reduction=reduction)
        actual = sigsoftmax.cross_entropy(z, target, function="softmax", reduction=reduction, backend=backend)
        assert_same(actual, expected, reduction)
        linear = sigsoftmax.linear_cross_entropy(
            hidden, weight, target, function="sigsoftmax", linear_bias=bias, reduction=reduction, backend=backend
        )
        assert_same(linear, expected, reduction)
        if reduction != "mean":
            grads = gradients(linear, [hidden, weight, bias])
            assert [g.shape for g in grads] == [(0, D), (V, D), (V,)]
            assert all((g == 0).all() for g in grads)


@every_backend
@every_member
def test_zero_rows_and_extras_of_every_member(member: Member, backend: str) -> None:
    prior, hidden, weight = leaf(0, K), leaf(0, K, D), leaf(V, D)
    target = torch.empty(0, dtype=torch.long)
    loss, extras = sigsoftmax.mixture_cross_entropy(
        hidden,
        prior,
        weight,
        target,
        function=member.make(V),
        prior_function="softmax",
        reduction="sum",
        backend=backend,
        extras=ALL_EXTRAS,
    )
    assert loss == 0.0
    assert [e.shape for e in extras] == [(0, K), (0,), (0,)]
    log_p = sigsoftmax.mixture_log_probs(
        hidden, prior, weight, function=member.make(V), prior_function="softmax", backend=backend
    )
    assert log_p.shape == (0, V)


@every_backend
@every_member
def test_one_class_has_loss_zero_and_no_gradient(member: Member, backend: str) -> None:
    z = leaf(N, 1, deviation=50.0)
    loss = sigsoftmax.cross_entropy(
        z, torch.zeros(N, dtype=torch.long), function=member.make(1), reduction="sum", backend=backend
    )
    assert_same(loss, torch.tensor(0.0), tolerance=1e-12)
    assert_same(gradients(loss, [z])[0], torch.zeros(N, 1), "gradient", tolerance=1e-12)


# Every member, every option, against the plain computation


@every_member
def test_cross_entropy_over_the_option_grid(member: Member) -> None:
    z = leaf(N, V)
    function = member.make(V)
    for label, target, options in option_grid(N, V):
        expected = plain_loss(member.phi(z).unsqueeze(1), target, **options)
        (expected_gradient,) = gradients(expected, [z])
        for backend in BACKENDS:
            actual = sigsoftmax.cross_entropy(z, target, function=function, backend=backend, **options)
            assert_same(actual, expected, f"{backend}: {label}")
            assert_same(gradients(actual, [z])[0], expected_gradient, f"gradient, {backend}: {label}")


@every_member
def test_linear_cross_entropy_over_the_option_grid(member: Member) -> None:
    """Tokens in two dimensions, a chunk of two tokens at a time."""
    hidden, weight, bias = leaf(N, D, deviation=1.0), leaf(V, D, deviation=1.0), leaf(V)
    inputs = [hidden, weight, bias]
    function = member.make(V)
    for label, target, options in option_grid(N, V):
        expected = plain_loss(member.phi(plain_linear(hidden, weight, bias)).unsqueeze(1), target, **options)
        expected_gradients = gradients(expected, inputs)
        for backend in BACKENDS:
            actual = sigsoftmax.linear_cross_entropy(
                hidden,
                weight,
                target,
                function=function,
                linear_bias=bias,
                backend=backend,
                chunk_bytes=2 * V * 8,
                **options,
            )
            assert_same(actual, expected, f"{backend}: {label}")
            names = ("input", "weight", "bias")
            for name, a, e in zip(names, gradients(actual, inputs), expected_gradients, strict=True):
                assert_same(a, e, f"gradient of the {name}, {backend}: {label}")


@pytest.mark.parametrize("floor", [0.0, 1e-2])
@every_member
def test_mixture_cross_entropy_over_the_option_grid(member: Member, floor: float) -> None:
    hidden, weight, bias, prior = leaf(N, K, D, deviation=1.0), leaf(V, D, deviation=1.0), leaf(V), leaf(N, K)
    inputs = [hidden, weight, bias, prior]
    function = member.make(V)
    softmax = by_label["softmax"]
    for label, target, options in option_grid(N, V):
        phi_NKV = member.phi(plain_linear(hidden, weight, bias))
        log_prior = plain_log_prior(prior, softmax)
        expected = plain_loss(phi_NKV, target, log_prior_NK=log_prior, floor=floor, **options)
        expected_gradients = gradients(expected, inputs)
        for backend in BACKENDS:
            actual = sigsoftmax.mixture_cross_entropy(
                hidden,
                prior,
                weight,
                target,
                function=function,
                prior_function="softmax",
                linear_bias=bias,
                floor=floor,
                backend=backend,
                chunk_bytes=3 * K * V * 8,
                **options,
            )
            assert_same(actual, expected, f"{backend}: {label}")
            names = ("input", "weight", "bias", "prior")
            for name, a, e in zip(names, gradients(actual, inputs), expected_gradients, strict=True):
                assert_same(a, e, f"gradient of the {name}, {backend}: {label}")


@every_backend
@pytest.mark.parametrize("prior", [None, *MEMBERS], ids=str)
@pytest.mark.parametrize("label", ["sigsoftmax", "gss(k=0.2)"])
def test_the_prior_is_a_member_too(label: str, prior: Member | None, backend: str) -> None:
    """None means the function itself if it has no parameters, else softmax."""
    member = by_label[label]
    meant = prior or (member if label == "sigsoftmax" else by_label["softmax"])
    hidden, weight, logits = leaf(N, K, D, deviation=1.0), leaf(V, D, deviation=1.0), leaf(N, K)
    inputs = [hidden, weight, logits]
    target = torch.randint(V, (N,))
    options: dict[str, Any] = {"function": member.make(V), "backend": backend}
    options["prior_function"] = None if prior is None else prior.make(K)
    phi_NKV = member.phi(plain_linear(hidden, weight, None))
    log_prior = plain_log_prior(logits, meant)
    for smoothing in (0.0, 0.1):
        expected = plain_loss(phi_NKV, target, log_prior_NK=log_prior, label_smoothing=smoothing)
        actual = sigsoftmax.mixture_cross_entropy(hidden, logits, weight, target, label_smoothing=smoothing, **options)
        assert_same(actual, expected)
        expected_gradients = gradients(expected, inputs, retain_graph=True)
        for a, e in zip(gradients(actual, inputs), expected_gradients, strict=True):
            assert_same(a, e, f"gradient, smoothing {smoothing}")
    log_p = sigsoftmax.mixture_log_probs(hidden, logits, weight, **options)
    expected = plain_token_losses(phi_NKV, target, log_prior_NK=log_prior).log_probs_NV
    assert_same(log_p, expected)
    for a, e in zip(gradients(log_p, inputs), gradients(expected, inputs), strict=True):
        assert_same(a, e, "gradient of log_probs")


@every_backend
@pytest.mark.parametrize("floor", [0.0, 1e-8, 0.05])
@every_member
def test_mixture_log_probs(member: Member, floor: float, backend: str) -> None:
    hidden, weight, bias, prior = leaf(2, 3, K, D), leaf(V, D), leaf(V), leaf(2, 3, K)
    inputs = [hidden, weight, bias, prior]
    actual = sigsoftmax.mixture_log_probs(
        hidden,
        prior,
        weight,
        function=member.make(V),
        prior_function="softmax",
        linear_bias=bias,
        floor=floor,
        chunk_bytes=200,
        backend=backend,
    )
    f = torch.softmax(member.phi(plain_linear(hidden, weight, bias)), -1)
    expected = torch.log((torch.softmax(prior, -1).unsqueeze(-1) * f).sum(-2) + floor)
    assert actual.shape == (2, 3, V)
    assert_same(actual, expected)
    for a, e in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_same(a, e, "gradient", tolerance=1e-9)


@every_backend
@pytest.mark.parametrize("wanted", [("log_normalizer",), ()], ids=str)
@every_member
def test_mixture_log_probs_with_log_normalizers(member: Member, wanted: tuple[str, ...], backend: str) -> None:
    hidden, weight, prior = leaf(2, 3, K, D), leaf(V, D), leaf(2, 3, K)
    options: dict[str, Any] = {
        "function": member.make(V),
        "prior_function": "softmax",
        "chunk_bytes": 200,
        "backend": backend,
    }
    actual, extras = sigsoftmax.mixture_log_probs(hidden, prior, weight, extras=wanted, **options)
    alone = sigsoftmax.mixture_log_probs(hidden, prior, weight, **options)
    assert isinstance(extras, Extras)
    assert extras.argmax is extras.entropy is None
    if wanted:
        assert extras.log_normalizer is not None
        assert not extras.log_normalizer.requires_grad
        with torch.no_grad():
            expected = torch.logsumexp(member.phi(plain_linear(hidden, weight, None)), -1)
        assert_same(extras.log_normalizer, expected, "log_normalizer", tolerance=1e-11)
    else:
        assert extras.log_normalizer is None
    assert torch.equal(actual, alone)
    for a, e in zip(gradients(actual, [hidden, prior]), gradients(alone, [hidden, prior]), strict=True):
        assert torch.equal(a, e)


def test_torch_compile_keeps_mixture_log_probs_with_log_normalizers_whole() -> None:
    hidden, weight, prior = leaf(2, 3, K, D), leaf(V, D), leaf(2, 3, K)

    def call(hidden: Tensor) -> tuple[Tensor, Tensor]:
        log_p, extras = sigsoftmax.mixture_log_probs(
            hidden, prior, weight, function="sigsoftmax", extras=["log_normalizer"]
        )
        assert extras.log_normalizer is not None
        return log_p, extras.log_normalizer

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, expected = compiled(hidden), call(hidden)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(found[0], [hidden]), gradients(expected[0], [hidden]))


FIRST_CALLS = """
import torch, sigsoftmax
def counting(graph, examples):
    print("a graph")
    return graph
compiled = torch.compile(sigsoftmax.linear_cross_entropy, fullgraph=True, backend=counting)
hidden, weight, target = torch.randn(7, 4), torch.randn(5, 4), torch.randint(5, (7,))
for _ in range(3):
    compiled(hidden, weight, target, function="sigsoftmax")
"""


def test_torch_compile_compiles_the_first_loss_of_a_process_once() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, check=False)
    assert done.stdout == "a graph\n", done.stderr


@every_backend
@pytest.mark.parametrize("function", ["softmax", "sigsoftmax"])
def test_a_mixture_of_one_or_of_equals_is_the_member(function: str, backend: str) -> None:
    hidden, weight = normal(N, 1, D), normal(V, D)
    target = torch.randint(V, (N,))
    expected = sigsoftmax.linear_cross_entropy(hidden[:, 0], weight, target, function=function)
    for components in (1, 4):
        same = hidden.expand(N, components, D)
        actual = sigsoftmax.mixture_cross_entropy(
            same, normal(N, components), weight, target, function=function, backend=backend
        )
        assert_same(actual, expected, f"{components} components", tolerance=1e-12)


@every_backend
@pytest.mark.parametrize("floor", [0.0, 1e-8])
@pytest.mark.parametrize("dense", [False, True])
def test_a_mixture_that_masks_its_target_everywhere(floor: float, dense: bool, backend: str) -> None:
    """Loss inf, or the floor's value, and no gradient from that token: never NaN."""
    hidden, prior, weight = leaf(2, K, D), leaf(2, K), leaf(V, D)
    bias = normal(V)
    bias[1] = LEAST
    bias.requires_grad_()
    inputs = [hidden, prior, weight, bias]
    target = torch.tensor([1, 3])
    losses = sigsoftmax.mixture_cross_entropy(
        hidden,
        prior,
        weight,
        target,
        function="sigsoftmax",
        linear_bias=bias,
        floor=floor,
        reduction="none",
        backend=backend,
        extras=("entropy",) if dense else (),
    )[0]
    assert losses[0].item() == pytest.approx(-math.log(floor) if floor else math.inf)
    by_hidden, by_prior, by_weight, by_bias = gradients(losses, inputs)
    assert (by_hidden[0] == 0).all()
    assert (by_prior[0] == 0).all()
    assert by_hidden[1].norm() > 0
    assert not any(g.isnan().any() for g in (by_hidden, by_prior, by_weight, by_bias))


@every_backend
@pytest.mark.parametrize("dense", [False, True])
def test_a_masked_component_has_no_part_in_a_mixture(dense: bool, backend: str) -> None:
    """A prior logit of -inf: the mixture of the others."""
    hidden, weight = leaf(N, K, D), leaf(V, D)
    prior = normal(N, K)
    prior[:, 1] = LEAST
    prior.requires_grad_()
    target = torch.randint(V, (N,))
    options: dict[str, Any] = {"function": "sigsoftmax", "backend": backend, "label_smoothing": 0.1 * dense}
    actual = sigsoftmax.mixture_cross_entropy(hidden, prior, weight, target, **options)
    kept = [0, 2]
    expected = sigsoftmax.mixture_cross_entropy(hidden[:, kept], prior[:, kept], weight, target, **options)
    assert_same(actual, expected, tolerance=1e-12)
    inputs = [hidden, prior, weight]
    for a, e in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_same(a, e, "gradient")


# Extras


@every_backend
@every_member
@pytest.mark.parametrize("wanted", [ALL_EXTRAS, ("log_normalizer",), ("argmax",), ("entropy",), ()], ids=str)
def test_extras_of_logits(member: Member, wanted: tuple[str, ...], backend: str) -> None:
    z = leaf(N, V)
    target = torch.randint(V, (N,))
    target[0] = -100
    loss, extras = sigsoftmax.cross_entropy(z, target, function=member.make(V), backend=backend, extras=wanted)
    assert isinstance(extras, Extras)
    plain = plain_token_losses(member.phi(z.detach()).unsqueeze(1), target)
    truth = (plain.log_normalizer_NK[:, 0], plain.log_probs_NV.argmax(-1), plain.entropy_N)
    for name, actual, expected in zip(ALL_EXTRAS, extras, truth, strict=True):
        if name not in wanted:
            assert actual is None
            continue
        assert not actual.requires_grad
        assert_same(actual, expected, name)
    alone = sigsoftmax.cross_entropy(z, target, function=member.make(V), backend=backend)
    assert_same(loss, alone, "the loss itself", tolerance=1e-14)
    assert_same(gradients(loss, [z])[0], gradients(alone, [z])[0], "its gradient", tolerance=1e-14)


@every_backend
@every_member
@pytest.mark.parametrize("floor", [0.0, 1e-3])
@pytest.mark.parametrize("wanted", [ALL_EXTRAS, ("log_normalizer",)], ids=str)
def test_extras_of_mixtures(member: Member, wanted: tuple[str, ...], floor: float, backend: str) -> None:
    hidden, weight, prior = leaf(2, 3, K, D), leaf(V, D), leaf(2, 3, K)
    target = torch.randint(V, (2, 3))
    loss, extras = sigsoftmax.mixture_cross_entropy(
        hidden,
        prior,
        weight,
        target,
        function=member.make(V),
        prior_function="softmax",
        floor=floor,
        backend=backend,
        extras=wanted,
    )
    with torch.no_grad():
        plain = plain_token_losses(
            member.phi(plain_linear(hidden, weight, None)).flatten(0, 1),
            target.flatten(),
            log_prior_NK=torch.log_softmax(prior, -1).flatten(0, 1),
            floor=floor,
        )
    assert loss.requires_grad
    assert_same(loss, plain.losses_N.mean())
    assert_same(extras.log_normalizer, plain.log_normalizer_NK.view(2, 3, K), "log_normalizer")
    if wanted == ALL_EXTRAS:
        assert_same(extras.argmax, plain.log_probs_NV.argmax(-1).view(2, 3), "argmax")
        assert_same(extras.entropy, plain.entropy_N.view(2, 3), "entropy")
    else:
        assert extras.argmax is None
        assert extras.entropy is None
    assert not any(e.requires_grad for e in extras if e is not None)


@every_backend
def test_extras_have_the_shape_of_index_targets(backend: str) -> None:
    z = normal(2, V, 3, 4)
    target = torch.randint(V, (2, 3, 4))
    loss, extras = sigsoftmax.cross_entropy(
        z, target, function="sigsoftmax", reduction="none", backend=backend, extras=ALL_EXTRAS
    )
    assert loss.shape == extras.log_normalizer.shape == extras.argmax.shape == extras.entropy.shape == (2, 3, 4)
    log_p = sigsoftmax.log_sigsoftmax(z, dim=1)
    assert_same(extras.argmax, log_p.argmax(1))
    assert_same(extras.entropy, -(log_p.exp() * log_p).sum(1))


@every_backend
def test_extras_of_masked_rows(backend: str) -> None:
    z = normal(3, V)
    z[:, 0] = LEAST
    _, extras = sigsoftmax.cross_entropy(
        z, torch.tensor([1, 2, 3]), function="sigsoftmax", backend=backend, extras=ALL_EXTRAS
    )
    _, without = sigsoftmax.cross_entropy(
        z[:, 1:], torch.tensor([0, 1, 2]), function="sigsoftmax", backend=backend, extras=ALL_EXTRAS
    )
    assert_same(extras.log_normalizer, without.log_normalizer)
    assert_same(extras.entropy, without.entropy)
    assert torch.equal(extras.argmax, without.argmax + 1)


@every_backend
def test_argmax_of_a_falling_member_is_the_smallest_logit(backend: str) -> None:
    z = normal(N, V)
    function = by_label["user, with slope"].make(V)
    _, extras = sigsoftmax.cross_entropy(
        z, torch.zeros(N, dtype=torch.long), function=function, backend=backend, extras=("argmax",)
    )
    assert torch.equal(extras.argmax, z.argmin(-1))


@pytest.mark.parametrize("label", ["softmax", "sigsoftmax", "relu", "softcap(c=5)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_of_the_probabilities_where_they_are_unequal(label: str, dtype: torch.dtype) -> None:
    z = normal(64, 33, dtype=dtype)
    target = torch.zeros(64, dtype=torch.long)
    function = by_label[label].make(33)
    truth = by_label[label].phi(z.double())
    for backend in BACKENDS:
        _, extras = sigsoftmax.cross_entropy(z, target, function=function, backend=backend, extras=("argmax",))
        chosen = truth.gather(-1, extras.argmax.unsqueeze(-1)).squeeze(-1)
        assert (truth.amax(-1) - chosen).max() <= 1e-6, backend


# Token weights, reductions


@every_backend
@few_members
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("also_logits", [False, True])
def test_token_weights_have_a_gradient(member: Member, reduction: str, also_logits: bool, backend: str) -> None:
    """Also where nothing else wants one."""
    z = normal(N, V).requires_grad_(also_logits)
    t = (torch.rand(N, dtype=torch.float64) + 0.1).requires_grad_()
    inputs = [t, z] if also_logits else [t]
    target = torch.randint(V, (N,))
    target[1] = -100
    class_weight = torch.rand(V, dtype=torch.float64) + 0.1
    options: dict[str, Any] = {"weight": class_weight, "token_weights": t, "reduction": reduction, "z_loss": 0.01}
    expected = plain_loss(member.phi(z).unsqueeze(1), target, **options)
    actual = sigsoftmax.cross_entropy(z, target, function=member.make(V), backend=backend, **options)
    assert_same(actual, expected)
    for a, e in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_same(a, e, "gradient")


@every_backend
def test_token_weights_of_a_mixture_have_a_gradient(backend: str) -> None:
    hidden, weight, prior = normal(N, K, D), normal(V, D), normal(N, K)
    t = torch.rand(N, dtype=torch.float64).requires_grad_()
    target = torch.randint(V, (N,))
    actual = sigsoftmax.mixture_cross_entropy(
        hidden, prior, weight, target, function="softmax", token_weights=t, backend=backend
    )
    phi_NKV = plain_linear(hidden, weight, None)
    expected = plain_loss(phi_NKV, target, log_prior_NK=torch.log_softmax(prior, -1), token_weights=t)
    assert_same(gradients(actual, [t])[0], gradients(expected, [t])[0])


@every_backend
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["logits", "linear", "mixture", "smoothed mixture"])
@pytest.mark.parametrize("also_inputs", [False, True])
def test_a_token_weight_of_0_has_a_gradient(kind: str, also_inputs: bool, reduction: str, backend: str) -> None:
    """For a sum it is the loss of the token, for a mean that less the mean; an ignored token has none."""
    weight, prior = normal(V, D).requires_grad_(also_inputs), normal(N, K).requires_grad_(also_inputs)
    hidden = normal(N, *([K] if "mixture" in kind else []), D).requires_grad_(also_inputs)
    t = torch.rand(N, dtype=torch.float64)
    t[[0, 2, 3]] = 0.0
    t.requires_grad_()
    target = torch.randint(V, (N,))
    target[3] = -100
    options: dict[str, Any] = {"token_weights": t, "reduction": reduction, "z_loss": 0.01}
    options["label_smoothing"] = 0.1 if kind == "smoothed mixture" else 0.0
    phi_NKV = plain_linear(hidden if "mixture" in kind else hidden.unsqueeze(1), weight, None)
    calling = {"function": "softmax", "backend": backend, **options}
    if "mixture" in kind:
        actual = sigsoftmax.mixture_cross_entropy(hidden, prior, weight, target, **calling)
        options["log_prior_NK"] = torch.log_softmax(prior, -1)
    elif kind == "linear":
        actual = sigsoftmax.linear_cross_entropy(hidden, weight, target, **calling)
    else:
        actual = sigsoftmax.cross_entropy(hidden @ weight.T, target, **calling)
    expected = plain_loss(phi_NKV, target, **options)
    assert_same(actual, expected)
    (by_t,) = gradients(actual, [t], retain_graph=True)
    assert_same(by_t, gradients(expected, [t], retain_graph=True)[0], "gradient")
    assert (by_t[[0, 2]] != 0).all()
    if also_inputs:
        assert_same(gradients(actual, [hidden])[0], gradients(expected, [hidden])[0], "gradient of the input")


@every_backend
@pytest.mark.parametrize("also_logits", [False, True])
def test_a_token_weight_of_0_for_an_infinite_loss(also_logits: bool, backend: str) -> None:
    """The loss counts nothing; the gradient of its weight is the largest number there is."""
    z = normal(2, V).float()
    z[0, 1] = LEAST
    z.requires_grad_(also_logits)
    t = torch.tensor([0.0, 1.0], requires_grad=True)
    loss = sigsoftmax.cross_entropy(
        z, torch.tensor([1, 2]), function="softmax", token_weights=t, reduction="sum", backend=backend
    )
    assert loss.isfinite()
    assert gradients(loss, [t])[0][0] == torch.finfo(torch.float32).max


@every_backend
def test_a_whole_token_weight_is_that_many_copies(backend: str) -> None:
    z, target = normal(3, V), torch.tensor([0, 3, 4])
    counts = torch.tensor([1, 3, 2])
    class_weight = torch.rand(V, dtype=torch.float64) + 0.1
    for reduction in ("mean", "sum"):
        options: dict[str, Any] = {"function": "sigsoftmax", "reduction": reduction, "backend": backend}
        options |= {"z_loss": 0.1, "label_smoothing": 0.1, "weight": class_weight}
        weighted = sigsoftmax.cross_entropy(z, target, token_weights=counts.double(), **options)
        copied = sigsoftmax.cross_entropy(
            z.repeat_interleave(counts, 0), target.repeat_interleave(counts, 0), **options
        )
        assert_same(weighted, copied, reduction, tolerance=1e-12)


@every_backend
def test_tokens_in_many_dimensions(backend: str) -> None:
    z = leaf(2, V, 3, 4)
    target = torch.randint(V, (2, 3, 4))
    target[0, 0, 0] = -100
    t = torch.rand(2, 3, 4, dtype=torch.float64)
    phi_NV = by_label["sigsoftmax"].phi(z).movedim(1, -1).reshape(-1, V)
    for reduction in ("mean", "none"):
        actual = sigsoftmax.cross_entropy(
            z, target, function="sigsoftmax", token_weights=t, reduction=reduction, backend=backend
        )
        expected = plain_loss(phi_NV.unsqueeze(1), target.flatten(), token_weights=t.flatten(), reduction=reduction)
        expected = expected.view(2, 3, 4) if reduction == "none" else expected
        assert_same(actual, expected, reduction)
        (a,), (e,) = gradients(actual, [z]), gradients(expected, [z], retain_graph=True)
        assert_same(a, e, f"{reduction}: gradient")


@every_backend
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("dense", [False, True])
def test_dim_says_where_the_classes_are(dim: int, dense: bool, backend: str) -> None:
    z = leaf(3, 4, 5)
    moved = z.movedim(dim, -1)
    classes = moved.shape[-1]
    target = torch.softmax(normal(*z.shape), dim) if dense else torch.randint(classes, moved.shape[:-1])
    flat_target = target.movedim(dim, -1).reshape(-1, classes) if dense else target.flatten()
    expected = plain_loss(by_label["sigsoftmax"].phi(moved).reshape(-1, 1, classes), flat_target)
    actual = sigsoftmax.cross_entropy(z, target, function="sigsoftmax", dim=dim, backend=backend)
    assert_same(actual, expected)
    assert_same(gradients(actual, [z])[0], gradients(expected, [z])[0], "gradient")


# Layout, size, chunks


@every_backend
@few_members
def test_inputs_need_not_be_contiguous(member: Member, backend: str) -> None:
    """Transposed, strided and expanded inputs give what their copies give, and get gradients of their own shape."""
    function = member.make(V)
    target = torch.randint(V, (2 * N,))[::2]
    z = normal(V, N).t().requires_grad_()
    wide = normal(N, 2 * V)[:, ::2].requires_grad_()
    row = normal(1, V).expand(N, V)
    for logits in (z, wide, row):
        options: dict[str, Any] = {"function": function, "backend": backend, "label_smoothing": 0.1}
        assert not logits.is_contiguous()
        actual = sigsoftmax.cross_entropy(logits, target, **options)
        copy = logits.detach().contiguous().requires_grad_()
        expected = sigsoftmax.cross_entropy(copy, target, **options)
        assert_same(actual, expected, tolerance=1e-14)
        if logits.requires_grad:
            assert_same(gradients(actual, [logits])[0], gradients(expected, [copy])[0], "gradient", tolerance=1e-14)
            log_p = sigsoftmax.log_probs(logits, function=function, backend=backend)
            of_copy = sigsoftmax.log_probs(copy, function=function, backend=backend)
            assert_same(gradients(log_p, [logits])[0], gradients(of_copy, [copy])[0], "log_probs", tolerance=1e-12)


@every_backend
def test_linear_and_mixture_inputs_need_not_be_contiguous(backend: str) -> None:
    hidden = normal(D, K, N).permute(2, 1, 0).requires_grad_()
    weight = normal(D, V).t().requires_grad_()
    bias = normal(2 * V)[::2].requires_grad_()
    prior = normal(K, N).t().requires_grad_()
    strided = [hidden, prior, weight, bias]
    copies = [t.detach().contiguous().requires_grad_() for t in strided]
    target = torch.randint(V, (N, 2))[:, 0]

    def mixture(h: Tensor, p: Tensor, w: Tensor, b: Tensor, **options: Any) -> Tensor:
        return sigsoftmax.mixture_cross_entropy(
            h, p, w, target, function="sigsoftmax", linear_bias=b, backend=backend, **options
        )

    def linear(h: Tensor, p: Tensor, w: Tensor, b: Tensor, **options: Any) -> Tensor:
        return p.sum() + sigsoftmax.linear_cross_entropy(
            h[:, 0], w, target, function="sigsoftmax", linear_bias=b, backend=backend, **options
        )

    for loss, smoothing in itertools.product((mixture, linear), (0.0, 0.1)):
        actual, expected = loss(*strided, label_smoothing=smoothing), loss(*copies, label_smoothing=smoothing)
        assert_same(actual, expected, tolerance=1e-13)
        for a, e in zip(gradients(actual, strided), gradients(expected, copies), strict=True):
            assert_same(a, e, "gradient", tolerance=1e-12)


@every_backend
@pytest.mark.parametrize("label", ["softmax", "sigsoftmax", "gss(k=0.2)", "relu"])
def test_a_million_classes(label: str, backend: str) -> None:
    classes = 10**6
    z = torch.randn(2, classes).requires_grad_()
    target = torch.tensor([3, classes - 1])
    member = by_label[label]
    actual = sigsoftmax.cross_entropy(z, target, function=member.make(classes), backend=backend)
    truth = z.detach().double().requires_grad_()
    expected = plain_loss(member.phi(truth).unsqueeze(1), target)
    assert_same(actual, expected, tolerance=2e-6)
    (a,), (e,) = gradients(actual, [z]), gradients(expected, [truth])
    assert float((a.double() - e).norm() / e.norm()) < 2e-6


@pytest.mark.parametrize("label", ["sigsoftmax", "gss(k=0.2)", "softcap(c=5)"])
def test_a_million_classes_from_a_matrix(label: str) -> None:
    classes = 10**6
    hidden, weight = leaf(3, 2, dtype=torch.float32), leaf(classes, 2, dtype=torch.float32)
    target = torch.tensor([3, 7, classes - 1])
    member = by_label[label]
    actual = sigsoftmax.linear_cross_entropy(
        hidden, weight, target, function=member.make(classes), chunk_bytes=1, backend="blocked"
    )
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = plain_loss(member.phi(exact[0] @ exact[1].t()).unsqueeze(1), target)
    assert_same(actual, expected, tolerance=2e-6)
    inputs = [hidden, weight]
    # Sums over a million classes have their rounding in torch as well.
    plain = gradients(F.cross_entropy(member.phi(hidden @ weight.t()), target), inputs)
    for a, p, e in zip(gradients(actual, inputs), plain, gradients(expected, exact), strict=True):
        assert frobenius_error(a, e) <= 1.5 * frobenius_error(p, e) + 1e-6 * float(e.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@few_members
def test_chunks_change_nothing_but_rounding(member: Member, dtype: torch.dtype) -> None:
    tokens, classes = 23, 11
    hidden, weight = leaf(tokens, K, D, dtype=dtype), leaf(classes, D, dtype=dtype)
    bias, prior = leaf(classes, dtype=dtype), leaf(tokens, K, dtype=dtype)
    target = torch.randint(classes, (tokens,))
    inputs = [hidden, weight, bias, prior]
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6

    def results(chunk_bytes: int | None, smoothing: float) -> list[Tensor]:
        loss = sigsoftmax.mixture_cross_entropy(
            hidden,
            prior,
            weight,
            target,
            function=member.make(classes),
            linear_bias=bias,
            chunk_bytes=chunk_bytes,
            label_smoothing=smoothing,
            backend="blocked",
        )
        return [loss, *gradients(loss, inputs)]

    for smoothing in (0.0, 0.1):
        whole = results(None, smoothing)
        for chunk_bytes in (1, 5 * K * classes * dtype.itemsize, 7 * K * classes * dtype.itemsize + 3):
            for actual, expected in zip(results(chunk_bytes, smoothing), whole, strict=True):
                assert_same(actual, expected, f"{chunk_bytes} bytes", tolerance=tolerance)


@settings(max_examples=30)
@given(
    tokens=st.integers(0, 9),
    classes=st.integers(1, 9),
    features=st.integers(1, 5),
    chunk_bytes=st.integers(1, 2000),
    label=st.sampled_from([m.label for m in MEMBERS]),
    seed=st.integers(0, 2**16),
)
def test_any_size_of_chunk_gives_the_plain_loss(
    tokens: int, classes: int, features: int, chunk_bytes: int, label: str, seed: int
) -> None:
    torch.manual_seed(seed)
    member = by_label[label]
    hidden, weight = leaf(tokens, features), leaf(classes, features)
    target = torch.randint(classes, (tokens,))
    expected = plain_loss(member.phi(hidden @ weight.t()).unsqueeze(1), target, reduction="sum")
    actual = sigsoftmax.linear_cross_entropy(
        hidden,
        weight,
        target,
        function=member.make(classes),
        reduction="sum",
        chunk_bytes=chunk_bytes,
        backend="blocked",
    )
    assert_same(actual, expected)
    inputs = [hidden, weight]
    for a, e in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_same(a, e, "gradient")


@every_backend
@every_member
@every_dtype
def test_same_inputs_same_bits(member: Member, dtype: torch.dtype, backend: str) -> None:
    hidden, weight, bias = leaf(33, D, dtype=dtype), leaf(17, D, dtype=dtype), leaf(17, dtype=dtype)
    inputs = [hidden, weight, bias]
    target = torch.randint(17, (33,))

    def results() -> list[Tensor]:
        loss = sigsoftmax.linear_cross_entropy(
            hidden, weight, target, function=member.make(17), linear_bias=bias, backend=backend, chunk_bytes=999
        )
        return [loss, *gradients(loss, inputs)]

    first = results()
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(results(), first, strict=True))


@every_backend
def test_a_tokens_loss_does_not_depend_on_its_neighbours(backend: str) -> None:
    """Rows of all kinds in one block: far right, far left of the nonlinearity, masked, plain."""
    z = normal(8, V)
    z[1] += 300.0
    z[2] -= 300.0
    z[3, 0] = LEAST
    z[4] *= 1e4
    z[5] -= 1e6
    target = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    together = sigsoftmax.cross_entropy(z, target, function="sigsoftmax", reduction="none", backend=backend)
    for row in range(8):
        alone = sigsoftmax.cross_entropy(
            z[row : row + 1], target[row : row + 1], function="sigsoftmax", reduction="none", backend=backend
        )
        assert_same(together[row : row + 1], alone, f"row {row}", tolerance=1e-13)


# Gradients of the parameters


@every_backend
@learned_members
@pytest.mark.parametrize("level", [-40.0, 0.0, 40.0])
def test_parameters_get_the_gradients_of_plain_autograd(member: Member, level: float, backend: str) -> None:
    """Rows left of, across and right of the nonlinearity; with z-loss, where the derivative of the offset counts."""
    z = normal(N, V) + level
    values = member.learned(V)
    inputs = list(values.values())
    function = member.make(V, **values)
    for label, target, options in option_grid(N, V):
        if options["label_smoothing"] and options["token_weights"] is None:
            continue
        expected = plain_loss(member.phi(z, **values).unsqueeze(1), target, **options)
        actual = sigsoftmax.cross_entropy(z, target, function=function, backend=backend, **options)
        assert_same(actual, expected, label, tolerance=1e-9)
        for name, a, e in zip(values, gradients(actual, inputs), gradients(expected, inputs), strict=True):
            assert a.shape == values[name].shape
            assert_same(a, e, f"gradient of {name}: {label}", tolerance=1e-8)


@every_backend
@learned_members
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_parameters_get_gradients_through_mixtures(member: Member, smoothing: float, backend: str) -> None:
    hidden, weight, prior = leaf(N, K, D), leaf(V, D), leaf(N, K)
    values = member.learned(V)
    inputs = [hidden, weight, prior, *values.values()]
    target = torch.randint(V, (N,))
    function = member.make(V, **values)
    phi_NKV = member.phi(plain_linear(hidden, weight, None), **values)
    log_prior = torch.log_softmax(prior, -1)
    options: dict[str, Any] = {"label_smoothing": smoothing, "z_loss": 0.01}
    expected = plain_loss(phi_NKV, target, log_prior_NK=log_prior, **options)
    actual = sigsoftmax.mixture_cross_entropy(
        hidden, prior, weight, target, function=function, prior_function="softmax", backend=backend, **options
    )
    expected_gradients = gradients(expected, inputs, retain_graph=True)
    for a, e in zip(gradients(actual, inputs), expected_gradients, strict=True):
        assert_same(a, e, "gradient")
    expected = plain_token_losses(phi_NKV, target, log_prior_NK=log_prior).log_probs_NV
    actual = sigsoftmax.mixture_log_probs(
        hidden, prior, weight, function=function, prior_function="softmax", backend=backend
    )
    for a, e in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_same(a, e, "gradient of log_probs")


@every_backend
@learned_members
def test_parameters_get_gradients_through_log_probs(member: Member, backend: str) -> None:
    z = leaf(N, V)
    values = member.learned(V)
    inputs = [z, *values.values()]
    actual = sigsoftmax.log_probs(z, function=member.make(V, **values), backend=backend)
    expected = torch.log_softmax(member.phi(z, **values), -1)
    for a, e in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_same(a, e, "gradient")


@every_backend
@learned_members
def test_parameters_get_gradients_with_masked_classes(member: Member, backend: str) -> None:
    z = normal(N, V)
    z[:, 0] = LEAST
    values = member.learned(V)
    inputs = list(values.values())
    target = torch.randint(1, V, (N,))
    actual = sigsoftmax.cross_entropy(z, target, function=member.make(V, **values), z_loss=0.1, backend=backend)
    expected = plain_loss(member.phi(z, **values).unsqueeze(1), target, z_loss=0.1)
    for name, a, e in zip(values, gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_same(a, e, name)


@every_backend
@learned_members
def test_parameters_keep_their_own_dtype(member: Member, backend: str) -> None:
    """float32 parameters beside bfloat16 logits, summed in float32."""
    z = normal(64, V, dtype=torch.bfloat16)
    values = member.learned(V, torch.float32)
    inputs = list(values.values())
    target = torch.randint(V, (64,))
    actual = sigsoftmax.cross_entropy(z, target, function=member.make(V, **values), backend=backend)
    exact = {key: value.detach().double().requires_grad_() for key, value in values.items()}
    expected = plain_loss(member.phi(z.double(), **exact).unsqueeze(1), target)
    for a, e in zip(gradients(actual, inputs), gradients(expected, list(exact.values())), strict=True):
        assert a.dtype == torch.float32
        assert_same(a, e, tolerance=3e-6)


# dtypes


@every_backend
@every_dtype
@few_members
def test_losses_come_in_the_dtype_of_the_input(member: Member, dtype: torch.dtype, backend: str) -> None:
    hidden, weight, prior = leaf(N, K, D, dtype=dtype), leaf(V, D, dtype=dtype), leaf(N, K, dtype=dtype)
    z = leaf(N, V, dtype=dtype)
    target = torch.randint(V, (N,))
    options: dict[str, Any] = {"function": member.make(V), "backend": backend, "extras": ALL_EXTRAS}
    truth_options = {key: value for key, value in options.items() if key != "extras"}
    exact = [t.detach().double() for t in (z, hidden, prior, weight)]
    for reduction in ("mean", "none"):
        results = (
            sigsoftmax.cross_entropy(z, target, reduction=reduction, **options),
            sigsoftmax.linear_cross_entropy(hidden[:, 0], weight, target, reduction=reduction, **options),
            sigsoftmax.mixture_cross_entropy(hidden, prior, weight, target, reduction=reduction, **options),
        )
        truths = (
            sigsoftmax.cross_entropy(exact[0], target, reduction=reduction, **truth_options),
            sigsoftmax.linear_cross_entropy(exact[1][:, 0], exact[3], target, reduction=reduction, **truth_options),
            sigsoftmax.mixture_cross_entropy(*exact[1:], target, reduction=reduction, **truth_options),
        )
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for (loss, extras), truth in zip(results, truths, strict=True):
            assert loss.dtype == dtype
            assert extras.log_normalizer.dtype == extras.entropy.dtype == wide
            assert extras.argmax.dtype == torch.int64
            # Logits rounded to the dtype move a loss by their size times the dtype's epsilon; relu amplifies that.
            if member.name != "relu":
                assert_same(loss, truth, tolerance=30 * torch.finfo(dtype).eps)


@every_backend
@pytest.mark.parametrize("integer", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_targets_may_be_any_integers(integer: torch.dtype, backend: str) -> None:
    z = normal(N, V)
    target = torch.randint(V, (N,))
    expected = sigsoftmax.cross_entropy(z, target, function="sigsoftmax", backend=backend)
    actual = sigsoftmax.cross_entropy(z, target.to(integer), function="sigsoftmax", backend=backend)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["target", "class weight"])
@pytest.mark.parametrize("kind", ["logits", "linear", "mixture"])
def test_rare_gradients_are_computed_by_the_reference(name: str, kind: str) -> None:
    """Probability targets and class weights that want a gradient get a right one, or none of the fast paths."""
    q = torch.softmax(normal(N, V), -1).requires_grad_(name == "target")
    w = (torch.rand(V, dtype=torch.float64) + 0.1).requires_grad_(name == "class weight")
    hidden, weight, prior = normal(N, K, D), normal(V, D), normal(N, K)
    wanted = q if name == "target" else w
    options: dict[str, Any] = {"function": "sigsoftmax", "weight": w, "label_smoothing": 0.1}
    sigsoftmax_phi = by_label["sigsoftmax"].phi
    phi_NKV = sigsoftmax_phi(plain_linear(hidden, weight, None))
    if kind == "logits":
        z = normal(N, V)
        expected = plain_loss(sigsoftmax_phi(z).unsqueeze(1), q, weight=w, label_smoothing=0.1)
        actual = sigsoftmax.cross_entropy(z, q, **options)
    elif kind == "linear":
        expected = plain_loss(phi_NKV[:, :1], q, weight=w, label_smoothing=0.1)
        actual = sigsoftmax.linear_cross_entropy(hidden[:, 0], weight, q, **options)
    else:
        log_prior = plain_log_prior(prior, by_label["sigsoftmax"])
        expected = plain_loss(phi_NKV, q, log_prior_NK=log_prior, weight=w, label_smoothing=0.1)
        actual = sigsoftmax.mixture_cross_entropy(hidden, prior, weight, q, **options)
    assert sigsoftmax.explain().backend == "reference"
    assert_same(gradients(actual, [wanted])[0], gradients(expected, [wanted])[0])


def test_function_is_given_by_name_as_text_or_a_member() -> None:
    z, target = normal(N, V), torch.randint(V, (N,))
    with pytest.raises(TypeError, match="positional"):
        sigsoftmax.cross_entropy(z, target, None, "gss(k=0.2)")  # type: ignore[misc]
    by_text = sigsoftmax.cross_entropy(z, target, function="gss(k=0.2)")
    assert torch.equal(by_text, sigsoftmax.cross_entropy(z, target, function=OutputFunction("gss", k=0.2)))


@pytest.mark.parametrize(
    ("classes", "rows", "features", "chunk_mib", "expected"),
    [
        (128_256, 8192, 4096, 576, "exact"),
        (32_000, 8192 * 4, 2048, 281, "buffered"),
        (128_256, 8192 * 4, 2048, 576, "exact"),
        (10_000, 1400, 400, 576, "buffered"),
    ],
    ids=["wide", "a mixture with more rows than classes", "a mixture with fewer", "small"],
)
def test_sums_on_a_gpu_take_the_smaller_buffer(
    classes: int, rows: int, features: int, chunk_mib: int, expected: str
) -> None:
    sizes = (classes, rows, features, chunk_mib * 2**20)
    assert automatic_weight_gradient(torch.device("cuda"), *sizes) == expected
    assert automatic_weight_gradient(torch.device("cpu"), *sizes) == "buffered"
