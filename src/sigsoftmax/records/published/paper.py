"""Published results of others: tables 1 to 5 of the paper, and results at the same stages elsewhere.

These are facts with a source, not measurements of ours. Heads and corpora have the names that records use. Tables 1
and 2 are the last stage of tables 4 and 5, so that the numbers stand here once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from sigsoftmax.records.statistics import Gap, Sample

__all__ = [
    "CORPORA",
    "HEADS",
    "PAPER",
    "RANKS",
    "RESULTS",
    "STAGES",
    "TABLES",
    "PublishedRank",
    "PublishedResult",
    "PublishedTable",
    "Split",
    "Stage",
    "published_gap",
    "results",
]

Stage = Literal["trained", "finetuned", "dynamic evaluation"]
Split = Literal["valid", "test"]

STAGES: tuple[Stage, ...] = ("trained", "finetuned", "dynamic evaluation")
SPLITS: tuple[Split, ...] = ("valid", "test")
HEADS = ("softmax", "relu", "sigmoid", "sigsoftmax", "mos(K=15)", "moss(K=15)")
"""in the order of the paper's columns"""
CORPORA: Mapping[str, str] = {"ptb": "Penn Treebank", "wikitext-2": "WikiText-2"}

PAPER = (
    'Kanai, Fujiwara, Yamanaka and Adachi, "Sigsoftmax: Reanalysis of the Softmax Bottleneck", arXiv 1805.10829 (2018)'
)
AWD = "the README of salesforce/awd-lstm-lm"
MOS = 'Yang et al., "Breaking the Softmax Bottleneck" (2018), as listed by NLP-progress'
KRAUSE = 'Krause et al., "Dynamic Evaluation of Neural Sequence Models" (2018), as listed by NLP-progress'


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """A table of the paper."""

    number: int
    title: str
    corpus: str
    """empty: both"""
    stages: tuple[Stage, ...] = ()
    """whose perplexities it lists; none for the table of ranks"""


TABLES = (
    PublishedTable(number=1, title="Perplexity on Penn Treebank", corpus="ptb", stages=("dynamic evaluation",)),
    PublishedTable(number=2, title="Perplexity on WikiText-2", corpus="wikitext-2", stages=("dynamic evaluation",)),
    PublishedTable(number=3, title="Ranks of the log-output matrices", corpus=""),
    PublishedTable(number=4, title="Perplexity on Penn Treebank, stage by stage", corpus="ptb", stages=STAGES),
    PublishedTable(number=5, title="Perplexity on WikiText-2, stage by stage", corpus="wikitext-2", stages=STAGES),
)


@dataclass(frozen=True, kw_only=True)
class PublishedResult:
    """A published perplexity."""

    corpus: str
    head: str
    """as in ``HEADS``"""
    stage: Stage
    split: Split
    perplexity: float
    deviation: float | None = None
    """standard deviation over the seeds; None where none was given"""
    seeds: int | None = None
    """number of seeds; None where it was not said"""
    source: str
    """the publication"""


@dataclass(frozen=True, kw_only=True)
class PublishedRank:
    """The rank of the log-output matrix over the test set, by the threshold of Press et al. with eps of float32."""

    corpus: str
    head: str
    rank: int
    source: str = PAPER


