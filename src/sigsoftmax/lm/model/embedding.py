"""Rows of the embedding with two dropouts: of whole tokens, and of the input's features, the same at every step.

Shapes: T time steps, B columns, V vocabulary, D embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax.contract.signature import is_dtensor
from sigsoftmax.lm import kernels

__all__ = ["dropped_embedding"]


def dropped_embedding(
    tokens_TB: Tensor, weight_VD: Tensor, words_V: Tensor | None, input_1BD: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(T, B, D) in ``dtype``; the masks are scaled, and None where nothing is dropped.

    The matrix may be divided over processes.
    """
    if not is_dtensor(weight_VD) and kernels.run_on(weight_VD):
        from sigsoftmax.lm.kernels.embedding import DroppedEmbedding

        return DroppedEmbedding.apply(tokens_TB, weight_VD, words_V, input_1BD, dtype)
    if is_dtensor(weight_VD):
        from sigsoftmax.lm.parallel.vocabulary_embedding import embedding_of_ranks

        embedded = embedding_of_ranks(tokens_TB, weight_VD)
    else:
        embedded = F.embedding(tokens_TB, weight_VD)
    if words_V is not None:
        embedded = embedded * words_V[tokens_TB].unsqueeze(-1)
    if input_1BD is not None:
        embedded = embedded * input_1BD
    return embedded.to(dtype)
