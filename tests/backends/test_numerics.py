"""Numbers near the edges: no NaN for any finite logit, and errors that plain torch would have, or smaller ones.

An error bound is relative to the error of plain torch: phi by its formula in float32 on the same logits, then
``cross_entropy``, both judged against float64 in the Frobenius norm.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mpmath
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
    plain_loss,
)
from torch import Tensor
from torch.nn import functional as F

import sigsoftmax

V = 9
SLACK = 1.5
"""The most that an error may be relative to plain torch's, besides a few roundings of the result."""
SHIFTS = (-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4)


def extreme_rows(dtype: torch.dtype) -> Tensor:
    """(N, V) of finite logits, as hard as the dtype allows."""
    info = torch.finfo(dtype)
    # Beyond float32's range phi of float64 logits would overflow as theirs does; 1e30 is far enough.
    largest = min(info.max, 1e300)
    far = min(1e4, info.max)
    ramp = torch.linspace(-1.0, 1.0, V, dtype=torch.float64)
    rows = [
        ramp * far,
        ramp + far,
        ramp - far,
        ramp * largest,
        ramp.clamp(max=0.0) * largest,
        ramp.clamp(min=0.0) * largest,
        torch.full((V,), largest, dtype=torch.float64),
        torch.full((V,), -largest, dtype=torch.float64),
        torch.zeros(V, dtype=torch.float64),
        ramp * info.tiny,
        torch.full((V,), -50.0, dtype=torch.float64),
        torch.full((V,), 50.0, dtype=torch.float64),
        ramp * 100.0,
        ramp * 30.0 - 200.0,
        ramp * 30.0 + 200.0,
        torch.where(ramp == 0.0, 1.0, -1.0).double() * largest,
        torch.where(ramp == 0.0, 0.0, -1.0).double() * largest,
    ]
    return torch.stack(rows).to(dtype)


def loss_and_gradient(z: Tensor, target: Tensor, member: Member, backend: str, **options: Any) -> tuple[Tensor, Tensor]:
    logits = z.clone().requires_grad_()
    loss = sigsoftmax.cross_entropy(
        logits, target, function=member.make(z.shape[-1]), backend=backend, reduction="none", **options
    )
    return loss.detach(), torch.autograd.grad(loss, logits, torch.ones_like(loss))[0]


# No NaN


