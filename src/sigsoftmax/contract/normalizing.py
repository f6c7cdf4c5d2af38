"""Rows of logits, transformed by phi and normalised, in plain torch: log f = phi - log sum g.

Shapes: N tokens, K components of a mixture, V classes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sigsoftmax.contract.rows import MASK, Logarithms, compute_dtype
from sigsoftmax.contract.signature import is_exporting
from sigsoftmax.contract.spec import CallSpec
from sigsoftmax.contract.tokens import common_unit, finite, floored, log_sum
from sigsoftmax.family.formulas import Form
from sigsoftmax.family.parameters import ParameterKind, kind_of
from sigsoftmax.torch_internals import transforms_active


class Rows(NamedTuple):
    """log g of every class, each row relative to an offset: log g = relative + offset."""

    relative: Tensor
    """(..., V), -inf where a class is masked"""
    offset: Tensor
    """(..., 1)"""
    normalizer: Tensor
    """(..., 1): log sum g - offset"""
    peak: Tensor
    """(..., 1): the logit that the offset belongs to"""
    in_units: Logarithms
    """(..., V): relative"""

    @property
    def log_probs(self) -> Tensor:
        return self.relative - self.normalizer

    @property
    def log_probs_in_units(self) -> Logarithms:
        multiples, unit = self.in_units
        return Logarithms(multiples - self.normalizer / unit, unit)

    @property
    def finite_log_normalizer(self) -> Tensor:
        """The same as :attr:`log_normalizer`, at most the largest float: z-loss would have a slope of inf times 0."""
        return (self.normalizer + finite(self.offset)).squeeze(-1)

    def weighted(self, weights: Tensor) -> Tensor:
        """sum_j weights_j relative_j in units, (...)."""
        return (weights * self.in_units.multiples).sum(-1)

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


@functools.lru_cache(maxsize=1024)
def fixed_unit(form: Form, values: tuple[float, ...], dtype: torch.dtype) -> float:
    """The unit of a form for fixed numbers, which arithmetic in this dtype rounds."""
    return float(form.unit(*torch.tensor(values, dtype=dtype)))


def gradient_dtype(spec: CallSpec, arguments: Sequence[Tensor], product_dtype: torch.dtype) -> torch.dtype:
    """The dtype for the gradient of logits that are products of this dtype, from which other gradients are made.

    Those may be numbers that float16 holds where the gradient of the logits is none: relu has slopes of 1e8, and the
    gradient of a z-loss grows with the normaliser.
    """
    member = spec.member
    if product_dtype != torch.float16:
        return product_dtype
    if torch.compiler.is_compiling() or transforms_active():
        values: list[float | None] = list(member.numbers)
    else:
        values = [constant(a) for a in arguments]
    # The gradient of a z-loss is linear in the logits: a bound for a fourth of the largest one leaves the same room.
    largest = spec.largest_gradient(member.form.properties(values).steepest, STEEP)
    return torch.float32 if largest > STEEP else product_dtype


def arguments_like(z: Tensor, form: Form, arguments: Sequence[Tensor]) -> list[Tensor]:
    """The arguments in the dtype and on the device of ``z``.

    A fixed scalar stays on the CPU: torch passes its value to kernels, while a copy to a GPU would have to be waited
    for. What a user's form makes of its arguments is not known, so it gets them all on one device.

    In an exported graph a scalar has one dimension: the optimiser of onnxscript takes a number within 1e-8 of 0, such
    as the eps of relu, for 0 and drops it, unless it has a dimension.
    """
    if is_exporting():
        return [a.to(z.device, z.dtype).reshape(-1) for a in arguments]

    def stays(argument: Tensor) -> bool:
        is_fixed_scalar = kind_of(argument) is ParameterKind.SCALAR and not argument.requires_grad
        return form.is_builtin and is_fixed_scalar

    return [a.to(z.dtype) if stays(a) else a.to(z.device, z.dtype) for a in arguments]


class PeakedRows(NamedTuple):
    """Rows of logits as forms take them, with their peaks."""

    z: Tensor
    """(..., V), the row maximum in place of a mask"""
    masked: Tensor
    peak: Tensor
    """(..., 1): the logit at which phi is largest, as the form says; 0 where all classes are masked"""


def with_peaks(z: Tensor, form: Form, arguments: Sequence[Tensor], *, is_increasing: bool = False) -> PeakedRows:
    """Find the peaks of rows. ``is_increasing``, where the form is known to be for these arguments, saves a pass."""
    masked = z == MASK
    highest = z.detach().amax(-1, keepdim=True)
    highest = torch.where(highest == MASK, torch.zeros_like(highest), highest)
    kept = torch.where(masked, highest, z)
    if is_increasing or form.peak is None:
        return PeakedRows(kept, masked, highest)
    lowest = kept.detach().amin(-1, keepdim=True)
    return PeakedRows(kept, masked, form.peak(lowest, highest, *(a.detach() for a in arguments)))


def rows(
    logits: Tensor,
    form: Form,
    arguments: Sequence[Tensor],
    *,
    is_increasing: bool = False,
    unit: Tensor | float | None = None,
) -> Rows:
    """Transform and normalise the last dimension of ``logits``. The unit of phi may be known from another call.

    A logit of -inf masks its class whatever the form makes of -inf; its slope is 1, so that a masked target has the
    gradient that it has under torch's softmax.
    """
    wide = logits.to(compute_dtype(logits.dtype))
    like_z = arguments_like(wide, form, arguments)
    z, masked, peak = with_peaks(wide, form, like_z, is_increasing=is_increasing)
    value, offset = form.scaled(z, peak, *like_z)
    if unit is None:
        unit = form.unit(*like_z)
    if isinstance(unit, Tensor):
        # In an exported graph numbers have a dimension (``arguments_like``), which a total must not have.
        unit = unit.reshape(())
    relative = torch.where(masked, wide, unit * value)
    normalizer = torch.logsumexp(relative, -1, keepdim=True)
    return Rows(relative, offset, normalizer, peak, Logarithms(torch.where(masked, wide / unit, value), unit))


def log_probs(logits: Tensor, form: Form, arguments: Sequence[Tensor]) -> Tensor:
    """log f over the last dimension, in the arithmetic's dtype."""
    return rows(logits, form, arguments).log_probs


