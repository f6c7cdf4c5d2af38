"""The log-output matrix of an output layer, computed a block at a time from its hidden vectors and output matrix.

Shapes: M words, T contexts, B contexts of a block, K components, d features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sigsoftmax.analysis.spectrum.matrix_readers import MatrixSource, from_function
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.heads import Head
from sigsoftmax.losses import functional

__all__ = ["OutputHead", "full_precision"]

BLOCK_BYTES = 2**27
"""of the logits of a block"""
WORDS_AT_ONCE = 8192
"""rows of an output matrix of another dtype that are converted at once, so that it is never held twice"""
SLICE_BYTES = {"cpu": 2**23, "cuda": 2**28}
"""of logits that phi is applied to at once: on a CPU fresh memory costs more than what is done in it"""


@dataclass(frozen=True, kw_only=True)
class OutputHead:
    """An output layer and the hidden vectors that reach it; logits are h W^T + bias, before phi."""

    hidden: Tensor
    """(T, d), or (T, K, d) for a mixture"""
    weight_Md: Tensor
    bias_M: Tensor | None = None
    head: Head | str = "softmax"
    prior_logits_TK: Tensor | None = None
    """for a mixture: the logits of its components"""
    floor: float = 0.0
    """added to the probabilities of a mixture, as the published code does with 1e-8"""
    dtype: torch.dtype | None = None
    """of the arithmetic; None: float64 if all tensors are, else float32"""
    device: torch.device | str | None = None
    """where to compute; None: where the output matrix is"""

    def __post_init__(self) -> None:
        head = self.parsed_head
        leading = "(T, d)" if head.components == 1 else f"(T, K = {head.components}, d)"
        if self.weight_Md.ndim != 2 or not self.weight_Md.is_floating_point() or not self.weight_Md.numel():
            raise ValueError(
                "expected a floating-point output matrix (words, features), got "
                f"{self.weight_Md.dtype} of shape {tuple(self.weight_Md.shape)}"
            )
        wanted = (self.width,) if head.components == 1 else (head.components, self.width)
        if self.hidden.shape[1:] != wanted or not self.hidden.is_floating_point() or not len(self.hidden):
            raise ValueError(
                f"expected hidden vectors {leading} with d = {self.width} for the head {head}, got {self.hidden.dtype} "
                f"of shape {tuple(self.hidden.shape)}"
            )
        if self.bias_M is not None and self.bias_M.shape != (self.words,):
            raise ValueError(f"expected a bias of shape ({self.words},), got {tuple(self.bias_M.shape)}")
        if head.components == 1 and (self.prior_logits_TK is not None or self.floor):
            raise ValueError(f"the head {head} is no mixture: it takes neither prior_logits_TK nor a floor")
        if head.components > 1 and (
            self.prior_logits_TK is None or self.prior_logits_TK.shape != self.hidden.shape[:2]
        ):
            got = None if self.prior_logits_TK is None else tuple(self.prior_logits_TK.shape)
            raise ValueError(f"expected prior_logits_TK of shape {tuple(self.hidden.shape[:2])} for {head}, got {got}")
        if self.dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {self.dtype}")
        for name, tensor in (("hidden", self.hidden), ("weight_Md", self.weight_Md), ("bias_M", self.bias_M)):
            if tensor is not None and not _is_finite(tensor):
                raise ValueError(f"{name} has infinite or NaN entries; check the model that they come from")

    @property
    def parsed_head(self) -> Head:
        return Head.parse(self.head)

    @property
    def contexts(self) -> int:
        return len(self.hidden)

    @property
    def words(self) -> int:
        return len(self.weight_Md)

    @property
    def width(self) -> int:
        return self.weight_Md.shape[1]

    @property
    def compute_dtype(self) -> torch.dtype:
        if self.dtype is not None:
            return self.dtype
        tensors = [t for t in (self.hidden, self.weight_Md, self.bias_M) if t is not None]
        return torch.float64 if all(t.dtype == torch.float64 for t in tensors) else torch.float32

    def source(
        self,
        contexts: Tensor | None = None,
        *,
        description: str | None = None,
        dtype: torch.dtype | None = None,
        quick: bool = False,
    ) -> MatrixSource:
        """The rows of all contexts, or of those with the given indices; ``dtype`` is for once another arithmetic.

        ``quick`` takes torch's own log_softmax, several times faster on a CPU; the number that it subtracts from a row
        of 10^5 words in float32 is off by 1e-5 or so.
        """
        head, dtype = self.parsed_head, dtype or self.compute_dtype
        device = torch.device(self.device) if self.device is not None else self.weight_Md.device
        weight_Md = self.weight_Md.detach().to(device)
        bias_M = None if self.bias_M is None else self.bias_M.detach().to(device, dtype)
        # A kernel that has to be compiled first would take longer than all blocks of a usual matrix.
        backend = None if device.type == "cpu" else "reference"

        def rows(tensor: Tensor, first: int, last: int) -> Tensor:
            chosen = tensor[first:last] if contexts is None else tensor[contexts[first:last].to(tensor.device)]
            return chosen.detach().to(device, dtype)

        def block_BM(first: int, last: int) -> Tensor:
            hidden = rows(self.hidden, first, last)
            with torch.no_grad(), full_precision(device):
                if self.prior_logits_TK is None:
                    return _log_probs(_logits(hidden, weight_Md, bias_M), head.function, backend, quick)
                return functional.mixture_log_probs(
                    hidden,
                    rows(self.prior_logits_TK, first, last),
                    weight_Md.to(dtype),
                    function=head.function,
                    linear_bias=bias_M,
                    floor=self.floor,
                    backend=backend,
                )

        return from_function(
            block_BM,
            self.contexts if contexts is None else len(contexts),
            words=self.words,
            block_contexts=max(1, BLOCK_BYTES // (dtype.itemsize * self.words * head.components)),
            description=description or f"log-probabilities of a {head} head, d = {self.width}",
        )


def _is_finite(tensor: Tensor) -> bool:
    # The extremes of a NaN are NaN; isfinite would write a large matrix several times over.
    low, high = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _logits(hidden_Bd: Tensor, weight_Md: Tensor, bias_M: Tensor | None) -> Tensor:
    """In the dtype of the hidden vectors."""
    if weight_Md.dtype == hidden_Bd.dtype:
        return hidden_Bd @ weight_Md.T if bias_M is None else torch.addmm(bias_M, hidden_Bd, weight_Md.T)
    logits_BM = hidden_Bd.new_empty(len(hidden_Bd), len(weight_Md))
    for part_BC, part_Cd in zip(logits_BM.split(WORDS_AT_ONCE, 1), weight_Md.split(WORDS_AT_ONCE), strict=True):
        torch.mm(hidden_Bd, part_Cd.to(hidden_Bd.dtype).T, out=part_BC)
    return logits_BM if bias_M is None else logits_BM.add_(bias_M)


def _log_probs(logits_BM: Tensor, function: OutputFunction, backend: str | None, quick: bool) -> Tensor:
    """log f, in the memory of the logits."""
    rows = max(1, SLICE_BYTES.get(logits_BM.device.type, 2**28) // (logits_BM.element_size() * logits_BM.shape[1]))
    is_identity = function.lasting_properties.affine_slope == 1.0
    for slice_BM in logits_BM.split(rows):
        if quick:
            phi_BM = slice_BM if is_identity else function.phi(slice_BM)
            slice_BM.copy_(torch.log_softmax(phi_BM, -1))
        else:
            slice_BM.copy_(functional.log_probs(slice_BM, function=function, backend=backend))
    return logits_BM


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products in the dtype of their factors: no TF32 or bf16 inside, and no autocast."""
    backends: Any = torch.backends
    switches = (backends.cuda.matmul, backends.mkldnn.matmul)
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value
