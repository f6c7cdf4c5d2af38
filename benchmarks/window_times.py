"""Times of a training window beside its products and its recurrence, and of dynamic evaluation, on a GPU.

    python benchmarks/window_times.py operations dynamic --data FOLDER

`operations` times the kernels of `sigsoftmax.lm.kernels` beside the plain torch that they stand for, at the sizes of
ptb-softmax, each captured in a CUDA graph. `dynamic` trains ptb-softmax for two epochs (it needs the corpus), compares
evaluations in TF32 products with float32, and times the step of dynamic evaluation for one and several points at once,
with the kernels that it spends its time in.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from sigsoftmax.lm import kernels
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.data.windows import batchify
from sigsoftmax.lm.dynamic.evaluation import DynamicEvaluator, DynamicProgress, GradientStatistics, adapt
from sigsoftmax.lm.dynamic.rates import Rates
from sigsoftmax.lm.dynamic.search import grid
from sigsoftmax.lm.dynamic.windows import window_count
from sigsoftmax.lm.model.embedding import dropped_embedding
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.model.regularization import MaskSampler, penalties
from sigsoftmax.lm.recipes import recipe, with_overrides
from sigsoftmax.lm.training.evaluation import evaluate
from sigsoftmax.lm.training.nt_asgd import AveragedSgd
from sigsoftmax.lm.training.trainer import Trainer, TrainerOptions

RECIPE, WORDS, STEPS = "ptb-softmax", 10_000, 70
COMPARED_WINDOWS, TIMED_WINDOWS = 1500, 600
AT_ONCE = (1, 2, 4, 6, 8)


def microseconds(call: Callable[[], object], generator: torch.Generator | None = None, *, repeats: int = 30) -> float:
    """The time of one replay of the call as a CUDA graph, the mean of some."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if generator is not None:
            graph.register_generator_state(generator)
        graph.capture_begin(capture_error_mode="thread_local")
        call()
        graph.capture_end()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            graph.replay()
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats * 1e3


def plainly(call: Callable[[], object]) -> Callable[[], object]:
    """The same call by plain torch."""

    def without_kernels() -> object:
        with mock.patch.object(kernels, "run_on", return_value=False):
            return call()

    return without_kernels


def show(what: str, ours: float, plain: float | None = None) -> None:
    beside = "" if plain is None else f"   plain torch {plain:8.1f}"
    print(f"{what:46} {ours:8.1f} us{beside}", flush=True)


def operations() -> None:
    config, device = recipe(RECIPE), torch.device("cuda")
    batch, width = config.training.batch, config.model.embedding
    parameters = [parameter.detach() for parameter in LanguageModel(config.model, WORDS).to(device).parameters()]
    gradients = [torch.randn_like(parameter) * 1e-3 for parameter in parameters]
    for averaged in (False, True):
        optimizer = AveragedSgd(parameters, clip=0.25, weight_decay=1.2e-6)
        if averaged:
            optimizer.begin_averaging()

        def update(optimizer: AveragedSgd = optimizer) -> None:
            optimizer.update(gradients, 1e-3)

        show(f"update, {optimizer.mode}", microseconds(update), microseconds(plainly(update)))
    generator = torch.Generator(device).manual_seed(0)
    sampler = MaskSampler(config.model, vocabulary_size=WORDS, batch=batch, device=device, dtype=torch.bfloat16)
    show("all masks", microseconds(lambda: sampler.draw(generator), generator))
    weight = torch.randn(WORDS, width, device=device, requires_grad=True)
    for columns in (batch, 80):
        # Some words are frequent, as in text.
        tokens = (torch.rand(STEPS, columns, device=device) ** 3 * WORDS).long()
        masks = torch.ones(WORDS, device=device), torch.ones(1, columns, width, device=device)
        outer = torch.randn(STEPS, columns, width, device=device).bfloat16()

        def embed(
            arguments: tuple[Any, ...] = (tokens, weight, *masks, torch.bfloat16), outer: Tensor = outer
        ) -> object:
            return torch.autograd.grad(dropped_embedding(*arguments), weight, outer)

        show(f"embedding, {columns} columns, with backward", microseconds(embed), microseconds(plainly(embed)))
    outputs = [torch.randn(STEPS, batch, width, device=device).bfloat16().requires_grad_() for _ in range(2)]

    def penalise() -> object:
        return torch.autograd.grad(penalties(*outputs, activation=2.0, temporal_activation=1.0), outputs)

    show("penalties, with backward", microseconds(penalise), microseconds(plainly(penalise)))