def mixture_log_probs(
    logits_NKV: Tensor, log_prior: Logarithms, form: Form, arguments: Sequence[Tensor], floor: float = 0.0
) -> Tensor:
    """log sum_k pi_k f_k, (N, V); with a floor, log(floor + sum_k pi_k f_k), which is not normalised."""
    return mixed(rows(logits_NKV, form, arguments), log_prior, floor).values


def mixed(parts: Rows, log_prior: Logarithms | None, floor: float) -> Logarithms:
    """The log-probability of every class, (N, V), of rows (N, K, V); without a prior there is one component."""
    log_f_NKV = parts.log_probs_in_units
    if log_prior is None:
        return log_f_NKV._replace(multiples=log_f_NKV.multiples.squeeze(1))
    unit = common_unit(log_prior.unit, log_f_NKV.unit)
    joint_NKV = log_prior.over(unit).unsqueeze(-1) + log_f_NKV.over(unit)
    return Logarithms(floored(_log_sum_of_masks(joint_NKV, unit), floor, unit), unit)


def _log_sum_of_masks(joint_NKV: Tensor, unit: Tensor | float) -> Tensor:
    """The log of sums over components, whose gradient is 0, not NaN, where all of them are masked."""
    all_masked = (joint_NKV == MASK).all(1, keepdim=True)
    total = log_sum(torch.where(all_masked, torch.zeros_like(joint_NKV), joint_NKV), unit, 1)
    return torch.where(all_masked, torch.full_like(total, MASK), total).squeeze(1)
