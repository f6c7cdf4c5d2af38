"""Speed, memory and gradient errors of the losses on a CUDA device, side by side with torch and with peers.

`python benchmarks/gpu.py` measures all cases in one process, forward + backward. Liger and cut-cross-entropy take part
where they can be imported, and are left out with a word where not. Writes records to benchmarks/records/gpu.jsonl, from
which `python benchmarks/write_docs.py` makes the tables of docs/benchmarks.md. Without installing the package:
PYTHONPATH=src python benchmarks/gpu.py.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import (
    RECORDS,
    Case,
    Measurement,
    Products,
    Step,
    environment,
    gpu_milliseconds,
    gpu_peak_mib,
    table,
    take_turns,
)
from torch import Tensor
from torch.nn import functional as F

import sigsoftmax
from sigsoftmax import records

DEVICE = "cuda"
Losses = dict[str, Callable[[], Tensor]]
SPREADS = (1.0, 3.0)
"""standard deviations of the logits at which gradients are judged"""


def peers() -> dict[str, Any]:
    """The losses of other packages, those that can be imported."""
    found: dict[str, Any] = {}
    try:
        from liger_kernel.ops import LigerCrossEntropyFunction, LigerFusedLinearCrossEntropyFunction

        found["liger logits"] = lambda z, y: LigerCrossEntropyFunction.apply(
            z, y, None, -100, 0.0, 0.0, "mean", None, False
        )[0]
        found["liger linear"] = lambda x, w, y: LigerFusedLinearCrossEntropyFunction.apply(x, w, y)[0]
    except Exception as error:  # whatever an import may raise, the others are measured
        print(f"Liger is left out: {error}")
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["cce"] = lambda x, w, y: linear_cross_entropy(x, w, y, impl="cce")
    except Exception as error:
        print(f"cut-cross-entropy is left out: {error}")
    return found


def naive_sigsoftmax(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits + F.logsigmoid(logits), target)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False)


def works(name: str, loss: Callable[[], Tensor]) -> bool:
    """Whether an implementation runs here; a peer may not support this torch, and then says why."""
    try:
        loss().backward()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{name} is left out: {str(error).strip().splitlines()[-1][:120] if str(error) else type(error)}")
        return False
    return True


def logits_case(other: Mapping[str, Any]) -> Case:
    tokens, classes = 8192, 128_256
    logits = torch.randn(tokens, classes, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(classes, (tokens,), device=DEVICE)
    fast_softmax, fast_sigsoftmax = compiled(F.cross_entropy), compiled(naive_sigsoftmax)
    losses: Losses = {
        "torch softmax": lambda: F.cross_entropy(logits, target),
        "torch.compile softmax": lambda: fast_softmax(logits, target),
        "torch naive sigsoftmax": lambda: naive_sigsoftmax(logits, target),
        "torch.compile naive sigsoftmax": lambda: fast_sigsoftmax(logits, target),
    }
    if "liger logits" in other:
        # Liger overwrites its input; the copy is not timed, since its next input is whatever it left.
        scratch = logits.detach().clone().requires_grad_()
        losses["Liger softmax, in place"] = lambda: other["liger logits"](scratch, target)
    for function in ("softmax", "sigsoftmax", "gss(k=0.2)", "shifted_sigsoftmax(b=1)", "relu", "softcap"):
        losses[f"ours {function}"] = lambda function=function: sigsoftmax.cross_entropy(
            logits, target, function=function
        )
    return Case(
        suite="gpu",
        name=f"cross-entropy of bf16 logits, N={tokens} V={classes}",
        baseline="torch.compile softmax",
        implementations={n: Step(loss, [logits]) for n, loss in losses.items() if works(n, loss)},
        targets={"ours sigsoftmax": "<= 1.6 ms, <= 1.03x of ours softmax, aim 1.25 ms"},
    )


def linear_inputs(
    tokens: int, features: int, classes: int, dtype: torch.dtype, spread: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden vectors, weight and targets whose logits have the standard deviation ``spread``."""
    hidden = torch.randn(tokens, features, device=DEVICE).to(dtype).requires_grad_()
    weight = (torch.randn(classes, features, device=DEVICE) * (spread / features**0.5)).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(classes, (tokens,), device=DEVICE)


