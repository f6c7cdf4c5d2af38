"""The persistent LSTM recurrence beside cuDNN: errors against float64, bits on repetition, microseconds per time step.

    python benchmarks/recurrence.py                       # every plan of the paper's recipes
    python benchmarks/recurrence.py --candidates 6        # and the plans that the planner ranks behind it

Times are of one direction of one layer, from CUDA graphs of 70 and of 20 steps: their difference leaves out what a
launch costs. `layer` and `cudnn` are whole layers over 70 steps, products with the input and all gradients included:
forward alone, and forward with backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from sigsoftmax.lm.recurrence.compilation import compiled
from sigsoftmax.lm.recurrence.loading import LayerKernels, describe_gpu
from sigsoftmax.lm.recurrence.operation import PATIENCE_NS, persistent_lstm
from sigsoftmax.lm.recurrence.plans import KernelPlan, LayerPlan, Refusal, feasible, plan_layer

CUDA = torch.device("cuda", 0)
STEPS = (70, 20)
CASES = (
    (1150, 20), (400, 20), (960, 12), (620, 12), (1150, 5), (650, 5), (1150, 80), (400, 80),
    (1150, 10), (400, 10), (960, 10), (620, 10), (650, 10), (1150, 1), (400, 1), (1150, 100), (400, 100),
)  # fmt: skip
"""(hidden units, columns) of training, evaluation and dynamic evaluation"""
FLAG = torch.zeros(1, dtype=torch.int32, device=CUDA)
DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32}


def graph_of(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def microseconds(function: Callable[[], object], repeats: int = 9) -> float:
    """The median time of a replayed graph."""
    graph = graph_of(function)
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def per_step(function: Callable[[int], object], repeats: int = 9) -> tuple[float, float]:
    """Microseconds of one more step, and of a launch without steps."""
    long, short = (microseconds(lambda steps=steps: function(steps), repeats) for steps in STEPS)
    slope = (long - short) / (STEPS[0] - STEPS[1])
    return slope, long - STEPS[0] * slope


def _flat(leaves: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Views of one buffer, as cuDNN wants them."""
    flat = torch.cat([leaf.flatten() for leaf in leaves]).to(dtype)
    return [part.view_as(leaf) for part, leaf in zip(flat.split([p.numel() for p in leaves]), leaves, strict=True)]


def _named(output: Tensor, cell: Tensor, x: Tensor, leaves: list[Tensor]) -> dict[str, Tensor]:
    tensors = (output, cell, x.grad, leaves[0].grad, leaves[1].grad, leaves[2].grad)
    return {
        name: tensor
        for name, tensor in zip(("h", "c", "dx", "dWih", "dWhh", "db"), tensors, strict=True)
        if tensor is not None
    }


class Layer:
    """A layer, its inputs, and what float64 makes of them."""

    def __init__(self, hidden: int, batch: int, precision: str, inputs: int | None = None) -> None:
        torch.manual_seed(hidden + batch)
        inputs = hidden if inputs is None else inputs
        self.hidden, self.batch, self.precision, self.dtype = hidden, batch, precision, DTYPES[precision]
        self.lstm = torch.nn.LSTM(inputs, hidden).to(CUDA)
        steps = STEPS[0]
        self.x = torch.randn(steps, batch, inputs, device=CUDA)
        self.gradient = torch.randn(steps, batch, hidden, device=CUDA)
        self.states = [torch.randn(1, batch, hidden, device=CUDA) * scale for scale in (0.3, 0.5)]
        for tensor in (self.x, self.gradient, *self.states):
            tensor.copy_(tensor.bfloat16())
        self.parameters = tuple(self.lstm.parameters())

    def torch_results(self, dtype: torch.dtype) -> dict[str, Tensor]:
        x = self.x.to(dtype, copy=True).requires_grad_()
        leaves = [p.detach().clone().requires_grad_() for p in self.lstm.parameters()]
        output, _, cell = torch._VF.lstm(
            x, tuple(s.to(dtype) for s in self.states), _flat(leaves, dtype), True, 1, 0.0, True, False, False
        )
        output.backward(self.gradient.to(dtype))
        return _named(output, cell, x, leaves)

    def persistent_results(self, kernels: LayerKernels) -> dict[str, Tensor]:
        x = self.x.to(self.dtype, copy=True).requires_grad_()
        leaves = [p.detach().clone().requires_grad_() for p in self.lstm.parameters()]
        output, _, cell = persistent_lstm(
            kernels, x, *(s.to(self.dtype) for s in self.states), tuple(leaves), error_flag=FLAG
        )
        output.backward(self.gradient.to(self.dtype))
        return _named(output, cell, x, leaves)


