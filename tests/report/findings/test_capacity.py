"""Tables and sentences of capacity fits: they follow the numbers, and limits stand apart from fits."""

import dataclasses

from tests.records import samples
from tests.report.sections.making import rows_of

from sigsoftmax.records.schemas.capacity import CapacityResult, StartResult
from sigsoftmax.report.findings.capacity import findings, fits_table, kl_table
from sigsoftmax.report.tables import Table
from sigsoftmax.report.theme import Looks


def fits(width: int = 8, **kl_and_rank: tuple[float, int]) -> list[CapacityResult]:
    return [
        samples.capacity(head=head, kl=kl, fitted_kl=kl, rank=rank, rank_bound=200, width=width)
        for head, (kl, rank) in kl_and_rank.items()
    ]


def titles(table: Table) -> list[str]:
    return [column.title for column in table.columns]


def carried_over() -> list[CapacityResult]:
    """A minimum that is carried over from softmax would put sigsoftmax at or below it by construction."""
    softmax, sigsoftmax = fits(softmax=(0.9, 10), sigsoftmax=(0.9, 103))
    starts = (StartResult(name="random 0", kl=1.08, iterations=9),)
    return [softmax, dataclasses.replace(sigsoftmax, fitted_kl=0.99, starts=starts)]


def test_kl_by_width_and_by_numbers():
    narrow = [dataclasses.replace(fit, width=2, numbers_per_context=2) for fit in fits(softmax=(0.9, 4))]
    mixture = dataclasses.replace(samples.capacity(head="mos(K=2)", width=2, numbers_per_context=5), fitted_kl=0.6)
    results = [*narrow, *fits(softmax=(0.4, 10)), mixture]
    by_width = kl_table(results, caption="A language")
    assert titles(by_width) == ["Head", "2", "8"]
    assert rows_of(by_width) == [
        ["KL (nats) of the best fit"],
        ["softmax", "0.9000", "0.4000"],
        ["MoS(K=2)", "0.6000", ""],
        ["Softmax of equal KL"],
        ["MoS(K=2)", "d = 5.0", ""],
        ["KL from the worst start"],
        ["softmax", "0.2000", "0.2000"],
        ["MoS(K=2)", "0.2000", ""],
        ["At most, by containment"],
        ["MoS(K=2)", "0.2000", ""],
    ]
    by_numbers = kl_table(results, caption="A language", by_width=False)
    assert titles(by_numbers) == ["Head", "2", "5", "8"]
    assert rows_of(by_numbers)[1:] == [["softmax", "0.9000", "", "0.4000"], ["MoS(K=2)", "", "0.6000", ""]]
    without = kl_table(fits(softmax=(0.4, 10)), caption="A language")
    assert [row[0] for row in rows_of(without) if len(row) == 1] == [
        "KL (nats) of the best fit",
        "KL from the worst start",
    ]


def test_fits_are_shown_worst_first_and_softmax_before_its_equals():
    table = fits_table(fits(a=(0.2, 10), softmax=(0.90001, 10), sigsoftmax=(0.90002, 103)), caption="A language")
    assert [row[0] for row in rows_of(table)] == ["softmax", "sigsoftmax", "a"]


def test_terminal_and_page_show_the_same_table():
    results = carried_over()
    shown, page = (fits_table(results, looks, caption="d = 8") for looks in (None, Looks(["softmax", "sigsoftmax"])))
    assert rows_of(shown) == rows_of(page)
    lines = shown.to_text().splitlines()
    rules = [number for number, line in enumerate(lines) if set(line) == {"-"}]
    # The last cell of softmax is empty.
    assert max(len(line) for line in lines[rules[1] : rules[2]]) == len(lines[rules[1]])
    for left_out in ("numpy", "at most", "Time"):
        assert left_out not in "".join(lines[: rules[1]])
        assert left_out in page.to_html()
    row = next(line for line in lines if line.startswith("sigsoftmax")).split()
    assert row[5:7] == ["0.9900", "1.080"]


def test_a_table_without_limits_has_no_column_for_them():
    assert "at most" in titles(fits_table(carried_over(), caption=""))
    assert "at most" not in titles(fits_table(fits(softmax=(0.9, 10)), caption=""))


def test_softmax_of_equal_kl_at_widths_that_the_table_does_not_show():
    here = fits(softmax=(0.9, 10), a=(0.3, 10))
    place = titles(fits_table(here, caption="")).index("of equal KL")
    assert [row[place] for row in rows_of(fits_table(here, caption=""))] == ["", "d > 8"]
    assert [row[place] for row in rows_of(fits_table(here, caption="", curve={8: 0.9, 16: 0.3}))] == ["", "d = 16.0"]


def test_the_sentences_follow_the_numbers():
    equal = "\n".join(findings(fits(softmax=(0.9, 10), sigsoftmax=(0.899, 103))))
    assert "same KL as softmax within 0.11% at width 8, although its rank by the paper's threshold is 10.3" in equal
    better = "\n".join(findings(fits(softmax=(0.9, 10), sigsoftmax=(0.45, 103))))
    assert "sigsoftmax has 50.0% less KL than softmax at width 8" in better
    assert "same KL" not in better
    full = fits(softmax=(0.9, 10), a=(0.5, 200), b=(0.2, 199))
    assert "A higher rank does not by itself lower the loss: 2 heads" in "\n".join(findings(full))
    assert "KL against softmax at equal width: a 44.4% less; b 77.8% less" in "\n".join(findings(full))
    alike = fits(softmax=(0.9, 10), a=(0.2, 200), b=(0.2, 199))
    assert "higher rank" not in "\n".join(findings(alike))
    widths = full + fits(16, softmax=(0.5, 10), sigsoftmax=(0.4, 10), a=(0.4, 200)) + fits(8, sigsoftmax=(0.9, 103))
    said = "\n".join(findings(widths))
    assert (
        "between 20.0% less and 0.0% less KL than softmax at 2 widths; its rank by the paper's threshold is up to"
        in said
    )
    assert "at equal width, median over the widths: a" in said
    assert findings(fits(sigsoftmax=(0.5, 10))) == []


def test_sentences_are_of_fits():
    assert "10.0% more KL" in "\n".join(findings(carried_over()))
