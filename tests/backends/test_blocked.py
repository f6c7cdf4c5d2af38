"""Which routines the blocked backend takes for which output function.

Shapes: V classes.
"""

from __future__ import annotations

import pytest
import torch

from sigsoftmax import OutputFunction, register_function
from sigsoftmax.backends import blocked
from sigsoftmax.backends.blocked.logistic import LogisticRows, SigsoftmaxRows, SoftmaxRows
from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.family.parameters import ParameterKind

LOGITS = torch.zeros(2, 4)
SHIFTS = torch.linspace(-1.0, 1.0, 4)


def routines(function: OutputFunction, needs_arguments: bool = False) -> object:
    return blocked.routines(function.form, function.arguments(4), LOGITS, needs_arguments)


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (OutputFunction("softmax"), SoftmaxRows),
        (OutputFunction("softmax", alpha=torch.tensor(0.3)), SoftmaxRows),
        (OutputFunction("gss", k=1.0, c=SHIFTS), SoftmaxRows),
        (OutputFunction("sigsoftmax"), SigsoftmaxRows),
        (OutputFunction("shifted_sigsoftmax", b=torch.tensor(-2.0)), SigsoftmaxRows),
        (OutputFunction("gss", k=2.0, c=5.0), SigsoftmaxRows),
        (OutputFunction("shifted_sigsoftmax", b=SHIFTS), LogisticRows),
        (OutputFunction("sigmoid"), LogisticRows),
        (OutputFunction("gss", k=0.0), LogisticRows),
        # The hand-made passes start at the row's highest logit, which is no place of a phi that falls.
        (OutputFunction("gss", k=-0.5), FormRows),
        (OutputFunction("softmax", alpha=torch.tensor(-0.3)), FormRows),
        (OutputFunction("relu"), FormRows),
        (OutputFunction("softcap"), FormRows),
    ],
    ids=str,
)
def test_routines_follow_from_what_is_known_of_phi(function: OutputFunction, taken: type) -> None:
    assert type(routines(function)) is taken
    # Derivatives by the arguments are the whole form's.
    assert type(routines(function, needs_arguments=True)) is (FormRows if taken is FormRows else LogisticRows)


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
