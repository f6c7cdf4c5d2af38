"""Which backend computes an operation, and why the others did not."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sigsoftmax.backends import blocked
from sigsoftmax.backends.chunks import MakeRoutines

ENVIRONMENT_VARIABLE = "SIGSOFTMAX_BACKEND"

# A new backend is one line here: its routines, and a function that says why it cannot serve (None if it can).
_ROUTINES: dict[str, MakeRoutines] = {"blocked": blocked.routines}
BACKENDS = ("reference", *_ROUTINES)


@dataclass(frozen=True)
class Decision:
    """The backend that computes an operation, who chose it, and why each faster one was refused."""

    backend: str
    chosen_by: str
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.backend} (chosen by {self.chosen_by})"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)


_last: Decision | None = None


def explain() -> Decision | None:
    """Which backend computed the last operation in this process, and why another was refused; None before any."""
    return _last


def row_routines(backend: str) -> MakeRoutines:
    return _ROUTINES[backend]


def choose(backend: str | None, tensors: Sequence[Tensor | None], *, needs_autograd_of: Tensor | None = None) -> str:
    """Pick a backend: the argument, else the environment, else the fastest that can.

    ``tensors`` take part in the operation; ``needs_autograd_of`` is one whose gradient only the reference has.
    """
    global _last
    asked, chosen_by = backend, "the argument backend="
    if asked is None and (asked := os.environ.get(ENVIRONMENT_VARIABLE) or None):
        chosen_by = f"the environment variable {ENVIRONMENT_VARIABLE}"
    if asked is not None and asked not in BACKENDS:
        raise ValueError(f"unknown backend {asked!r} ({chosen_by}); known: {', '.join(BACKENDS)}")
    present = [t for t in tensors if t is not None]
    reason = _why_only_reference(present, needs_autograd_of)
    if reason is not None:
        if asked not in (None, "reference"):
            raise ValueError(f"backend {asked!r} cannot be used: {reason}; pass backend='reference'")
        decision = Decision("reference", chosen_by if asked else "the inputs", dict.fromkeys(_ROUTINES, reason))
    elif asked is not None:
        decision = Decision(asked, chosen_by)
    else:
        decision = Decision("blocked", "default")
    if not torch.compiler.is_compiling():
        _last = decision
    return decision.backend


_is_wrapped: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def _why_only_reference(tensors: Sequence[Tensor], needs_autograd_of: Tensor | None) -> str | None:
    if needs_autograd_of is not None and needs_autograd_of.requires_grad:
        return "probability targets that require a gradient need plain autograd"
    if torch.compiler.is_compiling():
        return None
    if any(_is_wrapped(t) for t in tensors):
        return "the inputs are inside torch.func (vmap, grad, jvp, ...), which the fast backends do not support"
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        return "forward-mode derivatives need plain autograd"
    return None
