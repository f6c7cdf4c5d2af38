"""An output head: a member of the family, alone or as a mixture of K components that share one output matrix."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor

from sigsoftmax.family import Learned, OutputFunction
from sigsoftmax.family.notation import MIXTURES, check_choice, key_and_value, parse_call

Latent = Literal["tanh", "linear", "residual"]
"""Ways to make the latent vector of a component of a hidden vector h: tanh(W h + b), W h + b, or h + A h."""


def check_latent(latent: str) -> None:
    check_choice("latent", latent, get_args(Latent))


@dataclass(frozen=True)
class Head:
    """A member of the family and the number of components.

    ``Head.parse`` reads ``"sigsoftmax"``, ``"gss(k=0.2)"``, ``"mos(K=4)"``, ``"moss(K=4)"`` and
    ``"mixture(gss(k=0), K=4)"``; ``str()`` writes what it reads. ``allow_options`` is for places that make the latent
    vectors and the prior of a mixture, and reads ``"mos(K=4, latent=tanh, prior=sigsoftmax)"`` as well.
    """

    function: OutputFunction
    components: int = 1
    latent: str | None = None
    """One of :data:`Latent`; None is the default of the place where a mixture is made."""
    prior: OutputFunction | None = None
    """The output function of the prior; None is ``function`` if that has no parameters, else softmax."""

    def __post_init__(self) -> None:
        count = self.components
        if isinstance(count, bool) or not isinstance(count, int):
            raise ValueError(f"the number of components must be a whole number, got {count!r}")
        if count < 1:
            raise ValueError(f"a head needs at least one component, got {count}")
        if self.latent is not None:
            check_latent(self.latent)
        if count == 1 and (self.latent is not None or self.prior is not None):
            raise ValueError(
                "a head of one component has neither latent nor prior; give K=2 or more, or leave them out"
            )

    @classmethod
    def parse(cls, text: str | OutputFunction | Head, *, allow_options: bool = False) -> Head:
        head = cls._read(text)
        if not allow_options and (head.latent is not None or head.prior is not None):
            raise ValueError(
                f"latent and prior cannot be chosen here, where no layer makes them; write {str(head.plain)!r} "
                f"instead of {str(head)!r}"
            )
        return head

    @classmethod
    def _read(cls, text: str | OutputFunction | Head) -> Head:
        if isinstance(text, Head):
            return text
        if isinstance(text, OutputFunction):
            return cls(text)
        if not isinstance(text, str):
            raise ValueError(
                "an output function is given by its name, such as 'sigsoftmax' or 'mos(K=4)', or as an OutputFunction "
                f"or a Head, got {type(text).__name__}"
            )
        name = text.partition("(")[0].strip()
        if name not in (*MIXTURES, "mixture"):
            try:
                return cls(OutputFunction.parse(text))
            except ValueError as error:
                if not re.search(r"\bK\s*=", text):
                    raise
                raise ValueError(f"{error}; a mixture of it is written as in 'mixture(gss(k=0), K=4)'") from None
        call = parse_call(text)
        items = (call and call.items) or []
        member = items.pop(0) if name == "mixture" and items else MIXTURES.get(name)
        options = dict(filter(None, map(key_and_value, items)))
        is_known = len(options) == len(items) and options.keys() <= {"K", "latent", "prior"}
        if member is None or not is_known or not re.fullmatch(r"\d+", options.get("K", "")):
            raise ValueError(
                f"cannot read the mixture {text!r}; write 'mos(K=4)' or 'mixture(gss(k=0), K=4)', K a whole number; "
                "behind it may stand latent=residual and prior=softmax"
            )
        prior = options.get("prior")
        return cls(
            OutputFunction.parse(member),
            int(options["K"]),
            options.get("latent"),
            None if prior is None else OutputFunction.parse(prior),
        )

    def __str__(self) -> str:
        name = str(self.function)
        if self.components == 1:
            return name
        known = [short for short, member in MIXTURES.items() if member == name]
        options = {"K": self.components, "latent": self.latent, "prior": self.prior}
        inside = ", ".join(f"{key}={value}" for key, value in options.items() if value is not None)
        return f"{known[0]}({inside})" if known else f"mixture({name}, {inside})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Head) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def plain(self) -> Head:
        """The head without the options of its latent vectors and its prior."""
        return replace(self, latent=None, prior=None)

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
