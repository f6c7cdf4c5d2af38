"""Every numbered statement of docs/mathematics.md, checked: a test cites in its docstring what it checks.

Formulas are written here a second time, straight from the page, and compared with autograd, with mpmath or float64, and
with ``family`` and ``backends.reference`` where these implement them.

Shapes: N rows, K components, V classes.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize_scalar
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax.backends import reference
from sigsoftmax.contract import normalizing
from sigsoftmax.contract.rows import Logarithms
from sigsoftmax.contract.spec import loss_spec, member_of
from sigsoftmax.family import OutputFunction, table
from sigsoftmax.family.formulas import LOGISTIC, RELU, SOFTCAP, Form

PAGE = Path(__file__).parents[1] / "docs" / "mathematics.md"
FLOAT64_NOISE = 1e-12
LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max
WIDE_LOGITS = (-1e4, -1e3, -100.0, -30.0, -3.0, 0.0, 3.0, 30.0, 60.0, 88.0, 104.0, 1e3, 1e4)
"""Levels of logits on both sides of the nonlinearity, and of float32's largest and smallest exponentials."""

MEMBERS = (
    OutputFunction("softmax"),
    OutputFunction("softmax", alpha=1.5),
    OutputFunction("sigsoftmax"),
    OutputFunction("shifted_sigsoftmax", b=1.3),
    OutputFunction("sigmoid"),
    OutputFunction("relu", eps=0.1),
    OutputFunction("gss", k=0.0),
    OutputFunction("gss", k=0.2, c=0.7),
    OutputFunction("gss", k=5.0, c=-1.0),
    OutputFunction("gss", k=-0.5),
    OutputFunction("softcap", c=3.0),
)
every_member = pytest.mark.parametrize("member", MEMBERS, ids=str)

# The members as formulas of mpmath numbers, from the tables of (M4) and (M6).
mpf = mpmath.mpf


def exact_softplus(x: mpf) -> mpf:
    return mpmath.log(1 + mpmath.exp(x))


def exact_sigmoid(x: mpf) -> mpf:
    return 1 / (1 + mpmath.exp(-x))


EXACT_PHI: dict[str, Callable[..., mpf]] = {
    "softmax": lambda z, alpha: alpha * z,
    "sigsoftmax": lambda z: z + mpmath.log(exact_sigmoid(z)),
    "shifted_sigsoftmax": lambda z, b: z + mpmath.log(exact_sigmoid(z + b)),
    "sigmoid": lambda z: mpmath.log(exact_sigmoid(z)),
    "relu": lambda z, eps: mpmath.log(max(z, 0) + eps),
    "gss": lambda z, k, c: k * (z - c) + c - (k - 1) * exact_softplus(z - c),
    "softcap": lambda z, c: c * mpmath.tanh(z / c),
}


def exact_phi(member: OutputFunction, z: float) -> mpf:
    # 80 digits leave 40 after a cancellation of values as far apart as any logits below can be.
    with mpmath.workdps(80):
        return EXACT_PHI[member.name](mpf(z), **{key: mpf(value) for key, value in member.parameters.items()})


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, deviation: float = 1.0) -> Tensor:
    return deviation * torch.randn(*shape, dtype=torch.float64)


def log_probs(member: OutputFunction, z: Tensor) -> Tensor:
    return normalizing.log_probs(z, member.form, member.arguments())


def probs(member: OutputFunction, z: Tensor) -> Tensor:
    return log_probs(member, z).exp()


def token_losses(
    member: OutputFunction,
    logits: Tensor,
    target: Tensor,
    log_prior: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """(N,) losses of the reference; logits are (N, V), or (N, K, V) with a prior."""
    logits_NKV = logits.unsqueeze(1) if log_prior is None else logits
    class_weight_V = options.pop("class_weight_V", None)
    prior = None if log_prior is None else member_of("softmax")[0]
    spec = loss_spec(member=member_of(member)[0], prior=prior, **options)
    prior_NK = None if log_prior is None else Logarithms(log_prior)
    results = reference.token_losses(spec, logits_NKV, prior_NK, member.arguments(), target, class_weight_V)
    return results.losses.values


def rank(matrix: Tensor, relative_threshold: float = 1e-10) -> int:
    values = torch.linalg.svdvals(matrix)
    return int((values > relative_threshold * values[0]).sum())


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = FLOAT64_NOISE) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def second_slope(member: OutputFunction, z: Tensor) -> Tensor:
    """phi'' of (M12)."""
    arguments = [a.to(z) for a in member.arguments()]
    if member.form is LOGISTIC:
        _, beta, c = arguments
        return -beta * torch.sigmoid(z - c) * torch.sigmoid(c - z)
    (argument,) = arguments
    if member.form is RELU:
        return -((z > 0) / (z + argument).square())
    assert member.form is SOFTCAP
    t = torch.tanh(z / argument)
    return -2.0 / argument * t * (1.0 - t.square())


# --- the page and this file agree -------------------------------------------------------------------------------


