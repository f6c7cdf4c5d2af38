"""Curves of the reference implementations, which the language models here are compared with.

They are records like any other: ``reference_curves.jsonl`` beside this file holds them, with the revision of the
reference and the command that was run, as far as these were recorded. ``benchmarks/reference_curves.py`` measures them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from sigsoftmax.records.envelope import read_payloads

__all__ = ["PATH", "ReferenceCurve", "reference_curves"]

PATH = Path(__file__).with_name("reference_curves.jsonl")


@dataclass(frozen=True, kw_only=True)
class ReferenceCurve:
    """Validation perplexity of a reference implementation after epochs of training, as it reports it.

    The references divide the sum of the losses by all rows of the text, not by the rows scored.
    """

    KIND: ClassVar[str] = "reference curve"
    VERSION: ClassVar[int] = 1

    corpus: str
    head: str
    seed: int
    precision: str
    epochs: tuple[int, ...]
    valid_perplexities: tuple[float, ...]
    """after each of these epochs"""
    first_train_losses: tuple[float, ...]
    """training loss in the first epoch, in nats, averaged over each 200 updates"""
    repository: str
    """on GitHub, as owner/name"""
    revision: str
    """commit of the repository; empty if it was not recorded"""
    command: str
    """command that was run in the checkout of the repository; empty if it was not recorded"""
    changes: str
    """changes that make it run with a present torch, in words; empty if they were not recorded"""

    @property
    def perplexities(self) -> Mapping[int, float]:
        """The validation perplexity after each epoch."""
        return dict(zip(self.epochs, self.valid_perplexities, strict=True))

    @property
    def source(self) -> str:
        """The origin of the curve in words."""
        revision = f"at {self.revision[:7]}" if self.revision else "revision not recorded"
        return f"the training loop of {self.repository} ({revision}), {self.precision}, {max(self.epochs)} epochs"


@lru_cache
def reference_curves() -> tuple[ReferenceCurve, ...]:
    """All curves that are known."""
    return tuple(read_payloads(PATH, ReferenceCurve))
