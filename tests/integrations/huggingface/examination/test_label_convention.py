"""The conventions of a class for labels, losses and biases, as they are found out, and classes that are refused."""

import copy
import pickle

import pytest

pytest.importorskip("transformers")

import torch
from tests.integrations.huggingface.kinds import (
    BART,
    BERT,
    KINDS,
    MASKED,
    NO_DROPOUT,
    T5,
    inputs_of,
    kind,
    labels_of,
    loss_of,
    z_of,
)
from tests.integrations.huggingface.tiny import V, config, phi, tiny, tokens
from torch import nn
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    ElectraConfig,
    ElectraForPreTraining,
    EsmConfig,
    EsmForMaskedLM,
    LlamaForCausalLM,
    MobileBertConfig,
    MobileBertForMaskedLM,
    ProphetNetConfig,
    ProphetNetForConditionalGeneration,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
)
from transformers.modeling_outputs import Seq2SeqLMOutput

from sigsoftmax.integrations.huggingface import apply_output_function, remove_output_function
from sigsoftmax.integrations.huggingface.examination.label_convention import LabelConvention


@pytest.mark.parametrize("name", KINDS)
def test_what_a_class_does_with_its_labels_is_found(name):
    found = apply_output_function(kind(name), "sigsoftmax").examined
    calls_loss_function = name.startswith("modernbert")
    assert found.labels == LabelConvention(
        is_shifted=False, is_own_loss=not calls_loss_function, drops_unlabelled=name == "modernbert sparse"
    )
    assert found.class_bias == ("final_logits_bias" if name == "bart" else None)
    assert found.why_stored is None
    assert apply_output_function(tiny(), "sigsoftmax").examined.labels == LabelConvention()


def test_examination_leaves_a_model_as_it_was():
    model = kind("bart", dtype=torch.float32)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    apply_output_function(model, "sigsoftmax")
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())


class ScaledForMaskedLM(BertForMaskedLM):
    """Adds a bias before it scales its logits, and calls ``loss_function`` of masked models."""

    def __init__(self, config):
        super().__init__(config)
        self.late_bias = nn.Parameter(torch.linspace(-1.0, 1.0, V))

    def forward(self, input_ids=None, labels=None, **options):
        output = super().forward(input_ids, **options)
        output["logits"] = 0.5 * (output["logits"] + self.late_bias)
        if labels is None:
            return output
        return type(output)(loss=self.loss_function(output.logits, labels, V), logits=output.logits)


@pytest.mark.parametrize(
    ("make", "is_stored"),
    [
        # A bias that is a parameter of its own, and no part of the output layer.
        (lambda: EsmForMaskedLM(EsmConfig(**BERT, **NO_DROPOUT, position_embedding_type="rotary")), False),
        # It multiplies by the weight of its output layer itself.
        (lambda: MobileBertForMaskedLM(MobileBertConfig(**BERT, embedding_size=8, intra_bottleneck_size=16)), True),
        (lambda: ScaledForMaskedLM(BertConfig(**BERT, **NO_DROPOUT)), True),
    ],
    ids=["esm", "mobilebert", "scaled bias"],
)
@pytest.mark.filterwarnings("ignore:the loss of .* needs its logits stored")
def test_what_is_not_a_linear_map_alone(make, is_stored):
    torch.manual_seed(0)
    plain = make().double().eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("bias") and parameter.numel() == V:
                parameter.uniform_(-1.0, 1.0)
    patched = apply_output_function(copy.deepcopy(plain), "sigsoftmax", logits_with_labels="never").eval()
    assert (patched.examined.why_stored is not None) == is_stored
    ids, labels = tokens(), labels_of("bert")
    wanted = loss_of(phi(plain(ids).logits), labels)
    output = patched(input_ids=ids, labels=labels)
    assert ("logits" in output) == is_stored
    torch.testing.assert_close(output.loss, wanted, rtol=1e-9, atol=0)
    torch.testing.assert_close(patched(ids).logits, phi(plain(ids).logits))
    named = zip(plain.named_parameters(), patched.named_parameters(), strict=False)
    pairs = {key: (p, q) for (key, p), (_, q) in named if key.endswith("bias") and p.numel() == V}
    wanted.backward()
    output.loss.backward()
    for key, (parameter, of_patched) in pairs.items():
        torch.testing.assert_close(of_patched.grad, parameter.grad, msg=key)


