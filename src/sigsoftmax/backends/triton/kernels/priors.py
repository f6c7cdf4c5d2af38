"""Log-probabilities of short rows, the prior over the components of a mixture, and their gradient.

Shapes: N tokens, K components.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sigsoftmax.backends.triton.kernels import formulas


@triton.jit
def _peak_and_unmasked(z, alpha, beta, c, FORM: tl.constexpr, IS_INCREASING: tl.constexpr):
    """(the logit of each row at which phi is largest, z without masks); a mask is -inf."""
    peak = tl.max(z, 1)[:, None]
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    safe_z = tl.where(z != -float("inf"), z, peak)
    if not IS_INCREASING:
        peak = formulas.peak_at(tl.min(safe_z, 1)[:, None], peak, alpha, beta, c, FORM)
    return peak, safe_z


@triton.jit
def log_prior_of(z, alpha, beta, c, FORM: tl.constexpr, IS_INCREASING: tl.constexpr):
    """log f of rows of logits."""
    peak, safe_z = _peak_and_unmasked(z, alpha, beta, c, FORM, IS_INCREASING)
    value = tl.where(z != -float("inf"), formulas.relative(safe_z, peak, alpha, beta, c, c, FORM), z)
    # The value of the peak is its tail, and not 0.
    top = tl.max(value, 1)[:, None]
    top = tl.where(top == -float("inf"), 0.0, top)
    return value - (top + tl.log(tl.sum(tl.exp(value - top), 1)[:, None]))


@triton.jit
def by_prior_logits(z, log_f, by_log_f, alpha, beta, c, FORM: tl.constexpr):
    """The gradient of the logits, given that of log f; outside the row both are masked."""
    safe_z = tl.where(z != -float("inf"), z, 0.0)
    by_phi = by_log_f - tl.exp(log_f) * tl.sum(by_log_f, 1)[:, None]
    gradient = by_phi * tl.where(z != -float("inf"), formulas.slope(safe_z, alpha, beta, c, FORM), 1.0)
    # Those of a token that does not count are 0, also where its prior is NaN.
    return tl.where(tl.sum(tl.abs(by_log_f), 1)[:, None] == 0, 0.0, gradient)


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
