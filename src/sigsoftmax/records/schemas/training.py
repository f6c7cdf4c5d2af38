"""Training, evaluation, dynamic evaluation and comparison of language models.

Losses are in nats per token; a perplexity is their exp and is derived, never stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from sigsoftmax.records.schemas.base import Extent, MeasuredPayload
from sigsoftmax.records.statistics import perplexity

__all__ = [
    "Budget",
    "ComparisonRecord",
    "DynamicEvaluationRecord",
    "EpochRecord",
    "EvaluationRecord",
    "RunIdentity",
    "SplitLoss",
    "SplitMeasurement",
    "TrainingResult",
]


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """The run that was trained: enough to tell runs apart and to put seeds of the same thing together."""

    recipe: str
    """name of the recipe, as ``ptb-sigsoftmax``"""
    overrides: tuple[str, ...] = ()
    """fields that differ from the named recipe, as ``training.epochs=22``"""
    phase: str
    """``train`` or ``finetune``"""
    head: str
    """as ``sigsoftmax`` or ``moss(K=15)``"""
    corpus: str
    """as ``ptb``, ``wikitext-2``, ``language`` or the name of a folder"""
    corpus_checksum: str
    seed: int
    precision: str
    """``float32``, ``tf32`` or ``bf16``"""
    parameters: int

    def __post_init__(self) -> None:
        for name in ("recipe", "phase", "head", "corpus"):
            if not getattr(self, name):
                raise ValueError(f"{name} of a run must be a name, got an empty text")


@dataclass(frozen=True, kw_only=True)
class EpochRecord(MeasuredPayload):
    """An epoch of training and the validation after it."""

    KIND = "epoch"
    VERSION = 1
    SUBJECT = ("run", "epoch")

    run: RunIdentity
    epoch: int
    """1 for the first"""
    optimizer: str
    """``sgd`` or ``asgd``: with the latter the validated weights are the averages"""
    updates: int
    """in this epoch"""
    train_loss: float
    """the mean negative log-likelihood under dropout, without AR and TAR"""
    train_loss_parts: tuple[float, ...]
    """the same over every 200 updates in a row"""
    valid_loss: float
    valid_loss_over_rows: float
    """the published scripts' value: the sum divided by the rows of the batch, not by the rows scored"""
    evaluation_precision: str = "float32"
    """arithmetic of the validation: ``float32``, or ``tf32`` for its products"""
    recurrence: str = ""
    """the code that computed the LSTM layers, why, and any change of it by a resumption; empty in older records"""
    is_best: bool
    seconds_training: float
    seconds_validation: float
    concurrent_runs: int = 1
    """number of runs that shared the device"""
    peak_mib: float | None = None
    """the most memory the run's process held on the accelerator"""

    @property
    def is_persistent(self) -> bool:
        """The persistent kernels computed the LSTM layers, and not torch's own LSTM."""
        return "persistent kernels" in self.recurrence

    @property
    def valid_perplexity(self) -> float:
        return perplexity(self.valid_loss)

    @property
    def seconds(self) -> float:
        """Duration of training and validation."""
        return self.seconds_training + self.seconds_validation


@dataclass(frozen=True, kw_only=True)
class SplitMeasurement(MeasuredPayload):
    """A measurement of a trained model on one split of its text."""

    run: RunIdentity
    split: str
    """``valid`` or ``test``"""


@dataclass(frozen=True, kw_only=True)
class SplitLoss(SplitMeasurement):
    """The loss of a trained model on one split of its text."""

    loss: float
    tokens: int
    """scored"""
    seconds: float

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(SplitLoss):
    """A static evaluation of a checkpoint."""

    KIND = "evaluation"
    VERSION = 1
    SUBJECT = ("run", "split", "batch")

    batch: int
    loss_over_rows: float
    """the published scripts' value"""
    precision: str = "float32"
    """arithmetic of the evaluation: ``float32``, or ``tf32`` for its products"""
    epoch: int
    """epoch of training whose checkpoint this is"""


@dataclass(frozen=True, kw_only=True)
class DynamicEvaluationRecord(SplitLoss):
    """One dynamic evaluation: one point of the grid on one split. All numbers are in the RMS form."""

    KIND = "dynamic-evaluation"
    VERSION = 2
    SUBJECT = ("run", "split", "learning_rate", "decay", "epsilon", "window", "clip_in_place")

    learning_rate: float
    decay: float
    epsilon: float
    window: int
    complete: bool
    """True if the whole split was evaluated"""
    chosen: bool
    """True if this is the point that won on validation, or the only one"""
    precision: str = "float32"
    """arithmetic of the windows that adapt; weights and steps are float32 in any"""
    clip_in_place: bool = False
    """True if the rates of one point stayed clipped in the next, as in the published script"""
    epoch: int | None = None
    """epoch of training whose weights these were; None in records of version 1"""

    @property
    def extent(self) -> Extent:
        return {"tokens": self.tokens}


@dataclass(frozen=True, kw_only=True)
class TrainingResult(MeasuredPayload):
    """The result of a training that has ended."""

    run: RunIdentity
    """identity of the last phase"""
    epochs: int
    """epochs of all phases"""
    updates: int
    valid_loss: float
    """in the columns that the recipe validates in"""
    test_loss: float
    """in one column"""
    kl: float | None
    """mean over test positions of the exact KL(truth || model), where the truth is known"""
    entropy_rate: float | None
    """entropy rate of the language, where it is known"""
    seconds: float
    """duration of training and validation"""

    @property
    def valid_perplexity(self) -> float:
        return perplexity(self.valid_loss)

    @property
    def test_perplexity(self) -> float:
        return perplexity(self.test_loss)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The settings that all runs of a comparison share; they vary neither with the head nor with the seed."""

    setting: str
    """setting of the recipes, as ``language``"""
    changes: tuple[str, ...]
    """made to every recipe, as ``training.epochs=4``; also those that leave a recipe as it is, since what another head
    has by default is a change to this one"""
    epochs: int
    """epochs of all phases, as planned for softmax"""


@dataclass(frozen=True, kw_only=True)
class ComparisonRecord(TrainingResult):
    """A head among others under an equal budget."""

    KIND = "comparison"
    VERSION = 2
    SUBJECT = ("run", "epochs")

    kl_standard_error: float | None
    rank: int | None
    """rank of the log-output matrix, under the paper's threshold"""
    rank_bound: int | None
    words: int
    contexts: int | None
    """columns of the matrix whose rank it is"""
    budget: Budget | None = None
    """None in records of version 1"""

    @property
    def extent(self) -> Extent:
        """Distance to the truth and rank are parts that a measurement may lack."""
        known = {"kl": self.kl is not None, "rank": self.rank is not None}
        return {part: 1.0 for part, is_known in known.items() if is_known}
