"""The demo on a small language: what it prints, writes and says, and that the words follow the numbers."""

import dataclasses
import sys

import pytest
from tests.records import samples

from sigsoftmax.analysis.capacity.curves import CapacityConfig
from sigsoftmax.analysis.capacity.lbfgs import Budget
from sigsoftmax.experiments.demo import HEADS, DemoConfig, findings, run, table
from sigsoftmax.records import read
from sigsoftmax.records.schemas.capacity import CapacityResult, StartResult
from sigsoftmax.records.schemas.spectra import Spectrum
from sigsoftmax.synthetic import Language


class TinyDemo(DemoConfig):
    width = 2

    def language(self) -> Language:
        return Language.of_rank(contexts=20, words=12, rank=6, seed=self.seed)

    def capacity(self) -> CapacityConfig:
        return CapacityConfig(heads=HEADS, widths=(1, 2, 4, 6), random_starts=0, budget=Budget(iterations=25))


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[DemoConfig, list[CapacityResult], str]:
    config = TinyDemo(out=tmp_path_factory.mktemp("demo") / "new")
    said: list[str] = []
    return config, run(config, said.append), "\n".join(said)


def test_everything_is_said_and_written(demo):
    config, results, said = demo
    for part in ("20 contexts, 12 words, log P of rank 6", "Width d = 2", "sigsoftmax", "moss(K=4)", "KL at width 2"):
        assert part in said
    pytest.importorskip("matplotlib")
    for name in ("bottleneck", "singular_values", "kl_against_width"):
        assert (config.out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (config.out / f"{name}.svg").read_text()
        assert f"{name}.png" in said
    first, *others = read(config.out / "bottleneck.jsonl")
    assert first.payload_as(Spectrum).float64_rank == 6
    assert [record.payload_as(CapacityResult) for record in others] == results


def test_the_table_is_aligned(demo):
    _, results, _ = demo
    lines = table(results, 2).splitlines()
    rules = [number for number, line in enumerate(lines) if set(line) == {"-"}]
    body = lines[rules[0] : rules[2] + 1]
    assert len({len(line) for line in body}) == 1
    assert len(body) == 3 + 2 + len(HEADS)


def test_a_second_run_replaces_the_records(demo):
    config, results, _ = demo
    run(config, lambda _: None)
    assert len(list(read(config.out / "bottleneck.jsonl"))) == len(results) + 1


def test_another_demo_in_the_same_folder_stands_beside_it(demo):
    config, results, _ = demo
    others = run(dataclasses.replace(config, seed=7), lambda _: None)
    records = [record for record in read(config.out / "bottleneck.jsonl") if record.kind == CapacityResult.KIND]
    found = {(result.language, result.head, result.width) for result in (r.payload_as(CapacityResult) for r in records)}
    assert found == {(result.language, result.head, result.width) for result in (*results, *others)}
    assert len(records) == len(results) + len(others)


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said: list[str] = []
    run(TinyDemo(out=tmp_path), said.append)
    assert "pip install '.[plot]' in the folder of sigsoftmax" in "\n".join(said)
    assert (tmp_path / "bottleneck.jsonl").is_file()


def invented(**kl_and_rank: tuple[float, int]) -> list[CapacityResult]:
    return [
        samples.capacity(head=head, kl=kl, fitted_kl=kl, rank=rank, rank_bound=200)
        for head, (kl, rank) in kl_and_rank.items()
    ]


def test_the_words_follow_the_numbers():
    equal = "\n".join(findings(invented(softmax=(0.9, 10), sigsoftmax=(0.899, 103)), 8, 100))
    assert "numerical rank 103 where softmax has 10, and the same KL within 0.11%" in equal
    better = "\n".join(findings(invented(softmax=(0.9, 10), sigsoftmax=(0.45, 103)), 8, 100))
    assert "50.0% less KL" in better
    assert "same KL" not in better
    full = invented(softmax=(0.9, 10), a=(0.5, 200), b=(0.2, 199))
    assert "rank is necessary, not sufficient" in "\n".join(findings(full, 8, 100))
    alike = invented(softmax=(0.9, 10), a=(0.2, 200), b=(0.2, 199))
    assert "not sufficient" not in "\n".join(findings(alike, 8, 100))
    wide = [dataclasses.replace(result, width=99) for result in invented(softmax=(0.0, 100))]
    assert "at width 99 and not at 8" in "\n".join(findings(full + wide, 8, 100))


def test_tables_and_words_are_of_fits_and_limits_stand_apart():
    """A minimum that is carried over from softmax would put sigsoftmax at or below it by construction."""
    softmax, sigsoftmax = invented(softmax=(0.9, 10), sigsoftmax=(0.9, 103))
    sigsoftmax = dataclasses.replace(
        sigsoftmax, fitted_kl=0.99, starts=(StartResult(name="random 0", kl=1.08, iterations=9),)
    )
    words = "\n".join(findings([softmax, sigsoftmax], 8, 100))
    assert "10.0% more KL" in words
    assert "at most 0.9000, since it contains softmax" in words
    row = next(line for line in table([softmax, sigsoftmax], 8).splitlines() if line.startswith("sigsoftmax"))
    assert row.split()[5:7] == ["0.9900", "1.0800"]


def test_the_languages_have_the_rank_they_claim():
    assert DemoConfig().language().log_rank == 100
    assert DemoConfig(quick=True).language().log_rank == 25
    for config in (DemoConfig(), DemoConfig(quick=True)):
        widths = config.capacity().widths
        assert min(widths) < config.language().log_rank <= max(widths)
        assert config.width in widths


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match=r"seed must not be negative, got -1"):
        DemoConfig(seed=-1)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"is a file; choose another with --out"):
        DemoConfig(out=tmp_path / "file")
