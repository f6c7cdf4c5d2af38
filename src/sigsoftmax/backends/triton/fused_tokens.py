"""The commonest losses on a GPU in few launches: class indices, no smoothing, no extras but the log normaliser.

It is what nearly every training step asks for, and for a small model its time is that of the host. So the arithmetic
on vectors of length N that ``contract.tokens`` does in a few dozen torch operations is two kernels here, before and
after the logits kernel; for a mixture one of them stands between the statistics and the gradient of a chunk. A sum over
tokens runs in one program, in a fixed order.

Shapes: N tokens, K components, V classes; R = N K rows.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from sigsoftmax.backends.chunked.logits import LinearLogits, LogitsProvider
from sigsoftmax.backends.chunked.loop import TokenLosses
from sigsoftmax.backends.chunked.loss import Computed
from sigsoftmax.backends.chunked.vocabulary_blocks import VocabularyBlocks
from sigsoftmax.backends.triton import priors
from sigsoftmax.backends.triton.chunk_loop import TritonLoss
from sigsoftmax.backends.triton.fused_loss import too_many
from sigsoftmax.backends.triton.kernels import token_losses
from sigsoftmax.backends.triton.launch import launch
from sigsoftmax.backends.triton.logits_kernels import LogitsKernels
from sigsoftmax.backends.triton.vocabulary_blocks import reduce_blocks, write_gradients
from sigsoftmax.contract import value_checks
from sigsoftmax.contract.operands import Operands
from sigsoftmax.contract.problem import Problem, first_reason
from sigsoftmax.contract.rows import RowCoefficients, RowStats, RowTargets
from sigsoftmax.contract.spec import LossSpec
from sigsoftmax.contract.tokens import TokenBatch, with_z_slopes

MOST_TOKENS = 2**17
"""Beyond it one program for all tokens would be slower than many torch operations."""
WARPS = 16
OPTIONS = (
    *("member", "prior", "reduction", "ignore_index", "z_loss", "floor", "weight_gradient", "chunk_bytes", "backend"),
)
"""the options of a loss that the kernels compute; ``extras`` besides, where it asks for the log normaliser alone"""


def why_refused(problem: Problem[LossSpec]) -> str | None:
    """The reason why a loss is not computed in few launches; None if it can be."""
    spec = problem.spec
    others = [name for name in spec.beside(OPTIONS) if name != "extras"]
    others += [name for name in spec.extras or () if name != "log_normalizer"]
    reasons = {
        f"it does not compute {', '.join(others)}": bool(others),
        "targets are probabilities": problem.has_probabilities,
        "classes are spread over processes": problem.is_sharded,
        "values are checked with their messages": problem.signature.checks_values,
        **too_many(problem.num_tokens, MOST_TOKENS),
        **priors.too_many_components(problem),
    }
    return first_reason(reasons)


class FusedTokensLoss(TritonLoss):
    """A loss whose token arithmetic is done by kernels."""

    def __init__(self, problem: Problem[LossSpec]) -> None:
        super().__init__(problem, "rows and token arithmetic by kernels")

    def run(self, provider: LogitsProvider, batch: TokenBatch, operands: Operands, wants_gradient: bool) -> Computed:
        if batch.class_weight_V is not None:
            value_checks.check_class_weight(batch.class_weight_V)
        member = self.problem.spec.member
        kernels = LogitsKernels(
            member.form,
            member.arguments(operands.arguments),
            provider.logits_like,
            self.needs_arguments(wants_gradient),
            rows_per_target=provider.components,
        )
        tokens = TokenKernels(self.problem.spec, kernels, provider, batch, wants_gradient)
        blocks = None
        if wants_gradient and isinstance(provider, LinearLogits) and provider.tiles_vocabulary:
            blocks = VocabularyBlocks(provider)
        if blocks is not None and not kernels.per_class:
            reduce_blocks(kernels, blocks, tokens.index, tokens.stats_6R)
            tokens.mix(0, provider.num_tokens)
        else:
            for first, logits_RV in provider.chunks():
                rows_RV = logits_RV if kernels.per_class else provider.whole_rows(logits_RV)
                out_RV = None
                if wants_gradient and blocks is None:
                    out_RV = provider.gradient_rows(slice(0, None), rows_RV)
                _chunk(kernels, tokens, first, rows_RV, out_RV)
                if out_RV is not None:
                    provider.backpropagate()
        if blocks is not None:
            coefficients = tokens.coefficients
            slopes = with_z_slopes(coefficients.normalizer, tokens.stats, tokens.z_slope_R, kernels.unit)
            coefficients = coefficients._replace(normalizer=slopes)
            write_gradients(kernels, blocks, tokens.index, tokens.stats, coefficients)
        total, total_in_units = tokens.total().unbind()
        result = TokenLosses(tokens.losses, tokens.log_normalizer_NK, None, None)
        return Computed(total, total_in_units, result, tokens.unit, tokens.by_prior_NK, kernels.argument_gradients())


def _chunk(kernels: LogitsKernels, tokens: TokenKernels, first: int, logits_RV: Tensor, out_RV: Tensor | None) -> None:
    """The rows of a chunk from a first token on; without memory for their gradient, their statistics alone."""
    components = tokens.components
    last = first + logits_RV.shape[0] // components
    rows = slice(first * components, last * components)
    targets, memory_6R = RowTargets(tokens.index[first:last]), tokens.stats_6R[:, rows]
    by_normalizer, by_target, *_ = tokens.coefficients
    coefficients = RowCoefficients(by_normalizer[rows], None if by_target is None else by_target[rows], None, None)
    if out_RV is not None and not tokens.is_mixture:
        z_slope_R = None if tokens.z_slope_R is None else tokens.z_slope_R[rows]
        kernels.stats_and_gradient(logits_RV, targets, coefficients, z_slope_R, out_RV, memory_6R)
        return
    stats = kernels.stats(logits_RV, targets, memory_6R)
    tokens.mix(first, last)
    if out_RV is not None:
        kernels.gradient(logits_RV, targets, stats, coefficients, out_RV)


class TokenKernels:
    """The token arithmetic of a loss by kernels.

    Target index and weight in the total of every token are computed at once. Without a scale every kept token counts 1,
    divided by the sum of their class weights for a mean.
    """

    def __init__(
        self,
        spec: LossSpec,
        kernels: LogitsKernels,
        provider: LogitsProvider,
        batch: TokenBatch,
        wants_gradient: bool,
    ) -> None:
        self.spec, self.kernels, self.target, self.components = spec, kernels, batch.target, provider.components
        self.is_mixture, self.wants_gradient = batch.log_prior is not None, wants_gradient
        tokens, rows = provider.num_tokens, provider.num_tokens * provider.components
        self.stats_6R = self._empty(6, rows)
        """the statistics of rows, in the order of ``RowStats``"""
        peak, offset, normalizer, at_target = self.stats_6R[:4]
        self.stats = RowStats(peak, offset, normalizer, at_target, None, None, None)
        # Outputs of an op must not share memory.
        self.losses, self.log_normalizer_NK = self._empty(tokens), self._empty(tokens, provider.components)
        self.index = torch.empty_like(batch.target)
        self.scale, by_normalizer, by_target, z_slope, empty = self._empty(5, tokens).unbind()
        self.empty = empty[:1]
        """0, or NaN for the mean of no tokens"""
        self.class_weight = None if batch.class_weight_V is None else batch.class_weight_V.float().contiguous()
        scale_N = None if batch.scale_N is None else batch.scale_N.float().contiguous()
        self.block = min(4096, triton.next_power_of_2(max(tokens, 32)))
        launch(
            token_losses.prepare_tokens_kernel,
            1,
            (
                batch.target,
                self.scale if self.class_weight is None else self.class_weight,
                self.scale if scale_N is None else scale_N,
                self.index,
                self.scale,
                by_normalizer,
                by_target,
                z_slope,
                self.empty,
            ),
            (tokens, provider.num_classes, spec.ignore_index, spec.z_loss),
            {
                "HAS_WEIGHT": self.class_weight is not None,
                "HAS_SCALE": scale_N is not None,
                "IS_MEAN": spec.reduction == "mean" and scale_N is None,
                "BLOCK": self.block,
            },
            debug=True,
            num_warps=WARPS,
        )
        self.z_slope_R = self.by_prior_NK = self.log_prior_NK = None
        if batch.log_prior is not None:
            self.log_prior_NK = batch.log_prior.values.float().contiguous()
            self.by_prior_NK = torch.empty_like(self.log_normalizer_NK) if wants_gradient else None
            # The coefficients of a mixture are known after the statistics of its rows, the z-loss among them.
            by_normalizer, by_target = self._empty(2, rows)
        elif spec.z_loss:
            self.z_slope_R = z_slope
        self.coefficients = RowCoefficients(by_normalizer, by_target, None, None)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.target.device)

    @property
    def unit(self) -> Tensor | float:
        """The unit of the losses. Kernels find it from the numbers of phi."""
        return 2.0 * self.kernels.unit if self.is_mixture else self.kernels.unit

    def mix(self, first: int, last: int) -> None:
        """Losses and coefficients of a mixture's tokens whose rows have statistics; nothing without a prior."""
        if self.log_prior_NK is None:
            return
        spec, tile = self.spec, priors.TokenTile.of(self.components)
        by_normalizer, by_target, *_ = self.coefficients
        assert by_target is not None
        launch(
            token_losses.mixture_kernel,
            tile.programs(last - first),
            (
                self.target,
                self.losses if self.class_weight is None else self.class_weight,
                self.scale,
                self.log_prior_NK,
                *self.stats_6R[1:4],
                self.losses,
                self.log_normalizer_NK,
                by_normalizer,
                by_target,
                self.losses if self.by_prior_NK is None else self.by_prior_NK,
                *self.kernels.unit_pointers(self.losses),
            ),
            (*self.kernels.values[:2], first, last, self.components, spec.ignore_index, spec.floor, spec.z_loss),
            {
                **self.kernels.unit_constants,
                "HAS_WEIGHT": self.class_weight is not None,
                "HAS_FLOOR": spec.floor != 0,
                "HAS_Z_LOSS": spec.z_loss != 0,
                "HAS_GRADIENT": self.wants_gradient,
                "TOKENS": tile.tokens,
                "LANES": tile.lanes,
            },
            num_warps=4,
        )

    def total(self) -> Tensor:
        """The total, and the total in units; without a prior, the losses of tokens are computed with it."""
        total = self._empty(2)
        if self.is_mixture:
            tensors: tuple[Tensor, ...] = (self.scale, self.losses, self.empty, total)
            numbers: tuple[float, ...] = (self.losses.numel(),)
            constants: dict[str, int] = {}
            kernel = token_losses.total_kernel
        else:
            weight = self.losses if self.class_weight is None else self.class_weight
            statistics, results = self.stats_6R[1:4], (self.losses, self.log_normalizer_NK, total)
            tensors = (self.target, weight, self.scale, *statistics, self.empty, *results)
            numbers = (self.losses.numel(), self.spec.ignore_index, self.spec.z_loss)
            constants = {"HAS_WEIGHT": self.class_weight is not None, "HAS_Z_LOSS": self.spec.z_loss != 0}
            kernel = token_losses.finish_tokens_kernel
        tensors = (*tensors, *self.kernels.unit_pointers(self.losses))
        numbers = (*self.kernels.values[:2], *numbers)
        constants = {**self.kernels.unit_constants, **constants, "BLOCK": self.block}
        launch(kernel, 1, tensors, numbers, constants, num_warps=WARPS)
        return total