def test_page_and_tests_name_the_same_statements() -> None:
    page = PAGE.read_text(encoding="utf-8")
    statements = re.findall(r"\*\*\((M\d+)\)\*\*", page)
    errata = re.findall(r"^\| \*\*\((E\d+)\)\*\* \|.*\| (\w+) \|$", page, re.M)
    assert statements == [f"M{i + 1}" for i in range(len(statements))], "numbers are unique and in order"
    assert [name for name, _ in errata] == [f"E{i + 1}" for i in range(len(errata))]
    assert {kind for _, kind in errata} <= {"numeric", "wording", "data"}

    to_be_tested = {*statements, *(name for name, kind in errata if kind == "numeric")}
    functions = [
        node
        for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    cited = {
        number
        for node in functions
        for number in re.findall(r"\(([ME]\d+)\)", ast.get_docstring(node, clean=False) or "")
    }
    assert to_be_tested - cited == set(), "statements without a test"
    assert cited - to_be_tested == set(), "tests of statements that the page does not make"

    mentioned = set(re.findall(r"\b(M\d+|E\d+)\b", page))
    assert mentioned <= {*statements, *(name for name, _ in errata)}, "references to statements that do not exist"


# --- 1. and 2. output functions and members ---------------------------------------------------------------------


@every_member
def test_output_function_is_a_distribution_and_softmax_of_phi(member: OutputFunction) -> None:
    """(M1), (M2)"""
    z = normal(5, 7, deviation=3.0)
    g = member.phi(z).exp()
    assert_close(probs(member, z), g / g.sum(-1, keepdim=True))
    assert_close(log_probs(member, z), member.phi(z) - torch.logsumexp(member.phi(z), -1, keepdim=True))
    assert_close(probs(member, z).sum(-1), torch.ones(5, dtype=torch.float64))


@every_member
def test_constant_added_to_phi_changes_nothing_and_to_logits_only_if_phi_is_bent(member: OutputFunction) -> None:
    """(M3)"""
    z = normal(7, deviation=3.0)
    assert_close(torch.log_softmax(member.phi(z) + 5.0, -1), log_probs(member, z))
    moved = (log_probs(member, z + 0.5) - log_probs(member, z)).abs().max()
    assert (moved < FLOAT64_NOISE) == member.is_linear
    assert moved < FLOAT64_NOISE or moved > 1e-3


@every_member
def test_members_are_their_formulas(member: OutputFunction) -> None:
    """(M4), (M6): phi of the tables in arbitrary precision against the family."""
    z = torch.linspace(-40.0, 40.0, 81, dtype=torch.float64)
    expected = float64(*(float(exact_phi(member, x)) for x in z.tolist()))
    assert_close(member.phi(z), expected)


def test_table_of_the_logistic_form() -> None:
    """(M4): parameters become arguments as the page's table says."""
    mapping: dict[str, Callable[..., tuple[float, float, float]]] = {
        "softmax": lambda alpha: (alpha, 0.0, 0.0),
        "sigsoftmax": lambda: (1.0, 1.0, 0.0),
        "shifted_sigsoftmax": lambda b: (1.0, 1.0, -b),
        "sigmoid": lambda: (0.0, 1.0, 0.0),
        "gss": lambda k, c: (1.0, k - 1.0, c),
    }
    assert {definition.name for definition in table() if definition.form is LOGISTIC} == set(mapping)
    for member in MEMBERS:
        if member.form is LOGISTIC:
            expected = float64(*mapping[member.name](**member.parameters))
            assert_close(torch.stack(member.arguments()), expected)
            assert f"| `{member.name}` |" in PAGE.read_text(encoding="utf-8")


def test_identities_of_log_sigmoid_and_gss() -> None:
    """(M5)"""
    z = torch.linspace(-30.0, 30.0, 61, dtype=torch.float64)
    assert_close(F.logsigmoid(z), z - F.softplus(z, threshold=100))
    assert_close(F.logsigmoid(z), -F.softplus(-z, threshold=100))
    sigsoftmax = OutputFunction("sigsoftmax")
    assert_close(sigsoftmax.phi(z), 2 * z - F.softplus(z, threshold=100))
    assert_close(OutputFunction("gss", k=2.0, c=0.0).phi(z), sigsoftmax.phi(z))
    assert_close(OutputFunction("gss", k=1.0, c=0.4).phi(z), z)
    assert_close(OutputFunction("gss", k=0.0, c=0.0).phi(z).exp(), 1 + z.exp())


def test_slopes_of_relu_and_softcap() -> None:
    """(M6): the printed slopes, and the digits that the product of sigmoids keeps."""
    z = torch.linspace(-5.0, 5.0, 40, dtype=torch.float64)
    assert_close(OutputFunction("relu", eps=0.1).slope(z), (z > 0) / (z + 0.1))
    assert_close(OutputFunction("softcap", c=3.0).slope(z), 1 - torch.tanh(z / 3.0).square())
    far = torch.tensor([9.5 * 3.0])
    assert (1 - torch.tanh(far / 3.0).square()).item() == 0.0
    with mpmath.workdps(50):
        exact = float(1 - mpmath.tanh(mpf(9.5)) ** 2)
    assert OutputFunction("softcap", c=3.0).slope(far).item() == pytest.approx(exact, rel=1e-5)


# --- 3. derivatives ---------------------------------------------------------------------------------------------


@every_member
def test_gradient_of_log_f(member: OutputFunction) -> None:
    """(M7)"""
    z = normal(6, deviation=2.0)
    f = probs(member, z)
    identity = torch.eye(6, dtype=torch.float64)
    expected = (identity - f) * member.slope(z)
    assert_close(torch.func.jacrev(lambda x: log_probs(member, x))(z), expected)
    assert_close(torch.func.jacrev(lambda x: probs(member, x))(z), f[:, None] * expected)
    step = 1e-6
    differences = torch.stack(
        [(log_probs(member, z + step * e) - log_probs(member, z - step * e)) / (2 * step) for e in identity], -1
    )
    assert_close(differences, expected, 1e-7)


@every_member
def test_slope_is_the_derivative_of_phi(member: OutputFunction) -> None:
    """(M8)"""
    z = normal(50, deviation=4.0)
    assert_close(member.slope(z), torch.func.grad(lambda x: member.phi(x).sum())(z))
    if member.form is LOGISTIC:
        alpha, beta, c = (float(a) for a in member.arguments())
        assert_close(member.slope(z), alpha + beta * torch.sigmoid(c - z))
        low, high = sorted((alpha, alpha + beta))
        assert ((member.slope(z) >= low) & (member.slope(z) <= high)).all()
        assert_close(member.slope(float64(-800.0, 800.0)), float64(alpha + beta, alpha))


def test_slopes_of_named_members() -> None:
    """(M8): the three slopes written out."""
    z = normal(50, deviation=4.0)
    assert_close(OutputFunction("sigsoftmax").slope(z), 2 - torch.sigmoid(z))
    assert_close(OutputFunction("sigmoid").slope(z), 1 - torch.sigmoid(z))
    assert_close(OutputFunction("gss", k=0.2, c=0.7).slope(z), 0.2 + 0.8 * torch.sigmoid(z - 0.7))


PARAMETER_SLOPES: dict[tuple[str, str], Callable[..., Tensor]] = {
    ("softmax", "alpha"): lambda z, alpha: z,
    ("shifted_sigsoftmax", "b"): lambda z, b: 1 - torch.sigmoid(z + b),
    ("gss", "k"): lambda z, k, c: (z - c) - F.softplus(z - c),
    ("gss", "c"): lambda z, k, c: (k - 1) * (torch.sigmoid(z - c) - 1),
}
PARAMETER_VALUES = {"softmax": {"alpha": 1.3}, "shifted_sigsoftmax": {"b": 0.4}, "gss": {"k": 0.3, "c": -0.6}}


@pytest.mark.parametrize(("name", "key"), PARAMETER_SLOPES)
def test_derivatives_by_parameters(name: str, key: str) -> None:
    """(M9), (M10): of phi, and of log f for a shared parameter and for one value a class."""
    z = normal(6, deviation=2.0)
    values = PARAMETER_VALUES[name]

    def phi(parameter: Tensor) -> Tensor:
        return OutputFunction(name, **{**values, key: parameter}).phi(z)

    def log_f(parameter: Tensor) -> Tensor:
        return log_probs(OutputFunction(name, **{**values, key: parameter}), z)

    slope = PARAMETER_SLOPES[name, key](z, **values)
    shared = float64(values[key])[0]
    assert_close(torch.func.jacrev(phi)(shared), slope)
    f = log_f(shared).exp()
    assert_close(torch.func.jacrev(log_f)(shared), slope - (f * slope).sum())

    if not OutputFunction(name).definition.parameters[key].can_differ_by_class:
        return
    per_class = values[key] + 0.3 * normal(6)
    slope = PARAMETER_SLOPES[name, key](z, **{**values, key: per_class})
    f = log_f(per_class).exp()
    assert_close(torch.func.jacrev(log_f)(per_class), (torch.eye(6, dtype=torch.float64) - f) * slope)


def test_derivative_of_gss_by_k_is_log_sigmoid() -> None:
    """(M9): both ways of writing it."""
    z = normal(50, deviation=4.0)
    assert_close((z - 0.5) - F.softplus(z - 0.5), F.logsigmoid(z - 0.5))


def test_derivative_of_exp_times_sigmoid() -> None:
    """(M11)"""
    z = torch.linspace(-20.0, 20.0, 81, dtype=torch.float64)
    g = z.exp() * torch.sigmoid(z)
    by_autograd = torch.func.grad(lambda x: (x.exp() * torch.sigmoid(x)).sum())(z)
    for expected in ((2 - torch.sigmoid(z)) * g, (z.exp() + 2) / (1 + (-z).exp()).square()):
        torch.testing.assert_close(by_autograd, expected, rtol=FLOAT64_NOISE, atol=0.0)
    assert (by_autograd > 0).all()


@every_member
def test_second_derivatives_of_log_f(member: OutputFunction) -> None:
    """(M12)"""
    z = normal(5, deviation=2.0)
    f, slope, bend = probs(member, z), member.slope(z), second_slope(member, z)
    identity = torch.eye(5, dtype=torch.float64)
    assert_close(bend, torch.func.grad(lambda x: member.slope(x).sum())(z))
    by_autograd = torch.func.jacrev(torch.func.jacrev(lambda x: log_probs(member, x)))(z)
    for i in range(5):
        expected = torch.diag((identity[i] - f) * bend) - (slope * f)[:, None] * slope * (identity - f)
        assert_close(by_autograd[i], expected)


def test_cross_entropy_of_sigsoftmax_is_not_convex_in_the_logits() -> None:
    """(M13)"""
    z = float64(-6.0, 0.0, 0.0)

    def smallest_curvature(member: OutputFunction) -> float:
        hessian = torch.func.jacrev(torch.func.jacrev(lambda x: -log_probs(member, x)[0]))(z)
        return torch.linalg.eigvalsh(hessian).min().item()

    assert smallest_curvature(OutputFunction("softmax")) > -FLOAT64_NOISE
    assert smallest_curvature(OutputFunction("sigsoftmax")) == pytest.approx(-0.125, abs=1e-3)


# --- 4. row statistics ------------------------------------------------------------------------------------------


def test_absolute_values_of_s_and_n_cancel() -> None:
    """(M14): 6e-4 near -1e4 and NaN at the largest bfloat16; 1e-6 and finite with an offset."""
    sigsoftmax = OutputFunction("sigsoftmax")
    z = torch.tensor([-1e4, -1e4 - 1.0, -1e4 - 2.3, -1e4 - 0.7])
    exact = log_probs(sigsoftmax, z.double())

    def from_absolute_values(logits: Tensor) -> Tensor:
        return sigsoftmax.phi(logits) - torch.logsumexp(sigsoftmax.phi(logits), -1)

    assert (from_absolute_values(z) - exact).abs().max().item() == pytest.approx(6e-4, rel=0.5)
    assert (log_probs(sigsoftmax, z) - exact).abs().max() < 1e-6

    largest = torch.tensor([-LARGEST_BFLOAT16, -LARGEST_BFLOAT16])
    assert from_absolute_values(largest).isnan().all()
    assert_close(log_probs(sigsoftmax, largest), torch.full((2,), -math.log(2.0)), 1e-6)

    rows = normalizing.rows(z.double(), sigsoftmax.form, sigsoftmax.arguments())
    absolute = torch.logsumexp(sigsoftmax.phi(z.double()), -1)
    assert rows.log_normalizer.item() == pytest.approx(absolute.item(), rel=1e-14)


def logistic_parts(z: Tensor, m: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """lambda(z) and its offset, from (M15)."""
    centre = c.mean()
    unbent = (z - m) + (centre - c) + F.logsigmoid(c - z)
    return torch.where(m > centre, F.logsigmoid(z - c), unbent), (m - centre).clamp(max=0.0)


@pytest.mark.parametrize("level", [-50.0, -1.0, 0.0, 1.0, 50.0])
@pytest.mark.parametrize("per_class", [False, True], ids=["scalar", "per class"])
@pytest.mark.parametrize("slopes", [(0.8, -0.7), (1.0, -2.5), (-0.8, 0.0), (1.0, 1.0)], ids=str)
@pytest.mark.parametrize("end", [torch.amax, torch.amin], ids=["highest", "lowest"])
def test_logistic_form_relative_to_the_peak(
    level: float, per_class: bool, slopes: tuple[float, float], end: Callable[..., Tensor]
) -> None:
    """(M15), (M18): the formula is phi less the offset, and the code computes it and its derivatives."""
    z = level + normal(4, 6, deviation=3.0)
    m = end(z, -1, keepdim=True)
    alpha, beta = float64(slopes[0])[0], float64(slopes[1])[0]
    c = normal(6) if per_class else float64(0.3)[0]
    part, part_offset = logistic_parts(z, m, c)
    offset = alpha * m + beta * part_offset
    relative = alpha * (z - m) + beta * part
    assert_close(relative + offset, LOGISTIC.phi(z, alpha, beta, c))
    computed_relative, computed_offset = LOGISTIC.relative(z, m, alpha, beta, c)
    assert_close(computed_relative, relative)
    assert_close(computed_offset, offset)

    by_relative, by_offset = LOGISTIC.argument_slopes(z, m, alpha, beta, c)
    printed = ((z - m, part, -beta * torch.sigmoid(c - z)), (m, part_offset, torch.zeros_like(m)))
    for computed, expected in zip((*by_relative, *by_offset), (*printed[0], *printed[1]), strict=True):
        assert_close(computed, expected)
    assert_argument_slopes_are_derivatives(LOGISTIC, z, m, (alpha, beta, c))


@pytest.mark.parametrize("slopes", [(0.8, -0.7), (1.0, -2.5), (-0.8, 0.0), (1.0, 1.0), (1.0, -1.0)], ids=str)
@pytest.mark.parametrize("level", [-3.0, 0.0, 3.0])
def test_the_peak_is_where_phi_is_largest(slopes: tuple[float, float], level: float) -> None:
    """(M14): one of the two ends of the row, for a monotone or convex phi."""
    z = level + normal(50, 6, deviation=3.0)
    alpha, beta, c = float64(*slopes, 0.3)
    phi = LOGISTIC.phi(z, alpha, beta, c)
    assert LOGISTIC.peak is not None
    peak = LOGISTIC.peak(z.amin(-1, keepdim=True), z.amax(-1, keepdim=True), alpha, beta, c)
    assert_close(LOGISTIC.phi(peak, alpha, beta, c), phi.amax(-1, keepdim=True))


@pytest.mark.parametrize(
    "slopes", [(1.0, 1.0), (1.0, -2.0), (1.0, -101.0), (100.0, 0.0), (-3.0, 0.0), (0.0, 1.0)], ids=str
)
def test_units_keep_extreme_logits_finite(slopes: tuple[float, float]) -> None:
    """(M15): phi less its offset is finite in units of 2 S, and the unit is a power of two."""
    z = torch.tensor([3.4e38, -3.4e38, 1.7e38, -1.7e38, 0.0, 1.0])
    alpha, beta, c = torch.tensor([*slopes, 0.0])
    for peak in z:
        value, unit = LOGISTIC.scaled(z, peak, alpha, beta, c).value, LOGISTIC.unit(alpha, beta, c)
        assert value.isfinite().all()
        assert math.frexp(float(unit))[0] == 0.5
        with mpmath.workdps(60):
            exact = [mpmath.mpf(slopes[0]) * x + slopes[1] * min(x, mpmath.mpf(0)) for x in map(mpmath.mpf, z.tolist())]
            at_peak = exact[z.tolist().index(float(peak))]
            for found, expected in zip(value.tolist(), exact, strict=True):
                # The tail is at most |beta| log 2.
                error = abs(found * mpmath.mpf(float(unit)) - (expected - at_peak))
                assert error <= 0.7 * abs(slopes[1]) + 4e-7 * abs(expected - at_peak)


def assert_argument_slopes_are_derivatives(form: Form, z: Tensor, m: Tensor, arguments: tuple[Tensor, ...]) -> None:
    # Wide arguments give a derivative for every element; the centre of a wide c is then its mean over all of it.
    wide = tuple(a.expand_as(z).clone().requires_grad_() for a in arguments)
    relative, _ = form.relative(z, m, *wide)
    by_autograd = torch.autograd.grad(relative.sum(), wide)
    printed, _ = form.argument_slopes(z, m, *arguments)
    for computed, expected in zip(by_autograd, printed, strict=True):
        assert_close(computed, expected.expand_as(computed))
    narrow = tuple(a.clone().requires_grad_() for a in arguments)
    _, offset = form.relative(z, m, *narrow)
    by_autograd = torch.autograd.grad(offset.sum(), narrow, materialize_grads=True, allow_unused=True)
    _, printed = form.argument_slopes(z, m, *arguments)
    for computed, expected in zip(by_autograd, printed, strict=True):
        assert_close(computed.sum(), expected.sum())


def test_offset_of_sigsoftmax() -> None:
    """(M15): m if m >= 0, else 2m; nothing overflows at the ends of float32."""
    sigsoftmax = OutputFunction("sigsoftmax")
    for m in (-7.0, 0.0, 7.0):
        rows = normalizing.rows(float64(m, m - 1.0), sigsoftmax.form, sigsoftmax.arguments())
        assert rows.offset.item() == (m if m >= 0 else 2 * m)
    ends = torch.tensor([LARGEST_BFLOAT16, 0.0, -LARGEST_BFLOAT16])
    for name in ("softmax", "sigsoftmax", "sigmoid"):
        assert not log_probs(OutputFunction(name), ends).isnan().any()


def test_relu_relative_to_the_peak() -> None:
    """(M16)"""
    relu = OutputFunction("relu")
    for scale in (1e-3, 1.0, 1e4, 1e38):
        z = (scale * torch.randn(20, 30)).clamp(-3e38, 3e38)
        m = z.amax(-1, keepdim=True)
        eps = torch.tensor(1e-8)
        relative, offset = RELU.relative(z, m, eps)
        exact = relu.phi(z.double()) - relu.phi(m.double())
        assert (relative - exact).abs().max() < 2e-5
        assert_close(offset, RELU.phi(m, eps))
    z = normal(4, 6)
    assert_argument_slopes_are_derivatives(RELU, z, z.amax(-1, keepdim=True), (float64(0.1)[0],))


def test_softcap_relative_to_the_peak() -> None:
    """(M17): the identity, and that a wide cap does not cancel."""
    z = normal(4, 6, deviation=3.0)
    m = z.amax(-1, keepdim=True)
    c = float64(3.0)[0]
    x, x_m = z / c, m / c
    expected = c * torch.tanh((z - m) / c) * (1 - torch.tanh(x) * torch.tanh(x_m))
    assert_close(expected, SOFTCAP.phi(z, c) - SOFTCAP.phi(m, c))
    assert_close(SOFTCAP.relative(z, m, c)[0], expected)
    assert_close(SOFTCAP.relative(z, m, c)[1], SOFTCAP.phi(m, c))
    assert_argument_slopes_are_derivatives(SOFTCAP, z, m, (c,))

    z32, m32, wide = torch.tensor([1000.0, 1000.25]), torch.tensor([1000.25]), torch.tensor(3e4)
    exact = SOFTCAP.phi(z32.double(), wide.double()) - SOFTCAP.phi(m32.double(), wide.double())
    x, x_m = z32 / wide, m32 / wide
    printed = wide * torch.tanh((z32 - m32) / wide) * (1 - torch.tanh(x) * torch.tanh(x_m))
    assert (printed - exact).abs().max() < 1e-7
    assert (SOFTCAP.phi(z32, wide) - SOFTCAP.phi(m32, wide) - exact).abs().max() > 1e-5


def test_offset_matters_for_z_loss_alone() -> None:
    """(M18): n - s has no derivative through the offset; n has."""
    z = normal(5)
    m = z.amax(-1, keepdim=True)
    k = float64(0.4)[0].requires_grad_()

    def gradients(with_offset: bool) -> tuple[Tensor, Tensor]:
        relative, offset = LOGISTIC.relative(z, m, float64(1.0)[0], k - 1, float64(5.0)[0])
        phi = relative + (offset if with_offset else offset.detach())
        n = torch.logsumexp(phi, -1)
        (of_loss,) = torch.autograd.grad(n - phi[2], k, retain_graph=True)
        (of_n,) = torch.autograd.grad(n, k)
        return of_loss, of_n

    (loss_with, n_with), (loss_without, n_without) = gradients(True), gradients(False)
    assert_close(loss_with, loss_without)
    assert (n_with - n_without).abs() > 0.1


# --- 5. losses --------------------------------------------------------------------------------------------------


LOSS_OPTIONS = list(itertools.product([0.0, 0.1], [False, True], [0.0, 1e-2]))
every_option = pytest.mark.parametrize(("smoothing", "weighted", "z_loss"), LOSS_OPTIONS)


def loss_inputs(weighted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits (N, V), class indices (N,), probabilities (N, V), class weights (V,)."""
    weight = torch.rand(7, dtype=torch.float64) + 0.5 if weighted else torch.ones(7, dtype=torch.float64)
    # Probabilities of sum 0.9: torch does not ask for 1, and the formula must not either.
    return normal(5, 7, deviation=2.0), torch.tensor([0, 6, 3, 3, 1]), 0.9 * torch.softmax(normal(5, 7), -1), weight


@every_option
@every_member
def test_losses_and_their_coefficients(member: OutputFunction, smoothing: float, weighted: bool, z_loss: float) -> None:
    """(M19), (M20), (M21): the printed loss, and its gradient from a_n and a_j."""
    z, index, probabilities, weight = loss_inputs(weighted)
    phi, f = member.phi(z), probs(member, z)
    n = torch.logsumexp(phi, -1)
    options = {"class_weight_V": weight, "label_smoothing": smoothing, "z_loss": z_loss}

    s = phi.gather(-1, index[:, None]).squeeze(-1)
    printed = (1 - smoothing) * weight[index] * (n - s) + z_loss * n.square()
    printed = printed + smoothing / 7 * (weight * (n[:, None] - phi)).sum(-1)
    a_n = (1 - smoothing) * weight[index] + smoothing / 7 * weight.sum() + 2 * z_loss * n
    a_j = F.one_hot(index, 7) * (-(1 - smoothing) * weight[index])[:, None] - smoothing / 7 * weight
    check_loss(member, z, index, printed, member.slope(z) * (a_n[:, None] * f + a_j), options)

    smooth = (1 - smoothing) * probabilities + smoothing / 7
    printed = (weight * smooth * (n[:, None] - phi)).sum(-1) + z_loss * n.square()
    a_n = (weight * smooth).sum(-1) + 2 * z_loss * n
    a_j = -weight * smooth
    check_loss(member, z, probabilities, printed, member.slope(z) * (a_n[:, None] * f + a_j), options)


def check_loss(
    member: OutputFunction, z: Tensor, target: Tensor, loss: Tensor, gradient: Tensor, options: dict[str, Any]
) -> None:
    leaf = z.clone().requires_grad_()
    computed = token_losses(member, leaf, target, **options)
    assert_close(computed, loss)
    assert_close(torch.autograd.grad(computed.sum(), leaf)[0], gradient)
    if not options["z_loss"]:
        of_torch = F.cross_entropy(
            member.phi(z),
            target,
            options["class_weight_V"],
            label_smoothing=options["label_smoothing"],
            reduction="none",
        )
        assert_close(loss, of_torch)


def test_gradient_of_a_loss_by_a_parameter() -> None:
    """(M21): sum of (a_n f_j + a_j) dphi/dtheta."""
    z, index, _, _ = loss_inputs(False)
    k = float64(0.3)[0].requires_grad_()
    member = OutputFunction("gss", k=k, c=-0.6)
    (by_autograd,) = torch.autograd.grad(token_losses(member, z, index, z_loss=0.02).sum(), k)
    n = torch.logsumexp(member.phi(z), -1, keepdim=True)
    coefficients = (1 + 2 * 0.02 * n) * probs(member, z) - F.one_hot(index, 7)
    assert_close(by_autograd, (coefficients * F.logsigmoid(z + 0.6)).sum().detach())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_reductions(smoothing: float) -> None:
    """(M22): torch's mean for t = 1; whole-number token weights are copies; ignored tokens do not count."""
    member = OutputFunction("sigsoftmax")
    z, index, probabilities, weight = loss_inputs(True)
    index = index.clone()
    index[2] = -100
    copies = torch.tensor([1, 3, 2, 0, 2])

    def mean(losses: Tensor, token_weights: Tensor, of_class: Tensor) -> Tensor:
        return (token_weights * losses).sum() / (token_weights * of_class).sum()

    def repeated(x: Tensor) -> Tensor:
        return x.repeat_interleave(copies, 0)

    of_class = torch.where(index >= 0, weight[index.clamp(min=0)], torch.zeros(5, dtype=torch.float64))
    for target, divisor in ((index, of_class), (probabilities, torch.ones(5, dtype=torch.float64))):
        losses = token_losses(member, z, target, class_weight_V=weight, label_smoothing=smoothing)
        plain = F.cross_entropy(member.phi(z), target, weight, label_smoothing=smoothing)
        assert_close(mean(losses, torch.ones_like(losses), divisor), plain)
        copied = F.cross_entropy(repeated(member.phi(z)), repeated(target), weight, label_smoothing=smoothing)
        assert_close(mean(losses, copies, divisor), copied)

    t = torch.tensor([0.0, 1.0, 2.0, 0.0, 0.5], dtype=torch.float64, requires_grad=True)
    losses = token_losses(member, z, index, class_weight_V=weight, label_smoothing=smoothing).detach()
    total = mean(losses, t, of_class)
    (by_t,) = torch.autograd.grad(total, t)
    assert_close(by_t, ((losses - of_class * total) / (t * of_class).sum()).detach())

    without, with_z = (token_losses(member, z, index, class_weight_V=weight, z_loss=factor) for factor in (0.0, 0.3))
    n = torch.logsumexp(member.phi(z), -1)
    assert_close(with_z - without, torch.where(index >= 0, 0.3 * n.square(), torch.zeros_like(n)))


# --- 6. one exponential -----------------------------------------------------------------------------------------


def one_exponential(z: Tensor, c: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sigma, f, n - o and o by (M23), in the arithmetic of z."""
    m = z.amax(-1, keepdim=True)
    h = m - c
    u = torch.exp(z - m)
    a, b = torch.exp(h.clamp(max=0.0)), torch.exp((-h).clamp(max=0.0))
    ratio = u / (a * u + b).clamp(min=torch.finfo(z.dtype).tiny)
    omega = u * ratio
    total = omega.sum(-1, keepdim=True)
    return a * ratio, omega / total, total.log(), m + h.clamp(max=0.0)


def one_softmax(z: Tensor, c: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same by (M25)."""
    m = z.amax(-1, keepdim=True)
    h = m - c
    p = torch.softmax(z, -1)
    p_m = p.amax(-1, keepdim=True)
    a, b = torch.exp(h.clamp(max=0.0)), torch.exp((-h).clamp(max=0.0))
    ratio = p / (a * p + (b * p_m).clamp(min=1e-30))
    omega = p * ratio
    total = omega.sum(-1, keepdim=True)
    return a * ratio, omega / total, total.log() - p_m.log(), m + h.clamp(max=0.0)


both_formulas = pytest.mark.parametrize("formula", [one_exponential, one_softmax])


@both_formulas
@pytest.mark.parametrize("c", [0.0, 1.5])
@pytest.mark.parametrize("level", [-20.0, -1.0, 0.0, 1.0, 20.0])
def test_one_exponential_is_sigsoftmax(formula: Callable[..., tuple[Tensor, ...]], level: float, c: float) -> None:
    """(M23), (M25): exact up to float64's rounding."""
    z = level + normal(5, 9, deviation=2.0)
    shifted = OutputFunction("shifted_sigsoftmax", b=-c)
    sigma, f, relative_n, offset = formula(z, c)
    assert_close(sigma, torch.sigmoid(z - c))
    assert_close(f, probs(shifted, z))
    assert_close(relative_n + offset, torch.logsumexp(shifted.phi(z), -1, keepdim=True))
    if c == 0.0:
        m = z.amax(-1, keepdim=True)
        assert_close(offset, torch.where(m >= 0, m, 2 * m))
        p = torch.softmax(z, -1)
        kappa = torch.exp(-m) * p.amax(-1, keepdim=True)
        assert_close(p / (p + kappa), torch.sigmoid(z))
        printed = (p * torch.sigmoid(z)).sum(-1, keepdim=True).log() - p.amax(-1, keepdim=True).log()
        assert_close(torch.logsumexp(shifted.phi(z), -1, keepdim=True) - m, printed)


@both_formulas
@pytest.mark.parametrize("level", WIDE_LOGITS)
@pytest.mark.parametrize("deviation", [0.1, 3.0, 20.0])
def test_one_exponential_is_accurate_in_float32(
    formula: Callable[..., tuple[Tensor, ...]], level: float, deviation: float
) -> None:
    """(M24), (M25), (M26): within 1e-6 of float64 from -1e4 to 1e4, and the sigmoid as far as f weighs it."""
    z = (level + deviation * torch.randn(20, 200)).float()
    sigma, f, relative_n, offset = formula(z)
    sigsoftmax = OutputFunction("sigsoftmax")
    exact = normalizing.rows(z.double(), sigsoftmax.form, sigsoftmax.arguments())
    log_f = exact.log_probs
    exact_f = log_f.exp()
    kept = exact_f > 1e-24
    assert ((f - exact_f).abs() / (exact_f * (1 + log_f.abs())))[kept].max() < 1e-6
    assert (f - exact_f)[~kept].abs().sum() < 1e-20
    assert (relative_n - exact.normalizer).abs().max() < 1e-6
    assert_close(offset.double(), exact.offset, 1e-6)
    assert ((sigma - torch.sigmoid(z.double())).abs() * exact_f).max() < 1e-6


def test_float64_is_a_fair_judge_of_float32() -> None:
    """(M24): float64's own values against arbitrary precision, at the ends of the range."""
    sigsoftmax = OutputFunction("sigsoftmax")
    for level in WIDE_LOGITS:
        z = [level, level - 0.7, level - 12.3, level + 0.1]
        with mpmath.workdps(80):
            phi = [exact_phi(sigsoftmax, x) for x in z]
            n = max(phi) + mpmath.log(mpmath.fsum(mpmath.exp(p - max(phi)) for p in phi))
            expected = float64(*(float(p - n) for p in phi))
        assert_close(log_probs(sigsoftmax, float64(*z)), expected, 1e-10)


def test_guard_and_order_of_the_product() -> None:
    """(M24): 0/0 without the guard, and the digits that squaring first loses."""
    z = torch.tensor([1000.0, 0.0])
    u = torch.exp(z - 1000.0)
    b = torch.exp(torch.tensor(-1000.0))
    assert (u / (u + b)).isnan().any()
    assert not any(result.isnan().any() for result in one_exponential(z))

    m = 60.0
    for gap, is_zero in ((48.0, False), (53.0, True)):
        z = torch.tensor([m, m - gap])
        u = torch.exp(z - m)
        squared = (u.square() / (u + math.exp(-m)))[1].item()
        exact = (torch.sigmoid(z.double()) * torch.exp(z.double() - m))[1].item()
        assert (squared == 0.0) == is_zero
        assert abs(squared / exact - 1) > 1e-5
        assert one_exponential(z)[1][1].item() == pytest.approx(exact, rel=1e-5)


def test_sigmoid_of_the_formula_is_wrong_at_a_far_target() -> None:
    """(M26)"""
    z = torch.tensor([1e4, 9000.0])
    assert one_exponential(z)[0][1].item() == 0.0
    assert torch.sigmoid(z)[1].item() == 1.0
    leaf = z.clone().requires_grad_()
    sigsoftmax = OutputFunction("sigsoftmax")
    (gradient,) = torch.autograd.grad(-log_probs(sigsoftmax, leaf)[1], leaf)
    assert_close(gradient, torch.tensor([1.0, -1.0]), 1e-6)


@pytest.mark.parametrize("height", [0.0, 0.3, 4.0, 19.0])
def test_elements_share_reciprocals_and_logarithms(height: float) -> None:
    """(M23), and what elements share."""
    c = 0.7
    z = torch.cat([torch.zeros(1), -8.0 * torch.rand(7)]).double() + (c + height)
    m = z.max()
    u, b = torch.exp(z - m), torch.exp(c - m)
    d = u + b
    log_sigmoid = F.logsigmoid(z - c)
    log_weights, slope = z + log_sigmoid - m, 2.0 - log_sigmoid.exp()
    weights = log_weights.exp()
    for left, right in ((0, 1), (2, 3), (1, 7)):
        s, p = u[left] + u[right], u[left] * u[right]
        q = p + b * s
        torch.testing.assert_close((p + q) / (q + b * b), log_sigmoid[left].exp() + log_sigmoid[right].exp())
        torch.testing.assert_close(q + b * b, d[left] * d[right])
        torch.testing.assert_close(d[right] / (q + b * b), 1.0 / d[left])
    torch.testing.assert_close(u - b * log_sigmoid.exp(), weights)
    torch.testing.assert_close(u * (1.0 - (b / d) ** 2), weights * slope)
    torch.testing.assert_close(1.0 + b / d, slope)
    torch.testing.assert_close(2.0 * (z - m).sum() - d.prod().log(), log_weights.sum())


@pytest.mark.parametrize("height", [0.0, 0.3, 4.0])
def test_a_sum_of_differences_keeps_its_digits(height: float) -> None:
    """(M23), what elements share: the bound, which a row of equal logits far below the largest comes near to."""
    classes, b = 100_000, math.exp(-height)
    ratios = []
    for level in torch.linspace(-12.0, 0.0, 49).double():
        u = torch.full((classes,), math.exp(level), dtype=torch.float64)
        u[0] = 1.0
        ratios.append((u.sum() / (u * u / (u + b)).sum()).item())
    bound = 0.5 * (1.0 + math.sqrt(1.0 + 8.0 * classes * b))
    assert 0.3 * bound < max(ratios) <= bound


# --- 7. mixtures ------------------------------------------------------------------------------------------------

MIXED = (OutputFunction("softmax"), OutputFunction("sigsoftmax"), OutputFunction("gss", k=0.2, c=0.7))
every_mixture = pytest.mark.parametrize("member", MIXED, ids=str)
every_floor = pytest.mark.parametrize("floor", [0.0, 0.05], ids=["exact", "floor"])


@every_mixture
def test_mixture_in_log_space(member: OutputFunction) -> None:
    """(M27)"""
    z = normal(4, 3, 6, deviation=2.0)
    log_prior = torch.log_softmax(normal(4, 3), -1)
    mixed = (log_prior.exp()[..., None] * probs(member, z)).sum(1)
    assert_close(normalizing.mixture_log_probs(z, Logarithms(log_prior), member.form, member.arguments()), mixed.log())
    n = torch.logsumexp(member.phi(z), -1, keepdim=True)
    assert_close(torch.logsumexp(log_prior[..., None] + member.phi(z) - n, 1), mixed.log())


@every_floor
@every_mixture
def test_gradient_of_a_mixture_loss(member: OutputFunction, floor: float) -> None:
    """(M28), (M29): responsibilities, with and without the floor, for a prior of either kind."""
    z = normal(4, 3, 6, deviation=2.0).requires_grad_()
    prior_logits = normal(4, 3).requires_grad_()
    target = torch.tensor([0, 5, 2, 2])
    for prior_function in (OutputFunction("softmax"), OutputFunction("sigsoftmax")):
        log_prior = log_probs(prior_function, prior_logits)
        losses = token_losses(member, z, target, log_prior, floor=floor)
        by_z, by_prior = torch.autograd.grad(losses.sum(), (z, prior_logits))

        with torch.no_grad():
            phi, f = member.phi(z), probs(member, z)
            at_target = target[:, None, None].expand(4, 3, 1)
            s, n = phi.gather(-1, at_target).squeeze(-1), torch.logsumexp(phi, -1)
            prior = log_prior.exp()
            p_y = (prior * f.gather(-1, at_target).squeeze(-1)).sum(-1, keepdim=True)
            assert_close(losses, -torch.log(p_y + floor).squeeze(-1))
            r = torch.softmax(log_prior + s - n, -1)
            assert_close(r, prior * f.gather(-1, at_target).squeeze(-1) / p_y)
            rho = p_y / (p_y + floor)
            one_hot = F.one_hot(target, 6)[:, None]
            assert_close(by_z, (rho * r)[..., None] * member.slope(z) * (f - one_hot))
            assert_close(by_prior, prior_function.slope(prior_logits) * rho * (prior - r))


def test_gradient_of_a_mixture_loss_by_s_and_n() -> None:
    """(M28): the coefficients of the row statistics themselves."""
    s, n, log_prior = normal(3).requires_grad_(), (normal(3) + 3).requires_grad_(), torch.log_softmax(normal(3), -1)
    p_y = (log_prior + s - n).exp().sum()
    by_s, by_n = torch.autograd.grad(-torch.log(p_y + 0.02), (s, n))
    rho_r = p_y / (p_y + 0.02) * torch.softmax(log_prior + s - n, -1)
    assert_close(by_s, -rho_r.detach())
    assert_close(by_n, rho_r.detach())


@every_floor
@every_mixture
def test_dense_gradient_of_a_mixture_loss(member: OutputFunction, floor: float) -> None:
    """(M30): smoothing and probability targets, with and without the floor; one target is a special case."""
    z = normal(4, 3, 6, deviation=2.0).requires_grad_()
    log_prior = torch.log_softmax(normal(4, 3), -1).requires_grad_()
    index = torch.tensor([0, 5, 2, 2])
    probabilities = torch.softmax(normal(4, 6), -1)
    weight = torch.rand(6, dtype=torch.float64) + 0.5
    one_hot = F.one_hot(index, 6).double()
    cases: list[tuple[Tensor, float, Tensor]] = [
        (index, 0.0, weight * one_hot),
        (index, 0.1, weight * (0.9 * one_hot + 0.1 / 6)),
        (probabilities, 0.1, weight * (0.9 * probabilities + 0.1 / 6)),
    ]
    for target, smoothing, coefficients in cases:
        losses = token_losses(
            member, z, target, log_prior, floor=floor, class_weight_V=weight, label_smoothing=smoothing
        )
        by_z, by_log_prior = torch.autograd.grad(losses.sum(), (z, log_prior))
        with torch.no_grad():
            f = probs(member, z)
            joint = log_prior.exp()[..., None] * f
            p = joint.sum(1, keepdim=True)
            r = joint / p
            upstream = -coefficients[:, None] * p / (p + floor)
            total = (upstream * r).sum(-1)
            assert_close(by_log_prior, total)
            assert_close(by_z, member.slope(z) * (upstream * r - f * total[..., None]))


def test_floor_adds_mass_and_caps_the_loss() -> None:
    """(M31), (E13)"""
    member = OutputFunction("softmax")
    z = normal(2, 3, 50)
    z[1, :, 0] = -1e3
    log_prior = torch.log_softmax(normal(2, 3), -1)
    floored = normalizing.mixture_log_probs(z, Logarithms(log_prior), member.form, member.arguments(), floor=1e-8)
    assert_close(floored.exp().sum(-1), torch.full((2,), 1 + 50e-8, dtype=torch.float64))
    assert -floored[1, 0].item() == pytest.approx(-math.log(1e-8))
    assert round(-math.log(1e-8), 2) == 18.42
    exact = normalizing.mixture_log_probs(z, Logarithms(log_prior), member.form, member.arguments())
    assert exact[1, 0] < -900


@every_mixture
def test_z_loss_of_a_mixture(member: OutputFunction) -> None:
    """(M32)"""
    z = normal(4, 3, 6, deviation=2.0).requires_grad_()
    log_prior = torch.log_softmax(normal(4, 3), -1).requires_grad_()
    target = torch.tensor([0, 5, 2, 2])
    without, with_z = (token_losses(member, z, target, log_prior, z_loss=factor).sum() for factor in (0.0, 0.3))
    n = torch.logsumexp(member.phi(z), -1)
    prior = log_prior.exp()
    assert_close(with_z - without, 0.3 * (prior * n.square()).sum())
    by_z, by_log_prior = torch.autograd.grad(with_z - without, (z, log_prior))
    assert_close(by_z, (2 * 0.3 * prior * n)[..., None] * member.slope(z) * probs(member, z))
    assert_close(by_log_prior, torch.zeros_like(by_log_prior))


# --- 8. masks ---------------------------------------------------------------------------------------------------


@every_member
def test_masks(member: OutputFunction) -> None:
    """(M33)"""
    z = normal(6, deviation=2.0)
    masked = z.clone()
    masked[[1, 4]] = -math.inf
    kept = [0, 2, 3, 5]
    computed = log_probs(member, masked)
    assert_close(computed[kept], log_probs(member, z[kept]))
    assert (computed[[1, 4]] == -math.inf).all()

    def gradient(target: int) -> Tensor:
        leaf = masked.clone().requires_grad_()
        return torch.autograd.grad(-log_probs(member, leaf)[target], leaf)[0]

    f = computed.exp()
    slope = torch.where(masked == -math.inf, torch.ones_like(z), member.slope(z))
    for target in (0, 1):
        assert_close(gradient(target), slope * (f - F.one_hot(torch.tensor(target), 6)))
    assert log_probs(member, torch.full((3,), -math.inf)).isnan().all()


def test_masked_target_of_softmax_is_as_in_torch() -> None:
    """(M33): torch's loss and torch's gradient."""
    masked = float64(0.3, -math.inf, 1.0).requires_grad_()
    ours = -log_probs(OutputFunction("softmax"), masked)[1]
    of_torch = F.cross_entropy(masked, torch.tensor(1))
    assert ours.item() == of_torch.item() == math.inf
    assert_close(torch.autograd.grad(ours, masked)[0], torch.autograd.grad(of_torch, masked)[0])
    assert torch.log_softmax(torch.full((3,), -math.inf), -1).isnan().all()


@every_mixture
def test_mixture_masked_at_its_target(member: OutputFunction) -> None:
    """(M34)"""
    z = normal(2, 3, 6)
    z[0, :, 1] = -math.inf
    z.requires_grad_()
    log_prior = torch.log_softmax(normal(2, 3), -1).requires_grad_()
    target = torch.tensor([1, 1])
    for floor, expected in ((0.0, math.inf), (1e-8, -math.log(1e-8))):
        losses = token_losses(member, z, target, log_prior, floor=floor)
        assert losses[0].item() == pytest.approx(expected)
        by_z, by_log_prior = torch.autograd.grad(losses.sum(), (z, log_prior))
        assert (by_z[0] == 0).all()
        assert (by_log_prior[0] == 0).all()
        assert by_z.isfinite().all()


# --- 9. the bottleneck ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("ones_in_span", [False, True])
def test_rank_of_log_softmax(alpha: float, ones_in_span: bool) -> None:
    """(M35), (M36): d + 1, d + 2 with a bias; one less each if 1 lies in the span of W."""
    softmax = OutputFunction("softmax", alpha=alpha)
    features, weight, bias = normal(80, 5), normal(60, 5), normal(60)
    if ones_in_span:
        weight[:, 0] = 1.0 - weight[:, 1]
    logits = features @ weight.T
    assert rank(log_probs(softmax, logits)) == (5 if ones_in_span else 6)
    assert rank(log_probs(softmax, logits + bias)) == (6 if ones_in_span else 7)


def test_rank_of_the_features_times_the_weight_is_at_most_d() -> None:
    """(E8): d for independent features, less for dependent ones."""
    features, weight = normal(80, 5), normal(60, 5)
    assert rank(features @ weight.T) == 5
    features[:, 4] = features[:, 0] + features[:, 1]
    assert rank(features @ weight.T) == 4


def test_no_bottleneck_with_few_classes() -> None:
    """(M37)"""
    d = 4
    for classes, reaches in ((3, True), (5, True), (6, False)):
        weight, target = normal(classes, d), torch.log_softmax(normal(classes), -1)
        span = torch.cat([weight, torch.ones(classes, 1, dtype=torch.float64)], 1)
        solution = torch.linalg.lstsq(span, target[:, None], driver="gelsd").solution[:d, 0]
        error = (torch.log_softmax(weight @ solution, -1) - target).abs().max()
        assert (error < 1e-10) == reaches


def test_numerical_rank_is_a_threshold_crossing() -> None:
    """(M38): softmax has a cliff; the count of sigsoftmax depends on threshold, level and precision."""
    logits = normal(80, 3) @ normal(40, 3).T
    softmax, sigsoftmax = OutputFunction("softmax"), OutputFunction("sigsoftmax")
    thresholds = (1e-2, 1e-4, 1e-6, 1e-8)
    assert {rank(log_probs(softmax, logits), threshold) for threshold in thresholds[1:]} == {4}
    counts = [rank(log_probs(sigsoftmax, logits), threshold) for threshold in thresholds]
    assert counts[0] < counts[1] < counts[2]
    assert counts[2] > 20
    assert rank(log_probs(sigsoftmax, logits + 20.0), 1e-6) == 4

    press = 0.5 * math.sqrt(80 + 40 + 1) * torch.finfo(torch.float32).eps
    assert rank(log_probs(softmax, logits.float()).double(), press) == 4
    press_of_the_paper = 0.5 * math.sqrt(10_000 + 82_430 + 1) * torch.finfo(torch.float32).eps
    assert press_of_the_paper == pytest.approx(1.81e-5, rel=1e-2)
    # float32's rounding noise is a full set of directions for a threshold below it.
    assert rank(log_probs(softmax, logits.float()).double(), 1e-12) == 40


# --- 10. what changes and what cannot ---------------------------------------------------------------------------


def test_rank_three_counterexample() -> None:
    """(M39), (E15): determinant, singular values, normaliser, and the last bracket of the appendix."""
    u = float64(1.0, 2.0, 0.0)
    logits = torch.stack([0.0 * u, u, -u])
    outputs = log_probs(OutputFunction("sigsoftmax"), logits)
    assert torch.linalg.det(outputs).item() == pytest.approx(0.638, abs=5e-4)
    assert torch.linalg.svdvals(outputs).tolist() == pytest.approx([4.742, 2.917, 0.0461], abs=5e-4)
    assert rank(log_probs(OutputFunction("softmax"), logits)) == 2
    for k in (0.0, 1.0, -1.0, 3.0):
        normalizer = (torch.exp(k * u) * torch.sigmoid(k * u)).sum()
        sigma_1, sigma_2 = torch.sigmoid(float64(k, 2 * k)).tolist()
        printed = (1 + 2 * sigma_1 * math.exp(k) + 2 * sigma_2 * math.exp(2 * k)) / 2
        assert normalizer.item() == pytest.approx(printed, rel=1e-14)

    def softplus(x: float) -> float:
        return math.log1p(math.exp(x))

    log_2 = math.log(2)
    quotient = (2 + softplus(-1) - log_2) * (4 - softplus(2) + log_2) / (2 - softplus(1) + log_2)
    assert quotient - 4 - softplus(-2) + log_2 == pytest.approx(-0.4208, abs=5e-5)


def test_sigsoftmax_has_no_rank_bound_in_d() -> None:
    """(M40)"""
    features, weight = normal(400, 2), normal(12, 2)
    logits = 3.0 * features @ weight.T / math.sqrt(2)
    assert rank(log_probs(OutputFunction("softmax"), logits)) == 3
    assert rank(log_probs(OutputFunction("sigsoftmax"), logits)) == 12


@every_member
def test_orderings_under_monotone_members(member: OutputFunction) -> None:
    """(M41): the order of the logits is kept by every member but gss with k < 0; relu may tie."""
    z = normal(50, 9, deviation=3.0).sort(-1).values
    steps = log_probs(member, z).diff()
    if member.name == "relu":
        assert (steps >= 0).all()
        assert (log_probs(member, float64(-3.0, -1.0, 0.0)).diff() == 0).all()
    elif member.name == "gss" and float(member.arguments()[1]) < -1.0:
        assert (steps < 0).any()
    else:
        assert (steps > 0).all()
        assert (member.slope(torch.linspace(-30, 30, 601, dtype=torch.float64)) > 0).all()


def test_when_the_logistic_form_is_increasing() -> None:
    """(M41): alpha and alpha + beta decide; gss with k < 0 falls left of c + log(-k)."""
    z = torch.linspace(-30.0, 30.0, 1201, dtype=torch.float64)
    for alpha, beta in itertools.product((-0.5, 0.0, 0.5, 1.0), (-1.0, -0.5, 0.0, 0.3, 2.0)):
        slope = LOGISTIC.slope(z, float64(alpha)[0], float64(beta)[0], float64(0.7)[0])
        ends = (alpha, alpha + beta)
        assert bool((slope > 0).all()) == (min(ends) >= 0 and max(ends) > 0)
    k, c = -0.5, 0.7
    turn = c + math.log(-k)
    slope = OutputFunction("gss", k=k, c=c).slope(z)
    assert ((slope < 0) == (z < turn)).all()


def test_shift_for_each_class_can_change_an_order() -> None:
    """(M42): equal rows of W, different shifts; no bias gives softmax two orders."""
    shifts = float64(0.0, 5.0)
    bias = float64(1.0, 0.0)
    level = float64(-10.0, 10.0)[:, None]
    per_class = OutputFunction("shifted_sigsoftmax", b=shifts)
    first_leads = log_probs(per_class, level + bias).diff()[:, 0] < 0
    assert first_leads.tolist() == [False, True]
    for trial_bias in (bias, -bias, 10 * bias):
        assert len(set((log_probs(OutputFunction("softmax"), level + trial_bias).diff()[:, 0] < 0).tolist())) == 1


def test_mixture_can_change_an_order() -> None:
    """(M43)"""
    weight = float64(1.0, 0.0, -1.0)
    softmax = OutputFunction("softmax")
    for h in normal(50).tolist():
        f = probs(softmax, h * weight)
        assert f[1] > f.min()
        assert f[1] < f.max()
    components = torch.stack([2.0 * weight, -2.0 * weight])[None]
    log_prior = torch.full((1, 2), 0.5, dtype=torch.float64).log()
    mixed = normalizing.mixture_log_probs(components, Logarithms(log_prior), softmax.form, softmax.arguments())
    assert mixed[0].argmin() == 1


def is_reachable_argmax(weight: np.ndarray, bias: np.ndarray, j: int) -> bool:
    """True if some h makes class j the strict argmax of W h + bias, by linear programming."""
    others = [i for i in range(len(bias)) if i != j]
    # Maximise a margin t <= 1 with (w_j - w_i) h + (b_j - b_i) >= t for every other class i.
    rows = np.hstack([weight[others] - weight[j], np.ones((len(others), 1))])
    cost = np.zeros(weight.shape[1] + 1)
    cost[-1] = -1.0
    result = linprog(cost, rows, bias[j] - bias[others], bounds=[(None, None)] * weight.shape[1] + [(None, 1.0)])
    return bool(result.status == 0 and -result.fun > 1e-9)


@pytest.mark.parametrize(
    "member", [OutputFunction(name) for name in ("softmax", "sigsoftmax")] + [OutputFunction("gss", k=0.0)], ids=str
)
def test_mixture_with_convex_g_reaches_no_new_argmax(member: OutputFunction) -> None:
    """(M44): classes that W h + bias cannot put on top stay below in every mixture that is tried."""
    weight, bias = normal(14, 2), 0.3 * normal(14)
    reachable = {j for j in range(14) if is_reachable_argmax(weight.numpy(), bias.numpy(), j)}
    assert 3 <= len(reachable) < 14
    for deviation in (0.5, 2.0, 10.0):
        logits = normal(4000, 4, 2, deviation=deviation) @ weight.T + bias
        log_prior = torch.log_softmax(normal(4000, 4, deviation=2.0), -1)
        mixed = normalizing.mixture_log_probs(logits, Logarithms(log_prior), member.form, member.arguments())
        assert set(mixed.argmax(-1).tolist()) <= reachable


def test_convexity_of_g() -> None:
    """(M44): g''/g of the logistic form is positive for every k >= 0; sigmoid and softcap are not convex."""
    z = torch.linspace(-20.0, 20.0, 401, dtype=torch.float64)
    for k in (0.0, 0.2, 0.5, 1.0, 2.0, 5.0):
        member = OutputFunction("gss", k=k, c=0.7)
        q = torch.sigmoid(0.7 - z)
        printed = 1 + (k - 1) * q + (k - 1) * k * q.square()
        assert_close(second_slope(member, z) + member.slope(z).square(), printed)
        assert (printed > 0).all()
    for member in (OutputFunction("sigmoid"), OutputFunction("softcap", c=3.0)):
        assert (second_slope(member, z) + member.slope(z).square()).min() < 0


@pytest.mark.parametrize("member", [OutputFunction("sigmoid"), OutputFunction("softcap", c=1.0)], ids=str)
def test_mixture_without_convex_g_can_reach_a_new_argmax(member: OutputFunction) -> None:
    """(M44): the middle class of W = (1, 0, -1) with one bias for all."""
    weight, bias = np.array([[1.0], [0.0], [-1.0]]), np.full(3, 2.0)
    assert not is_reachable_argmax(weight, bias, 1)
    logits = float64(2.0, -2.0)[None, :, None] * torch.from_numpy(weight[:, 0]) + torch.from_numpy(bias)
    log_prior = torch.full((1, 2), 0.5, dtype=torch.float64).log()
    mixed = normalizing.mixture_log_probs(logits, Logarithms(log_prior), member.form, member.arguments())
    assert mixed[0].argmax() == 1


@every_member
def test_outputs_form_a_surface_of_dimension_d(member: OutputFunction) -> None:
    """(M45), (E10): the tangent space of log f(W h) has at most d directions, whatever the rank of many outputs."""
    weight = normal(20, 3)
    h = normal(3)
    f, z = probs(member, weight @ h), weight @ h
    tangents = (torch.eye(20, dtype=torch.float64) - f) @ (member.slope(z)[:, None] * weight)
    assert_close(torch.func.jacrev(lambda x: log_probs(member, weight @ x))(h), tangents)
    assert rank(tangents) <= 3


def test_rank_is_not_nats() -> None:
    """(M46): a language of full rank within 1e-8 nats of a softmax model."""
    model = torch.log_softmax(normal(100, 5) @ normal(50, 5).T, -1)
    language = torch.log_softmax(model + 1e-4 * normal(100, 50), -1)
    assert rank(model) == 6
    assert rank(language) == 50
    kl = (language.exp() * (language - model)).sum(-1).mean()
    assert 0 < kl < 1e-8


# --- 11. ranges and limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("member", [m for m in MEMBERS if m.form is LOGISTIC], ids=str)
def test_limits_of_a_shift_of_all_logits(member: OutputFunction) -> None:
    """(M47), (M48), (E5): softmax(alpha z) far right, softmax((alpha + beta) z) far left, within the bounds."""
    alpha, beta, c = (float(a) for a in member.arguments())
    z = normal(8, deviation=2.0)
    errors = []
    for t in (0.0, 2.0, 5.0, 10.0, 20.0, 40.0):
        for limit, shift, bound in (
            (alpha, t, math.exp(-(z.min().item() + t - c))),
            (alpha + beta, -t, math.exp(z.max().item() - t - c)),
        ):
            error = (log_probs(member, z + shift) - torch.log_softmax(limit * z, -1)).abs().max().item()
            assert error <= abs(beta) * bound + FLOAT64_NOISE
            errors.append(error)
    assert max(errors[-2:]) < FLOAT64_NOISE


def test_every_output_of_softmax_is_a_limit_of_sigsoftmax_and_of_sigmoid() -> None:
    """(M48), (E3), (E5): in the closure, from the right with z, from the left with z/2; for sigmoid from the left."""
    weight = torch.cat([normal(9, 2), torch.ones(9, 1, dtype=torch.float64)], 1)
    z = weight @ normal(3)
    softmax = torch.log_softmax(z, -1)
    ones = torch.ones(9, dtype=torch.float64)
    for name, scale, t in (("sigsoftmax", 1.0, 50.0), ("sigsoftmax", 0.5, -50.0), ("sigmoid", 1.0, -50.0)):
        logits = scale * z + t * ones
        # The logits that come close are themselves in S.
        assert torch.linalg.lstsq(weight, logits[:, None], driver="gelsd").solution.isfinite().all()
        assert rank(torch.cat([weight, logits[:, None]], 1)) == 3
        assert_close(log_probs(OutputFunction(name), logits), softmax)


def test_range_of_softmax_is_not_in_the_range_of_sigsoftmax() -> None:
    """(M49), (E3): no k and t match; the error of the best k falls with t and is never zero."""
    u = np.array([1.0, 2.0, 0.0])

    def phi(x: np.ndarray) -> np.ndarray:
        return x - np.logaddexp(0.0, -x)

    def error(k: float, t: float) -> float:
        values = phi(k * u + t)
        difference = values - np.logaddexp.reduce(values) - (u - np.logaddexp.reduce(u))
        return float(np.abs(difference).max())

    best = {
        t: minimize_scalar(error, args=(t,), bounds=(0.4, 1.2), options={"xatol": 1e-12}).fun for t in (0.0, 5.0, 10.0)
    }
    assert best[0.0] == pytest.approx(0.039, abs=5e-4)
    assert best[5.0] == pytest.approx(8e-4, rel=0.1)
    assert best[10.0] == pytest.approx(6e-6, rel=0.1)

    # The reason: a match makes phi(k u_i + t) affine in u_i, and its second difference at u = 0, 1, 2 is negative.
    with mpmath.workdps(100):
        sigsoftmax = OutputFunction("sigsoftmax")
        for k, t in itertools.product((-30.0, -1.0, -1e-3, 1e-3, 0.7, 2.0, 30.0), (-40.0, -1.0, 0.0, 3.0, 40.0)):
            left, middle, right = (EXACT_PHI["sigsoftmax"](mpf(k) * x + t) for x in (0, 1, 2))
            assert left - 2 * middle + right < 0
    assert (second_slope(sigsoftmax, torch.linspace(-30, 30, 61, dtype=torch.float64)) < 0).all()
    assert_close(
        probs(sigsoftmax, torch.full((3,), 4.0, dtype=torch.float64)), torch.full((3,), 1 / 3, dtype=torch.float64)
    )


def test_shared_outputs_need_softplus_in_the_space() -> None:
    """(M50): softplus(z) lies in span(u, 1) if u has two different entries, and not if it has three."""
    for u, shared in ((float64(1.0, 1.0, 0.0, 0.0), True), (float64(1.0, 2.0, 0.0, 0.0), False)):
        space = torch.stack([u, torch.ones(4, dtype=torch.float64)], 1)
        z = 1.7 * u - 0.4
        assert (rank(torch.cat([space, F.softplus(z)[:, None]], 1)) == 2) == shared
        # softmax reaches the output exactly if the logarithm of the output lies in S.
        output = log_probs(OutputFunction("sigsoftmax"), z)
        assert (rank(torch.cat([space, output[:, None]], 1)) == 2) == shared


def test_uniform_distribution_needs_no_ones_in_the_space() -> None:
    """(E4)"""
    weight = normal(7, 2)
    assert rank(torch.cat([weight, torch.ones(7, 1, dtype=torch.float64)], 1)) == 3
    for member in MEMBERS:
        uniform = torch.full((7,), 1 / 7, dtype=torch.float64)
        assert_close(probs(member, weight @ float64(0.0, 0.0)), uniform)


def test_shift_by_a_scalar_or_by_the_bias() -> None:
    """(M51)"""
    z, bias, b = normal(5, 7), normal(7), 2.5
    shifted = OutputFunction("shifted_sigsoftmax", b=b)
    sigsoftmax = OutputFunction("sigsoftmax")
    g = z.exp() * torch.sigmoid(z + b)
    assert_close(probs(sigsoftmax, z + b), g / g.sum(-1, keepdim=True))
    assert_close(probs(shifted, z), probs(sigsoftmax, z + b))
    assert_close(probs(shifted, z + bias), probs(sigsoftmax, z + (bias + b * torch.ones(7, dtype=torch.float64))))


@pytest.mark.parametrize("b", [0.0, 5.0, 30.0])
def test_retrofit_starts_where_softmax_was(b: float) -> None:
    """(M52)"""
    z = normal(50, 20, deviation=4.0).clamp(min=-15.0)
    change = (log_probs(OutputFunction("shifted_sigsoftmax", b=b), z) - torch.log_softmax(z, -1)).abs().amax(-1)
    assert (change <= torch.exp(-(z.amin(-1) + b)) + FLOAT64_NOISE).all()
    if b == 30.0:
        assert change.max() < 4e-7


# --- 12. errata -------------------------------------------------------------------------------------------------


def test_sign_of_the_normalizer_in_log_sigsoftmax() -> None:
    """(E1)"""
    z = normal(7, deviation=2.0)
    g = z.exp() * torch.sigmoid(z)
    without_normalizer = 2 * z - F.softplus(z)
    assert_close((without_normalizer + g.sum().log()).exp().sum(), g.sum().square())
    assert_close(without_normalizer - g.sum().log(), log_probs(OutputFunction("sigsoftmax"), z))


def test_epsilon_of_relu_counts_once_per_class() -> None:
    """(E2)"""
    relu = OutputFunction("relu", eps=1e-3)
    z = normal(7)
    printed = (torch.relu(z) + 1e-3) / (torch.relu(z).sum() + 1e-3)
    assert printed.sum() > 1 + 1e-3
    assert_close(probs(relu, z), (torch.relu(z) + 1e-3) / (torch.relu(z) + 1e-3).sum())
    dead = -z.abs()
    assert_close((torch.relu(dead) + 1e-3) / (torch.relu(dead).sum() + 1e-3), torch.ones(7, dtype=torch.float64))
    assert_close(probs(relu, dead), torch.full((7,), 1 / 7, dtype=torch.float64))


def test_g_must_be_positive() -> None:
    """(E11): log of a g that is zero is not finite; every member's phi is."""
    z = float64(-5.0, -1.0, 2.0)
    assert torch.relu(z).log().isinf().any()
    for member in MEMBERS:
        assert member.phi(z).isfinite().all()


def test_dead_target_of_relu_gets_no_gradient() -> None:
    """(E12)"""
    eps = 1e-3
    relu = OutputFunction("relu", eps=eps)
    z = float64(-0.5, 0.7, 2.0)
    total = (torch.relu(z) + eps).sum()
    jacobian = torch.func.jacrev(lambda x: log_probs(relu, x))(z)
    assert jacobian[0, 0] == 0
    assert jacobian[1, 1].item() == pytest.approx((1 / (0.7 + eps) - 1 / total).item())
    assert jacobian[1, 2].item() == pytest.approx((-1 / total).item())
