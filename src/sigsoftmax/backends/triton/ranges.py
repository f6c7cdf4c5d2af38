"""Rows that are measured a range of classes at a time, and added as those of several processes are (``shards``).

Shapes: R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.vocabulary_blocks import ClassWalk
from sigsoftmax.backends.triton.kernels import forms
from sigsoftmax.backends.triton.kernels.range_kernels import add_kernel
from sigsoftmax.backends.triton.launches import launch
from sigsoftmax.backends.triton.rows import TritonRows
from sigsoftmax.contract.rows import RowCoefficients, RowStats

BLOCK = 256
"""rows that a program adds"""


def add(
    routines: TritonRows, whole: RowStats, part: RowStats, index_R: Tensor, first_class: int, last_class: int
) -> None:
    """Add what was measured of a range of classes to what was measured of others; no shifts per class."""
    assert whole.target is not None and part.target is not None and not routines.per_class
    rows = whole.peak.shape[0]
    launch(
        add_kernel,
        -(-rows // BLOCK),
        (
            index_R,
            whole.peak,
            whole.offset,
            whole.normalizer,
            whole.target,
            part.peak,
            part.offset,
            part.normalizer,
            part.target,
            *routines.argument_pointers(whole.peak, 0),
        ),
        (*routines.argument_values(), rows, routines.rows_of_target, first_class, last_class),
        {"FORM": forms.CODES[routines.form.name], **routines.argument_flags(), "BLOCK": BLOCK},
        num_warps=4,
    )


def measure(routines: TritonRows, walk: ClassWalk, index_R: Tensor, vectors_6R: Tensor) -> None:
    """Measure all rows, a range of classes at a time."""
    part_6R = torch.empty_like(vectors_6R)
    whole: RowStats | None = None
    for first, logits_RV in walk.measured():
        memory_6R = vectors_6R if whole is None else part_6R
        part = routines.stats(walk.source.whole_rows(logits_RV), index_R, None, False, False, memory_6R, first)
        if whole is None:
            whole = part
        else:
            add(routines, whole, part, index_R, first, first + logits_RV.shape[1])


def write_gradients(
    routines: TritonRows, walk: ClassWalk, vectors_6R: Tensor, coefficients: RowCoefficients, index_R: Tensor
) -> None:
    """The gradient of rows that were measured, a range of classes at a time."""
    stats = RowStats(vectors_6R[0], vectors_6R[1], vectors_6R[2], vectors_6R[3], None, None, None)
    for first, logits_RV, out_RV in walk.gradients():
        is_in_place = out_RV is logits_RV
        if not routines.per_class:
            logits_RV = walk.source.whole_rows(logits_RV)
        routines.gradient_of_classes(
            logits_RV, stats, coefficients, index_R, None, first, logits_RV if is_in_place else out_RV
        )
