"""Arguments of a form that are fixed numbers, which the host knows, and the kernels that they allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from sigsoftmax.backends.reference import constant
from sigsoftmax.forms import Form


def fixed_values(arguments: Sequence[Tensor]) -> tuple[float, ...] | None:
    """The values of arguments that are all fixed scalars, else None."""
    values = tuple(constant(a) for a in arguments)
    return None if None in values else cast("tuple[float, ...]", values)


def is_softmax(form: Form, values: Sequence[float | None]) -> bool:
    """Whether it is softmax of any positive temperature, given the values of its arguments (None: not fixed).

    Its kernels start from the highest logit of a row and multiply gaps, which may be infinite, by alpha.
    """
    return form.name == "logistic" and values[1] == 0.0 and values[0] != 0.0 and form.is_increasing(values)


def is_sigsoftmax(form: Form, values: Sequence[float | None]) -> bool:
    """Whether it is sigsoftmax with any shift."""
    return form.name == "logistic" and values[0] == values[1] == 1.0 and values[2] is not None
