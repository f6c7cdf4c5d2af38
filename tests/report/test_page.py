"""The page as a file: whole, self-contained, safe, and complete about what it could not show."""

import base64
import copy
import hashlib
import itertools
import json
import os
import re
import stat
import sys
from pathlib import Path

import pytest
from tests.report import synthetic_runs
from tests.report.reading import TAGS, Page

from sigsoftmax.records import Environment, Record, append
from sigsoftmax.report import ReportConfig, paper_tables, write_report
from sigsoftmax.report import page as page_module

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    '"\'&<!-- %{x} <a href="javascript:window.hacked=3">'
)


def test_sections_of_every_subject(page):
    read = Page(page)
    assert [text for level, text in read.headings() if level == 2] == [
        "Which head should I use?",
        "In short",
        "What was run",
        "The paper's tables beside ours",
        "Singular values and ranks",
        "Learning curves",
        "Comparison under equal budgets",
        "Capacity: what a head can express",
        "Audits of output layers",
        "Benchmarks",
    ]
    levels = [level for level, _ in read.headings()]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert {figure["id"] for figure in read.figures} == {
        *("perplexity-1", "spectrum-1", "learning-1", "comparison-1", "benchmark-1"),
        *("capacity-1-width", "capacity-1-numbers", "capacity-1-spectra"),
        *("audit-1-spectrum", "audit-1-truncation", "audit-1-target"),
    }
    for command, _, _ in synthetic_runs.COMMANDS.values():
        assert command in read.text


def test_every_figure_has_words_data_and_an_origin(page):
    text = page.read_text()
    figures = re.findall(r"<figure .*?</figure>", text, re.S)
    assert len(figures) == 11
    for figure in figures:
        assert re.search(r'class="summary">[^<]{20,}', figure)
        assert "<details" in figure
        assert "<table>" in figure
        assert re.search(r'class="made">.*<code>', figure, re.S)


def test_the_page_asks_nothing_of_the_network(page):
    read = Page(page)
    assert not [attributes for tag, attributes in read.tags if tag in ("link", "img", "iframe", "object", "embed")]
    assert not [attributes for _, attributes in read.tags if "src" in attributes]
    assert all(attributes["href"].startswith("#") for tag, attributes in read.tags if tag == "a")
    (policy,) = [a["content"] for t, a in read.tags if t == "meta" and a.get("http-equiv")]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    executed = read.scripts[1:]
    assert [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in executed] == allowed
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy


def test_ids_are_unique_and_what_refers_to_them_finds_them(page):
    read = Page(page)
    identifiers = [attributes["id"] for _, attributes in read.tags if attributes.get("id")]
    assert len(identifiers) == len(set(identifiers))
    for _, attributes in read.tags:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            assert attributes.get(name) is None or attributes[name] in identifiers
        href = attributes.get("href") or ""
        assert not href.startswith("#") or href[1:] in identifiers


def test_tables_have_captions_and_scopes(page):
    text = page.read_text()
    tables = re.findall(r"<table>.*?</table>", text, re.S)
    assert len(tables) > 15
    for table in tables:
        assert re.match(r"<table><caption[^>]*>[^<]", table)
        assert all(" scope=" in cell for cell in re.findall(r"<th[ >][^>]*>?", table))


def test_subjects_without_records_are_left_out_and_named_in_the_contents(runs, tmp_path):
    write_report(ReportConfig(paths=(runs / "benchmarks",), out=tmp_path / "r.html"))
    read = Page(tmp_path / "r.html")
    assert [text for level, text in read.headings() if level == 2] == ["In short", "What was run", "Benchmarks"]
    assert "sigsoftmax audit MODEL" in read.text
    assert "Learning curves" in read.text
    assert not any(figure["id"].startswith("learning") for figure in read.figures)


# --- what came from data --------------------------------------------------------------------------------------------


