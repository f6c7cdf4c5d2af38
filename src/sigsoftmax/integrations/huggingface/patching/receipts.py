"""Receipts, by which a patched model notices that a result did not come from its output function.

Other libraries assign to ``forward``. Some wrap the forward pass that they find (hooks of accelerate, autocast,
``torch.compile``), some replace it and multiply by the weight of the output layer themselves, and what they return is
softmax. Attributes do not tell the two apart: a replacement made with ``functools.wraps`` points back to ours. So the
patched forward pass leaves a receipt on its model, and a call of an assigned ``forward`` that returns a loss or logits
without one raises.

The check is put around what is assigned, since PEFT and others call ``model.forward`` past ``__call__``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from sigsoftmax.integrations.huggingface.trainers.trl_fused_head import FusedHead

RESULTS = ("loss", "logits", "log_probs")
"""Names under which outputs of language models hold what an output function decides."""
LIGER_REMEDY = (
    "Liger's fused losses are softmax; switch them off with fused_linear_cross_entropy=False (in the Trainer: "
    'liger_kernel_config={"fused_linear_cross_entropy": False}) and keep its other kernels: the loss of the patched '
    "model stores no logits either"
)
REMEDY = (
    "Leave `forward` as it is, or assign one that calls the forward pass it found; TRL's trainers and Liger's other "
    'kernels are supported (docs/huggingface.md, "With TRL and Liger")'
)
PASSED_ON = ("__func__", "__self__", "__name__", "__qualname__", "__code__", "__signature__")


class CheckedForward:
    """A ``forward`` that was assigned to a patched model: it runs, and what it returns is checked for a receipt.

    An object rather than a closure, so that a copy of the model gets one that runs the copy.
    """

    def __init__(self, model: Any, forward: Any) -> None:
        self.model = model
        self.__wrapped__ = forward

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _run(self.model, self.__wrapped__, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        # `__func__` among others, by which accelerate knows a method.
        if name == "__wrapped__" or (name.startswith("__") and name not in PASSED_ON):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)


def assign(model: Any, forward: Any) -> None:
    """Serve ``model.forward = forward``."""
    head = FusedHead.of(forward)
    if head is not None:
        # Kept as options of our own forward pass, which then serves the calls that this head was made for.
        model.fused_head = head
        return
    if model.needs_receipts and _is_of_liger(forward):
        raise ValueError(
            f"{type(model).__name__} has the output function {model.output_function.described()}, and Liger is about "
            f"to replace its forward pass by one with another loss. {LIGER_REMEDY}"
        )
    keep_checked(model, forward)


def keep_checked(model: Any, forward: Any) -> None:
    """Make ``forward`` the one that runs, unless it is that of the class, put back."""
    model.__dict__.pop("forward", None)
    if forward != MethodType(type(model).forward, model):
        model.__dict__["forward"] = CheckedForward(model, forward)


def release(model: Any) -> None:
    """Undo :func:`keep_checked`: what was assigned runs without a check."""
    checked = model.__dict__.get("forward")
    if isinstance(checked, CheckedForward):
        model.__dict__["forward"] = checked.__wrapped__


class PatchedType(type):
    """The class of patched classes: a ``forward`` that is assigned to one, or that one made of them has, is checked."""

    def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> None:
        super().__init__(name, bases, attributes)
        if "forward" in attributes and any(isinstance(base, PatchedType) for base in bases):
            cls.forward = attributes["forward"]

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, _checked(value) if name == "forward" else value)


@functools.cache
def metaclass_for(own: Any) -> Any:
    """The metaclass of a patched class whose own class has the metaclass ``own``."""
    return PatchedType if own is type else type(PatchedType.__name__, (PatchedType, own), {})


def leave(model: Any) -> None:
    """Leave a receipt: the result that is about to be returned came from the output function."""
    model.has_receipt = True
    if _is_training_step(model):
        model.trained_past = None


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked_method(self: Any, *arguments: Any, **options: Any) -> Any:
        return _run(self, function, self, *arguments, **options)

    return checked_method


def _run(model: Any, forward: Any, /, *arguments: Any, **options: Any) -> Any:
    model.has_receipt = False
    output = forward(*arguments, **options)
    if not model.has_receipt:
        check_result(model, forward, output)
    return output


def check_result(model: Any, forward: Any, output: Any) -> None:
    """Refuse what ``forward`` returned without a receipt, if the output function would have made a difference to it."""
    # A model whose patch was removed has no such attribute; somebody may have kept its checked forward pass.
    if not getattr(model, "needs_receipts", False):
        return
    if _is_training_step(model):
        model.trained_past = described(forward)
    if holds_result(output, model.examined.num_classes):
        raise RuntimeError(
            f"{type(model).__name__} has the output function {model.output_function.described()}, but its result came "
            f"from {described(forward)}, which did not use it: it gave a loss or logits of softmax. "
            f"{remedy(forward)}. To train a softmax model, call remove_output_function(model) first"
        )


def refuse_to_save(model: Any) -> None:
    """A model that was trained as softmax must not be stored as what it was not trained as."""
    unchecked = model.__dict__.get("forward")
    if unchecked is not None and not isinstance(unchecked, CheckedForward) and model.needs_receipts:
        raise RuntimeError(
            f"{described(unchecked)} was put into the attributes of this {type(model).__name__} past its class, so "
            f"nobody knows whether its training steps used {model.output_function.described()}. Assign it, as in "
            "model.forward = ..., and train again; or, if it computes softmax, call remove_output_function(model) and "
            "save the softmax model"
        )
    if getattr(model, "trained_past", None) is not None:
        raise RuntimeError(
            f"the last training step of this {type(model).__name__} went through {model.trained_past}, which did not "
            f"use its output function {model.output_function.described()}, so its weights were trained for softmax and "
            "saving it would store them under the wrong function. To keep the weights, call "
            "remove_output_function(model) and save it as the softmax model that it was trained as"
        )


def holds_result(output: Any, num_classes: int) -> bool:
    """Tell whether an output holds a loss, logits or log-probabilities: by name, as a scalar, or by its size."""
    if isinstance(output, Tensor):
        return output.is_floating_point() and (output.ndim == 0 or output.shape[-1] == num_classes)
    if isinstance(output, tuple | list):
        return any(holds_result(part, num_classes) for part in output)
    if isinstance(output, Mapping):
        named = any(output.get(name) is not None for name in RESULTS)
        return named or any(holds_result(part, num_classes) for part in output.values())
    return any(getattr(output, name, None) is not None for name in RESULTS)


def described(forward: Any) -> str:
    """The function that really runs: its code knows its name even where ``functools.wraps`` gave it another."""
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    if code is None:
        return f"a {type(forward).__name__} that was assigned to `forward`"
    return f"`{code.co_qualname}` ({Path(code.co_filename).name})"


def remedy(forward: Any) -> str:
    """Advice on a ``forward`` that does not use the output function."""
    return LIGER_REMEDY if _is_of_liger(forward) else REMEDY


def _is_of_liger(forward: Any) -> bool:
    return str(getattr(forward, "__module__", "")).startswith("liger_kernel.")


def _is_training_step(model: Any) -> bool:
    return bool(model.training) and torch.is_grad_enabled()
