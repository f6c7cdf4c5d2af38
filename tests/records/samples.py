"""A record of every kind, with invented numbers: a test names the fields that it is about."""

import math
from dataclasses import replace
from typing import Any

from sigsoftmax.records import Environment
from sigsoftmax.records.schemas.audits import (
    ArgmaxCounts,
    Audit,
    GradientShare,
    HeadAtWidth,
    LayerDescription,
    ShareOnLine,
    TargetResult,
    Truncation,
    TruncationPoint,
    UseOfNonlinearity,
)
from sigsoftmax.records.schemas.capacity import CapacityResult, StartResult
from sigsoftmax.records.schemas.classifiers import Attempt, Calibration, ClassifierResult
from sigsoftmax.records.schemas.spectra import RankBounds, Spectrum
from sigsoftmax.records.schemas.speed import Measurement
from sigsoftmax.records.schemas.sweeps import PairedDifferenceRecord, TrialRecord
from sigsoftmax.records.schemas.training import RunIdentity


def environment(command: str, *, device: str = "Test CPU", day: int = 1) -> Environment:
    return Environment(
        package_version="0.1.0",
        python_version="3.11.7",
        torch_version="2.13.0",
        system="Linux x86_64",
        device=device,
        threads=2,
        command=command,
        time_utc=f"2026-01-{day:02d}T10:00:00Z",
    )


def identity(head: str, seed: int, *, phase: str = "train", corpus: str = "ptb", **changes: object) -> RunIdentity:
    short = {"ptb": "ptb", "wikitext-2": "wt2"}.get(corpus, corpus)
    values: dict[str, object] = {
        "recipe": f"{short}-{head.partition('(')[0]}",
        "phase": phase,
        "head": head,
        "corpus": corpus,
        "corpus_checksum": "0123abcd",
        "seed": seed,
        "precision": "float32",
        "parameters": 21_500_620 if head.startswith("mos") else 24_221_600,
    }
    return RunIdentity(**{**values, **changes})  # type: ignore[arg-type]


def spectrum(source: str, rank: int, *, words: int = 2000, contexts: int = 16_000, cliff: bool = False) -> Spectrum:
    """Falls smoothly through the paper's threshold at the rank, or breaks off there."""
    threshold = 0.5 * math.sqrt(words + contexts + 1) * 2.0**-23
    values = []
    for index in range(1, words + 1):
        if cliff:
            values.append(1e4 * (index**-0.8 if index <= rank else 2e-10))
        else:
            values.append(1e4 * math.exp(math.log(threshold * 0.999) * (math.log(index) / math.log(rank + 1)) ** 1.6))
    return Spectrum(
        source=source,
        words=words,
        contexts=contexts,
        singular_values=tuple(values),
        method="gram",
        dtype="float32",
        precision="float32",
        squared_error=(1e4 * 2e-9) ** 2,
        value_error=1e4 * 1e-9,
        seconds=4.2,
    )


def rank_bounds(**changes: Any) -> RankBounds:
    made = RankBounds(
        source="a random head",
        head="softmax",
        width=2048,
        words=128_256,
        contexts=8192,
        lower=2049,
        upper=2049,
        upper_reason="d + 1: phi is linear",
        rule="press32",
        norm_bound=5e4,
        norm_contexts=256,
        threshold_bound=0.9,
        counting_threshold=0.91,
        block_contexts=6144,
        block_words=6144,
        block_singular_values=(100.0, 10.0, 1.0),
        seed=0,
        seconds=31.0,
    )
    return replace(made, **changes)


