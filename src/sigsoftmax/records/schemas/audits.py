"""The findings of an audit of an output layer."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from sigsoftmax.records.schemas.base import Extent, MeasuredPayload
from sigsoftmax.records.schemas.spectra import RankBounds, Spectrum

__all__ = [
    "ArgmaxCounts",
    "Audit",
    "GradientShare",
    "HeadAtWidth",
    "LayerDescription",
    "ShareOnLine",
    "TargetResult",
    "Truncation",
    "TruncationPoint",
    "UseOfNonlinearity",
]


@dataclass(frozen=True, kw_only=True)
class LayerDescription:
    """The output layer that was looked at."""

    words: int
    """size of the vocabulary"""
    width: int | None
    """None for a matrix of log-probabilities, whose layer is not known"""
    has_bias: bool
    components: int
    """1 where the head is no mixture"""
    head: str
    """the output function in use, as `Head.parse` reads it; empty where it is not known"""
    scale: float
    """logits are multiplied by it before the function"""
    how_known: str
    """in words: stated, or found in the model and checked against its output"""
    dtype: str
    """dtype of the weights, or of the entries of a matrix"""


@dataclass(frozen=True, kw_only=True)
class TruncationPoint:
    """The loss of the truncation to one rank, in nats."""

    width: int
    """the rank"""
    kl: float
    """KL of the truncation to that rank; it may rise with the rank, since squares of log P are not nats"""
    bound: float
    """the least of the truncations so far: the most that a softmax of that width must lose"""


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """KL(P || softmax of log P cut down to a rank), in nats."""

    contexts: int
    words: int
    points: tuple[TruncationPoint, ...]


@dataclass(frozen=True, kw_only=True)
class ShareOnLine:
    """Shares of what lies where phi is a line."""

    name: str
    """left, right or centre"""
    slope: float
    logits: float
    """share of the logits"""
    probability: float
    """share of the probability"""


@dataclass(frozen=True, kw_only=True)
class UseOfNonlinearity:
    """The use that the layer makes of the nonlinearity of its phi, called its bend here; a softmax has none."""

    contexts: int
    lines: tuple[ShareOnLine, ...]
    logits_in_bend: float
    probability_in_bend: float
    lowest_logit: float
    highest_logit: float
    nearest_slope: float
    """a of the softmax(a z) that is nearest to the output"""
    kl_to_nearest_softmax: float
    """mean KL(f(z) || softmax(a z)), in nats"""


@dataclass(frozen=True, kw_only=True)
class GradientShare:
    """The share of the squared loss gradient by the logits that is orthogonal to the columns of W."""

    contexts: int
    next_words: str
    """source of the tokens that the loss asks for"""
    mean: float
    median: float
    low: float
    """5th percentile over contexts"""
    high: float
    """95th percentile"""
    of_a_random_direction: float
    """1 - rank W / V: what a gradient without any structure would lose"""
    rank_of_weight: int


@dataclass(frozen=True, kw_only=True)
class ArgmaxCounts:
    """Tokens that some hidden vector ranks first (yes), that none does (no), and those not settled in time."""

    words: int
    in_question: int
    """a random sample if fewer than all tokens"""
    yes: int
    no: int
    undecided: int
    yes_seen: int
    """came first in a context that was looked at"""
    yes_by_steps: int
    yes_by_program: int
    never: tuple[int, ...]
    """the tokens counted as no"""
    has_solver: bool
    """without SciPy there are no linear programs, and what the search leaves is undecided"""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class HeadAtWidth:
    """The least KL found for a head at a width."""

    head: str
    width: int
    kl: float
    spread: float
    """worst minus best end over the starts"""
    softmax_width: float
    """the softmax width of equal KL; 0 or inf where it lies outside the widths that were fitted"""


@dataclass(frozen=True, kw_only=True)
class TargetResult:
    """Nats, measured against distributions that count as the truth."""

    target: str
    contexts: int
    words: int
    """tokens that were fitted"""
    all_words: int
    mass: float
    """probability that the target gives the fitted tokens, on average; 1 if these are all"""
    is_lower_bound: bool
    """tokens were left out: the least KL on all of them is at least that of the conditional distributions, weighted by
    the mass of each context"""
    model_kl: float | None
    """KL(target || model) on the same contexts and all tokens; None if the model's contexts are others"""
    heads: tuple[HeadAtWidth, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Audit(MeasuredPayload):
    """The findings of an audit of an output layer. A part that was not measured is None, and ``notes`` say why."""

    KIND = "audit"
    VERSION = 2
    SUBJECT = ("source", "layer.words", "layer.width", "layer.head", "layer.components", "seed")

    source: str
    layer: LayerDescription
    contexts: int
    contexts_from: str
    """in words: which text, or what else"""
    bounds: RankBounds | None = None
    spectrum: Spectrum | None = None
    truncation: Truncation | None = None
    bend: UseOfNonlinearity | None = None
    gradient: GradientShare | None = None
    argmax: ArgmaxCounts | None = None
    target: TargetResult | None = None
    meaning: tuple[str, ...] = ()
    """conclusions for this model, sentence by sentence; empty in records of version 1"""
    notes: tuple[str, ...] = ()
    """parts that are not covered, were skipped or cut short, in words"""
    was_interrupted: bool = False
    seed: int = 0
    memory: int = 0
    """bytes that the audit was allowed"""
    seconds: float = math.nan

    @property
    def extent(self) -> Extent:
        """The parts that were measured in these contexts, with the numbers of contexts or tokens that they are of."""
        parts = ("bounds", "spectrum", "truncation", "bend", "gradient")
        measured = {part: getattr(self, part) for part in parts}
        found: dict[Hashable, float] = {
            (self.contexts_from, part): value.contexts for part, value in measured.items() if value is not None
        }
        if self.argmax is not None:
            found[self.contexts_from, "argmax"] = self.argmax.in_question - self.argmax.undecided
        if self.target is not None:
            size = self.target.contexts * self.target.words
            found |= {(self.contexts_from, self.target.target, fit.head, fit.width): size for fit in self.target.heads}
        return found
