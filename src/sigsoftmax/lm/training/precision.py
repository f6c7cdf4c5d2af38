"""The arithmetic of a pass: float32 of IEEE, TF32 products, or a bf16 LSTM and head over float32 weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sigsoftmax.lm.config import EVALUATION_PRECISIONS, PRECISIONS, Precision

__all__ = ["arithmetic", "check_precision", "known_precision", "lstm_dtype", "resolve_evaluation_precision"]


def known_precision(precision: str) -> Precision:
    """The precision, if there is one of that name."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    return precision


def check_precision(precision: str, device: torch.device) -> Precision:
    precision = known_precision(precision)
    if precision != "float32" and device.type != "cuda":
        raise ValueError(f"precision {precision!r} is for CUDA devices, and this run is on {device}; use float32")
    return precision


def resolve_evaluation_precision(asked: str | None, device: torch.device) -> Precision:
    """The arithmetic of validation and test, whatever training runs in, so that runs can be compared.

    None: TF32 products of float32 weights and states on CUDA devices, and IEEE float32 elsewhere.
    """
    if asked is None:
        return "tf32" if device.type == "cuda" else "float32"
    if asked not in EVALUATION_PRECISIONS:
        raise ValueError(f"evaluation_precision must be one of {', '.join(EVALUATION_PRECISIONS)}, got {asked!r}")
    return check_precision(asked, device)


def lstm_dtype(precision: Precision) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float32


@contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Sets how float32 products are made, which is a global of the process, and puts it back."""
    if device.type != "cuda":
        yield
        return
    # cuDNN takes TF32 for recurrent layers unless told otherwise: fidelity needs it off.
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.rnn)
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee" if precision == "float32" else "tf32"
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value
