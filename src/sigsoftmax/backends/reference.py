"""The readable truth: every operation in plain torch, on any device, with all of autograd.

It holds the N x V logits (N x K x V for a mixture) and whatever autograd keeps of them. The other backends are
tested against it, and it is tested against mathematics.

Shapes: N tokens, K components of a mixture, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.forms import Form
from sigsoftmax.parameters import ParameterKind, kind_of

MASK = float("-inf")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Arithmetic is in float32, in float64 for float64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def counted(value: Tensor, scale: Tensor) -> Tensor:
    """What a scale multiplies: the derivative of :func:`scaled` by it.

    Where the scale is 0 it is a finite number, the largest one in place of an infinite one and 0 in place of NaN.
    """
    return torch.where(scale == 0, torch.nan_to_num(value), value)


def scaled(value: Tensor, scale: Tensor) -> Tensor:
    """Their product, and 0 where the scale is 0: an ignored row may have a value that is NaN."""
    return scale * counted(value, scale)


def z_losses(log_normalizer_NK: Tensor, prior_NK: Tensor, z_loss: float) -> Tensor:
    """z_loss times the prior's mean of n^2, (N,); multiplied so that a square overflows only if the product does."""
    return ((z_loss * prior_NK) * log_normalizer_NK * log_normalizer_NK).sum(-1)


def finite(values: Tensor) -> Tensor:
    """The largest float in place of what overflowed."""
    largest = torch.finfo(values.dtype).max
    return values.clamp(-largest, largest)


class Rows(NamedTuple):
    """log g of every class, each row relative to an offset: log g = relative + offset."""

    relative: Tensor
    """(..., V), -inf where a class is masked"""
    offset: Tensor
    """(..., 1)"""
    normalizer: Tensor
    """(..., 1): log sum g - offset"""
    anchor: Tensor
    """(..., 1): the logit that the offset belongs to"""
    scaled: Tensor
    """(..., V): relative / unit, finite for every finite logit"""
    unit: Tensor | float

    @property
    def log_probs(self) -> Tensor:
        return self.relative - self.normalizer

    @property
    def finite_log_normalizer(self) -> Tensor:
        """As :attr:`log_normalizer`, at most the largest float: for z-loss, whose slope would be inf times 0."""
        return (self.normalizer + finite(self.offset)).squeeze(-1)

    def weighted(self, weights: Tensor) -> Tensor:
        """sum_j weights_j relative_j, (...): also where a relative value overflows that has a small weight."""
        return (self.unit * (weights * self.scaled).sum(-1, keepdim=True)).squeeze(-1)

    @property
    def log_normalizer(self) -> Tensor:
        """The absolute log sum g, (..., )."""
        return (self.normalizer + self.offset).squeeze(-1)


STEEP = 2.0**14
"""Gradients of logits may be so many times a token's weight before float16 ends, with room for a factor of 4."""


def constant(argument: Tensor) -> float | None:
    """The value of a scalar argument that is known without waiting for a device."""
    is_scalar = kind_of(argument) is ParameterKind.SCALAR
    return float(argument.detach()) if is_scalar and argument.device.type == "cpu" else None


def gradient_dtype(form: Form, arguments: Sequence[Tensor], product_dtype: torch.dtype) -> torch.dtype:
    """Of the gradient of logits that are products of this dtype, from which other gradients are made.

    Those may be numbers that float16 holds where the gradient of the logits is none: relu has slopes of 1e8.
    """
    if product_dtype != torch.float16:
        return product_dtype
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        values: list[float | None] = [None for _ in arguments]
    else:
        values = [constant(a) for a in arguments]
    return torch.float32 if form.properties(values).steepest > STEEP else product_dtype


def arguments_like(z: Tensor, form: Form, arguments: Sequence[Tensor]) -> list[Tensor]:
    """The arguments in the dtype and on the device of ``z``.

    A fixed scalar stays on the CPU: torch passes its value to kernels, while a copy to a GPU would have to be waited
    for. What a user's form makes of its arguments is not known, so it gets them all on one device.
    """

    def stays(argument: Tensor) -> bool:
        is_fixed_scalar = kind_of(argument) is ParameterKind.SCALAR and not argument.requires_grad
        return form.is_builtin and is_fixed_scalar

    return [a.to(z.dtype) if stays(a) else a.to(z.device, z.dtype) for a in arguments]


class Anchored(NamedTuple):
    """Rows of logits as forms take them."""

    z: Tensor
    """(..., V), the row's highest logit in place of a mask"""
    masked: Tensor
    anchor: Tensor
    """(..., 1): the logit at which phi is largest, as the form says; 0 where all classes are masked"""


def anchored(z: Tensor, form: Form, arguments: Sequence[Tensor], *, is_increasing: bool = False) -> Anchored:
    """``is_increasing`` is what the form says of the arguments' values, where they are known: it saves a pass."""
    masked = z == MASK
    highest = z.detach().amax(-1, keepdim=True)
    highest = torch.where(highest == MASK, torch.zeros_like(highest), highest)
    kept = torch.where(masked, highest, z)
    if is_increasing or form.leading is None:
        return Anchored(kept, masked, highest)
    lowest = kept.detach().amin(-1, keepdim=True)
    return Anchored(kept, masked, form.leading(lowest, highest, *(a.detach() for a in arguments)))


