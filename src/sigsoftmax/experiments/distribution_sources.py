"""Distributions from a synthetic language or from a file of probabilities or log-probabilities.

A language is written like ``of_rank(contexts=400, words=200, rank=100)``.

Shapes: N contexts, V vocabulary.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sigsoftmax.analysis.capacity.distributions import Distributions, checked_log_probs
from sigsoftmax.analysis.spectrum.entry_checks import EntryChecks
from sigsoftmax.analysis.spectrum.matrix_files import from_file
from sigsoftmax.analysis.spectrum.matrix_readers import Block
from sigsoftmax.family.notation import did_you_mean, key_and_value, parse_call
from sigsoftmax.synthetic import Language, Weighting

__all__ = ["StoredDistributions", "is_file_of_distributions", "open_distributions", "parse_language"]

FILES = (".npy", ".npz", ".safetensors", ".pt", ".pth")

LANGUAGES: dict[str, Callable[..., Language]] = {
    "of_rank": Language.of_rank,
    "dirichlet": Language.dirichlet,
    "topics": Language.topics,
    "peaked": Language.peaked,
    "made_by": Language.made_by,
}
ROWS_AT_ONCE_BYTES = 64 << 20


def open_distributions(text: str, *, weights: Weighting = "uniform") -> Distributions:
    """A language in words, or a file of distributions that fits in memory."""
    if not is_file_of_distributions(text):
        return Distributions.of_language(parse_language(text), weights)
    stored = StoredDistributions(Path(text))
    return Distributions(
        log_p_NV=stored.log_probs(torch.arange(stored.contexts)),
        weights_N=torch.full((stored.contexts,), 1.0 / stored.contexts, dtype=torch.float64),
        description=f"distributions of {Path(text).name}",
    )


def is_file_of_distributions(text: str) -> bool:
    """Languages are written with brackets; whatever looks like a file is one."""
    return Path(text).suffix in FILES or Path(text).is_file()


# --- languages ------------------------------------------------------------------------------------------------------


def parse_language(text: str) -> Language:
    """The language that ``text`` describes: the name of a kind and its arguments."""
    call = parse_call(text)
    name = call.name if call else text.strip()
    if call is None or call.items is None or name not in LANGUAGES:
        raise ValueError(
            f"cannot read the language {text!r}{did_you_mean(name, LANGUAGES)}. Write a kind with its arguments, as in "
            "'of_rank(contexts=400, words=200, rank=100, seed=0)', or name a file of distributions (.npy); the kinds "
            f"are {', '.join(LANGUAGES)}"
        )
    make = LANGUAGES[name]
    known = inspect.signature(make).parameters
    given: dict[str, Any] = {}
    for item in call.items:
        key, value = key_and_value(item) or ("", "")
        if key not in known:
            raise ValueError(
                f"cannot read {item!r} in {text!r}; {name} takes "
                + ", ".join(_printed_parameter(parameter) for parameter in known.values())
            )
        given[key] = value if key == "function" else _number(text, known[key], value)
    missing = [key for key, parameter in known.items() if parameter.default is parameter.empty and key not in given]
    if missing:
        raise ValueError(f"{text!r} lacks {', '.join(missing)}; write them as in {missing[0]}=...")
    return make(**given)


def _number(text: str, parameter: inspect.Parameter, value: str) -> int | float:
    is_whole = str(parameter.annotation).startswith("int")
    try:
        return int(value) if is_whole else float(value)
    except ValueError:
        kind = "a whole number" if is_whole else "a number"
        raise ValueError(f"{parameter.name} in {text!r} must be {kind}, got {value!r}") from None


def _printed_parameter(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default}"


# --- files ----------------------------------------------------------------------------------------------------------


class StoredDistributions:
    """A file of probabilities or log-probabilities, one context a row; rows are checked when they are read."""

    def __init__(self, path: Path, *, truncated: Literal["raise", "keep"] = "raise") -> None:
        self.path = path
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            self._source = from_file(path, truncated=truncated)
        self.notes = tuple(f"{warning.message}." for warning in warned)
        first = self._first_row()
        self.contexts, self.vocabulary = _known(self._source.contexts), len(first)
        self.dtype = str(first.dtype).removeprefix("torch.")
        self.are_probabilities = bool((first >= 0.0).all())
        """log-probabilities have negative entries; the first row tells"""
        self._entries = EntryChecks(log_probs=True)

    @property
    def precision(self) -> torch.dtype:
        """The least precise dtype that holds all rows that were read: they probably came from it."""
        return self._entries.precision(getattr(torch, self.dtype))

    def _first_row(self) -> Tensor:
        for block in self._source.blocks(0):
            return _tensor(block)[0]
        raise ValueError(f"{self.path} holds no contexts")

    def log_probs(self, rows_N: Tensor, progress: Callable[[str], None] = lambda _: None) -> Tensor:
        """Log-probabilities of some contexts, in ascending order, float64. ValueError names a row that is none."""
        out_NV = torch.empty(rows_N.numel(), self.vocabulary, dtype=torch.float64)
        size = max(1, ROWS_AT_ONCE_BYTES // (8 * self.vocabulary))
        seen = done = 0
        for block in self._source.blocks(0):
            stored = _tensor(block)
            here = rows_N[(rows_N >= seen) & (rows_N < seen + len(stored))]
            for part in here.split(size):
                progress(f"reading {self.path.name}: context {done + len(part)} of {rows_N.numel()}")
                chosen = stored[part - seen]
                out_NV[done : done + len(part)] = checked_log_probs(
                    chosen, str(self.path), rows_N=part, are_probabilities=self.are_probabilities
                )
                # What is returned is normalised in float64, which hides where the numbers came from.
                self._entries.look_for_narrower(chosen)
                done += len(part)
            seen += len(stored)
        return out_NV


def _tensor(block: Block) -> Tensor:
    return block if isinstance(block, Tensor) else torch.from_numpy(block)


def _known(contexts: int | None) -> int:
    assert contexts is not None, "files say how many rows they have"
    return contexts
