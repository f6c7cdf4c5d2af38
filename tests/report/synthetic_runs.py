"""Records that look like those of real runs. All numbers are invented, for tests of the page alone."""

import math
import random
from pathlib import Path

from tests.records import samples
from tests.records.samples import environment, identity, spectrum

from sigsoftmax.records import Payload, Record, append
from sigsoftmax.records.schemas.capacity import StartResult
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum
from sigsoftmax.records.schemas.speed import Measurement
from sigsoftmax.records.schemas.training import (
    ComparisonRecord,
    DynamicEvaluationRecord,
    EpochRecord,
    EvaluationRecord,
)

# Final test perplexity and numerical rank that a head is given.
PTB = {
    "softmax": (57.0, 402),
    "relu": (1240.0, 1700),
    "sigmoid": (56.4, 900),
    "sigsoftmax": (56.6, 1300),
    "mos(K=15)": (54.7, 1950),
    "moss(K=15)": (54.6, 1980),
}
SEEDS = (141, 142, 143)
GRID = tuple((rate * 1e-5, decay * 1e-3) for decay in (1, 2, 3, 5) for rate in (3, 4, 5, 6, 7, 10))


def training(heads: dict[str, tuple[float, int]] = PTB, *, corpus: str = "ptb", epochs: int = 24) -> list[Payload]:
    """Epochs, evaluations and dynamic evaluations of every head and seed."""
    found: list[Payload] = []
    for head, (final, _) in heads.items():
        for seed in SEEDS if not head.startswith("mos") else SEEDS[:2]:
            draw = random.Random(f"{head}{seed}{corpus}")
            offset = math.exp(draw.gauss(0.0, 0.006))
            run = identity(head, seed, corpus=corpus)
            best = math.inf
            for epoch in range(1, epochs + 1):
                valid = (final + 22.0 + 330.0 * epoch**-1.35) * offset * math.exp(draw.gauss(0.0, 0.004))
                best, is_best = min(best, valid), valid < best
                loss = math.log(valid)
                found.append(
                    EpochRecord(
                        run=run,
                        epoch=epoch,
                        optimizer="sgd" if epoch < 16 else "asgd",
                        updates=686,
                        train_loss=math.log(valid * 0.93),
                        train_loss_parts=(loss, loss),
                        valid_loss=loss,
                        valid_loss_over_rows=loss * (1.0 - 1e-4),
                        is_best=is_best,
                        seconds_training=5.6,
                        seconds_validation=0.5,
                        concurrent_runs=3,
                        peak_mib=1830.0,
                    )
                )
            for phase, split, factor in (
                ("train", "valid", 1.072),
                ("train", "test", 1.032),
                ("finetune", "valid", 1.039),
                ("finetune", "test", 1.0),
            ):
                loss = math.log(final * factor * offset)
                found.append(
                    EvaluationRecord(
                        run=identity(head, seed, phase=phase, corpus=corpus),
                        split=split,
                        batch=10 if split == "valid" else 1,
                        loss=loss,
                        loss_over_rows=loss,
                        tokens=82_429,
                        epoch=epochs,
                        seconds=3.0,
                    )
                )
            winner = draw.choice(GRID)
            for rate, decay in GRID:
                found.append(
                    _dynamic(head, seed, corpus, "valid", rate, decay, final * 0.9 * offset, (rate, decay) == winner)
                )
            found.append(_dynamic(head, seed, corpus, "test", *winner, final * 0.886 * offset, True))
    return found


def _dynamic(
    head: str, seed: int, corpus: str, split: str, rate: float, decay: float, perplexity: float, chosen: bool
) -> DynamicEvaluationRecord:
    return DynamicEvaluationRecord(
        run=identity(head, seed, phase="finetune", corpus=corpus),
        split=split,
        learning_rate=rate,
        decay=decay,
        epsilon=2e-5,
        window=5,
        loss=math.log(perplexity),
        tokens=82_429,
        complete=True,
        chosen=chosen,
        seconds=48.0,
    )


def model_spectra(heads: dict[str, tuple[float, int]] = PTB) -> list[Payload]:
    return [
        ModelSpectrum(
            run=identity(head, SEEDS[0], phase="finetune"),
            split="test",
            spectrum=spectrum(f"log P of ptb-{head}, test", rank, cliff=head == "softmax"),
        )
        for head, (_, rank) in heads.items()
    ]


