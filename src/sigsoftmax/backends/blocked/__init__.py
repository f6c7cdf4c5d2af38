"""Rows in cache-sized blocks: the speed of a fused kernel on a CPU, without a compiler.

A block of rows stays in the cache while a dozen torch operations pass over it, so the logits come from memory once
and the gradient goes there once. ``logistic`` has hand-made passes for the logistic form, softmax and sigsoftmax
with one exponential per element among them, and ``relu`` and ``softcap`` for the forms of these names.
``chunked.form_rows`` runs the reference formulas on the block, for a user's phi, for members that decrease, and for
blocks with masks. The backend serves every device that has no kernels, not only CPUs; on the others a block is a whole
chunk of logits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sigsoftmax.backends.blocked.logistic import (
    LARGEST_POWER,
    LogisticProbabilities,
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


def routines(
    form: Form, arguments: Sequence[Tensor], logits_like: Tensor, needs_arguments: bool, *, wanted: Sequence[bool]
) -> RowRoutines:
    """The fastest routines for a form. ``logits_like`` tells dtype, device and number of classes.

    ``wanted`` tells for each argument whether its gradient is, where gradients of arguments are needed at all.
    """
    properties = form.properties([constant(a) for a in arguments])
    # The hand-made passes take the row's highest logit for the one at which phi is largest.
    if form not in (LOGISTIC, RELU, SOFTCAP) or logits_like.device.type != "cpu" or not properties.is_increasing:
        return FormRows(form, arguments, logits_like, needs_arguments)
    if form is LOGISTIC:
        learned = tuple(needs_arguments and is_wanted for is_wanted in wanted)
        return _logistic_rows(properties, learned)(arguments, logits_like, learned)
    # Arguments of these forms are fixed.
    if needs_arguments:
        return FormRows(form, arguments, logits_like, needs_arguments)
    return (ReluRows if form is RELU else SoftcapRows)(arguments, logits_like)


def _logistic_rows(properties: Properties, learned: Sequence[bool]) -> type[LogisticProbabilities | LogisticRows]:
    """The passes for known alpha and beta; those of the whole form where there are none."""
    alpha, beta, c = properties.values
    learns_alpha, learns_beta, learns_c = learned
    if properties.is_softmax and not (learns_beta or learns_c):
        return SoftmaxRows
    if alpha is None or beta is None or learns_alpha:
        return LogisticRows
    if (alpha, beta) == (1.0, 1.0) and not learns_beta:
        return SigsoftmaxRows
    if c is not None and not any(learned) and (alpha, beta) in ((0.0, 1.0), (1.0, -1.0)):
        return SigmoidRows if beta == 1.0 else ShiftedExpRows
    return PowerRows if alpha == 1.0 and beta <= LARGEST_POWER else LogisticRows
