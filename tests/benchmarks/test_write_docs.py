"""Tables and pictures from made-up records, what is refused, and that the page of the repository is up to date."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

import write_docs
from measuring import Measurement
from tests.records import samples

from sigsoftmax.records import Environment, Record, append

HAND_WRITTEN = "# Benchmarks\n\nBy hand.\n\n", "\n\nBy hand, too.\n"
PLACE = samples.environment("python benchmarks/cpu.py --rounds 9", device="A Processor")


def made_up(implementation: str = "torch softmax", **fields: Any) -> Measurement:
    common = {"milliseconds": 20.0, "milliseconds_quartiles": (19.0, 21.0), "peak_mib": 100.0}
    return samples.measurement(implementation=implementation, **{**common, **fields})


OURS = made_up(
    "ours sigsoftmax",
    milliseconds=10.0,
    ratio=0.5,
    ratio_quartiles=(0.45, 0.61),
    peak_mib=4.25,
    target="<= 0.6x, aim 0.4x",
)


class Book:
    """A page and a folder of records."""

    def __init__(self, folder: Path) -> None:
        self.page = folder / "docs" / "benchmarks.md"
        self.records = folder / "records"
        self.images = folder / "docs" / "images"
        self.page.parent.mkdir()
        self.records.mkdir()
        self.write_page("<!-- generated: cpu -->\nold\n<!-- end -->")

    def write_page(self, parts: str) -> None:
        self.page.write_text(parts.join(HAND_WRITTEN), encoding="utf-8")

    def record(self, *measurements: Measurement, place: Environment = PLACE, file: str = "cpu") -> None:
        append(self.records / f"{file}.jsonl", [Record.of(m, place) for m in measurements])

    def run(self, *options: str) -> int:
        return write_docs.main(["--records", str(self.records), "--page", str(self.page), *options])

    def lines(self) -> list[str]:
        return self.page.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def book(tmp_path) -> Book:
    return Book(tmp_path)


def test_the_page_of_the_repository_is_what_the_records_give(capsys):
    # Also without records: then the page says so.
    assert write_docs.main(["--check"]) == 0, capsys.readouterr().err


def test_the_table(book):
    book.record(made_up(), made_up("torch naive", milliseconds=0.1234, ratio=2.5, peak_mib=1600.0), OURS)
    assert book.run() == 0
    table = [line for line in book.lines() if line.startswith("|")]
    assert table == [
        "| implementation | median ms | ratio | quartiles | memory MiB | target | met |",
        "|---|---:|---:|---:|---:|---|---|",
        "| torch softmax (baseline) | 20.0 | 1.00 | 1.00 to 1.00 | 100 |  |  |",
        "| torch naive | 0.123 | 2.50 | 1.00 to 1.00 | 1,600 |  |  |",
        "| **ours sigsoftmax** | 10.0 | 0.50 | 0.45 to 0.61 | 4.2 | ≤ 0.6x, aim 0.4x | yes; aim 0.4x: not reached |",
    ]
    assert "### Loss, N=2 V=3" in book.lines()
    assert "9 rounds." in book.lines()


def test_equal_options_are_compared_where_the_baseline_has_another(book):
    baseline = "torch softmax with label smoothing"
    rows = {"torch softmax": 0.159, baseline: 0.599, "ours softmax": 0.229, "ours softmax with label smoothing": 0.236}
    book.record(*(made_up(name, milliseconds=ms, baseline=baseline) for name, ms in rows.items()))
    book.run()
    text = "\n".join(book.lines())
    assert "ours softmax takes 1.44x as long as torch softmax (0.229 against 0.159 ms)" in text


def test_the_commit_and_the_libraries_are_named(book):
    libraries = ("triton 3.6.0", "liger-kernel 0.8.5")
    place = dataclasses.replace(PLACE, commit="0123456789", clean=False, libraries=libraries)
    book.record(made_up(), OURS, place=place)
    book.run()
    text = "\n".join(book.lines())
    for part in ("triton 3.6.0, liger-kernel 0.8.5", "commit 0123456, modified"):
        assert part in text


def test_a_record_without_a_commit_says_so(book):
    book.record(made_up(), OURS)
    book.run()
    text = "\n".join(book.lines())
    assert "commit not recorded" in text
    assert "versions of other libraries not recorded" in text


def test_where_and_how_it_was_measured(book):
    book.record(made_up(), OURS)
    book.run()
    text = "\n".join(book.lines())
    for part in ("2026-01-01: A Processor, 2 threads;", "Python 3.11.7", "torch 2.13.0", "sigsoftmax 0.1.0"):
        assert part in text
    assert "```sh\npython benchmarks/cpu.py --rounds 9\n```" in text
    assert text.count("Measured on") == 1


def test_cases_of_different_runs_say_each_where(book):
    book.record(made_up(), OURS)
    elsewhere = dataclasses.replace(PLACE, device="Another")
    book.record(*(dataclasses.replace(m, case="other") for m in (made_up(), OURS)), place=elsewhere)
    book.run()
    text = "\n".join(book.lines())
    assert text.index("A Processor") < text.index("### Other") < text.index("Another")


def test_suites_have_parts_of_their_own(book):
    book.write_page(
        "<!-- generated: gpu -->\n<!-- end -->\nbetween\n<!-- generated: cpu -->\nold\n<!-- end -->",
    )
    book.record(made_up(), OURS)
    gpu = dataclasses.replace(PLACE, device="A GPU")
    book.record(made_up(suite="gpu", case="on the GPU"), place=gpu, file="gpu")
    assert book.run() == 0
    first, second = "\n".join(book.lines()).split("\nbetween\n")
    assert "### On the GPU" in first
    assert ": A GPU; Linux" in first
    assert "### Loss, N=2 V=3" in second
    assert {path.name for path in book.images.iterdir()} == {
        "benchmarks-cpu.png",
        "benchmarks-cpu-loss-n-2-v-3.png",
        "benchmarks-gpu.png",
        "benchmarks-gpu-on-the-gpu.png",
    }


def test_what_is_written_by_hand_and_the_markers_stay(book):
    book.record(made_up(), OURS)
    book.run()
    text = book.page.read_text(encoding="utf-8")
    assert text.startswith(HAND_WRITTEN[0] + "<!-- generated: cpu -->\n")
    assert text.endswith("<!-- end -->" + HAND_WRITTEN[1])
    assert "old" not in text
    assert book.run() == 0
    assert book.page.read_text(encoding="utf-8") == text


def test_without_records_the_page_says_so(book):
    assert book.run() == 0
    assert "*No records yet.*" in book.lines()
    assert not book.images.exists()
    assert book.run("--check") == 0


def test_check_fails_on_what_is_stale_and_writes_nothing(book, capsys):
    book.record(made_up(), OURS)
    before = book.page.read_bytes()
    assert book.run("--check") == 1
    assert "out of date: benchmarks.md, images/benchmarks-cpu.png" in capsys.readouterr().err
    assert book.page.read_bytes() == before
    assert not book.images.exists()
    book.run()
    assert book.run("--check") == 0

    book.page.write_text(book.page.read_text(encoding="utf-8").replace("0.50", "0.49"), encoding="utf-8")
    assert book.run("--check") == 1
    book.run()
    (book.images / "benchmarks-cpu.png").write_bytes((book.images / "benchmarks-cpu-loss-n-2-v-3.png").read_bytes())
    capsys.readouterr()
    # Drawn from the same rows: both pictures show all there is.
    assert book.run("--check") == 0
    book.record(dataclasses.replace(OURS, implementation="ours gss", target=""))
    assert book.run("--check") == 1
    assert "images/benchmarks-cpu-loss-n-2-v-3.png" in capsys.readouterr().err


def test_a_picture_of_a_case_that_is_gone_goes_too(book):
    book.record(made_up(), OURS)
    book.run()
    left = book.images / "benchmarks-cpu-of-old.png"
    other = book.images / "bottleneck.png"
    for path in (left, other):
        path.write_bytes(b"")
    assert book.run("--check") == 1
    book.run()
    assert not left.exists()
    assert other.exists()


def test_pictures_are_the_same_bytes_every_time(book):
    book.record(made_up(), OURS, made_up("torch naive", ratio=12.0, ratio_quartiles=(11.0, 13.0)))
    book.run()
    first = {path.name: path.read_bytes() for path in book.images.iterdir()}
    assert all(content.startswith(b"\x89PNG") and b"matplotlib" not in content.lower() for content in first.values())
    for path in book.images.iterdir():
        path.unlink()
    book.run()
    assert {path.name: path.read_bytes() for path in book.images.iterdir()} == first


def test_a_case_that_compares_no_times_shows_memory(book):
    sizes = {f"ours, N={n}": mib for n, mib in ((10, 30.0), (100, 31.0), (1000, 70.0))}
    book.record(
        *(made_up(name, baseline=name, peak_mib=mib, rounds=1, target="flat, <= 64 MiB") for name, mib in sizes.items())
    )
    book.run()
    table = [line for line in book.lines() if line.startswith("|")]
    assert table[0] == "| implementation | median ms | memory MiB | target | met |"
    assert [line.split(" | ")[-1] for line in table[2:]] == ["yes |", "yes |", "no: flat, ≤ 64 MiB |"]
    assert "1 round." in book.lines()


def test_memory_that_was_not_measured(book):
    book.record(made_up(peak_mib=None), made_up("ours a", peak_mib=None, target="<= 64 MiB"))
    book.run()
    table = [line for line in book.lines() if line.startswith("|")]
    assert "memory MiB" not in table[0]
    assert table[-1].endswith("| not measured: ≤ 64 MiB |")


def test_a_further_field_of_a_suite_gets_a_column(book, monkeypatch):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class WithError(Measurement):
        relative_error: float | None = None

    monkeypatch.setattr(write_docs, "Measurement", WithError)
    book.record(made_up(), WithError(**{**dataclasses.asdict(OURS), "relative_error": 1.2345}))
    book.run()
    table = [line for line in book.lines() if line.startswith("|")]
    assert "| memory MiB | relative error | target |" in table[0]
    assert "| 4.2 | 1.23 | ≤ 0.6x" in table[-1]


def test_errors_of_each_gradient_get_a_table(book):
    errors = {"hidden, deviation 1": 1.0, "weight, deviation 3": 1.2345}
    ours = dataclasses.replace(OURS, gradient_error=1.2345, gradient_errors=errors, target="<= 1.2x torch's error")
    book.record(made_up(), ours)
    book.run()
    table = [line for line in book.lines() if line.startswith("|")]
    assert "| memory MiB | gradient error | target |" in table[0]
    assert "| 1.23 | ≤ 1.2x torch's error | no: ≤ 1.2x torch's error |" in table[3]
    assert table[4:] == [
        "| error relative to torch's | hidden, deviation 1 | weight, deviation 3 |",
        "|---|---:|---:|",
        "| **ours sigsoftmax** | 1.000 | 1.234 |",
    ]


def sizes(target: str, **fields: Any) -> list[Measurement]:
    times = {100: 1.0, 200: 2.0, 400: 8.0}
    return [
        made_up(f"ours, N={n}", baseline=f"ours, N={n}", milliseconds=ms, size=n, target=target, **fields)
        for n, ms in times.items()
    ]


def test_what_grows_is_held_against_a_line(book):
    book.record(*sizes("linear", peak_mib=None))
    book.run()
    table = [line for line in book.lines() if line.startswith("|")]
    assert table[0] == "| implementation | median ms | quartiles | off a line | target | met |"
    assert "19.0 to 21.0" in table[2]
    assert table[4].endswith("% | linear | no: linear |")
    # Neither ratios nor memory to draw.
    assert not book.images.exists()
    assert "![" not in "\n".join(book.lines())


def test_many_cases_have_all_targets_in_one_table(book, monkeypatch):
    monkeypatch.setattr(write_docs, "draw", lambda panels, path, digest: None)
    for number in range(6):
        book.record(made_up(case=f"case {number}"), dataclasses.replace(OURS, case=f"case {number}"))
    book.record(*sizes("linear, flat", case="sizes"))
    book.record(made_up(case="unknown"), dataclasses.replace(OURS, case="unknown", peak_mib=None, target="<= 1 MiB"))
    book.run()
    lines = book.lines()
    start = lines.index("### All targets")
    assert lines[start + 2] == "6 of 8 targets are met; 1 could not be judged in full."
    assert lines[start + 6] == (
        "| case 0 | ours sigsoftmax | 10.0 | 0.50 (0.45 to 0.61) | 4.2 |  | ≤ 0.6x, aim 0.4x | "
        "yes; aim 0.4x: not reached |"
    )
    assert "| sizes | 3 sizes |  |  |  |  | linear, flat | no: ours, N=200 (no: linear), ours" in lines[start + 12]
    assert lines[start + 13].endswith("| ≤ 1 MiB | not measured: ≤ 1 MiB |")


def test_compiled_kernels_are_counted_and_not_drawn(book):
    book.record(made_up("ours: training", baseline="ours: training", peak_mib=None, rounds=1, compiled_variants=12))
    assert book.run() == 0
    table = [line for line in book.lines() if line.startswith("|")]
    assert table[0] == "| implementation | median ms | compiled variants |"
    assert table[2] == "| **ours: training** | 20.0 | 12 |"
    assert not book.images.exists()


def refused(book: Book, capsys: pytest.CaptureFixture[str]) -> str:
    before = book.page.read_bytes()
    assert book.run() == 2
    assert book.page.read_bytes() == before
    return capsys.readouterr().err


def test_an_unknown_suite(book, capsys):
    book.record(made_up(), made_up(suite="tpu"))
    error = refused(book, capsys)
    assert "cpu.jsonl:2: the suite 'tpu' has no place in benchmarks.md, which has: cpu" in error
    assert "add the lines '<!-- generated: tpu -->' and '<!-- end -->'" in error


def test_a_malformed_line(book, capsys):
    book.record(made_up())
    with (book.records / "cpu.jsonl").open("a", encoding="utf-8") as file:
        file.write("{torn\n")
    assert "cpu.jsonl:2: not a record" in refused(book, capsys)


def test_a_field_that_is_missing_or_unknown(book, capsys):
    envelope = json.loads(Record.of(made_up(), PLACE).to_json())
    del envelope["payload"]["ratio"]
    path = book.records / "cpu.jsonl"
    path.write_text(json.dumps(envelope) + "\n", encoding="utf-8")
    assert "cpu.jsonl:1: payload lacks the fields: ratio" in refused(book, capsys)
    envelope["payload"] |= {"ratio": 1.0, "colour": "blue"}
    path.write_text(json.dumps(envelope) + "\n", encoding="utf-8")
    assert "payload has unknown fields: colour" in refused(book, capsys)


def test_a_case_of_two_runs_or_with_one_twice(book, capsys):
    book.record(made_up())
    book.record(OURS, place=dataclasses.replace(PLACE, threads=1))
    assert "cpu.jsonl:2: the case 'loss, N=2 V=3' was begun in another run" in refused(book, capsys)
    (book.records / "cpu.jsonl").unlink()
    book.record(made_up(), OURS, OURS)
    assert "cpu.jsonl:3: 'ours sigsoftmax' is there twice" in refused(book, capsys)


def test_a_baseline_that_is_not_there(book, capsys):
    book.record(OURS)
    assert "lacks 'torch softmax', to which 'ours sigsoftmax' is compared" in refused(book, capsys)


def test_a_target_that_cannot_be_judged(book, capsys):
    book.record(made_up(target="fast"))
    assert "cpu.jsonl:1: cannot judge the target 'fast'; expected '<= 1.0x'" in refused(book, capsys)


@pytest.mark.parametrize(
    "parts",
    ["<!-- generated: cpu -->", "<!-- end -->", "<!-- generated: cpu -->\n<!-- generated: gpu -->\n<!-- end -->"],
)
def test_markers_that_do_not_match(book, capsys, parts):
    book.write_page(parts)
    assert "each '<!-- generated: SUITE -->' needs an '<!-- end -->'" in refused(book, capsys)


def test_a_suite_with_two_parts(book, capsys):
    book.write_page("<!-- generated: cpu -->\n<!-- end -->\n" * 2)
    assert "more than one part is generated for cpu" in refused(book, capsys)
