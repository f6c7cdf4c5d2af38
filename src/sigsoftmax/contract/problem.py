"""A call that has been validated, and what a backend answers to it.

Shapes: N tokens, K components, V classes, d width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from sigsoftmax.contract.operands import Operands, Wanted
from sigsoftmax.contract.rows import compute_dtype
from sigsoftmax.contract.signature import Signature
from sigsoftmax.contract.spec import LogProbsSpec, LossSpec, StatisticsSpec

MIB = 2**20
Spec = TypeVar("Spec", LossSpec, LogProbsSpec, StatisticsSpec)


def default_chunk_bytes(chunk_bytes: int | None, device: torch.device, mixture_classes: int | None = None) -> int:
    """The memory for logits of a chunk.

    On a GPU it is what products need to run at full speed: for a mixture 4,608 rows, of which a token has K.
    """
    if chunk_bytes is not None:
        return chunk_bytes
    if device.type == "cpu":
        return 32 * MIB
    largest = 576 * MIB
    return largest if mixture_classes is None else min(largest, max(64 * MIB, 4608 * 2 * mixture_classes))


def dtypes_of(
    input_dtype: torch.dtype, autocast: torch.dtype | None, *, has_weight: bool, is_loss: bool
) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the logits, and that of the result, which autocast leaves in float32 unless it has given logits."""
    if autocast is None or input_dtype == torch.float64:
        return input_dtype, input_dtype
    product_dtype = autocast if has_weight else input_dtype
    return product_dtype, torch.float32 if is_loss or has_weight else product_dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem(Generic[Spec]):
    """A call that passed validation: its specification, its signature, and the sizes and dtypes that follow from both.

    Backends decide by it: a specification says nothing of tensors, and a signature may describe some that do not fit.
    """

    spec: Spec
    signature: Signature
    leading: torch.Size
    """the dimensions of the tokens"""
    components: int
    num_classes: int
    """the classes that this process holds"""
    dtype: torch.dtype
    """the dtype of the result"""
    product_dtype: torch.dtype
    """the dtype of the logits"""
    device: torch.device

    @property
    def num_tokens(self) -> int:
        # Not numel(), which torch.jit.trace would take for a number that never changes.
        return math.prod(self.leading)

    @functools.cached_property
    def wanted(self) -> Wanted:
        return self.signature.wanted

    @property
    def has_weight(self) -> bool:
        """True if logits are products, and not given."""
        return self.signature.operands.weight is not None

    @property
    def has_probabilities(self) -> bool:
        target = self.signature.operands.target
        return target is not None and target.is_floating_point()

    @property
    def is_sharded(self) -> bool:
        return self.signature.operands.shard is not None

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.product_dtype)

    @property
    def chunk_bytes(self) -> int:
        # All ranks of a group must decide alike, whatever their number of classes.
        is_mixture = self.spec.prior is not None and not self.is_sharded
        return default_chunk_bytes(self.spec.chunk_bytes, self.device, self.num_classes if is_mixture else None)

    def hidden(self, operands: Operands) -> Tensor:
        """The input as (N, K, d)."""
        return operands.input.reshape(self.num_tokens, self.components, operands.input.shape[-1])

    def prior_logits(self, operands: Operands) -> Tensor:
        """The prior's logits as (N, K)."""
        return operands.prior_logits.reshape(self.num_tokens, self.components)

    def target(self, operands: Operands) -> Tensor:
        """Class indices as (N,), or probabilities as (N, V)."""
        if self.has_probabilities:
            return operands.target.reshape(-1, self.num_classes)
        return operands.target.reshape(-1).long().contiguous()


AnyProblem = Problem[LossSpec] | Problem[LogProbsSpec] | Problem[StatisticsSpec]


class LossResults(NamedTuple):
    """The results of a path. The autograd function and the op of torch.library hand them on."""

    loss: Tensor
    """as the caller gets it: (), or the leading dimensions"""
    losses_N: Tensor
    """the loss of each token, or what it has in the total"""
    log_normalizer_NK: Tensor | None
    argmax_N: Tensor | None
    entropy_N: Tensor | None
    gradients: Sequence[Tensor | None]
    """in the order of ``Operands.differentiable``; None where it is not wanted"""

    @property
    def extras(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The extras, in the order of ``EXTRAS``."""
        return self.log_normalizer_NK, self.argmax_N, self.entropy_N


class LossPath(Protocol):
    """One way to compute a loss, for all calls with the same specification and signature. It holds no tensors."""

    description: str

    def compute(self, operands: Operands, by_losses: Tensor | None = None) -> LossResults:
        """The loss, and the gradients of a mean or a sum.

        With ``by_losses``, in the leading dimensions, the gradients of the sum of all losses weighted by them.
        """
        ...

    def scale(self, gradients: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply gradients by the incoming gradient of a mean or a sum, in place."""
        ...


class LogProbsResults(NamedTuple):
    """Log-probabilities of every class, and what the same pass over the logits tells besides."""

    log_probs_NV: Tensor
    log_normalizer_NK: Tensor | None
    """log sum_j g(z_j) of every component, if it is asked for; it has no gradient"""


class LogProbsPath(Protocol):
    """One way to compute log-probabilities. It holds no tensors."""

    description: str

    def compute(self, operands: Operands) -> LogProbsResults: ...

    def gradients(self, operands: Operands, by_log_p_NV: Tensor) -> Sequence[Tensor | None]:
        """Gradients in the order of ``Operands.differentiable``; None where it is not wanted."""
        ...


class StatisticsPath(Protocol):
    """One way to compute statistics of tokens. It holds no tensors."""

    description: str

    def compute(self, operands: Operands) -> tuple[Tensor, Tensor]:
        """All statistics of tokens in the columns of one matrix, (N, C), and likeliest classes in those of another."""
        ...

    def gradients(self, operands: Operands, by_groups: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients in the order of ``Operands.differentiable``; None where it is not wanted.

        Given are those of each group of columns; None for one that the loss does not depend on.
        """
        ...


class Refusal(NamedTuple):
    """The reason why a backend cannot compute something."""

    reason: str


def first_reason(reasons: dict[str, bool]) -> str | None:
    """The first reason for a refusal that holds."""
    return next((reason for reason, holds in reasons.items() if holds), None)


@dataclass(frozen=True)
class Decision:
    """The backend of an operation, who chose it, its path, and why each faster one was refused."""

    backend: str
    chosen_by: str
    path: str = ""
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.backend} (chosen by {self.chosen_by}){self.path and ': '}{self.path}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)