def errors(results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {
        name: ((tensor.double() - exact[name].double()).norm() / exact[name].double().norm()).item()
        for name, tensor in results.items()
    }


def recurrence_times(kernels: LayerKernels, direction: str, layer: Layer) -> tuple[float, float]:
    """Times per step of the recurrent kernel alone."""
    plan: KernelPlan = getattr(kernels.plan, direction)
    padded, batch, hidden, dtype = plan.padded, layer.batch, layer.hidden, layer.dtype

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=CUDA).mul_(0.05).to(dtype)

    matrix, state, cell = new(4 * padded, padded), new(batch, hidden), new(batch, hidden)
    gates, states = new(STEPS[0] * batch, 4 * padded).sigmoid_(), new(STEPS[0] + 1, batch, padded)
    cells, last, gradient = (
        new(STEPS[0], batch, padded, dtype=torch.float32),
        new(batch, hidden),
        new(STEPS[0], batch, hidden),
    )
    counters = torch.zeros(plan.counters, dtype=torch.int32, device=CUDA)

    kernels.load(backward=direction == "backward")

    def run(steps: int) -> None:
        counters.zero_()
        if direction == "forward":
            tensors = (matrix, state, cell, gates, states, cells, last, counters, FLAG)
            kernels.launch("lstm_forward", plan.ctas, *tensors, PATIENCE_NS, steps, 1)
        else:
            tensors = (matrix, gates, cells, cell, gradient, None, new_gates, None, counters, FLAG)
            kernels.launch("lstm_backward", plan.ctas, *tensors, PATIENCE_NS, batch * hidden, hidden, steps)

    new_gates = torch.empty_like(gates)
    return per_step(run)


def layer_times(layer: Layer, forward: Callable[[Tensor, list[Tensor]], Tensor]) -> tuple[float, float]:
    """Microseconds of a whole layer over 70 steps: forward, and forward with backward."""
    leaves = [p.detach().clone().requires_grad_() for p in layer.lstm.parameters()]
    x = layer.x.to(layer.dtype, copy=True).requires_grad_()
    gradient = layer.gradient.to(layer.dtype)

    def both() -> None:
        torch.autograd.grad(forward(x, leaves), [x, *leaves], gradient)

    def alone() -> None:
        with torch.no_grad():
            forward(x, leaves)

    return microseconds(alone), microseconds(both)


def of_torch(layer: Layer) -> Callable[[Tensor, list[Tensor]], Tensor]:
    states = tuple(s.to(layer.dtype) for s in layer.states)

    def forward(x: Tensor, leaves: list[Tensor]) -> Tensor:
        return torch._VF.lstm(
            x, states, _flat(leaves, layer.dtype), True, 1, 0.0, torch.is_grad_enabled(), False, False
        )[0]

    return forward


