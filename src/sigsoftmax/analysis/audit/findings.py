"""An audit of an output layer: the parts that need no target, one after the other.

What was finished stays in :class:`Findings` whatever happens to the rest, so that an audit that is interrupted, or that
cannot do one of its parts, still says what it knows.

Shapes: N contexts, V words.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sigsoftmax.analysis.audit.argmax import argmax_counts, has_rising_phi
from sigsoftmax.analysis.audit.gradient_share import gradient_share
from sigsoftmax.analysis.audit.nonlinearity import bend
from sigsoftmax.analysis.audit.truncation import truncation, truncation_widths
from sigsoftmax.analysis.output_layer import Contexts, OutputLayer, blocks_of
from sigsoftmax.analysis.spectrum.matrix_readers import from_array
from sigsoftmax.analysis.spectrum.rank_bounds import rank_bounds
from sigsoftmax.analysis.spectrum.streaming import SpectrumOptions, streamed_spectrum
from sigsoftmax.records.schemas.audits import ArgmaxCounts, Bend, GradientShare, Truncation
from sigsoftmax.records.schemas.spectra import RankBounds, Spectrum

__all__ = [
    "AuditSettings",
    "Findings",
    "Subject",
    "contexts_for_bounds",
    "contexts_within",
    "log_probs_of",
    "measure",
]

Progress = Callable[[str], None]
BLOCK_CONTEXTS, BLOCK_WORDS, LEAST_BLOCK = 1.5, 6.0, 256
"""The block from which a rank is bounded, in units of d + 2. Each context costs a row over all words, words cost
little: few of the former need many of the latter, or the smallest singular values sink below the threshold."""
COPIES = 3
"""matrices of contexts x words in float64 that an audit holds at once: log P, its truncation, and temporaries"""


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """How much work an audit may be."""

    memory: int
    """bytes, the output matrix included"""
    seed: int = 0
    sampled_contexts: int = 256
    """contexts in which slopes and gradients are looked at"""
    argmax_words: int = 1000
    """words that are asked whether they can come first; 0 leaves the question out"""
    argmax_seconds: float = 60.0
    argmax_seconds_per_word: float = 10.0

    bounds_only: bool = False
    """nothing but bounds of the rank"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is audited: a layer in some contexts, or a matrix of log-probabilities alone."""

    name: str
    layer: OutputLayer | None
    contexts: Contexts | None
    log_p_NV: Tensor | None
    """None if only the layer itself is looked at"""
    precision: torch.dtype | None = None
    """of log-probabilities that were computed elsewhere; None if they were computed here, in float64"""
    more_contexts: Contexts | None = None
    """for the bounds, which hold no log P: more of the contexts, where there are more"""


@dataclass
class Findings:
    """What has been measured so far."""

    bounds: RankBounds | None = None
    spectrum: Spectrum | None = None
    truncation: Truncation | None = None
    bend: Bend | None = None
    gradient: GradientShare | None = None
    argmax: ArgmaxCounts | None = None
    notes: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    """parts that are not finished"""


def contexts_within(memory: int, words: int, layer: OutputLayer | None, *, wanted: int) -> int:
    """How many contexts an audit can hold; ValueError if they are too few to be worth it."""
    held = 0 if layer is None else layer.weight_Vd.numel() * layer.weight_Vd.element_size()
    possible = int((memory - held) * 0.8) // (COPIES * 8 * words)
    if possible < min(wanted, 16):
        raise ValueError(
            f"{memory / 2**30:.2g} GiB are too few: the output matrix takes {held / 2**30:.2g}, and each context of "
            f"{words:,} words {COPIES * 8 * words / 2**20:.2g} MiB; raise --memory"
        )
    return min(wanted, possible)


