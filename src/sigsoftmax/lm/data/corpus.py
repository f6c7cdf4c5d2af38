"""Text as ids: vocabulary and corpora.

A corpus is three splits over one vocabulary, either files of text or samples from a language whose truth is known.
A split is one stream of ids, which models read in columns, window by window (``windows``).

Shapes: L tokens of a split.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from sigsoftmax.family.notation import did_you_mean
from sigsoftmax.lm.data.corpus_files import EOS, find, read_split, split_files, tokenise
from sigsoftmax.lm.data.published_corpora import PUBLISHED, SPLITS, Split
from sigsoftmax.synthetic import Language

__all__ = [
    "EOS",
    "SPLITS",
    "Corpus",
    "Split",
    "Vocabulary",
    "check_ids",
    "embedded_language",
    "tokenise",
]

EMBEDDED_LENGTHS = {"train": 200_000, "valid": 20_000, "test": 20_000}


def embedded_language() -> Language:
    """The language that comes with the package: what follows depends on the classes of the last two words.

    Its log P has full rank, several times the width of the models that are compared on it. With more classes a small
    model trained by SGD does not find out about them in minutes.
    """
    return Language.of_rank(contexts=64, words=200, rank=64, scale=2.0, memory=2, seed=0)


class Vocabulary:
    """The words of a text and their ids, which are positions; immutable."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)
        self._ids = {word: i for i, word in enumerate(self.words)}
        if len(self._ids) != len(self.words):
            word = next(word for i, word in enumerate(self.words) if self._ids[word] != i)
            raise ValueError(f"the word {word!r} is in the vocabulary more than once; words must differ")

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._ids

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.words == other.words

    def __hash__(self) -> int:
        return hash(self.words)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)} words)"

    def encode(self, words: Iterable[str]) -> Tensor:
        """The ids of words, int64 (L,). A word outside the vocabulary raises and is named."""
        try:
            return _stream(map(self._ids.__getitem__, words))
        except KeyError as error:
            unknown = str(error.args[0])
        hint = did_you_mean(unknown, self.words)
        instead = "write <unk> instead" if "<unk>" in self else "use words of the vocabulary"
        raise ValueError(f"the word {unknown!r} is not among the {len(self):,} of the vocabulary{hint}; {instead}")

    def decode(self, ids: Tensor | Sequence[int]) -> list[str]:
        ids = torch.as_tensor(ids, dtype=torch.int64).flatten()
        self.check(ids, "the ids")
        return [self.words[i] for i in ids.tolist()]

    def check(self, ids: Tensor, what: str) -> None:
        """Refuse ids outside the vocabulary; ``what`` names them in the message."""
        check_ids(ids, len(self), what)


