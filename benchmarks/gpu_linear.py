"""Cases of the GPU benchmark on the linear loss: logits are the product of hidden vectors and an output matrix.

Shapes: N tokens, V classes, d features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from gpu_losses import (
    Peers,
    linear_losses,
    ours_linear,
    step_of,
    those_that_work,
    torch_linear,
    torch_linear_of,
    under_autocast,
)
from gpu_machine import Machine, gpu_case
from gpu_problems import DEVIATIONS, Implementation, Problem, linear_problem, relative_errors
from measuring import MEMBERS, MIB, Measurement, Products, Step
from torch import Tensor

from sigsoftmax import OutputFunction

Shape = tuple[int, int, int]
"""N, d, V"""
FLOOR = "three matrix products alone"
CHUNKS_OF_MODES_MIB = {"fast": 576, "large": 1000, "exact": 318, "buffered": 512}
"""Bytes of logits at a time in the modes of ours; what a user would pass as ``chunk_bytes``."""


def shape_text(shape: Shape) -> str:
    return "N={} d={} V={}".format(*shape)


def ours() -> dict[str, Implementation]:
    """Every way to sum the weight's gradient, and what a user gets who says nothing."""
    return {
        "ours sigsoftmax, fast": ours_linear("sigsoftmax", "fast", CHUNKS_OF_MODES_MIB["fast"]),
        "ours sigsoftmax, fast, 1 GiB": ours_linear("sigsoftmax", "fast", CHUNKS_OF_MODES_MIB["large"]),
        "ours sigsoftmax, exact": ours_linear("sigsoftmax", "exact", CHUNKS_OF_MODES_MIB["exact"]),
        "ours sigsoftmax, float32 buffer": ours_linear("sigsoftmax", "buffered", CHUNKS_OF_MODES_MIB["buffered"]),
        "ours sigsoftmax, default": ours_linear("sigsoftmax"),
        "ours softmax, fast": ours_linear("softmax", "fast", CHUNKS_OF_MODES_MIB["fast"]),
        "ours softmax, default": ours_linear("softmax"),
    }


