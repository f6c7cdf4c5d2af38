"""Speed and memory of the losses on a CPU, side by side with plain torch: `make bench-cpu`.

Every figure is forward + backward in float32. Writes records to benchmarks/records/cpu.jsonl, from which
`python benchmarks/write_docs.py` makes the tables of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from measuring import RECORDS, Case, Measurement, cpu_milliseconds, cpu_peak_mib, table, take_turns
from torch import Tensor
from torch.nn import functional as F

import sigsoftmax
from sigsoftmax import records

Loss = Callable[..., Tensor]


def naive_sigsoftmax(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits + F.logsigmoid(logits), target)


def has_compiler() -> bool:
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def backward_of(loss: Loss, leaves: Sequence[Tensor]) -> Callable[[], None]:
    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss().backward()

    return run


def logits_case(tokens: int, classes: int) -> tuple[Case, Sequence[Tensor]]:
    logits = torch.randn(tokens, classes, requires_grad=True)
    target = torch.randint(classes, (tokens,))
    losses: dict[str, Loss] = {
        "torch softmax": lambda: F.cross_entropy(logits, target),
        "torch naive sigsoftmax": lambda: naive_sigsoftmax(logits, target),
    }
    if has_compiler():
        compiled_softmax = torch.compile(F.cross_entropy)
        compiled_sigsoftmax = torch.compile(naive_sigsoftmax)
        losses["torch.compile softmax"] = lambda: compiled_softmax(logits, target)
        losses["torch.compile naive sigsoftmax"] = lambda: compiled_sigsoftmax(logits, target)
    for function in ("softmax", "sigsoftmax", "gss(k=0.2)", "shifted_sigsoftmax(b=1)", "sigmoid", "relu", "softcap"):
        losses[f"ours {function}"] = lambda function=function: sigsoftmax.cross_entropy(
            logits, target, function=function
        )
    per_class = sigsoftmax.OutputFunction("shifted_sigsoftmax", b=torch.zeros(classes, requires_grad=True))
    losses["ours shifted_sigsoftmax, learned per class"] = lambda: sigsoftmax.cross_entropy(
        logits, target, function=per_class
    )
    return Case(
        suite="cpu",
        name=f"cross-entropy of logits, N={tokens} V={classes}",
        baseline="torch softmax",
        implementations={name: backward_of(loss, [logits]) for name, loss in losses.items()},
        targets={"ours sigsoftmax": "<= 1.0x, aim 0.6x"},
    ), [logits]


def linear_case(tokens: int, features: int, classes: int) -> tuple[Case, Sequence[Tensor]]:
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
        implementations={name: backward_of(loss, leaves) for name, loss in losses.items()},
        targets={"ours sigsoftmax": "<= 0.95x, <= 64 MiB"},
    ), leaves


def plain_mixture(hidden: Tensor, prior_logits: Tensor, weight: Tensor, target: Tensor, *, sig: bool) -> Tensor:
    """MoS or MoSS as it is usually written, floor included."""

    def transformed(logits: Tensor) -> Tensor:
        return logits + F.logsigmoid(logits) if sig else logits

    prior = torch.softmax(transformed(prior_logits), -1)
    components = torch.softmax(transformed(F.linear(hidden, weight)), -1)
    mixed = (components * prior.unsqueeze(-1)).sum(-2)
    return F.nll_loss(torch.log(mixed + 1e-8), target)


def mixture_case(tokens: int, components: int, features: int, classes: int) -> tuple[Case, Sequence[Tensor]]:
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
        implementations={name: backward_of(loss, leaves) for name, loss in losses.items()},
        targets=dict.fromkeys(("ours MoS", "ours MoSS"), "<= 0.4x, <= 1/10 of the memory"),
    ), leaves


def flat_memory(features: int, classes: int) -> Iterator[Measurement]:
    """Peak memory of the linear loss as the number of tokens grows."""
    weight = (torch.randn(classes, features) / features**0.5).requires_grad_()
    for tokens in (1_000, 10_000, 50_000):
        hidden = torch.randn(tokens, features, requires_grad=True)
        target = torch.randint(classes, (tokens,))
        run = backward_of(
            lambda hidden=hidden, target=target: sigsoftmax.linear_cross_entropy(
                hidden, weight, target, function="sigsoftmax"
            ),
            [hidden, weight],
        )
        milliseconds = cpu_milliseconds(run)
        yield Measurement(
            suite="cpu",
            case=f"memory as N grows, linear cross-entropy, d={features} V={classes}",
            implementation=f"ours sigsoftmax, N={tokens}",
            baseline=f"ours sigsoftmax, N={tokens}",
            milliseconds=milliseconds,
            milliseconds_quartiles=(milliseconds, milliseconds),
            ratio=1.0,
            ratio_quartiles=(1.0, 1.0),
            peak_mib=cpu_peak_mib(run, [hidden, weight]),
            rounds=1,
            target="flat, <= 64 MiB",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of each case (default: 15)")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--out", type=Path, default=RECORDS / "cpu.jsonl", help="records are written here, anew")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message=".*TF32.*")

    makers: list[tuple[str, Callable[[], tuple[Case, Sequence[Tensor]]]]] = [
        ("logits 10000", lambda: logits_case(1400, 10_000)),
        ("logits 32000", lambda: logits_case(2048, 32_000)),
        ("linear", lambda: linear_case(2048, 512, 32_000)),
        ("mixture", lambda: mixture_case(840, 15, 280, 10_000)),
    ]
    measurements: list[Measurement] = []
    for label, make in makers:
        if options.only and options.only not in label:
            continue
        case, leaves = make()
        print(f"\n{case.name}", flush=True)
        peaks = {name: cpu_peak_mib(run, leaves) for name, run in case.implementations.items()}
        rounds = options.rounds if label.startswith("logits") else max(3, options.rounds // 3)
        measured = take_turns(case, rounds=rounds, milliseconds_of=cpu_milliseconds, peak_mib=peaks)
        print(table(measured), flush=True)
        measurements += measured
    if not options.only or options.only in "memory":
        measured = list(flat_memory(64, 32_000))
        print(f"\n{measured[0].case}\n{table(measured)}", flush=True)
        measurements += measured
    if measurements and not options.only:
        options.out.unlink(missing_ok=True)
        environment = records.Environment.here()
        records.append(options.out, [records.Record.of(m, environment) for m in measurements])
        print(f"\n{len(measurements)} records in {options.out}")


if __name__ == "__main__":
    main()
