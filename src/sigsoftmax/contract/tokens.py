"""The arithmetic of a token, in torch: which tokens count and how much, the loss of each, and its derivatives.

Everything here is formulas on a few numbers per token or row. Kernels that finish a loss by themselves call the same
formulas, transcribed in ``backends.triton.kernels.tokens``.

The logarithms of an extreme row may overflow where a loss that weights them, by a class, a token or a share of label
smoothing, does not. So losses are computed in units, powers of two, and multiplied out as the last step.

Shapes: N tokens, K components, V classes; n tokens of a block, R = n K rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sigsoftmax.contract.rows import MASK, Logarithms, RowCoefficients, RowStats
from sigsoftmax.contract.spec import LossSpec


def counted(value: Tensor, scale: Tensor, unit: Tensor | float | None = None) -> Tensor:
    """The value that a scale multiplies: the derivative of :func:`scaled` by it.

    Where the scale is 0 it is a finite number, the largest one in place of an infinite one and 0 in place of NaN; the
    largest whose product with the unit is finite, if it is in units.
    """
    number = torch.nan_to_num(value)
    return torch.where(scale == 0, number if unit is None else finite_times(number, unit), value)


def scaled(value: Tensor, scale: Tensor, unit: Tensor | float | None = None) -> Tensor:
    """Their product, and 0 where the scale is 0: an ignored row may have a value that is NaN."""
    return scale * counted(value, scale, unit)


def finite(values: Tensor) -> Tensor:
    """The largest float in place of what overflowed."""
    largest = torch.finfo(values.dtype).max
    return values.clamp(-largest, largest)


def finite_times(values: Tensor, factor: Tensor | float) -> Tensor:
    """The largest number whose product with a factor is finite, in place of those that are larger."""
    return finite(values * factor) / factor


def common_unit(unit: Tensor | float, other: Tensor | float) -> Tensor | float:
    """A unit for sums of multiples of two others, in which no sum overflows."""
    if not isinstance(unit, Tensor):
        unit, other = other, unit
    if not isinstance(unit, Tensor):
        return 2.0 * max(unit, other)
    return 2.0 * (torch.maximum(unit, other) if isinstance(other, Tensor) else unit.clamp(min=other))


def log_sum(multiples: Tensor, unit: Tensor | float, dim: int) -> Tensor:
    """The log-sum-exp of multiples of a unit as one of them; the dimension is kept."""
    top = multiples.detach().amax(dim, keepdim=True)
    top = torch.where(top == MASK, torch.zeros_like(top), top)
    return top + ((multiples - top) * unit).exp().sum(dim, keepdim=True).log() / unit


def floored(log_p: Tensor, floor: float, unit: Tensor | float) -> Tensor:
    """log(p + floor), both in units."""
    if not floor:
        return log_p
    log_p = log_p * unit
    return torch.logaddexp(log_p, torch.full_like(log_p, floor).log()) / unit


def entropy(log_probs: Tensor) -> Tensor:
    """-sum p log p over the last dimension; a class of probability 0 adds nothing."""
    probs = log_probs.exp()
    return -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(-1)


def z_losses(log_normalizer_NK: Tensor, prior_NK: Tensor, z_loss: float) -> Tensor:
    """z_loss times the prior's mean of n^2, (N,); multiplied so that a square overflows only if the product does."""
    return ((z_loss * prior_NK) * log_normalizer_NK * log_normalizer_NK).sum(-1)


def with_z_slopes(by_normalizer_R: Tensor, stats: RowStats, z_slope_R: Tensor | None, unit: Tensor | float) -> Tensor:
    """The coefficients of normalisers with what the z-loss adds, whose slope multiplies the log normaliser."""
    if z_slope_R is None:
        return by_normalizer_R
    return by_normalizer_R + z_slopes(finite(stats.offset) + stats.normalizer, z_slope_R, unit)


def z_slopes(log_normalizer: Tensor, z_slope: Tensor, unit: Tensor | float) -> Tensor:
    """The derivative of the z-loss by log normalisers; such that its product with a slope of phi does not overflow."""
    return finite_times(scaled(finite(log_normalizer), z_slope), unit)


