"""Languages whose truth is known: every next-token distribution, the stationary distribution, the entropy rate.

A language is an automaton. It has N contexts; in each the next of V tokens is drawn from a known distribution, and
context and token together determine the next context. So text can be sampled, a table model is judged exactly, and
a model that reads the text is judged at every position against the distribution that drew the next token.

Shapes: N contexts, V vocabulary, d width, L positions of a text. All probabilities are float64.
"""

from __future__ import annotations

import bisect
import math
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from torch import Tensor

from sigsoftmax.family import OutputFunction

__all__ = ["Estimate", "Language", "Text", "batch_means", "row_kl"]

Weighting = Literal["stationary", "uniform"]


class Text(NamedTuple):
    """A sampled text: ``tokens_L[t]`` was drawn in context ``contexts_L[t]``."""

    tokens_L: Tensor
    contexts_L: Tensor


class Estimate(NamedTuple):
    """A mean over the positions of a text, with its standard error by batch means."""

    mean: float
    standard_error: float
    batches: int


class Language:
    """N contexts x V tokens: ``log_p_NV`` and the map (context, token) -> context.

    The constructors below make every kind that the product uses; each is a function of its arguments and ``seed``.
    ``memory`` chooses the map. None makes a random automaton, in which a token of one context leads anywhere: exact
    tables are at home there, but a reader of the text has to learn the automaton. ``memory=m`` makes the context a
    function of the last m tokens (each belongs to one of N ** (1/m) classes), which a small model can learn.
    Both are irreducible and aperiodic for distributions without zeros.
    """

    def __init__(self, log_p_NV: Tensor, next_context_NV: Tensor, *, description: str = "given distributions") -> None:
        self.log_p_NV = _checked_log_probs(log_p_NV, "log_p_NV").to(torch.float64)
        self.next_context_NV = _checked_map(next_context_NV, self.log_p_NV)
        self.description = description

    @property
    def num_contexts(self) -> int:
        return self.log_p_NV.shape[0]

    @property
    def vocabulary(self) -> int:
        return self.log_p_NV.shape[1]

    def __repr__(self) -> str:
        return f"Language({self.description}; {self.num_contexts} contexts, {self.vocabulary} tokens)"

    @cached_property
    def transition_NN(self) -> Tensor:
        """The probability of the next context given this one."""
        zeros = torch.zeros(self.num_contexts, self.num_contexts, dtype=torch.float64)
        return zeros.scatter_add(1, self.next_context_NV, self.log_p_NV.exp())

    @cached_property
    def stationary_N(self) -> Tensor:
        """The share of each context in an endless text; solved for, not iterated, and checked."""
        transition_NN = self.transition_NN
        if not _is_irreducible(transition_NN > 0):
            raise ValueError(
                "expected a language in which every context leads to every other, got one that can be trapped; "
                "its stationary distribution is not unique. Give another next-context map, or use weights='uniform'"
            )
        ones = torch.ones(self.num_contexts, dtype=torch.float64)
        # pi (I - T) = 0 has one solution up to scale; adding the equations sum(pi) = 1 to each column makes it regular.
        system = torch.eye(self.num_contexts, dtype=torch.float64) - transition_NN.T + 1.0
        stationary = torch.linalg.solve(system, ones)
        residual = (stationary @ transition_NN - stationary).abs().max().item()
        if residual > 1e-10 or stationary.min() < -1e-12:
            raise ValueError(
                f"the stationary distribution could not be found: residual {residual:.1e}. The contexts are almost "
                "disconnected; give distributions or a map that mix faster"
            )
        stationary = stationary.clamp_min(0.0)
        return stationary / stationary.sum()

    @cached_property
    def entropy_rate(self) -> float:
        """Nats per token of an endless text: the loss of a perfect model."""
        return float(self.stationary_N @ torch.special.entr(self.log_p_NV.exp()).sum(1))

    @cached_property
    def log_rank(self) -> int:
        """Numerical rank of log P: singular values above max(N, M) * eps * the largest, in float64 (numpy's rule)."""
        if torch.isinf(self.log_p_NV).any():
            raise ValueError("log P has no rank, since some tokens have probability zero and log P is -inf there")
        return int(torch.linalg.matrix_rank(self.log_p_NV))

    def weights_N(self, weights: Weighting = "stationary") -> Tensor:
        """The weight of each context; the weights sum to one."""
        if weights == "stationary":
            return self.stationary_N
        if weights == "uniform":
            return torch.full((self.num_contexts,), 1.0 / self.num_contexts, dtype=torch.float64)
        raise ValueError(f"weights must be 'stationary' or 'uniform', got {weights!r}")

    def kl(self, log_q_NV: Tensor, *, weights: Weighting = "stationary") -> float:
        """The exact mean over contexts of KL(P || Q), in nats, for a model given as a table."""
        if log_q_NV.shape != self.log_p_NV.shape:
            raise ValueError(
                f"log_q_NV must have one row per context and one column per token, {tuple(self.log_p_NV.shape)}, "
                f"got {tuple(log_q_NV.shape)}"
            )
        return float(self.weights_N(weights) @ row_kl(self.log_p_NV, _checked_log_probs(log_q_NV, "log_q_NV")))

    def sample(self, length: int, *, seed: int) -> Text:
        """A text of ``length`` tokens that starts in a context drawn from the stationary distribution."""
        if length < 0:
            raise ValueError(f"length must not be negative, got {length}")
        rng = default_rng(seed)
        context = int(rng.choice(self.num_contexts, p=self.stationary_N.numpy()))
        p_NV, next_NV = self.log_p_NV.exp().numpy(), self.next_context_NV.numpy()
        # bisect on Python lists is several times faster than numpy on single rows; rows are made when first met.
        rows: dict[int, tuple[list[float], list[int]]] = {}
        tokens, contexts = np.empty((2, length), dtype=np.int64)
        for position, uniform in enumerate(rng.random(length).tolist()):
            if context not in rows:
                cumulative = p_NV[context].cumsum()
                # Dividing by the total makes the last token that can occur exactly 1, so that no other is drawn.
                rows[context] = ((cumulative / cumulative[-1]).tolist(), next_NV[context].tolist())
            row, following = rows[context]
            token = bisect.bisect_right(row, uniform)
            tokens[position], contexts[position] = token, context
            context = following[token]
        return Text(torch.from_numpy(tokens), torch.from_numpy(contexts))

    def position_kl(self, contexts_L: Tensor, log_q_LV: Tensor) -> Tensor:
        """KL(P of the position's context || Q of the position), (L,): exact at each position, whatever made Q.

        The mean over a text estimates what the model loses per token; :func:`batch_means` gives its standard error.
        """
        if contexts_L.ndim != 1 or log_q_LV.shape != (contexts_L.shape[0], self.vocabulary):
            raise ValueError(
                f"expected contexts of shape (L,) and log_q_LV of shape (L, {self.vocabulary}), got "
                f"{tuple(contexts_L.shape)} and {tuple(log_q_LV.shape)}"
            )
        _check_range("contexts", contexts_L, self.num_contexts, "; pass the contexts that `sample` returned")
        log_q_LV = _checked_log_probs(log_q_LV, "log_q_LV").cpu()
        return row_kl(self.log_p_NV[contexts_L.cpu()], log_q_LV)

    @classmethod
    def of_rank(
        cls, *, contexts: int, words: int, rank: int, scale: float = 2.0, memory: int | None = None, seed: int = 0
    ) -> Language:
        """log P of a generic matrix of the given rank; the logits have standard deviation ``scale``.

        The logits are a product of Gaussian factors of rank - 1 columns: normalising adds the direction of ones.
        """
        rng = _generator(seed, contexts, words, scale=scale)
        if not 1 <= rank <= min(contexts, words):
            raise ValueError(
                f"rank must be between 1 and min(contexts, words) = {min(contexts, words)}, got {rank}; "
                "the rank of a matrix is at most its smaller side"
            )
        left = rng.standard_normal((contexts, rank - 1))
        right = rng.standard_normal((words, rank - 1))
        logits_NV = scale * (left @ right.T) / math.sqrt(max(rank - 1, 1))
        return cls._of_logits(logits_NV, memory, rng, f"generic log P of rank {rank}, scale {scale:g}, seed {seed}")

    @classmethod
    def dirichlet(
        cls, *, contexts: int, words: int, concentration: float = 0.5, memory: int | None = None, seed: int = 0
    ) -> Language:
        """Independent rows from a symmetric Dirichlet; a small concentration makes a few tokens take most of a row."""
        rng = _generator(seed, contexts, words, concentration=concentration)
        logits_NV = _log_gammas(rng, concentration, (contexts, words))
        return cls._of_logits(logits_NV, memory, rng, f"Dirichlet({concentration:g}) rows, seed {seed}")

    @classmethod
    def topics(
        cls,
        *,
        contexts: int,
        words: int,
        topics: int,
        sharpness: float = 10.0,
        memory: int | None = None,
        seed: int = 0,
    ) -> Language:
        """Each context mixes ``topics`` token distributions: P has rank ``topics``, while log P has high rank.

        Both the mixing weights and the topics are Dirichlet(1 / sharpness).
        """
        rng = _generator(seed, contexts, words, sharpness=sharpness)
        if topics < 1:
            raise ValueError(f"topics must be at least 1, got {topics}")
        log_weights, log_topics = (
            torch.log_softmax(torch.from_numpy(_log_gammas(rng, 1.0 / sharpness, size)), -1).numpy()
            for size in ((contexts, topics), (topics, words))
        )
        # Summed one topic at a time in log space: no underflow, and nothing of size contexts x topics x words.
        logits_NV = np.full((contexts, words), -np.inf)
        for topic in range(topics):
            logits_NV = np.logaddexp(logits_NV, log_weights[:, topic, None] + log_topics[topic])
        return cls._of_logits(logits_NV, memory, rng, f"{topics} topics, sharpness {sharpness:g}, seed {seed}")

    @classmethod
    def peaked(
        cls, *, contexts: int, words: int, peak: float = 0.9, memory: int | None = None, seed: int = 0
    ) -> Language:
        """Each context has a favourite token of probability about ``peak``; the rest follows one Zipf law for all."""
        rng = _generator(seed, contexts, words)
        if not 0.0 < peak < 1.0:
            raise ValueError(f"peak is a probability strictly between 0 and 1, got {peak}")
        common_V = 1.0 / rng.permutation(np.arange(1.0, words + 1.0))
        p_NV = np.tile((1.0 - peak) * common_V / common_V.sum(), (contexts, 1))
        p_NV[np.arange(contexts), rng.integers(words, size=contexts)] += peak
        return cls._of_logits(np.log(p_NV), memory, rng, f"rows with a peak of {peak:g}, seed {seed}")

    @classmethod
    def made_by(
        cls,
        function: str | OutputFunction,
        *,
        contexts: int,
        words: int,
        width: int,
        scale: float = 2.0,
        memory: int | None = None,
        seed: int = 0,
    ) -> Language:
        """The output of a layer of the given member and width for Gaussian h, W and class bias.

        The logits have standard deviation about ``scale``; with the same member and width a model can be perfect.
        """
        member = OutputFunction.parse(function)
        rng = _generator(seed, contexts, words, scale=scale)
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        h_Nd, w_Vd = rng.standard_normal((contexts, width)), rng.standard_normal((words, width))
        z_NV = scale * (h_Nd @ w_Vd.T / math.sqrt(width) + 0.5 * rng.standard_normal(words))
        phi_NV = member.phi(torch.from_numpy(z_NV)).detach().numpy()
        return cls._of_logits(phi_NV, memory, rng, f"made by {member} of width {width}, scale {scale:g}, seed {seed}")

    @classmethod
    def _of_logits(cls, logits_NV: NDArray[np.float64], memory: int | None, rng: Generator, text: str) -> Language:
        contexts, words = logits_NV.shape
        next_NV = _automaton(contexts, words, rng) if memory is None else _last_tokens(contexts, words, memory, rng)
        log_p_NV = torch.log_softmax(torch.from_numpy(logits_NV), -1)
        return cls(log_p_NV, torch.from_numpy(next_NV), description=text)


