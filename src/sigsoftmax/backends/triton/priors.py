"""Log-probabilities of short rows, the prior over the components of a mixture: one kernel forward, one backward.

Shapes: N tokens, K components.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sigsoftmax.backends.gradients import not_differentiable_again
from sigsoftmax.backends.triton import forms
from sigsoftmax.backends.triton.launches import launch
from sigsoftmax.forms import Form

MOST_COMPONENTS = 256
TILE = 1024
"""numbers that a program holds"""


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


class _LogPrior(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NK: Tensor, form: Form, values: tuple[float, ...]) -> Tensor:
        out_NK = torch.empty(logits_NK.shape, dtype=torch.float32, device=logits_NK.device)
        _launch(logits_NK, out_NK, out_NK, out_NK, form, values, is_backward=False)
        ctx.save_for_backward(logits_NK, out_NK)
        ctx.form, ctx.values = form, values
        return out_NK

    @staticmethod
    def backward(ctx: Any, *by_outputs: Tensor) -> tuple[Tensor | None, None, None]:
        logits_NK, log_prior_NK = ctx.saved_tensors
        by_log_prior = by_outputs[0]
        by_logits_NK = torch.empty_like(logits_NK)
        _launch(
            logits_NK,
            log_prior_NK,
            by_log_prior.contiguous(),
            by_logits_NK,
            ctx.form,
            ctx.values,
            is_backward=True,
        )
        (by_logits,) = not_differentiable_again((by_logits_NK,), (by_log_prior, logits_NK))
        return by_logits, None, None


def log_prior(prior_logits: Tensor, form: Form, values: tuple[float, ...]) -> Tensor:
    """Log-probabilities over the last dimension, at most :data:`MOST_COMPONENTS`, in float32; ``values`` are fixed."""
    flat_NK = prior_logits.reshape(-1, prior_logits.shape[-1]).contiguous().resolve_neg()
    return _LogPrior.apply(flat_NK, form, values).view(prior_logits.shape)
