"""An audit of an output layer: the parts that need no target, one after the other.

What was finished stays in :class:`Findings` whatever happens to the rest, so that an audit that is interrupted, or that
cannot do one of its parts, still says what it knows.

Shapes: N contexts, K components, V vocabulary, d width.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sigsoftmax.analysis.audit.argmax import argmax_counts, has_rising_phi
from sigsoftmax.analysis.audit.gradient_share import gradient_share
from sigsoftmax.analysis.audit.nonlinearity import use_of_nonlinearity
from sigsoftmax.analysis.audit.truncation import truncation, truncation_widths
from sigsoftmax.analysis.head_weights import Contexts, HeadWeights
from sigsoftmax.analysis.progress import Progress, Say, nothing_said
from sigsoftmax.analysis.spectrum.bounds import rank_bounds
from sigsoftmax.analysis.spectrum.matrix_readers import from_array
from sigsoftmax.analysis.spectrum.streaming import SpectrumOptions, streamed_spectrum
from sigsoftmax.records.schemas.audits import ArgmaxCounts, GradientShare, Truncation, UseOfNonlinearity
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

BLOCK_CONTEXTS, BLOCK_TOKENS, LEAST_BLOCK = 1.5, 6.0, 256
"""The block from which a rank is bounded, in units of d + 2. Each context costs a row over the whole vocabulary, tokens
cost little: few of the former need many of the latter, or the smallest singular values sink below the threshold."""
COPIES = 3
"""matrices of contexts x vocabulary in float64 that an audit holds at once: log P, its truncation, and temporaries"""


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """Limits on the work of an audit."""

    memory: int
    """bytes, the output matrix included"""
    seed: int = 0
    sampled_contexts: int = 256
    """contexts in which slopes and gradients are looked at"""
    argmax_tokens: int = 1000
    """tokens that are asked whether they can come first; 0 leaves the question out"""
    argmax_seconds: float = 60.0
    argmax_seconds_per_token: float = 10.0

    bounds_only: bool = False
    """nothing but bounds of the rank"""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The thing that is audited: a layer in some contexts, or a matrix of log-probabilities alone."""

    name: str
    layer: HeadWeights | None
    contexts: Contexts | None
    log_p_NV: Tensor | None
    """None if only the layer itself is looked at"""
    precision: torch.dtype | None = None
    """precision of log-probabilities that were computed elsewhere; None if they were computed here, in float64"""
    more_contexts: Contexts | None = None
    """for the bounds, which hold no log P: more of the contexts, where there are more"""


@dataclass
class Findings:
    """The results so far."""

    bounds: RankBounds | None = None
    spectrum: Spectrum | None = None
    truncation: Truncation | None = None
    bend: UseOfNonlinearity | None = None
    gradient: GradientShare | None = None
    argmax: ArgmaxCounts | None = None
    notes: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    """parts that are not finished"""


def contexts_within(memory: int, vocabulary: int, layer: HeadWeights | None, *, wanted: int) -> int:
    """The number of contexts that an audit can hold; ValueError if they are too few to be worth it."""
    held = 0 if layer is None else layer.weight_Vd.nbytes
    bytes_per_context = COPIES * 8 * vocabulary
    possible = int((memory - held) * 0.8) // bytes_per_context
    if possible < min(wanted, 16):
        raise ValueError(
            f"{memory / 2**30:.2g} GiB are too few: the output matrix takes {held / 2**30:.2g}, and each context of "
            f"{vocabulary:,} tokens {bytes_per_context / 2**20:.2g} MiB; raise --memory"
        )
    return min(wanted, possible)


