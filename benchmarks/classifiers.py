"""Heads of a digit classifier with few hidden units: likelihood, accuracy and calibration over seeds.

    python benchmarks/classifiers.py            train what is not in the records yet: about half an hour of one core
    python benchmarks/classifiers.py --docs     nothing is trained but for one picture: tables and pictures of the page

The classifier and its training are those of examples/digits_classifier.py. A seed gives the split, the first weights
and the order of the images, the same for all heads. Every head has the same learning rates to choose from, and the same
number of epochs; rate and epoch are chosen by the validation loss. Records are appended to
benchmarks/records/classifiers/digits.jsonl, seed by seed, so that a study that was stopped goes on where it was.

Shapes: N points, V classes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import torch
from measuring import RECORDS, environment

from sigsoftmax import records
from sigsoftmax.records.schemas.classifiers import Attempt, ClassifierResult

sys.path.append(str(Path(__file__).parents[1]))
from examples.digits_classifier import CLASSES, EPOCHS, Classifier, Fit, digits, fitted, scores

OUT = RECORDS / "classifiers" / "digits.jsonl"
RATES = (1e-2, 3e-2, 1e-1, 3e-1)
SEEDS = 10
HEADS = (
    "softmax",
    "softmax(alpha=1.5)",
    "sigsoftmax",
    "shifted_sigsoftmax",
    "shifted_sigsoftmax(b=per_class)",
    "gss(k=0)",
    "gss(k=0.2)",
    "gss(k=learned:1)",
    "mos(K=2)",
    "mos(K=3)",
    "mos(K=4)",
    "moss(K=2)",
    "moss(K=3)",
    "moss(K=4)",
    "wide mos(K=4)",
    "wide moss(K=4)",
    "tanh mos(K=1)",
    "tanh mos(K=4)",
)
WIDTH = 2
"""at which all heads are compared"""
SWEPT = ("softmax", "sigsoftmax", "gss(k=0.2)", "mos(K=4)")
WIDTHS = (1, 2, 3, 4, 9, 16)


@dataclass(frozen=True)
class Point:
    """The subject of one record."""

    head: str
    width: int
    seed: int


def points(seeds: int) -> Iterator[Point]:
    """Seed by seed, so that whatever is there when a study is stopped is complete but for one seed."""
    for seed in range(seeds):
        yield from (Point(head, WIDTH, seed) for head in HEADS)
        yield from (Point(head, width, seed) for width, head in itertools.product(WIDTHS, SWEPT) if width != WIDTH)


def measured(point: Point, rates: Sequence[float] = RATES, epochs: int = EPOCHS) -> ClassifierResult:
    """Train at every rate; the attempt with the lowest validation loss is tested, once."""
    torch.set_num_threads(1)  # The tensors are small.
    start = time.perf_counter()
    data = digits(point.seed)
    fits = [fitted(point.head, point.width, data, learning_rate=rate, seed=point.seed, epochs=epochs) for rate in rates]
    best = min(fits, key=lambda fit: fit.valid_loss)
    if not math.isfinite(best.valid_loss):
        raise ValueError(f"{point}: no learning rate of {', '.join(map(str, rates))} gives a finite validation loss")
    found = scores(best.model, data.test)
    head = best.model.head
    return ClassifierResult(
        dataset="digits",
        classes=CLASSES,
        train=len(data.train.labels_N),
        valid=len(data.valid.labels_N),
        test=len(data.test.labels_N),
        head=point.head,
        width=point.width,
        seed=point.seed,
        parameters=sum(parameter.numel() for parameter in best.model.parameters()),
        head_parameters=sum(parameter.numel() for parameter in head.parameters()),
        epochs=epochs,
        attempts=tuple(map(attempt, fits)),
        learning_rate=best.learning_rate,
        valid_loss=best.valid_loss,
        test_loss=found.nats,
        accuracy=found.accuracy,
        calibration=found.calibration,
        learned={name: value.mean().item() for name, value in head.function_parameters.items()},
        seconds=time.perf_counter() - start,
    )


def attempt(fit: Fit) -> Attempt:
    return Attempt(
        learning_rate=fit.learning_rate,
        valid_loss=fit.valid_loss if math.isfinite(fit.valid_loss) else None,
        best_epoch=fit.best_epoch,
    )


def results_in(path: Path, *, malformed: Literal["raise", "skip"] = "raise") -> list[ClassifierResult]:
    if not path.is_file():
        return []
    return [record.payload_as(ClassifierResult) for record in records.read(path, malformed=malformed)]


def train_missing(out: Path, wanted: Iterable[Point], *, processes: int, rates: Sequence[float], epochs: int) -> int:
    """Append a record for each point that has none yet; how many were trained."""
    # A kill may have torn the last line; its point is trained again.
    there = {Point(r.head, r.width, r.seed) for r in results_in(out, malformed="skip")}
    missing = [point for point in wanted if point not in there]
    for point in missing:
        Classifier(point.head, point.width)  # A head that cannot be read is found now, not after half an hour.
    torch.set_num_threads(1)
    where = environment()
    for number, result in enumerate(_trained(missing, processes, rates, epochs), start=1):
        records.append(out, records.Record.of(result, where))
        print(
            f"{number}/{len(missing)}  seed {result.seed}  d={result.width:<2d} {result.head:32s} "
            f"{result.test_loss:.3f} nats  {result.accuracy:.1%}  rate {result.learning_rate:g}  "
            f"{result.seconds:.0f} s",
            flush=True,
        )
    return len(missing)


def _trained(
    missing: Sequence[Point], processes: int, rates: Sequence[float], epochs: int
) -> Iterator[ClassifierResult]:
    if processes == 1:
        yield from (measured(point, rates, epochs) for point in missing)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        try:
            futures = [pool.submit(measured, point, rates, epochs) for point in missing]
            yield from (future.result() for future in as_completed(futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def main() -> int:
    try:
        return run_command()
    except ValueError as error:
        print(f"classifiers.py: {error}", file=sys.stderr)
        return 2


def run_command() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"splits and first weights (default: {SEEDS})")
    parser.add_argument("--processes", type=int, default=1, help="points trained at once (default: 1)")
    parser.add_argument("--out", type=Path, default=OUT, help="records are appended here, what is there is kept")
    parser.add_argument("--smoke", action="store_true", help="two heads, one seed, one epoch; needs --out")
    parser.add_argument("--docs", action="store_true", help="write tables and pictures of docs/classifiers.md")
    parser.add_argument("--check", action="store_true", help="as --docs, but write nothing; exit with 1 if out of date")
    options = parser.parse_args()
    for name in ("seeds", "processes"):
        if getattr(options, name) < 1:
            parser.error(f"argument --{name}: expected at least 1, got {getattr(options, name)}")
    if options.smoke and options.out == OUT:
        parser.error("--smoke trains too little for the page; name another file with --out")
    if options.docs or options.check:
        from classifiers_page import update

        stale = update(results_in(options.out), check=options.check)
        print(f"{'out of date' if options.check else 'written'}: {', '.join(stale)}" if stale else "up to date")
        return int(options.check and bool(stale))
    wanted: Iterable[Point] = points(options.seeds)
    rates, epochs = RATES, EPOCHS
    if options.smoke:
        wanted, rates, epochs = [Point(head, WIDTH, 0) for head in ("softmax", "moss(K=2)")], RATES[:1], 1
    trained = train_missing(options.out, wanted, processes=options.processes, rates=rates, epochs=epochs)
    print(f"{trained} new records in {options.out}; make bench-docs writes docs/classifiers.md from them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