def batch_means(values_L: Tensor) -> Estimate:
    """Mean and standard error of a correlated sequence, by the method of batch means.

    Neighbouring positions of a text are correlated, so the error of their mean is not deviation / sqrt(L). The
    sequence is cut into about sqrt(L) batches of equal length; their means are nearly independent, and their
    deviation gives the error. A remainder that fills no batch counts in the mean alone.
    """
    length = values_L.numel()
    if values_L.ndim != 1 or length < 4:
        raise ValueError(f"expected at least 4 values in one dimension, got shape {tuple(values_L.shape)}")
    values_L = values_L.to(torch.float64)
    batches = math.isqrt(length)
    size = length // batches
    means = values_L[: batches * size].view(batches, size).mean(1)
    return Estimate(float(values_L.mean()), float(means.std() / math.sqrt(batches)), batches)


# --- maps -----------------------------------------------------------------------------------------------------------


def _automaton(contexts: int, words: int, rng: Generator) -> NDArray[np.int64]:
    """A random map with a cycle through all contexts laid in (irreducible) and one loop (aperiodic)."""
    next_NV = rng.integers(contexts, size=(contexts, words))
    order = rng.permutation(contexts)
    step_token = rng.integers(words, size=contexts)
    next_NV[order, step_token] = np.roll(order, -1)
    next_NV[order[0], (step_token[0] + 1) % words] = order[0]
    return next_NV


