"""Routines of the blocked backend: the choice for each output function, and that each computes what the formulas say.

Shapes: R rows, V classes.
"""

from __future__ import annotations

import pytest
import torch
from tests.tables import every_backend
from torch import Tensor
from torch.nn import functional as F

import sigsoftmax
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


def routines(function: OutputFunction, logits: Tensor = LOGITS, *, learns: bool = False) -> RowRoutines:
    """``learns`` asks for the gradients of all arguments that depend on a tensor."""
    arguments = function.arguments(logits.shape[-1])
    wanted = [kind is not None for kind in function.argument_kinds()]
    return blocked.routines(function.form, arguments, logits, learns, wanted=wanted)


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (OutputFunction("softmax"), SoftmaxRows),
        (OutputFunction("softmax", alpha=torch.tensor(0.3)), SoftmaxRows),
        (OutputFunction("gss", k=1.0, c=SHIFTS), SoftmaxRows),
        (OutputFunction("sigsoftmax"), SigsoftmaxRows),
        (OutputFunction("shifted_sigsoftmax", b=torch.tensor(-2.0)), SigsoftmaxRows),
        (OutputFunction("gss", k=2.0, c=5.0), SigsoftmaxRows),
        (OutputFunction("shifted_sigsoftmax", b=SHIFTS), SigsoftmaxRows),
        (OutputFunction("sigmoid"), SigmoidRows),
        (OutputFunction("gss", k=0.0), ShiftedExpRows),
        (OutputFunction("gss", k=0.2, c=torch.tensor(1.0)), PowerRows),
        (OutputFunction("gss", k=3.0), PowerRows),
        (OutputFunction("gss", k=100.0), LogisticRows),
        (OutputFunction("gss", k=0.2, c=SHIFTS), PowerRows),
        (OutputFunction("gss", k=0.0, c=SHIFTS), PowerRows),
        # The hand-made passes start at the row's highest logit, which is no place of a phi that falls.
        (OutputFunction("gss", k=-0.5), FormRows),
        (OutputFunction("softmax", alpha=torch.tensor(-0.3)), FormRows),
        (OutputFunction("relu"), ReluRows),
        (OutputFunction("softcap"), SoftcapRows),
    ],
    ids=str,
)
def test_routines_follow_from_what_is_known_of_phi(function: OutputFunction, taken: type) -> None:
    assert type(routines(function)) is taken


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (OutputFunction("softmax", alpha=torch.tensor(0.3)), SoftmaxRows),
        (OutputFunction("softmax", alpha=torch.tensor(-0.3)), FormRows),
        (OutputFunction("shifted_sigsoftmax", b=torch.tensor(-2.0)), SigsoftmaxRows),
        (OutputFunction("shifted_sigsoftmax", b=SHIFTS), SigsoftmaxRows),
        (OutputFunction("gss", k=2.0, c=SHIFTS), SigsoftmaxRows),
        (OutputFunction("gss", k=torch.tensor(2.0)), PowerRows),
        (OutputFunction("gss", k=torch.tensor(1.0)), PowerRows),
        (OutputFunction("gss", k=torch.tensor(0.2), c=SHIFTS), PowerRows),
        (OutputFunction("gss", k=torch.tensor(0.0)), PowerRows),
        (OutputFunction("gss", k=torch.tensor(100.0)), LogisticRows),
        (OutputFunction("gss", k=torch.tensor(-0.5)), FormRows),
    ],
    ids=str,
)
def test_learned_arguments_have_passes_of_their_own(function: OutputFunction, taken: type) -> None:
    assert type(routines(function, learns=True)) is taken


def test_a_scale_of_zero_is_no_softmax() -> None:
    assert type(routines(OutputFunction("softmax", alpha=torch.tensor(0.0)))) is LogisticRows


def test_nothing_is_supposed_of_a_users_own_phi() -> None:
    assert type(routines(register_function("plain", lambda z: z))) is FormRows


@pytest.mark.parametrize("c", [torch.tensor(0.5), SHIFTS], ids=["scalar", "per class"])
def test_argument_kinds_are_those_of_the_function(c: torch.Tensor) -> None:
    function = OutputFunction("gss", k=torch.tensor(-0.5), c=c)
    found = routines(function, learns=True)
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
    return stats.target * routines.unit - stats.normalizer, stats.normalizer + stats.offset, out_RV


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
    fast = routines(function, logits)
    exact = FormRows(function.form, arguments, logits.double())
    found = results(fast, logits)
    assert isinstance(fast, FastRows)
    assert not fast._turned_to_slower
    for part, truth in zip(found, results(exact, logits.double()), strict=True):
        assert float((part.double() - truth).norm()) <= 10 * torch.finfo(dtype).eps * float(truth.norm())


def plain_gradients(function: OutputFunction, logits_NV: Tensor, target_N: Tensor) -> list[Tensor]:
    """Gradients of a mean loss by the parameters, by torch's own operations in the dtype of the logits."""
    values = {key: torch.as_tensor(value, dtype=logits_NV.dtype) for key, value in function.parameters.items()}
    learned = [values[key].requires_grad_() for key in function.kinds]
    z = logits_NV
    if function.name == "softmax":
        phi = values["alpha"] * z
    elif function.name == "gss":
        phi = z + (values["k"] - 1.0) * F.logsigmoid(z - values["c"])
    else:
        phi = z + F.logsigmoid(z + values["b"])
    return list(torch.autograd.grad(F.cross_entropy(phi, target_N), learned))


