"""Tables of the reproduction: controls beside sigsoftmax, ranks beside thresholds and losses."""

import math
from pathlib import Path

import write_reproduction
from write_reproduction import CONTROL_EPOCH, CONTROL_SEEDS, Records

from sigsoftmax.records import Payload, Record, append
from sigsoftmax.records.schemas.model_spectra import ModelSpectrum
from sigsoftmax.records.schemas.spectra import Spectrum
from sigsoftmax.records.schemas.training import EpochRecord, RunIdentity


def identity(recipe: str, seed: int) -> RunIdentity:
    return RunIdentity(
        recipe=recipe,
        phase="train",
        head=recipe.removeprefix("ptb-"),
        corpus="ptb",
        corpus_checksum="",
        seed=seed,
        precision="bf16",
        parameters=1,
    )


def epoch(
    recipe: str, seed: int, perplexity: float, number: int = CONTROL_EPOCH, recurrence: str = "persistent kernels"
) -> EpochRecord:
    loss = math.log(perplexity)
    return EpochRecord(
        run=identity(recipe, seed),
        epoch=number,
        optimizer="sgd",
        updates=1,
        train_loss=loss,
        train_loss_parts=(),
        valid_loss=loss,
        valid_loss_over_rows=loss,
        recurrence=recurrence,
        is_best=True,
        seconds_training=1.0,
        seconds_validation=1.0,
    )


def read(folder: Path, *payloads: Payload) -> Records:
    append(folder / "ptb.jsonl", [Record.of(payload) for payload in payloads])
    return Records(folder)


def row_of(text: str, beginning: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {beginning}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_controls_are_paired_by_seed_and_missing_ones_say_so(tmp_path: Path) -> None:
    softmax = [epoch("ptb-softmax", seed, 80.0 + place) for place, seed in enumerate(CONTROL_SEEDS)]
    ahead = [epoch("ptb-sigsoftmax", seed, (80.0 + place) / 1.02) for place, seed in enumerate(CONTROL_SEEDS)]
    early = epoch("ptb-gss-0", CONTROL_SEEDS[0], 300.0, number=1)
    text = write_reproduction.controls(read(tmp_path, *softmax, *ahead, early))
    assert row_of(text, "softmax |")[1:6] == ["persistent", "80.00", "81.00", "82.00", "81.00"]
    # The same ratio with every seed: the difference of losses does not vary.
    assert row_of(text, "sigsoftmax")[-1] == "-0.0198 (-0.0198 to -0.0198)"
    assert row_of(text, "softmax(alpha=1.5)")[2:5] == ["no run"] * 3
    # A run that has not come so far does not count.
    assert row_of(text, "gss(k=0)")[2:5] == ["no run"] * 3


def test_a_single_pair_has_no_interval(tmp_path: Path) -> None:
    seed = CONTROL_SEEDS[0]
    text = write_reproduction.controls(read(tmp_path, epoch("ptb-softmax", seed, 80.0), epoch("ptb-gss-0", seed, 82.0)))
    assert row_of(text, "gss(k=0)")[-1] == "+0.0247 (1 seed: no interval)"


def test_whole_runs_pass_the_gate_for_themselves(tmp_path: Path) -> None:
    """They have the recipe, the seed and the arithmetic of a short run, and neither replaces the other."""
    (tmp_path / "paper").mkdir()
    read(tmp_path / "paper", epoch("ptb-softmax", 141, 95.04, number=8))
    records = read(tmp_path, epoch("ptb-softmax", 141, 105.6, number=8))
    text = write_reproduction.stage_gate(records)
    assert row_of(text, "epoch")[2:] == ["bf16, persistent, seed 141", "whole run, seed 141"]
    assert row_of(text, "8 |")[2:] == ["105.6 (-0.0%)", "95.0 (-10.0%)"]
    assert row_of(text, "largest")[2:] == ["-0.0%: within 4%", "-10.0%: outside 4%"]


def test_no_rank_stands_alone(tmp_path: Path) -> None:
    spectrum = Spectrum(
        source="a model",
        words=10,
        contexts=20,
        singular_values=tuple(10.0**-place for place in range(10)),
        dtype="float32",
        value_error=1e-8,
    )
    model = ModelSpectrum(run=identity("ptb-softmax", 141), split="test", spectrum=spectrum)
    text = write_reproduction.ranks(read(tmp_path, epoch("ptb-softmax", 141, 80.0), model))
    header = row_of(text, "model")
    cells = dict(zip(header, row_of(text, "ptb-softmax, seed 141"), strict=True))
    assert cells["valid loss in nats (perplexity)"] == "4.382 (80.0)"
    # By the threshold: 3.3e-7, 2.4e-6, 4.4e-15 and the noise floor of 2e-8, relative to the largest.
    assert (cells["press32"], cells["numpy32"], cells["noise"]) == ("7", "6", "8")
    assert cells["numpy64"] == "below noise"
    assert cells["noise floor / largest"] == "2.0e-08"


def test_heads_are_compared_within_one_arithmetic(tmp_path: Path) -> None:
    seed = CONTROL_SEEDS[0]
    older = [epoch(recipe, seed, 80.0, recurrence="") for recipe in ("ptb-softmax", "ptb-sigsoftmax")]
    text = write_reproduction.controls(read(tmp_path, *older, epoch("ptb-softmax", seed, 70.0)))
    rows = [row_of(line, "") for line in text.splitlines()[2:]]
    assert [(row[1], row[2]) for row in rows if row[0] == "softmax"] == [("torch's", "80.00"), ("persistent", "70.00")]
    assert [(row[1], row[2], row[-1]) for row in rows if row[0] == "sigsoftmax"] == [
        ("torch's", "80.00", "+0.0000 (1 seed: no interval)"),
        ("persistent", "no run", ""),
    ]


def test_the_first_epochs_of_whole_runs_stand_in_for_short_ones(tmp_path: Path) -> None:
    first, second, _ = CONTROL_SEEDS
    (tmp_path / "paper").mkdir()
    read(
        tmp_path / "paper",
        *(epoch("ptb-softmax", seed, 90.0) for seed in (first, second)),
        epoch("ptb-sigsoftmax", first, 79.0),
        epoch("ptb-sigsoftmax", second, 79.0, recurrence=""),
    )
    records = read(tmp_path, epoch("ptb-softmax", first, 80.0))
    text = write_reproduction.controls(records)
    rows = {(row[0], row[1]): row[2:5] for row in (row_of(line, "") for line in text.splitlines()[2:])}
    # A short run that is on record is shown; a whole run of other LSTM kernels is not mixed with these.
    assert rows["softmax", "persistent"] == ["80.00", "90.00", "no run"]
    assert rows["sigsoftmax", "persistent"] == ["79.00", "no run", "no run"]
    assert rows["sigsoftmax", "torch's"] == ["no run", "79.00", "no run"]
