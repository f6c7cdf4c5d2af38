"""Losses that have a plan and were computed before with tensors of the same kind: nothing is checked or decided again.

Such a loss may take a GPU less time than its checks take Python.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sigsoftmax import validation
from sigsoftmax.backends import dispatch
from sigsoftmax.family import OutputFunction

if TYPE_CHECKING:
    from sigsoftmax.backends.triton.plans import Plan

MOST_KNOWN = 1024
Key = tuple[Any, ...]
_known: dict[Key, tuple[Plan | None, dispatch.Decision | None]] = {}
"""Keys hold no tensors, and so keep nothing alive that is large."""


def key_of(tensors: Sequence[Tensor | None], options: tuple[Any, ...]) -> Key | None:
    """All that decisions about a call depend on; None where they depend on more, or another way is known to be it.

    ``tensors`` begin with the input and end with the targets, ``options`` begin with the output function. An option
    must not equal one that means another thing.
    """
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
    ):
        return None
    input = tensors[0]
    if not isinstance(input, Tensor) or validation.wants_messages(input.device):
        return None
    function = options[0]
    if isinstance(function, OutputFunction) and not function.is_fixed:
        return None
    parts = [os.environ.get(dispatch.ENVIRONMENT_VARIABLE), *options]
    for tensor in tensors:
        if tensor is None:
            parts.append(None)
            continue
        if type(tensor) not in (Tensor, torch.nn.Parameter) or dispatch.is_wrapped(tensor) or tensor.is_neg():
            return None
        parts += (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_contiguous())
    kind = input.device.type
    # Asked first, since devices such as meta know no autocast and raise.
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    parts.append(torch.get_autocast_dtype(kind) if is_cast else None)
    key = tuple(parts)
    try:
        known = _known.get(key)
    except TypeError:
        # An option that cannot be one of a known call.
        return None
    return None if known is not None and known[0] is None else key


def loss_of(key: Key, tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The loss, if such a call is known."""
    plan, decision = _known.get(key, (None, None))
    if plan is None or decision is None:
        return None
    from sigsoftmax.backends.triton import plans

    dispatch.recall(decision)
    return plans.loss_by(plan, *tensors)


def learn(
    key: Key, plan: Plan | None, decision: dispatch.Decision | None, tensors: Sequence[Tensor | None]
) -> Tensor | None:
    """The loss by a plan, by which such calls are computed from now on; without one, in another way."""
    if any(isinstance(part, Tensor) or (isinstance(part, OutputFunction) and not part.is_fixed) for part in key):
        # What is in a tensor can change, and a key would keep it alive.
        return None
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    _known[key] = plan, decision
    return loss_of(key, tensors)
