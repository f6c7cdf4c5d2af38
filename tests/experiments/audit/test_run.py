"""The audit from end to end on small things: what it says, records, refuses, and keeps when it is interrupted."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from tests.experiments.tiny_models import save_model, save_tokenizer

from sigsoftmax.experiments.audit import run as audit
from sigsoftmax.experiments.audit.run import AuditConfig, run
from sigsoftmax.records import read
from sigsoftmax.records.schemas.audits import Audit
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.synthetic import Language

GENERATOR = np.random.default_rng(0)
H, W, B = (GENERATOR.standard_normal(shape).astype("f4") for shape in ((80, 4), (50, 4), (50,)))
LOG_P = torch.log_softmax(torch.from_numpy(H @ W.T + B).double(), -1)
QUICK = {"iterations": 15, "starts": 2, "workers": 1, "argmax_words": 20, "heads": ("sigsoftmax",)}


@pytest.fixture
def arrays(tmp_path):
    np.savez(tmp_path / "a.npz", H=H, W=W, b=B)
    return str(tmp_path / "a.npz")


def audited(model: str, tmp_path, **changes) -> tuple[Audit, str, list[CapacityResult]]:
    config = AuditConfig(model=model, out=tmp_path / "out", **{**QUICK, **changes})
    said: list[str] = []
    found = run(config, said.append)
    records = list(read(config.records))
    assert repr(found) in [repr(record.payload_as(Audit)) for record in records if record.kind == Audit.KIND]
    fits = [record.payload_as(CapacityResult) for record in records if record.kind == CapacityResult.KIND]
    return found, " ".join("\n".join(said).split()), fits


def test_arrays_without_a_target(arrays, tmp_path):
    found, said, fits = audited(arrays, tmp_path)
    assert (found.contexts, found.layer.words, found.layer.width, found.layer.has_bias) == (80, 50, 4, True)
    assert found.bounds.lower == found.bounds.upper == found.spectrum.press32_rank == 6
    assert found.target is None
    assert fits == []
    assert "Auditing" in said
    assert re.search(r"This takes (about|less than) [\d.]+ s", said)
    assert "cannot be known from the model alone" in said
    assert not found.was_interrupted


def test_a_collapsed_sigsoftmax_is_seen(tmp_path):
    np.savez(tmp_path / "a.npz", H=H, W=W, b=B + 50.0)
    found, said, _ = audited(str(tmp_path / "a.npz"), tmp_path, function="sigsoftmax")
    assert found.layer.head == "sigsoftmax"
    assert found.bend.kl_to_nearest_softmax < 1e-6
    assert "sigsoftmax has collapsed to softmax" in said


def test_bf16_that_was_stored_as_float32_is_warned_of(tmp_path):
    np.save(tmp_path / "p.npy", LOG_P.bfloat16().float().numpy())
    found, said, _ = audited(str(tmp_path / "p.npy"), tmp_path)
    assert "The entries have the precision of bfloat16" in said
    assert "press32 not counted: below the noise floor" in said
    assert found.spectrum.precision == "bfloat16"


@pytest.mark.parametrize("as_probabilities", [False, True])
def test_given_distributions_are_compared_row_by_row(arrays, tmp_path, as_probabilities):
    truth = Language.of_rank(contexts=80, words=50, rank=20, seed=3).log_p_NV
    np.save(tmp_path / "t.npy", (truth.exp() if as_probabilities else truth).numpy())
    found, said, fits = audited(arrays, tmp_path, target=str(tmp_path / "t.npy"), contexts=60)
    rows = audit.sample_rows(80, 60, 0)
    expected = (truth[rows].exp() * (truth[rows] - LOG_P[rows])).sum(1).mean()
    assert found.target.model_kl == pytest.approx(float(expected), rel=1e-4)
    kls = {(head.head, head.width): head.kl for head in found.target.heads}
    assert kls["sigsoftmax", 4] <= kls["softmax", 4]
    assert {(fit.head, fit.width) for fit in fits} == set(kls)
    assert "The model misses it by" in said
    assert not found.target.is_lower_bound


def test_some_words_of_a_target_are_a_lower_bound(arrays, tmp_path):
    truth = Language.of_rank(contexts=80, words=50, rank=20, seed=3).log_p_NV
    np.save(tmp_path / "t.npy", truth.numpy())
    found, said, _ = audited(arrays, tmp_path, target=str(tmp_path / "t.npy"), fit_words=25, fit_contexts=40)
    assert (found.target.words, found.target.contexts, found.target.all_words) == (25, 40, 50)
    assert found.target.is_lower_bound
    assert 0.0 < found.target.mass < 1.0
    assert "over all tokens the least KL is no smaller" in said


def test_a_language_as_the_target(arrays, tmp_path):
    found, said, _ = audited(arrays, tmp_path, target="of_rank(contexts=80, words=50, rank=10)")
    assert found.target.model_kl is None
    assert "a language (generic log P of rank 10" in said


def test_a_width_that_does_not_bind(arrays, tmp_path):
    found, _, _ = audited(arrays, tmp_path, target="of_rank(contexts=5, words=50, rank=3)")
    assert {head.width for head in found.target.heads if head.head != "softmax"} == {1}
    assert any("At the layer's width 4 a softmax makes any distributions" in note for note in found.notes)


def test_a_matrix_alone(tmp_path):
    np.save(tmp_path / "p.npy", LOG_P.numpy())
    found, said, _ = audited(str(tmp_path / "p.npy"), tmp_path, contexts=70)
    assert found.layer.width is None
    assert found.spectrum.press32_rank == 6
    assert "70 of 80 drawn at random" in said


def test_bounds_only(arrays, tmp_path):
    found, said, _ = audited(arrays, tmp_path, bounds_only=True)
    assert found.bounds.lower == found.bounds.upper == 6
    assert (found.spectrum, found.argmax) == (None, None)
    assert "the output layer alone" in said
    np.save(tmp_path / "p.npy", LOG_P.numpy())
    with pytest.raises(ValueError, match=r"--bounds-only needs an output layer"):
        audited(str(tmp_path / "p.npy"), tmp_path, bounds_only=True)


@pytest.mark.parametrize("bounds_only", [True, False])
def test_a_file_with_an_output_matrix_alone(tmp_path, bounds_only):
    pytest.importorskip("safetensors.numpy").save_file({"lm_head.weight": W}, tmp_path / "head.safetensors")
    found, said, _ = audited(str(tmp_path / "head.safetensors"), tmp_path, bounds_only=bounds_only)
    assert (found.bounds.lower, found.bounds.upper) == (5, 5)
    assert "256 Gaussian vectors" in found.bounds.source
    assert found.contexts == 0
    assert found.spectrum is found.truncation is found.bend is found.gradient is None
    assert (
        "Only an output matrix was given: spectrum, directions, nonlinearity and gradient are those of hidden" in said
    )
    assert "Store these beside it as H" in said
    assert "the output layer alone" in said
    if bounds_only:
        assert found.argmax is None
    else:
        assert found.argmax.in_question == 20


def test_an_output_matrix_alone_against_a_target(tmp_path):
    pytest.importorskip("safetensors.numpy").save_file({"lm_head.weight": W}, tmp_path / "head.safetensors")
    np.save(tmp_path / "p.npy", LOG_P.numpy())
    found, _, fits = audited(
        str(tmp_path / "head.safetensors"), tmp_path, target=str(tmp_path / "p.npy"), heads=("mos(K=2)",)
    )
    assert found.target.model_kl is None
    assert {(fit.head, fit.width) for fit in fits} >= {("softmax", 4), ("mos(K=2)", 4)}


def test_heads_are_named_as_compare_names_them(arrays, tmp_path):
    np.save(tmp_path / "p.npy", LOG_P.numpy())
    changes = {"target": str(tmp_path / "p.npy"), "heads": ("mos", "moss-2", "gss-0", "gss(k=0)")}
    found, _, fits = audited(arrays, tmp_path, **changes)
    # Those that the heads contain are fitted, too.
    contained = {"softmax", "sigsoftmax", "mos(K=2)"}
    assert {fit.head for fit in fits} == {"mos(K=4)", "moss(K=2)", "gss(k=0.0)"} | contained
    assert {head.head for head in found.target.heads} == {fit.head for fit in fits}


def test_a_mixture_in_arrays(tmp_path):
    hidden, prior = (GENERATOR.standard_normal(shape).astype("f4") for shape in ((80, 3, 4), (80, 3)))
    np.savez(tmp_path / "a.npz", H=hidden, W=W, prior=prior)
    np.save(tmp_path / "p.npy", LOG_P.numpy())
    options = {"target": str(tmp_path / "p.npy"), "function": "mos(K=3, prior=sigsoftmax)", "heads": ("softmax",)}
    found, said, fits = audited(str(tmp_path / "a.npz"), tmp_path, **options)
    assert (found.layer.head, found.layer.components) == ("mos(K=3)", 3)
    assert {fit.head for fit in fits} >= {"softmax", "mos(K=3)"}
    assert found.target.model_kl > 0.0
    assert "the head is a mixture, and theory knows no other bound" in said
    assert "has collapsed" not in said
    assert "The components of MoS(K=3) are softmaxes" in said


def test_a_hugging_face_model_and_its_teacher(tmp_path):
    model, teacher = (save_model("llama", tmp_path / name, seed=seed) for seed, name in enumerate(("m", "t")))
    found, said, _ = audited(
        str(model), tmp_path, teacher=str(teacher), contexts=50, fit_contexts=30, window=20, widths=(3,)
    )
    assert found.layer.head == "softmax"
    assert found.target.model_kl > 0.0
    assert f"the teacher {teacher}" in said
    same, _, _ = audited(str(model), tmp_path, teacher=str(model), contexts=50, fit_contexts=30, window=20, widths=(3,))
    assert same.target.model_kl == pytest.approx(0.0, abs=1e-9)
    other = save_model("llama", tmp_path / "other", vocab_size=70)
    with pytest.raises(ValueError, match=r"has 70 tokens and .* has 60; a teacher must speak the same tokens"):
        audited(str(model), tmp_path, teacher=str(other), contexts=50)
    bounds, _, _ = audited(str(model), tmp_path, bounds_only=True)
    assert bounds.bounds.upper == 9


def test_a_text_with_fewer_contexts_than_asked_for(tmp_path):
    from tests.experiments.tiny_models import save_tokenizer

    folder = save_model("llama", tmp_path / "m")
    save_tokenizer(folder, ("the", "cat"))
    (tmp_path / "text").write_text("the cat the cat the")
    found, _, _ = audited(str(folder), tmp_path, text=tmp_path / "text", contexts=300)
    assert found.contexts == 5
    assert any("The text has 5 contexts, fewer than the 300 asked for" in note for note in found.notes)


def test_an_interrupt_keeps_what_is_valid(arrays, tmp_path, monkeypatch):
    config = AuditConfig(model=arrays, out=tmp_path / "out", target="of_rank(contexts=30, words=20, rank=9)", **QUICK)
    said: list[str] = []

    def progress(text: str) -> None:
        if text.startswith("fitted 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, said.append, progress)
    first, *others = read(config.records)
    found = first.payload_as(Audit)
    assert found.was_interrupted
    assert found.spectrum is not None
    assert found.target is not None
    assert len(others) == 2
    assert found.notes[-1] == "Interrupted; not finished: the comparison with the target."
    assert "Audit of" in "\n".join(said)


def test_an_interrupt_before_anything_was_measured(arrays, tmp_path):
    config = AuditConfig(model=arrays, out=tmp_path / "out", **QUICK)

    def progress(text: str) -> None:
        if text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, lambda _: None, progress)
    (record,) = read(config.records)
    found = record.payload_as(Audit)
    assert found.was_interrupted
    assert found.spectrum is None
    assert found.meaning


def test_an_interrupted_audit_does_not_replace_a_whole_one(arrays, tmp_path):
    config = AuditConfig(model=arrays, out=tmp_path / "out", bounds_only=True, **QUICK)
    run(config, lambda _: None)
    said: list[str] = []

    def progress(text: str) -> None:
        if text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, said.append, progress)
    assert "Stopped after" in said[-1]
    assert [record.payload_as(Audit).was_interrupted for record in read(config.records)] == [False, True]
    run(config, lambda _: None)
    assert [record.payload_as(Audit).was_interrupted for record in read(config.records)] == [False]


def test_an_audit_of_less_does_not_replace_one_of_more(arrays, tmp_path):
    config = AuditConfig(model=arrays, out=tmp_path / "out", target="of_rank(contexts=30, words=20, rank=9)", **QUICK)
    whole = run(config, lambda _: None)
    fits = len(list(read(config.records))) - 1
    less = dataclasses.replace(config, target=None)
    run(dataclasses.replace(less, bounds_only=True), lambda _: None)
    run(less, lambda _: None)
    audits = [record.payload_as(Audit) for record in read(config.records) if record.kind == Audit.KIND]
    # What was asked for last holds the bounds that were asked for before.
    assert [(found.target is not None, found.spectrum is not None) for found in audits] == [(True, True), (False, True)]
    # Fewer heads: those that are not fitted now are not lost, and one that is measured again is there once.
    run(dataclasses.replace(config, heads=("softmax",)), lambda _: None)
    assert next(read(config.records)).payload_as(Audit) == whole
    assert len([record for record in read(config.records) if record.kind == CapacityResult.KIND]) == fits
    # The whole of it once more holds all that the others do.
    again = run(config, lambda _: None)
    (record,) = (record for record in read(config.records) if record.kind == Audit.KIND)
    assert record.payload_as(Audit) == again


def test_audits_on_other_texts_stand_beside_each_other(tmp_path):
    folder = save_model("llama", tmp_path / "m")
    save_tokenizer(folder, ("the", "cat"))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text("the cat the cat the")
    for name in ("a", "b", "a"):
        config = AuditConfig(model=str(folder), out=tmp_path / "out", text=tmp_path / name / "text", **QUICK)
        run(config, lambda _: None)
    texts = [record.payload_as(Audit).contexts_from.partition(",")[0] for record in read(config.records)]
    assert texts == [f"the text {tmp_path / name / 'text'}" for name in ("a", "b")]


def test_a_target_that_goes_wrong_takes_nothing_with_it(arrays, tmp_path):
    truth = Language.of_rank(contexts=80, words=50, rank=20, seed=3).log_p_NV.numpy().copy()
    truth[30, 7] = np.nan
    np.save(tmp_path / "t.npy", truth)
    config = AuditConfig(model=arrays, out=tmp_path / "out", target=str(tmp_path / "t.npy"), **QUICK)
    said: list[str] = []
    with pytest.raises(ValueError, match="NaN at row 30, column 7"):
        run(config, said.append)
    (record,) = read(config.records)
    found = record.payload_as(Audit)
    assert found.spectrum is not None
    assert found.argmax is not None
    assert found.notes[-1].startswith("Stopped by an error (")
    assert found.notes[-1].endswith("not finished: the comparison with the target.")
    assert "What it means" in "\n".join(said)


@pytest.mark.parametrize("target", ["of_rank(contexts=9, words=9, rank=20)", "nowhere.npy"])
def test_a_target_that_cannot_be_read_is_told_at_once(arrays, tmp_path, target):
    said: list[str] = []
    with pytest.raises(ValueError, match=r"rank must be between|nowhere.npy"):
        run(AuditConfig(model=arrays, out=tmp_path / "out", target=target, **QUICK), said.append)
    assert said == []


def test_bounds_take_more_contexts_than_the_memory_holds_log_p_of(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", H=np.tile(H, (4, 1)), W=W, b=B)
    monkeypatch.setattr(audit, "contexts_within", lambda *_, **__: 100)
    found, said, _ = audited(str(tmp_path / "a.npz"), tmp_path)
    assert (found.contexts, found.spectrum.contexts, found.bounds.contexts) == (100, 100, 256)
    assert "log-probabilities in more of the contexts" in said


def test_records_are_named_after_the_model_and_replaced(arrays, tmp_path):
    assert AuditConfig(model="org/model-7B").records.name == "org-model-7B.jsonl"
    assert AuditConfig(model="./runs/x/").records.name == "runs-x.jsonl"
    for _ in range(2):
        audited(arrays, tmp_path, bounds_only=True)
    assert len(list(read(AuditConfig(model=arrays, out=tmp_path / "out").records))) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": " "}, r"name something to audit"),
        ({"teacher": "a", "target": "b"}, r"either --teacher or --target"),
        ({"bounds_only": True, "target": "b"}, r"--bounds-only looks at the output layer alone"),
        ({"memory_gib": 0.001}, r"--memory is in GiB and must be at least 0.0625, got 0.001"),
        ({"memory_gib": float("nan")}, r"--memory is in GiB|cannot convert"),
        ({"contexts": 0}, r"contexts must be at least 1, got 0"),
        ({"window": 1}, r"window must be at least 2, got 1"),
        ({"starts": 0}, r"starts must be at least 1, got 0"),
        ({"seed": -1}, r"seed must be at least 0, got -1"),
        ({"fit_words": 1}, r"fit_words must be at least 2, got 1"),
        ({"widths": (0,)}, r"widths must be positive, got 0"),
        ({"heads": ("sofmax",)}, r"unknown output function 'sofmax'"),
        ({"function": "sofmax"}, r"unknown output function 'sofmax'"),
        ({"device": "nowhere"}, r"device"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        AuditConfig(**{"model": "m", **changes})


def test_options_that_do_not_go_with_the_model(arrays, tmp_path):
    (tmp_path / "text").write_text("words")
    for changes, message in (
        ({"teacher": "x/y"}, r"--teacher is for Hugging Face models"),
        ({"text": tmp_path / "text"}, r"--text is for models that can be run"),
    ):
        with pytest.raises(ValueError, match=message):
            audited(arrays, tmp_path, **changes)
    np.save(tmp_path / "p.npy", LOG_P.numpy())
    with pytest.raises(ValueError, match=r"--function says what turns logits into probabilities"):
        audited(str(tmp_path / "p.npy"), tmp_path, function="sigsoftmax")
    with pytest.raises(ValueError, match=r"no text at nowhere"):
        AuditConfig(model="m", text=tmp_path.__class__("nowhere"))
    with pytest.raises(ValueError, match=r"is a file; choose another with --out"):
        AuditConfig(model="m", out=tmp_path / "text")


def test_the_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AuditConfig(model="m").seed = 3
