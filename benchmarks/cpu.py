"""Speed and memory of the losses on a CPU, side by side with plain torch: `make bench-cpu`.

Every figure is forward + backward in float32. A full run writes records to benchmarks/records/cpu.jsonl, from which
`python benchmarks/write_docs.py` makes the tables and pictures of docs/benchmark-tables.md.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from measuring import (
    MEMBERS,
    RECORDS,
    Case,
    Measurement,
    Products,
    Step,
    cpu_milliseconds,
    cpu_peak_mib,
    measured_once,
    show_and_store,
    take_turns,
)
from torch import Tensor
from torch.nn import functional as F

import sigsoftmax
from sigsoftmax import OutputFunction

Loss = Callable[..., Tensor]


def naive_sigsoftmax(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits + F.logsigmoid(logits), target)


def has_compiler() -> bool:
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def logits_case(tokens: int, classes: int, *, compiled: bool = True) -> Case:
    logits = torch.randn(tokens, classes, requires_grad=True)
    target = torch.randint(classes, (tokens,))
    losses: dict[str, Loss] = {
        "torch softmax": lambda: F.cross_entropy(logits, target),
        "torch naive sigsoftmax": lambda: naive_sigsoftmax(logits, target),
    }
    if compiled:
        # For this shape alone: a second one would otherwise be compiled, and judged, for any shape.
        compiled_softmax = torch.compile(F.cross_entropy, dynamic=False)
        compiled_sigsoftmax = torch.compile(naive_sigsoftmax, dynamic=False)
        losses["torch.compile softmax"] = lambda: compiled_softmax(logits, target)
        losses["torch.compile naive sigsoftmax"] = lambda: compiled_sigsoftmax(logits, target)
    for function in (*MEMBERS, "gss(k=0)"):
        losses[f"ours {function}"] = lambda function=function: sigsoftmax.cross_entropy(
            logits, target, function=function
        )
    steps = {name: Step(loss, [logits]) for name, loss in losses.items()}
    for name, function in learned_functions(classes).items():
        loss = functools.partial(sigsoftmax.cross_entropy, logits, target, function=function)
        steps[f"ours {name}"] = Step(loss, [logits, *(function.parameters[key] for key in function.kinds)])
    members = [name for name in steps if name.startswith("ours ")]
    return Case(
        suite="cpu",
        name=f"cross-entropy of logits, N={tokens} V={classes}",
        baseline="torch softmax",
        implementations=steps,
        targets=dict.fromkeys(members[1:], "<= 2x of ours softmax") | {"ours sigsoftmax": "<= 1.0x, aim 0.6x"},
    )


def learned_functions(classes: int) -> dict[str, OutputFunction]:
    """Members with parameters that receive gradients, by the names of their rows."""

    def parameter(value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, requires_grad=True)

    return {
        "softmax with learned alpha": OutputFunction("softmax", alpha=parameter(1.0)),
        "shifted_sigsoftmax with learned b": OutputFunction("shifted_sigsoftmax", b=parameter(0.0)),
        "shifted_sigsoftmax, learned per class": OutputFunction("shifted_sigsoftmax", b=parameter(0.0, classes)),
        "gss with learned k": OutputFunction("gss", k=parameter(0.5)),
        "gss with learned k and c": OutputFunction("gss", k=parameter(0.5), c=parameter(0.0)),
        "gss with learned k and c per class": OutputFunction("gss", k=parameter(0.5), c=parameter(0.0, classes)),
    }


def linear_case(tokens: int, features: int, classes: int) -> Case:
    hidden = torch.randn(tokens, features, requires_grad=True)
    weight = (torch.randn(classes, features) / features**0.5).requires_grad_()
    target = torch.randint(classes, (tokens,))
    losses: dict[str, Loss] = {
        "torch softmax": lambda: F.cross_entropy(F.linear(hidden, weight), target),
        "torch naive sigsoftmax": lambda: naive_sigsoftmax(F.linear(hidden, weight), target),
    }
    if hasattr(F, "linear_cross_entropy"):
        losses["torch F.linear_cross_entropy"] = lambda: F.linear_cross_entropy(hidden, weight, target)
    for function in ("softmax", "sigsoftmax", "gss(k=0.2)"):
        losses[f"ours {function}"] = lambda function=function: sigsoftmax.linear_cross_entropy(
            hidden, weight, target, function=function
        )
    leaves = [hidden, weight]
    return Case(
        suite="cpu",
        name=f"linear cross-entropy, N={tokens} d={features} V={classes}",
        baseline="torch softmax",
        implementations={
            **{name: Step(loss, leaves) for name, loss in losses.items()},
            FLOOR: three_products(hidden, weight),
        },
        targets={"ours sigsoftmax": "<= 0.95x, <= 64 MiB"},
    )


FLOOR = "three matrix products alone"


def three_products(hidden: Tensor, weight: Tensor, chunk_bytes: int = 32 * 2**20) -> Products:
    """Logits and the gradients of both factors, a chunk of rows at a time, as the linear loss needs them."""
    rows_Rd, weight_Vd = hidden.detach().flatten(0, -2), weight.detach()
    step = max(1, chunk_bytes // (4 * weight_Vd.shape[0]))
    buffer = torch.randn(step, weight_Vd.shape[0])
    by_rows, by_weight = torch.empty_like(rows_Rd), torch.zeros_like(weight_Vd)

    def run() -> Tensor:
        for first in range(0, rows_Rd.shape[0], step):
            rows = rows_Rd[first : first + step]
            logits = torch.mm(rows, weight_Vd.t(), out=buffer[: rows.shape[0]])
            torch.mm(logits, weight_Vd, out=by_rows[first : first + step])
            by_weight.addmm_(logits.t(), rows)
        return by_weight

    return Products(run, [])


def plain_mixture(hidden: Tensor, prior_logits: Tensor, weight: Tensor, target: Tensor, *, sig: bool) -> Tensor:
    """MoS or MoSS as it is usually written, floor included."""

    def transformed(logits: Tensor) -> Tensor:
        return logits + F.logsigmoid(logits) if sig else logits

    prior = torch.softmax(transformed(prior_logits), -1)
    components = torch.softmax(transformed(F.linear(hidden, weight)), -1)
    mixed = (components * prior.unsqueeze(-1)).sum(-2)
    return F.nll_loss(torch.log(mixed + 1e-8), target)


def mixture_case(tokens: int, components: int, features: int, classes: int) -> Case:
    hidden = torch.tanh(torch.randn(tokens, components, features)).requires_grad_()
    prior_logits = torch.randn(tokens, components, requires_grad=True)
    weight = (torch.randn(classes, features) / features**0.5).requires_grad_()
    target = torch.randint(classes, (tokens,))
    losses: dict[str, Loss] = {
        "torch MoS": lambda: plain_mixture(hidden, prior_logits, weight, target, sig=False),
        "torch MoSS": lambda: plain_mixture(hidden, prior_logits, weight, target, sig=True),
    }
    for name, function in (("MoS", "softmax"), ("MoSS", "sigsoftmax")):
        losses[f"ours {name}"] = lambda function=function: sigsoftmax.mixture_cross_entropy(
            hidden, prior_logits, weight, target, function=function, floor=1e-8
        )
    leaves = [hidden, prior_logits, weight]
    return Case(
        suite="cpu",
        name=f"mixture cross-entropy, N={tokens} K={components} d={features} V={classes}",
        baseline="torch MoS",
        implementations={
            **{name: Step(loss, leaves) for name, loss in losses.items()},
            FLOOR: three_products(hidden, weight),
        },
        targets=dict.fromkeys(("ours MoS", "ours MoSS"), "<= 0.4x, <= 1/10 of the memory"),
    )


def flat_memory(sizes: tuple[int, ...], features: int, classes: int) -> Iterator[Measurement]:
    """Peak memory of the linear loss as the number of tokens grows."""
    weight = (torch.randn(classes, features) / features**0.5).requires_grad_()
    for tokens in sizes:
        hidden = torch.randn(tokens, features, requires_grad=True)
        target = torch.randint(classes, (tokens,))
        loss = functools.partial(sigsoftmax.linear_cross_entropy, hidden, weight, target, function="sigsoftmax")
        step = Step(loss, [hidden, weight])
        peak_mib = cpu_peak_mib(step)
        yield measured_once(
            "cpu",
            f"memory as N grows, linear cross-entropy, d={features} V={classes}",
            f"ours sigsoftmax, N={tokens}",
            cpu_milliseconds(step),
            peak_mib=peak_mib,
            target="flat, <= 64 MiB",
        )


def measured_case(case: Case, rounds: int) -> list[Measurement]:
    peaks = {name: cpu_peak_mib(step) for name, step in case.implementations.items()}
    return take_turns(case, rounds=rounds, milliseconds_of=cpu_milliseconds, peak_mib=peaks)


def jobs(rounds: int, *, compiled: bool) -> dict[str, Callable[[], list[Measurement]]]:
    long = max(3, rounds // 3)
    return {
        "logits 10000": lambda: measured_case(logits_case(1400, 10_000, compiled=compiled), rounds),
        "logits 32000": lambda: measured_case(logits_case(2048, 32_000, compiled=compiled), rounds),
        "linear": lambda: measured_case(linear_case(2048, 512, 32_000), long),
        "mixture": lambda: measured_case(mixture_case(840, 15, 280, 10_000), long),
        "memory": lambda: list(flat_memory((1_000, 10_000, 50_000), 64, 32_000)),
    }


def smoke_jobs() -> dict[str, Callable[[], list[Measurement]]]:
    return {
        "logits": lambda: measured_case(logits_case(8, 50, compiled=False), 2),
        "linear": lambda: measured_case(linear_case(8, 4, 50), 2),
        "mixture": lambda: measured_case(mixture_case(8, 3, 4, 50), 2),
        "memory": lambda: list(flat_memory((8, 16), 4, 50)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of each case (default: 15)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--only", default="", help="run the cases whose label contains this, as in 'logits 10000'")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny cases: shows that the command works, measures nothing"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="records are written here; earlier ones of a case stay if they have implementations that these lack "
        "(default: benchmarks/records/cpu.jsonl if all cases run in full size)",
    )
    options = parser.parse_args()
    if options.out is None and not (options.only or options.smoke):
        options.out = RECORDS / "cpu.jsonl"
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message=".*TF32.*")

    if not (compiled := has_compiler()):
        print("torch.compile is left out: it needs a C++ compiler, and none was found")
    chosen = smoke_jobs() if options.smoke else jobs(options.rounds, compiled=compiled)
    labels = [label for label in chosen if options.only in label]
    if not labels:
        parser.error(f"--only {options.only!r} is part of no label; the labels are: {', '.join(chosen)}")
    show_and_store((chosen[label]() for label in labels), options.out)


if __name__ == "__main__":
    main()
