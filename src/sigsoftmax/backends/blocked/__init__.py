"""Rows in cache-sized blocks: the speed of a fused kernel on a CPU, without a compiler.

A block of rows stays in the cache while a dozen torch operations pass over it, so the logits come from memory once
and the gradient goes there once. ``logistic`` has hand-made passes for the logistic form, softmax and sigsoftmax
with one exponential per element among them, and ``relu`` and ``softcap`` for the forms of these names.
``chunked.form_rows`` runs the reference formulas on the block, for a user's phi, for members that decrease, and for
blocks with masks. The backend serves every device that has no kernels, not only CPUs; on the others a block is a whole
chunk of logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from sigsoftmax.backends.blocked.logistic import (
    LARGEST_POWER,
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
from sigsoftmax.contract.normalizing import constant
from sigsoftmax.contract.rows import RowRoutines
from sigsoftmax.family.formulas import LOGISTIC, RELU, SOFTCAP, Form
from sigsoftmax.family.properties import Properties


def routines(form: Form, arguments: Sequence[Tensor], logits_like: Tensor, needs_arguments: bool) -> RowRoutines:
    """The fastest routines for a form. ``logits_like`` tells dtype, device and number of classes."""
    properties = form.properties([constant(a) for a in arguments])
    # The hand-made passes take the row's highest logit for the one at which phi is largest.
    if form not in (LOGISTIC, RELU, SOFTCAP) or logits_like.device.type != "cpu" or not properties.is_increasing:
        return FormRows(form, arguments, logits_like, needs_arguments)
    fast = None if needs_arguments else _fast_rows(form, properties)
    if fast is not None:
        return fast(arguments, logits_like)
    slower = LogisticRows if form is LOGISTIC else functools.partial(FormRows, form)
    return slower(arguments, logits_like, needs_arguments)


def _fast_rows(form: Form, properties: Properties) -> Callable[[Sequence[Tensor], Tensor], RowRoutines] | None:
    """The passes for fixed scalar arguments; None where there are none."""
    if properties.is_softmax:
        return SoftmaxRows
    if None in properties.values:
        return None
    if form is not LOGISTIC:
        return ReluRows if form is RELU else SoftcapRows
    alpha, beta = (float(value or 0.0) for value in properties.values[:2])
    special = {(1.0, 1.0): SigsoftmaxRows, (0.0, 1.0): SigmoidRows, (1.0, -1.0): ShiftedExpRows}
    powers = PowerRows if alpha == 1.0 and abs(beta) <= LARGEST_POWER else None
    return special.get((alpha, beta), powers)
