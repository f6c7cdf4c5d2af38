"""An output head: a member of the family, alone or as a mixture of K components that share one output matrix."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from torch import Tensor

from sigsoftmax.family import Learned, OutputFunction
from sigsoftmax.family.notation import parse_call

MIXTURES = {"mos": "softmax", "moss": "sigsoftmax"}
"""The mixtures that have names of their own in the literature, and their members."""


@dataclass(frozen=True)
class Head:
    """A member of the family and the number of components.

    ``Head.parse`` reads ``"sigsoftmax"``, ``"gss(k=0.2)"``, ``"mos(K=4)"``, ``"moss(K=4)"`` and
    ``"mixture(gss(k=0), K=4)"``; ``str()`` writes what it reads.
    """

    function: OutputFunction
    components: int = 1

    def __post_init__(self) -> None:
        if self.components < 1:
            raise ValueError(f"a head needs at least one component, got {self.components}")

    @classmethod
    def parse(cls, text: str | Head) -> Head:
        if isinstance(text, Head):
            return text
        name = text.partition("(")[0].strip()
        if name not in (*MIXTURES, "mixture"):
            return cls(OutputFunction.parse(text))
        call = parse_call(text)
        *member, last = (call and call.items) or [""]
        components = re.fullmatch(r"K\s*=\s*(\d+)", last)
        if components is None or len(member) != (name == "mixture"):
            raise ValueError(f"cannot read the mixture {text!r}; write 'mos(K=4)' or 'mixture(gss(k=0), K=4)'")
        return cls(OutputFunction.parse(member[0] if member else MIXTURES[name]), int(components[1]))

    def __str__(self) -> str:
        name = str(self.function)
        if self.components == 1:
            return name
        known = [short for short, member in MIXTURES.items() if member == name]
        return f"{known[0]}(K={self.components})" if known else f"mixture({name}, K={self.components})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Head) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def is_softmax(self) -> bool:
        """True if it is log-linear: a single component of a linear phi."""
        return self.components == 1 and self.function.is_linear

    def learned(self, num_classes: int) -> dict[str, tuple[float, tuple[int, ...]]]:
        """The parameters of phi that are fitted too: name -> (first value, shape)."""
        known = self.function.definition.parameters
        values = self.function.parameters.items()
        return {key: v.start(known[key].default, num_classes) for key, v in values if isinstance(v, Learned)}

    def with_learned(self, values: dict[str, Tensor]) -> OutputFunction:
        return self.function.with_parameters(**values) if values else self.function

    def numbers_per_context(self, width: int) -> int:
        """Free numbers that a context may choose: its h, or K of them and a prior."""
        return self.components * width + self.components - 1

    def output_parameters(self, num_classes: int, width: int) -> int:
        """Numbers shared by all contexts: the output matrix, the class bias, and what phi learns."""
        return num_classes * (width + 1) + sum(math.prod(shape) for _, shape in self.learned(num_classes).values())

    def rank_bound(self, num_classes: int, contexts: int, width: int) -> int:
        """The largest rank of log f in theory: width + 2 (h, class bias, normaliser) for a linear phi, else full."""
        full = min(num_classes, contexts)
        return min(full, width + 2) if self.is_softmax else full