def dynamic(corpus: Corpus) -> None:
    config = with_overrides(recipe(RECIPE), ["training.epochs=2"])
    with tempfile.TemporaryDirectory() as folder:
        options = TrainerOptions(device="cuda", precision="bf16", checkpoint_seconds=math.inf)
        trainer = Trainer(config, corpus, folder, options)
        trainer.run(lambda at: None if at.record is None else print(at.record, flush=True))
    model = trainer.model
    for split, columns in (("valid", 10), ("test", 1)):
        text_RB = batchify(corpus.split(split), columns)  # type: ignore[arg-type]
        losses = [evaluate(model, text_RB, precision=precision).loss for precision in ("float32", "tf32")]
        print(f"{split}: float32 {losses[0]:.6f}, TF32 products {100.0 * math.expm1(losses[1] - losses[0]):+.4f} %")
    began = time.perf_counter()
    statistics = GradientStatistics.of(model, corpus.train, config.dynamic_evaluation, precision="tf32")
    print(f"statistics: {statistics.windows} windows in {time.perf_counter() - began:.1f} s", flush=True)
    points = grid(config.dynamic_evaluation)
    ours = adapt(model, statistics, corpus.test, points[8], limit=COMPARED_WINDOWS)
    with mock.patch.object(kernels, "run_on", return_value=False):
        plain = adapt(model, statistics, corpus.test, points[8], limit=COMPARED_WINDOWS)
    difference = 100.0 * math.expm1(ours.loss - plain.loss)
    print(
        f"dynamic, {COMPARED_WINDOWS} windows: plain torch {plain.loss:.6f}, perplexity by kernels {difference:+.4f} %"
    )
    for at_once in AT_ONCE:
        _dynamic_at_once(model, statistics, corpus, points[:at_once], len(points))


def _dynamic_at_once(
    model: LanguageModel, statistics: GradientStatistics, corpus: Corpus, rates: list[Rates], points: int
) -> None:
    seen: list[DynamicProgress] = []
    evaluator = DynamicEvaluator(
        model, statistics, corpus.test, at_once=len(rates), limit=TIMED_WINDOWS, progress=seen.append
    )
    for _ in evaluator.launch(*rates):
        pass
    seconds = seen[-1].seconds_per_window
    tested, validated = (window_count(ids.numel(), statistics.window) for ids in (corpus.test, corpus.valid))
    print(
        f"dynamic, {len(rates)} at once: {seconds * 1e6:.0f} us a window; test {seconds * tested:.1f} s for all, "
        f"the grid of {points} on validation {seconds / len(rates) * points * validated:.0f} s",
        flush=True,
    )
    [windows] = evaluator._passes
    with torch.cuda.stream(torch.cuda.Stream()):
        windows._begin()
        windows._window(statistics.window)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            windows._window(statistics.window)
            torch.cuda.synchronize()
    for event in sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)[:12]:
        total = event.self_device_time_total
        print(f"    {event.key[:58]:58} {event.count:3} x {total / event.count:7.1f} = {total:7.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="+", choices=("operations", "dynamic"))
    parser.add_argument("--data", type=Path, help="folder of Penn Treebank (default: where fetch puts it)")
    arguments = parser.parse_args()
    if "operations" in arguments.stages:
        operations()
    if "dynamic" in arguments.stages:
        dynamic(Corpus.load("ptb", arguments.data))


if __name__ == "__main__":
    main()
