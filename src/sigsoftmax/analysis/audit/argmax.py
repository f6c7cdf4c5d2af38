"""Words that a layer can never rank first, whatever the hidden vector: "stolen probability".

Word i can be the argmax if some h has (w_i - w_j) h + (b_i - b_j) > 0 for every other word j. Written with x = (h, s),
s >= 0 the weight of the bias, that is a cone: D_j x > 0 for all j, D_j = (w_i - w_j, b_i - b_j). A solution with s = 0
leaves room for a small s > 0, and h / s is then the hidden vector.

Three answers, each with its proof:

yes        an x that satisfies all inequalities by more than the rounding of float64
no         weights lambda_j >= 0 of sum 1 for which D = sum lambda_j D_j almost vanishes: since some D_j x is at most
           D x, no x of the unit box wins by more than |D|_1, and that is below ``MARGIN``
undecided  the time was over

Witnesses are looked for first, by a few steps for many words at once; what is left goes to linear programs over a
growing set of competitors (a word that loses to some of them loses to all). A monotone phi shared by all words, any
scale and any temperature leave the answer as it is. Hidden vectors that the model never makes count too.

Shapes: V words, I words in question, e = d + 1 columns (d without a bias), J competitors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigsoftmax.analysis.log_outputs import full_precision
from sigsoftmax.analysis.output_layer import WORDS_AT_ONCE, OutputLayer, blocks_of
from sigsoftmax.analysis.probing import is_rising
from sigsoftmax.analysis.spectrum.gram import add_product
from sigsoftmax.records.schemas.audits import ArgmaxCounts

__all__ = ["Cone", "Decision", "argmax_counts", "decide_by_programs", "has_rising_phi"]

MARGIN = 1e-7
"""A word that wins by less never wins: in float32 nobody could tell. In units of the largest |h| and of the size of
rows (the root mean square distance from their mean)."""
WITNESS_STEPS = 30
SEARCH = torch.float32
"""The search may err; what it finds by less than the rounding of float32 is proved in float64."""
Answer = Literal["yes", "no", "undecided"]
Progress = Callable[[str], None]


class Decision(NamedTuple):
    """What was found about one word."""

    answer: Answer
    x_e: NDArray[np.float64] | None
    """for yes: a solution, the weight of the bias last if there is one"""
    margin: float
    """for no: at most so much does any x of the unit box win by"""


def has_rising_phi(layer: OutputLayer) -> bool:
    """Whether the order of f is that of the logits: one phi for all words, and that strictly rising."""
    if not layer.has_shared_phi:
        return False
    known = layer.function.properties.is_strictly_increasing
    return is_rising(layer.function) if known is None else known


def argmax_counts(
    layer: OutputLayer,
    *,
    words_in_question: int | None = 1000,
    seen: Tensor | None = None,
    seconds: float = 60.0,
    seconds_per_word: float = 10.0,
    memory: int = 1 << 30,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> ArgmaxCounts:
    """Count the words that can, cannot and might be ranked first; a random sample of them if there are more.

    ``seen`` are words that came first in some context: no further proof is needed for them.
    """
    if not has_rising_phi(layer):
        raise ValueError(
            f"which words can be ranked first is decided for one rising phi shared by all words; {layer.head} is not: "
            "mixtures and parameters per class can change the order of the logits"
        )
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    if words_in_question is None or words_in_question >= layer.words:
        question_I = torch.arange(layer.words)
    else:
        question_I = torch.randperm(layer.words, generator=generator)[:words_in_question].sort().values
    answered = torch.zeros(layer.words, dtype=torch.bool)
    if seen is not None:
        answered[seen.cpu()] = True
    yes_seen = int(answered[question_I].sum())
    left_I = question_I[~answered[question_I]]

    cone = Cone(layer)
    at_once = max(1, memory // (4 * 4 * layer.words))
    ends = began + seconds
    # Most words are won by their own row; only then is it worth to work on the others.
    open_I, by_steps, rivals = left_I, 0, torch.empty(left_I.numel(), 0, dtype=torch.int64)
    for what, steps in (("own rows", range(1)), ("steps", range(1, WITNESS_STEPS))):
        kept: list[Tensor] = []
        met: list[Tensor] = []
        # Half of the time is left for linear programs, which alone can say no.
        stop = ends if what == "own rows" else (time.perf_counter() + ends) / 2.0
        for block in blocks_of(open_I.numel(), at_once):
            progress(f"witnesses by {what}: word {block.stop} of {open_I.numel()}")
            with full_precision(torch.device("cpu")):
                found_I, rivals_IJ = cone.witnesses(open_I[block], stop, steps)
            by_steps += int(found_I.sum())
            kept.append(open_I[block][~found_I])
            padded_IJ = torch.full((len(found_I), len(steps)), -1, dtype=torch.int64)
            padded_IJ[:, : rivals_IJ.shape[1]] = rivals_IJ
            met.append(torch.cat([rivals[block], padded_IJ], 1)[~found_I])
        open_I = torch.cat(kept) if kept else open_I
        rivals = torch.cat(met) if met else rivals
    hard = list(zip(open_I.tolist(), rivals, strict=True))

    has_solver = find_spec("scipy") is not None
    counts: dict[Answer, int] = {"yes": 0, "no": 0, "undecided": 0}
    never = []
    for number, (word, rivals_J) in enumerate(hard, start=1):
        left = seconds - (time.perf_counter() - began)
        progress(f"linear programs: word {number} of {len(hard)}")
        decision = (
            decide_by_programs(cone, word, rivals_J, seconds=min(left, seconds_per_word))
            if has_solver and left > 0.0
            else Decision("undecided", None, np.inf)
        )
        counts[decision.answer] += 1
        if decision.answer == "no":
            never.append(word)
    return ArgmaxCounts(
        words=layer.words,
        in_question=question_I.numel(),
        yes=yes_seen + by_steps + counts["yes"],
        no=counts["no"],
        undecided=counts["undecided"],
        yes_seen=yes_seen,
        yes_by_steps=by_steps,
        yes_by_program=counts["yes"],
        never=tuple(never),
        has_solver=has_solver,
        seconds=time.perf_counter() - began,
    )


class Cone:
    """The rows (w_j, b_j) of all words, as the layer holds them; results are in units of their mean size."""

    def __init__(self, layer: OutputLayer) -> None:
        self.weight_Vd = layer.weight_Vd.detach().cpu()
        self.bias_V = None if layer.bias_V is None else layer.bias_V.detach().cpu()
        self.has_bias = self.bias_V is not None
        self.words, self.columns = layer.words, layer.width + self.has_bias
        self.mean_e = torch.zeros(self.columns, dtype=torch.float64)
        """no word's own: it changes no margin"""
        self._metric_ee: Tensor | None = None
        largest = total = 0.0
        for _, rows in self._parts(torch.float64):
            squares = rows.square().sum(1)
            largest, total = max(largest, float(squares.max())), total + float(squares.sum())
            self.mean_e += rows.sum(0) / self.words
        self.largest = math.sqrt(largest)
        self.unit = math.sqrt(max(total / self.words - float(self.mean_e.square().sum()), 0.0)) or 1.0

    def rows(self, words: Tensor | slice, dtype: torch.dtype = torch.float64) -> Tensor:
        """(w_j, b_j) of some words. Every dtype of weights fits into float32 or float64 without loss."""
        rows = self.weight_Vd[words].to(dtype)
        return rows if self.bias_V is None else torch.cat([rows, self.bias_V[words].to(dtype)[:, None]], 1)

    def _parts(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        for part in blocks_of(self.words, WORDS_AT_ONCE):
            yield part, self.rows(part, dtype)

    def differences(self, word: int, rivals_J: Tensor) -> NDArray[np.float64]:
        """D_j of some rivals, (J, e)."""
        return ((self.rows(slice(word, word + 1)) - self.rows(rivals_J)) / self.unit).numpy()

    def margins(self, words_I: Tensor, x_Ie: Tensor) -> Tensor:
        """D_j x in the dtype of x, inf for the word itself. (I, V)"""
        scores_IV = torch.cat([x_Ie @ rows.T for _, rows in self._parts(x_Ie.dtype)], 1).div_(-self.unit)
        own_I1 = scores_IV.gather(1, words_I[:, None])
        return scores_IV.sub_(own_I1).scatter_(1, words_I[:, None], torch.inf)

    def certain(self, x_Ie: Tensor) -> Tensor:
        """The margin from which on rounding, in the dtype of x, cannot have made it. (I,)"""
        error = 4.0 * self.columns * torch.finfo(x_Ie.dtype).eps * self.largest / self.unit
        return error * x_Ie.norm(dim=1)

    def are_won(self, words_I: Tensor, x_Ie: Tensor) -> Tensor:
        """Which x prove, in float64, that their word can be ranked first. (I,)"""
        x_Ie = x_Ie.to(torch.float64)
        won_I = self.margins(words_I, x_Ie).amin(1) > self.certain(x_Ie)
        return won_I & (x_Ie[:, -1] >= 0.0) if self.has_bias else won_I

    def witnesses(
        self, words_I: Tensor, ends: float = math.inf, steps: range = range(WITNESS_STEPS)
    ) -> tuple[Tensor, Tensor]:
        """Which words were won within a few steps, (I,), and the strongest rivals met on the way, (I, J).

        From a row's own direction (step 0), and from the same in the metric in which rows are spread evenly (step 1);
        from there perceptron steps towards the word and away from whoever wins.
        """
        own_Ie = (self.rows(words_I) - self.mean_e).to(SEARCH)
        found_I = torch.zeros(len(words_I), dtype=torch.bool)
        rivals: list[Tensor] = []
        x_Ie = own_Ie.clone()
        metric_ee: Tensor | None = None
        for step in steps:
            open_I = (~found_I).nonzero()[:, 0]
            if not open_I.numel() or time.perf_counter() > ends:
                break
            if step == 1:
                metric_ee = self.metric(ends)
                if metric_ee is None:
                    break
                x_Ie = own_Ie @ metric_ee
            if self.has_bias:
                x_Ie[:, -1].clamp_(min=0.0)
            nearest = self.margins(words_I[open_I], x_Ie[open_I]).min(1)
            sure_I = nearest.values > self.certain(x_Ie[open_I])
            unsure_I = (~sure_I & (nearest.values > 0.0)).nonzero()[:, 0]
            if unsure_I.numel():
                sure_I[unsure_I] = self.are_won(words_I[open_I[unsure_I]], x_Ie[open_I[unsure_I]])
            found_I[open_I[sure_I]] = True
            met_I = torch.full((len(words_I),), -1, dtype=torch.int64)
            met_I[open_I] = nearest.indices
            rivals.append(met_I)
            if metric_ee is not None:
                rival_Ie = (self.rows(nearest.indices) - self.mean_e).to(SEARCH)
                step_Ie = (own_Ie[open_I] - rival_Ie) @ metric_ee
                # As long as x itself at first, then shorter: the perceptron's own lengths would start blindly.
                length_I = x_Ie[open_I].norm(dim=1) / (step_Ie.norm(dim=1).clamp_min(1e-30) * (1.0 + 0.2 * step))
                x_Ie[open_I] += step_Ie * length_I[:, None]
        return found_I, torch.stack(rivals, 1) if rivals else torch.empty(len(words_I), 0, dtype=torch.int64)

    def metric(self, ends: float = math.inf) -> Tensor | None:
        """Inverse of the rows' covariance, damped, (e, e); None if the time is over before it is known."""
        if self._metric_ee is None:
            self._metric_ee = self._computed_metric(ends)
        return self._metric_ee

    def _computed_metric(self, ends: float) -> Tensor | None:
        gram_ee = torch.zeros(self.columns, self.columns, dtype=torch.float64)
        for _, rows in self._parts(torch.float64):
            if time.perf_counter() > ends:
                return None
            add_product(gram_ee, rows.T)
        spread_ee = (gram_ee.triu() + gram_ee.triu(1).T) / self.words - torch.outer(self.mean_e, self.mean_e)
        size = float(spread_ee.diagonal().mean())
        spread_ee += torch.eye(self.columns, dtype=torch.float64) * (1e-3 * size + 1e-300)
        inverse_ee = torch.cholesky_inverse(torch.linalg.cholesky(spread_ee))
        return (inverse_ee / inverse_ee.diagonal().mean()).to(SEARCH)


def decide_by_programs(cone: Cone, word: int, rivals_J: Tensor, *, seconds: float) -> Decision:
    """Decide one word by linear programs over a growing set of rivals: max t with D_j x >= t, x in the unit box.

    ImportError without SciPy.
    """
    from scipy.optimize import linprog

    ends = time.perf_counter() + seconds
    others = torch.unique(rivals_J[(rivals_J >= 0) & (rivals_J != word)])
    if not others.numel():
        own_1e = cone.rows(slice(word, word + 1)) - cone.mean_e
        margins_V = cone.margins(torch.tensor([word]), own_1e)[0]
        others = margins_V.topk(min(2 * cone.columns, cone.words - 1), largest=False).indices
    bounds: list[tuple[float, float]] = [(-1.0, 1.0)] * cone.columns + [(-np.inf, 1.0)]
    if cone.has_bias:
        bounds[-2] = (0.0, 1.0)
    objective = np.zeros(cone.columns + 1)
    objective[-1] = -1.0
    while (left := ends - time.perf_counter()) > 0.0:
        differences_Je = cone.differences(word, others)
        limits = np.concatenate([-differences_Je, np.ones((len(others), 1))], 1)
        tolerances = {"primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9, "time_limit": left}
        solved = linprog(
            objective, A_ub=limits, b_ub=np.zeros(len(others)), bounds=bounds, method="highs", options=tolerances
        )
        if solved.x is None or solved.status not in (0, 1):
            break
        if solved.status == 0:
            margin = _largest_margin(differences_Je, np.maximum(-solved.ineqlin.marginals, 0.0), cone.has_bias)
            if margin <= MARGIN:
                return Decision("no", None, margin)
        x_e = np.clip(solved.x[:-1], [low for low, _ in bounds[:-1]], 1.0)
        x_1e = torch.from_numpy(x_e)[None]
        if bool(cone.are_won(torch.tensor([word]), x_1e)):
            return Decision("yes", x_e, np.inf)
        margins_V = cone.margins(torch.tensor([word]), x_1e)[0]
        margins_V[others] = np.inf
        worst = margins_V.topk(min(max(64, cone.columns // 4), cone.words), largest=False)
        new = worst.indices[worst.values < float(solved.x[-1])]
        if solved.status == 1 or not new.numel():
            break
        others = torch.cat([others, new])
    return Decision("undecided", None, np.inf)


def _largest_margin(differences_Je: NDArray[np.float64], weights_J: NDArray[np.float64], has_bias: bool) -> float:
    """What weights on the rivals prove: no x of the unit box, with s >= 0, wins by more."""
    total = float(weights_J.sum())
    if not total > 0.0:
        return np.inf
    combined_e = (weights_J / total) @ differences_Je
    of_h, of_s = (combined_e[:-1], combined_e[-1]) if has_bias else (combined_e, 0.0)
    return float(np.abs(of_h).sum() + max(of_s, 0.0))