def log_probs_of(layer: OutputLayer, contexts: Contexts, *, memory: int, progress: Progress) -> Tensor:
    """(N, V) in float64, a block of contexts at a time."""
    out_NV = torch.empty(len(contexts), layer.words, dtype=torch.float64, device=layer.weight_Vd.device)
    for block in blocks_of(len(contexts), layer.rows_at_once(memory // 8)):
        progress(f"log-probabilities: context {block.stop} of {len(contexts)}")
        out_NV[block] = layer.log_probs(contexts[block])
    return out_NV


def measure(subject: Subject, settings: AuditSettings, findings: Findings, progress: Progress = lambda _: None) -> None:
    """Fill ``findings`` part by part."""
    parts = _parts(subject, settings, findings, progress)
    findings.pending[:] = list(parts)
    for name, part in parts.items():
        progress(name)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                part()
            except ValueError as error:
                # A part that refuses its input does not take the others with it.
                findings.notes.append(_sentence(f"{name} could not be measured: {error}"))
        findings.notes += [_sentence(str(warning.message)) for warning in warned]
        findings.pending.remove(name)


def _parts(
    subject: Subject, settings: AuditSettings, findings: Findings, progress: Progress
) -> dict[str, Callable[[], None]]:
    layer, contexts, log_p_NV = subject.layer, subject.contexts, subject.log_p_NV
    part_memory = settings.memory // 8
    parts: dict[str, Callable[[], None]] = {}

    def of_spectrum() -> None:
        findings.spectrum = _spectrum(subject, progress)

    def of_truncation() -> None:
        assert log_p_NV is not None
        rows, words = log_p_NV.shape
        widths = truncation_widths(rows, words, None if layer is None else layer.width)
        findings.truncation = truncation(log_p_NV, widths, memory=part_memory, progress=progress)

    def of_bend() -> None:
        assert layer is not None and contexts is not None
        findings.bend = bend(layer, contexts[: settings.sampled_contexts], memory=part_memory, progress=progress)

    def of_gradient() -> None:
        assert layer is not None and contexts is not None
        findings.gradient = gradient_share(
            layer, contexts[: settings.sampled_contexts], memory=part_memory, seed=settings.seed, progress=progress
        )

    def of_argmax() -> None:
        assert layer is not None
        findings.argmax = argmax_counts(
            layer,
            words_in_question=settings.argmax_words,
            seen=None if log_p_NV is None else _first_words(log_p_NV),
            seconds=settings.argmax_seconds,
            seconds_per_word=settings.argmax_seconds_per_word,
            memory=part_memory,
            seed=settings.seed,
            progress=progress,
        )

    def of_bounds() -> None:
        assert layer is not None
        own = contexts if subject.more_contexts is None else subject.more_contexts
        seen = _contexts_for_bounds(layer, own, settings.seed)
        bounds = rank_bounds(
            layer.with_contexts(seen),
            block_words=max(LEAST_BLOCK, math.ceil(BLOCK_WORDS * (layer.width + 2))),
            seed=settings.seed,
            source="log-probabilities in "
            + ("the contexts" if seen is contexts else "more of the contexts" if seen is own else seen.description),
            progress=lambda done: progress(str(done)),
        )
        findings.bounds = dataclasses.replace(bounds, head=layer.head_text)

    if layer is not None:
        parts["the bounds of the rank"] = of_bounds
    if settings.bounds_only:
        return parts
    if log_p_NV is not None:
        parts |= {"the spectrum": of_spectrum, "the truncation": of_truncation}
        if layer is not None:
            parts |= {"the bend of phi": of_bend, "the gradient": of_gradient}
    if layer is not None and settings.argmax_words:
        if has_rising_phi(layer):
            parts["the words that can come first"] = of_argmax
        else:
            findings.notes.append(
                "Which words can come first was not decided: that is done for one rising phi shared by all words, and "
                f"{layer.head_text} can change the order of the logits (a mixture, a parameter per class) or has ties."
            )
    return parts


def _spectrum(subject: Subject, progress: Progress) -> Spectrum:
    assert subject.log_p_NV is not None
    source = from_array(subject.log_p_NV, description=f"log-probabilities of {subject.name}")
    options = SpectrumOptions(precision=subject.precision, device=subject.log_p_NV.device)
    return streamed_spectrum(source, options, progress=lambda done: progress(str(done)))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].removesuffix(".") + "."


def contexts_for_bounds(width: int) -> int:
    """As many as show the width of a layer."""
    return max(LEAST_BLOCK, math.ceil(BLOCK_CONTEXTS * (width + 2)))


def _contexts_for_bounds(layer: OutputLayer, contexts: Contexts | None, seed: int) -> Contexts:
    """The contexts themselves, or, where they are too few to show the width, Gaussian vectors like them."""
    needed = contexts_for_bounds(layer.width)
    if contexts is not None and (len(contexts) >= needed or layer.components > 1):
        return contexts
    generator = torch.Generator().manual_seed(seed)
    hidden_Nd = torch.randn(needed, layer.width, generator=generator)
    if contexts is None:
        return Contexts.of_rows(hidden_Nd, description=f"{needed:,} Gaussian vectors")
    seen_Nd = contexts.hidden_NKd[:, 0].float().cpu()
    spread_d = seen_Nd.std(0) if len(seen_Nd) > 1 else seen_Nd.abs()[0]
    hidden_Nd = seen_Nd.mean(0) + hidden_Nd * spread_d
    return Contexts.of_rows(
        hidden_Nd, description=f"{needed:,} Gaussian vectors of the mean and deviation of the contexts"
    )


def _first_words(log_p_NV: Tensor) -> Tensor:
    """Words that come first in some context, alone and by more than rounding."""
    found = [rows.topk(2, dim=1) for rows in log_p_NV.split(256)]
    values, indices = torch.cat([top.values for top in found]), torch.cat([top.indices for top in found])
    return indices[values[:, 0] - values[:, 1] > 1e-9, 0].unique()
