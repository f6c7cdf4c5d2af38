"""The options of an audit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sigsoftmax.analysis.audit.findings import AuditSettings
from sigsoftmax.experiments.fitted_heads import fitted_heads
from sigsoftmax.experiments.runs.run import check_out
from sigsoftmax.family.heads import Head
from sigsoftmax.lm.training.trainer import resolve_device

__all__ = ["AuditConfig"]

HEADS = ("softmax", "sigsoftmax", "gss(k=0.2)", "gss(k=0)", "mos(K=4)")
LEAST_MEMORY = 1 << 26
LEAST = {"window": 2, "contexts": 1, "starts": 1, "iterations": 1, "workers": 1, "fit_contexts": 1, "fit_words": 2}
LEAST |= {"seed": 0, "argmax_words": 0, "argmax_seconds": 0}
"""smallest values of numbers that are given"""


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """The model to audit, the contexts and the truth to compare it with, and the effort that is allowed."""

    model: str
    """a Hugging Face causal language model (a folder or a name on the hub), a checkpoint of a run, a file .npz or
    .safetensors with the arrays H, W and b or with an output matrix alone, or a file .npy of log-probabilities"""
    text: Path | None = None
    """text whose contexts are looked at; None: a small English one that is generated"""
    data: Path | None = None
    """folder of the text that a checkpoint was trained on, with train.txt, valid.txt and test.txt; None: where
    ``sigsoftmax data fetch`` puts it"""
    teacher: str | None = None
    """a Hugging Face model over the same tokens, whose distributions count as the truth"""
    target: str | None = None
    """the truth, otherwise: a file of probabilities or log-probabilities, or a language such as
    ``of_rank(contexts=400, words=200, rank=100)``"""
    function: str | None = None
    """the output function, where a file does not say it or the model's is not recognised; arrays may be a mixture's"""
    bounds_only: bool = False
    """nothing but bounds of the rank; of a Hugging Face model only the output layer is read"""
    trust_remote_code: bool = False
    """allows Python code that a Hugging Face model (or teacher) brings along to be run"""
    contexts: int | None = None
    """contexts in which the output is looked at; None: twice the width, at most 2048, and what the memory holds"""
    window: int = 128
    """tokens of the text that the model sees at once"""
    memory_gib: float = 8.0
    """memory that the audit may use, the model included"""
    argmax_words: int = 1000
    """tokens that are asked whether they can ever come first (a sample, if there are more); 0: none"""
    argmax_seconds: float = 60.0
    """seconds for the question which tokens can come first"""
    heads: tuple[str, ...] = HEADS
    """heads to fit to the target, as recipes name them (softmax,gss-0.2,mos), beside the model's own"""
    widths: tuple[int, ...] = ()
    """widths of these fits; empty: that of the layer"""
    fit_contexts: int = 500
    """contexts of the fits, at most"""
    fit_words: int = 500
    """tokens of the fits, at most: the likeliest"""
    starts: int = 3
    """starting points of each fit, at least"""
    iterations: int = 300
    """iterations of each fit, at most"""
    workers: int = 2
    """number of processes"""
    device: str = "cpu"
    """cpu, cuda or cuda:1"""
    seed: int = 0
    """seed of all that is drawn: contexts, tokens, and starts of the fits"""
    out: Path = Path("runs/audit")
    """folder for the records"""

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise ValueError("name something to audit: a model's folder or name, or a file")
        if None not in (self.teacher, self.target):
            raise ValueError("give either --teacher or --target, not both: there is one truth at a time")
        if self.bounds_only and any((self.teacher, self.target, self.text, self.data)):
            raise ValueError(
                "--bounds-only looks at the output layer alone; leave out --text, --data, --teacher and --target"
            )
        if None not in (self.text, self.data):
            raise ValueError("give either --text or --data, not both: contexts are taken from one text")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} must be at least {least}, got {value:g}")
        if not self.memory >= LEAST_MEMORY:
            raise ValueError(
                f"--memory is in GiB and must be at least {LEAST_MEMORY / 2**30:g}, got {self.memory_gib:g}"
            )
        if min(self.widths, default=1) < 1:
            raise ValueError(f"widths must be positive, got {', '.join(map(str, self.widths))}")
        if self.text is not None and not self.text.is_file():
            raise ValueError(f"no text at {self.text}; --text names a file in UTF-8")
        check_out(self.out)
        fitted_heads(self.heads)
        if self.function is not None:
            Head.parse(self.function, allow_options=True)
        resolve_device(self.device)

    @property
    def memory(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def records(self) -> Path:
        """the file of this audit, named after what was audited"""
        name = re.sub(r"[^\w.-]+", "-", self.model.strip("/.")).strip("-") or "model"
        return self.out / f"{name}.jsonl"

    def settings(self) -> AuditSettings:
        return AuditSettings(
            memory=self.memory,
            seed=self.seed,
            argmax_tokens=self.argmax_words,
            argmax_seconds=self.argmax_seconds,
            bounds_only=self.bounds_only,
        )
