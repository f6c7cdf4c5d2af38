"""The benchmark of spectra on tiny cases, and its table."""

import subprocess
import sys
from pathlib import Path

import pytest
import spectrum as script

from sigsoftmax.records import read
from sigsoftmax.records.schemas.spectra import RankBounds, Spectrum
from sigsoftmax.records.schemas.speed import Measurement

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_tiny_cases_make_records_and_a_table(tmp_path):
    out = tmp_path / "cpu.jsonl"
    command = [sys.executable, "benchmarks/spectrum.py", "--only", "smoke", "smoke-bounds", "--threads", "1", "--out"]
    done = subprocess.run([*command, str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 22 above" in done.stdout
    assert "rank at least 22, at most 22" in done.stdout
    kinds = [record.kind for record in read(out)]
    assert {Spectrum.KIND, RankBounds.KIND, Measurement.KIND} == set(kinds)
    parts = [record.payload_as(Measurement) for record in read(out) if record.kind == Measurement.KIND]
    for case in {part.case for part in parts}:
        of_case = {part.implementation: part for part in parts if part.case == case}
        total = of_case.pop("total")
        assert sum(part.milliseconds for part in of_case.values()) == pytest.approx(total.milliseconds, rel=0.02)
        assert total.peak_mib > 50
    table = script.figures_table(tmp_path)
    assert table.count("\n") == 4
    assert "| press32 22, numpy32 22, noise 22; noise floor " in table
    assert "| press32 22 to 22 |" in table


def test_the_page_has_a_place_for_the_table():
    text = script.PAGE.read_text(encoding="utf-8")
    changed = script.page_with("| a table |\n", text)
    assert "<!-- generated: spectra -->\n| a table |\n<!-- end -->" in changed
    assert script.page_with("| a table |\n", changed) == changed
    with pytest.raises(ValueError, match="has no lines"):
        script.page_with("", "no place")


def test_the_page_shows_the_records():
    folder = script.RECORDS / "spectra"
    if not folder.is_dir():
        pytest.skip("no records of spectra yet")
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page_with(script.figures_table(folder), text) == text


def test_noise_estimates_hold(monkeypatch):
    monkeypatch.setattr(script, "NOISE_SIZES", ((30, 20), (400, 60)))
    for line in list(script.noise_table())[2:]:
        of_gram, of_exact = (float(number) for number in line.split()[-2:])
        assert of_gram < 1.0
        assert of_exact < 1.0