def log_probs_of(layer: HeadWeights, contexts: Contexts, *, memory: int, progress: Say) -> Tensor:
    """The log-probabilities, (N, V) in float64, a block of contexts at a time."""
    out_NV = torch.empty(len(contexts), layer.vocabulary, dtype=torch.float64, device=layer.weight_Vd.device)
    for stop, chosen in layer.blocks(contexts, memory // 8):
        progress(f"log-probabilities: context {stop} of {len(contexts)}")
        out_NV[stop - len(chosen) : stop] = layer.log_probs(chosen)
    return out_NV


def measure(subject: Subject, settings: AuditSettings, findings: Findings, progress: Say = nothing_said) -> None:
    """Fill ``findings`` part by part."""
    parts = _parts(subject, settings, findings, progress)
    findings.pending[:] = list(parts)
    for name, (attribute, part) in parts.items():
        progress(name)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                setattr(findings, attribute, part())
            except ValueError as error:
                # A part that refuses its input does not take the others with it.
                findings.notes.append(_sentence(f"{name} could not be measured: {error}"))
        findings.notes += [_sentence(str(warning.message)) for warning in warned]
        findings.pending.remove(name)


def _parts(
    subject: Subject, settings: AuditSettings, findings: Findings, progress: Say
) -> dict[str, tuple[str, Callable[[], object]]]:
    """The parts by name: the attribute of the findings that each fills, and the function that does it."""
    layer, contexts, log_p_NV = subject.layer, subject.contexts, subject.log_p_NV
    limits: dict[str, Any] = {"memory": settings.memory // 8, "progress": progress}
    parts: dict[str, tuple[str, Callable[[], object]]] = {}

    def report(done: Progress) -> None:
        progress(str(done))

    if layer is not None:
        parts["the bounds of the rank"] = "bounds", partial(_bounds, layer, subject, settings.seed, report)
    if settings.bounds_only:
        return parts
    if log_p_NV is not None:
        reader = from_array(log_p_NV, description=f"log-probabilities of {subject.name}")
        options = SpectrumOptions(precision=subject.precision, device=log_p_NV.device)
        widths = truncation_widths(len(log_p_NV), log_p_NV.shape[1], None if layer is None else layer.width)
        parts["the spectrum"] = "spectrum", partial(streamed_spectrum, reader, options, progress=report)
        parts["the truncation"] = "truncation", partial(truncation, log_p_NV, widths, **limits)
        if layer is not None:
            assert contexts is not None
            sample = contexts[: settings.sampled_contexts]
            parts["the nonlinearity of phi"] = "bend", partial(use_of_nonlinearity, layer, sample, **limits)
            parts["the gradient"] = "gradient", partial(gradient_share, layer, sample, seed=settings.seed, **limits)
    if layer is not None and settings.argmax_tokens:
        if has_rising_phi(layer):
            parts["the tokens that can come first"] = (
                "argmax",
                lambda: argmax_counts(
                    layer,
                    tokens_in_question=settings.argmax_tokens,
                    seen=None if log_p_NV is None else _first_tokens(log_p_NV),
                    seconds=settings.argmax_seconds,
                    seconds_per_token=settings.argmax_seconds_per_token,
                    seed=settings.seed,
                    **limits,
                ),
            )
        else:
            findings.notes.append(
                "Which tokens can come first was not decided: that is done for one rising phi shared by all tokens. "
                f"{layer.head_text} can change the order of the logits (a mixture, a parameter per class) or has ties."
            )
    return parts


def _bounds(layer: HeadWeights, subject: Subject, seed: int, report: Callable[[Progress], None]) -> RankBounds:
    own = subject.contexts if subject.more_contexts is None else subject.more_contexts
    seen = _contexts_for_bounds(layer, own, seed)
    if seen is subject.contexts:
        where = "the contexts"
    else:
        where = "more of the contexts" if seen is own else seen.description
    return rank_bounds(
        layer,
        seen,
        block_tokens=max(LEAST_BLOCK, math.ceil(BLOCK_TOKENS * (layer.width + 2))),
        seed=seed,
        source=f"log-probabilities in {where}",
        progress=report,
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].removesuffix(".") + "."


def contexts_for_bounds(width: int) -> int:
    """The number of contexts that shows the width of a layer."""
    return max(LEAST_BLOCK, math.ceil(BLOCK_CONTEXTS * (width + 2)))


def _contexts_for_bounds(layer: HeadWeights, contexts: Contexts | None, seed: int) -> Contexts:
    """The contexts themselves, or, where they are too few to show the width, Gaussian vectors like them."""
    needed = contexts_for_bounds(layer.width)
    if contexts is not None and (len(contexts) >= needed or layer.components > 1):
        return contexts
    generator = torch.Generator().manual_seed(seed)
    hidden_Nd = torch.randn(needed, layer.width, generator=generator)
    description = f"{needed:,} Gaussian vectors"
    if contexts is None:
        return Contexts.of_rows(hidden_Nd, description=description)
    seen_Nd = contexts.hidden_NKd[:, 0].float().cpu()
    spread_d = seen_Nd.std(0) if len(seen_Nd) > 1 else seen_Nd.abs()[0]
    hidden_Nd = seen_Nd.mean(0) + hidden_Nd * spread_d
    return Contexts.of_rows(hidden_Nd, description=f"{description} of the mean and deviation of the contexts")


def _first_tokens(log_p_NV: Tensor) -> Tensor:
    """Tokens that come first in some context, alone and by more than rounding."""
    top = [rows.topk(2, dim=1) for rows in log_p_NV.split(256)]
    return torch.cat([indices[values[:, 0] - values[:, 1] > 1e-9, 0] for values, indices in top]).unique()
