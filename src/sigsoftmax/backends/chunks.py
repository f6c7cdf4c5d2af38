"""The chunk loop above the backends: losses and their gradients without an N x V tensor.

Logits come from a source, either rows that the caller holds or the product of hidden vectors and an output matrix,
made a slab at a time. Each block of rows is measured, the coefficients of the loss follow from a few numbers a row,
and the gradient overwrites the block. A plain output layer is a mixture of one component: K = 1 and no prior.

Shapes: N tokens, K components, V classes, d features; R = n K rows of the n tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sigsoftmax.backends import reference
from sigsoftmax.backends.blocked.any_form import FormRows
from sigsoftmax.backends.class_walk import ClassWalk
from sigsoftmax.backends.interface import FusedRowRoutines, RowCoefficients, RowRoutines, RowStats
from sigsoftmax.backends.mixture_block import MixtureBlock
from sigsoftmax.backends.reference import MASK, finite, scaled, z_losses
from sigsoftmax.backends.sources import LinearLogits, Source
from sigsoftmax.forms import Form


def token_scales(
    target: Tensor,
    token_weights_N: Tensor | None,
    class_weight_V: Tensor | None,
    ignore_index: int,
    dtype: torch.dtype,
    *,
    is_mean: bool,
) -> tuple[Tensor, Tensor | None]:
    """What each token's loss counts in the result, 0 if ignored; and for a mean, whether no token counts."""
    is_dense = target.is_floating_point()
    kept = torch.ones_like(target[..., 0], dtype=torch.bool) if is_dense else target != ignore_index
    weights = torch.ones_like(kept, dtype=dtype) if token_weights_N is None else token_weights_N.to(dtype)
    weights = torch.where(kept, weights, torch.zeros_like(weights))
    if not is_mean:
        return weights, None
    counted = weights
    if class_weight_V is not None and not is_dense:
        # An index out of range is reported by the backend; here it must only not break the look-up.
        index = torch.where(kept, target, torch.zeros_like(target)).clamp(0, class_weight_V.shape[0] - 1)
        counted = weights * class_weight_V.to(dtype)[index]
    scales = torch.where(kept, weights / counted.sum(), torch.zeros_like(weights))
    return scales, ~kept.any()