def comparisons(seeds: int = 1) -> list[Payload]:
    found: list[Payload] = []
    for head, kl, rank in (
        ("softmax", 0.142, 34),
        ("sigsoftmax", 0.1405, 88),
        ("softmax(alpha=1.5)", 0.1432, 34),
        ("gss(k=0.2)", 0.131, 120),
        ("mos(K=4)", 0.118, 199),
        ("moss(K=4)", 0.1192, 200),
    ):
        for seed in range(seeds):
            draw = random.Random(f"{head}{seed}")
            value = kl + draw.gauss(0.0, 0.0008)
            found.append(
                ComparisonRecord(
                    run=identity(head, seed, corpus="language", recipe="compare", parameters=52_000),
                    epochs=6,
                    updates=1200,
                    valid_loss=3.31 + value,
                    test_loss=3.30 + value,
                    entropy_rate=3.30,
                    kl=value,
                    kl_standard_error=0.0009,
                    rank=rank,
                    rank_bound=34 if head.startswith("softmax") else 200,
                    words=200,
                    contexts=4000,
                    seconds=17.0,
                )
            )
    return found


def capacities() -> list[Payload]:
    found: list[Payload] = []
    for head, gain, power, per_context in (
        ("softmax", 1.0, 1.0, 1),
        ("sigsoftmax", 0.9995, 1.0, 1),
        ("shifted_sigsoftmax(b=per_class)", 0.93, 1.0, 1),
        ("gss(k=0.2)", 0.82, 1.02, 1),
        ("gss(k=0.0)", 0.66, 1.05, 1),
        ("mos(K=4)", 0.35, 1.1, 4),
        ("moss(K=4)", 0.34, 1.1, 4),
    ):
        for width in (2, 4, 8, 16, 32, 64):
            kl = max(1e-4, gain * 1.1 * (2.0 / width) ** (0.9 * power) * math.exp(-width / 40.0))
            rank = min(200, width + 2) if head == "softmax" else min(200, 200 if "o" not in head[:2] else 90 + width)
            found.append(
                samples.capacity(
                    head=head,
                    width=width,
                    kl=kl,
                    fitted_kl=kl * 1.0003,
                    starts=(
                        StartResult(name="svd", kl=kl, iterations=300),
                        StartResult(name="random", kl=kl * 1.02, iterations=300),
                    ),
                    numbers_per_context=per_context * width + per_context - 1,
                    output_parameters=200 * (width + 1),
                    rank_bound=min(200, width + 2) if head == "softmax" else 200,
                    rank=rank,
                    rank_threshold=1e3 * 1.46e-6,
                    singular_values=tuple(
                        1e3 * (index**-0.7 if index <= rank or head != "softmax" else 1e-16) for index in range(1, 201)
                    ),
                )
            )
    return found


def audits() -> list[Payload]:
    return [samples.audit()]


def rank_bounds() -> list[Payload]:
    return [samples.rank_bounds()]


def measurements() -> list[Payload]:
    def one(implementation: str, ratio: float, target: str = "", peak: float | None = 107.0) -> Measurement:
        return samples.measurement(
            case="cross-entropy of logits, N=1400 V=10000",
            implementation=implementation,
            milliseconds=50.0 * ratio,
            milliseconds_quartiles=(48.0 * ratio, 53.0 * ratio),
            ratio=ratio,
            ratio_quartiles=(0.97 * ratio, 1.05 * ratio),
            peak_mib=peak,
            rounds=15,
            target=target,
        )

    return [
        one("torch softmax", 1.0),
        one("torch naive sigsoftmax", 2.6),
        one("ours softmax", 0.4, peak=2.0),
        one("ours sigsoftmax", 0.5, "<= 1.0x, aim 0.6x", peak=4.0),
        one("ours relu", 1.2, "<= 1.0x, <= 1.05x of ours softmax", peak=None),
    ]


COMMANDS = {
    "train": ("sigsoftmax reproduce table1 --seeds 3", "Test GPU", training),
    "spectra": ("sigsoftmax reproduce table3", "Test GPU", model_spectra),
    "compare": ("sigsoftmax compare --out runs/compare", "Test CPU", comparisons),
    "capacity": ("sigsoftmax demo --seed 0", "Test CPU", capacities),
    "audit": ("sigsoftmax audit tiny-model --teacher big-model", "Test CPU", audits),
    "bounds": ("sigsoftmax audit random-head", "Test CPU", rank_bounds),
    "benchmarks": ("python benchmarks/cpu.py", "Test CPU", measurements),
}


def write_all(folder: Path) -> None:
    """One file for every subject."""
    for day, (name, (command, device, make)) in enumerate(COMMANDS.items(), start=1):
        where = environment(command, device=device, day=day)
        append(folder / name / "records.jsonl", [Record.of(payload, where) for payload in make()])
