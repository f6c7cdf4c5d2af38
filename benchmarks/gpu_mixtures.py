"""Cases of the GPU benchmark on mixtures of components that share an output matrix: training steps, and decoding.

Shapes: N tokens, K components, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from gpu_linear import FLOOR, of_deviations, three_products
from gpu_losses import ours_mixture, step_of, torch_mixture
from gpu_machine import Machine, float32_products, gpu_case
from gpu_problems import Implementation, Problem, log_g, mixture_problem, relative_errors
from measuring import Measurement, Products, Step
from torch import Tensor
from torch.nn import functional as F

import sigsoftmax

Shape = tuple[int, int, int, int]
"""N, K, d, V"""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A case: its shape, the ways of ours, and what they should reach."""

    shape: Shape
    ways: Mapping[str, tuple[str, float | None]]
    """the way to sum the weight's gradient, and MiB of logits at a time (None: the default), by name"""
    targets: Mapping[str, str]
    products: str = "bf16"
    """`float32`, `TF32` or `bf16`"""
    has_plain: bool = True
    """True if plain torch fits into memory"""
    is_small: bool = False
    """True if the host's time counts"""


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


DECODING_FLOOR = "one product of N K rows"
DECODING_TARGET = "<= 1.2x"


class Forward(Products):
    """A forward pass in which nothing wants a gradient."""


def decoding_step(machine: Machine, shape: Shape, rounds: int) -> list[Measurement]:
    """The logits of one position for each head, from the vectors that are multiplied by the output matrix.

    A single function takes a product of N rows, a mixture one of N K.
    """
    problem = mixture_problem(machine.device, *shape)
    assert problem.weight is not None
    assert problem.prior is not None
    latent_NKd, prior_NK, weight_Vd = (t.detach() for t in (problem.hidden, problem.prior, problem.weight))
    hidden_Nd = latent_NKd[:, 0].contiguous()

    def log_probs(function: str) -> tuple[Tensor, Tensor]:
        # The result in float32, as a patched model asks for it.
        with torch.autocast(machine.device, weight_Vd.dtype):
            log_p, extras = sigsoftmax.mixture_log_probs(
                latent_NKd, prior_NK, weight_Vd, function=function, extras=["log_normalizer"]
            )
        assert extras.log_normalizer is not None
        return log_p, extras.log_normalizer

    def logits(function: str) -> Tensor:
        log_p, log_normalizer = log_probs(function)
        return log_p + (sigsoftmax.probs(prior_NK, function=function) * log_normalizer).sum(-1, keepdim=True)

    def plain(function: str) -> Tensor:
        log_f = torch.log_softmax(log_g(function, F.linear(latent_NKd, weight_Vd).float()), -1)
        log_prior = torch.log_softmax(log_g(function, prior_NK), -1)
        return torch.logsumexp(log_prior.unsqueeze(-1) + log_f, 1)

    heads: dict[str, Callable[[], Tensor]] = {
        DECODING_FLOOR: lambda: F.linear(latent_NKd.flatten(0, 1), weight_Vd),
        "softmax: a product of N rows": lambda: F.linear(hidden_Nd, weight_Vd),
        "sigsoftmax: the same, and phi": lambda: log_g("sigsoftmax", F.linear(hidden_Nd, weight_Vd).float()),
    }
    for name, function in (("MoS", "softmax"), ("MoSS", "sigsoftmax")):
        heads |= {
            f"torch {name}": lambda function=function: plain(function),
            f"ours {name}": lambda function=function: log_probs(function)[0],
            f"ours {name}, logits": lambda function=function: logits(function),
        }
    steps: dict[str, Step] = {name: Forward(run, []) for name, run in heads.items()}
    steps |= machine.graphs(steps)
    targets = {
        f"ours {name} in a CUDA graph": f"{DECODING_TARGET} of {DECODING_FLOOR} in a CUDA graph"
        for name in ("MoS", "MoSS")
    }
    case = gpu_case(
        name="decoding step, bf16, N={} K={} d={} V={}".format(*shape),
        baseline=DECODING_FLOOR,
        implementations=steps,
        targets=targets,
    )
    return machine.measured(case, rounds, has_host_times=True)