def hostile(value: object, *, but: frozenset[str] = frozenset(), key: str = "") -> object:
    """Every text replaced, but for those that decide what a record is."""
    if isinstance(value, dict):
        return {k: hostile(v, but=but, key=k) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [hostile(v, but=but, key=key) for v in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) and key not in but else value


def write_hostile(runs: Path, path: Path, *, but: frozenset[str]) -> None:
    lines = []
    for file in sorted(runs.rglob("*.jsonl")):
        for line in file.read_text().splitlines()[:40]:
            record = json.loads(line)
            record["payload"] = hostile(record["payload"], but=but)
            record["environment"] = hostile(record["environment"])
            lines.append(json.dumps(record))
    lines += [json.dumps({**json.loads(lines[0]), "kind": f"new{HOSTILE}"}), f"{HOSTILE} is not a record"]
    path.write_text("\n".join(lines))


@pytest.mark.parametrize(
    "but",
    [frozenset(), frozenset({"phase", "split", "corpus", "baseline", "implementation"})],
    ids=["all texts", "texts that decide nothing"],
)
def test_no_text_from_data_becomes_markup(runs, tmp_path, but):
    write_hostile(runs, tmp_path / "hostile.jsonl", but=but)
    out = tmp_path / "r.html"
    write_report(ReportConfig(paths=(tmp_path / "hostile.jsonl",), out=out, title=HOSTILE))
    read = Page(out)
    assert {tag for tag, _ in read.tags} <= TAGS
    for _, attributes in read.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        assert not (attributes.get("href") or "#").startswith("javascript")
    assert sum(tag == "script" for tag, _ in read.tags) == 3
    # It is there, as text.
    assert read.text.count("window.hacked = 1") > 20

    def texts(value: object) -> list[str]:
        if isinstance(value, dict):
            return [text for item in value.values() for text in texts(item)]
        if isinstance(value, list):
            return [text for item in value for text in texts(item)]
        return [value] if isinstance(value, str) else []

    drawn = [
        text
        for figure in read.figures
        for part in ("title", "traces", "x", "y", "layout")
        for text in texts(figure[part])
    ]
    named = [text for text in drawn if "window.hacked" in text and not text.startswith(("head:", "curve:", "group:"))]
    assert named
    # plotly understands some tags; those of data are not among them.
    assert not [text for text in named if re.search(r"<(?!/?b>|br>|extra>|/extra>)", text)]


def test_unknown_kinds_and_unreadable_lines_are_shown(runs, tmp_path):
    path = tmp_path / "a.jsonl"
    lines = (runs / "benchmarks" / "records.jsonl").read_text().splitlines()
    later = json.loads(lines[0]) | {"version": 7}
    other = json.loads(lines[1]) | {"kind": "weather"}
    path.write_text("\n".join([*lines, json.dumps(later), json.dumps(other), '{"schema": 1, "ki']))
    written = write_report(ReportConfig(paths=(path,), out=tmp_path / "r.html"))
    assert len(written.warnings) == 2
    read = Page(tmp_path / "r.html")
    assert "2 lines or records could not be read." in read.text
    assert f"{path}:6: this 'benchmark' record has version 7" in read.text
    assert f"{path}:8: not a record" in read.text
    assert "Records of other kinds" in read.text
    assert "weather" in read.text


def mutations(value: object, replace: object) -> object:
    """Every number, or every list, of a payload replaced."""
    if isinstance(value, dict):
        return {k: mutations(v, replace) for k, v in value.items()}
    if isinstance(value, list):
        return [] if replace == [] else [mutations(v, replace) for v in value]
    if isinstance(value, bool) or replace == []:
        return value
    if isinstance(value, float) and isinstance(replace, float | str):
        return replace
    return replace if isinstance(value, int) and isinstance(replace, int) else value


@pytest.mark.parametrize("replace", ["nan", "inf", "-inf", 0.0, -1.0, 1e308, 5e-324, 0, -1, 10**15, []], ids=str)
def test_a_page_is_made_whatever_the_numbers_are(runs, tmp_path, replace):
    lines = []
    for file in sorted(runs.rglob("*.jsonl")):
        for line in file.read_text().splitlines()[:50]:
            record = json.loads(line)
            record["payload"] = mutations(copy.deepcopy(record["payload"]), replace)
            lines.append(json.dumps(record))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    write_report(ReportConfig(paths=(tmp_path / "a.jsonl",), out=tmp_path / "r.html"))
    assert Page(tmp_path / "r.html").figures


# --- writing --------------------------------------------------------------------------------------------------------


def test_configuration_is_checked(tmp_path):
    with pytest.raises(ValueError, match="name files of records"):
        write_report(ReportConfig(paths=()))
    with pytest.raises(ValueError, match=r"is a folder; name a file, as .*report\.html"):
        ReportConfig(paths=(tmp_path,), out=tmp_path)
    with pytest.raises(ValueError, match="has the name of a file of records"):
        ReportConfig(paths=(tmp_path,), out=tmp_path / "records.jsonl")


def test_the_page_appears_whole_or_not_at_all(runs, tmp_path, monkeypatch):
    out = tmp_path / "new" / "folder" / "r.html"
    config = ReportConfig(paths=(runs / "benchmarks",), out=out)
    write_report(config)
    before = out.read_bytes()
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~umask

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ValueError, match=r"cannot write the report to .*r\.html: No space left on device"):
        write_report(config)
    assert out.read_bytes() == before
    assert [path.name for path in out.parent.iterdir()] == ["r.html"]


