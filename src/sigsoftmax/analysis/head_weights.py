"""The output layer that an analysis looks at, and the contexts it is looked at in.

Logits are ``h W^T + b`` and the output is ``f`` of them, f a member of the family; a mixture has K vectors h per
context and a prior. A model that scales its logits by s is the same with ``s h`` and ``s b``. Where the tensors came
from is not known here.

Shapes: N contexts, B contexts of a block, K components, R = N K rows, V vocabulary, C tokens of a part of it, d width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sigsoftmax.contract import normalizing
from sigsoftmax.contract.spec import prior_of
from sigsoftmax.family import Learned, OutputFunction
from sigsoftmax.family.heads import Head
from sigsoftmax.family.parameters import ParameterKind
from sigsoftmax.losses import functional

__all__ = ["Contexts", "HeadWeights", "blocks_of", "detached", "full_precision", "sample_rows"]

TOKENS_AT_ONCE = 8192
"""rows of W that are converted to another dtype at once, so that W is never held twice"""
TEMPORARIES = 6
"""arrays of the size of the logits that live at once while they are worked on in an audit"""
SLICE_BYTES = {"cpu": 2**23, "cuda": 2**28}
"""bytes of logits that phi is applied to at once: on a CPU fresh memory costs more than what is done in it"""


@dataclass(frozen=True, kw_only=True)
class HeadWeights:
    """The weights and the head of an output layer: they turn a hidden vector into a distribution over tokens."""

    weight_Vd: Tensor
    bias_V: Tensor | None = None
    head: Head | str = "softmax"
    floor: float = 0.0
    """added to the probabilities of a mixture by ``log_probs``, as the published code does with 1e-8"""

    def __post_init__(self) -> None:
        weight, bias = self.weight_Vd, self.bias_V
        if weight.ndim != 2 or not weight.is_floating_point() or weight.shape[0] < 2 or weight.shape[1] < 1:
            raise ValueError(
                "the output matrix W must be a floating-point matrix (vocabulary, width) of at least two tokens, got "
                f"{weight.dtype} of shape {tuple(weight.shape)}"
            )
        if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
            raise ValueError(
                f"the class bias b must have one number for each of the {weight.shape[0]} rows of W, got {bias.dtype} "
                f"of shape {tuple(bias.shape)}"
            )
        if self.floor and self.components == 1:
            raise ValueError(f"the head {self.parsed_head} is no mixture: it takes no floor")
        _check_finite("output matrix W", weight)
        if bias is not None:
            _check_finite("class bias b", bias)
        # Learned parameters must have become values, and per-class ones must be as many as tokens.
        self.function.arguments(self.vocabulary)

    @cached_property
    def parsed_head(self) -> Head:
        return Head.parse(self.head, allow_options=True)

    @property
    def function(self) -> OutputFunction:
        return self.parsed_head.function

    @property
    def components(self) -> int:
        return self.parsed_head.components

    @property
    def vocabulary(self) -> int:
        return self.weight_Vd.shape[0]

    @property
    def width(self) -> int:
        return self.weight_Vd.shape[1]

    @property
    def head_text(self) -> str:
        """The head as ``Head.parse`` reads it; what was learned is written as learned, with its value if it is one.

        It does not tell the way in which a mixture's latent vectors are made, which are the hidden vectors here, or its
        prior.
        """
        learned = {}
        for key, value in self.function.given.items():
            if isinstance(value, Tensor):
                differs_by_class = self.function.kinds[key] is ParameterKind.PER_CLASS
                initial = None if differs_by_class else float(value.detach())
                learned[key] = Learned(initial=initial, per_class=differs_by_class)
        return str(Head(self.function.with_parameters(**learned), self.components))

    @property
    def is_softmax(self) -> bool:
        """True if log f is logits less a number per context, so that theory bounds its rank by d + 1 or d + 2."""
        return self.parsed_head.is_softmax

    @property
    def has_shared_phi(self) -> bool:
        """True if one phi serves the whole vocabulary: no parameter per class, and no mixture."""
        return self.components == 1 and self.function.has_shared_phi

    def logits(self, hidden_Rd: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """The logits of some rows of hidden vectors, (R, V)."""
        weight_Vd = self.weight_Vd.detach()
        hidden_Rd = hidden_Rd.detach().to(weight_Vd.device, dtype)
        bias_V = None if self.bias_V is None else self.bias_V.detach().to(hidden_Rd)
        if weight_Vd.dtype == dtype:
            return F.linear(hidden_Rd, weight_Vd, bias_V)
        logits_RV = hidden_Rd.new_empty(len(hidden_Rd), self.vocabulary)
        for part_RC, part_Cd in zip(logits_RV.split(TOKENS_AT_ONCE, 1), weight_Vd.split(TOKENS_AT_ONCE), strict=True):
            torch.mm(hidden_Rd, part_Cd.to(dtype).T, out=part_RC)
        return logits_RV if bias_V is None else logits_RV.add_(bias_V)

    def log_probs(self, contexts: Contexts, dtype: torch.dtype = torch.float64, *, quick: bool = False) -> Tensor:
        """The log-probabilities, (N, V), all at once: call it on some contexts at a time.

        ``quick`` takes torch's own log_softmax, several times faster on a CPU; the number that it subtracts from a row
        of 10^5 tokens in float32 is off by 1e-5 or so.
        """
        device = self.weight_Vd.device
        # A kernel that has to be compiled first would take longer than all blocks of a usual matrix.
        backend = None if device.type == "cpu" else "reference"
        with torch.no_grad(), full_precision(device):
            if contexts.prior_logits_NK is not None:
                return functional.mixture_log_probs(
                    contexts.hidden_NKd.to(device, dtype),
                    contexts.prior_logits_NK.to(device, dtype),
                    self.weight_Vd.to(dtype),
                    function=self.function,
                    prior_function=self.parsed_head.prior,
                    linear_bias=None if self.bias_V is None else self.bias_V.to(device, dtype),
                    floor=self.floor,
                    backend=backend,
                )
            log_f_NV = self.logits(contexts.hidden_NKd[:, 0], dtype)
            rows = max(1, SLICE_BYTES.get(device.type, 2**28) // (dtype.itemsize * self.vocabulary))
            is_identity = self.function.lasting_properties.affine_slope == 1.0
            for slice_BV in log_f_NV.split(rows):
                if quick:
                    slice_BV.copy_(torch.log_softmax(slice_BV if is_identity else self.function.phi(slice_BV), -1))
                else:
                    slice_BV.copy_(functional.log_probs(slice_BV, function=self.function, backend=backend))
            return log_f_NV

    def by_component(self, contexts: Contexts) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and log f of every component, (N, K, V), and the log of the prior, (N, K), in float64."""
        logits_NKV = self.logits(contexts.hidden_NKd.flatten(0, 1)).unflatten(0, contexts.hidden_NKd.shape[:2])
        log_f_NKV = normalizing.log_probs(logits_NKV, self.function.form, self.function.arguments(self.vocabulary))
        prior_logits_NK = contexts.prior_logits_NK
        if prior_logits_NK is None:
            return logits_NKV, log_f_NKV, logits_NKV.new_zeros(len(contexts), 1)
        prior = OutputFunction.parse(prior_of(self.function, self.parsed_head.prior))
        log_prior_NK = normalizing.log_probs(prior_logits_NK.to(torch.float64), prior.form, prior.arguments())
        return logits_NKV, log_f_NKV, log_prior_NK.to(logits_NKV)

    def blocks(self, contexts: Contexts, memory: int) -> Iterator[tuple[int, Contexts]]:
        """Parts of the contexts that can be worked on, in float64, within so many bytes; before each where it ends."""
        rows = max(1, memory // (TEMPORARIES * self.components * self.vocabulary * torch.float64.itemsize))
        for block in blocks_of(len(contexts), rows):
            yield block.stop, contexts[block]

    def check(self, contexts: Contexts) -> None:
        """Raise a ValueError unless the contexts are this layer's."""
        shape, following = tuple(contexts.hidden_NKd.shape), contexts.next_tokens_N
        if shape[2] != self.width:
            transposed = self.vocabulary == shape[2]
            hint = "; W looks transposed: its rows are tokens" if transposed else "; both must have the width d"
            raise ValueError(
                f"H has {shape[2]} columns, but W has {self.width} (H is {shape if shape[1] > 1 else shape[::2]}, "
                f"W is {tuple(self.weight_Vd.shape)}){hint}"
            )
        if shape[1] != self.components:
            raise ValueError(
                f"H has {shape[1]} components per context, but the head {self.parsed_head} mixes {self.components}"
            )
        if following is not None:
            low, high = (int(end) for end in torch.aminmax(following))
            if not 0 <= low <= high < self.vocabulary:
                raise ValueError(f"next tokens must be between 0 and {self.vocabulary - 1}, got {low} to {high}")


@dataclass(frozen=True, kw_only=True)
class Contexts:
    """The hidden vectors of some contexts, and what followed."""

    hidden_NKd: Tensor
    prior_logits_NK: Tensor | None = None
    """logits of a mixture's prior, which is the prior's function of them"""
    next_tokens_N: Tensor | None = None
    """the token that followed each context in the text"""
    description: str = "given contexts"

    def __post_init__(self) -> None:
        hidden, prior = self.hidden_NKd, self.prior_logits_NK
        if hidden.ndim != 3 or not hidden.is_floating_point() or not hidden.numel():
            raise ValueError(
                "hidden vectors must be floating-point (contexts, components, width) with at least one context, got "
                f"{hidden.dtype} of shape {tuple(hidden.shape)}"
            )
        _check_finite("hidden vectors H", hidden.flatten(0, 1))
        if (prior is None) != (hidden.shape[1] == 1) or (prior is not None and prior.shape != hidden.shape[:2]):
            found = "none" if prior is None else str(tuple(prior.shape))
            raise ValueError(
                f"a mixture of {hidden.shape[1]} components needs prior logits of shape {tuple(hidden.shape[:2])}, "
                f"and a single component none; got {found}"
            )
        if self.next_tokens_N is not None and self.next_tokens_N.shape != hidden.shape[:1]:
            raise ValueError(
                f"there are {hidden.shape[0]} contexts, but {self.next_tokens_N.numel()} next tokens (shape "
                f"{tuple(self.next_tokens_N.shape)}); give one per context"
            )

    @classmethod
    def of_rows(
        cls, hidden_Nd: Tensor, *, next_tokens_N: Tensor | None = None, description: str = "given contexts"
    ) -> Contexts:
        """Contexts of one hidden vector each."""
        if hidden_Nd.ndim != 2:
            raise ValueError(f"hidden vectors H must be a matrix (contexts, width), got shape {tuple(hidden_Nd.shape)}")
        return cls(hidden_NKd=hidden_Nd[:, None], next_tokens_N=next_tokens_N, description=description)

    def __len__(self) -> int:
        return self.hidden_NKd.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> Contexts:
        parts = (self.hidden_NKd, self.prior_logits_NK, self.next_tokens_N)
        hidden, prior, following = (None if part is None else part[rows] for part in parts)
        assert hidden is not None
        return Contexts(hidden_NKd=hidden, prior_logits_NK=prior, next_tokens_N=following, description=self.description)


def detached(function: OutputFunction) -> OutputFunction:
    """The member with the values of what it learns, for looking at and not for training."""
    learned = {key: value.detach() for key, value in function.parameters.items() if isinstance(value, Tensor)}
    return function.with_parameters(**learned)


def blocks_of(count: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size`` that cover ``range(count)``."""
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


def sample_rows(total: int, count: int, seed: int) -> Tensor:
    """Rows that a sample takes, the same for every matrix of so many rows, so that two can be compared row by row."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count].sort().values


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


def _check_finite(name: str, matrix: Tensor) -> None:
    # A block at a time: `isfinite` of all of a large matrix holds several copies of it.
    for rows in blocks_of(matrix.shape[0], TOKENS_AT_ONCE):
        finite = torch.isfinite(matrix[rows])
        if not finite.all():
            where = (~finite).nonzero()[0].tolist()
            where[0] += rows.start
            raise ValueError(f"{name} must be finite, but holds {matrix[tuple(where)].item()} at {tuple(where)}")