PAPER_RESULTS = """
ptb         trained             valid   61.1 0.4  1850 200       60.7 0.2  61.0 0.2  58.4 0.2   58.4 0.3
ptb         trained             test    58.8 0.4  1540 200       58.5 0.2  58.4 0.2  56.3 0.3   56.2 0.2
ptb         finetuned           valid   59.2 0.4  1510 100       58.7 0.4  59.2 0.4  56.8 0.2   56.9 0.1
ptb         finetuned           test    57.0 0.6  1240 80        56.4 0.2  56.6 0.4  54.7 0.08  54.6 0.2
ptb         dynamic evaluation  valid   51.2 0.5  4910 5000      49.2 0.4  49.7 0.5  48.6 0.2   48.3 0.1
ptb         dynamic evaluation  test    50.5 0.5  278000 800000  48.9 0.3  49.2 0.4  48.0 0.1   47.7 0.07
wikitext-2  trained             valid   68.0 0.2  874 70         72.8 0.3  67.8 0.1  65.9 0.5   65.1 0.2
wikitext-2  trained             test    65.2 0.2  797 70         69.7 0.3  65.0 0.2  63.3 0.4   62.5 0.3
wikitext-2  finetuned           valid   67.4 0.2  648 10         70.8 0.1  67.4 0.2  64.0 0.3   63.7 0.3
wikitext-2  finetuned           test    64.7 0.2  593 8          68.2 0.1  64.2 0.1  61.4 0.4   61.1 0.3
wikitext-2  dynamic evaluation  valid   45.3 0.2  1790 800       45.7 0.1  44.9 0.1  42.5 0.1   42.1 0.2
wikitext-2  dynamic evaluation  test    43.3 0.1  23000 20000    43.5 0.1  42.9 0.1  40.8 0.03  40.3 0.2
"""
"""mean and standard deviation of each head, in the order of ``HEADS``"""
OTHER_RESULTS: tuple[tuple[str, str, Stage, str, float, float], ...] = (
    ("ptb", "softmax", "trained", AWD, 61.2, 58.8),
    ("ptb", "softmax", "finetuned", AWD, 58.8, 56.5),
    ("ptb", "softmax", "dynamic evaluation", KRAUSE, 51.6, 51.1),
    ("ptb", "mos(K=15)", "trained", MOS, 58.08, 55.97),
    ("ptb", "mos(K=15)", "finetuned", MOS, 56.54, 54.44),
    ("ptb", "mos(K=15)", "dynamic evaluation", MOS, 48.33, 47.69),
    ("wikitext-2", "softmax", "trained", AWD, 68.7, 65.6),
    ("wikitext-2", "softmax", "finetuned", AWD, 67.4, 64.7),
    ("wikitext-2", "softmax", "dynamic evaluation", KRAUSE, 46.4, 44.3),
    ("wikitext-2", "mos(K=15)", "finetuned", MOS, 63.88, 61.45),
    ("wikitext-2", "mos(K=15)", "dynamic evaluation", MOS, 42.41, 40.68),
)
"""validation and test perplexity of single published models"""


def _results() -> Iterator[PublishedResult]:
    for line in PAPER_RESULTS.strip().splitlines():
        corpus, stage, split, *values = re.split(r"\s{2,}", line)
        for head, value in zip(HEADS, values, strict=True):
            mean, deviation = map(float, value.split())
            seeds = 5 if head.startswith("mos") else 10
            place = {"corpus": corpus, "head": head, "stage": stage, "split": split}
            yield PublishedResult(**place, perplexity=mean, deviation=deviation, seeds=seeds, source=PAPER)  # type: ignore[arg-type]
    for corpus, head, stage, source, *perplexities in OTHER_RESULTS:
        for split, perplexity in zip(SPLITS, perplexities, strict=True):
            place = {"corpus": corpus, "head": head, "stage": stage, "split": split}
            yield PublishedResult(**place, perplexity=perplexity, source=source)  # type: ignore[arg-type]


RESULTS: tuple[PublishedResult, ...] = tuple(_results())

RANKS: tuple[PublishedRank, ...] = tuple(
    PublishedRank(corpus=corpus, head=head, rank=rank)
    for corpus, ranks in (
        ("ptb", (402, 8243, 1304, 4640, 9980, 9986)),
        ("wikitext-2", (402, 31400, 463, 5465, 12093, 19834)),
    )
    for head, rank in zip(HEADS, ranks, strict=True)
)


def results(
    *,
    corpus: str | None = None,
    head: str | None = None,
    stage: Stage | None = None,
    split: Split | None = None,
    source: str | None = PAPER,
) -> list[PublishedResult]:
    """The published perplexities that agree with all that is given; ``source=None`` takes every source."""
    wanted = {"corpus": corpus, "head": head, "stage": stage, "split": split, "source": source}
    given = {key: value for key, value in wanted.items() if value is not None}
    return [result for result in RESULTS if all(getattr(result, key) == value for key, value in given.items())]


def published_gap(corpus: str, first: str, second: str, stage: Stage, split: Split) -> Gap | None:
    """The gap between two heads in the paper, where it has both."""
    samples = []
    for head in (first, second):
        values = results(corpus=corpus, head=head, stage=stage, split=split)
        if not values or values[0].seeds is None:
            return None
        samples.append(Sample(values[0].perplexity, values[0].deviation, values[0].seeds))
    return Gap(*samples)
