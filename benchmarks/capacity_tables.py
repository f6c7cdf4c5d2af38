"""Tables of capacity fits for docs/choosing.md: what each head reached when fitted freely, beside softmax.

All KLs are those of fits of the head itself. A lower KL that only follows because the head contains another one, which
no start has found, is marked "at most".
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from write_docs import NO_RECORDS, markdown_table

from sigsoftmax import records
from sigsoftmax.analysis.spectrum.noise_floor import entry_noise, svd_error
from sigsoftmax.records.schemas.capacity import CapacityResult, softmax_width_of_equal_kl
from sigsoftmax.records.schemas.spectra import Spectrum

RANKS_AT = 8
"""the width whose fits are shown with their ranks"""
MINUS = "\N{MINUS SIGN}"
RULES = ("press32", "numpy32", "numpy64", "noise")


@dataclass(frozen=True)
class Fits:
    """All fits, by language (its seed left out), seed, head and width."""

    found: Mapping[tuple[str, int, str, int], CapacityResult]

    @classmethod
    def read(cls, folder: Path) -> Fits:
        found: dict[tuple[str, int, str, int], CapacityResult] = {}
        for path in sorted(folder.glob("**/*.jsonl")):
            for record in records.read(path):
                if record.kind != CapacityResult.KIND:
                    continue
                fit = record.payload_as(CapacityResult)
                key = (*_language_and_seed(fit.language), fit.head, fit.width)
                if key in found:
                    raise ValueError(f"{record.source}: {fit.head} of width {fit.width} is there twice: {fit.language}")
                found[key] = fit
        return cls(found)

    @property
    def languages(self) -> list[str]:
        return list(dict.fromkeys(language for language, *_ in self.found))

    def seeds(self, language: str) -> list[int]:
        return sorted({seed for name, seed, _, _ in self.found if name == language})

    @property
    def widths(self) -> list[int]:
        """The widths at which all heads were fitted."""
        heads: dict[str, set[int]] = {}
        for _, _, head, width in self.found:
            heads.setdefault(head, set()).add(width)
        return sorted(set.intersection(*heads.values()))

    def of(self, language: str, head: str, width: int) -> list[CapacityResult]:
        """One fit for each seed that has it."""
        keys = ((language, seed, head, width) for seed in self.seeds(language))
        return [self.found[key] for key in keys if key in self.found]

    def changes(self, language: str, head: str, width: int) -> list[float]:
        """KL relative to softmax's on the same language and seed, less 1, for each seed."""
        pairs = zip(self.of(language, head, width), self.of(language, "softmax", width), strict=True)
        return [fit.fitted_kl / softmax.fitted_kl - 1.0 for fit, softmax in pairs]

    def softmax_curve(self, language: str, seed: int) -> dict[int, float]:
        return {
            width: fit.fitted_kl
            for (name, number, head, width), fit in self.found.items()
            if (name, number, head) == (language, seed, "softmax")
        }

    @property
    def heads(self) -> list[str]:
        """softmax first, then by how far they are below it."""
        names = dict.fromkeys(head for _, _, head, _ in self.found)

        def change(head: str) -> float:
            places = [(language, width) for language in self.languages for width in self.widths]
            return statistics.fmean(value for place in places for value in self.changes(place[0], head, place[1]))

        return sorted(names, key=lambda head: (head != "softmax", -change(head)))


def _language_and_seed(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.*), seed (\d+)", text)
    if found is None:
        raise ValueError(f"expected the description of a language that ends in its seed, got {text!r}")
    return found[1], int(found[2])


def changes(fits: Fits) -> str:
    """KL against softmax at equal width, a table for each language; mean and range over the languages' seeds."""
    if not fits.found:
        return NO_RECORDS
    blocks = []
    for language in fits.languages:
        some = fits.of(language, "softmax", fits.widths[0])[0]
        count = len(fits.seeds(language))
        title = f"{language}; {some.contexts} contexts, {some.words} words; {count} seed{'s' if count > 1 else ''}"
        softmax = [[fit.fitted_kl for fit in fits.of(language, "softmax", width)] for width in fits.widths]
        rows = [[_named("softmax"), *(f"{statistics.fmean(kls):.3f} nats" for kls in softmax)]]
        rows += [
            [_named(head), *(_change_text(fits.changes(language, head, width)) for width in fits.widths)]
            for head in fits.heads
            if head != "softmax"
        ]
        heads = ("head", *(f"width {width}" for width in fits.widths))
        blocks.append(f"**{title}**\n\n{markdown_table(heads, 'l' + 'r' * len(fits.widths), rows)}\n")
    return "\n".join(blocks)


def _short(language: str) -> str:
    """The kind of a language, without its parameters."""
    return language.partition(",")[0]


def _change_text(values: Sequence[float]) -> str:
    mean, low, high = (_percent(value) for value in (statistics.fmean(values), min(values), max(values)))
    return f"**{mean} %**" if low == high else f"**{mean} %** ({low} to {high})"


def _percent(value: float) -> str:
    shown = round(100.0 * value)
    return f"{MINUS if shown < 0 else '+' if shown else ''}{abs(shown)}"


def _named(head: str) -> str:
    """A head as one would type it."""
    return f"`{re.sub(r'(?<=[0-9])[.]0(?=[,)])', '', head)}`"


def every_fit(fits: Fits) -> str:
    """The best and the worst start of every fit, folded away, one block for each language."""
    if not fits.found:
        return NO_RECORDS
    return "\n".join(_folded(f"Every fit: {language}", _fits_table(fits, language)) for language in fits.languages)


