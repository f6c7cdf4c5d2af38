"""Calibration of the probabilities of a classifier: calibration error, Brier score, reliability.

The calibration error is that of the predicted class, with bins of equal width. Few examples make it too large, also for
a perfectly calibrated classifier, and another number of bins gives another value: compare it on equal examples and bins
only, and read the Brier score and the loss beside it, which have neither flaw.

Shapes: N examples, V classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sigsoftmax.contract.spec import check_positive
from sigsoftmax.records.schemas.classifiers import Calibration, ConfidenceBin

__all__ = ["BINS", "calibration"]

BINS = 15


def calibration(log_probs_NV: Tensor, target_N: Tensor, *, bins: int = BINS) -> Calibration:
    """Calibration of log-probabilities against the classes that came.

    >>> log_p = torch.tensor([[0.7, 0.3], [0.9, 0.1]]).log()
    >>> round(calibration(log_p, torch.tensor([0, 1]), bins=10).expected_error, 2)
    0.6
    """
    _check(log_probs_NV, target_N, bins)
    probs_NV = log_probs_NV.detach().double().cpu().exp()
    target_N = target_N.cpu()
    confidence_N, predicted_N = probs_NV.max(-1)
    right_N = (predicted_N == target_N).double()
    # (low, high], so that full confidence belongs to the last bin. Rounding must not lead beyond it.
    bin_N = (torch.ceil(confidence_N * bins).long() - 1).clamp(0, bins - 1)
    counts, confidences, rights = (
        torch.bincount(bin_N, weights, bins).tolist() for weights in (None, confidence_N, right_N)
    )
    is_class_NV = torch.nn.functional.one_hot(target_N, probs_NV.shape[-1])
    return Calibration(
        expected_error=sum(abs(r - c) for r, c in zip(rights, confidences, strict=True)) / len(target_N),
        brier=float((probs_NV - is_class_NV).square().sum(-1).mean()),
        bins=tuple(
            ConfidenceBin(
                low=i / bins,
                high=(i + 1) / bins,
                count=count,
                confidence=confidences[i] / count if count else None,
                accuracy=rights[i] / count if count else None,
            )
            for i, count in enumerate(counts)
        ),
    )


def _check(log_probs_NV: Tensor, target_N: Tensor, bins: int) -> None:
    check_positive(bins=bins)
    if log_probs_NV.ndim != 2 or not log_probs_NV.is_floating_point():
        raise ValueError(
            f"log-probabilities must be floating point and of shape (examples, classes), got {log_probs_NV.dtype} of "
            f"shape {tuple(log_probs_NV.shape)}"
        )
    if target_N.shape != log_probs_NV.shape[:1] or target_N.dtype != torch.int64:
        raise ValueError(
            f"the classes must be int64 and of shape {tuple(log_probs_NV.shape[:1])}, got {target_N.dtype} of shape "
            f"{tuple(target_N.shape)}"
        )
    if not target_N.numel():
        raise ValueError("expected at least one example, got none")
    low, high = int(target_N.min()), int(target_N.max())
    if low < 0 or high >= log_probs_NV.shape[1]:
        raise ValueError(f"classes must lie in 0 .. {log_probs_NV.shape[1] - 1}, got {low} .. {high}")
    total_N = log_probs_NV.detach().double().exp().sum(-1)
    if not bool(((total_N - 1.0).abs() < 1e-2).all()):
        worst = float(total_N[(total_N - 1.0).abs().nan_to_num(torch.inf).argmax()])
        raise ValueError(
            f"expected log-probabilities, whose exponentials add up to 1, but a row adds up to {worst:.4g}; pass "
            "layer.log_probs(hidden), not logits"
        )