Vectors = TypeVar("Vectors", RowStats, RowCoefficients)


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """What a loss is asked for, reductions and token weights aside."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    floor: float = 0.0
    ignore_index: int = -100
    argmax: bool = False
    entropy: bool = False


class TokenLosses(NamedTuple):
    """Per token: its loss before token weights, and the extras (None where not asked for)."""

    losses_N: Tensor
    log_normalizer_NK: Tensor
    argmax_N: Tensor | None
    entropy_N: Tensor | None


def concatenate(kind: type[Vectors], pieces: Sequence[Vectors]) -> Vectors:
    """Named tuples of vectors joined field by field."""
    columns: list[Any] = [None if c[0] is None else torch.cat(c) for c in zip(*pieces, strict=True)]
    return kind(*columns)


MakeRoutines = Callable[[Form, Sequence[Tensor], Tensor, bool], RowRoutines]


class LossLoop:
    """One loss over all rows of a source, with gradients if asked for; ``run`` does the work.

    ``scale_N`` is the weight of each token in the total whose gradient is wanted; without it no gradient is computed.
    Blocks are many and small, so whatever can be computed for all tokens at once is computed before or after them.
    ``num_classes`` is that of the whole loss, where the source has but a part of them (``sharded_loop``).
    """

    def __init__(
        self,
        source: Source,
        form: Form,
        arguments: Sequence[Tensor],
        target: Tensor,
        options: LossOptions,
        make_routines: MakeRoutines,
        *,
        log_prior_NK: Tensor | None = None,
        class_weight_V: Tensor | None = None,
        scale_N: Tensor | None = None,
        needs_arguments: bool = False,
        num_classes: int | None = None,
    ) -> None:
        self.source = source
        self.options = options
        like = source.logits_like
        self.dtype = reference.compute_dtype(like.dtype)
        self.numbers = torch.empty(0, dtype=self.dtype, device=like.device)
        self.log_prior_NK = None if log_prior_NK is None else log_prior_NK.to(self.dtype)
        self.class_weight_V = None if class_weight_V is None else class_weight_V.to(self.dtype)
        self.probabilities_NV = target if target.is_floating_point() else None
        num_classes = source.num_classes if num_classes is None else num_classes
        self.share = options.label_smoothing / num_classes
        if self.probabilities_NV is None:
            self.kept_N = target != options.ignore_index
            self.index_N: Tensor | None = torch.where(self.kept_N, target, torch.zeros_like(target))
            weight_N = self.numbers.new_full(target.shape, 1.0 - options.label_smoothing)
            if self.class_weight_V is not None:
                weight_N = weight_N * self.class_weight_V[self.index_N]
            self.target_weight_N: Tensor | None = weight_N
        else:
            self.kept_N = torch.ones(source.num_tokens, dtype=torch.bool, device=like.device)
            self.index_N = self.target_weight_N = None
        self.scale_N = self.unused_N = None
        if scale_N is not None:
            self.scale_N = torch.where(self.kept_N, scale_N, torch.zeros_like(scale_N))
            self.unused_N = self.scale_N == 0
        needs_every_class = self.probabilities_NV is not None or options.label_smoothing > 0
        self.is_dense_mixture = log_prior_NK is not None and (needs_every_class or options.argmax or options.entropy)
        self.smoothing_V: Tensor | None = None
        if options.label_smoothing and not self.is_dense_mixture and self.probabilities_NV is None:
            ones_V = self.numbers.new_ones(num_classes)
            # With its share: a sum over classes of what is smoothed may overflow, and not its share.
            self.smoothing_V = self.share * (ones_V if self.class_weight_V is None else self.class_weight_V)
            self.smoothing_mass = self.smoothing_V.sum()
        if self.is_dense_mixture:
            self.dense_routines = FormRows(form, arguments, like, needs_arguments)
            self.routines: RowRoutines = self.dense_routines
        else:
            self.routines = make_routines(form, arguments, like, needs_arguments)
        wants_prior = scale_N is not None and log_prior_NK is not None
        shape_NK = (source.num_tokens, source.components)
        self.prior_gradient_NK = self.numbers.new_empty(shape_NK) if wants_prior else None
        self.collected: dict[str, list[Tensor]] = {}

    def run(self) -> TokenLosses:
        wants_gradient = self.scale_N is not None
        if wants_gradient and isinstance(self.source, LinearLogits) and self.source.walks_classes:
            if isinstance(self.routines, FusedRowRoutines) and self.probabilities_NV is None:
                self._walk_classes(self.source, self.routines)
                return self._results()
            self.source.walks_classes = False
        compute = self._dense_mixture_block if self.is_dense_mixture else self._block
        for span, first_row, logits_RV in self.source.blocks(self.routines.max_rows, backpropagate=wants_gradient):
            compute(span, logits_RV, self.source.gradient_rows(first_row, logits_RV) if wants_gradient else None)
        return self._results()

    def _walk_classes(self, source: LinearLogits, routines: FusedRowRoutines) -> None:
        """Measure all rows first, then compute the gradient a range of classes at a time."""
        measured = [self._measure(span, rows_RV) for span, _, rows_RV in source.blocks(None, backpropagate=False)]
        if not measured:
            return
        all_stats, all_coefficients = zip(*measured, strict=True)
        stats, coefficients = concatenate(RowStats, all_stats), concatenate(RowCoefficients, all_coefficients)
        index_R = self._row_index(slice(None))
        for first_class, logits_RV, out_RV in ClassWalk(source).gradients():
            routines.gradient_of_classes(logits_RV, stats, coefficients, index_R, self.smoothing_V, first_class, out_RV)

    def _measure(self, span: slice, logits_RV: Tensor) -> tuple[RowStats, RowCoefficients]:
        stats = self.routines.stats(
            logits_RV, self._row_index(span), self.smoothing_V, self.options.argmax, self.options.entropy
        )
        self._collect_stats(stats, None)
        coefficients = self._coefficients(span, stats, None, self._collect_mixture(span, stats))
        # Routines that walk classes know unused rows by their coefficients.
        return stats, coefficients._replace(unused=None)

    def _results(self) -> TokenLosses:
        if "log_normalizer" in self.collected:
            normalizer_NK = self._all("log_normalizer")
        else:
            normalizer_NK = (self._all("normalizer") + self._all("offset")).view(-1, self.source.components)
        losses_N = self._all("losses") if "losses" in self.collected else self._plain_losses()
        if self.options.z_loss:
            prior_NK = torch.ones_like(normalizer_NK) if self.log_prior_NK is None else self.log_prior_NK.exp()
            losses_N = losses_N + z_losses(finite(normalizer_NK), prior_NK, self.options.z_loss)
        losses_N = torch.where(self.kept_N, losses_N, torch.zeros_like(losses_N))
        argmax_N = self._all("argmax", torch.int64) if self.options.argmax else None
        return TokenLosses(losses_N, normalizer_NK, argmax_N, self._all("entropy") if self.options.entropy else None)

    def argument_gradients(self) -> list[Tensor]:
        return self.routines.argument_gradients()

    def _collect(self, **values: Tensor | None) -> None:
        for name, value in values.items():
            if value is not None:
                self.collected.setdefault(name, []).append(value)

    def _all(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """What was collected under a name, for all rows; empty if nothing was."""
        pieces = self.collected.get(name, [])
        return torch.cat(pieces) if pieces else self.numbers.new_empty(0, dtype=dtype)

    # A plain row, or a mixture that only needs its rows at the target.

    def _block(self, span: slice, logits_RV: Tensor, out_RV: Tensor | None) -> None:
        index_R = self._row_index(span)
        dense = self.smoothing_V if self.probabilities_NV is None else self._smoothed_probabilities(span)
        mass = dense.sum(-1) if self.probabilities_NV is not None and dense is not None else None
        extras = (self.options.argmax, self.options.entropy)
        if out_RV is not None and self.log_prior_NK is None and isinstance(self.routines, FusedRowRoutines):
            coefficients = self._coefficients(span, None, mass, None)
            z_slope_n = None
            if self.options.z_loss:
                assert self.scale_N is not None
                z_slope_n = 2.0 * self.options.z_loss * self.scale_N[span]
            stats = self.routines.stats_and_gradient(
                logits_RV, coefficients, z_slope_n, index_R, dense, out_RV, *extras
            )
            self._collect_stats(stats, mass)
            return
        stats = self.routines.stats(logits_RV, index_R, dense, *extras)
        self._collect_stats(stats, mass)
        by_log_f_nK = self._collect_mixture(span, stats)
        if out_RV is not None:
            coefficients = self._coefficients(span, stats, mass, by_log_f_nK)
            self.routines.gradient(logits_RV, stats, coefficients, index_R, dense, out_RV)

    def _collect_stats(self, stats: RowStats, mass: Tensor | None) -> None:
        self._collect(offset=stats.offset, normalizer=stats.normalizer, argmax=stats.argmax, entropy=stats.entropy)
        if self.log_prior_NK is None:
            self._collect(target=stats.target, dense=stats.dense, mass=mass)

    def _collect_mixture(self, span: slice, stats: RowStats) -> Tensor | None:
        """The losses of a mixture are known at once; returns what their gradient needs."""
        if self.log_prior_NK is None:
            return None
        assert stats.target is not None
        log_f_nK = (stats.target - stats.normalizer).view(-1, self.source.components)
        losses, by_log_f_nK = self._mixture_losses(span, log_f_nK)
        self._collect(losses=losses)
        return by_log_f_nK

    def _row_index(self, span: slice) -> Tensor | None:
        """The target of each row."""
        if self.index_N is None:
            return None
        index_n = self.index_N[span]
        return index_n if self.source.components == 1 else index_n.repeat_interleave(self.source.components)

    def _plain_losses(self) -> Tensor:
        normalizer_N = self._all("normalizer")
        if self.target_weight_N is None:
            return normalizer_N * self._all("mass") - self._all("dense")
        losses = scaled(normalizer_N - self._all("target"), self.target_weight_N)
        if self.smoothing_V is not None:
            losses = losses + (self.smoothing_mass * normalizer_N - self._all("dense"))
        return losses

    def _mixture_losses(self, span: slice, log_f_nK: Tensor) -> tuple[Tensor, Tensor]:
        """Losses, and the negative of their derivative by log f of the target.

        The share of component k in the probability of the target, its responsibility, is all that is needed.
        """
        assert self.log_prior_NK is not None and self.target_weight_N is not None
        joint_nK = self.log_prior_NK[span] + log_f_nK
        log_p_n1 = torch.logsumexp(joint_nK, -1, keepdim=True)
        responsibility_nK = torch.exp(joint_nK - log_p_n1).masked_fill_(log_p_n1 == MASK, 0.0)
        floored_n1 = reference.floored(log_p_n1, self.options.floor)
        weight_n1 = self.target_weight_N[span].unsqueeze(-1)
        by_log_f_nK = responsibility_nK.mul_(weight_n1)
        if self.options.floor:
            by_log_f_nK.mul_(torch.exp(log_p_n1 - floored_n1))
        return -scaled(floored_n1, weight_n1).squeeze(-1), by_log_f_nK

    def _coefficients(
        self, span: slice, stats: RowStats | None, mass: Tensor | None, by_log_f_nK: Tensor | None
    ) -> RowCoefficients:
        """The derivatives of the total; without stats, those that do not wait for them (z-loss does)."""
        assert self.scale_N is not None and self.unused_N is not None
        scale_n, unused_n = self.scale_N[span], self.unused_N[span]
        by_dense = None
        if by_log_f_nK is not None:
            components = by_log_f_nK.shape[1]
            by_normalizer = scaled(by_log_f_nK, scale_n.unsqueeze(-1)).flatten()
            by_target: Tensor | None = -by_normalizer
            if self.prior_gradient_NK is not None and by_target is not None:
                self.prior_gradient_NK[span] = by_target.view(-1, components)
            scale_n = scale_n.repeat_interleave(components)
            unused_n = unused_n.repeat_interleave(components)
        elif self.target_weight_N is not None:
            by_normalizer = self.target_weight_N[span] * scale_n
            by_target = -by_normalizer
            if self.smoothing_V is not None:
                by_dense = -scale_n
                by_normalizer = by_normalizer - by_dense * self.smoothing_mass
        else:
            assert mass is not None
            by_normalizer, by_target, by_dense = mass * scale_n, None, -scale_n
        if self.options.z_loss and stats is not None:
            slope_R = 2.0 * self.options.z_loss * (stats.normalizer + finite(stats.offset))
            if self.log_prior_NK is not None:
                slope_R = slope_R * self.log_prior_NK[span].exp().flatten()
            by_normalizer = by_normalizer + scaled(slope_R, scale_n)
        is_cpu = unused_n.device.type == "cpu"
        return RowCoefficients(by_normalizer, by_target, by_dense, None if is_cpu and not unused_n.any() else unused_n)

    def _smoothed_probabilities(self, span: slice) -> Tensor:
        """Weights of each class in the loss of tokens with probability targets, (n, V)."""
        assert self.probabilities_NV is not None
        weights = self.probabilities_NV[span].to(self.dtype)
        if self.options.label_smoothing:
            weights = weights * (1.0 - self.options.label_smoothing) + self.share
        return weights if self.class_weight_V is None else weights * self.class_weight_V

    # A mixture whose loss or extras need the mixed probability of every class.

    def _dense_mixture_block(self, span: slice, logits_RV: Tensor, out_RV: Tensor | None) -> None:
        assert self.log_prior_NK is not None
        block = MixtureBlock(self.dense_routines, logits_RV, self.log_prior_NK[span], self.options.floor)
        log_p_nV = block.log_p_nV
        self._collect(
            log_normalizer=block.log_normalizer_nK,
            losses=self._losses_of_log_p(span, log_p_nV),
            argmax=log_p_nV.argmax(-1) if self.options.argmax else None,
            entropy=reference.entropy(log_p_nV) if self.options.entropy else None,
        )
        if out_RV is None or self.scale_N is None or self.unused_N is None:
            return
        scale_n1 = self.scale_N[span].unsqueeze(-1)
        by_normalizer_nK = None
        if self.options.z_loss:
            prior_nK = self.log_prior_NK[span].exp()
            by_normalizer_nK = 2.0 * self.options.z_loss * prior_nK * finite(block.log_normalizer_nK) * scale_n1
        by_log_p_nV = self._class_weights_of_tokens(span, self.target_weight_N).mul_(-scale_n1)
        assert self.prior_gradient_NK is not None
        unused_n1 = self.unused_N[span].unsqueeze(-1)
        prior_gradient_nK = block.gradient(by_log_p_nV, by_normalizer_nK, unused_n1, out_RV)
        self.prior_gradient_NK[span] = prior_gradient_nK.masked_fill_(unused_n1, 0.0)

    def _losses_of_log_p(self, span: slice, log_p_nV: Tensor) -> Tensor:
        if self.index_N is None or self.target_weight_N is None:
            return -scaled(log_p_nV, self._smoothed_probabilities(span)).sum(-1)
        losses = -self._weighted_at_target(span, log_p_nV, self.index_N, self.target_weight_N)
        if self.share:
            ones_V = self.numbers.new_ones(1) if self.class_weight_V is None else self.class_weight_V
            losses = losses - scaled(log_p_nV, self.share * ones_V).sum(-1)
        return losses

    def _weighted_at_target(self, span: slice, log_p_nV: Tensor, index_N: Tensor, target_weight_N: Tensor) -> Tensor:
        return scaled(log_p_nV.gather(-1, index_N[span].unsqueeze(-1)).squeeze(-1), target_weight_N[span])

    def _class_weights_of_tokens(self, span: slice, target_weight_N: Tensor | None) -> Tensor:
        """q with loss = -sum_j q_j log P_j, (n, V)."""
        if self.index_N is None or target_weight_N is None:
            return self._smoothed_probabilities(span).clone()
        index_n1 = self.index_N[span].unsqueeze(-1)
        weights = self.numbers.new_full((index_n1.shape[0], self.source.num_classes), self.share)
        if self.class_weight_V is not None:
            weights *= self.class_weight_V
        return weights.scatter_add_(-1, index_n1, target_weight_N[span].unsqueeze(-1))