def of_plan(layer: Layer, kernels: LayerKernels) -> Callable[[Tensor, list[Tensor]], Tensor]:
    states = tuple(s.to(layer.dtype) for s in layer.states)
    return lambda x, leaves: persistent_lstm(kernels, x, *states, tuple(leaves), error_flag=FLAG)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=0, help="plans besides the chosen one, best ranked first")
    parser.add_argument("--runs", type=int, nargs="*", default=[1, 2], help="numbers of concurrent runs to plan for")
    parser.add_argument("--cases", type=json.loads, default=CASES, help="as [[1150, 20], [400, 20]]")
    parser.add_argument("--precisions", nargs="*", default=list(DTYPES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.rnn.fp32_precision = "tf32"

    plans: dict[tuple[str, int, int], list[tuple[str, LayerPlan]]] = {}
    for precision in options.precisions:
        for hidden, batch in options.cases:
            key = (precision, hidden, batch)
            for runs in options.runs:
                gpu = describe_gpu(CUDA, runs)
                plan = plan_layer(hidden, batch, precision, gpu)
                if isinstance(plan, Refusal):
                    print(precision, hidden, batch, plan.reason)
                    continue
                known = [other for _, other in plans.setdefault(key, [])]
                if plan not in known:
                    plans[key].append((f"runs {runs}", plan))
                if options.candidates and runs == 1:
                    ranked = [
                        sorted(
                            feasible(d, hidden, batch, precision, gpu),
                            key=KernelPlan.microseconds,
                        )[1 : 1 + options.candidates]
                        for d in ("forward", "backward")
                    ]
                    for index, (forward, backward) in enumerate(zip(*ranked, strict=False)):
                        plans[key].append((f"next {index + 1}", LayerPlan(forward=forward, backward=backward)))
    began = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        kinds = [
            pair
            for named in plans.values()
            for _, plan in named
            for pair in (("forward", plan.forward), ("backward", plan.backward), ("layout", plan.forward))
        ]
        list(pool.map(lambda pair: compiled(*pair), kinds))
    print(f"compiled {len(kinds)} programs in {time.monotonic() - began:.1f} s", flush=True)

    lines = []
    for (precision, hidden, batch), named in plans.items():
        layer = Layer(hidden, batch, precision)
        exact = layer.torch_results(torch.float64)
        theirs = errors(layer.torch_results(layer.dtype), exact)
        cudnn = layer_times(layer, of_torch(layer))
        for name, plan in named:
            try:
                kernels = LayerKernels(plan, CUDA)
                results = layer.persistent_results(kernels)
                again = layer.persistent_results(kernels)
                ours = errors(results, exact)
                line = {
                    "precision": precision, "hidden": hidden, "batch": batch, "plan": name,
                    "worst error over cuDNN's": max(ours[n] / theirs[n] for n in ours),
                    "error h": ours["h"], "error dWhh": ours["dWhh"],
                    "repeats": all(torch.equal(results[n], again[n]) for n in results),
                    "forward": recurrence_times(kernels, "forward", layer),
                    "backward": recurrence_times(kernels, "backward", layer),
                    "layer": layer_times(layer, of_plan(layer, kernels)) if name.startswith("runs") else (0.0, 0.0),
                    "cudnn layer": cudnn, "flag": int(FLAG),
                    "plans": asdict(plan),
                }  # fmt: skip
            except RuntimeError as error:
                print(precision, hidden, batch, name, "FAILED", error, flush=True)
                continue
            lines.append(line)
            FLAG.zero_()
            worst = line["worst error over cuDNN's"]
            short = [
                "MT{row_tiles} NT{column_tiles} P{passes} G{groups} R{register_tiles}".format(**vars(k)) + f" {k.ctas}c"
                for k in (plan.forward, plan.backward)
            ]
            print(
                f"{precision} {hidden:5d} x {batch:3d} {name:7s} "
                f"fwd {line['forward'][0]:5.2f}+{line['forward'][1]:3.0f} "
                f"bwd {line['backward'][0]:5.2f}+{line['backward'][1]:3.0f} us  "
                f"layer {line['layer'][0]:5.0f} {line['layer'][1]:5.0f} cudnn {cudnn[0]:5.0f} {cudnn[1]:5.0f}  "
                f"err {ours['h']:.1e} {ours['dWhh']:.1e} "
                f"x{worst:.2f} {'same' if line['repeats'] else 'DIFFERENT'} "
                f"{line['flag']} | {short[0]} | {short[1]}",
                flush=True,
            )
    if options.out is not None:
        options.out.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
