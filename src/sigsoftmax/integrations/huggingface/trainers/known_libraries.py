"""What is known by name of libraries that assign to ``forward``: TRL's fused output layer and Liger's losses."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

TRL_HEAD = "add_fused_lm_head.<locals>._fused_forward"
OUTPUTS_OF_TRL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
LIGER = "liger_kernel."
LIGER_REMEDY = (
    "Liger's fused losses are softmax; switch them off with fused_linear_cross_entropy=False (in the Trainer: "
    'liger_kernel_config={"fused_linear_cross_entropy": False}) and keep its other kernels: the loss of the patched '
    "model stores no logits either"
)


@dataclass(frozen=True, kw_only=True)
class FusedHead:
    """What ``trl.trainer.utils.add_fused_lm_head`` was asked for, under its names."""

    temperature: float = 1.0
    cast_lm_head_to_fp32: bool = False
    outputs: tuple[str, ...] = ("log_probs",)

    def __post_init__(self) -> None:
        unknown = [name for name in self.outputs if name not in OUTPUTS_OF_TRL]
        if unknown:
            raise ValueError(
                f"TRL asks its fused output layer for {', '.join(unknown)}, but sigsoftmax knows "
                f"{', '.join(OUTPUTS_OF_TRL)}; install TRL 1.16, or a newer version of sigsoftmax"
            )


def fused_head_of(forward: Any) -> FusedHead | None:
    """The options of TRL's fused output layer, if ``forward`` is one; seen to work with TRL 1.16.

    TRL offers no other way in than the assignment to ``forward``. The function is known by the name in its code, and
    the variables that it closes over have the names of the public arguments of ``add_fused_lm_head``.
    """
    function = getattr(forward, "__func__", forward)
    if getattr(getattr(function, "__code__", None), "co_qualname", None) != TRL_HEAD:
        return None
    values = inspect.getclosurevars(function).nonlocals
    missing = [name for name in ("temperature", "cast_lm_head_to_fp32", "outputs") if name not in values]
    if missing:
        raise ValueError(
            f"the fused output layer of this version of TRL has no {', '.join(missing)}, so sigsoftmax cannot take its "
            "place; install TRL 1.16, or call remove_output_function(model) to train a softmax model"
        )
    return FusedHead(
        temperature=float(values["temperature"]),
        cast_lm_head_to_fp32=bool(values["cast_lm_head_to_fp32"]),
        outputs=tuple(values["outputs"]),
    )


def refuse_loss_of_liger(model: Any, forward: Any) -> None:
    """Liger's forward passes compute a softmax loss of the output layer's weight."""
    if _is_of_liger(forward):
        raise ValueError(
            f"{type(model).__name__} has the output function {model.output_function.described()}, and Liger is about "
            f"to replace its forward pass by one with another loss. {LIGER_REMEDY}"
        )


def remedy(forward: Any) -> str:
    """What to do about a ``forward`` that does not use the output function."""
    if _is_of_liger(forward):
        return LIGER_REMEDY
    return (
        "Leave `forward` as it is, or assign one that calls the forward pass it found; TRL's trainers and Liger's "
        'other kernels are supported (docs/huggingface.md, "With TRL and Liger")'
    )


def _is_of_liger(forward: Any) -> bool:
    return str(getattr(forward, "__module__", "")).startswith(LIGER)