OURS = {
    # name, function, how the weight's gradient is summed, MiB of the slab
    "ours sigsoftmax, fast": ("sigsoftmax", "fast", 512),
    "ours sigsoftmax, fast, 1 GiB": ("sigsoftmax", "fast", 1000),
    "ours sigsoftmax, exact": ("sigsoftmax", "exact", 300),
    "ours softmax, fast": ("softmax", "fast", 512),
}


def linear_loss(name: str, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    function, weight_gradient, mib = OURS[name]
    return sigsoftmax.linear_cross_entropy(
        hidden, weight, target, function=function, weight_gradient=weight_gradient, chunk_bytes=mib * 2**20
    )


def linear_case(tokens: int, features: int, classes: int, targets: Mapping[str, str], other: Mapping[str, Any]) -> Case:
    hidden, weight, target = linear_inputs(tokens, features, classes, torch.bfloat16)
    leaves = [hidden, weight]
    fast_softmax = compiled(lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y))
    losses: Losses = {
        "torch softmax": lambda: F.cross_entropy(F.linear(hidden, weight).float(), target),
        "torch.compile softmax": lambda: fast_softmax(hidden, weight, target),
    }
    for name, key in (("Liger softmax", "liger linear"), ("cut-cross-entropy softmax", "cce")):
        if key in other:
            losses[name] = lambda key=key: other[key](hidden, weight, target)
    for name in OURS:
        losses[name] = lambda name=name: linear_loss(name, hidden, weight, target)
    return Case(
        suite="gpu",
        name=f"linear cross-entropy, bf16, N={tokens} d={features} V={classes}",
        baseline="torch.compile softmax",
        implementations={n: Step(loss, leaves) for n, loss in losses.items() if works(n, loss)},
        targets=targets,
    )


