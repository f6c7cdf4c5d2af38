"""Cases of the GPU benchmark in which one size grows: time should lie on a line, and memory should not grow with N.

Shapes: N tokens, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gpu_losses import ours_linear, ours_logits, step_of
from gpu_machine import Machine, gpu_case
from gpu_problems import linear_problem, logits_problem
from measuring import Measurement, Step


def logits_growth(machine: Machine, shapes: Sequence[tuple[int, int]], letter: str, rounds: int) -> list[Measurement]:
    """Shapes are (N, V); the letter says which of them grows."""

    def step(shape: tuple[int, ...]) -> Step:
        whole = step_of(ours_logits("sigsoftmax"), logits_problem(machine.device, *shape))
        # Beside the host's time, that of few rows would not be seen.
        return machine.captured(whole)

    sizes = _sizes(shapes, "NV", letter)
    what = _fixed(shapes[0], "NV", letter)
    return _growing(
        machine,
        f"time as {letter} grows, cross-entropy of bf16 logits in CUDA graphs, {what}",
        sizes,
        step,
        rounds,
        "linear",
    )


def linear_growth(
    machine: Machine, shapes: Sequence[tuple[int, int, int]], letter: str, chunk_mib: float, rounds: int
) -> list[Measurement]:
    """Shapes are (N, d, V); the letter says which of them grows."""

    def step(shape: tuple[int, ...]) -> Step:
        implementation = ours_linear("sigsoftmax", "fast", chunk_mib)
        return step_of(implementation.loss, linear_problem(machine.device, *shape))

    sizes = _sizes(shapes, "NdV", letter)
    what = _fixed(shapes[0], "NdV", letter)
    # A chunk is whole rows, so its size changes a little from V to V; with N it must not.
    target = "linear, flat, <= 600 MiB" if letter == "N" else "linear, <= 600 MiB"
    name = f"time and memory as {letter} grows, linear cross-entropy, bf16, fast, {what}"
    return _growing(machine, name, sizes, step, rounds, target)


def _sizes(shapes: Sequence[tuple[int, ...]], letters: str, letter: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The size that grows, and the shape, by the name of the row."""
    place = letters.index(letter)
    return {f"ours sigsoftmax, {letter}={shape[place]}": (shape[place], shape) for shape in shapes}


def _fixed(shape: tuple[int, ...], letters: str, letter: str) -> str:
    return " ".join(f"{name}={size}" for name, size in zip(letters, shape, strict=True) if name != letter)


def _growing(
    machine: Machine,
    name: str,
    sizes: Mapping[str, tuple[int, tuple[int, ...]]],
    step: Callable[[tuple[int, ...]], Step],
    rounds: int,
    target: str,
) -> list[Measurement]:
    steps = {row: step(shape) for row, (_, shape) in sizes.items()}
    case = gpu_case(
        name=name,
        baseline=next(iter(steps)),
        implementations=steps,
        targets=dict.fromkeys(steps, target),
    )
    # Sizes are not compared by ratios: each is its own baseline.
    return [
        replace(m, baseline=m.implementation, ratio=1.0, ratio_quartiles=(1.0, 1.0), size=sizes[m.implementation][0])
        for m in machine.measured(case, rounds)
    ]
