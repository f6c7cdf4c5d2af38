"""Tokens that a layer can never rank first, whatever the hidden vector: "stolen probability" (Demeter et al. 2020).

Grivas et al. (2022) look for such tokens by linear programs too.

Token i can be the argmax if some h has (w_i - w_j) h + (b_i - b_j) > 0 for every other token j. With x = (h, s), s >= 0
the weight of the bias, that is a cone: D_j x > 0 for all j, D_j = (w_i - w_j, b_i - b_j). A solution with s = 0 leaves
room for a small s > 0, and h / s is then the hidden vector.

Three answers, each with its proof:

yes        an x that satisfies all inequalities by more than the rounding of float64
no         weights lambda_j >= 0 of sum 1 for which D = sum lambda_j D_j almost vanishes: since some D_j x is at most
           D x, no x of the unit box wins by more than |D|_1, and that is below ``MARGIN``
undecided  the time was over

Witnesses are looked for first, by a few steps for many tokens at once; what is left goes to linear programs over a
growing set of competitors (a token that loses to some of them loses to all). A monotone phi shared by all tokens, any
scale and any temperature leave the answer as it is. Hidden vectors that the model never makes count too.

Shapes: V vocabulary, I tokens in question, e = d + 1 columns (d without a bias), J competitors, S steps.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigsoftmax.analysis.head_weights import TOKENS_AT_ONCE, HeadWeights, blocks_of, full_precision
from sigsoftmax.analysis.probing import is_rising
from sigsoftmax.analysis.progress import Say, nothing_said
from sigsoftmax.analysis.spectrum.factorizations import add_product, damped_inverse
from sigsoftmax.records.schemas.audits import ArgmaxCounts

__all__ = ["Cone", "Decision", "argmax_counts", "decide_by_programs", "has_rising_phi"]

MARGIN = 1e-7
"""A token that wins by less never wins: in float32 nobody could tell. In units of the largest |h| and of the size of
rows (the root mean square distance from their mean)."""
WITNESS_STEPS = 30
SEARCH = torch.float32
"""The search may err; what it finds by less than the rounding of float32 is proved in float64."""
Answer = Literal["yes", "no", "undecided"]


class Decision(NamedTuple):
    """The answer for one token."""

    answer: Answer
    x_e: NDArray[np.float64] | None = None
    """for yes: a solution, the weight of the bias last if there is one"""
    margin: float = math.inf
    """for no: at most so much does any x of the unit box win by"""


def has_rising_phi(layer: HeadWeights) -> bool:
    """True if the order of f is that of the logits: one phi for all tokens, and that strictly rising."""
    if not layer.has_shared_phi:
        return False
    known = layer.function.properties.is_strictly_increasing
    return is_rising(layer.function) if known is None else known


def argmax_counts(
    layer: HeadWeights,
    *,
    tokens_in_question: int | None = 1000,
    seen: Tensor | None = None,
    seconds: float = 60.0,
    seconds_per_token: float = 10.0,
    memory: int = 1 << 30,
    seed: int = 0,
    progress: Say = nothing_said,
) -> ArgmaxCounts:
    """Count the tokens that can, cannot and might be ranked first; a random sample of them if there are more.

    ``seen`` are tokens that came first in some context: no further proof is needed for them.
    """
    if not has_rising_phi(layer):
        raise ValueError(
            "which tokens can be ranked first is decided for one rising phi shared by all tokens; "
            f"{layer.parsed_head} is not: mixtures and parameters per class can change the order of the logits"
        )
    began = time.perf_counter()
    question_I = torch.randperm(layer.vocabulary, generator=torch.Generator().manual_seed(seed))
    question_I = question_I[:tokens_in_question].sort().values
    is_seen_V = torch.zeros(layer.vocabulary, dtype=torch.bool)
    if seen is not None:
        is_seen_V[seen.cpu()] = True
    unseen_I = question_I[~is_seen_V[question_I]]
    cone = Cone(layer)
    hard_I, rivals_IJ = _without_witness(cone, unseen_I, began + seconds, memory, progress)

    has_solver = find_spec("scipy") is not None
    counts: Counter[Answer] = Counter()
    never = []
    for number, (token, rivals_J) in enumerate(zip(hard_I.tolist(), rivals_IJ, strict=True), start=1):
        left = seconds - (time.perf_counter() - began)
        progress(f"linear programs: token {number} of {len(hard_I)}")
        decision = Decision("undecided")
        if has_solver and left > 0.0:
            decision = decide_by_programs(cone, token, rivals_J, seconds=min(left, seconds_per_token))
        counts[decision.answer] += 1
        if decision.answer == "no":
            never.append(token)
    return ArgmaxCounts(
        words=layer.vocabulary,
        in_question=len(question_I),
        yes=len(question_I) - counts["no"] - counts["undecided"],
        no=counts["no"],
        undecided=counts["undecided"],
        yes_seen=len(question_I) - len(unseen_I),
        yes_by_steps=len(unseen_I) - len(hard_I),
        yes_by_program=counts["yes"],
        never=tuple(never),
        has_solver=has_solver,
        seconds=time.perf_counter() - began,
    )


def _without_witness(cone: Cone, open_I: Tensor, ends: float, memory: int, progress: Say) -> tuple[Tensor, Tensor]:
    """The tokens that no witness was found for, (I,), and the strongest rivals that each met, (I, J)."""
    at_once = max(1, memory // (4 * 4 * cone.vocabulary))
    rivals_IJ = open_I.new_empty(len(open_I), 0)
    # Most tokens are won by their own row; only then is it worth to work on the others.
    for what, steps in (("own rows", range(1)), ("steps", range(1, WITNESS_STEPS))):
        found, met = [open_I.new_empty(0, dtype=torch.bool)], [open_I.new_empty(0, len(steps))]
        # Half of the time is left for linear programs, which alone can say no.
        stop = ends if what == "own rows" else (time.perf_counter() + ends) / 2.0
        for block in blocks_of(len(open_I), at_once):
            progress(f"witnesses by {what}: token {block.stop} of {len(open_I)}")
            with full_precision(torch.device("cpu")):
                found_I, met_IS = cone.witnesses(open_I[block], stop, steps)
            found.append(found_I)
            met.append(met_IS)
        is_open_I = ~torch.cat(found)
        open_I, rivals_IJ = open_I[is_open_I], torch.cat([rivals_IJ, torch.cat(met)], 1)[is_open_I]
    return open_I, rivals_IJ


class Cone:
    """The rows (w_j, b_j) of all tokens, as the layer holds them; results are in units of their mean size."""

    def __init__(self, layer: HeadWeights) -> None:
        self.weight_Vd = layer.weight_Vd.detach().cpu()
        self.bias_V = None if layer.bias_V is None else layer.bias_V.detach().cpu()
        self.has_bias = self.bias_V is not None
        self.vocabulary, self.columns = layer.vocabulary, layer.width + self.has_bias
        self.mean_e = torch.zeros(self.columns, dtype=torch.float64)
        """no token's own: it changes no margin"""
        self._metric_ee: Tensor | None = None
        largest = total = 0.0
        for rows in self._parts(torch.float64):
            squares = rows.square().sum(1)
            largest, total = max(largest, float(squares.max())), total + float(squares.sum())
            self.mean_e += rows.sum(0) / self.vocabulary
        self.largest = math.sqrt(largest)
        self.unit = math.sqrt(max(total / self.vocabulary - float(self.mean_e.square().sum()), 0.0)) or 1.0

    def rows(self, tokens: Tensor | slice, dtype: torch.dtype = torch.float64) -> Tensor:
        """The rows (w_j, b_j) of some tokens. Every dtype of weights fits into float32 or float64 without loss."""
        rows = self.weight_Vd[tokens].to(dtype)
        return rows if self.bias_V is None else torch.cat([rows, self.bias_V[tokens].to(dtype)[:, None]], 1)

    def _parts(self, dtype: torch.dtype) -> Iterator[Tensor]:
        for part in blocks_of(self.vocabulary, TOKENS_AT_ONCE):
            yield self.rows(part, dtype)

    def margins(self, tokens_I: Tensor, x_Ie: Tensor) -> Tensor:
        """D_j x in the dtype of x, inf for the token itself. (I, V)"""
        scores_IV = torch.cat([x_Ie @ rows.T for rows in self._parts(x_Ie.dtype)], 1).div_(-self.unit)
        own_I1 = scores_IV.gather(1, tokens_I[:, None])
        return scores_IV.sub_(own_I1).scatter_(1, tokens_I[:, None], torch.inf)

    def certain(self, x_Ie: Tensor) -> Tensor:
        """The margin from which on rounding, in the dtype of x, cannot have made it. (I,)"""
        error = 4.0 * self.columns * torch.finfo(x_Ie.dtype).eps * self.largest / self.unit
        return error * x_Ie.norm(dim=1)

    def are_won(self, tokens_I: Tensor, x_Ie: Tensor) -> Tensor:
        """True for each x that proves, in float64, that its token can be ranked first. (I,)"""
        x_Ie = x_Ie.to(torch.float64)
        won_I = self.margins(tokens_I, x_Ie).amin(1) > self.certain(x_Ie)
        return won_I & (x_Ie[:, -1] >= 0.0) if self.has_bias else won_I

    def witnesses(self, tokens_I: Tensor, ends: float, steps: range) -> tuple[Tensor, Tensor]:
        """The tokens that were won within a few steps, (I,), and the strongest rival met at each, (I, S), or -1.

        From a row's own direction (step 0), and from the same in the metric in which rows are spread evenly (step 1);
        from there perceptron steps towards the token and away from whoever wins.
        """
        own_Ie = (self.rows(tokens_I) - self.mean_e).to(SEARCH)
        found_I = torch.zeros(len(tokens_I), dtype=torch.bool)
        rivals_IS = torch.full((len(tokens_I), len(steps)), -1)
        x_Ie = own_Ie.clone()
        metric_ee: Tensor | None = None
        for number, step in enumerate(steps):
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
            nearest = self.margins(tokens_I[open_I], x_Ie[open_I]).min(1)
            sure_I = nearest.values > self.certain(x_Ie[open_I])
            unsure_I = (~sure_I & (nearest.values > 0.0)).nonzero()[:, 0]
            if unsure_I.numel():
                sure_I[unsure_I] = self.are_won(tokens_I[open_I[unsure_I]], x_Ie[open_I[unsure_I]])
            found_I[open_I[sure_I]] = True
            rivals_IS[open_I, number] = nearest.indices
            if metric_ee is not None:
                rival_Ie = (self.rows(nearest.indices) - self.mean_e).to(SEARCH)
                step_Ie = (own_Ie[open_I] - rival_Ie) @ metric_ee
                # As long as x itself at first, then shorter: the perceptron's own lengths would start blindly.
                length_I = x_Ie[open_I].norm(dim=1) / (step_Ie.norm(dim=1).clamp_min(1e-30) * (1.0 + 0.2 * step))
                x_Ie[open_I] += step_Ie * length_I[:, None]
        return found_I, rivals_IS

    def metric(self, ends: float) -> Tensor | None:
        """Inverse of the rows' covariance, damped, (e, e); None if the time is over before it is known."""
        if self._metric_ee is None:
            gram_ee = torch.zeros(self.columns, self.columns, dtype=torch.float64)
            for rows in self._parts(torch.float64):
                if time.perf_counter() > ends:
                    return None
                add_product(gram_ee, rows.T)
            gram_ee = gram_ee.triu() + gram_ee.triu(1).T
            inverse_ee = damped_inverse(gram_ee / self.vocabulary - torch.outer(self.mean_e, self.mean_e))
            self._metric_ee = (inverse_ee / inverse_ee.diagonal().mean()).to(SEARCH)
        return self._metric_ee


