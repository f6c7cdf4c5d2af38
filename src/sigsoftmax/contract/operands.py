"""The tensors of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Operands(NamedTuple):
    """The tensors that a loss or log-probabilities are computed from, as the caller passed them.

    Each is a tensor or None; in a signature it is a description of one. Shapes: (...) leading dimensions of the tokens,
    K components, V classes, d width.
    """

    input: Any
    """(..., d), (..., K, d) of a mixture, or without a weight the logits (..., V)"""
    weight: Any = None
    """(V, d)"""
    bias: Any = None
    """(V,)"""
    prior_logits: Any = None
    """(..., K)"""
    target: Any = None
    """(...) of class indices, or (..., V) of probabilities"""
    class_weight: Any = None
    """(V,)"""
    token_weights: Any = None
    """(...)"""
    arguments: Sequence[Any] = ()
    """the arguments of the output function's form that are tensors: () or (V,)"""
    prior_arguments: Sequence[Any] = ()
    """the same of the form of a mixture's prior"""
    shard: Any = None
    """a ``Shard``, where classes are spread over processes: those that other processes hold"""

    @classmethod
    def from_flat(cls, tensors: Sequence[Any], arguments: int, shard: Any = None) -> Operands:
        """Make operands of the tensors of :attr:`flat`, of which so many are arguments of the form."""
        of_form, of_prior = tuple(tensors[7 : 7 + arguments]), tuple(tensors[7 + arguments :])
        return cls._make((*tensors[:7], of_form, of_prior, shard))

    @property
    def flat(self) -> tuple[Any, ...]:
        """All tensors one after the other."""
        return (*self[:7], *self.arguments, *self.prior_arguments)

    @property
    def all_arguments(self) -> tuple[Any, ...]:
        """The arguments of both forms."""
        return (*self.arguments, *self.prior_arguments)

    @property
    def differentiable(self) -> tuple[Any, ...]:
        """The operands that may want a gradient, in the order in which gradients are returned."""
        return (*self[:4], self.token_weights, *self.arguments, *self.prior_arguments)


class Wanted(NamedTuple):
    """Flags for each differentiable operand: True if its gradient is wanted."""

    input: bool
    weight: bool
    bias: bool
    prior_logits: bool
    token_weights: bool
    arguments: tuple[bool, ...]
    prior_arguments: tuple[bool, ...]

    @classmethod
    def of(cls, flags: Sequence[bool], arguments: int) -> Wanted:
        """Make it of flags in the order of ``Operands.differentiable``, so many of them of the form's arguments."""
        of_form, of_prior = tuple(flags[5 : 5 + arguments]), tuple(flags[5 + arguments :])
        return cls._make((*flags[:5], of_form, of_prior))

    @property
    def flat(self) -> tuple[bool, ...]:
        """All flags, in the order of ``Operands.differentiable``."""
        return (*self[:5], *self.arguments, *self.prior_arguments)

    @property
    def any_of_rows(self) -> bool:
        """True if a gradient is wanted that needs the gradient of the logits or of the prior."""
        return any((*self[:4], *self.arguments, *self.prior_arguments))

    @property
    def any(self) -> bool:
        """True if any gradient is wanted."""
        return self.any_of_rows or self.token_weights
