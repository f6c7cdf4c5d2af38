"""An output function as a logits processor, for engines that take a plain model and sample from it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

from sigsoftmax.contract.spec import Function
from sigsoftmax.integrations.huggingface.patching.head_function import transformed
from sigsoftmax.layers.output_layer import FunctionModule


class OutputFunctionLogitsProcessor(LogitsProcessor):
    """Turns the scores z of a plain model into phi(z), which samplers then turn into the right probabilities.

    ``generate`` calls it before temperature, top-k and top-p, but after its own penalties and bans: with a repetition
    penalty use a patched model, whose logits hold phi before anything else. A token banned with -inf stays banned.

    >>> processor = OutputFunctionLogitsProcessor("sigsoftmax")
    >>> processor(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[0.0, float("-inf")]]))
    tensor([[-0.6931,    -inf]])
    """

    def __init__(self, function: Function) -> None:
        self._module = FunctionModule(function)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        with torch.no_grad():
            return transformed(scores, self._module.function)
