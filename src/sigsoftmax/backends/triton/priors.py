"""Log-probabilities of short rows, the prior over the components of a mixture: one kernel forward, one backward.

Shapes: N tokens, K components.
"""

from __future__ import annotations

from typing import cast

import torch
import triton
from torch import Tensor

from sigsoftmax.backends.chunked.path import Prior
from sigsoftmax.backends.triton.kernels import forms
from sigsoftmax.backends.triton.kernels.priors import log_prior_kernel
from sigsoftmax.backends.triton.launches import launch
from sigsoftmax.contract.spec import MemberSpec
from sigsoftmax.family.formulas import Form

MOST_COMPONENTS = 256
TILE = 1024
"""numbers that a program holds"""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
