"""Upper bounds on the rank of a log-output matrix that theory gives.

For a linear phi, log f = h W^T + bias - a number per context has rank at most d + 1, with a bias d + 2. For any other
phi or a mixture theory knows no bound but the number of different rows of W and of different contexts.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from sigsoftmax.analysis.head_weights import Contexts, HeadWeights
from sigsoftmax.family.parameters import ParameterKind

__all__ = ["SMALLER_SIDE", "linear_bound", "upper_bound"]

SMALLER_SIDE = "the smaller side of the matrix"
ROWS_AT_ONCE = 2**12


def upper_bound(layer: HeadWeights, contexts: Contexts) -> tuple[int, str]:
    """The bound, and what it rests on in plain text."""
    full = min(layer.vocabulary, len(contexts))
    if layer.is_softmax:
        has_bias = layer.bias_V is not None and bool((layer.bias_V != layer.bias_V[0]).any())
        return linear_bound(layer.width, has_bias, full)
    per_token = [layer.weight_Vd, layer.bias_V]
    for argument, kind in zip(layer.function.arguments(layer.vocabulary), layer.function.argument_kinds(), strict=True):
        per_token += [argument] if kind is ParameterKind.PER_CLASS else []
    different_tokens = _different_rows(per_token)
    different_contexts = _different_rows([contexts.hidden_NKd, contexts.prior_logits_NK])
    if min(different_tokens, different_contexts) == full:
        return full, f"{SMALLER_SIDE}: phi is not linear, and theory knows no other bound"
    if different_tokens <= different_contexts:
        return different_tokens, f"{different_tokens} of {layer.vocabulary} words differ in W or bias"
    return different_contexts, f"{different_contexts} of {len(contexts)} contexts differ"


def linear_bound(width: int, has_bias: bool, full: int) -> tuple[int, str]:
    """The bound for a linear phi, if that is below the smaller side ``full`` of the matrix."""
    if width + 1 + has_bias >= full:
        return full, SMALLER_SIDE
    reason = "d + 2 (h, bias, normaliser)" if has_bias else "d + 1 (h, normaliser)"
    return width + 1 + has_bias, f"phi is linear: {reason}"


def _different_rows(tensors_N: list[Tensor | None]) -> int:
    """The number of different rows, the tensors taken side by side."""
    digests: set[bytes] = set()
    given = [tensor for tensor in tensors_N if tensor is not None]
    for parts in zip(*(tensor.detach().split(ROWS_AT_ONCE) for tensor in given), strict=True):
        bits = [part.cpu().reshape(len(part), -1).contiguous().view(torch.uint8) for part in parts]
        digests.update(hashlib.blake2b(row.data, digest_size=16).digest() for row in torch.cat(bits, 1).numpy())
    return len(digests)