# --- refused --------------------------------------------------------------------------------------------------------


class Weighted(T5ForConditionalGeneration):
    """Weights the tokens of its loss by their position."""

    def forward(self, input_ids=None, labels=None, **options):
        output = super().forward(input_ids=input_ids, labels=labels, **options)
        if labels is not None:
            losses = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="none")
            output["loss"] = (losses * torch.arange(len(losses))).mean()
        return output


class OwnDecoderInput(T5ForConditionalGeneration):
    """Feeds its decoder something else than what it says."""

    def forward(self, input_ids=None, labels=None, decoder_input_ids=None, **options):
        if labels is not None:
            decoder_input_ids = labels.clamp(min=0) + 1
        return super().forward(input_ids=input_ids, labels=labels, decoder_input_ids=decoder_input_ids, **options)


class Smoothed(BertForMaskedLM):
    def forward(self, input_ids=None, labels=None, **options):
        output = super().forward(input_ids, **options)
        if labels is None:
            return output
        loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return type(output)(loss=loss, logits=output.logits)


class MaskedByAttention(BertForMaskedLM):
    """Leaves padding out of its loss, whatever its labels say."""

    def forward(self, input_ids=None, labels=None, attention_mask=None, **options):
        if labels is not None and attention_mask is not None:
            labels = labels.masked_fill(attention_mask == 0, -100)
        return super().forward(input_ids, attention_mask=attention_mask, labels=labels, **options)


PROPHETNET = {
    "vocab_size": V,
    "hidden_size": 16,
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 1),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16),
    "max_position_embeddings": 64,
}
OWN = "computes its training loss itself"
REFUSED = {
    "weighted": (lambda: Weighted(T5Config(**T5)), OWN),
    "smoothed": (lambda: Smoothed(BertConfig(**BERT)), OWN),
    "masked by attention": (lambda: MaskedByAttention(BertConfig(**BERT)), OWN),
    "other decoder input": (lambda: OwnDecoderInput(T5Config(**T5)), "gives other logits when it is given labels"),
    "routers": (
        lambda: SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**T5)),
        "the losses of its routers",
    ),
    "several tokens at once": (lambda: ProphetNetForConditionalGeneration(ProphetNetConfig(**PROPHETNET)), OWN),
    "causal, unshifted": (lambda: BartForCausalLM(BartConfig(**BART, max_position_embeddings=64)), OWN),
    "pretraining": (lambda: BertForPreTraining(BertConfig(**BERT)), "a model that returns `loss` and `logits`"),
    "classifier": (lambda: BertForSequenceClassification(BertConfig(**BERT)), "has no output layer"),
    "t5 classifier": (lambda: T5ForSequenceClassification(T5Config(**T5)), "has no output layer"),
    "discriminator": (lambda: ElectraForPreTraining(ElectraConfig(**BERT)), "has no output layer"),
    "encoder": (lambda: T5EncoderModel(T5Config(**T5)), "has no output layer"),
    "no start": (
        lambda: T5ForConditionalGeneration(T5Config(**T5 | {"decoder_start_token_id": None})),
        "could not be run on a few tokens.*decoder_start_token_id",
    ),
}


@pytest.mark.parametrize("function", ["sigsoftmax", "mos(K=2)"])
@pytest.mark.parametrize("which", REFUSED)
def test_what_cannot_be_right_is_refused_and_left_as_it_was(which, function):
    make, why = REFUSED[which]
    model = make()
    before = type(model), set(model.state_dict()), set(vars(model)), model.config.to_dict(), model.training
    with pytest.raises(ValueError, match=why):
        apply_output_function(model, function)
    assert (type(model), set(model.state_dict()), set(vars(model)), model.config.to_dict(), model.training) == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_fused_output_layer_of_trl_is_for_causal_models():
    model = apply_output_function(kind("t5"), "sigsoftmax").train()
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is not a causal model"):
        model(**inputs_of("t5"), labels=labels_of("t5"), fused_lm_head=True)


