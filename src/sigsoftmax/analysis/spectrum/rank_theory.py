"""What theory knows of the rank of a log-output matrix, from above.

For a linear phi, log f = h W^T + bias - a number a context has rank at most d + 1, with a bias d + 2. For any other phi
or a mixture theory knows no bound but the number of different words and of different contexts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from sigsoftmax.analysis.log_outputs import OutputHead
from sigsoftmax.family.parameters import ParameterKind

__all__ = ["linear_reason", "upper_bound"]


def upper_bound(head: OutputHead) -> tuple[int, str]:
    """The bound, and what it rests on in words."""
    full = min(head.words, head.contexts)
    if head.parsed_head.is_softmax:
        has_bias = head.bias_M is not None and bool((head.bias_M != head.bias_M[0]).any())
        bound = head.width + 1 + has_bias
        return (bound, linear_reason(has_bias)) if bound < full else (full, "the smaller side of the matrix")
    function = head.parsed_head.function
    of_words = [head.weight_Md, *([] if head.bias_M is None else [head.bias_M])]
    for argument, kind in zip(function.arguments(head.words), function.argument_kinds(), strict=True):
        of_words += [argument] if kind is ParameterKind.PER_CLASS else []
    different_words = _different_rows(of_words)
    prior = [] if head.prior_logits_TK is None else [head.prior_logits_TK]
    different_contexts = _different_rows([head.hidden, *prior])
    if min(different_words, different_contexts) < full:
        if different_words <= different_contexts:
            return different_words, f"{different_words} of {head.words} words differ in W or bias"
        return different_contexts, f"{different_contexts} of {head.contexts} contexts differ"
    return full, "the smaller side of the matrix: phi is not linear, and theory knows no other bound"


def linear_reason(has_bias: bool) -> str:
    return "phi is linear: d + 2 (h, bias, normaliser)" if has_bias else "phi is linear: d + 1 (h, normaliser)"


def _different_rows(tensors_N: list[Tensor]) -> int:
    """How many rows differ, the tensors taken side by side."""
    return len(set(_row_digests(tensors_N)))


def _row_digests(tensors_N: list[Tensor]) -> Iterator[bytes]:
    for first in range(0, len(tensors_N[0]), 2**12):
        parts = [tensor[first : first + 2**12].detach().cpu() for tensor in tensors_N]
        bits = [part.reshape(len(part), -1).contiguous().view(torch.uint8).numpy() for part in parts]
        for rows in zip(*bits, strict=True):
            digest = hashlib.blake2b(digest_size=16)
            for row in rows:
                digest.update(row.data)
            yield digest.digest()
