"""Files of records are kept up to date, and nothing that was measured is replaced by less."""

import dataclasses
import multiprocessing

import pytest
from tests.records import samples
from tests.report import synthetic_runs

from sigsoftmax.records import Environment, Record, append, read, store
from sigsoftmax.records.kinds import PAYLOADS
from sigsoftmax.records.schemas.audits import Audit
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.records.schemas.speed import Measurement
from sigsoftmax.records.schemas.sweeps import PairedDifferenceRecord
from sigsoftmax.records.schemas.training import EpochRecord
from sigsoftmax.records.storing import not_covered_later


def at(day: int) -> Environment:
    return samples.environment("a command", day=day)


def stored(path, day, *payloads):
    store(path, [Record.of(payload, at(day)) for payload in payloads])
    return list(read(path))


def measured(case: str, name: str, *, rounds: int = 15, milliseconds: float = 1.0) -> Measurement:
    return samples.measurement(case=case, implementation=name, baseline="a", milliseconds=milliseconds, rounds=rounds)


def paired(*seeds: int, mean: float = 0.1) -> PairedDifferenceRecord:
    return samples.paired_difference(seeds=seeds, mean=mean)


def audits() -> dict[str, Audit]:
    """A whole audit and others of the same model that found less, each in its own way."""
    whole = samples.audit(bounds=samples.rank_bounds())
    fits = whole.target.heads
    return {
        "whole": whole,
        "bounds alone": dataclasses.replace(
            whole, spectrum=None, truncation=None, bend=None, gradient=None, argmax=None, target=None
        ),
        "interrupted": dataclasses.replace(whole, argmax=None, target=None, was_interrupted=True),
        "nothing": dataclasses.replace(
            whole,
            contexts=0,
            contexts_from="",
            **dict.fromkeys(("bounds", "spectrum", "truncation", "bend", "gradient", "argmax", "target")),
        ),
        "without a target": dataclasses.replace(whole, target=None),
        "fewer heads": dataclasses.replace(whole, target=dataclasses.replace(whole.target, heads=fits[:1])),
        "fewer contexts": dataclasses.replace(
            whole, spectrum=dataclasses.replace(whole.spectrum, contexts=whole.spectrum.contexts - 1)
        ),
        "less settled": dataclasses.replace(
            whole, argmax=dataclasses.replace(whole.argmax, undecided=whole.argmax.undecided + 1)
        ),
    }


LESS = [
    *((f"audit: {name}", lambda name=name: (audits()["whole"], audits()[name])) for name in list(audits())[1:]),
    ("fit that came less far", lambda: (fit(0.1), fit(0.2))),
    ("differences of fewer seeds", lambda: (paired(1, 2, 3), paired(1, 2))),
    ("benchmark of fewer rounds", lambda: (measured("c", "a"), measured("c", "a", rounds=3))),
    ("benchmark without a peer", lambda: (measured("c", "b"), measured("c", "a"))),
]


def fit(kl: float, **changes) -> CapacityResult:
    return samples.capacity(kl=kl, fitted_kl=kl, **changes)


@pytest.mark.parametrize(("more", "less"), [make() for _, make in LESS], ids=[name for name, _ in LESS])
def test_less_stands_beside_more_and_more_replaces_less(tmp_path, more, less):
    after = stored(tmp_path / "a.jsonl", 1, more), stored(tmp_path / "a.jsonl", 2, less)
    assert [record.payload_as(type(more)) for record in after[1]] == [more, less]
    first = stored(tmp_path / "b.jsonl", 1, less)
    assert len(first) == 1
    covers_less = set(less.extent) <= set(more.extent)
    last = [record.payload_as(type(more)) for record in stored(tmp_path / "b.jsonl", 2, more)]
    assert last == ([more] if covers_less else [less, more])


@pytest.mark.parametrize("kind", sorted(PAYLOADS))
def test_what_is_measured_again_is_there_once(tmp_path, kind):
    made = [
        *synthetic_runs.training(epochs=2),
        *synthetic_runs.comparisons(),
        *synthetic_runs.audits(),
        *synthetic_runs.capacities(),
        *synthetic_runs.measurements(),
        *synthetic_runs.model_spectra(),
        *synthetic_runs.rank_bounds(),
        *(paired(1, 2, 3), samples.trial(), samples.classifier(), samples.spectrum("a matrix", 20)),
    ]
    payloads = [payload for payload in made if kind == payload.KIND]
    assert payloads
    stored(tmp_path / "a.jsonl", 1, *payloads)
    again = stored(tmp_path / "a.jsonl", 2, *payloads)
    assert [record.payload for record in again] == [Record.of(payload).payload for payload in payloads]
    assert {record.environment for record in again} == {at(2)}


