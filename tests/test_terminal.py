"""Text of others on its way to a terminal: nothing in it acts, whoever prints it."""

import io
import logging
import os
import sys
import unicodedata

import pytest
from tests.experiments.small_runs import SINGLE, write_text
from tests.report import synthetic_runs

from sigsoftmax import cli
from sigsoftmax.experiments.display import ChangingLine, RichBars
from sigsoftmax.experiments.runs import train
from sigsoftmax.records import Record, append
from sigsoftmax.terminal import ACTIVE, EscapingStream, above_bars, clear_line, console, escaped, escaped_output

TITLE = "\x1b]0;title\x07"
LINK = "\x1b]8;;http://example.org\x1b\\"
HOSTILE = f"{TITLE}{LINK}\x1b[31m\x1b[2J\r\x9b2K\u202e\u2066\u200f\x00\x7f"

DRAWN = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
"""format characters that are drawn: signs before numbers"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31m", r"\x1b[31m"),
        ("\x1b]0;x\x07", r"\x1b]0;x\x07"),
        ("\r", r"\r"),
        ("\x9b2K", r"\x9b2K"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\u2066\u200e\ufeff\u200b", r"\u2066\u200e\ufeff\u200b"),
        ("\u2028\x85\x0b", r"\u2028\x85\x0b"),
        ("\udc9b", r"\udc9b"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_acts_is_written_as_an_escape(text, shown):
    assert escaped(f"a{text}b") == f"a{shown}b"
    assert escaped(escaped(text)) == escaped(text)


def test_text_stays_as_it_is():
    text = "tab\tline\nümlaut 中文 👩\u200d💻 می\u200cخواهم \\x1b"
    assert escaped(text) == text


def test_every_control_and_format_character_is_known():
    """Characters of a later Unicode are found here, too."""
    kept = set("\n\t\u200c\u200d" + DRAWN)
    for point in range(sys.maxunicode + 1):
        acts = unicodedata.category(chr(point)) in {"Cc", "Cf", "Cs", "Zl", "Zp"} and chr(point) not in kept
        assert not acts or ACTIVE.match(chr(point)), f"U+{point:04X}"
        if ACTIVE.match(chr(point)):
            assert chr(point) not in kept


def test_a_stream_is_escaped_and_otherwise_itself():
    inner = Terminal()
    stream = EscapingStream(inner)
    assert stream.write("a\x1b") == 2
    print("b\r", file=stream)
    stream.writelines(["c", "\x07"])
    assert inner.getvalue() == "a\\x1bb\\r\nc\\x07"
    assert stream.isatty()
    clear_line(EscapingStream(stream))
    assert inner.getvalue().endswith("\r\x1b[2K")


def test_output_is_escaped_whoever_prints_and_only_inside(capsys):
    with escaped_output():
        print("out \x1b")  # noqa: T201
        print("err \x9b", file=sys.stderr)  # noqa: T201
        sys.stderr.write("\u202e\n")
        logging.StreamHandler().emit(logging.makeLogRecord({"msg": "\x07"}))
    print("after \x1b")  # noqa: T201
    printed = capsys.readouterr()
    assert printed.out == "out \\x1b\nafter \x1b\n"
    assert printed.err == "err \\x9b\n\\u202e\n\\x07\n"


# --- the command line -------------------------------------------------------------------------------------------------


def assert_tame(text: str) -> None:
    assert ACTIVE.search(text) is None, ACTIVE.search(text)
    assert r"\x1b" in text


@pytest.fixture
def hostile_records(tmp_path):
    """Records that are right but for their texts."""
    run = synthetic_runs.identity("softmax", 1, recipe=f"ptb-{HOSTILE}", corpus=f"text-{HOSTILE}")
    evaluation = next(p for p in synthetic_runs.training() if type(p).__name__ == "EvaluationRecord")
    path = tmp_path / "records.jsonl"
    environment = synthetic_runs.environment(f"sigsoftmax {HOSTILE}")
    append(path, Record.of(type(evaluation)(**{**vars(evaluation), "run": run}), environment))
    return path


def test_tables_of_records(hostile_records, capsys):
    assert cli.main(["tables", str(hostile_records)]) == 0
    assert_tame(capsys.readouterr().out)


def test_a_page_of_records_and_what_is_said_of_lines_that_cannot_be_read(hostile_records, tmp_path, capsys):
    with hostile_records.open("a") as file:
        file.write('{"schema": 1, "kind": 3}\n')
    page = tmp_path / "page.html"
    named = hostile_records.rename(tmp_path / "\x1b[31m.jsonl")
    assert cli.main(["report", str(named), "-o", str(page), "--title", HOSTILE]) == 0
    assert_tame(capsys.readouterr().out)
    # The scripts, which are not made of records, may hold what they like.
    body = page.read_text(encoding="utf-8").partition("<body")[2].partition("<script")[0]
    assert "softmax" in body
    assert ACTIVE.search(body) is None


def test_errors_that_quote(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = os.fsdecode(b"no\x1b[31m\x9b.jsonl")
    assert cli.main(["tables", path]) == 2
    assert cli.main(["evaluate", path]) == 2
    with pytest.raises(SystemExit):
        cli.main(["functions", f"--{HOSTILE}"])
    assert_tame(capsys.readouterr().err)


def test_tracebacks_of_unforeseen_errors(monkeypatch, capsys):
    def fail(*arguments, **named):
        raise LookupError(HOSTILE)

    monkeypatch.setattr(train, "run", fail)
    assert cli.main(["train", "ptb-softmax", "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert_tame(error)


def test_text_of_a_model_and_a_prompt_that_is_not_in_its_vocabulary(tmp_path, capsys):
    hostile = "\x1b]0;title\x07\x9b2K\u202e"
    text = write_text(tmp_path / "text")
    for path in text.iterdir():
        path.write_text(path.read_text().replace("word1", f"{hostile}1"), encoding="utf-8")
    words = ["--data", str(text), "--out", str(tmp_path / "runs"), "--device", "cpu", "--set", *SINGLE]
    assert cli.main(["train", "tiny-softmax", "--seed", "1", *words]) == 0
    capsys.readouterr()
    assert cli.main(["sample", str(tmp_path / "runs" / "tiny-softmax" / "1")]) == 0
    assert_tame(capsys.readouterr().out)
    assert cli.main(["sample", str(tmp_path / "runs" / "tiny-softmax" / "1"), "--prompt", f"{hostile}99"]) == 2
    assert_tame(capsys.readouterr().err)


# --- rich -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def screen(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm-256color")
    for variable in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    return Terminal()


def assert_no_foreign_sequences(text: str) -> None:
    for sequence in ("\x1b]", "\x07", "\x1b[31m", "\x1b[2J", "\x9b", "\u202e", "\u2066", "\x00"):
        assert sequence not in text
    assert r"\x1b]0;title" in text


def test_rich_draws_with_its_own_sequences_and_shows_those_of_others(screen):
    shown = console(EscapingStream(screen))
    shown.print(f"[bold]{HOSTILE}[/bold]", style="green")
    printed = screen.getvalue()
    assert_no_foreign_sequences(printed)
    assert "[bold]" in printed, "brackets of others are no markup"
    assert "\x1b[32m" in printed, "colours of ours are"


def test_bars_and_lines_above_them(screen, monkeypatch):
    from tests.experiments.test_display import RUN, at, epoch

    class Hostile(type(RUN)):
        name = f"{HOSTILE}[link=http://example.org]x[/link]"

    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    run = Hostile(recipe=RUN.recipe, seed=1, folder=RUN.folder)
    with RichBars(screen) as bars:
        bars.watch(run, at(1))
        bars.watch(run, epoch(2))
        print(f"said meanwhile {HOSTILE}")  # noqa: T201
        bars.ended(run)
    assert_no_foreign_sequences(screen.getvalue())
    assert "said meanwhile" in screen.getvalue()
    assert out.getvalue() == ""


def test_what_goes_to_a_file_gets_there_while_bars_are_drawn(screen, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", screen)
    with above_bars(console(screen)):
        print("a result")  # noqa: T201
        print("a word", file=sys.stderr)  # noqa: T201
        print("half", end="", file=sys.stderr)  # noqa: T201
    assert out.getvalue() == "a result\n"
    assert screen.getvalue() == "a word\nhalf"


def test_a_terminal_without_rich(capsys, monkeypatch):
    from tests.experiments.test_display import RUN, at

    class Hostile(type(RUN)):
        name = HOSTILE

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with escaped_output(), ChangingLine(sys.stderr) as line:
        line.watch(Hostile(recipe=RUN.recipe, seed=1, folder=RUN.folder), at(1))
    assert_no_foreign_sequences(stream.getvalue())
    assert stream.getvalue().startswith("\r\x1b[2K")
