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

from sigsoftmax.backends.blocked.logistic import LogisticRows, SigmoidRows, SigsoftmaxRows, SoftmaxRows
from sigsoftmax.backends.blocked.relu import ReluRows
from sigsoftmax.backends.blocked.softcap import SoftcapRows
from sigsoftmax.backends.chunked.form_rows import FormRows
from sigsoftmax.contract.normalizing import constant
from sigsoftmax.contract.rows import RowRoutines
from sigsoftmax.family.formulas import LOGISTIC, RELU, SOFTCAP, Form


def routines(form: Form, arguments: Sequence[Tensor], logits_like: Tensor, needs_arguments: bool) -> RowRoutines:
    """The fastest routines for a form. ``logits_like`` tells dtype, device and number of classes."""
    values = [constant(a) for a in arguments]
    properties = form.properties(values)
    # The hand-made passes take the row's highest logit for the one at which phi is largest.
    if logits_like.device.type != "cpu" or not properties.is_increasing:
        return FormRows(form, arguments, logits_like, needs_arguments)
    if form is LOGISTIC:
        if not needs_arguments:
            if properties.is_softmax:
                return SoftmaxRows(arguments, logits_like)
            if properties.is_sigsoftmax:
                return SigsoftmaxRows(arguments, logits_like)
            if None not in values and values[:2] == [0.0, 1.0]:
                return SigmoidRows(arguments, logits_like)
        return LogisticRows(arguments, logits_like, needs_arguments)
    if form in (RELU, SOFTCAP) and not needs_arguments and None not in values:
        return (ReluRows if form is RELU else SoftcapRows)(arguments, logits_like)
    return FormRows(form, arguments, logits_like, needs_arguments)
