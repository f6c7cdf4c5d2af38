"""The capacity tool on small languages: tables by width and by numbers, containment, records, interrupts."""

import dataclasses

import numpy as np
import pytest

from sigsoftmax.experiments import capacity
from sigsoftmax.experiments.capacity import CapacityToolConfig, run
from sigsoftmax.records import read
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.records.schemas.spectra import Spectrum
from sigsoftmax.report.loading import load
from sigsoftmax.report.material import Material
from sigsoftmax.synthetic import Language

SMALL = {
    "target": "of_rank(contexts=20, words=12, rank=6)",
    "heads": ("sigsoftmax", "mos(K=2)"),
    "widths": (1, 2, 4),
    "iterations": 15,
    "workers": 1,
}


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    config = CapacityToolConfig(out=tmp_path_factory.mktemp("capacity") / "new", **SMALL)
    said: list[str] = []
    return config, run(config, said.append), "\n".join(said)


def test_everything_is_said_and_recorded(tool):
    config, results, said = tool
    groups = ("width d", "free numbers per context: K d + K - 1")
    headings = ("KL (nats) of the best fit", "Softmax of equal KL", "KL from the worst start")
    for part in ("20 contexts, 12 words, log P of numerical rank 6", *groups, *headings, "Containment holds in all"):
        assert part in said
    first, *others = read(config.records)
    assert first.payload_as(Spectrum).float64_rank == 6
    recorded = [record.payload_as(CapacityResult) for record in others]
    assert sorted(recorded, key=lambda r: (r.head, r.width)) == sorted(results, key=lambda r: (r.head, r.width))
    assert {result.head for result in results} == {"softmax", "sigsoftmax", "mos(K=2)"}
    assert all(sum(start.iterations > 0 for start in result.starts) >= 3 for result in results if result.kl > 1e-4)


def test_a_second_run_replaces_the_records(tool):
    config, results, _ = tool
    run(config, lambda _: None)
    assert len(list(read(config.records))) == len(results) + 1


def test_a_run_that_is_stopped_or_does_less_takes_nothing_away(tmp_path):
    config = CapacityToolConfig(out=tmp_path, **SMALL)
    results = {(result.head, result.width): result for result in run(config, lambda _: None)}

    def progress(text: str) -> None:
        if text.startswith("fitted 1"):
            raise KeyboardInterrupt

    hasty = dataclasses.replace(config, iterations=1, starts=1, widths=(1, 2))
    with pytest.raises(KeyboardInterrupt):
        run(hasty, lambda _: None, progress)
    run(hasty, lambda _: None)
    found = [r.payload_as(CapacityResult) for r in read(config.records) if r.kind == CapacityResult.KIND]
    assert all(result in found for result in results.values())
    # A page shows the best fits that are on record.
    shown = Material.of(load([config.records])).capacities
    assert {(entry.payload.head, entry.payload.width) for entry in shown} == results.keys()
    assert len(shown) == len(results)
    for entry in shown:
        assert entry.payload.fitted_kl <= results[entry.payload.head, entry.payload.width].fitted_kl


def test_a_file_that_has_other_distributions_now_is_another_truth(tmp_path):
    changes = {"target": str(tmp_path / "p.npy"), "heads": ("softmax",), "widths": (1,)}
    for rank in (2, 12):
        np.save(tmp_path / "p.npy", Language.of_rank(contexts=20, words=12, rank=rank).log_p_NV.exp().numpy())
        config = CapacityToolConfig(out=tmp_path / "out", **{**SMALL, **changes})
        run(config, lambda _: None)
    found = [r.payload_as(CapacityResult) for r in read(config.records) if r.kind == CapacityResult.KIND]
    assert len({result.truth for result in found}) == len(found) == 2


def test_given_distributions(tmp_path):
    language = Language.of_rank(contexts=20, words=12, rank=6)
    np.save(tmp_path / "p.npy", language.log_p_NV.exp().numpy())
    changes = {"target": str(tmp_path / "p.npy"), "heads": ("softmax",), "widths": (2,)}
    said: list[str] = []
    (result,) = run(CapacityToolConfig(out=tmp_path, **{**SMALL, **changes}), said.append)
    assert result.language == "distributions of p.npy"
    assert "distributions of p.npy: 20 contexts, 12 words" in said[0]


def test_words_that_cannot_occur(tmp_path):
    p = np.array([[0.5, 0.5, 0.0], [0.0, 0.2, 0.8], [0.3, 0.3, 0.4]])
    np.save(tmp_path / "p.npy", p)
    said: list[str] = []
    changes = {"target": str(tmp_path / "p.npy"), "heads": ("softmax",), "widths": (1,)}
    run(CapacityToolConfig(out=tmp_path, **{**SMALL, **changes}), said.append)
    assert "log P has no rank" in said[0]


def test_an_interrupt_keeps_the_fits_that_were_done(tmp_path):
    config = CapacityToolConfig(out=tmp_path, **SMALL)
    said: list[str] = []

    def progress(text: str) -> None:
        if text.startswith("fitted 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, said.append, progress)
    assert len([record for record in read(config.records) if record.kind == "capacity"]) == 3
    assert "The 3 fits that were done are valid" in said[-1]


def test_containment_is_asserted(tmp_path, monkeypatch):
    def broken(results):
        raise RuntimeError("moss contains mos, but its KL is larger")

    monkeypatch.setattr(capacity, "contained_pairs", broken)
    with pytest.raises(RuntimeError, match="but its KL is larger"):
        run(CapacityToolConfig(out=tmp_path, **SMALL), lambda _: None)


def test_the_default_language_is_that_of_the_demo():
    config = CapacityToolConfig()
    assert config.widths == (2, 4, 8, 16, 32, 64)
    assert capacity.open_distributions(config.target).log_p_NV.shape == (400, 200)


def test_heads_are_named_as_compare_names_them():
    config = CapacityToolConfig(heads=("mos", "gss-0.2", "shifted-sigsoftmax-per-class", "mos(K=4)"))
    assert config.capacity().heads == ("mos(K=4)", "gss(k=0.2)", "shifted_sigsoftmax(b=per_class)")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": ("mos(K=2, latent=linear)",)}, r"latent and prior cannot be chosen here, where no layer makes them"),
        ({"starts": 0}, r"starts must be a positive integer, got 0"),
        ({"seed": -1}, r"seed must not be negative, got -1"),
        ({"weights": "even"}, r"weights must be one of 'uniform', 'stationary', got 'even'"),
        ({"widths": ()}, r"widths must be at least one positive number"),
        ({"heads": ("sofmax",)}, r"unknown output function 'sofmax'"),
        ({"iterations": -1}, r"a budget needs iterations >= 0"),
        ({"workers": 0}, r"workers must be a positive integer"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        CapacityToolConfig(**changes)


def test_an_output_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"is a file; choose another with --out"):
        CapacityToolConfig(out=tmp_path / "file")