def rows(logits: Tensor, form: Form, arguments: Sequence[Tensor], *, is_increasing: bool = False) -> Rows:
    """Transform and normalise the last dimension of ``logits``.

    A logit of -inf masks its class whatever the form makes of -inf; its slope is 1, so that a masked target has the
    gradient that it has under torch's softmax.
    """
    wide = logits.to(compute_dtype(logits.dtype))
    like_z = arguments_like(wide, form, arguments)
    z, masked, anchor = anchored(wide, form, like_z, is_increasing=is_increasing)
    value, unit, offset = form.scaled(z, anchor, *like_z)
    relative = torch.where(masked, wide, unit * value)
    normalizer = torch.logsumexp(relative, -1, keepdim=True)
    return Rows(relative, offset, normalizer, anchor, torch.where(masked, wide / unit, value), unit)


def log_probs(logits: Tensor, form: Form, arguments: Sequence[Tensor]) -> Tensor:
    """log f over the last dimension, in the arithmetic's dtype."""
    return rows(logits, form, arguments).log_probs


def mixture_log_probs(
    logits_NKV: Tensor, log_prior_NK: Tensor, form: Form, arguments: Sequence[Tensor], floor: float = 0.0
) -> Tensor:
    """log sum_k pi_k f_k, (N, V); with a floor, log(floor + sum_k pi_k f_k), which is not normalised."""
    joint = log_prior_NK.unsqueeze(-1) + log_probs(logits_NKV, form, arguments)
    return floored(_logsumexp_of_masks(joint), floor)


def _logsumexp_of_masks(joint_NKV: Tensor) -> Tensor:
    """logsumexp over components whose gradient is 0, not NaN, where all of them are -inf."""
    all_masked = (joint_NKV == MASK).all(1, keepdim=True)
    total = torch.logsumexp(torch.where(all_masked, torch.zeros_like(joint_NKV), joint_NKV), 1)
    return torch.where(all_masked.squeeze(1), torch.full_like(total, MASK), total)


def floored(log_p: Tensor, floor: float) -> Tensor:
    if not floor:
        return log_p
    return torch.logaddexp(log_p, torch.full_like(log_p, floor).log())


def entropy(log_probs: Tensor) -> Tensor:
    """-sum p log p over the last dimension; a class of probability 0 adds nothing."""
    probs = log_probs.exp()
    return -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(-1)


class TokenResults(NamedTuple):
    """What the losses need of each token."""

    losses_N: Tensor
    log_normalizer_NK: Tensor
    log_probs_NV: Tensor


def token_losses(
    logits_NKV: Tensor,
    log_prior_NK: Tensor | None,
    form: Form,
    arguments: Sequence[Tensor],
    target: Tensor,
    *,
    class_weight_V: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    floor: float = 0.0,
    ignore_index: int = -100,
) -> TokenResults:
    """The loss of each token, before token weights and reduction; 0 for an ignored one.

    ``target`` is (N,) of class indices or (N, V) of probabilities. A plain output layer is a mixture of one:
    K = 1 and no prior. The meaning of every option is torch's; ``z_loss`` adds ``z_loss * n^2`` with n the log
    normaliser (for a mixture the prior's mean of n^2, the prior held constant).
    """
    if not target.is_floating_point():
        # Autograd would pass 0 * NaN on from an ignored row that has no distribution.
        broken = ~logits_NKV.detach().amax(-1, keepdim=True).isfinite() & (target == ignore_index)[:, None, None]
        logits_NKV = torch.where(broken, torch.zeros_like(logits_NKV), logits_NKV)
    parts = rows(logits_NKV, form, arguments)
    if log_prior_NK is None:
        log_p = parts.log_probs.squeeze(1)
    else:
        joint = log_prior_NK.unsqueeze(-1) + parts.log_probs
        log_p = floored(_logsumexp_of_masks(joint), floor)
    num_classes = log_p.shape[-1]
    weight = torch.ones_like(log_p[:0].sum(0)) if class_weight_V is None else class_weight_V.to(log_p)

    def weighted(weights: Tensor) -> Tensor:
        """Minus the sum of weighted log-probabilities."""
        if log_prior_NK is None:
            return (weights.sum(-1, keepdim=True) * parts.normalizer.squeeze(1)).squeeze(-1) - parts.weighted(
                weights.unsqueeze(-2)
            ).squeeze(1)
        return -scaled(log_p, weights).sum(-1)

    if target.is_floating_point():
        smooth = target.to(log_p) * (1.0 - label_smoothing) + label_smoothing / num_classes
        losses = weighted(smooth * weight)
        kept = torch.ones_like(losses, dtype=torch.bool)
    else:
        kept = target != ignore_index
        index = torch.where(kept, target, torch.zeros_like(target))
        losses = -scaled(log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1), (1.0 - label_smoothing) * weight[index])
        if label_smoothing:
            losses = losses + weighted((label_smoothing / num_classes) * weight)

    if z_loss:
        n_NK = parts.finite_log_normalizer
        prior = torch.ones_like(n_NK) if log_prior_NK is None else log_prior_NK.detach().exp()
        losses = losses + z_losses(n_NK, prior, z_loss)
    losses = torch.where(kept, losses, torch.zeros_like(losses))
    return TokenResults(losses, parts.log_normalizer.detach(), log_p.detach())
