"""The number of a model's parameters, and a check that a device can hold them before anything is allocated."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path

import torch

from sigsoftmax.layers.output_layer import FunctionModule
from sigsoftmax.lm.config import ModelConfig

__all__ = ["check_model_fits", "device_memory", "parameter_count"]

FLOAT32_BYTES = 4
TRAINING_COPIES = 3
"""copies of all parameters, at least, while a model is trained: weights, their gradients, the best weights so far"""
GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""files in which Linux says how much memory a container may use"""


def parameter_count(config: ModelConfig, vocabulary_size: int) -> int:
    """The numbers that a model of this description has, the tied matrix counted once."""
    head = config.parsed_head
    layers = pairwise((config.embedding, *config.hidden))
    count = sum(4 * hidden * (inputs + hidden + 2) for inputs, hidden in layers)
    # The tied matrix and the bias; which parameters of phi are learned is known to the layers alone.
    count += vocabulary_size * (config.embedding + 1)
    count += sum(parameter.numel() for parameter in FunctionModule(head.function, vocabulary_size).parameters())
    if head.components > 1:
        # The prior, and the latent layer, which has a bias unless it is residual.
        inputs = config.hidden[-1] + (config.latent != "residual")
        count += head.components * (config.hidden[-1] + inputs * config.embedding)
    return count


def device_memory(device: torch.device) -> int:
    """Bytes that the device has in all; where that is unknown, more than there can be."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    known = [sys.maxsize]
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in map(Path, GROUP_LIMITS):
        try:
            known.append(int(limit.read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such limit, or the text "max"
            continue
    return min(size for size in known if size > 0)


def check_model_fits(config: ModelConfig, vocabulary_size: int, device: torch.device, *, is_trained: bool) -> None:
    """Refuse a model whose parameters alone are more than the device can hold."""
    parameters = parameter_count(config, vocabulary_size)
    needed, there = FLOAT32_BYTES * (TRAINING_COPIES if is_trained else 1) * parameters, device_memory(device)
    if needed > there:
        what = "weights, gradients and best weights" if is_trained else "weights"
        raise ValueError(
            f"a model with embedding {config.embedding:,}, hidden {', '.join(f'{width:,}' for width in config.hidden)} "
            f"and head {config.head} for {vocabulary_size:,} words has {parameters:,} parameters; its "
            f"{what} need {needed:,} bytes ({needed // 2**30:,} GiB), and the memory of {device} has {there:,} "
            f"({there // 2**30:,} GiB); take a smaller model"
        )