def decide_by_programs(cone: Cone, token: int, rivals_J: Tensor, *, seconds: float) -> Decision:
    """Decide one token by linear programs over a growing set of rivals: max t with D_j x >= t, x in the unit box.

    ImportError without SciPy.
    """
    from scipy.optimize import linprog

    ends, token_1 = time.perf_counter() + seconds, torch.tensor([token])
    others = torch.unique(rivals_J[(rivals_J >= 0) & (rivals_J != token)])
    if not others.numel():
        margins_V = cone.margins(token_1, cone.rows(token_1) - cone.mean_e)[0]
        others = margins_V.topk(min(2 * cone.columns, cone.vocabulary - 1), largest=False).indices
    bounds: list[tuple[float, float]] = [(-1.0, 1.0)] * cone.columns + [(-np.inf, 1.0)]
    if cone.has_bias:
        bounds[-2] = (0.0, 1.0)
    objective = np.zeros(cone.columns + 1)
    objective[-1] = -1.0
    while (left := ends - time.perf_counter()) > 0.0:
        differences_Je = ((cone.rows(token_1) - cone.rows(others)) / cone.unit).numpy()
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
                return Decision("no", margin=margin)
        x_e = np.clip(solved.x[:-1], [low for low, _ in bounds[:-1]], 1.0)
        x_1e = torch.from_numpy(x_e)[None]
        if bool(cone.are_won(token_1, x_1e)):
            return Decision("yes", x_e)
        margins_V = cone.margins(token_1, x_1e)[0]
        margins_V[others] = np.inf
        worst = margins_V.topk(min(max(64, cone.columns // 4), cone.vocabulary), largest=False)
        new = worst.indices[worst.values < float(solved.x[-1])]
        if solved.status == 1 or not new.numel():
            break
        others = torch.cat([others, new])
    return Decision("undecided")


def _largest_margin(differences_Je: NDArray[np.float64], weights_J: NDArray[np.float64], has_bias: bool) -> float:
    """The bound that weights on the rivals prove: no x of the unit box, with s >= 0, wins by more."""
    total = float(weights_J.sum())
    if not total > 0.0:
        return np.inf
    combined_e = (weights_J / total) @ differences_Je
    if has_bias:
        combined_e[-1] = max(combined_e[-1], 0.0)
    return float(np.abs(combined_e).sum())