def audit(**changes: Any) -> Audit:
    """A whole audit, but for the bounds of the rank: :func:`rank_bounds` makes some."""
    layer = LayerDescription(
        words=128_256,
        width=2048,
        has_bias=False,
        components=1,
        head="softmax",
        scale=1.0,
        how_known="found in the model and checked against its output",
        dtype="bfloat16",
    )
    target = TargetResult(
        target="the teacher big-model",
        contexts=400,
        words=500,
        all_words=128_256,
        mass=0.93,
        is_lower_bound=True,
        model_kl=0.31,
        heads=tuple(
            HeadAtWidth(head=head, width=width, kl=gain / width, spread=0.001, softmax_width=width / gain)
            for head, gain in (("softmax", 1.0), ("sigsoftmax", 0.999), ("mos(K=4)", 0.3))
            for width in (8, 16, 32)
        ),
        seconds=61.0,
    )
    made = Audit(
        source="a tiny model",
        layer=layer,
        contexts=4096,
        contexts_from="text generated for the audit",
        spectrum=spectrum("log P of a tiny model", 900),
        truncation=Truncation(
            contexts=512,
            words=128_256,
            points=tuple(TruncationPoint(width=2**k, kl=1.4 / 2**k, bound=1.4 / 2**k) for k in range(1, 10)),
        ),
        bend=UseOfNonlinearity(
            contexts=512,
            lines=(
                ShareOnLine(name="left", slope=2.0, logits=0.7, probability=0.1),
                ShareOnLine(name="right", slope=1.0, logits=0.1, probability=0.7),
            ),
            logits_in_bend=0.2,
            probability_in_bend=0.2,
            lowest_logit=-11.0,
            highest_logit=9.0,
            nearest_slope=1.3,
            kl_to_nearest_softmax=0.012,
        ),
        gradient=GradientShare(
            contexts=512,
            next_words="the text",
            mean=0.93,
            median=0.95,
            low=0.8,
            high=0.98,
            of_a_random_direction=0.984,
            rank_of_weight=2048,
        ),
        argmax=ArgmaxCounts(
            words=128_256,
            in_question=2000,
            yes=1990,
            no=3,
            never=(17, 90_001, 90_044),
            undecided=7,
            yes_seen=900,
            yes_by_steps=1080,
            yes_by_program=10,
            has_solver=True,
            seconds=30.0,
        ),
        target=target,
        notes=("2,000 of 128,256 words were asked about, at random.",),
        seconds=140.0,
    )
    return replace(made, **changes)


def capacity(**changes: Any) -> CapacityResult:
    made = CapacityResult(
        language="of rank 100",
        contexts=400,
        words=200,
        head="softmax",
        width=8,
        kl=0.2,
        fitted_kl=0.2,
        starts=(StartResult(name="svd", kl=0.2, iterations=300),),
        numbers_per_context=8,
        output_parameters=1800,
        rank_bound=10,
        rank=10,
        rank_threshold=1e-3,
        singular_values=tuple(10.0 ** (1 - place) for place in range(100)),
        seed=0,
        seconds=2.0,
    )
    return replace(made, **changes)


def classifier(**changes: Any) -> ClassifierResult:
    made = ClassifierResult(
        dataset="digits",
        classes=10,
        train=120,
        valid=40,
        test=40,
        head="softmax",
        width=2,
        seed=1,
        parameters=100,
        head_parameters=31,
        epochs=3,
        attempts=(Attempt(learning_rate=0.1, valid_loss=1.0, best_epoch=2),),
        learning_rate=0.1,
        valid_loss=1.0,
        test_loss=1.1,
        accuracy=0.8,
        calibration=Calibration(expected_error=0.1, brier=0.3, bins=()),
        learned={},
        seconds=1.0,
    )
    return replace(made, **changes)


def measurement(**changes: Any) -> Measurement:
    made = Measurement(
        suite="cpu",
        case="loss, N=2 V=3",
        implementation="ours",
        baseline="torch softmax",
        milliseconds=10.0,
        milliseconds_quartiles=(9.0, 11.0),
        ratio=1.0,
        ratio_quartiles=(1.0, 1.0),
        peak_mib=50.0,
        rounds=9,
    )
    return replace(made, **changes)


def trial(**changes: Any) -> TrialRecord:
    made = TrialRecord(
        run=identity("mos(K=4)", 1),
        point=("training.learning_rate=20",),
        epochs=3,
        updates=30,
        valid_loss=4.0,
        test_loss=4.1,
        kl=None,
        entropy_rate=None,
        seconds=9.0,
    )
    return replace(made, **changes)


def paired_difference(**changes: Any) -> PairedDifferenceRecord:
    made = PairedDifferenceRecord(
        recipe="language-mos",
        point=(),
        baseline_recipe="language-softmax",
        baseline_point=(),
        quantity="kl",
        seeds=(1, 2, 3),
        mean=0.1,
        deviation=None,
        low=None,
        high=None,
        confidence=0.95,
    )
    return replace(made, **changes)
