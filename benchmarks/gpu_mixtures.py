"""Cases of the GPU benchmark on mixtures of components that share an output matrix.

Shapes: N tokens, K components, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from gpu_linear import FLOOR, of_deviations, three_products
from gpu_losses import ours_mixture, step_of, torch_mixture
from gpu_machine import Machine, float32_products, gpu_case
from gpu_problems import Implementation, Problem, mixture_problem, relative_errors
from measuring import Measurement, Step
from torch import Tensor

Shape = tuple[int, int, int, int]
"""N, K, d, V"""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A case: its shape, the ways of ours, and what they should reach."""

    shape: Shape
    ways: Mapping[str, tuple[str, float | None]]
    """how the weight's gradient is summed and MiB of logits at a time (None: the default), by name"""
    targets: Mapping[str, str]
    products: str = "bf16"
    """`float32`, `TF32` or `bf16`"""
    has_plain: bool = True
    """whether plain torch fits into memory"""
    is_small: bool = False
    """whether the host's time counts"""


def mixture_case(machine: Machine, mixture: Mixture, rounds: int) -> list[Measurement]:
    with float32_products("high" if mixture.products == "TF32" else "highest"):
        return _measured(machine, mixture, rounds)


def _measured(machine: Machine, mixture: Mixture, rounds: int) -> list[Measurement]:
    dtype = torch.bfloat16 if mixture.products == "bf16" else torch.float32

    def make(deviation: float = 1.0, has_bias: bool = True) -> Problem:
        return mixture_problem(machine.device, *mixture.shape, deviation=deviation, dtype=dtype, has_bias=has_bias)

    losses: dict[str, Implementation] = {
        f"ours MoSS, {name}": ours_mixture("sigsoftmax", *way) for name, way in mixture.ways.items()
    }
    errors = relative_errors(losses, of_deviations(make))
    machine.empty_cache()
    problem = make(has_bias=False)
    assert problem.weight is not None
    steps: dict[str, Step] = {FLOOR: three_products(problem.hidden, problem.weight)}
    if mixture.is_small:
        steps[f"{FLOOR} in a CUDA graph"] = machine.captured(steps[FLOOR])
    if mixture.has_plain:
        steps["torch MoS"] = step_of(lambda p: _plain("softmax", p), problem)
        steps["torch MoSS"] = step_of(lambda p: _plain("sigsoftmax", p), problem)
    for name, loss in losses.items():
        steps[name] = step_of(loss.loss, problem)
        if mixture.is_small:
            steps[f"{name}, in a CUDA graph"] = machine.captured(steps[name])
    case = gpu_case(
        name="mixture cross-entropy, {} products, N={} K={} d={} V={}".format(mixture.products, *mixture.shape),
        baseline=FLOOR,
        implementations=steps,
        targets=mixture.targets,
    )
    return machine.measured(case, rounds, errors=errors, has_host_times=mixture.is_small)


def _plain(function: str, p: Problem) -> Tensor:
    assert p.weight is not None
    assert p.prior is not None
    return torch_mixture(function, p.hidden, p.prior, p.weight, p.target)