def _last_tokens(contexts: int, words: int, memory: int, rng: Generator) -> NDArray[np.int64]:
    """The context is the tuple of classes of the last ``memory`` tokens, read as digits."""
    if memory < 1:
        raise ValueError(f"memory must be at least 1, or None for a random automaton, got {memory}")
    classes = round(contexts ** (1.0 / memory))
    if classes**memory != contexts or classes > words:
        raise ValueError(
            f"with memory={memory} the number of contexts must be a power classes ** {memory} with at most as many "
            f"classes as words ({words}), got {contexts} contexts; try contexts={min(classes, words) ** memory}"
        )
    class_of_token_V = rng.permutation(np.arange(words) % classes)
    context_N = np.arange(contexts)
    following: NDArray[np.int64] = ((context_N * classes) % contexts)[:, None] + class_of_token_V
    return following


def _is_irreducible(edges_NN: Tensor) -> bool:
    """True if every context can be reached from the first, and the first from every context."""
    for edges in (edges_NN, edges_NN.T):
        reached_N = torch.arange(len(edges)) == 0
        frontier_N = reached_N
        while frontier_N.any():
            frontier_N = edges[frontier_N].any(0) & ~reached_N
            reached_N = reached_N | frontier_N
        if not reached_N.all():
            return False
    return True