def check_ids(ids: Tensor, vocabulary: int, what: str) -> None:
    """Refuse anything but ids below the size of a vocabulary; ``what`` names them in the message."""
    if ids.dtype != torch.int64:
        raise ValueError(f"{what} must be int64, got {ids.dtype}")
    if not ids.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= vocabulary:
        outside = low if low < 0 else high
        position = int((ids.flatten() == outside).nonzero()[0])
        raise ValueError(
            f"{what} must be between 0 and {vocabulary - 1:,}, the vocabulary being {vocabulary:,} words, "
            f"got {outside:,} at position {position:,}; was the text made with another vocabulary?"
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Corpus:
    """Three splits, each one stream of int64 ids (L,), over one vocabulary."""

    name: str
    """``ptb`` or ``wikitext-2`` for exactly these texts, ``language``, or the name of a folder"""
    vocabulary: Vocabulary
    train: Tensor
    valid: Tensor
    test: Tensor
    language: Language | None = None
    """the language that drew the text, where the truth is known"""
    valid_contexts: Tensor | None = None
    """the context of the language in which each word of the split was drawn"""
    test_contexts: Tensor | None = None

    def __post_init__(self) -> None:
        for split in SPLITS:
            ids = self.split(split)
            if ids.ndim != 1 or not ids.numel():
                raise ValueError(f"the {split} split must be one stream of ids, got shape {tuple(ids.shape)}")
            self.vocabulary.check(ids, f"the ids of the {split} split of {self.name!r}")
            contexts = self.contexts(split)
            if contexts is not None and contexts.shape != ids.shape:
                raise ValueError(
                    f"the {split} split must have one context per word, {ids.numel():,}, got {contexts.numel():,}"
                )

    @property
    def words(self) -> tuple[str, ...]:
        return self.vocabulary.words

    @cached_property
    def checksum(self) -> str:
        """sha256 of the words and the ids: equal for corpora that train the same model."""
        digest = hashlib.sha256("\n".join(self.words).encode())
        for split in SPLITS:
            ids = self.split(split)
            digest.update(f"\n\n{split} {ids.numel()}\n".encode())
            digest.update(ids.numpy().astype("<i8", copy=False).tobytes())
        return digest.hexdigest()

    def split(self, name: Split) -> Tensor:
        if name not in SPLITS:
            raise ValueError(f"a corpus has the splits {', '.join(SPLITS)}, got {name!r}")
        return cast(Tensor, getattr(self, name))

    def contexts(self, name: Split) -> Tensor | None:
        """The true context of each word of a split, where it is known; that of the training text is not kept."""
        return {"valid": self.valid_contexts, "test": self.test_contexts}.get(name)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {self.split(split).numel():,}" for split in SPLITS)
        return f"Corpus({self.name}: {len(self.vocabulary):,} words; {sizes})"

    @classmethod
    def load(cls, name: str | Path, data: str | Path | None = None, *, vocabulary: Vocabulary | None = None) -> Corpus:
        """A corpus by name, or the folder of one's own ``train.txt``, ``valid.txt`` and ``test.txt``.

        ``language`` is text sampled from :func:`embedded_language`, always the same.

        ``ptb`` and ``wikitext-2`` are looked for in ``data``, or else in the folder that SIGSOFTMAX_DATA names, or
        else where ``sigsoftmax data fetch`` puts them; each may be the folder of the corpus or its parent. A ``data``
        that holds other text is taken under its own name: that is how a recipe is run on one's own text.

        Ids count words in order of first appearance over train, valid and test. With a ``vocabulary``, that of a
        model, its ids are used and a word outside it is refused.
        """
        if name == "language" and data is None:
            return cls.of_language(embedded_language(), **EMBEDDED_LENGTHS, seed=0)
        folder, expected = find(str(name), data)
        paths = split_files(folder)
        assert paths is not None, "found by its files"
        if vocabulary is not None:
            splits = [read_split(paths[split], vocabulary.encode) for split in SPLITS]
            expected = None
        else:
            ids: defaultdict[str, int] = defaultdict()
            ids.default_factory = ids.__len__  # a new word gets the next id
            splits = [read_split(paths[split], lambda words: _stream(map(ids.__getitem__, words))) for split in SPLITS]
            vocabulary = Vocabulary(ids)
        train, valid, test = splits
        corpus = cls(name=folder.resolve().name, vocabulary=vocabulary, train=train, valid=valid, test=test)
        return _named(corpus, expected, folder)

    @classmethod
    def of_language(cls, language: Language, *, train: int, valid: int, test: int, seed: int) -> Corpus:
        """Splits of the given lengths, each drawn anew; words are named w0, w1, ..., and nothing ends a line."""
        lengths: dict[Split, int] = {"train": train, "valid": valid, "test": test}
        for split, length in lengths.items():
            if length < 1:
                raise ValueError(f"the {split} split of a sampled text needs at least one word, got {length}")
        seeds = np.random.SeedSequence(seed).generate_state(len(SPLITS))
        texts = {split: language.sample(lengths[split], seed=int(s)) for split, s in zip(SPLITS, seeds, strict=True)}
        return cls(
            name="language",
            vocabulary=Vocabulary(f"w{i}" for i in range(language.vocabulary)),
            train=texts["train"].tokens_L,
            valid=texts["valid"].tokens_L,
            test=texts["test"].tokens_L,
            language=language,
            valid_contexts=texts["valid"].contexts_L,
            test_contexts=texts["test"].contexts_L,
        )


def _named(corpus: Corpus, expected: str | None, folder: Path) -> Corpus:
    """The corpus under its published name if it is that text, refused if it ought to be and is not."""
    published = next((name for name, known in PUBLISHED.items() if known.checksum == corpus.checksum), None)
    if expected is not None and published != expected:
        raise ValueError(
            f"{folder} does not hold the published text of {expected!r}: its checksum is {corpus.checksum[:16]}..., "
            f"not {PUBLISHED[expected].checksum[:16]}...; get the right one with 'sigsoftmax data fetch {expected}', "
            f"or use this one as text of your own with --data {folder}"
        )
    if published is None and corpus.name in (*PUBLISHED, "language"):
        # The name is kept for the published text: records must not mix the two.
        return replace(corpus, name=f"{folder.resolve().parent.name}/{corpus.name}")
    return replace(corpus, name=published or corpus.name)


def _stream(ids: Iterator[int]) -> Tensor:
    return torch.from_numpy(np.frombuffer(array("q", ids), dtype=np.int64).copy())
