"""Capacity tables: of fits, with the worst start; what only containment gives is marked apart."""

from pathlib import Path

import capacity_tables
import pytest
from capacity_tables import Fits
from tests.records import samples

from sigsoftmax.records import Record, append
from sigsoftmax.records.schemas.capacity import CapacityResult, StartResult


def fit(head: str, seed: int, fitted: float, *, kl: float | None = None, worst: float | None = None, width: int = 8):
    numbers = 4 * width + 3 if head.startswith("mos") else width
    return samples.capacity(
        language=f"20 topics, sharpness 10, seed {seed}",
        contexts=200,
        words=100,
        head=head,
        width=width,
        kl=fitted if kl is None else kl,
        fitted_kl=fitted,
        starts=tuple(
            StartResult(name=f"random {place}", kl=value, iterations=9)
            for place, value in enumerate((fitted, fitted if worst is None else worst))
        ),
        numbers_per_context=numbers,
        output_parameters=100 * (width + 1),
        rank_bound=100,
        rank_threshold=1.0,
    )


def fits(*results: CapacityResult) -> Fits:
    found = {}
    for result in results:
        found[*capacity_tables._language_and_seed(result.language), result.head, result.width] = result
    return Fits(found)


SMALL = fits(
    fit("softmax", 0, 0.20),
    fit("softmax", 1, 0.10),
    # It contains softmax in the limit, which no start has reached.
    fit("sigsoftmax", 0, 0.22, kl=0.20, worst=0.24),
    fit("sigsoftmax", 1, 0.11, kl=0.10),
    fit("softcap(c=30.0)", 0, 0.10, worst=0.20),
    fit("softcap(c=30.0)", 1, 0.10),
)


def test_changes_are_of_fits() -> None:
    text = capacity_tables.changes(SMALL)
    assert "| `softmax` | 0.150 nats |" in text
    assert "| `sigsoftmax` | **+10 %** |" in text
    assert "| `softcap(c=30)` | **−25 %** (−50 to 0) |" in text
    assert "2 seeds" in text


def test_every_fit_has_its_worst_start_and_what_containment_gives() -> None:
    text = capacity_tables.every_fit(SMALL)
    assert "| `sigsoftmax` | 8 | 0.2200 to 0.2400; at most 0.2000 | 0.1100; at most 0.1000 |" in text
    assert "| `softcap(c=30)` | 8 | 0.1000 to 0.2000 | 0.1000 |" in text


def test_starts_below_softmax_are_counted() -> None:
    assert "| 20 topics | 1 of 2, 0 of 2 |" in capacity_tables.starts_below(SMALL)


def test_a_mixture_stands_beside_the_softmax_of_equal_kl() -> None:
    softmax = [fit("softmax", 0, kl, width=width) for width, kl in ((8, 0.4), (16, 0.2), (32, 0.05))]
    text = capacity_tables.mixtures(fits(*softmax, fit("mos(K=4)", 0, 0.1)))
    # log KL is linear in the width: half way between 16 and 32.
    assert "| 20 topics | `mos(K=4)` | 8 | 35 | 900 | 24 | 2.8x |" in text
    text = capacity_tables.mixtures(fits(*softmax, fit("mos(K=4)", 0, 0.01)))
    assert "| more than 32 | more than 3.7x |" in text


def test_ranks_stand_beside_thresholds_noise_and_kl() -> None:
    text = capacity_tables.ranks(SMALL)
    header, _, row = text.split("\n\n")[1].splitlines()[:3]
    assert [cell.strip() for cell in header.strip("|").split("|")][:6] == [
        *("head", "KL (nats)", "press32", "numpy32", "numpy64", "noise"),
    ]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # Singular values fall by ten from 10 on: those above 1e-6 and 2.4e-5 of the largest.
    assert cells[:4] == ["`softmax`", "0.2000", "6", "5"]


def test_a_fit_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    append(tmp_path / "fits.jsonl", [Record.of(fit("softmax", 0, 0.2)), Record.of(fit("softmax", 0, 0.3))])
    with pytest.raises(ValueError, match="softmax of width 8 is there twice"):
        Fits.read(tmp_path)
