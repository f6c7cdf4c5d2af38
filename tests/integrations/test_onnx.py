"""Exported graphs in onnxruntime: output layers, mixtures and patched models give the numbers that torch gives."""

import copy

import pytest

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import onnxruntime
import torch
from tests.exported import MODELS
from torch import nn

from sigsoftmax import MixtureOutputLayer, OutputLayer, family
from sigsoftmax.integrations import onnx
from sigsoftmax.integrations.onnx import export_onnx


def run(path, **inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0])


def layer_agrees(layer, path, width=8):
    layer.train()
    export_onnx(layer, path)
    assert layer.training
    # Far from zero, too, and another number of tokens than it was exported with.
    for scale in (1.0, 50.0):
        hidden = scale * torch.randn(11, width)
        with torch.no_grad():
            torch.testing.assert_close(run(path, hidden=hidden), layer.eval()(hidden), rtol=1e-4, atol=1e-4)


def test_relu_keeps_its_eps(tmp_path):
    # The optimiser of onnxscript drops it, and gives classes at or below zero the probability 0.
    layer_agrees(OutputLayer(8, 30, function="relu"), tmp_path / "layer.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("function", [*(member.name for member in family.table()), "shifted_sigsoftmax(b=per_class:1)"])
def test_output_layers(tmp_path, function):
    layer_agrees(OutputLayer(8, 30, function=function), tmp_path / "layer.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("latent", ["tanh", "linear", "residual"])
def test_mixtures(tmp_path, latent):
    layer = MixtureOutputLayer(8, 8, 30, components=3, latent=latent, prior_function="softmax")
    nn.init.normal_(layer.latent.weight)
    layer_agrees(layer, tmp_path / "layer.onnx")


def torchs_export_agrees(model, path):
    """By torch.onnx.export as users call it, its optimiser included, and with a batch of another size."""
    model.eval()
    with onnx._quiet():
        torch.onnx.export(
            model,
            (torch.randn(3, 10),),
            path,
            dynamo=True,
            input_names=["x"],
            dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
            verbose=False,
        )
    for scale in (1.0, 50.0):
        x = scale * torch.randn(7, 10)
        with torch.no_grad():
            torch.testing.assert_close(run(path, x=x), model(x), rtol=1e-4, atol=1e-4)


def test_relu_keeps_its_eps_in_models_too(tmp_path):
    torchs_export_agrees(MODELS["relu, whose eps must stay"](), tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_models_that_contain_ours(tmp_path, make):
    torchs_export_agrees(make(), tmp_path / "model.onnx")


def patched_model_agrees(name, path):
    from tests.integrations.huggingface.tiny import phi, tiny, tokens

    from sigsoftmax.integrations.huggingface import apply_output_function, remove_output_function

    model = apply_output_function(tiny(name, num_hidden_layers=1), "sigsoftmax").eval()
    export_onnx(model, path)
    ids = tokens(3, 11)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    plain = remove_output_function(copy.deepcopy(model))
    with torch.no_grad():
        wanted = phi(plain(ids, attention_mask=mask).logits)
    logits = run(path, input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(logits[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_a_patched_model(tmp_path):
    pytest.importorskip("transformers")
    patched_model_agrees("llama", tmp_path / "model.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "gemma2", "granite"])
def test_other_patched_models(tmp_path, name):
    pytest.importorskip("transformers")
    patched_model_agrees(name, tmp_path / "model.onnx")


def model_with_mixture(name, head):
    """A patched model whose components differ."""
    from tests.integrations.huggingface.tiny import tiny

    from sigsoftmax.integrations.huggingface import apply_output_function

    model = apply_output_function(tiny(name, num_hidden_layers=1), head).eval()
    with torch.no_grad():
        for parameter in model.output_function.parameters():
            parameter.normal_(std=0.3)
    return model


def mixture_agrees(name, head, path, export):
    from tests.integrations.huggingface.tiny import tokens

    model = model_with_mixture(name, head)
    export(model, path)
    ids = tokens(3, 11)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
    logits = run(path, input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(logits[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_a_model_with_a_mixture(tmp_path):
    pytest.importorskip("transformers")
    mixture_agrees("llama", "mos(K=2)", tmp_path / "model.onnx", export_onnx)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("gpt2", "moss(K=3, latent=tanh)"),
        ("gemma2", "mixture(gss(k=learned:0.5), K=2, prior=sigsoftmax)"),
        ("granite", "mixture(shifted_sigsoftmax(b=per_class), K=2, latent=linear)"),
    ],
)
def test_other_models_with_mixtures(tmp_path, name, head):
    pytest.importorskip("transformers")
    mixture_agrees(name, head, tmp_path / "model.onnx", export_onnx)


@pytest.mark.slow
def test_a_model_with_a_mixture_by_torchs_export(tmp_path):
    """As users call it, its optimiser included."""
    pytest.importorskip("transformers")

    def export(model, path):
        example = torch.randint(2, (2, 5))
        any_size = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        with onnx._quiet():
            torch.onnx.export(
                onnx._ModelGraph(model),
                (example, torch.ones_like(example)),
                path,
                dynamo=True,
                input_names=["input_ids", "attention_mask"],
                dynamic_shapes=(any_size, any_size),
                verbose=False,
            )

    mixture_agrees("llama", "moss(K=3)", tmp_path / "model.onnx", export)


def test_what_cannot_be_exported_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected an OutputLayer, a MixtureOutputLayer or a language model"):
        export_onnx(nn.Linear(2, 2), tmp_path / "linear.onnx")


def test_a_graph_that_differs_is_not_handed_over_in_silence(tmp_path, monkeypatch):
    layer = OutputLayer(8, 30)
    monkeypatch.setattr(onnx, "TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="do not use it"):
        export_onnx(layer, tmp_path / "layer.onnx")
    export_onnx(layer, tmp_path / "layer.onnx", check=False)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[onnx\]' in the folder of sigsoftmax"):
        export_onnx(OutputLayer(8, 30), tmp_path / "layer.onnx")


def test_an_encoder_and_a_decoder_are_not_one_graph(tmp_path):
    pytest.importorskip("transformers")
    from tests.integrations.huggingface.kinds import kind

    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder and a decoder"):
        export_onnx(kind("t5"), tmp_path / "t5.onnx")
