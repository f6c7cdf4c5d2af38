"""Which routines the blocked backend takes for which output function, and that each computes what the formulas say.

Shapes: R rows, V classes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sigsoftmax import OutputFunction, register_function
from sigsoftmax.backends import blocked
from sigsoftmax.backends.blocked.fast_rows import FastRows
from sigsoftmax.backends.blocked.logistic import (
    LogisticRows,
    PowerRows,
    ShiftedExpRows,
    SigmoidRows,
    SigsoftmaxRows,
    SoftmaxRows,
)
from sigsoftmax.backends.blocked.relu import ReluRows
from sigsoftmax.backends.blocked.softcap import SoftcapRows
from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.contract.rows import RowCoefficients, RowRoutines, RowTargets
from sigsoftmax.family.parameters import ParameterKind

LOGITS = torch.zeros(2, 4)
SHIFTS = torch.linspace(-1.0, 1.0, 4)


def routines(function: OutputFunction, needs_arguments: bool = False) -> object:
    return blocked.routines(function.form, function.arguments(4), LOGITS, needs_arguments)


@pytest.mark.parametrize(
    ("function", "taken", "with_arguments"),
    [
        (OutputFunction("softmax"), SoftmaxRows, PowerRows),
        (OutputFunction("softmax", alpha=torch.tensor(0.3)), SoftmaxRows, PowerRows),
        (OutputFunction("gss", k=1.0, c=SHIFTS), SoftmaxRows, LogisticRows),
        (OutputFunction("sigsoftmax"), SigsoftmaxRows, PowerRows),
        (OutputFunction("shifted_sigsoftmax", b=torch.tensor(-2.0)), SigsoftmaxRows, PowerRows),
        (OutputFunction("gss", k=2.0, c=5.0), SigsoftmaxRows, PowerRows),
        (OutputFunction("shifted_sigsoftmax", b=SHIFTS), LogisticRows, LogisticRows),
        (OutputFunction("sigmoid"), SigmoidRows, LogisticRows),
        (OutputFunction("gss", k=0.0), ShiftedExpRows, LogisticRows),
        (OutputFunction("gss", k=0.2, c=torch.tensor(1.0)), PowerRows, PowerRows),
        (OutputFunction("gss", k=3.0), PowerRows, PowerRows),
        (OutputFunction("gss", k=100.0), LogisticRows, LogisticRows),
        (OutputFunction("gss", k=0.2, c=SHIFTS), LogisticRows, LogisticRows),
        # The hand-made passes start at the row's highest logit, which is no place of a phi that falls.
        (OutputFunction("gss", k=-0.5), FormRows, FormRows),
        (OutputFunction("softmax", alpha=torch.tensor(-0.3)), FormRows, FormRows),
        (OutputFunction("relu"), ReluRows, FormRows),
        (OutputFunction("softcap"), SoftcapRows, FormRows),
    ],
    ids=str,
)
def test_routines_follow_from_what_is_known_of_phi(function: OutputFunction, taken: type, with_arguments: type) -> None:
    assert type(routines(function)) is taken
    assert type(routines(function, needs_arguments=True)) is with_arguments


def test_a_scale_of_zero_is_no_softmax() -> None:
    assert type(routines(OutputFunction("softmax", alpha=torch.tensor(0.0)))) is LogisticRows


def test_nothing_is_supposed_of_a_users_own_phi() -> None:
    assert type(routines(register_function("plain", lambda z: z))) is FormRows


@pytest.mark.parametrize("c", [torch.tensor(0.5), SHIFTS], ids=["scalar", "per class"])
def test_argument_kinds_are_those_of_the_function(c: torch.Tensor) -> None:
    function = OutputFunction("gss", k=torch.tensor(-0.5), c=c)
    found = routines(function, needs_arguments=True)
    assert isinstance(found, FormRows)
    assert found.kinds == [kind or ParameterKind.SCALAR for kind in function.argument_kinds()]


# What the hand-made passes compute


def results(routines: RowRoutines, logits_RV: Tensor) -> tuple[Tensor, ...]:
    """log f of the targets, log normalisers and the gradient, for coefficients that differ by row."""
    rows = logits_RV.shape[0]
    targets = RowTargets(torch.arange(rows) % logits_RV.shape[1])
    stats = routines.stats(logits_RV, targets)
    assert stats.target is not None
    scale = torch.linspace(0.5, 1.5, rows, dtype=stats.target.dtype)
    out_RV = torch.empty_like(logits_RV)
    routines.gradient(logits_RV, targets, stats, RowCoefficients(scale, -0.7 * scale, None, None), out_RV)
    return stats.target - stats.normalizer, stats.normalizer + stats.offset, out_RV


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("function", "shift", "deviation"),
    [
        (OutputFunction("sigmoid"), 0.0, 3.0),
        (OutputFunction("sigmoid"), -15.0, 3.0),
        (OutputFunction("sigmoid"), 15.0, 3.0),
        (OutputFunction("gss", k=0.0), 0.0, 3.0),
        (OutputFunction("gss", k=0.0, c=-3.0), 1e3, 3.0),
        (OutputFunction("gss", k=0.2), 0.0, 3.0),
        (OutputFunction("gss", k=0.2, c=1.5), 18.0, 2.0),
        (OutputFunction("gss", k=0.01), 0.0, 3.0),
        (OutputFunction("gss", k=3.0, c=-2.0), 0.0, 3.0),
        (OutputFunction("gss", k=3.0), 18.0, 2.0),
        (OutputFunction("relu"), 0.0, 3.0),
        (OutputFunction("relu"), -20.0, 1.0),
        (OutputFunction("relu", eps=0.5), 1e4, 3.0),
        (OutputFunction("softcap"), 0.0, 3.0),
        (OutputFunction("softcap", c=1e7), 0.0, 3.0),
        # The classes of these rows lie on both sides of the cap, or beyond it.
        (OutputFunction("softcap", c=5.0), 0.0, 5.0),
        (OutputFunction("softcap", c=5.0), 20.0, 1.0),
    ],
    ids=str,
)
def test_fast_blocks_agree_with_the_formulas(
    function: OutputFunction, shift: float, deviation: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    logits = (shift + deviation * torch.randn(16, 50)).to(dtype)
    arguments = function.arguments(50)
    fast = blocked.routines(function.form, arguments, logits, False)
    exact = FormRows(function.form, arguments, logits.double())
    found = results(fast, logits)
    assert isinstance(fast, FastRows)
    assert not fast._turned_to_slower
    for part, truth in zip(found, results(exact, logits.double()), strict=True):
        assert float((part.double() - truth).norm()) <= 10 * torch.finfo(dtype).eps * float(truth.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("function", "shift"),
    [
        (OutputFunction("softmax"), 0.0),
        (OutputFunction("softmax", alpha=0.7), 2.0),
        (OutputFunction("shifted_sigsoftmax", b=0.4), 0.0),
        (OutputFunction("gss", k=0.2, c=1.0), 3.0),
        (OutputFunction("gss", k=3.0), -1.0),
    ],
    ids=str,
)
def test_fast_derivatives_by_arguments_agree_with_the_formulas(
    function: OutputFunction, shift: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    logits = (shift + 2.0 * torch.randn(16, 50)).to(dtype)
    arguments = function.arguments(50)
    fast = blocked.routines(function.form, arguments, logits, True)
    exact = FormRows(function.form, arguments, logits.double(), needs_arguments=True)
    # The derivatives of several blocks are summed.
    for block in (logits[:9], logits[9:]):
        found, truth = results(fast, block), results(exact, block.double())
        assert isinstance(fast, PowerRows)
        assert not fast._turned_to_slower
        for part, true_part in zip(found, truth, strict=True):
            assert float((part.double() - true_part).norm()) <= 10 * torch.finfo(dtype).eps * float(true_part.norm())
    for total, true_total in zip(fast.argument_gradients(), exact.argument_gradients(), strict=True):
        torch.testing.assert_close(total.double(), true_total, rtol=40 * torch.finfo(dtype).eps, atol=1e-30)


def test_learned_arguments_of_rows_far_right_of_c_keep_their_digits() -> None:
    """Their derivatives are smaller than the rounding of a sigmoid near 1."""
    function = OutputFunction("gss", k=0.5)
    logits = 20.0 + torch.linspace(-3.0, 3.0, 12).view(3, 4)
    fast = blocked.routines(function.form, function.arguments(4), logits, True)
    exact = FormRows(function.form, function.arguments(4), logits.double(), needs_arguments=True)
    results(fast, logits)
    results(exact, logits.double())
    for total, true_total in zip(fast.argument_gradients(), exact.argument_gradients(), strict=True):
        torch.testing.assert_close(total.double(), true_total, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    ("function", "logit"),
    [
        (OutputFunction("sigmoid"), -1e3),
        (OutputFunction("gss", k=0.0), -torch.inf),
        (OutputFunction("gss", k=0.0), -1.0),
        (OutputFunction("gss", k=0.2), 1e3),
        (OutputFunction("gss", k=0.2), -torch.inf),
        (OutputFunction("gss", k=0.01), 1.0),
        (OutputFunction("gss", k=3.0), 1.0),
        (OutputFunction("relu"), torch.finfo(torch.float32).max),
        (OutputFunction("relu"), -torch.inf),
        (OutputFunction("relu", eps=1e-36), 0.0),
        (OutputFunction("softcap"), -torch.inf),
        (OutputFunction("softcap", c=1e4), 1e3),
    ],
    ids=str,
)
def test_a_block_that_does_not_suit_goes_to_slower_routines(function: OutputFunction, logit: float) -> None:
    logits = torch.full((3, 4), -1e3)
    logits[0, 1] = logit
    found = routines(function)
    assert isinstance(found, FastRows)
    expected = results(FormRows(function.form, function.arguments(4), LOGITS), logits)
    for part, truth in zip(results(found, logits), expected, strict=True):
        torch.testing.assert_close(part, truth, rtol=1e-6, atol=0.0)
    assert found._turned_to_slower
