"""Distributions that count as the truth, and the validation of given ones.

Shapes: N contexts, V vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from sigsoftmax.analysis.spectrum.entry_checks import check_matrix, sum_tolerance
from sigsoftmax.synthetic import Language, Weighting

__all__ = ["Distributions", "checked_log_probs"]


@dataclass(frozen=True, kw_only=True)
class Distributions:
    """One distribution over tokens for each context, in float64, and how much each context counts."""

    log_p_NV: Tensor
    weights_N: Tensor
    """sums to one, or to less where tokens were left out: then a KL is that part of the whole"""
    description: str

    def __post_init__(self) -> None:
        contexts, vocabulary = self.log_p_NV.shape
        if contexts < 1 or vocabulary < 2:
            raise ValueError(f"expected at least one context and two tokens, got {contexts} and {vocabulary}")
        if self.weights_N.shape != (contexts,) or not bool((self.weights_N >= 0.0).all()) or not self.weights_N.any():
            raise ValueError(
                f"weights of contexts must be {contexts} numbers that are not negative and not all zero, got shape "
                f"{tuple(self.weights_N.shape)}"
            )

    @classmethod
    def of_language(cls, language: Language, weights: Weighting = "uniform") -> Distributions:
        return cls(log_p_NV=language.log_p_NV, weights_N=language.weights_N(weights), description=language.description)

    @classmethod
    def given(cls, matrix_NV: Tensor, *, description: str = "given distributions") -> Distributions:
        """Probabilities or log-probabilities, checked; every context counts the same."""
        log_p_NV = checked_log_probs(matrix_NV, description)
        weights_N = torch.full((log_p_NV.shape[0],), 1.0 / log_p_NV.shape[0], dtype=torch.float64)
        return cls(log_p_NV=log_p_NV, weights_N=weights_N, description=description)

    @property
    def checksum(self) -> str:
        """A checksum that tells distributions of one name apart; of float32, whose digits no machine gets wrong."""
        digest = hashlib.sha256()
        for tensor in (self.log_p_NV, self.weights_N):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.to("cpu", torch.float32).contiguous().numpy().tobytes())
        return digest.hexdigest()[:12]


def checked_log_probs(
    matrix_NV: Tensor, name: str, *, rows_N: Tensor | None = None, are_probabilities: bool | None = None
) -> Tensor:
    """Log-probabilities in float64, each row of sum one, from rows of probabilities or of log-probabilities.

    Which of the two they are shows in the signs, unless ``are_probabilities`` tells. Rows that miss the sum by what
    rounding, or a floor under probabilities, can do are put right; others are refused, with how far they are off.
    ``rows_N`` are the numbers that errors give the rows, if these are a part of a larger matrix.
    """
    check_matrix(matrix_NV, name)
    values_NV = matrix_NV.detach().to(torch.float64)
    rows_N = torch.arange(values_NV.shape[0]) if rows_N is None else rows_N
    bad = torch.isnan(values_NV)
    if bad.any():
        raise ValueError(f"{name}: NaN {_where(bad, rows_N)}; every entry must be a probability or its logarithm")
    if are_probabilities is None:
        are_probabilities = bool((values_NV >= 0.0).all())
    tolerance = sum_tolerance(matrix_NV.dtype)
    if are_probabilities:
        bad = (values_NV < 0.0) | (values_NV > 1.0 + tolerance)
        kind = "probabilities must lie between 0 and 1"
    else:
        bad = values_NV > tolerance
        kind = "a log-probability is never positive; if these are logits, take log_softmax of each row first"
    if bad.any():
        row, column = (int(i) for i in bad.nonzero()[0])
        raise ValueError(f"{name}: {values_NV[row, column].item():.6g} {_where(bad, rows_N)}; {kind}")
    if are_probabilities:
        values_NV = values_NV.log()
    log_sums_N = torch.logsumexp(values_NV, 1)
    off_N = log_sums_N.exp() - 1.0
    wrong_N = ~(off_N.abs() <= tolerance)
    if wrong_N.any():
        worst = int(off_N.abs().argmax())
        raise ValueError(
            f"{name}: the probabilities of a row must sum to one within {tolerance:.1g}, but those of row "
            f"{int(rows_N[worst])} sum to {1.0 + off_N[worst].item():.6g}, off by {off_N[worst].item():+.3g}, and "
            f"{int(wrong_N.sum())} of {len(wrong_N)} rows are off; normalise them (log_softmax), or check that whole "
            "rows were stored"
        )
    return values_NV - log_sums_N[:, None]


def _where(bad: Tensor, rows_N: Tensor) -> str:
    row, column = (int(i) for i in bad.nonzero()[0])
    return f"at row {int(rows_N[row])}, column {column} ({int(bad.sum())} such entries)"