def _fits_table(fits: Fits, language: str) -> str:
    seeds = fits.seeds(language)
    rows = []
    widths = sorted({width for name, _, _, width in fits.found if name == language})
    for head in fits.heads:
        for width in widths:
            found = [fits.found.get((language, seed, head, width)) for seed in seeds]
            if any(found):
                rows.append([_named(head), str(width), *("" if fit is None else _fit_text(fit) for fit in found)])
    return markdown_table(("head", "width", *(f"seed {seed}" for seed in seeds)), "lr" + "r" * len(seeds), rows)


def _fit_text(fit: CapacityResult) -> str:
    best, worst = f"{fit.fitted_kl:.4f}", f"{fit.worst_fitted_kl:.4f}"
    text = best if best == worst else f"{best} to {worst}"
    limit = "" if fit.limit_kl is None else f"{fit.limit_kl:.4f}"
    return text if limit in ("", best) else f"{text}; at most {limit}"


def _folded(title: str, table: str) -> str:
    return f"<details markdown>\n<summary>{title}</summary>\n\n{table}\n\n</details>\n"


def mixtures(fits: Fits) -> str:
    """The price of a mixture, beside that of the softmax that reaches the same KL."""
    rows = [row for language in fits.languages for width in fits.widths for row in _mixture_rows(fits, language, width)]
    if not rows:
        return NO_RECORDS
    heads = (
        "language",
        "head",
        "width",
        "numbers per context",
        "output parameters",
        "width (and numbers) of a softmax of equal KL",
        "its output parameters",
    )
    return markdown_table(heads, "ll" + "r" * 5, rows) + "\n"


def _mixture_rows(fits: Fits, language: str, width: int) -> Iterator[list[str]]:
    for head in fits.heads:
        found = fits.of(language, head, width)
        # A mixture of sigsoftmaxes spends the same and reaches nearly the same.
        if not head.startswith("mos(") or not found:
            continue
        equal = [
            softmax_width_of_equal_kl(fit.fitted_kl, fits.softmax_curve(language, seed))
            for fit, seed in zip(found, fits.seeds(language), strict=True)
        ]
        widest = float(max(fits.softmax_curve(language, fits.seeds(language)[0])))
        low, high = (min(place, widest) for place in (min(equal), max(equal)))
        more = "more than " if max(equal) > widest else ""
        # One weight for each feature of a word, and its bias; relative to those of the mixture.
        parameters = [found[0].words * (place + 1) / found[0].output_parameters for place in (low, high)]
        yield [
            _short(language),
            _named(head),
            str(width),
            str(found[0].numbers_per_context),
            f"{found[0].output_parameters:,}",
            _range_text(f"{low:.0f}", more, f"{high:.0f}"),
            _range_text(f"{parameters[0]:.1f}x", more, f"{parameters[1]:.1f}x"),
        ]


def _range_text(low: str, more: str, high: str) -> str:
    return f"{more}{high}" if low == high else f"{low} to {more}{high}"


def starts_below(fits: Fits, head: str = "softcap(c=30.0)", margin: float = 0.1) -> str:
    """The number of starts of a head that end clearly below softmax, so that a lucky start is told from a gain."""
    rows = []
    for language in fits.languages:
        cells = []
        for width in fits.widths:
            pairs = zip(fits.of(language, head, width), fits.of(language, "softmax", width), strict=True)
            cells.append(", ".join(_starts_text(fit, (1.0 - margin) * softmax.fitted_kl) for fit, softmax in pairs))
        rows.append([_short(language), *cells])
    if not rows:
        return NO_RECORDS
    heads = ("language", *(f"d = {width}" for width in fits.widths))
    note = f"Starts of {_named(head)} that end more than {margin:.0%} below softmax, for each seed:\n\n"
    return note + markdown_table(heads, "l" + "r" * len(fits.widths), rows) + "\n"


def _starts_text(fit: CapacityResult, limit: float) -> str:
    ends = [start.kl for start in fit.starts if start.iterations]
    return f"{sum(end < limit for end in ends)} of {len(ends)}"


def ranks(fits: Fits) -> str:
    """Ranks of the fits at one width by several rules, with their noise floor and their KL."""
    if not fits.found:
        return NO_RECORDS
    blocks = []
    for language in fits.languages:
        seed = fits.seeds(language)[0]
        rows = []
        for head in fits.heads:
            fit = fits.found.get((language, seed, head, RANKS_AT))
            if fit is None:
                continue
            spectrum = spectrum_of(fit)
            counts = [spectrum.count(rule).text for rule in RULES]
            noise = f"{spectrum.noise_floor / spectrum.largest:.0e}"
            rows.append([_named(head), f"{fit.fitted_kl:.4f}", *counts, noise, f"{spectrum.effective_rank:.1f}"])
        heads = ("head", "KL (nats)", *RULES, "noise floor / largest", "effective rank")
        table = markdown_table(heads, "l" + "r" * (len(heads) - 1), rows)
        blocks.append(_folded(f"Ranks at width {RANKS_AT}: {language}, seed {seed}", table))
    return "\n".join(blocks)


def spectrum_of(fit: CapacityResult) -> Spectrum:
    """The singular values of a fit with the noise of float64, in which fits are made."""
    values = torch.tensor(fit.singular_values, dtype=torch.float64)
    error = svd_error(float(values[0]), fit.contexts, fit.words)
    return Spectrum(
        source=f"{fit.head} fitted to {fit.language}",
        words=fit.words,
        contexts=fit.contexts,
        singular_values=fit.singular_values,
        precision="float64",
        value_error=error + entry_noise(values, fit.contexts, fit.words, torch.float64),
    )