@every_backend
@every_dtype
@every_member
def test_no_nan_for_any_finite_logit(member: Member, dtype: torch.dtype, backend: str) -> None:
    """Losses may be inf where the dtype ends; gradients are finite, and none of them is NaN."""
    z = extreme_rows(dtype)
    assert z.isfinite().all()
    for position in (0, V // 2, V - 1):
        target = torch.full((z.shape[0],), position)
        for smoothing in (0.0, 0.1):
            losses, by_z = loss_and_gradient(z, target, member, backend, label_smoothing=smoothing)
            where = f"target {position}, smoothing {smoothing}"
            assert not losses.isnan().any(), f"{where}: rows {losses.isnan().nonzero().flatten().tolist()}"
            assert by_z.isfinite().all(), f"{where}: rows {(~by_z.isfinite()).any(-1).nonzero().flatten().tolist()}"


@every_backend
@every_dtype
@every_member
def test_log_probs_of_any_finite_logit(member: Member, dtype: torch.dtype, backend: str) -> None:
    z = extreme_rows(dtype).requires_grad_()
    log_p = sigsoftmax.log_probs(z, function=member.make(V), backend=backend)
    assert not log_p.isnan().any()
    assert (log_p <= 1e-5).all()
    total = log_p.detach().to(torch.float64).exp().sum(-1)
    assert_same(total, torch.ones_like(total), "probabilities sum to one", tolerance=10 * torch.finfo(dtype).eps)
    (by_z,) = torch.autograd.grad(log_p, z, torch.ones_like(log_p))
    assert not by_z.isnan().any()


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_member
def test_extras_and_parameters_of_any_finite_logit(member: Member, dtype: torch.dtype, backend: str) -> None:
    """At +-1e4; the log normaliser itself overflows only where the logits nearly do."""
    z = extreme_rows(dtype)
    z = z[(z.abs() <= 1e5).all(-1)]
    assert len(z) >= 10
    values = member.learned(V, torch.float32)
    loss, extras = sigsoftmax.cross_entropy(
        z,
        torch.full((z.shape[0],), 3),
        function=member.make(V, **values),
        backend=backend,
        reduction="sum",
        extras=("log_normalizer", "argmax", "entropy"),
    )
    truth = member.phi(z.double()).logsumexp(-1)
    assert_same(extras.log_normalizer, truth, "log normaliser", tolerance=1e-6)
    assert ((extras.entropy >= -1e-6) & (extras.entropy <= math.log(V) + 1e-5)).all()
    assert loss.isfinite()
    if values:
        assert all(g.isfinite().all() for g in gradients(loss, list(values.values())))


@every_backend
@every_dtype
@pytest.mark.parametrize("label", ["softmax", "sigsoftmax", "gss(k=0.2)", "relu", "softcap(c=5)"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixtures_of_extreme_logits_have_no_nan(label: str, smoothing: float, dtype: torch.dtype, backend: str) -> None:
    rows = extreme_rows(dtype)
    rows = rows[(rows.abs() <= 1e5).all(-1)]
    count = rows.shape[0]
    # An output matrix that is the identity makes the hidden vectors the logits.
    hidden = torch.stack([rows, rows.flip(0)], 1).requires_grad_()
    weight = torch.eye(V, dtype=dtype).requires_grad_()
    prior = torch.tensor([1e4, -1e4], dtype=dtype).expand(count, 2).clone().requires_grad_()
    loss = sigsoftmax.mixture_cross_entropy(
        hidden,
        prior,
        weight,
        torch.full((count,), 2),
        function=by_label[label].make(V),
        prior_function="sigsoftmax",
        backend=backend,
        label_smoothing=smoothing,
        reduction="none",
    )
    assert not loss.isnan().any()
    assert all(not g.isnan().any() for g in gradients(loss, [hidden, prior, weight]))


@settings(max_examples=40)
@given(
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=2, max_size=6),
    st.sampled_from([m.label for m in MEMBERS]),
)
def test_no_nan_for_floats_that_hypothesis_finds(row: list[float], label: str) -> None:
    z = torch.tensor([row], dtype=torch.float32)
    for backend in BACKENDS:
        for options in ({}, {"label_smoothing": 0.1}, {"z_loss": 1e-4}):
            losses, by_z = loss_and_gradient(z, torch.tensor([0]), by_label[label], backend, **options)
            assert not losses.isnan().any(), backend
            assert (losses >= -1e-6).all(), backend
            assert by_z.isfinite().all(), backend


EXACT_ROWS: dict[str, Sequence[float]] = {
    "largest bfloat16": (3.3895313892515355e38, 3.3895313892515355e38, 0.0, -3.3895313892515355e38),
    "most negative bfloat16": (-3.3895313892515355e38, -3.3895313892515355e38, -3.3895313892515355e38),
    "1e4 and near": (1e4, 1e4 - 1.0, 1e4 - 3.5, -1e4),
    "-1e4 and near": (-1e4, -1e4 - 1.0, -1e4 - 3.5, -1e4 + 0.5),
    "around the nonlinearity": (0.25, -0.25, 1e-20, -1e-20, 2.0, -60.0),
    "a far spread": (88.0, 0.0, -88.0, -104.0),
    "twice at the low end": (-1e30, -1e30, 0.0, 1.0),
    "far to both sides": (-3.4e38, 0.0, 1e30, -1.7e38, -1.7e38),
    "equally far to both sides": (3e38, -3e38, 0.0, 3e38, 1e4),
}
SLOPES = [
    *(replace(by_label["gss(k=-1)"], label=f"gss(k={k})", parameters={"k": k, "c": 0.0}) for k in (-100.0, -2.0, 50.0)),
    *(replace(by_label["softmax"], label=f"softmax({a})", parameters={"alpha": a}) for a in (0.5, 100.0)),
]


@every_backend
@pytest.mark.parametrize("row", EXACT_ROWS.values(), ids=EXACT_ROWS)
@pytest.mark.parametrize("member", [*(m for m in MEMBERS if not m.per_class), *SLOPES], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_extreme_rows_are_exact(member: Member, row: Sequence[float], smoothing: float, backend: str) -> None:
    """Against arithmetic with 120 digits, float32 rounding allowed, at every position of the target."""
    z = torch.tensor([list(row)] * len(row), dtype=torch.float32)
    losses, by_z = loss_and_gradient(z, torch.arange(len(row)), member, backend, label_smoothing=smoothing)
    exact = member.exact_log_probs(z[0].tolist())
    mean = mpmath.fsum(exact) / len(row)
    # relu's logarithms and what a user's phi returns are as good as float32 holds numbers of their size.
    scale = {"relu": 20.0, "user_atan": 5.0, "user_falling": float(z.abs().amax())}.get(member.name, 1.0)
    assert by_z.isfinite().all()
    for got, log_p in zip(losses.tolist(), exact, strict=True):
        expected = -float((1.0 - smoothing) * log_p + smoothing * mean)
        if expected > 3.4e38 or -log_p > 3.4e38:
            assert got > 3e38
        elif member.name != "user_falling" or -mpmath.fsum(exact) < 3.4e38:
            # The sum of what a user's phi returns may overflow.
            assert abs(got - expected) <= 4e-7 * (scale + abs(expected)), (got, expected)


@every_backend
def test_two_classes_far_to_the_left_share_the_probability(backend: str) -> None:
    found = sigsoftmax.probs(torch.tensor([-1e30, -1e30, 0.0, 1.0]), function="gss(k=-1)", backend=backend)
    assert_same(found, torch.tensor([0.5, 0.5, 0.0, 0.0]))


@every_backend
@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
def test_classes_that_meet_from_both_sides_of_c_are_right_to_a_rounding_of_their_phi(size: float, backend: str) -> None:
    """gss of negative k falls left of c and rises right of it: classes with logits far apart have phi that agree."""
    z, c = torch.tensor([[-size, 2.0 * size, -size, 2.0 * size]]), torch.tensor([0.25, -1.0, 1.5, 0.5])
    function = sigsoftmax.OutputFunction("gss", k=-2.0, c=c)
    losses = sigsoftmax.cross_entropy(
        z.expand(4, 4), torch.arange(4), function=function, reduction="none", backend=backend
    )
    phi = function.phi(z.double())
    torch.testing.assert_close(
        losses.double(), torch.logsumexp(phi, -1) - phi[0], rtol=4e-7, atol=4e-7 * (1.0 + 2.0 * size)
    )


@every_backend
@every_member
def test_z_loss_and_weights_of_0_make_no_nan(member: Member, backend: str) -> None:
    """Squares of normalisers overflow, and what overflows meets probabilities, priors and weights of 0."""
    z = extreme_rows(torch.float32)
    weight = torch.ones(V)
    weight[[0, 4]] = 0.0
    shares = torch.zeros(z.shape[0], V)
    shares[:, 2] = 1.0
    values = member.learned(V, torch.float32)
    if member.registers is not None:
        pytest.skip("what a user's phi returns may be infinite")
    # Row by row: gradients of parameters overflow, and their sum over rows would be that of two infinities.
    for row in range(z.shape[0]):
        for target in (torch.zeros(1, dtype=torch.int64), shares[:1]):
            logits = z[row : row + 1].clone().requires_grad_()
            loss = sigsoftmax.cross_entropy(
                logits,
                target,
                weight,
                function=member.make(V, **values),
                backend=backend,
                reduction="sum",
                z_loss=1e-4,
                label_smoothing=0.1,
            )
            assert not loss.isnan(), row
            assert not any(g.isnan().any() for g in gradients(loss, [logits, *values.values()])), row


@every_backend
@pytest.mark.parametrize("kind", ["linear", "mixture", "smoothed mixture", "log_probs"])
def test_steep_slopes_in_float16(kind: str, backend: str) -> None:
    """Gradients of relu's logits near 0 exceed float16, and those of what they are made of do not."""
    tokens, components, features = 6, 2, 5
    inputs = [1e-3 * torch.randn(tokens, components, features), 1e-3 * torch.randn(V, features)]
    inputs += [torch.randn(tokens, components)]
    target = torch.randint(V, (tokens,))

    def found(dtype: torch.dtype, backend: str) -> list[Tensor]:
        hidden, weight, prior = (t.half().to(dtype).requires_grad_() for t in inputs)
        options: dict[str, Any] = {"function": "relu", "backend": backend, "chunk_bytes": 100}
        if kind == "linear":
            loss = sigsoftmax.linear_cross_entropy(hidden[:, 0], weight, target, reduction="sum", **options)
        elif kind == "log_probs":
            log_p = sigsoftmax.mixture_log_probs(hidden, prior, weight, **options)
            loss = -log_p.to(torch.promote_types(dtype, torch.float32)).gather(-1, target[:, None]).sum()
        else:
            smoothing = 0.1 if kind == "smoothed mixture" else 0.0
            options |= {"label_smoothing": smoothing, "reduction": "sum"}
            loss = sigsoftmax.mixture_cross_entropy(hidden, prior, weight, target, **options)
        return gradients(loss, [hidden, weight])

    logits = inputs[0].half().flatten(0, 1) @ inputs[1].half().T
    assert (logits[logits > 0] < 0.1 / 65504).any()
    of_float16 = found(torch.float16, backend)
    assert all(g.isfinite().all() for g in of_float16)
    # Rounded logits are what the difference is made of.
    for a, e in zip(of_float16, found(torch.float16, "reference"), strict=True):
        assert_same(a, e, tolerance=4e-3)


@every_backend
@pytest.mark.parametrize("function", ["softmax", "sigsoftmax", "gss(k=-1)", "softmax(alpha=100)"])
def test_steep_z_losses_in_float16(function: str, backend: str) -> None:
    """The gradient of a z-loss by extreme logits exceeds float16; with a weight it may come back into range."""
    z_loss = 1e-3 if function == "softmax(alpha=100)" else 1.0
    hidden = torch.tensor([[60000.0, 1.0], [-60000.0, 1.0]], dtype=torch.float16).requires_grad_()
    # The second feature has no part in the logits: its gradient is a sum of products with 0.
    weight = torch.tensor([[1.0, 0.0], [0.5, 0.0], [-1.0, 0.0]], dtype=torch.float16).requires_grad_()
    target, options = torch.tensor([0, 2]), {"function": function, "z_loss": z_loss, "backend": backend}
    losses = sigsoftmax.linear_cross_entropy(hidden, weight, target, reduction="sum", **options)
    by_hidden, by_weight = gradients(losses, [hidden, weight])
    assert (by_hidden[:, 1] == 0).all()
    assert not by_weight.isnan().any()


@every_backend
def test_low_temperatures_in_float16(backend: str) -> None:
    """The gradient of logits is 1e6 times that of logits at a temperature of 1, and a small weight makes it less."""
    hidden = (1e-3 * torch.randn(4, 3)).half().requires_grad_()
    weight = (1e-3 * torch.randn(V, 3)).half()
    weight[:, 2] = 0.0
    statistics = sigsoftmax.linear_token_statistics(
        hidden, weight, torch.arange(4), function="softmax", temperature=1e-6, backend=backend
    )
    assert statistics.log_probs is not None
    (by_hidden,) = gradients(statistics.log_probs, [hidden])
    assert by_hidden.isfinite().all()
    assert (by_hidden[:, 2] == 0).all()


# Errors against plain torch

Result = tuple[Tensor, Tensor]


def plain_result(z: Tensor, target: Tensor, member: Member) -> Result:
    """Plain torch on the same logits: half precision widened to float32, as careful users do."""
    logits = z.clone().requires_grad_()
    wide = logits if logits.dtype == torch.float64 else logits.float()
    phi = 5.0 * torch.tanh(wide / 5.0) if member.name == "softcap" else member.phi(wide)
    losses = F.cross_entropy(phi, target, reduction="none").to(z.dtype)
    return losses.detach(), torch.autograd.grad(losses, logits, torch.ones_like(losses))[0]


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_member
def test_errors_are_no_larger_than_plain_torchs(member: Member, dtype: torch.dtype, backend: str) -> None:
    """Losses and gradients at deviations of 1 and 3 and shifts from -1e4 to 1e4."""
    rows, classes = 64, 200
    eps = torch.finfo(dtype).eps
    for deviation in (1.0, 3.0):
        for shift in SHIFTS:
            z = (deviation * torch.randn(rows, classes) + shift).to(dtype)
            target = torch.randint(classes, (rows,))
            exact = z.double().requires_grad_()
            true_losses = plain_loss(member.phi(exact).unsqueeze(1), target, reduction="none")
            (true_gradient,) = torch.autograd.grad(true_losses.sum(), exact)
            losses, by_z = loss_and_gradient(z, target, member, backend)
            plain_losses, plain_by_z = plain_result(z, target, member)
            where = f"deviation {deviation}, shift {shift:g}"
            bound = SLACK * frobenius_error(plain_losses, true_losses.detach())
            bound += 0.5 * eps * float(true_losses.detach().norm())
            assert frobenius_error(losses, true_losses.detach()) <= bound, f"losses: {where}"
            bound = SLACK * frobenius_error(plain_by_z, true_gradient) + 0.5 * eps * float(true_gradient.norm())
            assert frobenius_error(by_z, true_gradient) <= bound, f"gradient: {where}"


@every_backend
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("label", ["softmax", "sigsoftmax", "shifted(b=1.3)", "sigmoid", "gss(k=0)", "gss(k=2, c=1)"])
def test_float32_keeps_its_digits_at_every_level(label: str, shift: float, backend: str) -> None:
    """Digits that plain torch loses (6e-4 at -1e4): within 2e-6 of float64 on the logits as they are."""
    member = by_label[label]
    z = (3.0 * torch.randn(32, 100) + shift).float()
    target = torch.randint(100, (32,))
    losses, by_z = loss_and_gradient(z, target, member, backend)
    exact = z.double().requires_grad_()
    true_losses = plain_loss(member.phi(exact).unsqueeze(1), target, reduction="none")
    (true_gradient,) = torch.autograd.grad(true_losses.sum(), exact)
    assert_same(losses, true_losses.detach(), tolerance=2e-6)
    # Below the smallest normal number a float has fewer digits.
    assert frobenius_error(by_z, true_gradient) <= 2e-6 * float(true_gradient.norm()) + torch.finfo(z.dtype).tiny


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("label", ["softmax", "sigsoftmax", "shifted(b per class)", "relu"])
def test_errors_of_linear_losses_are_no_larger_than_plain_torchs(label: str, dtype: torch.dtype, backend: str) -> None:
    """Gradients of input, weight and bias through matrix products in the dtype; seven chunks."""
    member = by_label[label]
    tokens, features, classes = 70, 16, 120
    function = member.make(classes)
    eps = torch.finfo(dtype).eps
    for deviation in (1.0, 3.0):
        inputs = [
            torch.randn(tokens, features).to(dtype).requires_grad_(),
            (deviation / math.sqrt(features) * torch.randn(classes, features)).to(dtype).requires_grad_(),
            torch.randn(classes).to(dtype).requires_grad_(),
        ]
        exact = [t.detach().double().requires_grad_() for t in inputs]
        target = torch.randint(classes, (tokens,))
        # At its kink the slope of relu magnifies the rounding of a product beyond all bounds.
        logits = F.linear(*exact).detach()
        is_near_0 = logits.gather(1, target.unsqueeze(1)).squeeze(1).abs() < 0.1
        target = torch.where(is_near_0, logits.argmax(-1), target)
        hidden, weight, bias = inputs
        actual = sigsoftmax.linear_cross_entropy(
            hidden,
            weight,
            target,
            function=function,
            linear_bias=bias,
            chunk_bytes=10 * classes * dtype.itemsize,
            backend=backend,
        )
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        plain = F.cross_entropy(member.phi(F.linear(hidden, weight, bias).to(wide)), target)
        truth = F.cross_entropy(member.phi(F.linear(*exact)), target)
        true_gradients = gradients(truth, exact)
        found, plainly = gradients(actual, inputs), gradients(plain, inputs)
        for name, a, p, e in zip(("input", "weight", "bias"), found, plainly, true_gradients, strict=True):
            bound = SLACK * frobenius_error(p, e) + 0.5 * eps * float(e.norm())
            assert frobenius_error(a, e) <= bound, f"{name}, deviation {deviation}"


# Rows that do not count


@every_backend
@every_dtype
@every_member
def test_nan_in_ignored_rows_touches_nothing(member: Member, dtype: torch.dtype, backend: str) -> None:
    """Neither the loss nor the gradients of the other rows; the ignored rows' own gradients are zeros."""
    torch.manual_seed(1)
    z = torch.randn(8, V).to(dtype)
    target = torch.randint(V, (8,))
    ignored = [0, 3, 7]
    kept = [1, 2, 4, 5, 6]
    target[ignored] = -100
    poisoned = z.clone()
    poisoned[0] = math.nan
    poisoned[3, 2] = math.inf
    poisoned[7] = LEAST
    for smoothing in (0.0, 0.1):
        options: dict[str, Any] = {"function": member.make(V), "backend": backend, "label_smoothing": smoothing}
        for reduction in ("mean", "sum", "none"):
            clean, dirty = z.clone().requires_grad_(), poisoned.clone().requires_grad_()
            expected = sigsoftmax.cross_entropy(clean, target, reduction=reduction, z_loss=0.01, **options)
            actual = sigsoftmax.cross_entropy(dirty, target, reduction=reduction, z_loss=0.01, **options)
            # NaN in a block may send it to other routines: the last bit is theirs.
            tolerance = 4 * torch.finfo(dtype).eps
            assert_same(actual, expected, f"{reduction}, smoothing {smoothing}", tolerance=tolerance)
            (by_dirty,), (by_clean,) = gradients(actual, [dirty]), gradients(expected, [clean])
            assert (by_dirty[ignored] == 0).all(), f"{reduction}, smoothing {smoothing}"
            assert_same(by_dirty[kept], by_clean[kept], "gradient of the others", tolerance=tolerance)


@every_backend
@pytest.mark.parametrize("label", ["softmax", "sigsoftmax", "shifted(b per class)", "relu", "user, phi alone"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_tokens_that_overflow_do_not_reach_the_matrix(label: str, smoothing: float, backend: str) -> None:
    """Nor the bias, the prior, or a learned parameter: their logits are infinite, and NaN where infinities meet."""
    member = by_label[label]
    values = member.learned(V)
    hidden = torch.randn(6, 2, 4, dtype=torch.float64)
    hidden[2] *= 1e308
    weight = 10.0 * torch.randn(V, 4, dtype=torch.float64)
    assert not (hidden[2] @ weight.t()).isfinite().any()
    inputs = [hidden, torch.randn(6, 2, dtype=torch.float64), weight, torch.randn(V, dtype=torch.float64)]
    target = torch.tensor([1, 2, -100, 3, 4, 0])

    def results(rows: list[int]) -> tuple[Tensor, list[Tensor]]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        parameters = {key: value.detach().clone().requires_grad_() for key, value in values.items()}
        loss = sigsoftmax.mixture_cross_entropy(
            leaves[0][rows],
            leaves[1][rows],
            leaves[2],
            target[rows],
            function=member.make(V, **parameters),
            prior_function="softmax",
            linear_bias=leaves[3],
            label_smoothing=smoothing,
            z_loss=0.01,
            backend=backend,
        )
        return loss, gradients(loss, [*leaves, *parameters.values()])

    loss, with_overflow = results([0, 1, 2, 3, 4, 5])
    expected, without = results([0, 1, 3, 4, 5])
    assert_same(loss, expected, tolerance=1e-12)
    for a, e in zip(with_overflow, without, strict=True):
        assert_same(a, e, "gradient", tolerance=1e-11)


@every_backend
@pytest.mark.parametrize("label", ["softmax", "sigsoftmax", "gss(k=0.2)", "relu"])
def test_a_token_of_weight_zero_counts_like_an_ignored_one(label: str, backend: str) -> None:
    """Its loss may be inf."""
    z = torch.randn(4, V, dtype=torch.float64)
    z[1, 0] = LEAST
    z[2] = math.nan
    z.requires_grad_()
    target = torch.tensor([1, 0, 2, 3])
    weights = torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    options: dict[str, Any] = {"function": by_label[label].make(V), "backend": backend}
    actual = sigsoftmax.cross_entropy(z, target, token_weights=weights, **options)
    expected = sigsoftmax.cross_entropy(z[[0, 3]], target[[0, 3]], token_weights=weights[[0, 3]], **options)
    assert_same(actual, expected, tolerance=1e-12)
    (by_z,) = gradients(actual, [z])
    assert (by_z[[1, 2]] == 0).all()
    assert_same(by_z, gradients(expected, [z])[0], tolerance=1e-12)


# Memory that was never written


@pytest.mark.grid
@every_dtype
@every_member
def test_nothing_is_read_that_was_not_written(
    member: Member, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh memory full of NaN gives the same bits."""
    hidden, weight = torch.randn(13, 2, 4).to(dtype), torch.randn(V, 4).to(dtype)
    bias, prior = torch.randn(V).to(dtype), torch.randn(13, 2).to(dtype)
    target = torch.randint(V, (13,))
    target[::4] = -100
    inputs = [t.requires_grad_() for t in (hidden, weight, bias, prior)]
    values = member.learned(V, torch.float32)
    plain_function, learned_function = member.make(V), member.make(V, **values)

    def results() -> list[Tensor]:
        found: list[Tensor] = []
        for function, smoothing, reduction in (
            (plain_function, 0.0, "mean"),
            (plain_function, 0.1, "none"),
            (learned_function, 0.0, "sum"),
        ):
            options: dict[str, Any] = {"function": function, "linear_bias": bias, "backend": "blocked"}
            options |= {"chunk_bytes": 5 * V * dtype.itemsize}
            losses = {"label_smoothing": smoothing, "reduction": reduction}
            learned = list(values.values()) if function is learned_function else []
            loss = sigsoftmax.mixture_cross_entropy(hidden, prior, weight, target, **options, **losses)
            found += [loss, *gradients(loss, [*inputs, *learned])]
            loss = sigsoftmax.linear_cross_entropy(hidden[:, 0], weight, target, **options, **losses)
            found += [loss, *gradients(loss, [hidden, weight, bias, *learned])]
            loss = sigsoftmax.cross_entropy(hidden[:, 0], target % 4, function="softmax", backend="blocked", **losses)
            found += [loss, *gradients(loss, [hidden])]
            log_p = sigsoftmax.mixture_log_probs(hidden, prior, weight, **options)
            found += [log_p, *gradients(log_p, [*inputs, *learned])]
        return found

    expected = results()
    poisoned = _poison(monkeypatch)
    actual = results()
    assert poisoned, "no fresh memory was poisoned"
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


def _poison(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """From now on fresh floating-point memory is full of NaN; returns the list of shapes that were asked for."""
    shapes: list[tuple[int, ...]] = []

    def poisoning(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fresh(*arguments: Any, **options: Any) -> Tensor:
            result = original(*arguments, **options)
            if result.is_floating_point():
                shapes.append(tuple(result.shape))
                with torch.no_grad():
                    result.fill_(math.nan)
            return result

        return fresh

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))
    return shapes