def autocast_case(tokens: int, features: int, classes: int, target_text: str) -> Case:
    """float32 weights whose products run in bf16; the bf16 copy of the weight counts as memory here."""
    hidden, weight, target = linear_inputs(tokens, features, classes, torch.float32)
    leaves = [hidden, weight]
    fast_softmax = compiled(lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y))

    def under_autocast(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.autocast(DEVICE, torch.bfloat16):
                return loss()

        return run

    losses: Losses = {
        "torch.compile softmax": lambda: fast_softmax(hidden, weight, target),
        "ours sigsoftmax": lambda: sigsoftmax.linear_cross_entropy(hidden, weight, target, function="sigsoftmax"),
        "ours softmax": lambda: sigsoftmax.linear_cross_entropy(hidden, weight, target, function="softmax"),
    }
    return Case(
        suite="gpu",
        name=f"linear cross-entropy, float32 weights under bf16 autocast, N={tokens} d={features} V={classes}",
        baseline="torch.compile softmax",
        implementations={name: Step(under_autocast(loss), leaves) for name, loss in losses.items()},
        targets={"ours sigsoftmax": target_text},
    )


class Replay(Step):
    """A step captured in a CUDA graph."""

    def __call__(self) -> None:
        self.loss()


def small_case() -> Case:
    hidden, weight, target = linear_inputs(1400, 400, 10_000, torch.bfloat16)
    leaves = [hidden, weight]

    def ours(function: str) -> Tensor:
        return sigsoftmax.linear_cross_entropy(hidden, weight, target, function=function)

    losses: Losses = {
        "torch softmax": lambda: F.cross_entropy(F.linear(hidden, weight).float(), target),
        "ours sigsoftmax": lambda: ours("sigsoftmax"),
        "ours softmax": lambda: ours("softmax"),
    }
    steps: dict[str, Step] = {name: Step(loss, leaves) for name, loss in losses.items()}
    for name in tuple(losses):
        steps[f"{name}, CUDA graph"] = captured(steps[name])
    return Case(
        suite="gpu",
        name="linear cross-entropy, bf16, N=1400 d=400 V=10000",
        baseline="torch softmax",
        implementations=steps,
        targets={"ours sigsoftmax": "<= 0.35 ms", "ours sigsoftmax, CUDA graph": "<= 0.2 ms"},
    )


def captured(step: Step) -> Replay:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return Replay(lambda: graph.replay() or torch.empty(0), [])


def plain_mixture(hidden: Tensor, prior_logits: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    prior = torch.softmax(prior_logits.float(), -1)
    components = torch.softmax(F.linear(hidden, weight).float(), -1)
    return F.nll_loss(torch.log((components * prior.unsqueeze(-1)).sum(-2)), target)


def mixture_case(
    tokens: int, components: int, features: int, classes: int, *, plain: bool, targets: Mapping[str, str]
) -> Case:
    hidden = torch.tanh(torch.randn(tokens, components, features, device=DEVICE)).bfloat16().requires_grad_()
    prior_logits = torch.randn(tokens, components, device=DEVICE, requires_grad=True)
    _, weight, target = linear_inputs(tokens, features, classes, torch.bfloat16)
    leaves = [hidden, prior_logits, weight]
    products = three_products(hidden, weight)
    steps: dict[str, Step] = {"three matrix products alone": products}
    if plain:
        steps["torch MoS"] = Step(lambda: plain_mixture(hidden, prior_logits, weight, target), leaves)
    for name, weight_gradient in (("fast", "fast"), ("float32 buffer", "buffered"), ("exact", "exact")):
        steps[f"ours MoSS, {name}"] = Step(
            lambda weight_gradient=weight_gradient: sigsoftmax.mixture_cross_entropy(
                hidden, prior_logits, weight, target, function="sigsoftmax", weight_gradient=weight_gradient
            ),
            leaves,
        )
    return Case(
        suite="gpu",
        name=f"mixture cross-entropy, bf16, N={tokens} K={components} d={features} V={classes}",
        baseline="three matrix products alone",
        implementations=steps,
        targets=targets,
    )


def three_products(hidden: Tensor, weight: Tensor, rows: int = 4096) -> Products:
    rows_Rd, weight_Vd = hidden.detach().flatten(0, -2), weight.detach()
    slab = torch.randn(min(rows, rows_Rd.shape[0]), weight_Vd.shape[0], device=DEVICE).to(weight.dtype)
    by_weight = torch.zeros_like(weight_Vd)

    def run() -> Tensor:
        for first in range(0, rows_Rd.shape[0], rows):
            chunk = rows_Rd[first : first + rows]
            logits = torch.mm(chunk, weight_Vd.t(), out=slab[: chunk.shape[0]])
            torch.mm(logits, weight_Vd)
            by_weight.addmm_(logits.t(), chunk)
        return by_weight

    return Products(run, [])


def gradient_errors(tokens: int, features: int, classes: int) -> dict[str, float]:
    """For each of ours, the worst over both gradients and both spreads of its error relative to torch's."""
    worst: dict[str, float] = {}
    for spread in SPREADS:
        hidden, weight, target = linear_inputs(tokens, features, classes, torch.bfloat16, spread)
        for function in ("softmax", "sigsoftmax"):
            truth = exact_gradients(hidden, weight, target, function)
            transform = F.logsigmoid if function == "sigsoftmax" else torch.zeros_like
            logits = F.linear(hidden, weight).float()
            plain = F.cross_entropy(logits + transform(logits), target)
            expected = errors(torch.autograd.grad(plain, [hidden, weight]), truth)
            del logits, plain
            for name, (own_function, _, _) in OURS.items():
                if own_function == function:
                    own = torch.autograd.grad(linear_loss(name, hidden, weight, target), [hidden, weight])
                    ratio = max(a / b for a, b in zip(errors(own, truth), expected, strict=True))
                    worst[name] = max(worst.get(name, 0.0), ratio)
    return worst


def exact_gradients(hidden: Tensor, weight: Tensor, target: Tensor, function: str) -> list[Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    total = [torch.zeros_like(t) for t in leaves]
    for first in range(0, hidden.shape[0], 1024):
        rows = slice(first, first + 1024)
        logits = F.linear(leaves[0][rows], leaves[1])
        log_g = logits + F.logsigmoid(logits) if function == "sigsoftmax" else logits
        loss = F.cross_entropy(log_g, target[rows], reduction="sum") / hidden.shape[0]
        for own, gradient in zip(total, torch.autograd.grad(loss, leaves), strict=True):
            own += gradient
    return total


def errors(gradients: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    return [float((g.double() - t).norm() / t.norm()) for g, t in zip(gradients, truth, strict=True)]


BIG = {
    "ours sigsoftmax, fast": "<= 1.05x, <= 600 MiB, aim 1.02x",
    "ours sigsoftmax, exact": "<= 1.3x, <= 450 MiB",
}


def jobs(other: Mapping[str, Any]) -> dict[str, Callable[[], list[Measurement]]]:
    def measure(
        make: Callable[[], Case], rounds: int, judged: Callable[[], dict[str, float]] | None = None
    ) -> Callable[[], list[Measurement]]:
        def run() -> list[Measurement]:
            found = judged() if judged else {}
            torch.cuda.empty_cache()
            case = make()
            # A graph's memory is its own, and what overwrites its input has no gradient to set apart.
            peaks = {
                name: None if isinstance(step, Replay) or "in place" in name else gpu_peak_mib(step)
                for name, step in case.implementations.items()
            }
            return take_turns(
                case, rounds=rounds, milliseconds_of=gpu_milliseconds, peak_mib=peaks, gradient_error=found
            )

        return run

    big, wide = (8192, 4096, 128_256), (8192, 2304, 256_000)
    return {
        "logits": measure(lambda: logits_case(other), 15),
        "linear 128256": measure(lambda: linear_case(*big, BIG, other), 15, lambda: gradient_errors(*big)),
        "linear 256000": measure(lambda: linear_case(*wide, BIG, other), 15, lambda: gradient_errors(*wide)),
        "autocast 128256": measure(lambda: autocast_case(*big, "<= 1.05x"), 15),
        "autocast 256000": measure(lambda: autocast_case(*wide, "<= 1.1x"), 15),
        "small": measure(small_case, 15),
        "mixture 10000": measure(
            lambda: mixture_case(
                840, 15, 280, 10_000, plain=True, targets={"ours MoSS, fast": "<= 1.5 ms, <= 100 MiB"}
            ),
            15,
        ),
        "mixture 32000": measure(
            lambda: mixture_case(
                8192, 4, 2048, 32_000, plain=True, targets={"ours MoSS, float32 buffer": "<= 1.15x, <= 600 MiB"}
            ),
            10,
        ),
        "mixture 128256": measure(
            lambda: mixture_case(8192, 4, 2048, 128_256, plain=False, targets={"ours MoSS, float32 buffer": "<= 1.2x"}),
            7,
        ),
    }


@contextlib.contextmanager
def stopwatch(label: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    print(f"({label}: {time.perf_counter() - start:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the cases whose label contains this, as in 'linear'")
    parser.add_argument(
        "--out", type=Path, help="records are written here, anew (default: benchmarks/records/gpu.jsonl)"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device, and torch finds none")
    warnings.filterwarnings("ignore", message=".*(TF32|Online softmax).*")
    torch.manual_seed(0)
    chosen = jobs(peers())
    labels = [label for label in chosen if options.only in label]
    if not labels:
        parser.error(f"--only {options.only!r} is part of no label; the labels are: {', '.join(chosen)}")
    out = options.out or (None if options.only else RECORDS / "gpu.jsonl")
    if out is not None:
        out.unlink(missing_ok=True)
    where = environment(DEVICE)
    for label in labels:
        with stopwatch(label):
            measured = chosen[label]()
            print(f"\n{measured[0].case}\n{table(measured)}", flush=True)
        if out is not None:
            records.append(out, [records.Record.of(m, where) for m in measured])


if __name__ == "__main__":
    main()