def test_a_folder_that_cannot_be_made_is_an_error(runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write the report"):
        write_report(ReportConfig(paths=(runs / "benchmarks",), out=tmp_path / "file" / "r.html"))


def test_without_plotly_there_are_tables_and_a_word(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page_module.plotly_script.cache_clear()
    try:
        written = write_report(ReportConfig(paths=(runs,), out=tmp_path / "r.html"))
    finally:
        page_module.plotly_script.cache_clear()
    assert "pip install '.[report]' in the folder of sigsoftmax" in written.warnings[-1]
    read = Page(tmp_path / "r.html")
    assert "plotly was not installed where this page was made" in read.text
    assert not read.scripts
    assert (tmp_path / "r.html").stat().st_size < 500_000
    # Its tables are open, since they are all there is.
    assert all("open" in a for t, a in read.tags if t == "details" and a.get("class") == "data")


def test_the_tables_on_the_terminal(runs):
    text = paper_tables((runs,))
    for number in (1, 3, 4):
        assert f"Table {number}." in text
    assert "<" not in text.replace("<=", "")
    with pytest.raises(ValueError, match="no records of training, evaluation or ranks"):
        paper_tables((runs / "benchmarks",))


def test_a_comparison_comes_first_and_its_corpus_once(tmp_path):
    where = synthetic_runs.environment("sigsoftmax compare")
    epochs = [p for p in synthetic_runs.training({"softmax": (57.0, 402)}, corpus="language") if hasattr(p, "epoch")]
    spectra = synthetic_runs.model_spectra({"softmax": (57.0, 402)})
    payloads = [*epochs, *spectra, *synthetic_runs.comparisons()]
    append(tmp_path / "a.jsonl", [Record.of(payload, where) for payload in payloads])
    write_report(ReportConfig(paths=(tmp_path,), out=tmp_path / "r.html"))
    headings = [text for level, text in Page(tmp_path / "r.html").headings() if level == 2]
    assert headings[3] == "Comparison under equal budgets"
    assert "The paper's tables beside ours" not in headings


def test_one_record_makes_a_page(tmp_path):
    append(tmp_path / "a.jsonl", Record.of(synthetic_runs.comparisons()[0], Environment.here()))
    write_report(ReportConfig(paths=(tmp_path,), out=tmp_path / "r.html"))
    assert "Comparison under equal budgets" in Page(tmp_path / "r.html").text
