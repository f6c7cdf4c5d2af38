"""The chunk loop above the backends: losses and their gradients without an N x V tensor.

Logits come from a source, either rows that the caller holds or the product of hidden vectors and an output matrix,
made a slab at a time. Each block of rows is measured, the coefficients of the loss follow from a few numbers a row,
and the gradient overwrites the block. A plain output layer is a mixture of one component: K = 1 and no prior.

Shapes: N tokens, K components, V classes, d features; R = n K rows of the n tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.backends import reference
from sigsoftmax.backends.blocked import FormRows
from sigsoftmax.backends.interface import RowCoefficients, RowRoutines
from sigsoftmax.backends.reference import MASK
from sigsoftmax.family import Form


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
    """Per token: its loss before token weights, and the extras (empty where not asked for)."""

    losses_N: Tensor
    log_normalizer_NK: Tensor
    argmax_N: Tensor
    entropy_N: Tensor


class Source:
    """Where rows of logits come from and where their gradient goes. ``num_tokens`` times ``components`` rows."""

    num_tokens: int
    components: int
    num_classes: int
    logits_like: Tensor

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        """The first token of each chunk, and its logits (R, V), which may be overwritten by their gradient."""
        raise NotImplementedError

    def gradient_rows(self, first_row: int, logits_RV: Tensor) -> Tensor:
        """The memory for the gradient of these rows of the current chunk."""
        raise NotImplementedError

    def backpropagate(self) -> None:
        """Called when the gradient of the current chunk is complete."""

    def blocks(self, max_rows: int | None, *, backpropagate: bool) -> Iterator[tuple[slice, int, Tensor]]:
        """(tokens, first row within the chunk, logits) of blocks that keep all rows of a token together."""
        for first_token, chunk_RV in self.chunks():
            tokens = chunk_RV.shape[0] // self.components
            step = max(1, tokens if max_rows is None else max_rows // self.components)
            for begin in range(0, tokens, step):
                end = min(begin + step, tokens)
                span = slice(first_token + begin, first_token + end)
                yield span, begin * self.components, chunk_RV[begin * self.components : end * self.components]
            if backpropagate:
                self.backpropagate()


class GivenLogits(Source):
    """Logits that the caller holds; they are read, never overwritten."""

    def __init__(self, logits_NV: Tensor, gradient_NV: Tensor | None) -> None:
        self.logits_like = logits_NV
        self.gradient_NV = gradient_NV
        self.num_tokens, self.num_classes = logits_NV.shape
        self.components = 1

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self.logits_like

    def gradient_rows(self, first_row: int, logits_RV: Tensor) -> Tensor:
        assert self.gradient_NV is not None
        return self.gradient_NV[first_row : first_row + logits_RV.shape[0]]


class LinearLogits(Source):
    """Logits = hidden W^T + bias, a slab of tokens at a time; gradients are summed over slabs.

    The products run in ``product_dtype``. The gradients of weight and bias are summed in float32 (float64): in place
    where the parameter has that dtype, in a buffer of that size otherwise.
    """

    def __init__(
        self,
        hidden_NKd: Tensor,
        weight_Vd: Tensor,
        bias_V: Tensor | None,
        product_dtype: torch.dtype,
        chunk_bytes: int,
        *,
        needs_hidden: bool,
        needs_weight: bool,
        needs_bias: bool,
    ) -> None:
        self.num_tokens, self.components, _ = hidden_NKd.shape
        self.num_classes = weight_Vd.shape[0]
        self.hidden_NKd = hidden_NKd
        self.weight_Vd = weight_Vd.to(product_dtype)
        self.bias_V = None if bias_V is None else bias_V.to(product_dtype)
        row_bytes = self.num_classes * self.weight_Vd.element_size()
        tokens_in_budget = max(1, chunk_bytes // (row_bytes * self.components))
        # Chunks of equal size: a last one of a few rows would be a slow product.
        num_chunks = max(1, -(-self.num_tokens // tokens_in_budget))
        self.chunk_tokens = max(1, -(-self.num_tokens // num_chunks))
        rows = min(self.chunk_tokens, self.num_tokens) * self.components
        self.logits_like = self.slab_RV = self.weight_Vd.new_empty(rows, self.num_classes)
        sum_dtype = reference.compute_dtype(product_dtype)
        self.hidden_gradient = torch.empty_like(hidden_NKd) if needs_hidden else None
        self.weight_gradient = _zeros(weight_Vd, sum_dtype) if needs_weight else None
        self.bias_gradient = _zeros(bias_V, sum_dtype) if needs_bias and bias_V is not None else None

    def chunks(self) -> Iterator[tuple[int, Tensor]]:
        for first in range(0, self.num_tokens, self.chunk_tokens):
            self.first, self.last = first, min(first + self.chunk_tokens, self.num_tokens)
            self.chunk_Rd = self.hidden_NKd[first : self.last].flatten(0, 1).to(self.weight_Vd.dtype)
            slab_RV = self.slab_RV[: self.chunk_Rd.shape[0]]
            if self.bias_V is None:
                torch.mm(self.chunk_Rd, self.weight_Vd.t(), out=slab_RV)
            else:
                torch.addmm(self.bias_V, self.chunk_Rd, self.weight_Vd.t(), out=slab_RV)
            self.chunk_RV = slab_RV
            yield first, slab_RV

    def gradient_rows(self, first_row: int, logits_RV: Tensor) -> Tensor:
        return logits_RV

    def backpropagate(self) -> None:
        if self.hidden_gradient is not None:
            rows = self.hidden_gradient[self.first : self.last].view(-1, self.hidden_NKd.shape[-1])
            if rows.dtype == self.chunk_RV.dtype:
                torch.mm(self.chunk_RV, self.weight_Vd, out=rows)
            else:
                rows.copy_(self.chunk_RV @ self.weight_Vd)
        if self.weight_gradient is not None:
            if self.weight_gradient.dtype == self.chunk_RV.dtype:
                self.weight_gradient.addmm_(self.chunk_RV.t(), self.chunk_Rd)
            else:
                self.weight_gradient.add_(self.chunk_RV.t() @ self.chunk_Rd)
        if self.bias_gradient is not None:
            self.bias_gradient.add_(self.chunk_RV.sum(0, dtype=self.bias_gradient.dtype))


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, dtype), device=like.device)


def scaled(coefficient_R: Tensor, scale_R: Tensor) -> Tensor:
    """Their product, and 0 where the scale is 0: an ignored row may have a coefficient that is NaN."""
    return torch.where(scale_R == 0, torch.zeros_like(scale_R), coefficient_R * scale_R)


MakeRoutines = Callable[[Form, Sequence[Tensor], Tensor, bool], RowRoutines]


class LossLoop:
    """One loss over all rows of a source, with gradients if asked for; ``run`` does the work.

    ``scale_N`` is the weight of each token in the total whose gradient is wanted; it is 0 for ignored tokens.
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
    ) -> None:
        self.source = source
        self.options = options
        self.scale_N = scale_N
        like = source.logits_like
        self.dtype = reference.compute_dtype(like.dtype)
        self.log_prior_NK = None if log_prior_NK is None else log_prior_NK.to(self.dtype)
        self.class_weight_V = None if class_weight_V is None else class_weight_V.to(self.dtype)
        self.probabilities_NV = target if target.is_floating_point() else None
        self.index_N: Tensor | None = None
        if self.probabilities_NV is None:
            self.kept_N = target != options.ignore_index
            self.index_N = torch.where(self.kept_N, target, torch.zeros_like(target))
        else:
            self.kept_N = torch.ones(source.num_tokens, dtype=torch.bool, device=like.device)
        every_class = self.probabilities_NV is not None or options.label_smoothing > 0
        self.is_dense_mixture = log_prior_NK is not None and (every_class or options.argmax or options.entropy)
        self.needs_dense_weights = every_class and not self.is_dense_mixture
        if self.is_dense_mixture:
            self.dense_routines = FormRows(form, arguments, like, needs_arguments)
            self.routines: RowRoutines = self.dense_routines
        else:
            self.routines = make_routines(form, arguments, like, needs_arguments)
        shape_N, shape_NK = (source.num_tokens,), (source.num_tokens, source.components)
        empty = torch.empty(0, dtype=self.dtype, device=like.device)
        self.losses_N = empty.new_empty(shape_N)
        self.log_normalizer_NK = empty.new_empty(shape_NK)
        self.argmax_N = torch.empty(shape_N if options.argmax else (0,), dtype=torch.int64, device=like.device)
        self.entropy_N = empty.new_empty(shape_N if options.entropy else (0,))
        wants_prior = scale_N is not None and log_prior_NK is not None
        self.prior_gradient_NK = empty.new_empty(shape_NK) if wants_prior else None

    def run(self) -> TokenLosses:
        wants_gradient = self.scale_N is not None
        compute = self._dense_mixture_block if self.is_dense_mixture else self._block
        for span, first_row, logits_RV in self.source.blocks(self.routines.max_rows, backpropagate=wants_gradient):
            out_RV = self.source.gradient_rows(first_row, logits_RV) if wants_gradient else None
            compute(span, logits_RV, out_RV)
        return TokenLosses(self.losses_N, self.log_normalizer_NK, self.argmax_N, self.entropy_N)

    def argument_gradients(self) -> list[Tensor]:
        return self.routines.argument_gradients()

    # A plain row, or a mixture that only needs its rows at the target.

    def _block(self, span: slice, logits_RV: Tensor, out_RV: Tensor | None) -> None:
        components = self.source.components
        index_R = None if self.index_N is None else self.index_N[span]
        if index_R is not None and components > 1:
            index_R = index_R.repeat_interleave(components)
        dense = self._dense_weights(span)
        stats = self.routines.stats(logits_RV, index_R, dense, self.options.argmax, self.options.entropy)
        if stats.argmax is not None:
            self.argmax_N[span] = stats.argmax
        if stats.entropy is not None:
            self.entropy_N[span] = stats.entropy
        log_normalizer_nK = (stats.normalizer + stats.offset).view(-1, components)
        self.log_normalizer_NK[span] = log_normalizer_nK

        if self.log_prior_NK is None:
            losses, by_stats = self._plain_losses(span, stats.normalizer, stats.target, stats.dense, dense)
            prior_nK = None
        else:
            assert stats.target is not None
            log_f_nK = (stats.target - stats.normalizer).view(-1, components)
            losses, by_stats = self._mixture_losses(span, log_f_nK)
            prior_nK = self.log_prior_NK[span].exp()
        by_normalizer, by_target, by_dense = by_stats
        z_losses_n, z_slopes_nK = self._z_loss(log_normalizer_nK, prior_nK)
        if z_losses_n is not None and z_slopes_nK is not None:
            losses = losses + z_losses_n
            by_normalizer = by_normalizer + z_slopes_nK.flatten()
        kept_n = self.kept_N[span]
        self.losses_N[span] = torch.where(kept_n, losses, torch.zeros_like(losses))

        if out_RV is not None and self.scale_N is not None:
            scale_R = torch.where(kept_n, self.scale_N[span], torch.zeros_like(losses))
            if components > 1:
                scale_R = scale_R.repeat_interleave(components)
            coefficients = RowCoefficients(
                scaled(by_normalizer, scale_R),
                None if by_target is None else scaled(by_target, scale_R),
                None if by_dense is None else scaled(by_dense, scale_R),
            )
            if self.prior_gradient_NK is not None and coefficients.target is not None:
                self.prior_gradient_NK[span] = coefficients.target.view(-1, components)
            self.routines.gradient(logits_RV, stats, coefficients, index_R, dense, out_RV)

    def _dense_weights(self, span: slice) -> Tensor | None:
        """Weights over classes: (V,) for smoothing, (n, V) for probability targets."""
        if not self.needs_dense_weights:
            return None
        if self.probabilities_NV is None:
            if self.class_weight_V is not None:
                return self.class_weight_V
            return self.losses_N.new_ones(self.source.num_classes)
        return self._smoothed_probabilities(span)

    def _smoothed_probabilities(self, span: slice) -> Tensor:
        assert self.probabilities_NV is not None
        smoothing = self.options.label_smoothing
        weights = self.probabilities_NV[span].to(self.dtype)
        if smoothing:
            weights = weights * (1.0 - smoothing) + smoothing / self.source.num_classes
        return weights if self.class_weight_V is None else weights * self.class_weight_V

    def _target_weight(self, span: slice) -> Tensor:
        """(1 - smoothing) times the weight of each target's class."""
        assert self.index_N is not None
        hit = 1.0 - self.options.label_smoothing
        if self.class_weight_V is None:
            return torch.full_like(self.losses_N[span], hit)
        return hit * self.class_weight_V[self.index_N[span]]

    def _plain_losses(
        self, span: slice, normalizer: Tensor, target: Tensor | None, dense_sum: Tensor | None, dense: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor | None, Tensor | None]]:
        """Losses, and their derivatives by normaliser, target and dense sum."""
        if target is None:
            assert dense is not None and dense_sum is not None
            mass = dense.sum(-1)
            return normalizer * mass - dense_sum, (mass, None, -torch.ones_like(mass))
        weight = self._target_weight(span)
        losses = weight * (normalizer - target)
        if dense is None or dense_sum is None:
            return losses, (weight, -weight, None)
        share = self.options.label_smoothing / self.source.num_classes
        mass = dense.sum()
        losses = losses + share * (mass * normalizer - dense_sum)
        return losses, (weight + share * mass, -weight, torch.full_like(weight, -share))

    def _mixture_losses(
        self, span: slice, log_f_nK: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor | None, Tensor | None]]:
        """By responsibilities: r_k is the share of component k in the probability of the target."""
        assert self.log_prior_NK is not None
        joint_nK = self.log_prior_NK[span] + log_f_nK
        log_p_n = torch.logsumexp(joint_nK, -1)
        responsibility_nK = torch.exp(joint_nK - log_p_n.unsqueeze(-1))
        responsibility_nK = responsibility_nK.masked_fill(log_p_n.unsqueeze(-1) == MASK, 0.0)
        floored_n = reference.floored(log_p_n, self.options.floor)
        weight_n = self._target_weight(span)
        by_log_f = weight_n.unsqueeze(-1) * responsibility_nK
        if self.options.floor:
            by_log_f = by_log_f * torch.exp(log_p_n - floored_n).unsqueeze(-1)
        by_log_f_R = by_log_f.flatten()
        return -weight_n * floored_n, (by_log_f_R, -by_log_f_R, None)

    def _z_loss(self, log_normalizer_nK: Tensor, prior_nK: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if not self.options.z_loss:
            return None, None
        weighted = self.options.z_loss * log_normalizer_nK
        if prior_nK is not None:
            weighted = weighted * prior_nK
        return (weighted * log_normalizer_nK).sum(-1), 2.0 * weighted

    # A mixture whose loss or extras need the mixed probability of every class.

    def _dense_mixture_block(self, span: slice, logits_RV: Tensor, out_RV: Tensor | None) -> None:
        assert self.log_prior_NK is not None
        block = MixtureBlock(self.dense_routines, logits_RV, self.log_prior_NK[span], self.options.floor)
        log_p_nV = block.log_p_nV
        self.log_normalizer_NK[span] = block.log_normalizer_nK
        if self.options.argmax:
            self.argmax_N[span] = log_p_nV.argmax(-1)
        if self.options.entropy:
            self.entropy_N[span] = reference.entropy(log_p_nV)
        losses = self._losses_of_log_p(span, log_p_nV)
        z_losses_n, z_slopes_nK = self._z_loss(block.log_normalizer_nK, self.log_prior_NK[span].exp())
        if z_losses_n is not None:
            losses = losses + z_losses_n
        kept_n = self.kept_N[span]
        self.losses_N[span] = torch.where(kept_n, losses, torch.zeros_like(losses))
        if out_RV is not None and self.scale_N is not None:
            assert self.prior_gradient_NK is not None
            scale_n1 = torch.where(kept_n, self.scale_N[span], torch.zeros_like(losses)).unsqueeze(-1)
            by_normalizer_nK = None if z_slopes_nK is None else z_slopes_nK * scale_n1
            by_log_p_nV = self._class_weights_of_tokens(span).mul_(-scale_n1)
            self.prior_gradient_NK[span] = block.gradient(by_log_p_nV, by_normalizer_nK, out_RV)
            unused_R1 = (scale_n1 == 0).expand(-1, self.source.components).reshape(-1, 1)
            out_RV.masked_fill_(unused_R1, 0.0)

    def _losses_of_log_p(self, span: slice, log_p_nV: Tensor) -> Tensor:
        if self.index_N is None:
            return -(self._smoothed_probabilities(span) * log_p_nV).sum(-1)
        at_target = log_p_nV.gather(-1, self.index_N[span].unsqueeze(-1)).squeeze(-1)
        losses = -self._target_weight(span) * at_target
        if self.options.label_smoothing:
            weighted = log_p_nV if self.class_weight_V is None else log_p_nV * self.class_weight_V
            losses = losses - (self.options.label_smoothing / self.source.num_classes) * weighted.sum(-1)
        return losses

    def _class_weights_of_tokens(self, span: slice) -> Tensor:
        """q with loss = -sum_j q_j log P_j, (n, V)."""
        if self.index_N is None:
            return self._smoothed_probabilities(span)
        smoothing, index_n = self.options.label_smoothing, self.index_N[span]
        share = smoothing / self.source.num_classes
        weights = self.losses_N.new_full((index_n.shape[0], self.source.num_classes), share)
        if self.class_weight_V is not None:
            weights *= self.class_weight_V
        return weights.scatter_add_(-1, index_n.unsqueeze(-1), self._target_weight(span).unsqueeze(-1))


class MixtureBlock:
    """The mixed log-probability of every class for a block of tokens, and its gradient."""

    def __init__(self, routines: FormRows, logits_RV: Tensor, log_prior_nK: Tensor, floor: float) -> None:
        self.routines = routines
        self.logits_RV = logits_RV
        tokens, components = log_prior_nK.shape
        rows = reference.rows(logits_RV, routines.form, routines.arguments)
        self.log_normalizer_nK = rows.log_normalizer.view(tokens, components)
        self.log_f_nKV = rows.log_probs.view(tokens, components, -1)
        self.joint_nKV = log_prior_nK.unsqueeze(-1) + self.log_f_nKV
        self.exact_log_p_nV = torch.logsumexp(self.joint_nKV, 1)
        self.log_p_nV = reference.floored(self.exact_log_p_nV, floor)
        self.floor = floor

    def gradient(self, by_log_p_nV: Tensor, by_normalizer_nK: Tensor | None, out_RV: Tensor) -> Tensor:
        """From dL/dlog P to dL/dlogits, written to ``out_RV``; returns dL/dlog prior, (n, K)."""
        if self.floor:
            by_log_p_nV = by_log_p_nV * torch.exp(self.exact_log_p_nV - self.log_p_nV)
        responsibility = torch.exp(self.joint_nKV - self.exact_log_p_nV.unsqueeze(1))
        responsibility.masked_fill_((self.exact_log_p_nV == MASK).unsqueeze(1), 0.0)
        by_log_f_nKV = responsibility.mul_(by_log_p_nV.unsqueeze(1))
        by_log_prior_nK = by_log_f_nKV.sum(-1)
        minus_by_normalizer = by_log_prior_nK if by_normalizer_nK is None else by_log_prior_nK - by_normalizer_nK
        by_phi = by_log_f_nKV - self.log_f_nKV.exp() * minus_by_normalizer.unsqueeze(-1)
        self.routines.backpropagate(self.logits_RV, by_phi.view_as(self.logits_RV), out_RV)
        return by_log_prior_nK
