"""Tables on the page and on the terminal."""

import re

from sigsoftmax.report.markup import tag
from sigsoftmax.report.number_text import interval_text
from sigsoftmax.report.tables import Cell, Column, Row, Table, plain_text

TABLE = Table(
    caption="A <caption>",
    columns=[Column("Name", "label"), Column("Valid", group="first"), Column("Test", group="first"), Column("n")],
    rows=[Row((Cell("softmax", tag("svg")),)), Row(("paper", "51.2", "50.5", "10")), Row(("ours", "51", "50.1", "3"))],
    notes=[tag("b", "bold & safe")],
)


def test_html():
    written = TABLE.to_html()
    assert "<caption>A &lt;caption&gt;</caption>" in written
    assert '<th colspan="2" scope="colgroup" class="group">first</th>' in written
    assert '<th colspan="4" scope="rowgroup"><svg></svg>softmax</th>' in written
    assert '<th scope="row" class="label">paper</th>' in written
    assert written.count('scope="col"') == 4
    assert 'tabindex="0" role="region" aria-label="A &lt;caption&gt;"' in written
    assert "<h3>" not in written


def test_text():
    lines = TABLE.to_text().splitlines()
    assert lines[2].split() == ["--", "first", "--"]
    assert lines[3].split() == ["Name", "Valid", "Test", "n"]
    assert lines[2].index("first") > lines[3].index("Name")
    assert lines[5] == "softmax"
    assert re.fullmatch(r"  paper +51\.2 +50\.5 +10", lines[6])
    assert len(lines[6]) == len(lines[7])
    assert lines[-1] == "bold & safe"


def test_markup_without_its_tags():
    assert plain_text(tag("p", "a < b")) == "a < b"


def test_a_heading_wider_than_its_columns_makes_room():
    table = Table(caption="c", columns=[Column("A", group="a long heading"), Column("B")], rows=[Row(("1", "2"))])
    _, _, groups, titles, _, row, *_ = table.to_text().splitlines()
    assert groups == "a long heading"
    assert titles == f"{'A':>14}  B"
    assert row == f"{'1':>14}  2"


def test_an_interval_stays_in_one_piece_on_a_page_and_has_plain_spaces_in_a_terminal():
    text = f"0.4 {interval_text((-0.5, 0.25), '+.2f')}"
    assert text == "0.4 (−0.50\u00a0to\u00a0+0.25)"
    table = Table(caption="c", columns=[Column("A", "label"), Column("B", "interval")], rows=[Row(("a", text))])
    assert "0.4 (−0.50 to +0.25)" in table.to_text()
    assert f'class="interval">{text}<' in table.to_html()


def test_a_terminal_leaves_out_columns_for_which_it_has_no_room():
    columns = [Column("Name", "label"), Column("Rule", page_only=True), Column("n")]
    table = Table(caption="", columns=columns, rows=[Row(("paper",)), Row(("softmax", "press32", "3"))], notes=())
    assert "press32" in table.to_html()
    assert table.to_text().splitlines()[2:-1] == ["Name       n", "-" * 12, "paper", "  softmax  3"]


def test_long_notes_are_broken_for_a_terminal():
    table = Table(caption="", columns=[Column("n")], rows=[Row(("1",))], notes=["note " * 40])
    assert max(map(len, table.to_text().splitlines())) <= 110