def test_a_measurement_that_is_made_again_keeps_its_place(tmp_path):
    path = tmp_path / "gpu.jsonl"
    for case in ("first", "second", "third"):
        stored(path, 1, measured(case, "a"), measured(case, "b"))
    found = stored(path, 2, measured("second", "a"), measured("second", "b"), measured("second", "c"))
    assert [(r.payload["case"], r.payload["implementation"]) for r in found] == [
        *(("first", name) for name in "ab"),
        *(("second", name) for name in "abc"),
        *(("third", name) for name in "ab"),
    ]


def test_a_run_of_a_benchmark_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    """Times compare within one run alone: a peer of one run must not stand among the times of another."""
    path = tmp_path / "gpu.jsonl"
    stored(path, 1, measured("case", "a"), measured("case", "peer"))
    found = stored(path, 2, measured("case", "a", milliseconds=2.0))
    assert [(r.payload["implementation"], r.environment.time_utc[:10]) for r in found] == [
        ("a", "2026-01-01"),
        ("peer", "2026-01-01"),
        ("a", "2026-01-02"),
    ]


def test_what_is_measured_again_in_the_same_second_replaces_its_predecessor_alone(tmp_path):
    """Audits of one model on different texts have one subject and other parts: they are measurements of their own."""
    first = audits()["without a target"]
    second = dataclasses.replace(first, contexts_from="another text")
    again = dataclasses.replace(first, seconds=99.0)
    for payloads in ((first,), (second,), (again,)):
        found = stored(tmp_path / "a.jsonl", 1, *payloads)
    assert [record.payload_as(Audit) for record in found] == [again, second]
    assert not_covered_later([(payload, at(1)) for payload in (first, second, again)]) == [1, 2]


def test_other_subjects_stay(tmp_path):
    path = tmp_path / "a.jsonl"
    others = [fit(0.1, width=3), fit(0.1, seed=9), fit(0.1, truth="another"), paired(1)]
    stored(path, 1, *others)
    assert len(stored(path, 2, fit(0.1))) == len(others) + 1


def test_lines_that_cannot_be_read_are_nobodys_to_remove(tmp_path):
    path = tmp_path / "a.jsonl"
    append(path, Record.of(fit(0.2), at(1)))
    later = Record.of(fit(0.3), at(1)).to_json().replace('"version": 2', '"version": 99')
    torn, unknown = b'{"schema": 1, "kind": "capac', b'{"schema": 1, "kind": "of another program"}'
    damaged = b'{"schema": 1, "kind": "capacity", "version": 1, "environment": {}, "payload": {"x": "\xff"}}'
    with path.open("ab") as file:
        file.write(b"\n".join([torn, unknown, damaged, later.encode()]))
    store(path, Record.of(fit(0.1), at(2)))
    first, *rest = path.read_bytes().splitlines()
    assert Record.from_json(first.decode()).payload_as(CapacityResult) == fit(0.1)
    assert rest == [torn, unknown, damaged, later.encode()]


def _store_some(path, which, start):
    start.wait()
    for number in range(10):
        store(path, Record.of(paired(1, mean=float(which * 10 + number)), at(1)))
        store(path, Record.of(fit(0.1, width=which * 10 + number), at(1)))


def test_processes_that_store_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    start, path = context.Barrier(2), tmp_path / "a.jsonl"
    processes = [context.Process(target=_store_some, args=(path, which, start)) for which in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    widths = sorted(r.payload["width"] for r in read(path) if r.kind == CapacityResult.KIND)
    assert widths == list(range(20))


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    stored(path, 1, fit(0.2))
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sigsoftmax.records.atomic_write.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store(path, Record.of(fit(0.1)))
    assert path.read_bytes() == before
    assert {found.name for found in tmp_path.iterdir()} == {"a.jsonl", ".records.lock"}


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_later_measurement_counts_unless_it_is_of_less():
    entries = [(paired(1, 2, 3), at(1)), (paired(1, 2), at(2)), (fit(0.1), at(2)), (fit(0.1), at(1))]
    assert not_covered_later(entries) == [0, 1, 2]


def test_the_same_second_counts_in_order():
    epochs = [p for p in synthetic_runs.training(epochs=1) if isinstance(p, EpochRecord)][:1]
    again = dataclasses.replace(epochs[0], valid_loss=1.0)
    assert not_covered_later([(epochs[0], at(1)), (again, at(1))]) == [1]
