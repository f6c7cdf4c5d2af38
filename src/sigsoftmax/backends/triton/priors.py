"""Log-probabilities of short rows, the prior over the components of a mixture: one kernel forward, one backward.

Shapes: N tokens, K components.
"""

from __future__ import annotations

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from sigsoftmax.backends.loss_path import Prior
from sigsoftmax.backends.triton import forms
from sigsoftmax.backends.triton.launches import launch
from sigsoftmax.contract.spec import MemberSpec
from sigsoftmax.forms import Form

MOST_COMPONENTS = 256
TILE = 1024
"""numbers that a program holds"""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _anchored(z, alpha, beta, c, FORM: tl.constexpr, IS_INCREASING: tl.constexpr):
    """(the logit of each row at which phi is largest, z without masks); a mask is -inf."""
    anchor = tl.max(z, 1)[:, None]
    anchor = tl.where(anchor == -float("inf"), 0.0, anchor)
    safe_z = tl.where(z != -float("inf"), z, anchor)
    if not IS_INCREASING:
        anchor = forms.leading(tl.min(safe_z, 1)[:, None], anchor, alpha, beta, c, FORM)
    return anchor, safe_z


@triton.jit
def log_prior_of(z, alpha, beta, c, FORM: tl.constexpr, IS_INCREASING: tl.constexpr):
    """log f of rows of logits."""
    anchor, safe_z = _anchored(z, alpha, beta, c, FORM, IS_INCREASING)
    value = tl.where(z != -float("inf"), forms.relative(safe_z, anchor, alpha, beta, c, c, FORM), z)
    # The anchor's value is its tail, and not 0.
    top = tl.max(value, 1)[:, None]
    top = tl.where(top == -float("inf"), 0.0, top)
    return value - (top + tl.log(tl.sum(tl.exp(value - top), 1)[:, None]))


@triton.jit
def by_prior_logits(z, log_f, by_log_f, alpha, beta, c, FORM: tl.constexpr):
    """The gradient of the logits, given that of log f; outside the row both are masked."""
    safe_z = tl.where(z != -float("inf"), z, 0.0)
    by_phi = by_log_f - tl.exp(log_f) * tl.sum(by_log_f, 1)[:, None]
    return by_phi * tl.where(z != -float("inf"), forms.slope(safe_z, alpha, beta, c, FORM), 1.0)


@triton.jit
def log_prior_kernel(
    logits,
    log_prior,
    by_log_prior,
    out,
    N,
    K,
    alpha,
    beta,
    c,
    FORM: tl.constexpr,
    IS_INCREASING: tl.constexpr,
    BACKWARD: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):
    """``out`` is log f of each row; backward, given that, the gradient of the logits."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    component = tl.arange(0, LANES)[None, :]
    inside = (token < N) & (component < K)
    position = token * K + component
    z = tl.load(logits + position, mask=inside, other=-float("inf")).to(tl.float32)
    if BACKWARD:
        log_f = tl.load(log_prior + position, mask=inside, other=-float("inf"))
        by_log_f = tl.load(by_log_prior + position, mask=inside, other=0.0).to(tl.float32)
        by_z = by_prior_logits(z, log_f, by_log_f, alpha, beta, c, FORM)
        tl.store(out + position, by_z.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + position, log_prior_of(z, alpha, beta, c, FORM, IS_INCREASING), mask=inside)


def _launch(
    logits_NK: Tensor,
    log_prior_NK: Tensor,
    by_log_prior_NK: Tensor,
    out_NK: Tensor,
    form: Form,
    values: tuple[float, ...],
    *,
    is_backward: bool,
) -> None:
    tokens, components = logits_NK.shape
    if not tokens:
        return
    lanes = triton.next_power_of_2(components)
    tokens_of_program = max(1, TILE // lanes)
    alpha, beta, c = (*values, 0.0, 0.0)[:3]
    launch(
        log_prior_kernel,
        -(-tokens // tokens_of_program),
        (logits_NK, log_prior_NK, by_log_prior_NK, out_NK),
        (tokens, components, alpha, beta, c),
        {
            "FORM": forms.CODES[form.name],
            "IS_INCREASING": form.is_increasing(values),
            "BACKWARD": is_backward,
            "TOKENS": tokens_of_program,
            "LANES": lanes,
        },
        num_warps=4,
    )


class KernelPrior(Prior):
    """The prior of a mixture with at most :data:`MOST_COMPONENTS` components, whose output function is fixed."""

    def __init__(self, spec: MemberSpec, logits_NK: Tensor) -> None:
        self.form, self.values = spec.form, cast("tuple[float, ...]", spec.numbers)
        self.logits_NK = logits_NK.contiguous().resolve_neg()

    def log_prior(self) -> Tensor:
        out_NK = torch.empty(self.logits_NK.shape, dtype=torch.float32, device=self.logits_NK.device)
        _launch(self.logits_NK, out_NK, out_NK, out_NK, self.form, self.values, is_backward=False)
        return out_NK

    def gradient(self, log_prior_NK: Tensor, by_log_prior_NK: Tensor) -> Tensor:
        by_logits_NK = torch.empty_like(self.logits_NK)
        given = by_log_prior_NK.contiguous()
        _launch(self.logits_NK, log_prior_NK, given, by_logits_NK, self.form, self.values, is_backward=True)
        return by_logits_NK

    def argument_gradients(self) -> list[Tensor]:
        return []


def has_kernel(spec: MemberSpec, components: int, dtype: torch.dtype) -> bool:
    """Whether the kernel computes the log-probabilities of so many components."""
    is_known = spec.is_fixed and spec.form.name in forms.CODES
    return is_known and components <= MOST_COMPONENTS and dtype in DTYPES
