"""Languages whose truth is known: every next-word distribution, the stationary distribution, the entropy rate.

A language is an automaton. It has N contexts; in each the next of M words is drawn from a known distribution, and
context and word together determine the next context. So text can be sampled, a table model is judged exactly, and
a model that reads the text is judged at every position against the distribution that drew the next word.

Shapes: N contexts, M words, L positions of a text. All probabilities are float64.
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

__all__ = ["Estimate", "Language", "Text", "batch_means"]

Weighting = Literal["stationary", "uniform"]


class Text(NamedTuple):
    """A sampled text: ``words_L[t]`` was drawn in context ``contexts_L[t]``."""

    words_L: Tensor
    contexts_L: Tensor


class Estimate(NamedTuple):
    """A mean over the positions of a text, with its standard error by batch means."""

    mean: float
    standard_error: float
    batches: int


class Language:
    """N contexts x M words: ``log_p_NM`` and the map (context, word) -> context.

    The constructors below make every kind that the product uses; each is a function of its arguments and ``seed``.
    ``memory`` chooses the map. None makes a random automaton, in which a word of one context leads anywhere: exact
    tables are at home there, but a reader of the text has to learn the automaton. ``memory=m`` makes the context a
    function of the last m words (each word belongs to one of N ** (1/m) classes), which a small model can learn.
    Both are irreducible and aperiodic for distributions without zeros.
    """

    def __init__(self, log_p_NM: Tensor, next_context_NM: Tensor, *, description: str = "given distributions") -> None:
        self.log_p_NM = _checked_log_probs(log_p_NM, "log_p_NM").to(torch.float64)
        self.next_context_NM = _checked_map(next_context_NM, self.log_p_NM)
        self.description = description

    @property
    def num_contexts(self) -> int:
        return self.log_p_NM.shape[0]

    @property
    def num_words(self) -> int:
        return self.log_p_NM.shape[1]

    def __repr__(self) -> str:
        return f"Language({self.description}; {self.num_contexts} contexts, {self.num_words} words)"

    @cached_property
    def transition_NN(self) -> Tensor:
        """The probability of the next context given this one."""
        zeros = torch.zeros(self.num_contexts, self.num_contexts, dtype=torch.float64)
        return zeros.scatter_add(1, self.next_context_NM, self.log_p_NM.exp())

    @cached_property
    def stationary_N(self) -> Tensor:
        """How often each context occurs in an endless text; solved for, not iterated, and checked."""
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
        """Nats per word of an endless text: the loss of a perfect model."""
        return float(self.stationary_N @ torch.special.entr(self.log_p_NM.exp()).sum(1))

    @cached_property
    def log_rank(self) -> int:
        """Numerical rank of log P: singular values above max(N, M) * eps * the largest, in float64 (numpy's rule)."""
        if torch.isinf(self.log_p_NM).any():
            raise ValueError("log P has no rank, since some words have probability zero and log P is -inf there")
        return int(torch.linalg.matrix_rank(self.log_p_NM))

    def weights_N(self, weights: Weighting = "stationary") -> Tensor:
        """How much each context counts; sums to one."""
        if weights == "stationary":
            return self.stationary_N
        if weights == "uniform":
            return torch.full((self.num_contexts,), 1.0 / self.num_contexts, dtype=torch.float64)
        raise ValueError(f"weights must be 'stationary' or 'uniform', got {weights!r}")

    def kl(self, log_q_NM: Tensor, *, weights: Weighting = "stationary") -> float:
        """The exact mean over contexts of KL(P || Q), in nats, for a model given as a table."""
        if log_q_NM.shape != self.log_p_NM.shape:
            raise ValueError(
                f"log_q_NM must have one row per context and one column per word, {tuple(self.log_p_NM.shape)}, "
                f"got {tuple(log_q_NM.shape)}"
            )
        return float(self.weights_N(weights) @ _row_kl(self.log_p_NM, _checked_log_probs(log_q_NM, "log_q_NM")))

    def sample(self, length: int, *, seed: int) -> Text:
        """A text of ``length`` words that starts in a context drawn from the stationary distribution."""
        if length < 0:
            raise ValueError(f"length must not be negative, got {length}")
        rng = default_rng(seed)
        context = int(rng.choice(self.num_contexts, p=self.stationary_N.numpy()))
        p_NM, next_NM = self.log_p_NM.exp().numpy(), self.next_context_NM.numpy()
        # bisect on Python lists is several times faster than numpy on single rows; rows are made when first met.
        rows: dict[int, tuple[list[float], list[int]]] = {}
        words, contexts = np.empty(length, dtype=np.int64), np.empty(length, dtype=np.int64)
        for position, uniform in enumerate(rng.random(length).tolist()):
            if context not in rows:
                cumulative = p_NM[context].cumsum()
                # Dividing by the total makes the last word that can occur exactly 1, so that no other is drawn.
                rows[context] = ((cumulative / cumulative[-1]).tolist(), next_NM[context].tolist())
            row, following = rows[context]
            word = bisect.bisect_right(row, uniform)
            words[position], contexts[position] = word, context
            context = following[word]
        return Text(torch.from_numpy(words), torch.from_numpy(contexts))

    def position_kl(self, contexts_L: Tensor, log_q_LM: Tensor) -> Tensor:
        """KL(P of the position's context || Q of the position), (L,): exact at each position, whatever made Q.

        The mean over a text estimates what the model loses per word; :func:`batch_means` gives its standard error.
        """
        if contexts_L.ndim != 1 or log_q_LM.shape != (contexts_L.shape[0], self.num_words):
            raise ValueError(
                f"expected contexts of shape (L,) and log_q_LM of shape (L, {self.num_words}), got "
                f"{tuple(contexts_L.shape)} and {tuple(log_q_LM.shape)}"
            )
        if contexts_L.numel() and not 0 <= int(contexts_L.min()) <= int(contexts_L.max()) < self.num_contexts:
            raise ValueError(
                f"contexts must be between 0 and {self.num_contexts - 1}, got values from {int(contexts_L.min())} to "
                f"{int(contexts_L.max())}; pass the contexts that `sample` returned"
            )
        log_q_LM = _checked_log_probs(log_q_LM, "log_q_LM").cpu()
        return _row_kl(self.log_p_NM[contexts_L.cpu()], log_q_LM)

    @classmethod
    def of_rank(
        cls, *, contexts: int, words: int, rank: int, scale: float = 2.0, memory: int | None = None, seed: int = 0
    ) -> Language:
        """log P of a generic matrix of the given rank; the logits have standard deviation ``scale``.

        The logits are a product of Gaussian factors of rank - 1 columns: normalising adds the direction of ones.
        """
        _check_sizes(contexts, words)
        if not 1 <= rank <= min(contexts, words):
            raise ValueError(
                f"rank must be between 1 and min(contexts, words) = {min(contexts, words)}, got {rank}; "
                "the rank of a matrix is at most its smaller side"
            )
        _check_positive("scale", scale)
        rng = default_rng(seed)
        left = rng.standard_normal((contexts, rank - 1))
        right = rng.standard_normal((words, rank - 1))
        logits_NM = scale * (left @ right.T) / math.sqrt(max(rank - 1, 1))
        return cls._of_logits(logits_NM, memory, rng, f"generic log P of rank {rank}, scale {scale:g}, seed {seed}")

    @classmethod
    def dirichlet(
        cls, *, contexts: int, words: int, concentration: float = 0.5, memory: int | None = None, seed: int = 0
    ) -> Language:
        """Independent rows from a symmetric Dirichlet; a small concentration makes a few words take most of a row."""
        _check_sizes(contexts, words)
        _check_positive("concentration", concentration)
        rng = default_rng(seed)
        logits_NM = _log_gammas(rng, concentration, (contexts, words))
        return cls._of_logits(logits_NM, memory, rng, f"Dirichlet({concentration:g}) rows, seed {seed}")

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
        """Each context mixes ``topics`` word distributions: P has rank ``topics``, while log P has high rank.

        Both the mixing weights and the topics are Dirichlet(1 / sharpness).
        """
        _check_sizes(contexts, words)
        if topics < 1:
            raise ValueError(f"topics must be at least 1, got {topics}")
        _check_positive("sharpness", sharpness)
        rng = default_rng(seed)
        log_weights, log_topics = (
            torch.log_softmax(torch.from_numpy(_log_gammas(rng, 1.0 / sharpness, size)), -1).numpy()
            for size in ((contexts, topics), (topics, words))
        )
        # Summed one topic at a time in log space: no underflow, and nothing of size contexts x topics x words.
        logits_NM = np.full((contexts, words), -np.inf)
        for topic in range(topics):
            logits_NM = np.logaddexp(logits_NM, log_weights[:, topic, None] + log_topics[topic])
        return cls._of_logits(logits_NM, memory, rng, f"{topics} topics, sharpness {sharpness:g}, seed {seed}")

    @classmethod
    def peaked(
        cls, *, contexts: int, words: int, peak: float = 0.9, memory: int | None = None, seed: int = 0
    ) -> Language:
        """Each context has a favourite word of probability about ``peak``; the rest follows one Zipf law for all."""
        _check_sizes(contexts, words)
        if not 0.0 < peak < 1.0:
            raise ValueError(f"peak is a probability strictly between 0 and 1, got {peak}")
        rng = default_rng(seed)
        common_M = 1.0 / rng.permutation(np.arange(1.0, words + 1.0))
        p_NM = np.tile((1.0 - peak) * common_M / common_M.sum(), (contexts, 1))
        p_NM[np.arange(contexts), rng.integers(words, size=contexts)] += peak
        return cls._of_logits(np.log(p_NM), memory, rng, f"rows with a peak of {peak:g}, seed {seed}")

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
        """What an output layer of the given member and width makes of Gaussian h, W and class bias.

        The logits have standard deviation about ``scale``; with the same member and width a model can be perfect.
        """
        member = OutputFunction.parse(function)
        _check_sizes(contexts, words)
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        _check_positive("scale", scale)
        rng = default_rng(seed)
        h_Nd, w_Md = rng.standard_normal((contexts, width)), rng.standard_normal((words, width))
        z_NM = scale * (h_Nd @ w_Md.T / math.sqrt(width) + 0.5 * rng.standard_normal(words))
        phi_NM = member.phi(torch.from_numpy(z_NM)).detach().numpy()
        return cls._of_logits(phi_NM, memory, rng, f"made by {member} of width {width}, scale {scale:g}, seed {seed}")

    @classmethod
    def _of_logits(cls, logits_NM: NDArray[np.float64], memory: int | None, rng: Generator, text: str) -> Language:
        contexts, words = logits_NM.shape
        next_NM = _automaton(contexts, words, rng) if memory is None else _last_words(contexts, words, memory, rng)
        log_p_NM = torch.log_softmax(torch.from_numpy(logits_NM), -1)
        return cls(log_p_NM, torch.from_numpy(next_NM), description=text)


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
    next_NM = rng.integers(contexts, size=(contexts, words))
    order = rng.permutation(contexts)
    step_word = rng.integers(words, size=contexts)
    next_NM[order, step_word] = np.roll(order, -1)
    next_NM[order[0], (step_word[0] + 1) % words] = order[0]
    return next_NM


def _last_words(contexts: int, words: int, memory: int, rng: Generator) -> NDArray[np.int64]:
    """The context is the tuple of classes of the last ``memory`` words, read as digits."""
    if memory < 1:
        raise ValueError(f"memory must be at least 1, or None for a random automaton, got {memory}")
    classes = round(contexts ** (1.0 / memory))
    if classes**memory != contexts or classes > words:
        raise ValueError(
            f"with memory={memory} the number of contexts must be a power classes ** {memory} with at most as many "
            f"classes as words ({words}), got {contexts} contexts; try contexts={min(classes, words) ** memory}"
        )
    class_of_word_M = rng.permutation(np.arange(words) % classes)
    context_N = np.arange(contexts)
    following: NDArray[np.int64] = ((context_N * classes) % contexts)[:, None] + class_of_word_M
    return following


def _is_irreducible(edges_NN: Tensor) -> bool:
    """Whether every context can be reached from the first, and the first from every context."""
    return all(_reached_from_first(edges) for edges in (edges_NN, edges_NN.T))


def _reached_from_first(edges_NN: Tensor) -> bool:
    reached_N = torch.zeros(edges_NN.shape[0], dtype=torch.bool)
    reached_N[0] = True
    frontier_N = reached_N.clone()
    while frontier_N.any():
        frontier_N = edges_NN[frontier_N].any(0) & ~reached_N
        reached_N |= frontier_N
    return bool(reached_N.all())


def _log_gammas(rng: Generator, shape_parameter: float, size: tuple[int, int]) -> NDArray[np.float64]:
    # Gamma(a) = Gamma(a + 1) U^(1/a): in log space nothing underflows, however small a is.
    boost = np.log1p(-rng.random(size)) / shape_parameter
    logs: NDArray[np.float64] = np.log(rng.standard_gamma(shape_parameter + 1.0, size))
    return logs + boost


def _row_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    # A word that cannot occur costs nothing, whatever the model says: 0 * (-inf - x) := 0.
    terms = log_p.exp() * (log_p - log_q.to(torch.float64))
    return torch.where(torch.isneginf(log_p), torch.zeros_like(terms), terms).sum(-1)


# --- the border -----------------------------------------------------------------------------------------------------


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


def _checked_map(next_context_NM: Tensor, log_p_NM: Tensor) -> Tensor:
    num_contexts = log_p_NM.shape[0]
    if next_context_NM.shape != log_p_NM.shape or next_context_NM.dtype != torch.int64:
        raise ValueError(
            f"next_context_NM must be int64 of the shape of log_p_NM, {tuple(log_p_NM.shape)}, got "
            f"{next_context_NM.dtype} of shape {tuple(next_context_NM.shape)}"
        )
    if not log_p_NM.numel():
        raise ValueError(f"a language needs at least one context and one word, got shape {tuple(log_p_NM.shape)}")
    if int(next_context_NM.min()) < 0 or int(next_context_NM.max()) >= num_contexts:
        raise ValueError(
            f"next contexts must be between 0 and {num_contexts - 1}, got values from {int(next_context_NM.min())} "
            f"to {int(next_context_NM.max())}"
        )
    return next_context_NM


def _check_sizes(contexts: int, words: int) -> None:
    if contexts < 1 or words < 2:
        raise ValueError(f"a language needs at least 1 context and 2 words, got {contexts} and {words}")


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0.0):
        raise ValueError(f"{name} must be a positive number, got {value}")