def _log_gammas(rng: Generator, shape_parameter: float, size: tuple[int, int]) -> NDArray[np.float64]:
    # Gamma(a) = Gamma(a + 1) U^(1/a): in log space nothing underflows, however small a is.
    boost = np.log1p(-rng.random(size)) / shape_parameter
    logs: NDArray[np.float64] = np.log(rng.standard_gamma(shape_parameter + 1.0, size))
    return logs + boost


def row_kl(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """KL(P || Q) of every row, (N,), in nats and in float64."""
    p_NV = log_p_NV.to(torch.float64).exp()
    # A token that cannot occur costs nothing, whatever the model says: 0 * (-inf - x) := 0.
    return torch.where(p_NV > 0.0, p_NV * (log_p_NV - log_q_NV.to(torch.float64)), 0.0).sum(-1)


# --- validation -----------------------------------------------------------------------------------------------------


def _checked_log_probs(log_p: Tensor, name: str) -> Tensor:
    if log_p.ndim != 2 or not log_p.is_floating_point():
        raise ValueError(f"{name} must be a floating-point matrix, got {log_p.dtype} of shape {tuple(log_p.shape)}")
    if torch.isnan(log_p).any():
        row = int(torch.isnan(log_p).any(1).nonzero()[0])
        raise ValueError(f"{name} has NaN, first in row {row}; every row must hold log-probabilities")
    if log_p.numel() == 0:
        return log_p
    off_by = log_p.to(torch.float64).logsumexp(1).abs()
    tolerance = 1e-8 if log_p.dtype == torch.float64 else 100.0 * torch.finfo(log_p.dtype).eps
    if off_by.max() > tolerance:
        row = int(off_by.argmax())
        raise ValueError(
            f"the probabilities in each row of {name} must sum to one, but the log of the sum is off by "
            f"{off_by[row].item():.3g} in row {row}; pass log-probabilities, for instance log_softmax of logits"
        )
    return log_p


def _checked_map(next_context_NV: Tensor, log_p_NV: Tensor) -> Tensor:
    if next_context_NV.shape != log_p_NV.shape or next_context_NV.dtype != torch.int64:
        raise ValueError(
            f"next_context_NV must be int64 of the shape of log_p_NV, {tuple(log_p_NV.shape)}, got "
            f"{next_context_NV.dtype} of shape {tuple(next_context_NV.shape)}"
        )
    if not log_p_NV.numel():
        raise ValueError(f"a language needs at least one context and one token, got shape {tuple(log_p_NV.shape)}")
    _check_range("next contexts", next_context_NV, len(log_p_NV))
    return next_context_NV


def _check_range(name: str, contexts: Tensor, count: int, advice: str = "") -> None:
    low, high = (int(end) for end in torch.aminmax(contexts)) if contexts.numel() else (0, 0)
    if not 0 <= low <= high < count:
        raise ValueError(f"{name} must be between 0 and {count - 1}, got values from {low} to {high}{advice}")


def _generator(seed: int, contexts: int, words: int, **positive: float) -> Generator:
    """The source of randomness of a language of valid sizes and positive parameters."""
    if contexts < 1 or words < 2:
        raise ValueError(f"a language needs at least 1 context and 2 words, got {contexts} and {words}")
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0.0):
            raise ValueError(f"{name} must be a positive number, got {value}")
    return default_rng(seed)
