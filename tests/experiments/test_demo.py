"""The demo on a small language: what it prints, writes and says, and that the words follow the numbers."""

import dataclasses
import sys

import pytest

from sigsoftmax.analysis.capacity.curves import CapacityConfig
from sigsoftmax.analysis.capacity.lbfgs import Budget
from sigsoftmax.experiments.demo import HEADS, DemoConfig, reached, run
from sigsoftmax.records import read
from sigsoftmax.records.schemas.capacity import CapacityResult
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
    for part in (
        "20 contexts, 12 words, log P of rank 6",
        "Width d = 2",
        "sigsoftmax",
        "MoSS(K=4)",
        "KL against softmax",
    ):
        assert part in said
    pytest.importorskip("matplotlib")
    for name in ("bottleneck", "singular_values", "kl_against_width"):
        assert (config.out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (config.out / f"{name}.svg").read_text()
        assert f"{name}.png" in said
    first, *others = read(config.out / "bottleneck.jsonl")
    assert first.payload_as(Spectrum).float64_rank == 6
    assert [record.payload_as(CapacityResult) for record in others] == results


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


def test_the_width_at_which_softmax_reaches_the_truth():
    said = reached({8: 0.9, 98: 2e-4, 99: 5e-5}, 100)
    assert said == (
        "softmax reaches the truth (KL <= 0.0001) at width 99 and not at 98: its log-outputs have rank at most d + 2, "
        "and log P has rank 100."
    )
    assert reached({8: 0.9}, 100) == "softmax reaches the truth at none of these widths; log P has rank 100."
    assert reached({8: 0.0}, 3) == "softmax reaches the truth (KL <= 0.0001) at width 8."


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
