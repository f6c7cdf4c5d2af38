"""Options of a trainer: everything besides recipe, text and folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from sigsoftmax.lm.parallel.single_process import Kind

__all__ = ["Phase", "TrainerOptions", "resolve_device"]

Phase = Literal["train", "finetune"]


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The phase of a run, where it is computed and how exactly, and how often it is saved."""

    phase: Phase = "train"
    start: str | Path | None = None
    """checkpoint that finetuning begins with"""
    seed: int | None = None
    """None: that of the recipe"""
    device: str | torch.device = "cpu"
    precision: str = "float32"
    """arithmetic of training"""
    evaluation_precision: str | None = None
    """arithmetic of validation; None: TF32 products on a GPU, float32 elsewhere"""
    checkpoint_seconds: float = 300.0
    """time between two checkpoints"""
    concurrent_runs: int = 1
    """runs that share the device"""
    parallel: Kind | None = None
    """strategy that divides the run over the processes of torch.distributed; None: one process"""

    def __post_init__(self) -> None:
        if (self.phase == "finetune") != (self.start is not None):
            raise ValueError(
                "finetuning starts from a checkpoint, and training does not: give start with phase finetune"
            )


def resolve_device(device: str | torch.device) -> torch.device:
    """The device of that name; refused if this machine has none."""
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be as 'cpu', 'cuda' or 'cuda:1', got {device!r}") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"the device {str(device)!r} was asked for, but torch sees no CUDA device here; use cpu")
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
