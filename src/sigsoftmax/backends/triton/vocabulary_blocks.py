"""Statistics and gradients of rows, a block of the vocabulary at a time.

Blocks are added up as the parts of several processes are (``chunked.sharded_statistics``).

Shapes: R rows, V classes of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sigsoftmax.backends.chunked.vocabulary_blocks import VocabularyBlocks
from sigsoftmax.backends.triton.kernels import formulas
from sigsoftmax.backends.triton.kernels.vocabulary_blocks import add_block_kernel
from sigsoftmax.backends.triton.launch import launch
from sigsoftmax.backends.triton.logits_kernels import LogitsKernels
from sigsoftmax.contract.rows import RowCoefficients, RowStats, RowTargets

ROWS = 256
"""rows that a program adds"""


def reduce_blocks(kernels: LogitsKernels, blocks: VocabularyBlocks, index_R: Tensor, stats_6R: Tensor) -> None:
    """The statistics of all rows, a block of the vocabulary at a time; no shifts per class."""
    assert not kernels.per_class
    part_6R = torch.empty_like(stats_6R)
    rows = stats_6R.shape[1]
    for i, (first, logits_RV) in enumerate(blocks.forward()):
        memory_6R = part_6R if i else stats_6R
        kernels.stats(blocks.provider.whole_rows(logits_RV), RowTargets(index_R, first_class=first), memory_6R)
        if not i:
            continue
        launch(
            add_block_kernel,
            -(-rows // ROWS),
            (index_R, *stats_6R[:4], *part_6R[:4], *kernels.argument_pointers(stats_6R[0], 0)),
            (*kernels.values, rows, kernels.rows_per_target, first, first + logits_RV.shape[1]),
            {"FORM": formulas.CODES[kernels.form.name], **kernels.flags, "BLOCK": ROWS},
            num_warps=4,
        )


def write_gradients(
    kernels: LogitsKernels, blocks: VocabularyBlocks, index_R: Tensor, stats: RowStats, coefficients: RowCoefficients
) -> None:
    """The gradient of rows whose statistics are known, a block of the vocabulary at a time."""
    for first, logits_RV, out_RV in blocks.backward():
        is_in_place = out_RV is logits_RV
        if not kernels.per_class:
            logits_RV = blocks.provider.whole_rows(logits_RV)
        out_RV = logits_RV if is_in_place else out_RV
        kernels.gradient(logits_RV, RowTargets(index_R, first_class=first), stats, coefficients, out_RV)
