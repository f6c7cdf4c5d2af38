"""Checkpoints of runs: their hidden vectors make the model's own output, and a known language is their target."""

import dataclasses

import pytest
import torch

from sigsoftmax.experiments.audit.checkpoints import open_checkpoint
from sigsoftmax.experiments.audit.run import AuditConfig, run
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.data.windows import batchify
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.recipes import recipe
from sigsoftmax.lm.saving import checkpoints
from sigsoftmax.lm.saving.saved_models import saved_meta
from sigsoftmax.records.schemas.training import RunIdentity


def quiet(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.load("language")


def saved(folder, corpus, head="softmax", corpus_name="language", model=None):
    """An untrained model in a checkpoint, as a run would store it."""
    base = recipe("language-softmax")
    model_config = dataclasses.replace(base.model, head=head, embedding=6, hidden=(10, 6))
    small = dataclasses.replace(base, model=model_config, corpus=corpus_name)
    if model is None:
        model = LanguageModel(small.model, len(corpus.words), seed=1)
        with torch.no_grad():
            model.embedding.mul_(20.0)
    identity = RunIdentity(
        recipe=small.name,
        phase="train",
        head=head,
        corpus=corpus.name,
        corpus_checksum=corpus.checksum,
        seed=1,
        precision="float32",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    meta = saved_meta(small, identity, corpus, epoch=3, valid_loss=1.0)
    checkpoints.save(folder / "train" / "best.safetensors", dict(model.named_parameters()), meta)
    return folder, model


@pytest.mark.parametrize("head", ["softmax", "gss(k=learned:0.5)", "shifted_sigsoftmax(b=per_class)", "moss(K=3)"])
def test_the_output_is_the_models(tmp_path, corpus, head):
    folder, model = saved(tmp_path, corpus, head)
    source = open_checkpoint(str(folder))
    contexts = source.contexts(300, quiet)
    assert len(contexts) == 300
    text_R1 = batchify(corpus.test[:301], 1)
    with torch.no_grad():
        expected = model.log_probs(model.features(text_R1[:-1], model.zero_state(1)))[:, 0].double()
    torch.testing.assert_close(source.layer.log_probs(contexts), expected, rtol=0, atol=1e-4)
    assert torch.equal(contexts.next_tokens_N, corpus.test[1:301])
    assert source.layer.head_text == head
    assert "after epoch 3" in source.how_known


@pytest.mark.parametrize("head", ["moss(K=3, latent=linear)", "mos(K=2, latent=residual, prior=sigsoftmax)"])
def test_latent_vectors_and_priors_of_other_kinds(tmp_path, corpus, head):
    folder, model = saved(tmp_path, corpus, head)
    with torch.no_grad():
        model.output.latent.weight.normal_()
        model.output.prior.weight.normal_()
    saved(tmp_path, corpus, head, model=model)
    source = open_checkpoint(str(folder))
    text_R1 = batchify(corpus.test[:101], 1)
    with torch.no_grad():
        expected = model.log_probs(model.features(text_R1[:-1], model.zero_state(1)))[:, 0].double()
    torch.testing.assert_close(source.layer.log_probs(source.contexts(100, quiet)), expected, rtol=0, atol=1e-4)
    assert source.layer.head_text == head.partition(",")[0] + ")"
    assert head in source.how_known


def test_the_truth_of_a_language_belongs_to_its_positions(tmp_path, corpus):
    source = open_checkpoint(str(saved(tmp_path, corpus)[0]))
    truth = source.truth(4000)
    following = corpus.test[1:4001]
    loss = -truth.gather(1, following[:, None]).mean()
    assert float(loss) == pytest.approx(corpus.language.entropy_rate, rel=0.05)


def test_an_audit_of_a_checkpoint_is_measured_in_nats(tmp_path, corpus):
    folder, _ = saved(tmp_path / "run", corpus)
    said: list[str] = []
    config = AuditConfig(
        model=str(folder),
        out=tmp_path / "out",
        contexts=200,
        heads=("softmax",),
        starts=1,
        iterations=5,
        workers=1,
        argmax_words=0,
    )
    found = run(config, said.append)
    assert found.target.target == "the language that the text was drawn from"
    assert found.target.model_kl > 0.5
    assert "the test text of 'language'" in found.contexts_from


def test_a_text_in_the_models_words(tmp_path, corpus):
    folder, _ = saved(tmp_path, corpus)
    text = tmp_path / "text"
    text.write_text(" ".join(corpus.words[:9]))
    with pytest.raises(ValueError, match=r"'<eos>' is not among the"):
        open_checkpoint(str(folder), text=text)


def test_words_that_the_model_does_not_know(tmp_path):
    words = tmp_path / "words"
    words.mkdir()
    for split in ("train", "valid", "test"):
        (words / f"{split}.txt").write_text("a b <unk> c\n" * 9)
    corpus = Corpus.load(words)
    folder, _ = saved(tmp_path / "run", corpus, corpus_name=str(words))
    text = tmp_path / "text"
    text.write_text("a zebra b\nc\n")
    source = open_checkpoint(str(folder), text=text)
    assert source.available == 5
    assert source.truth is None
    assert source.notes == ("1 of 6 words are not among the model's, and became <unk>.",)
    text.write_text("")
    with pytest.raises(ValueError, match=r"empty; expected text"):
        open_checkpoint(str(folder), text=text)


def test_what_cannot_be_opened(tmp_path, corpus):
    with pytest.raises(ValueError, match=r"no trained model at"):
        open_checkpoint(str(tmp_path))
    folder, _ = saved(tmp_path, corpus)
    best = folder / "train" / "best.safetensors"
    best.write_bytes(best.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"best.safetensors"):
        open_checkpoint(str(folder))
    with pytest.raises(ValueError, match=r"--function is not for checkpoints"):
        run(AuditConfig(model=str(folder), function="softmax", out=tmp_path / "out"), quiet)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A run on the text of a folder that the audit is not told of by the recipe, and that folder."""
    monkeypatch.setenv("SIGSOFTMAX_DATA", str(tmp_path / "nowhere"))
    data = tmp_path / "texts"
    data.mkdir()
    for split in ("train", "valid", "test"):
        (data / f"{split}.txt").write_text("a b c d e f g h <unk>\n" * 40)
    text = Corpus.load("ptb", data)
    folder, _ = saved(tmp_path / "run", text, corpus_name="ptb")
    return folder, data


def test_the_text_of_a_run_is_found_where_it_is_said_to_lie(tmp_path, elsewhere):
    folder, data = elsewhere
    found = run(AuditConfig(model=str(folder), data=data, contexts=50, out=tmp_path / "out"), quiet)
    assert found.contexts == 50
    with pytest.raises(ValueError, match=r"say where it is with --data FOLDER .*\. Or name a text .* with --text"):
        run(AuditConfig(model=str(folder), out=tmp_path / "other"), quiet)


def test_bounds_alone_need_no_text(tmp_path, elsewhere):
    folder, data = elsewhere
    found = run(AuditConfig(model=str(folder), bounds_only=True, out=tmp_path / "out"), quiet)
    assert found.spectrum is None
    # Width 6 and the normaliser: the bias of a model that was not trained is zero.
    assert (found.bounds.lower, found.bounds.upper) == (7, 7)
    with pytest.raises(ValueError, match=r"the output layer alone; leave out --text, --data"):
        AuditConfig(model=str(folder), bounds_only=True, data=data)
    with pytest.raises(ValueError, match=r"either --text or --data, not both"):
        AuditConfig(model=str(folder), text=data / "test.txt", data=data)
    with pytest.raises(ValueError, match=r"--data is for checkpoints of runs"):
        run(AuditConfig(model="gpt2", data=data, out=tmp_path / "out"), quiet)
