"""An output layer and the contexts it is looked at in: what every part of an audit receives.

Logits are ``h W^T + b`` and the output is ``f`` of them, f a member of the family; a mixture has K vectors h a context
and a prior. A model that scales its logits by s is the same with ``s h`` and ``s b``. Where the tensors came from is
not known here.

Shapes: N contexts, K components, R = N * K rows, V words, d width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sigsoftmax.analysis.log_outputs import OutputHead
from sigsoftmax.contract import normalizing
from sigsoftmax.contract.spec import prior_of
from sigsoftmax.family import Learned, OutputFunction
from sigsoftmax.family.heads import Head
from sigsoftmax.family.parameters import ParameterKind

__all__ = ["Contexts", "OutputLayer", "blocks_of", "detached"]

WORDS_AT_ONCE = 8192
"""rows of W that are converted to the arithmetic's dtype at once, so that W is never held twice"""
TEMPORARIES = 6
"""arrays of the size of the logits that live at once while log-probabilities are computed"""


@dataclass(frozen=True, kw_only=True)
class OutputLayer:
    """What turns a hidden vector into a distribution over words."""

    weight_Vd: Tensor
    bias_V: Tensor | None = None
    function: OutputFunction = field(default_factory=lambda: OutputFunction("softmax"))
    components: int = 1

    def __post_init__(self) -> None:
        weight, bias = self.weight_Vd, self.bias_V
        if weight.ndim != 2 or not weight.is_floating_point() or weight.shape[0] < 2 or weight.shape[1] < 1:
            raise ValueError(
                "the output matrix W must be a floating-point matrix (words, width) of at least two words, got "
                f"{weight.dtype} of shape {tuple(weight.shape)}"
            )
        if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
            raise ValueError(
                f"the class bias b must have one number for each of the {weight.shape[0]} rows of W, got {bias.dtype} "
                f"of shape {tuple(bias.shape)}"
            )
        for name, tensor in (("output matrix W", weight), ("class bias b", bias)):
            if tensor is not None:
                _check_finite(name, tensor)
        # Learned parameters must have become values, and per-class ones must be as many as words.
        self.function.arguments(self.words)

    @property
    def words(self) -> int:
        return self.weight_Vd.shape[0]

    @property
    def width(self) -> int:
        return self.weight_Vd.shape[1]

    @property
    def head(self) -> Head:
        return Head(self.function, self.components)

    @property
    def head_text(self) -> str:
        """The head as ``Head.parse`` reads it; what was learned is written as learned, with its value if it is one."""
        learned = {}
        for key, value in self.function.given.items():
            if isinstance(value, Tensor):
                differs_by_class = self.function.kinds[key] is ParameterKind.PER_CLASS
                initial = None if differs_by_class else float(value.detach())
                learned[key] = Learned(initial=initial, per_class=differs_by_class)
        return str(Head(self.function.with_parameters(**learned), self.components))

    @property
    def is_softmax(self) -> bool:
        """Whether log f is logits less a number per context, so that theory bounds its rank by d + 1 or d + 2."""
        return self.head.is_softmax

    @property
    def has_shared_phi(self) -> bool:
        """Whether one phi serves all words: no parameter per class, and no mixture."""
        return self.components == 1 and self.function.has_shared_phi

    def logits(self, hidden_Rd: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """(R, V)"""
        hidden_Rd = hidden_Rd.to(self.weight_Vd.device, dtype)
        out_RV = torch.empty(hidden_Rd.shape[0], self.words, dtype=dtype, device=hidden_Rd.device)
        for first in range(0, self.words, WORDS_AT_ONCE):
            words = slice(first, first + WORDS_AT_ONCE)
            out_RV[:, words] = hidden_Rd @ self.weight_Vd[words].to(dtype).T
        if self.bias_V is not None:
            out_RV += self.bias_V.to(dtype)
        return out_RV

    def log_probs(self, contexts: Contexts, dtype: torch.dtype = torch.float64) -> Tensor:
        """(N, V), all at once: call it on some contexts at a time."""
        form, arguments = self.function.form, self.function.arguments(self.words)
        logits_RV = self.logits(contexts.hidden_NKd.flatten(0, 1), dtype)
        log_prior_NK = self.log_prior(contexts)
        if log_prior_NK is None:
            return normalizing.log_probs(logits_RV, form, arguments)
        logits_NKV = logits_RV.unflatten(0, contexts.hidden_NKd.shape[:2])
        return normalizing.mixture_log_probs(logits_NKV, log_prior_NK.to(logits_RV), form, arguments)

    def log_prior(self, contexts: Contexts) -> Tensor | None:
        """(N, K) in float64, None for a single component."""
        if contexts.prior_logits_NK is None:
            return None
        prior = OutputFunction.parse(prior_of(self.function, None))
        return normalizing.log_probs(contexts.prior_logits_NK.to(torch.float64), prior.form, prior.arguments())

    def with_contexts(self, contexts: Contexts) -> OutputHead:
        """The same as what spectra and certificates take; arithmetic in float64."""
        hidden = contexts.hidden_NKd if self.components > 1 else contexts.hidden_NKd[:, 0]
        return OutputHead(
            hidden=hidden,
            weight_Md=self.weight_Vd,
            bias_M=self.bias_V,
            head=self.head,
            prior_logits_TK=contexts.prior_logits_NK,
            dtype=torch.float64,
        )

    def rows_at_once(self, memory: int, dtype: torch.dtype = torch.float64) -> int:
        """Contexts whose log-probabilities can be computed at once within so many bytes."""
        return max(1, memory // (TEMPORARIES * self.components * self.words * dtype.itemsize))

    def check(self, contexts: Contexts) -> None:
        """ValueError unless the contexts are this layer's."""
        _, components, width = contexts.hidden_NKd.shape
        if width != self.width:
            transposed = self.words == width
            hint = "; W looks transposed: its rows are words" if transposed else "; both must have the width d"
            shape = contexts.hidden_NKd.shape
            raise ValueError(
                f"H has {width} columns, but W has {self.width} (H is {tuple(shape if shape[1] > 1 else shape[::2])}, "
                f"W is {tuple(self.weight_Vd.shape)}){hint}"
            )
        if components != self.components:
            raise ValueError(f"H has {components} components a context, but the layer mixes {self.components}")
        following = contexts.next_words_N
        if (
            following is not None
            and len(contexts)
            and not 0 <= int(following.min()) <= int(following.max()) < self.words
        ):
            raise ValueError(
                f"next words must be between 0 and {self.words - 1}, got {int(following.min())} to "
                f"{int(following.max())}"
            )


@dataclass(frozen=True, kw_only=True)
class Contexts:
    """The hidden vectors of some contexts, and what followed."""

    hidden_NKd: Tensor
    prior_logits_NK: Tensor | None = None
    """of a mixture; its prior is the mixture's own function of them"""
    next_words_N: Tensor | None = None
    """the word that followed each context in the text"""
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
        if self.next_words_N is not None and self.next_words_N.shape != hidden.shape[:1]:
            raise ValueError(
                f"there are {hidden.shape[0]} contexts, but {self.next_words_N.numel()} next words (shape "
                f"{tuple(self.next_words_N.shape)}); give one a context"
            )

    @classmethod
    def of_rows(cls, hidden_Nd: Tensor, *, next_words_N: Tensor | None = None, description: str) -> Contexts:
        """One hidden vector a context."""
        if hidden_Nd.ndim != 2:
            raise ValueError(f"hidden vectors H must be a matrix (contexts, width), got shape {tuple(hidden_Nd.shape)}")
        return cls(hidden_NKd=hidden_Nd[:, None], next_words_N=next_words_N, description=description)

    def __len__(self) -> int:
        return self.hidden_NKd.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> Contexts:
        return Contexts(
            hidden_NKd=self.hidden_NKd[rows],
            prior_logits_NK=None if self.prior_logits_NK is None else self.prior_logits_NK[rows],
            next_words_N=None if self.next_words_N is None else self.next_words_N[rows],
            description=self.description,
        )


def detached(function: OutputFunction) -> OutputFunction:
    """The member with the values of what it learns, for looking at and not for training."""
    learned = {key: value.detach() for key, value in function.parameters.items() if isinstance(value, Tensor)}
    return function.with_parameters(**learned)


def blocks_of(count: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size`` that cover ``range(count)``."""
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


def _check_finite(name: str, matrix: Tensor) -> None:
    # A block at a time: `isfinite` of all of a large matrix holds several copies of it.
    for rows in blocks_of(matrix.shape[0], WORDS_AT_ONCE):
        finite = torch.isfinite(matrix[rows])
        if not finite.all():
            where = (~finite).nonzero()[0].tolist()
            where[0] += rows.start
            raise ValueError(f"{name} must be finite, but holds {matrix[tuple(where)].item()} at {tuple(where)}")
