"""The commonest losses on a GPU in few launches: class indices, no smoothing, no extras but the log normaliser.

It is what nearly every training step asks for, and for a small model its time is that of the host. So the arithmetic
on vectors of length N that ``contract.tokens`` does in a few dozen torch operations is two kernels here, before and
after the rows; for a mixture one of them stands between measuring and writing the rows of a chunk. A sum over tokens
runs in one program, in a fixed order.

Shapes: N tokens, K components, V classes; R = N K rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from sigsoftmax.backends.chunked.loop import Rows, TokenLosses
from sigsoftmax.backends.chunked.loss import Computed
from sigsoftmax.backends.chunked.providers import LinearLogits, Source
from sigsoftmax.backends.chunked.vocabulary_blocks import ClassWalk
from sigsoftmax.backends.triton import priors, ranges
from sigsoftmax.backends.triton.kernels.token_kernels import after_kernel, before_kernel, mixture_kernel, total_kernel
from sigsoftmax.backends.triton.launches import launch
from sigsoftmax.backends.triton.paths import TritonLoss
from sigsoftmax.backends.triton.rows import TritonRows
from sigsoftmax.contract import value_checks
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import Problem
from sigsoftmax.contract.rows import RowCoefficients, RowStats
from sigsoftmax.contract.spec import LossSpec
from sigsoftmax.contract.tokens import TokenBatch, with_z_slopes

MOST_TOKENS = 2**17
"""Beyond it one program for all tokens would be slower than many torch operations."""
WARPS = 16
OPTIONS = (
    "member",
    "prior",
    "reduction",
    "ignore_index",
    "z_loss",
    "floor",
    "weight_gradient",
    "chunk_bytes",
    "backend",
)
"""the options of a loss that the kernels compute; ``extras`` besides, where it asks for the log normaliser alone"""


def why_refused(problem: Problem[LossSpec]) -> str | None:
    """Why a loss is not computed in few launches; None if it can be."""
    spec = problem.spec
    others = [name for name in spec.beside(OPTIONS) if name != "extras"]
    others += [name for name in spec.extras or () if name != "log_normalizer"]
    if others:
        return f"it does not compute {', '.join(others)}"
    if problem.has_probabilities:
        return "targets are probabilities"
    if problem.is_sharded:
        return "classes are spread over processes"
    if problem.signature.checks_values:
        return "values are checked with their messages"
    if not 0 < problem.num_tokens <= MOST_TOKENS:
        return f"{problem.num_tokens:,} tokens exceed its {MOST_TOKENS:,}" if problem.num_tokens else "no tokens"
    if spec.prior is not None and problem.components > priors.MOST_COMPONENTS:
        return f"{problem.components:,} components exceed its {priors.MOST_COMPONENTS:,}"
    return None


class FewLaunchesLoss(TritonLoss):
    """A loss whose token arithmetic is done by kernels."""

    def __init__(self, problem: Problem[LossSpec]) -> None:
        super().__init__(problem, "rows and token arithmetic by kernels")

    def run(self, source: Source, rows: Rows, batch: TokenBatch, operands: Operands, wants_gradient: bool) -> Computed:
        if batch.class_weight_V is not None:
            value_checks.check_class_weight(batch.class_weight_V)
        setup = Setup(source, batch, self.problem.spec)
        routines = TritonRows(
            rows.form, rows.arguments, source.logits_like, rows.needs_arguments, rows_of_target=source.components
        )
        walk = walk_of(source) if wants_gradient else None
        if batch.log_prior_NK is not None:
            return _mixture_loss(source, routines, walk, batch.log_prior_NK, setup, wants_gradient)
        return _plain_loss(source, routines, walk, setup, wants_gradient)


class Setup:
    """Target index and weight in the total of every token, computed before the rows.

    Without a scale every kept token counts 1, divided by the sum of their class weights for a mean.
    """

    def __init__(self, source: Source, batch: TokenBatch, spec: LossSpec) -> None:
        self.spec, self.target = spec, batch.target
        tokens = source.num_tokens
        self.index = torch.empty_like(batch.target)
        vectors = torch.empty(5, tokens, dtype=torch.float32, device=batch.target.device)
        self.scale, self.by_normalizer, self.by_target, self.z_slope, empty = vectors.unbind()
        self.empty = empty[:1]
        """0, or NaN for the mean of no tokens"""
        self.class_weight = None if batch.class_weight_V is None else batch.class_weight_V.float().contiguous()
        scale_N = None if batch.scale_N is None else batch.scale_N.float().contiguous()
        self.block = min(4096, triton.next_power_of_2(max(tokens, 32)))
        launch(
            before_kernel,
            1,
            (
                batch.target,
                self.scale if self.class_weight is None else self.class_weight,
                self.scale if scale_N is None else scale_N,
                self.index,
                self.scale,
                self.by_normalizer,
                self.by_target,
                self.z_slope,
                self.empty,
            ),
            (tokens, source.num_classes, spec.ignore_index, spec.z_loss),
            {
                "HAS_WEIGHT": self.class_weight is not None,
                "HAS_SCALE": scale_N is not None,
                "IS_MEAN": spec.reduction == "mean" and scale_N is None,
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


def cut_to(first: int, count: int, whole: int) -> Callable[[Tensor], Tensor]:
    """Takes the part of a vector, or of each of several, that belongs to a chunk; all of it if there is but one."""
    return (lambda vectors: vectors) if count == whole else (lambda vectors: vectors[..., first : first + count])


def walk_of(source: Source) -> ClassWalk | None:
    """The walk over ranges of classes by which the gradient is to be computed; None where it is not."""
    return ClassWalk(source) if isinstance(source, LinearLogits) and source.walks_classes else None


def _plain_loss(
    source: Source, routines: TritonRows, walk: ClassWalk | None, setup: Setup, wants_gradient: bool
) -> Computed:
    """The total and the tokens' losses; gradients go to the source."""
    tokens, spec = source.num_tokens, setup.spec
    device = setup.target.device
    index_N, by_normalizer, by_target = setup.index, setup.by_normalizer, setup.by_target
    stats_6N = torch.empty(6, tokens, dtype=torch.float32, device=device)
    # Outputs of an op must not share memory.
    losses, log_normalizer = torch.empty_like(setup.scale), torch.empty_like(setup.scale)
    if walk is not None and not routines.per_class:
        ranges.measure(routines, walk, index_N, stats_6N)
    else:
        for first, logits_RV in source.chunks():
            of = cut_to(first, logits_RV.shape[0], tokens)
            rows_RV = logits_RV if routines.per_class else source.whole_rows(logits_RV)
            if walk is None and wants_gradient:
                coefficients = RowCoefficients(of(by_normalizer), of(by_target), None, None)
                z_slope = of(setup.z_slope) if spec.z_loss else None
                out_RV = source.gradient_rows(0, rows_RV)
                routines.stats_and_gradient(
                    rows_RV, coefficients, z_slope, of(index_N), None, out_RV, False, False, of(stats_6N)
                )
                source.backpropagate()
            else:
                routines.stats(rows_RV, of(index_N), None, False, False, of(stats_6N))
    anchor, offset, normalizer, at_target = stats_6N[:4]
    if walk is not None:
        stats = RowStats(anchor, offset, normalizer, at_target, None, None, None)
        by_normalizer = with_z_slopes(by_normalizer, stats, setup.z_slope if spec.z_loss else None)
        ranges.write_gradients(routines, walk, stats_6N, RowCoefficients(by_normalizer, by_target, None, None), index_N)
    total = torch.empty((), dtype=torch.float32, device=device)
    launch(
        after_kernel,
        1,
        (
            setup.target,
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
        (tokens, spec.ignore_index, spec.z_loss),
        {"HAS_WEIGHT": setup.class_weight is not None, "HAS_Z_LOSS": spec.z_loss != 0, "BLOCK": setup.block},
        num_warps=WARPS,
    )
    result = TokenLosses(losses, log_normalizer.unsqueeze(-1), None, None)
    return Computed(total, result, None, routines.argument_gradients())


def _mixture_loss(
    source: Source,
    routines: TritonRows,
    walk: ClassWalk | None,
    log_prior_NK: Tensor,
    setup: Setup,
    wants_gradient: bool,
) -> Computed:
    """The rows of a chunk are measured, a kernel finishes its tokens, and the gradient overwrites the rows."""
    spec, components, tokens = setup.spec, source.components, source.num_tokens
    rows = tokens * components
    device = setup.target.device
    vectors = torch.empty(6, rows, dtype=torch.float32, device=device)
    by_normalizer, by_target = torch.empty(2, rows, dtype=torch.float32, device=device)
    log_prior_NK = log_prior_NK.float().contiguous()
    losses = torch.empty(tokens, dtype=torch.float32, device=device)
    log_normalizer_NK = torch.empty(tokens, components, dtype=torch.float32, device=device)
    by_prior_NK = torch.empty_like(log_normalizer_NK) if wants_gradient else None
    lanes = triton.next_power_of_2(components)
    tokens_of_program = max(1, priors.TILE // lanes)

    def mix(first: int, last: int) -> None:
        launch(
            mixture_kernel,
            -(-(last - first) // tokens_of_program),
            (
                setup.target,
                losses if setup.class_weight is None else setup.class_weight,
                setup.scale,
                log_prior_NK,
                *(vectors[1], vectors[2], vectors[3]),
                losses,
                log_normalizer_NK,
                by_normalizer,
                by_target,
                losses if by_prior_NK is None else by_prior_NK,
            ),
            (first, last, components, spec.ignore_index, spec.floor, spec.z_loss),
            {
                "HAS_WEIGHT": setup.class_weight is not None,
                "HAS_FLOOR": spec.floor != 0,
                "HAS_Z_LOSS": spec.z_loss != 0,
                "HAS_GRADIENT": wants_gradient,
                "TOKENS": tokens_of_program,
                "LANES": lanes,
            },
            num_warps=4,
        )

    if walk is not None and not routines.per_class:
        ranges.measure(routines, walk, setup.index, vectors)
        mix(0, tokens)
    else:
        for first, logits_RV in source.chunks():
            last = first + logits_RV.shape[0] // components
            of_tokens = cut_to(first, last - first, tokens)
            of_rows = cut_to(first * components, logits_RV.shape[0], rows)
            rows_RV = logits_RV if routines.per_class else source.whole_rows(logits_RV)
            index_n = of_tokens(setup.index)
            stats = routines.stats(rows_RV, index_n, None, False, False, of_rows(vectors))
            mix(first, last)
            if walk is None and wants_gradient:
                coefficients = RowCoefficients(of_rows(by_normalizer), of_rows(by_target), None, None)
                out_RV = source.gradient_rows(0, rows_RV)
                routines.gradient(rows_RV, stats, coefficients, index_n, None, out_RV)
                source.backpropagate()
    if walk is not None:
        coefficients = RowCoefficients(by_normalizer, by_target, None, None)
        ranges.write_gradients(routines, walk, vectors, coefficients, setup.index)
    result = TokenLosses(losses, log_normalizer_NK, None, None)
    return Computed(setup.total(losses), result, by_prior_NK, routines.argument_gradients())