def test_too_many_arguments():
    model = apply_output_function(kind("bert"), "sigsoftmax")
    with pytest.raises(TypeError, match="takes 8 arguments, got 9"):
        model(*[None] * 9)


# --- a model that is patched ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["gss(k=learned:0.3)", "moss(K=2)"])
@pytest.mark.parametrize("name", KINDS)
def test_undoing_leaves_the_model_as_it_was(name, function):
    model = kind(name).eval()
    call = {**inputs_of(name), "labels": labels_of(name)}
    before = (type(model), model.config.to_dict(), set(model.state_dict()), set(vars(model)))
    output = model(**call)
    apply_output_function(model, function).train()(**call)
    assert hasattr(model, "generate") == (name not in MASKED)
    remove_output_function(model.eval())
    assert (type(model), model.config.to_dict(), set(model.state_dict()), set(vars(model))) == before
    torch.testing.assert_close(model(**call).logits, output.logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(**call).loss, output.loss)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
@pytest.mark.parametrize("name", ["bart", "bert"])
def test_copies_are_independent(copied, name):
    model = apply_output_function(kind(name), "shifted_sigsoftmax(b=learned:2)").train()
    twin, call = copied(model), {**inputs_of(name), "labels": labels_of(name)}
    assert torch.equal(twin(**call).loss, model(**call).loss)
    twin(**call).loss.backward()
    assert model.output_function.function_parameters["b"].grad is None
    remove_output_function(twin)
    assert "logits" not in model(**call)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "bert", "modernbert"])
def test_resizing_the_vocabulary(name):
    model = apply_output_function(kind(name), "shifted_sigsoftmax(b=per_class:1)")
    model.resize_token_embeddings(V + 2, mean_resizing=False)
    shift = model.output_function.function_parameters["b"]
    assert shift.shape == (V + 2,)
    inputs = inputs_of(name)
    if "input_ids" in inputs:
        inputs["input_ids"] = tokens(classes=V + 2)
    labels = labels_of(name, classes=V + 2)
    z = z_of(name, remove_output_function(copy.deepcopy(model)), inputs, labels)
    wanted = loss_of(z + F.logsigmoid(z + shift.double()), labels)
    torch.testing.assert_close(model.train()(**inputs, labels=labels).loss, wanted, rtol=1e-9, atol=0)
    assert model.config.sigsoftmax["num_classes"] == V + 2


def test_a_bias_that_changes_later_is_seen():
    model = apply_output_function(kind("bart"), "sigsoftmax").train()
    model.final_logits_bias = torch.linspace(-3.0, 3.0, V, dtype=torch.float64)[None]
    inputs, labels = inputs_of("bart"), labels_of("bart")
    plain = remove_output_function(copy.deepcopy(model))
    wanted = loss_of(phi(z_of("bart", plain, inputs, labels)), labels)
    torch.testing.assert_close(model(**inputs, labels=labels).loss, wanted)


def softmax_loss(self, input_ids=None, labels=None, **_):
    logits = self.shared(labels.clamp(min=0)) @ self.lm_head.weight.T
    return Seq2SeqLMOutput(loss=loss_of(logits, labels), logits=logits)


def test_a_forward_that_is_replaced_is_refused(monkeypatch):
    model = apply_output_function(kind("t5"), "sigsoftmax").train()
    call = {**inputs_of("t5"), "labels": labels_of("t5")}
    model.forward = softmax_loss.__get__(model)
    with pytest.raises(RuntimeError, match=r"its result came from `softmax_loss`"):
        model(**call)
    del model.forward
    wanted = model(**call).loss
    own = T5ForConditionalGeneration.forward
    monkeypatch.setattr(T5ForConditionalGeneration, "forward", lambda self, **options: own(self, **options))
    torch.testing.assert_close(model(**call).loss, wanted)


def test_causal_models_are_examined_on_the_way_of_their_own_loss():
    class Doubled(LlamaForCausalLM):
        @property
        def loss_function(self):
            return self._loss_function if "_loss_function" in vars(self) else lambda *a, **o: 2.0 * self.first(*a, **o)

        def first(self, logits, labels, **_):
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    with pytest.raises(ValueError, match=OWN):
        apply_output_function(Doubled(config("llama")), "sigsoftmax")
