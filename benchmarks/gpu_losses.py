"""The losses that the GPU benchmark compares: torch's, those of other packages where they can be imported, and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gpu_machine import Machine
from gpu_problems import Implementation, Problem, log_g
from measuring import MIB, Step
from torch import Tensor
from torch.nn import functional as F

import sigsoftmax

Loss = Callable[..., Tensor]


# --- torch --------------------------------------------------------------------------------------------------------


def torch_logits(function: str, logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(log_g(function, logits), target)


def torch_linear(function: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    return F.cross_entropy(log_g(function, F.linear(hidden, weight, bias).float()), target)


def torch_mixture(function: str, hidden: Tensor, prior: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """As it is usually written: the probabilities of all components are held at once."""
    shares = torch.softmax(log_g(function, prior.float()), -1)
    components = torch.softmax(log_g(function, F.linear(hidden, weight).float()), -1)
    return F.nll_loss(torch.log((components * shares.unsqueeze(-1)).sum(-2)), target)


# --- peers --------------------------------------------------------------------------------------------------------


@dataclass
class Peers:
    """Losses of other packages; None where they cannot be imported."""

    liger_logits: Loss | None = None
    """overwrites its logits"""
    liger_linear: Loss | None = None
    cut: Loss | None = None
    cut_unfiltered: Loss | None = None
    """leaves no gradient out for being small"""

    @classmethod
    def found(cls) -> Peers:
        peers = cls()
        try:
            from liger_kernel.ops import LigerCrossEntropyFunction, LigerFusedLinearCrossEntropyFunction

            peers.liger_logits = lambda logits, target: LigerCrossEntropyFunction.apply(
                logits, target, None, -100, 0.0, 0.0, "mean", None, False
            )[0]
            peers.liger_linear = lambda hidden, weight, target: LigerFusedLinearCrossEntropyFunction.apply(
                hidden, weight, target
            )[0]
        except Exception as error:  # noqa: BLE001 - whatever an import may raise, the others are measured
            print(f"Liger is left out: {error}")
        try:
            from cut_cross_entropy import linear_cross_entropy

            peers.cut = lambda hidden, weight, target: linear_cross_entropy(hidden, weight, target, impl="cce")
            peers.cut_unfiltered = lambda hidden, weight, target: linear_cross_entropy(
                hidden, weight, target, filter_eps=None, impl="cce"
            )
        except Exception as error:  # noqa: BLE001
            print(f"cut-cross-entropy is left out: {error}")
        return peers


def step_of(loss: Callable[[Problem], Tensor], problem: Problem, *more: Tensor) -> Step:
    """Forward and backward; ``more`` are leaves besides the problem's."""
    return Step(lambda: loss(problem), [*problem.leaves.values(), *more])


# --- by name ------------------------------------------------------------------------------------------------------


def logits_losses(machine: Machine, peers: Peers) -> dict[str, Implementation]:
    softmax, sigsoftmax_ = (
        machine.compiled(lambda z, y, function=function: torch_logits(function, z, y))
        for function in ("softmax", "sigsoftmax")
    )
    losses = {
        "torch softmax": Implementation("softmax", lambda p: torch_logits("softmax", p.hidden, p.target)),
        "torch.compile softmax": Implementation("softmax", lambda p: softmax(p.hidden, p.target)),
        "torch naive sigsoftmax": Implementation(
            "sigsoftmax", lambda p: torch_logits("sigsoftmax", p.hidden, p.target)
        ),
        "torch.compile naive sigsoftmax": Implementation("sigsoftmax", lambda p: sigsoftmax_(p.hidden, p.target)),
    }
    if (liger := peers.liger_logits) is not None:
        losses["Liger softmax"] = Implementation("softmax", lambda p: liger(p.hidden.clone(), p.target))
    for function in ("softmax", "sigsoftmax"):
        losses[f"ours {function}"] = Implementation(function, ours_logits(function))
    return losses


def ours_logits(function: str | sigsoftmax.OutputFunction, **options: float) -> Callable[[Problem], Tensor]:
    return lambda p: sigsoftmax.cross_entropy(p.hidden, p.target, function=function, **options)


def linear_losses(machine: Machine, peers: Peers) -> dict[str, Implementation]:
    """The losses of other packages; they take no bias."""
    losses = {
        "torch softmax": Implementation("softmax", torch_linear_of("softmax", torch_linear)),
        "torch.compile softmax": Implementation("softmax", torch_linear_of("softmax", machine.compiled(torch_linear))),
        "torch.compile naive sigsoftmax": Implementation(
            "sigsoftmax", torch_linear_of("sigsoftmax", machine.compiled(torch_linear))
        ),
    }
    if hasattr(F, "linear_cross_entropy"):
        losses["torch F.linear_cross_entropy"] = Implementation(
            "softmax", lambda p: F.linear_cross_entropy(p.hidden, p.weight, p.target)
        )
    named = {
        "Liger softmax": peers.liger_linear,
        "cut-cross-entropy softmax": peers.cut,
        "cut-cross-entropy softmax, unfiltered": peers.cut_unfiltered,
    }
    for name, loss in named.items():
        if loss is not None:
            losses[name] = Implementation("softmax", lambda p, loss=loss: loss(p.hidden, p.weight, p.target))
    return losses


def torch_linear_of(function: str, loss: Loss) -> Callable[[Problem], Tensor]:
    return lambda p: loss(function, p.hidden, p.weight, p.bias, p.target)


def ours_linear(
    function: str | sigsoftmax.OutputFunction, weight_gradient: str = "auto", chunk_mib: float | None = None
) -> Implementation:
    options = _options(function, weight_gradient, chunk_mib)
    return Implementation(
        str(function),
        lambda p: sigsoftmax.linear_cross_entropy(p.hidden, p.weight, p.target, linear_bias=p.bias, **options),
    )


def ours_mixture(function: str, weight_gradient: str = "auto", chunk_mib: float | None = None) -> Implementation:
    options = _options(function, weight_gradient, chunk_mib)
    return Implementation(
        function,
        lambda p: sigsoftmax.mixture_cross_entropy(
            p.hidden, p.prior, p.weight, p.target, linear_bias=p.bias, **options
        ),
    )


def _options(
    function: str | sigsoftmax.OutputFunction, weight_gradient: str, chunk_mib: float | None
) -> dict[str, Any]:
    chunk_bytes = None if chunk_mib is None else int(chunk_mib * MIB)
    return {"function": function, "weight_gradient": weight_gradient, "chunk_bytes": chunk_bytes}


def those_that_work(
    machine: Machine, losses: Mapping[str, Implementation], problem: Problem
) -> dict[str, Implementation]:
    """The losses that run here; of a peer that does not support this torch or device it is said why."""
    found = {}
    for name, loss in losses.items():
        try:
            problem.gradients(loss.loss)
            machine.synchronize()
        except Exception as error:  # whatever a peer raises, the others are measured
            if name.startswith("ours"):
                raise
            reason = str(error).strip().splitlines()[-1][:120] if str(error).strip() else type(error).__name__
            print(f"{name} is left out: {reason}", flush=True)
        else:
            found[name] = loss
    return found


def under_autocast(machine: Machine, implementation: Implementation) -> Implementation:
    def loss(p: Problem) -> Tensor:
        with torch.autocast(machine.device, torch.bfloat16):
            return implementation.loss(p)

    return Implementation(implementation.function, loss)
