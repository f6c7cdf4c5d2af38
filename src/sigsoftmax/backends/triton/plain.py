"""The plain loss on a GPU in few launches: class indices, no smoothing, no mixture, no extras.

It is what nearly every training step asks for, and for a small model its time is that of the host. So the arithmetic
on vectors of length N that ``chunks`` does in a few dozen torch operations is two kernels here, before and after
the rows. A sum over tokens runs in one program, in a fixed order.

Shapes: N tokens, V classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from sigsoftmax.backends.chunks import LossOptions, TokenLosses
from sigsoftmax.backends.class_walk import ClassWalk
from sigsoftmax.backends.interface import RowCoefficients
from sigsoftmax.backends.reference import finite, scaled
from sigsoftmax.backends.sources import LinearLogits, Source
from sigsoftmax.backends.triton import ranges
from sigsoftmax.backends.triton.launches import launch
from sigsoftmax.backends.triton.rows import TritonRows
from sigsoftmax.backends.triton.token_kernels import after_kernel, before_kernel, total_kernel

MOST_TOKENS = 2**17
"""Beyond it one program for all tokens would be slower than many torch operations."""
WARPS = 16


class Setup:
    """What is known of every token before its rows: where its target is, and what it counts in the total.

    Without ``scale_N`` every kept token counts 1, divided by the sum of their class weights for a mean.
    """

    def __init__(
        self,
        source: Source,
        target_N: Tensor,
        class_weight_V: Tensor | None,
        scale_N: Tensor | None,
        options: LossOptions,
        *,
        is_mean: bool,
    ) -> None:
        tokens = source.num_tokens
        self.index = torch.empty_like(target_N)
        vectors = torch.empty(5, tokens, dtype=torch.float32, device=target_N.device)
        self.scale, self.by_normalizer, self.by_target, self.z_slope, empty = vectors.unbind()
        self.empty = empty[:1]
        """0, or NaN for the mean of no tokens"""
        self.class_weight = None if class_weight_V is None else class_weight_V.float().contiguous()
        if scale_N is not None:
            scale_N = scale_N.float().contiguous()
        self.block = min(4096, triton.next_power_of_2(max(tokens, 32)))
        launch(
            before_kernel,
            1,
            (
                target_N,
                self.scale if self.class_weight is None else self.class_weight,
                self.scale if scale_N is None else scale_N,
                self.index,
                self.scale,
                self.by_normalizer,
                self.by_target,
                self.z_slope,
                self.empty,
            ),
            (tokens, source.num_classes, options.ignore_index, options.z_loss),
            {
                "HAS_WEIGHT": self.class_weight is not None,
                "HAS_SCALE": scale_N is not None,
                "IS_MEAN": is_mean and scale_N is None,
                "BLOCK": self.block,
            },
            debug=True,
            num_warps=WARPS,
        )

    def total(self, losses: Tensor) -> Tensor:
        total = torch.empty((), dtype=torch.float32, device=losses.device)
        launch(
            total_kernel,
            1,
            (self.scale, losses, self.empty, total),
            (losses.numel(),),
            {"BLOCK": self.block},
            num_warps=WARPS,
        )
        return total


def is_plain(source: Source, target: Tensor, log_prior: Tensor | None, options: LossOptions) -> bool:
    """Whether :func:`plain_loss` computes this."""
    is_rare = options.label_smoothing or options.argmax or options.entropy or target.is_floating_point()
    return not is_rare and log_prior is None and 0 < source.num_tokens <= MOST_TOKENS


def cut_to(first: int, count: int, whole: int) -> Callable[[Tensor], Tensor]:
    """Takes the part of a vector, or of each of several, that belongs to a chunk; all of it if there is but one."""
    return (lambda vectors: vectors) if count == whole else (lambda vectors: vectors[..., first : first + count])


def walk_of(source: Source) -> ClassWalk | None:
    """Where the gradient is to be computed a range of classes at a time."""
    return ClassWalk(source) if isinstance(source, LinearLogits) and source.walks_classes else None


def plain_loss(
    source: Source,
    routines: TritonRows,
    target_N: Tensor,
    class_weight_V: Tensor | None,
    scale_N: Tensor | None,
    options: LossOptions,
    *,
    is_mean: bool,
    wants_gradient: bool,
) -> tuple[Tensor, TokenLosses]:
    """The total and the tokens' losses; gradients go to the source."""
    tokens = source.num_tokens
    device = target_N.device
    setup = Setup(source, target_N, class_weight_V, scale_N, options, is_mean=is_mean)
    index_N, by_normalizer, by_target = setup.index, setup.by_normalizer, setup.by_target
    stats_6N = torch.empty(6, tokens, dtype=torch.float32, device=device)
    # Outputs of an op must not share memory.
    losses, log_normalizer = torch.empty_like(setup.scale), torch.empty_like(setup.scale)
    walk = walk_of(source) if wants_gradient else None
    if walk is not None and not routines.per_class:
        ranges.measure(routines, walk, index_N, stats_6N)
    else:
        for first, logits_RV in source.chunks():
            of = cut_to(first, logits_RV.shape[0], tokens)
            rows_RV = logits_RV if routines.per_class else source.whole_rows(logits_RV)
            if walk is None and wants_gradient:
                coefficients = RowCoefficients(of(by_normalizer), of(by_target), None, None)
                z_slope = of(setup.z_slope) if options.z_loss else None
                out_RV = source.gradient_rows(0, rows_RV)
                routines.stats_and_gradient(
                    rows_RV, coefficients, z_slope, of(index_N), None, out_RV, False, False, of(stats_6N)
                )
                source.backpropagate()
            else:
                routines.stats(rows_RV, of(index_N), None, False, False, of(stats_6N))
    _, offset, normalizer, at_target = stats_6N[:4]
    if walk is not None:
        if options.z_loss:
            by_normalizer = by_normalizer + scaled(finite(offset) + normalizer, setup.z_slope)
        ranges.write_gradients(routines, walk, stats_6N, RowCoefficients(by_normalizer, by_target, None, None), index_N)
    total = torch.empty((), dtype=torch.float32, device=device)
    launch(
        after_kernel,
        1,
        (
            target_N,
            losses if setup.class_weight is None else setup.class_weight,
            setup.scale,
            offset,
            normalizer,
            at_target,
            setup.empty,
            losses,
            log_normalizer,
            total,
        ),
        (tokens, options.ignore_index, options.z_loss),
        {"HAS_WEIGHT": setup.class_weight is not None, "HAS_Z_LOSS": options.z_loss != 0, "BLOCK": setup.block},
        num_warps=WARPS,
    )
    return total, TokenLosses(losses, log_normalizer.unsqueeze(-1), None, None)
