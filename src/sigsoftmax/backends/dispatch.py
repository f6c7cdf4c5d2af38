"""Which backend computes an operation, and why the others did not."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sigsoftmax.backends import blocked
from sigsoftmax.backends.chunks import MakeRoutines
from sigsoftmax.forms import Form

ENVIRONMENT_VARIABLE = "SIGSOFTMAX_BACKEND"


class Backend(NamedTuple):
    """A set of row routines: how to get them, and why they cannot serve a call (None if they can)."""

    routines: Callable[[], MakeRoutines]
    why_refused: Callable[[Form, torch.dtype, torch.device], str | None]


def _triton_routines() -> MakeRoutines:
    from sigsoftmax.backends.triton import rows

    return rows.routines


def _why_not_triton(form: Form, dtype: torch.dtype, device: torch.device) -> str | None:
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not is_interpreted:
        return f"the tensors are on {device.type}, not on a CUDA device"
    if torch.version.hip is not None and not is_interpreted:
        return "the kernels are written for NVIDIA's GPUs, and this torch is built for AMD's"
    if not has_triton():
        return "the package triton is not installed"
    from sigsoftmax.backends.triton import rows

    return rows.why_refused(form, dtype)


# Found out once, outside what torch.compile traces.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    return _HAS_TRITON


def has_kernels() -> bool:
    """Whether kernels run on CUDA devices."""
    return _HAS_TRITON and torch.version.hip is None


# A new backend is one line here, fastest first.
_BACKENDS: dict[str, Backend] = {
    "triton": Backend(_triton_routines, _why_not_triton),
    "blocked": Backend(lambda: blocked.routines, lambda form, dtype, device: None),
}
BACKENDS = ("reference", *_BACKENDS)


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


def recall(decision: Decision) -> None:
    """An operation is computed as decided before."""
    global _last
    _last = decision


def row_routines(backend: str) -> MakeRoutines:
    return _BACKENDS[backend].routines()


def choose(
    backend: str | None,
    form: Form,
    dtype: torch.dtype,
    tensors: Sequence[Tensor | None],
    *,
    needs_autograd_of: Tensor | None = None,
) -> str:
    """The backend of a :func:`decision`, which ``explain`` will tell of."""
    made = decision(backend, form, dtype, tensors, needs_autograd_of=needs_autograd_of)
    if not torch.compiler.is_compiling():
        recall(made)
    return made.backend


def decision(
    backend: str | None,
    form: Form,
    dtype: torch.dtype,
    tensors: Sequence[Tensor | None],
    *,
    needs_autograd_of: Tensor | None = None,
) -> Decision:
    """Pick a backend: the argument, else the environment, else the fastest that can.

    ``dtype`` is that of the logits; ``tensors`` take part in the operation, the first one tells the device;
    ``needs_autograd_of`` is one whose gradient only the reference has.
    """
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
        return Decision("reference", chosen_by if asked else "the inputs", dict.fromkeys(_BACKENDS, reason))
    if asked == "reference":
        return Decision(asked, chosen_by)
    device = present[0].device
    refused: dict[str, str] = {}
    for name, candidate in _BACKENDS.items():
        if asked in (None, name):
            reason = candidate.why_refused(form, dtype, device)
            if reason is None:
                return Decision(name, chosen_by if asked else "default", refused)
            refused[name] = reason
    assert asked is not None
    raise ValueError(f"backend {asked!r} cannot be used: {refused[asked]}; leave the choice to the package")


is_wrapped: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def _why_only_reference(tensors: Sequence[Tensor], needs_autograd_of: Tensor | None) -> str | None:
    if needs_autograd_of is not None and needs_autograd_of.requires_grad:
        return "probability targets and class weights that require a gradient need plain autograd"
    if torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active() or any(is_wrapped(t) for t in tensors):
        return "the inputs are inside torch.func (vmap, grad, jvp, ...), which the fast backends do not support"
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        return "forward-mode derivatives need plain autograd"
    return None