def three_products(hidden: Tensor, weight: Tensor, chunk_mib: float = 1024, passes: int = 1) -> Products:
    """Logits and the gradients of both factors in the dtype of the hidden vectors, a chunk of rows at a time.

    The logits are computed in so many ``passes``: a loss that keeps none of them needs three, one for their sum and one
    for each gradient.
    """
    rows_Rd = hidden.detach().flatten(0, -2)
    weight_Vd = weight.detach().to(rows_Rd.dtype)
    rows = max(1, int(chunk_mib * MIB) // (weight_Vd.shape[0] * weight_Vd.element_size()))
    # Chunks of equal size: a last one of a few rows would be a slow product.
    count = -(-rows_Rd.shape[0] // rows)
    rows = -(-rows_Rd.shape[0] // count)
    buffer = torch.randn(rows, weight_Vd.shape[0], device=weight.device).to(weight_Vd.dtype)
    by_weight, by_rows = torch.zeros_like(weight_Vd), torch.empty_like(rows_Rd)

    def run() -> Tensor:
        for first in range(0, rows_Rd.shape[0], rows):
            chunk = rows_Rd[first : first + rows]
            for _ in range(passes):
                logits = torch.mm(chunk, weight_Vd.t(), out=buffer[: chunk.shape[0]])
            torch.mm(logits, weight_Vd, out=by_rows[first : first + rows])
            if first == 0:
                torch.mm(logits.t(), chunk, out=by_weight)
            else:
                by_weight.addmm_(logits.t(), chunk)
        return by_weight

    return Products(run, [])


CHUNKS_MIB = (64, 128, 256, 512, 1024)
"""``chunk_bytes`` of the case that sets time against memory"""
MODES = ("fast", "exact", "buffered")
"""ways to sum the gradient of a bf16 weight (``weight_gradient``)"""


def time_against_memory(
    machine: Machine, peers: Peers, shape: Shape, rounds: int, *, chunks_mib: Sequence[float] = CHUNKS_MIB
) -> list[Measurement]:
    """softmax in each mode with chunks of several sizes, beside the peers: what less memory costs in time."""
    problem = linear_problem(machine.device, *shape)
    losses = linear_losses(machine, peers) | {"ours softmax, default": ours_linear("softmax")}
    losses |= {
        f"ours softmax, {mode}, chunks of {mib:g} MiB": ours_linear("softmax", mode, mib)
        for mode in MODES
        for mib in chunks_mib
    }
    losses = {name: loss for name, loss in losses.items() if loss.function == "softmax"}
    losses = those_that_work(machine, losses, problem)
    machine.empty_cache()
    case = gpu_case(
        name=f"time against memory, linear cross-entropy, bf16, {shape_text(shape)}",
        baseline="torch.compile softmax",
        implementations={name: step_of(loss.loss, problem) for name, loss in losses.items()},
        targets={},
    )
    return machine.measured(case, rounds)


def of_deviations(make: Callable[..., Problem]) -> dict[str, Callable[[], Problem]]:
    return {
        f"deviation {deviation:g}": lambda deviation=deviation: make(deviation=deviation) for deviation in DEVIATIONS
    }


def bfloat16_weights(
    machine: Machine, peers: Peers, shape: Shape, targets: Mapping[str, str], *, peaked: bool, rounds: int
) -> list[Measurement]:
    def make(deviation: float = 1.0) -> Problem:
        return linear_problem(machine.device, *shape, deviation=deviation, peaked=peaked)

    kinds = {"peaked": make} if peaked else of_deviations(make)
    problem = make()
    losses = those_that_work(machine, linear_losses(machine, peers) | ours(), problem)
    # Plain torch is what errors are relative to.
    errors = relative_errors({name: loss for name, loss in losses.items() if name != "torch softmax"}, kinds)
    machine.empty_cache()
    steps: dict[str, Step] = {name: step_of(loss.loss, problem) for name, loss in losses.items()}
    assert problem.weight is not None
    steps[FLOOR] = three_products(problem.hidden, problem.weight)
    case = gpu_case(
        name=f"linear cross-entropy, bf16, {'peaked logits, ' if peaked else ''}{shape_text(shape)}",
        baseline="torch.compile softmax",
        implementations=steps,
        targets=targets,
    )
    return machine.measured(case, rounds, errors=errors)


def float32_weights(machine: Machine, shape: Shape, ratio: float, rounds: int) -> list[Measurement]:
    """Products in bf16 under autocast; the bf16 copy of the weight is not counted as memory."""

    def make(deviation: float = 1.0, has_bias: bool = True) -> Problem:
        return linear_problem(machine.device, *shape, deviation=deviation, dtype=torch.float32, has_bias=has_bias)

    own = {f"ours {f}": under_autocast(machine, ours_linear(f)) for f in ("sigsoftmax", "softmax")}
    errors = relative_errors(own, of_deviations(make))
    machine.empty_cache()
    compiled = Implementation("softmax", torch_linear_of("softmax", machine.compiled(torch_linear)))
    losses = {"torch.compile softmax": under_autocast(machine, compiled), **own}
    problem = make(has_bias=False)
    case = gpu_case(
        name=f"linear cross-entropy, float32 weights under bf16 autocast, {shape_text(shape)}",
        baseline="torch.compile softmax",
        implementations={name: step_of(loss.loss, problem) for name, loss in losses.items()},
        targets={
            "ours sigsoftmax": f"<= {ratio}x, <= 600 MiB, <= 1.0x torch's error",
            "ours softmax": "<= 600 MiB, <= 1.0x torch's error",
        },
    )
    _, features, classes = shape
    return machine.measured(case, rounds, errors=errors, not_counted_mib=2 * features * classes / MIB)


def small(machine: Machine, peers: Peers, shape: Shape, rounds: int) -> list[Measurement]:
    """Small losses, in which the host's time counts: in a CUDA graph and outside."""

    def make(deviation: float = 1.0) -> Problem:
        return linear_problem(machine.device, *shape, deviation=deviation)

    problem = make()
    losses = those_that_work(machine, linear_losses(machine, peers), problem)
    losses |= {"ours sigsoftmax": ours_linear("sigsoftmax"), "ours softmax": ours_linear("softmax")}
    errors = relative_errors(
        {name: loss for name, loss in losses.items() if name != "torch softmax"}, of_deviations(make)
    )
    steps = {name: step_of(loss.loss, problem) for name, loss in losses.items()}
    steps |= machine.graphs({name: steps[name] for name in ("torch softmax", "ours sigsoftmax", "ours softmax")})
    case = gpu_case(
        name=f"linear cross-entropy, bf16, {shape_text(shape)}",
        baseline="torch softmax",
        implementations=steps,
        targets={
            "ours sigsoftmax": "<= 0.35 ms, <= 1.2x torch's error",
            "ours sigsoftmax in a CUDA graph": "<= 0.2 ms",
        },
    )
    return machine.measured(case, rounds, errors=errors, has_host_times=True)


def recomputing(machine: Machine, shape: Shape, rounds: int) -> list[Measurement]:
    """The gain that a loss could have which keeps no logits but computes them again, where features are few.

    With the sums of each gradient in a fixed order it takes five products; ours is to be no slower than these alone.
    """
    problem = linear_problem(machine.device, *shape)
    assert problem.weight is not None
    five = "five matrix products alone"
    steps: dict[str, Step] = {
        five: three_products(problem.hidden, problem.weight, passes=3),
        FLOOR: three_products(problem.hidden, problem.weight),
        "ours sigsoftmax": step_of(ours_linear("sigsoftmax").loss, problem),
    }
    case = gpu_case(
        name=f"keeping a chunk of logits, or none: in CUDA graphs, bf16, {shape_text(shape)}",
        baseline=five,
        implementations={name: machine.captured(step) for name, step in steps.items()},
        targets={},
    )
    return machine.measured(case, rounds)


def members(machine: Machine, shape: Shape, rounds: int) -> list[Measurement]:
    """Every member in a linear loss, where products are most of the work: fixed, with a learned scalar, per class."""
    problem = linear_problem(machine.device, *shape)
    fixed = (*MEMBERS, "gss(k=0)")
    steps = {f"ours {function}": step_of(ours_linear(function).loss, problem) for function in fixed}
    learned = {
        "shifted_sigsoftmax with learned b": OutputFunction("shifted_sigsoftmax", b=_learned(machine)),
        "gss with learned k and c": OutputFunction("gss", k=_learned(machine, start=0.5), c=_learned(machine)),
        "shifted_sigsoftmax with learned b per class": OutputFunction(
            "shifted_sigsoftmax", b=_learned(machine, shape[-1])
        ),
    }
    for name, function in learned.items():
        leaves = [function.parameters[key] for key in function.kinds]
        steps[f"ours {name}"] = step_of(ours_linear(function).loss, problem, *leaves)
    targets = {f"ours {function}": "<= 1.04x" for function in fixed if function != "softmax"}
    case = gpu_case(
        name=f"members in linear cross-entropy, bf16, {shape_text(shape)}",
        baseline="ours softmax",
        implementations=steps,
        targets=targets | {f"ours {name}": "<= 1.06x" for name in learned if "per class" not in name},
    )
    return machine.measured(case, rounds)


def _learned(machine: Machine, *shape: int, start: float = 0.0) -> Tensor:
    return torch.full(shape, start, device=machine.device, requires_grad=True)


def beside_sigsoftmax(machine: Machine, shape: Shape, rounds: int) -> list[Measurement]:
    """softmax through our path and sigsoftmax alone, so that their ratio is taken within a round."""
    problem = linear_problem(machine.device, *shape)
    losses = {f"ours {f}": ours_linear(f, "fast", CHUNKS_OF_MODES_MIB["fast"]) for f in ("sigsoftmax", "softmax")}
    steps = {name: step_of(loss.loss, problem) for name, loss in losses.items()}
    steps |= machine.graphs(steps)
    case = gpu_case(
        name=f"softmax beside sigsoftmax, linear cross-entropy, bf16, fast, {shape_text(shape)}",
        baseline="ours sigsoftmax",
        implementations=steps,
        targets={
            "ours softmax": "no slower",
            "ours softmax in a CUDA graph": "<= 1.0x of ours sigsoftmax in a CUDA graph",
        },
    )
    return machine.measured(case, rounds)
