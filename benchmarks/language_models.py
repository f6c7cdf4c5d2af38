"""The first epochs of the paper's recipes on a GPU: curves, time, memory, dynamic evaluation, ranks.

    python benchmarks/language_models.py times bf16 mixtures dynamic ranks float32 --data FOLDER

Runs go to runs/gate and go on where they stopped; records go to results/. Stages: `times` times epochs of single runs
and of several at once; `bf16` trains softmax, sigsoftmax and the controls softmax(alpha=1.5) and gss(k=0) on Penn
Treebank with three seeds for 22 epochs, all at once; `float32` does so with softmax; `mixtures` trains ptb-mos and
ptb-moss for 12; `dynamic` and `ranks` take the models that `bf16` and `mixtures` trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sigsoftmax.analysis.spectrum.matrix_readers import from_blocks
from sigsoftmax.analysis.spectrum.streaming import SpectrumOptions, streamed_spectrum
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.data.windows import batchify
from sigsoftmax.lm.dynamic.evaluation import GradientStatistics, adapt
from sigsoftmax.lm.dynamic.rates import Rates
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.recipes import recipe, with_overrides
from sigsoftmax.lm.saving.saved_models import load_model
from sigsoftmax.lm.training.evaluation import WINDOW, evaluate
from sigsoftmax.lm.training.precision import arithmetic
from sigsoftmax.lm.training.trainer import Progress, Trainer, TrainerOptions, run_together
from sigsoftmax.records import Environment, Payload, Record, append
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum
from sigsoftmax.records.schemas.training import EvaluationRecord

RUNS = Path("runs/gate")
SEEDS = (141, 142, 143)
SINGLE_EPOCHS, MIXTURE_EPOCHS, TIMED_EPOCHS = 22, 12, 5
HEADS = ("ptb-softmax", "ptb-sigsoftmax", "ptb-softmax-1.5", "ptb-gss-0")
"""softmax, sigsoftmax, and what sigsoftmax is compared with besides: its scale alone, and another member"""
TIMED = (
    ("ptb-softmax", "bf16", 1),
    ("ptb-sigsoftmax", "bf16", 1),
    ("ptb-softmax", "bf16", 2),
    ("ptb-softmax", "bf16", 4),
    ("ptb-softmax", "tf32", 1),
    ("ptb-mos", "bf16", 1),
    ("ptb-moss", "bf16", 1),
    ("wt2-softmax", "bf16", 1),
)
"""recipe, precision, runs at once"""
DYNAMIC_RATES = Rates(learning_rate=5e-5, decay=2e-3, epsilon=2e-5)
"""one point in the middle of the published grid"""


@dataclasses.dataclass(frozen=True)
class Run:
    recipe: str
    seed: int
    precision: str
    epochs: int

    @property
    def folder(self) -> Path:
        return RUNS / f"{self.recipe}-{self.precision}-{self.seed}"


class Bench:
    def __init__(
        self, data: Path | None, results: Path, device: str, epochs: int | None = None, recipes: Sequence[str] = ()
    ) -> None:
        self.data, self.results, self.device, self.epochs, self.recipes = data, results, device, epochs, recipes
        self.corpora: dict[str, Corpus] = {}

    @property
    def corpus(self) -> Corpus:
        """Penn Treebank, which all stages but one use alone."""
        return self.corpus_of("ptb-softmax")

    def corpus_of(self, name: str) -> Corpus:
        corpus = recipe(name).corpus
        if corpus not in self.corpora:
            self.corpora[corpus] = Corpus.load(corpus, self.data)
        return self.corpora[corpus]

    def keep(self, file: str, payload: Payload) -> None:
        append(self.results / file, Record.of(payload, Environment.here(self.device)))

    def train(self, runs: Sequence[Run], file: str) -> None:
        """Train runs at once; their epochs are appended to the file when all have ended."""
        runs = [run for run in runs if not self.recipes or run.recipe in self.recipes]
        trainers = []
        for run in runs:
            chosen = with_overrides(recipe(run.recipe), [f"training.epochs={self.epochs or run.epochs}"])
            options = TrainerOptions(
                seed=run.seed,
                device=self.device,
                precision=run.precision,
                checkpoint_seconds=1e9,
                concurrent_runs=len(runs),
            )
            trainers.append(Trainer(chosen, self.corpus_of(run.recipe), run.folder, options))
        for ended in run_together(trainers, _print_epoch):
            with (self.results / file).open("a") as merged, ended.records_path.open() as own:
                shutil.copyfileobj(own, merged)

    def float32(self) -> None:
        self.train([Run("ptb-softmax", seed, "float32", SINGLE_EPOCHS) for seed in SEEDS], "ptb-float32.jsonl")

    def bf16(self) -> None:
        runs = [Run(head, seed, "bf16", SINGLE_EPOCHS) for head in HEADS for seed in SEEDS]
        self.train(runs, "ptb-bf16-persistent.jsonl")

    def mixtures(self) -> None:
        runs = [Run(head, seed, "bf16", MIXTURE_EPOCHS) for head in ("ptb-mos", "ptb-moss") for seed in (28,)]
        self.train(runs, "ptb-mixtures.jsonl")

    def times(self) -> None:
        """By other seeds, so that no run of the curves is touched."""
        for name, precision, at_once in TIMED:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            runs = [Run(name, 10 * at_once + index, precision, TIMED_EPOCHS) for index in range(at_once)]
            self.train(runs, f"{name.partition('-')[0]}-timing.jsonl")

    def dynamic(self) -> None:
        for name in ("ptb-softmax", "ptb-sigsoftmax"):
            loaded = load_model(Run(name, SEEDS[0], "bf16", SINGLE_EPOCHS).folder, device=self.device)
            began = time.monotonic()
            static = evaluate(loaded.model, batchify(self.corpus.test, 1))
            evaluation = EvaluationRecord(
                run=loaded.run,
                split="test",
                batch=1,
                loss=static.loss,
                loss_over_rows=static.loss_over_rows,
                tokens=static.scored,
                epoch=loaded.epoch,
                seconds=time.monotonic() - began,
            )
            self.keep("ptb-dynamic.jsonl", evaluation)
            began = time.monotonic()
            statistics = GradientStatistics.of(loaded.model, self.corpus.train, loaded.recipe.dynamic_evaluation)
            print(
                f"{name}: static {evaluation.perplexity:.2f}; statistics in {time.monotonic() - began:.1f} s",
                flush=True,
            )
            result = adapt(loaded.model, statistics, self.corpus.test, DYNAMIC_RATES)
            print(f"{name}: dynamic {result.perplexity:.2f} in {result.seconds:.1f} s", flush=True)
            self.keep("ptb-dynamic.jsonl", result.record(loaded.run))

    def ranks(self) -> None:
        runs = [Run(name, SEEDS[0], "bf16", SINGLE_EPOCHS) for name in ("ptb-softmax", "ptb-sigsoftmax")]
        runs += [Run(name, 28, "bf16", MIXTURE_EPOCHS) for name in ("ptb-mos", "ptb-moss")]
        for run in runs:
            loaded = load_model(run.folder, device=self.device)
            began = time.monotonic()
            source = from_blocks(
                log_prob_blocks(loaded.model, self.corpus.test),
                contexts=self.corpus.test.numel() - 1,
                vocabulary=loaded.model.vocabulary_size,
                description=f"{run.recipe}, seed {run.seed}, epoch {loaded.epoch}, on ptb's test text",
            )
            spectrum = streamed_spectrum(source, SpectrumOptions(method="gram", device=self.device))
            print(f"{run.recipe}: Press32 rank {spectrum.press32_rank} in {time.monotonic() - began:.1f} s", flush=True)
            self.keep("ptb-ranks.jsonl", ModelSpectrum(run=loaded.run, split="test", spectrum=spectrum))


def log_prob_blocks(model: LanguageModel, ids_L: Tensor) -> Iterator[Tensor]:
    """The log-probabilities after each word of a text but the last, (T, V) float32, window by window."""
    text_R1 = batchify(ids_L, 1).to(model.embedding.device)
    states = model.zero_state(1)
    for start in range(0, text_R1.shape[0] - 1, WINDOW):
        tokens = text_R1[start : min(start + WINDOW, text_R1.shape[0] - 1)]
        with torch.no_grad(), arithmetic("float32", text_R1.device):
            features = model.features(tokens, states)
            states = features.states
            yield model.log_probs(features)[:, 0]


def _print_epoch(trainer: Trainer, progress: Progress) -> None:
    if progress.note is not None:
        print(
            f"{trainer.identity.recipe} {trainer.identity.precision} seed {trainer.identity.seed}: {progress.note}",
            flush=True,
        )
    if (record := progress.record) is not None:
        print(
            f"{record.run.recipe} {record.run.precision} seed {record.run.seed} epoch {record.epoch}: "
            f"train {record.train_loss:.3f} valid {record.valid_perplexity:.1f} "
            f"in {record.seconds_training:.1f} + {record.seconds_validation:.1f} s ({record.peak_mib or 0:.0f} MiB)",
            flush=True,
        )


def main() -> None:
    stages = ("times", "bf16", "mixtures", "dynamic", "ranks", "float32")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=stages, metavar="STAGE", help=", ".join(stages))
    parser.add_argument("--data", type=Path, help="folder of the corpora")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder for the records")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, help="fewer, for a first look")
    parser.add_argument("--recipes", nargs="+", default=(), help="of those that are trained (default: all)")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.data, options.results, options.device, options.epochs, options.recipes)
    for stage in options.stages:
        began = time.monotonic()
        act: Callable[[], None] = getattr(bench, stage)
        act()
        print(f"== {stage}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