def token_scales(
    spec: LossSpec,
    target: Tensor,
    token_weights_N: Tensor | None,
    class_weight_V: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """The weight of each token's loss in the result, 0 if ignored; and for a mean, whether no token counts."""
    kept, weights = _kept_weights(spec, target, token_weights_N, dtype)
    if spec.reduction != "mean":
        return weights, None
    mass = (weights * class_weights_of(spec, target, class_weight_V, dtype)).sum()
    return torch.where(kept, weights / mass, torch.zeros_like(weights)), ~kept.any()


def token_weight_gradient(
    spec: LossSpec,
    target: Tensor,
    token_weights_N: Tensor,
    class_weight_V: Tensor | None,
    losses_N: Tensor,
    total: Tensor,
    unit: Tensor | float,
) -> Tensor:
    """The derivative of the total by the weight of each token, of which a mean has one in its denominator too.

    All in units.
    """
    dtype = losses_N.dtype
    kept, weights = _kept_weights(spec, target, token_weights_N, dtype)
    by_weight = counted(losses_N, weights, unit)
    if spec.reduction == "mean":
        of_class = class_weights_of(spec, target, class_weight_V, dtype)
        # Two that overflowed have no difference.
        by_weight = (finite(by_weight) - of_class * finite(total)) / (weights * of_class).sum()
    return torch.where(kept, by_weight, torch.zeros_like(by_weight))


def _kept_weights(
    spec: LossSpec, target: Tensor, token_weights_N: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    kept = _kept(spec, target)
    weights = torch.ones_like(kept, dtype=dtype) if token_weights_N is None else token_weights_N.to(dtype)
    return kept, torch.where(kept, weights, torch.zeros_like(weights))


def _kept(spec: LossSpec, target: Tensor) -> Tensor:
    """The tokens that are not ignored."""
    if target.is_floating_point():
        return torch.ones_like(target[..., 0], dtype=torch.bool)
    return target != spec.ignore_index


def class_weights_of(spec: LossSpec, target: Tensor, class_weight_V: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight of each token's class in the denominator of a mean; 1 for probability targets."""
    if class_weight_V is None or target.is_floating_point():
        return torch.ones((), dtype=dtype, device=target.device)
    # An index out of range is reported elsewhere; here it must only not break the look-up.
    index = torch.where(target == spec.ignore_index, torch.zeros_like(target), target)
    return class_weight_V.to(dtype)[index.clamp(0, class_weight_V.shape[0] - 1)]


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The tensors of a loss that have a number per token or per class, flat."""

    target: Tensor
    """(N,) of class indices, or (N, V) of probabilities"""
    log_prior: Logarithms | None = None
    """(N, K)"""
    class_weight_V: Tensor | None = None
    scale_N: Tensor | None = None
    """the weight of each token in the total; None: every token that is not ignored counts alike"""


def mixes_every_class(spec: LossSpec, batch: TokenBatch) -> bool:
    """True if a loss or an extra needs the mixed probability of every class."""
    extras = spec.extras or ()
    is_dense = batch.target.is_floating_point() or spec.label_smoothing > 0
    return batch.log_prior is not None and (is_dense or "argmax" in extras or "entropy" in extras)


class TokenArithmetic:
    """The formulas of one loss, for all its tokens.

    Rows are measured elsewhere (:class:`RowStats`); this makes of them losses, and the derivatives of the total by what
    was measured (:class:`RowCoefficients`). ``scale_N`` is the weight of each token in the total whose derivatives are
    wanted; without it there are none. ``num_classes`` is that of the whole loss, also where this process has a part.
    ``row_unit`` is the unit of the row statistics; losses are in :attr:`unit`.
    """

    def __init__(
        self,
        spec: LossSpec,
        batch: TokenBatch,
        scale_N: Tensor | None,
        num_classes: int,
        like: Tensor,
        row_unit: Tensor | float,
    ) -> None:
        self.spec, self.row_unit = spec, row_unit
        self.mixes_every_class = mixes_every_class(spec, batch)
        self.numbers = like
        dtype, target, class_weight_V = like.dtype, batch.target, batch.class_weight_V
        self.unit = row_unit
        self.log_prior_NK: Tensor | None = None
        """in units"""
        if batch.log_prior is not None:
            self.unit = common_unit(batch.log_prior.unit, row_unit)
            self.log_prior_NK = batch.log_prior.over(self.unit).to(dtype)
        self.class_weight_V = None if class_weight_V is None else class_weight_V.to(dtype)
        self.probabilities_NV = target if target.is_floating_point() else None
        self.share = spec.label_smoothing / num_classes
        self.index_N: Tensor | None = None
        self.target_weight_N: Tensor | None = None
        """the weight of its target's log-probability in a token's loss"""
        self.kept_N = _kept(spec, target)
        if self.probabilities_NV is None:
            self.index_N = torch.where(self.kept_N, target, torch.zeros_like(target))
            self.target_weight_N = like.new_full(target.shape, 1.0 - spec.label_smoothing)
            if self.class_weight_V is not None:
                self.target_weight_N = self.target_weight_N * self.class_weight_V[self.index_N]
        self.scale_N = self.unused_N = None
        if scale_N is not None:
            self.scale_N = torch.where(self.kept_N, scale_N, torch.zeros_like(scale_N))
            self.unused_N = self.scale_N == 0
        self.smoothing_V: Tensor | None = None
        """weights over all classes that every token of a loss without a prior has alike"""
        if spec.label_smoothing and not self.mixes_every_class and self.probabilities_NV is None:
            ones_V = like.new_ones(num_classes)
            # With its share: a sum over classes of what is smoothed may overflow, and not its share.
            self.smoothing_V = self.share * (ones_V if self.class_weight_V is None else self.class_weight_V)
            self.smoothing_mass = self.smoothing_V.sum()

    @property
    def wants(self) -> tuple[str, ...]:
        """The names of the extras that are wanted."""
        return self.spec.extras or ()

    @property
    def waits_for_rows(self) -> bool:
        """True if coefficients depend on the statistics of a row, beyond the slope of the z-loss."""
        return self.log_prior_NK is not None

    # Losses

    def plain_losses(
        self, normalizer_N: Tensor, at_target_N: Tensor | None, at_dense_N: Tensor | None, mass_N: Tensor | None
    ) -> Tensor:
        """Losses without a prior, from what was measured of each row relative to its offset."""
        normalizer_N = normalizer_N / self.unit
        if self.target_weight_N is None or at_target_N is None:
            assert mass_N is not None and at_dense_N is not None
            return normalizer_N * mass_N - at_dense_N
        losses = scaled(normalizer_N - at_target_N, self.target_weight_N)
        if self.smoothing_V is not None and at_dense_N is not None:
            losses = losses + (self.smoothing_mass * normalizer_N - at_dense_N)
        return losses

    def mixture_losses(self, span: slice, stats: RowStats) -> tuple[Tensor, Tensor]:
        """Losses, and the negative of their derivative by log f of the target.

        The share of component k in the probability of the target, its responsibility, is all that is needed.
        """
        assert self.log_prior_NK is not None and self.target_weight_N is not None and stats.target is not None
        log_prior_nK = self.log_prior_NK[span]
        log_f_R = (stats.target - stats.normalizer / self.row_unit) * (self.row_unit / self.unit)
        joint_nK = log_prior_nK + log_f_R.view_as(log_prior_nK)
        log_p_n1 = log_sum(joint_nK, self.unit, -1)
        responsibility_nK = torch.exp((joint_nK - log_p_n1) * self.unit).masked_fill_(log_p_n1 == MASK, 0.0)
        floored_n1 = floored(log_p_n1, self.spec.floor, self.unit)
        weight_n1 = self.target_weight_N[span].unsqueeze(-1)
        by_log_f_nK = responsibility_nK.mul_(weight_n1)
        if self.spec.floor:
            by_log_f_nK.mul_(torch.exp((log_p_n1 - floored_n1) * self.unit))
        return -scaled(floored_n1, weight_n1).squeeze(-1), by_log_f_nK

    def losses_of_every_class(self, span: slice, log_p_nV: Tensor, owned_N: Tensor | None = None) -> Tensor:
        """Losses of a mixture from the mixed log-probability of every class in units.

        Where this process has a part of the classes, ``owned_N`` says whether it has the target.
        """
        if self.index_N is None or self.target_weight_N is None:
            return -scaled(log_p_nV, self.smoothed_probabilities(span)).sum(-1)
        at_target_n = log_p_nV.gather(-1, self.index_N[span].unsqueeze(-1)).squeeze(-1)
        losses = -scaled(at_target_n, self.target_weight_N[span])
        if owned_N is not None:
            losses = torch.where(owned_N[span], losses, torch.zeros_like(losses))
        if self.share:
            ones_V = self.numbers.new_ones(1) if self.class_weight_V is None else self.class_weight_V
            losses = losses - scaled(log_p_nV, self.share * ones_V).sum(-1)
        return losses

    def finished(self, losses_N: Tensor, log_normalizer_NK: Tensor) -> Tensor:
        """Losses with what does not depend on the target; 0 for ignored tokens."""
        if self.spec.z_loss:
            of_normalizers = z_losses(finite(log_normalizer_NK), self._prior_like(log_normalizer_NK), self.spec.z_loss)
            losses_N = losses_N + of_normalizers / self.unit
        return torch.where(self.kept_N, losses_N, torch.zeros_like(losses_N))

    def _prior_like(self, log_normalizer_nK: Tensor, span: slice = slice(None)) -> Tensor:
        """The probabilities of components, 1 without a prior."""
        if self.log_prior_NK is None:
            return torch.ones_like(log_normalizer_nK)
        return (self.log_prior_NK[span] * self.unit).exp()

    # Weights over classes

    def smoothed_probabilities(self, span: slice) -> Tensor:
        """Weights of each class in the loss of tokens with probability targets, (n, V)."""
        assert self.probabilities_NV is not None
        weights = self.probabilities_NV[span].to(self.numbers.dtype)
        if self.spec.label_smoothing:
            weights = weights * (1.0 - self.spec.label_smoothing) + self.share
        return weights if self.class_weight_V is None else weights * self.class_weight_V

    def dense_weights(self, span: slice) -> Tensor | None:
        """Weights over all classes, (V,) or (n, V), of which rows measure the weighted sum; None without any."""
        return self.smoothing_V if self.probabilities_NV is None else self.smoothed_probabilities(span)

    def by_log_p(self, span: slice, classes: int, target_weight_N: Tensor | None) -> Tensor:
        """The derivative of the total by the mixed log-probability of every class, (n, V)."""
        assert self.scale_N is not None
        if self.index_N is None or target_weight_N is None:
            weights = self.smoothed_probabilities(span).clone()
        else:
            index_n1 = self.index_N[span].unsqueeze(-1)
            weights = self.numbers.new_full((index_n1.shape[0], classes), self.share)
            if self.class_weight_V is not None:
                weights *= self.class_weight_V
            weights.scatter_add_(-1, index_n1, target_weight_N[span].unsqueeze(-1))
        return weights.mul_(-self.scale_N[span].unsqueeze(-1))

    # Derivatives of the total

    def z_slopes(self, span: slice) -> Tensor | None:
        """The factor of a row's log normaliser in its coefficient, (n,); None without a z-loss."""
        if not self.spec.z_loss:
            return None
        assert self.scale_N is not None
        return 2.0 * self.spec.z_loss * self.scale_N[span]

    def by_log_normalizer(self, span: slice, log_normalizer_nK: Tensor) -> Tensor | None:
        """The derivative of the z-loss by the log normaliser of every row, (n, K); None without a z-loss."""
        slope_n = self.z_slopes(span)
        if slope_n is None:
            return None
        slope_nK = slope_n.unsqueeze(-1) * self._prior_like(log_normalizer_nK, span)
        return z_slopes(log_normalizer_nK, slope_nK, self.row_unit)

    def coefficients(
        self, span: slice, stats: RowStats | None, mass: Tensor | None, by_log_f_nK: Tensor | None
    ) -> RowCoefficients:
        """The derivatives of the total; without stats, those that do not wait for them (z-loss does)."""
        assert self.scale_N is not None and self.unused_N is not None
        scale_n, unused_n = self.scale_N[span], self.unused_N[span]
        components = 1 if by_log_f_nK is None else by_log_f_nK.shape[1]
        by_target = by_dense = None
        if by_log_f_nK is not None:
            by_normalizer = scaled(by_log_f_nK, scale_n.unsqueeze(-1)).flatten()
            by_target = -by_normalizer
            unused_n = unused_n.repeat_interleave(components)
        elif self.target_weight_N is not None:
            by_normalizer = self.target_weight_N[span] * scale_n
            by_target = -by_normalizer
            if self.smoothing_V is not None:
                by_dense = -scale_n
                by_normalizer = by_normalizer - by_dense * self.smoothing_mass
        else:
            assert mass is not None
            by_normalizer, by_dense = mass * scale_n, -scale_n
        if stats is not None:
            log_normalizer_nK = (stats.normalizer + finite(stats.offset)).view(-1, components)
            by_z_loss = self.by_log_normalizer(span, log_normalizer_nK)
            if by_z_loss is not None:
                by_normalizer = by_normalizer + by_z_loss.flatten()
        is_cpu = unused_n.device.type == "cpu"
        return RowCoefficients(by_normalizer, by_target, by_dense, None if is_cpu and not unused_n.any() else unused_n)
