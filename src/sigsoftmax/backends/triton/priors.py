"""Log-probabilities of short rows, the prior over the components of a mixture: one kernel forward, one backward.

Shapes: N tokens, K components.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, cast

import torch
import triton
from torch import Tensor

from sigsoftmax.backends.chunked.path import Prior
from sigsoftmax.backends.triton.kernels import formulas
from sigsoftmax.backends.triton.kernels.priors import log_prior_kernel
from sigsoftmax.backends.triton.launch import LOGITS_DTYPES, launch
from sigsoftmax.contract.problem import AnyProblem
from sigsoftmax.contract.rows import Logarithms
from sigsoftmax.contract.spec import MemberSpec

MOST_COMPONENTS = 256
TILE = 1024
"""numbers that a program holds"""


class TokenTile(NamedTuple):
    """The tile of a program: tokens, and lanes for the components of each."""

    tokens: int
    lanes: int

    @classmethod
    def of(cls, components: int) -> TokenTile:
        lanes = triton.next_power_of_2(components)
        return cls(max(1, TILE // lanes), lanes)

    def programs(self, tokens: int) -> int:
        return -(-tokens // self.tokens)


def arguments_of(spec: MemberSpec) -> tuple[tuple[float, ...], dict[str, int | bool]]:
    """The numbers and constants by which kernels know a fixed prior: alpha, beta and c; its form."""
    values = cast("tuple[float, ...]", spec.numbers)
    code = formulas.CODES[spec.form.name]
    return (*values, 0.0, 0.0)[:3], {"FORM": code, "IS_INCREASING": spec.form.is_increasing(values)}


class KernelPrior(Prior):
    """The prior of a mixture with at most :data:`MOST_COMPONENTS` components, whose output function is fixed."""

    def __init__(self, spec: MemberSpec, logits_NK: Tensor) -> None:
        self.spec = spec
        self.logits_NK = logits_NK.contiguous().resolve_neg()

    @functools.cached_property
    def log_prior(self) -> Logarithms:
        out_NK = torch.empty(self.logits_NK.shape, dtype=torch.float32, device=self.logits_NK.device)
        self._launch(out_NK, out_NK, out_NK, is_backward=False)
        return Logarithms(out_NK)

    def gradient(self, by_log_prior_NK: Tensor) -> Tensor:
        by_logits_NK = torch.empty_like(self.logits_NK)
        self._launch(self.log_prior.values, by_log_prior_NK.contiguous(), by_logits_NK, is_backward=True)
        return by_logits_NK

    def _launch(self, log_prior_NK: Tensor, by_log_prior_NK: Tensor, out_NK: Tensor, *, is_backward: bool) -> None:
        tokens, components = self.logits_NK.shape
        if not tokens:
            return
        tile = TokenTile.of(components)
        numbers, constants = arguments_of(self.spec)
        launch(
            log_prior_kernel,
            tile.programs(tokens),
            (self.logits_NK, log_prior_NK, by_log_prior_NK, out_NK),
            (tokens, components, *numbers),
            {**constants, "BACKWARD": is_backward, "TOKENS": tile.tokens, "LANES": tile.lanes},
            num_warps=4,
        )

    def argument_gradients(self) -> list[Tensor]:
        return []


def is_known(spec: MemberSpec) -> bool:
    """True if the kernel computes this output function, whose numbers it must be given."""
    return spec.is_fixed and spec.form.name in formulas.CODES


def has_kernel(spec: MemberSpec, components: int, dtype: torch.dtype) -> bool:
    """True if the kernel computes the log-probabilities of so many components."""
    return is_known(spec) and components <= MOST_COMPONENTS and dtype in LOGITS_DTYPES


def too_many_components(problem: AnyProblem) -> dict[str, bool]:
    """The reason to refuse more components of a mixture than the kernels take."""
    count, most = problem.components, MOST_COMPONENTS
    return {f"{count:,} components exceed its {most:,}": problem.spec.prior is not None and count > most}
