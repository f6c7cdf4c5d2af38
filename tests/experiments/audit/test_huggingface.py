"""Hugging Face models: their output layer and function, their hidden vectors, and models that cannot be audited."""

import json
import sys
import warnings

import pytest
import torch
from tests.experiments.tiny_models import WIDTH, WORDS, save_model, save_tokenizer

pytest.importorskip("transformers")

import transformers

from sigsoftmax import cli
from sigsoftmax.experiments.audit.huggingface import open_head_only, open_model
from sigsoftmax.experiments.audit.run import AuditConfig, run
from sigsoftmax.family import OutputFunction

MEMORY = 1 << 30
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def quiet(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    kinds = ("llama", "gemma2", "granite", "headless", "classifier")
    saved = {kind: save_model(kind, root / kind) for kind in kinds}
    return {**saved, "gpt2": save_model("gpt2", root / "gpt2", max_position_embeddings=32)}


@pytest.mark.parametrize(
    ("kind", "function", "scale", "words"),
    [
        ("llama", "softmax", 1.0, "no other function is applied"),
        ("gpt2", "softmax", 1.0, "no other function is applied"),
        ("gemma2", "softcap(c=4.0)", 1.0, "`final_logit_softcapping` = 4"),
        ("granite", "softmax", 1 / 3, "divided by `logits_scaling` = 3"),
    ],
)
def test_the_function_is_found_and_the_output_is_the_models(folders, kind, function, scale, words):
    opened = open_model(str(folders[kind]), memory=MEMORY)
    assert (str(opened.known.layer.function), opened.known.scale) == (function, pytest.approx(scale))
    assert words in opened.known.how_known
    assert (opened.known.layer.vocabulary, opened.known.layer.width) == (WORDS, WIDTH)

    windows = opened.windows(None, 50, window=16, seed=0)
    contexts = opened.contexts(windows, 50, quiet, batch_tokens=32)
    assert len(contexts) == 50
    assert torch.equal(contexts.next_tokens_N, windows.ids_BL[:, 1:].flatten()[:50])
    with torch.no_grad():
        logits = opened.model(input_ids=windows.ids_BL).logits[:, :-1].flatten(0, 1)[:50]
    expected = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(opened.known.layer.log_probs(contexts), expected, rtol=0, atol=1e-4)


def test_a_stated_function_is_taken_and_its_disagreement_told(folders):
    opened = open_model(str(folders["llama"]), memory=MEMORY, function="sigsoftmax")
    assert str(opened.known.layer.function) == "sigsoftmax"
    assert "stated" in opened.known.how_known
    assert "differs" in opened.known.how_known


def test_windows_fit_the_models_positions(folders):
    opened = open_model(str(folders["gpt2"]), memory=MEMORY)
    assert opened.windows(None, 100, window=1000, seed=0).ids_BL.shape[1] == 32


def test_without_a_tokenizer_tokens_are_random_and_that_is_said(folders):
    opened = open_model(str(folders["llama"]), memory=MEMORY)
    assert opened.windows("some text", 40, window=16, seed=0).description == "random tokens"
    assert any("No tokenizer lies with the model" in note for note in opened.known.notes)


def test_a_text_is_cut_into_windows_that_begin_with_the_first_token(tmp_path):
    folder = save_model("llama", tmp_path / "m")
    save_tokenizer(folder, ("the", "cat", "sat", "on", "mat"))
    opened = open_model(str(folder), memory=MEMORY)
    assert opened.known.notes == ()
    windows = opened.windows("the cat sat\non the mat\n" * 30, 20, window=6, seed=0)
    assert windows.ids_BL.shape == (4, 6)
    assert windows.ids_BL[:, 0].tolist() == [0] * 4
    assert windows.ids_BL[0].tolist() == [0, 4, 5, 6, 7, 4]
    assert windows.description == "the given text, 4 windows of 6 tokens"
    generated = opened.windows(None, 20, window=6, seed=0)
    assert "generated English text" in generated.description
    short = opened.windows("the cat", 20, window=6, seed=0)
    assert short.ids_BL.tolist() == [[0, 4, 5]]
    with pytest.raises(ValueError, match=r"the text has 0 tokens"):
        opened.windows("", 20, window=6, seed=0)


def test_a_tokenizer_of_another_model(tmp_path):
    folder = save_model("llama", tmp_path / "m", vocab_size=5)
    save_tokenizer(folder, ("the", "cat", "sat"))
    opened = open_model(str(folder), memory=MEMORY)
    windows = opened.windows("the cat sat " * 9, 20, window=6, seed=0)
    with pytest.raises(ValueError, match=r"the tokenizer makes token 6, but .* has 5 tokens"):
        opened.contexts(windows, 20, quiet)


def test_the_output_layer_alone(folders):
    for kind, function in (("llama", "softmax"), ("gemma2", "softcap(c=4.0)"), ("gpt2", "softmax")):
        source = open_head_only(str(folders[kind]))
        whole = open_model(str(folders[kind]), memory=MEMORY)
        assert torch.equal(source.layer.weight_Vd, whole.known.layer.weight_Vd)
        assert str(source.layer.function) == function
        assert "not checked" in source.how_known
        assert source.contexts is None
    stated = open_head_only(str(folders["llama"]), function="sigsoftmax")
    assert str(stated.layer.function) == "sigsoftmax"


def test_a_model_in_several_files(tmp_path):
    folder = save_model("llama", tmp_path / "m")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "parts", max_shard_size="2KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    source = open_head_only(str(tmp_path / "parts"))
    assert torch.equal(source.layer.weight_Vd, model.get_output_embeddings().weight)


@pytest.mark.parametrize("opener", [lambda name: open_model(name, memory=MEMORY), open_head_only])
def test_models_without_an_output_layer(folders, opener):
    with pytest.raises(ValueError, match=r"has no output layer"):
        opener(str(folders["headless"]))
    with pytest.raises(ValueError, match=r"is not a causal language model"):
        opener(str(folders["classifier"]))


@pytest.mark.parametrize("opener", [lambda name: open_model(name, memory=MEMORY), open_head_only])
@pytest.mark.parametrize("name", ["t5", "bert"])
def test_models_whose_contexts_are_not_those_of_a_text(tmp_path, name, opener):
    from tests.integrations.huggingface.kinds import kind

    from sigsoftmax.integrations.huggingface import apply_output_function

    apply_output_function(kind(name), "sigsoftmax").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is not a causal language model.*which AutoModelForCausalLM does not load"):
        opener(str(tmp_path))


def test_parameters_that_the_files_lack(tmp_path):
    from safetensors.torch import load_file, save_file

    bert = transformers.BertConfig(
        vocab_size=60, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    transformers.BertModel(bert).save_pretrained(tmp_path / "bert")
    # The output matrix is that of the input, which is there; what stands before it is not.
    with pytest.raises(ValueError, match=r"no whole output layer: its files lack cls\.predictions"):
        open_model(str(tmp_path / "bert"), memory=MEMORY)
    weights = save_model("llama", tmp_path / "m") / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    opened = open_model(str(tmp_path / "m"), memory=MEMORY)
    assert "The files lack 1 of the model's parameters (model.norm.weight)" in opened.known.notes[0]


def test_a_text_needs_a_tokenizer(folders):
    opened = open_model(str(folders["llama"]), memory=MEMORY)
    with pytest.raises(ValueError, match=r"--text cannot be read by .*: no tokenizer lies with it"):
        opened.with_text("some words", window=8, seed=0)


@pytest.mark.parametrize("opener", [lambda name: open_model(name, memory=MEMORY), open_head_only])
def test_a_truncated_file(tmp_path, opener):
    folder = save_model("llama", tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cannot be read.* truncated"):
        opener(str(folder))


def test_a_folder_that_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match=r"no model can be read from the folder"):
        open_model(str(tmp_path), memory=MEMORY)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    with pytest.raises(ValueError, match=r"no model can be read from the folder"):
        open_model(str(tmp_path), memory=MEMORY)


@pytest.mark.parametrize("opener", [lambda name: open_model(name, memory=MEMORY), open_head_only])
@pytest.mark.parametrize(
    "content",
    [
        '{"a":' + "[" * 100_000,
        '{"model_type": "llama", "hidden_size": "x"}',
        '{"model_type": "llama", "num_attention_heads": 0}',
        '{"model_type": 3}',
        '{"model_type": "sigsoftmax", "sigsoftmax": {"format": 1}}',
        "[]",
    ],
)
def test_a_configuration_that_holds_anything(tmp_path, opener, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"no model can be read from|is not a causal language model|has no output layer"
    ):
        opener(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no index of safetensors files"),
        ("[" * 100_000, "is no index of safetensors files"),
        ("[]", "is no index of safetensors files"),
        ('{"weight_map": []}', "is no index of safetensors files"),
        ('{"weight_map": {"lm_head.weight": 3}}', "is no index of safetensors files"),
        ('{"weight_map": {"lm_head.weight": "../../other/m.safetensors"}}', "which is no file beside it"),
    ],
)
def test_an_index_that_holds_anything(tmp_path, content, message):
    folder = save_model("llama", tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        open_head_only(str(folder))


def test_a_damaged_tokenizer(tmp_path):
    folder = save_model("llama", tmp_path / "m")
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be read"):
        open_model(str(folder), memory=MEMORY)


def test_a_model_that_is_too_large(folders):
    with pytest.raises(ValueError, match=r"billion parameters, .* more than the .* GiB of --memory; raise it, or read"):
        open_model(str(folders["llama"]), memory=2000)


def test_little_memory_loads_the_stored_dtype(tmp_path):
    folder = save_model("llama", tmp_path / "m")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    numbers = sum(p.numel() for p in model.parameters())
    opened = open_model(str(tmp_path / "half"), memory=4 * numbers)
    assert opened.known.layer.weight_Vd.dtype == torch.bfloat16
    assert any("ran in bfloat16" in note for note in opened.known.notes)
    assert str(opened.known.layer.function) == "softmax"


def test_a_model_that_was_stored_with_its_output_function(tmp_path):
    patching = pytest.importorskip("sigsoftmax.integrations.huggingface.patching.apply")
    model = transformers.AutoModelForCausalLM.from_pretrained(save_model("gemma2", tmp_path / "m"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patching.apply_output_function(model, OutputFunction("gss", k=torch.tensor(0.25)))
        model.save_pretrained(tmp_path / "patched")
    opened = open_model(str(tmp_path / "patched"), memory=MEMORY)
    assert "stored with the model" in opened.known.how_known
    assert "agrees" in opened.known.how_known
    windows = opened.windows(None, 20, window=16, seed=0)
    contexts = opened.contexts(windows, 20, quiet)
    with torch.no_grad():
        logits = opened.model(input_ids=windows.ids_BL).logits[:, :-1].flatten(0, 1)[:20]
    torch.testing.assert_close(
        opened.known.layer.log_probs(contexts), torch.log_softmax(logits.double(), -1), rtol=0, atol=1e-4
    )


def patched(folder, kind: str, function: str):
    """A model with an output function whose parameters are random, saved in a folder."""
    from sigsoftmax.integrations import huggingface as patching

    model = transformers.AutoModelForCausalLM.from_pretrained(save_model(kind, folder / "own"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patching.apply_output_function(model, function)
    with torch.no_grad():
        for parameter in model.output_function.parameters():
            parameter.normal_()
    model.save_pretrained(folder / "patched")
    return str(folder / "patched"), model.eval()


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("llama", "mos(K=3)"),
        ("gemma2", "moss(K=2, latent=tanh, prior=softmax)"),
        ("granite", "mixture(shifted_sigsoftmax(b=per_class), K=2, latent=linear)"),
    ],
)
def test_a_model_with_a_mixture(tmp_path, kind, function):
    folder, model = patched(tmp_path, kind, function)
    opened = open_model(folder, memory=MEMORY)
    assert "stored with the model; compared with the model's output, which agrees" in opened.known.how_known
    windows = opened.windows(None, 20, window=16, seed=0)
    contexts = opened.contexts(windows, 20, quiet)
    with torch.no_grad():
        logits = model(input_ids=windows.ids_BL).logits[:, :-1].flatten(0, 1)[:20]
    expected = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(opened.known.layer.log_probs(contexts), expected, rtol=0, atol=1e-4)
    assert torch.equal(contexts.next_tokens_N, windows.ids_BL[:, 1:].flatten()[:20])

    head_only = open_head_only(folder)
    torch.testing.assert_close(head_only.layer.weight_Vd, opened.known.layer.weight_Vd)
    assert head_only.layer.head_text == opened.known.layer.head_text
    assert "stored with the model" in head_only.how_known
    gaussian = head_only.contexts(head_only.available, quiet)
    hidden_Nd = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model.output_function.linear(hidden_Nd, model.get_output_embeddings()).logits()
    expected = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(head_only.layer.log_probs(gaussian), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("bounds_only", [True, False])
def test_an_audit_of_a_model_with_a_mixture(tmp_path, bounds_only):
    folder, _ = patched(tmp_path, "llama", "mos(K=3)")
    said: list[str] = []
    found = run(AuditConfig(model=folder, bounds_only=bounds_only, out=tmp_path / "out"), said.append)
    assert (found.layer.head, found.layer.components) == ("mos(K=3)", 3)
    assert found.bounds.lower > WIDTH + 2
    assert (found.spectrum is None) == bounds_only


def test_a_mixture_as_the_teacher(tmp_path):
    folder, _ = patched(tmp_path, "llama", "mos(K=3)")
    found = run(
        AuditConfig(
            model=str(tmp_path / "own"),
            teacher=folder,
            heads=("softmax", "mos(K=2)"),
            contexts=40,
            iterations=5,
            starts=1,
            workers=1,
            argmax_words=0,
            out=tmp_path / "out",
        ),
        quiet,
    )
    assert found.target.model_kl > 0.01
    assert {head.head for head in found.target.heads} == {"softmax", "mos(K=2)"}


def test_the_output_layer_alone_of_a_model_with_an_output_function(tmp_path):
    folder, model = patched(tmp_path, "granite", "shifted_sigsoftmax(b=per_class)")
    source = open_head_only(folder)
    torch.testing.assert_close(source.layer.weight_Vd, model.get_output_embeddings().weight.detach())
    torch.testing.assert_close(
        source.layer.function.given["b"], model.output_function.function_parameters["b"].detach()
    )
    assert source.scale == pytest.approx(1 / 3)


@pytest.mark.parametrize("opener", [lambda name, **o: open_model(name, memory=MEMORY, **o), open_head_only])
def test_a_mixture_is_no_function_of_one_hidden_vector(tmp_path, folders, opener):
    with pytest.raises(ValueError, match=r"mos\(K=4\) takes a hidden vector per component .* --heads 'mos\(K=4\)'"):
        opener(str(folders["llama"]), function="mos(K=4)")
    folder, _ = patched(tmp_path, "llama", "mos(K=3)")
    with pytest.raises(ValueError, match=r"has stored that its output is mos\(K=3, .*; leave --function out"):
        opener(folder, function="softmax")


def test_without_transformers_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "sigsoftmax.experiments.audit.huggingface")
    monkeypatch.delattr("sigsoftmax.experiments.audit.huggingface")
    monkeypatch.delitem(sys.modules, "sigsoftmax.experiments.audit.huggingface_files")
    with pytest.raises(ValueError, match=r"needs transformers: pip install '\.\[hf\]' in the folder of sigsoftmax"):
        run(AuditConfig(model="somebody/something"), quiet)


# --- code of others ---------------------------------------------------------------------------------------------------


OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own-llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def bring_code(folder, marker, *, of_model=True, of_tokenizer=False):
    """Makes a stored model one that brings code of its own, which leaves a marker when it runs."""
    (folder / "modeling_own.py").write_text(OWN_CODE.format(marker=str(marker)))
    if of_model:
        settings = json.loads((folder / "config.json").read_text())
        settings["model_type"] = "own-llama"
        settings["auto_map"] = {
            "AutoConfig": "modeling_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        }
        (folder / "config.json").write_text(json.dumps(settings))
    if of_tokenizer:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings |= {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": [None, "modeling_own.OwnTokenizer"]},
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture
def answers_yes(tmp_path, monkeypatch):
    """Whoever asks at the terminal is answered `y`."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("answers_yes")
@pytest.mark.parametrize("options", [[], ["--bounds-only"], ["--teacher"], ["tokenizer"]], ids=lambda o: "".join(o))
def test_code_of_others_runs_only_where_it_is_allowed(tmp_path, options, capsys, monkeypatch):
    marker = tmp_path / "it-ran"
    plain, own = save_model("llama", tmp_path / "plain"), save_model("llama", tmp_path / "own", seed=1)
    if options == ["tokenizer"]:
        save_tokenizer(own)
    bring_code(own, marker, of_model=options != ["tokenizer"], of_tokenizer=options == ["tokenizer"])
    words = ["audit", str(own), "--out", str(tmp_path / "out"), "--contexts", "40", "--argmax-words", "0"]
    if options == ["--teacher"]:
        words[1:2] = [str(plain), "--teacher", str(own)]
        words += ["--heads", "softmax", "--iterations", "2", "--starts", "1", "--workers", "1", "--widths", "2"]
    words += [word for word in options if word == "--bounds-only"]

    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert f"{own} brings Python code of its own" in error
    assert "--trust-remote-code runs it" in error
    assert not marker.exists()

    assert cli.main([*words, "--trust-remote-code"]) == 0
    assert marker.exists()


@pytest.mark.usefixtures("answers_yes")
def test_a_model_with_an_output_function_and_code_of_its_own(tmp_path):
    from transformers import AutoModelForCausalLM

    from sigsoftmax.integrations.huggingface import apply_output_function

    own = save_model("llama", tmp_path / "own")
    bring_code(own, tmp_path / "it-ran")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = apply_output_function(AutoModelForCausalLM.from_pretrained(own, trust_remote_code=True), "sigsoftmax")
    model.save_pretrained(tmp_path / "patched")
    with pytest.raises(ValueError, match="brings Python code of its own"):
        open_model(str(tmp_path / "patched"), memory=MEMORY)
    opened = open_model(str(tmp_path / "patched"), memory=MEMORY, trust_remote_code=True)
    assert str(opened.known.layer.function) == "sigsoftmax"