LEARNED = [
    (OutputFunction("softmax", alpha=torch.tensor(1.0)), 0.0),
    (OutputFunction("softmax", alpha=torch.tensor(0.7)), 5.0),
    (OutputFunction("shifted_sigsoftmax", b=torch.tensor(0.4)), 0.0),
    (OutputFunction("shifted_sigsoftmax", b=torch.tensor(-1.0)), 15.0),
    (OutputFunction("shifted_sigsoftmax", b=torch.tensor(0.4)), -15.0),
    (OutputFunction("shifted_sigsoftmax", b=torch.linspace(-2.0, 2.0, 300)), 0.0),
    (OutputFunction("shifted_sigsoftmax", b=torch.linspace(-2.0, 2.0, 300)), -10.0),
    (OutputFunction("gss", k=torch.tensor(0.2), c=torch.tensor(0.5)), 0.0),
    (OutputFunction("gss", k=torch.tensor(0.0)), 2.0),
    (OutputFunction("gss", k=torch.tensor(0.5)), 14.0),
    (OutputFunction("gss", k=torch.tensor(2.0), c=torch.tensor(0.5)), 0.0),
    (OutputFunction("gss", k=torch.tensor(0.5), c=torch.linspace(-2.0, 2.0, 300)), 0.0),
]


@pytest.mark.parametrize(("function", "shift"), LEARNED, ids=str)
@pytest.mark.parametrize("deviation", [1.0, 3.0])
def test_gradients_of_learned_arguments_are_no_worse_than_plain_torchs(
    function: OutputFunction, shift: float, deviation: float
) -> None:
    """The gradient of the mean over rows that nearly cancel, in several blocks."""
    found_error = plain_error = scale = 0.0
    for seed in range(8):
        torch.manual_seed(seed)
        logits = shift + deviation * torch.randn(256, 300)
        target = torch.multinomial(torch.softmax(logits, -1), 1).squeeze(-1)
        fast, total = routines(function, logits, learns=True), 1.0 / len(logits)
        for rows in range(0, len(logits), 64):
            targets = RowTargets(target[rows : rows + 64])
            block = logits[rows : rows + 64]
            stats = fast.stats(block, targets)
            coefficients = RowCoefficients(torch.full((64,), total), torch.full((64,), -total), None, None)
            fast.gradient(block, targets, stats, coefficients, torch.empty_like(block))
            assert isinstance(fast, FastRows)
            assert not fast._turned_to_slower
        # Of the form's arguments beta is k - 1, and c is -b.
        found = [by for by, kind in zip(fast.argument_gradients(), function.argument_kinds(), strict=True) if kind]
        found = [-by for by in found] if function.name == "shifted_sigsoftmax" else found
        exact = plain_gradients(function, logits.double(), target)
        for by, plainly, truth in zip(found, plain_gradients(function, logits, target), exact, strict=True):
            found_error += float((by - truth).square().sum())
            plain_error += float((plainly - truth).square().sum())
            scale += float(truth.square().sum())
    assert found_error**0.5 <= plain_error**0.5 + 1e-8 * scale**0.5


@pytest.mark.parametrize(
    ("name", "options"), [("softmax", {}), ("gss", {"k": 0.0}), ("gss", {"k": 0.2}), ("softcap", {})], ids=str
)
def test_normalizers_of_very_many_classes_keep_their_digits(name: str, options: dict[str, float]) -> None:
    """The sum of torch.softmax over a million peaked logits is off by up to 7e-5."""
    torch.manual_seed(0)
    logits = 3.0 * torch.randn(2, 1_000_000)
    function = OutputFunction(name, **options)
    fast = routines(function, logits)
    stats = fast.stats(logits, RowTargets())
    assert isinstance(fast, FastRows)
    assert not fast._turned_to_slower
    truth = function.phi(logits.double()).logsumexp(-1)
    torch.testing.assert_close((stats.normalizer + stats.offset).double(), truth, rtol=0.0, atol=4e-6)


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


@every_backend
@pytest.mark.parametrize(
    "function",
    [
        OutputFunction("shifted_sigsoftmax", b=torch.tensor([4.0, -4.0, 0.0, 1.0])),
        OutputFunction("gss", k=0.2, c=torch.tensor([4.0, -4.0, 0.0, 1.0])),
        OutputFunction("gss", k=0.0, c=torch.tensor([4.0, -4.0, 0.0, 1.0])),
        OutputFunction("gss", k=2.0, c=torch.tensor([4.0, -4.0, 0.0, 1.0])),
    ],
    ids=str,
)
def test_the_likeliest_class_is_that_of_the_largest_phi(function: OutputFunction, backend: str) -> None:
    """Where a parameter has a value for each class, the highest logit is not always that of the likeliest class."""
    logits = 0.5 * torch.randn(50, 4)
    expected = function.phi(logits).argmax(-1)
    assert (expected != logits.argmax(-1)).any()
    target, weight = torch.zeros(50, dtype=torch.int64), torch.eye(4)
    _, extras = sigsoftmax.cross_entropy(logits, target, function=function, extras=["argmax"], backend=backend)
    assert torch.equal(extras.argmax, expected)
    statistics = sigsoftmax.linear_token_statistics(
        logits, weight, target, function=function, argmax=True, backend=backend
    )
    assert torch.equal(statistics.argmax, expected)
