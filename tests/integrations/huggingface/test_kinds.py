"""Encoder-decoder and masked models: losses, gradients, logits and generation against formulas in float64.

Shapes: B sequences of L tokens, d width, K components, V classes.
"""

import copy

import pytest

pytest.importorskip("transformers")

import torch
from tests.allocations import allocations_of
from tests.integrations.huggingface.kinds import (
    ENCODER_DECODER,
    KINDS,
    START,
    head_of,
    inputs_of,
    kind,
    labels_of,
    loss_of,
    z_of,
)
from tests.integrations.huggingface.tiny import V, phi, tokens
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, pipeline

from sigsoftmax.integrations.huggingface import (
    OutputFunctionLogitsProcessor,
    apply_output_function,
    shifted_start,
    smallest_logit,
    token_log_likelihoods,
)


def gss(z, k):
    return k * z - (k - 1.0) * F.softplus(z)


FORMULAS = {
    "softmax": (lambda z: z, {}),
    "sigsoftmax": (phi, {}),
    "gss(k=learned:0.5)": (gss, {"k": 0.5}),
    "shifted_sigsoftmax(b=per_class:1)": (lambda z, b: z + F.logsigmoid(z + b), {"b": [1.0] * V}),
}


def pair(name, function="sigsoftmax", **options):
    plain = kind(name)
    return plain, apply_output_function(copy.deepcopy(plain), function, **options)


@pytest.mark.parametrize("function", FORMULAS)
@pytest.mark.parametrize("name", KINDS)
def test_loss_and_gradients_are_those_of_the_formula(name, function):
    plain, patched = pair(name, function)
    assert patched.examined.why_stored is None
    formula, start = FORMULAS[function]
    values = {key: torch.tensor(value, dtype=torch.float64, requires_grad=True) for key, value in start.items()}
    inputs, labels = inputs_of(name), labels_of(name)
    wanted = loss_of(formula(z_of(name, plain.train(), inputs, labels), **values), labels)
    output = patched.train()(**inputs, labels=labels)
    assert "logits" not in output
    torch.testing.assert_close(output.loss, wanted, rtol=1e-9, atol=0)
    wanted.backward()
    output.loss.backward()
    for (key, own), value in zip(plain.named_parameters(), patched.parameters(), strict=False):
        assert (own.grad is None) == (value.grad is None), key
        if own.grad is not None:
            torch.testing.assert_close(value.grad, own.grad, rtol=1e-6, atol=1e-9, msg=lambda text, key=key: key + text)
    for key, value in values.items():
        found = patched.output_function.function_parameters[key].grad
        torch.testing.assert_close(found.double().reshape(value.shape), value.grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", KINDS)
def test_the_plain_model_agrees_with_the_formula_of_these_tests(name):
    plain = kind(name).eval()
    inputs, labels = inputs_of(name), labels_of(name)
    output, z = plain(**inputs, labels=labels), z_of(name, plain, inputs, labels)
    torch.testing.assert_close(output.logits, z)
    torch.testing.assert_close(output.loss.double(), loss_of(z, labels), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", KINDS)
def test_logits_and_loss_in_evaluation(name):
    plain, patched = pair(name)
    plain.eval(), patched.eval()
    inputs, labels = inputs_of(name), labels_of(name)
    z = z_of(name, plain, inputs, labels)
    output = patched(**inputs, labels=labels)
    torch.testing.assert_close(output.logits, phi(z))
    torch.testing.assert_close(output.loss, loss_of(phi(z), labels), rtol=1e-9, atol=0)
    loss, logits, *_ = patched(**inputs, labels=labels, return_dict=False)
    torch.testing.assert_close((loss, logits), (output.loss, output.logits))
    first = inputs[plain.main_input_name]
    rest = {key: value for key, value in inputs.items() if key != plain.main_input_name}
    torch.testing.assert_close(patched(first, **rest, labels=labels).loss, output.loss)
    for count in (3, torch.tensor(3)):
        counted = patched(**inputs, labels=labels, num_items_in_batch=count).loss
        torch.testing.assert_close(counted, loss_of(phi(z), labels, reduction="sum") / 3)
    assert "logits" not in apply_output_function(patched, logits_with_labels="never")(**inputs, labels=labels)


def test_decoder_inputs_of_the_caller_are_used():
    plain, patched = pair("t5")
    inputs, labels = inputs_of("t5"), labels_of("t5")
    own = tokens(3, 5, seed=9)
    wanted = loss_of(phi(z_of("t5", plain, inputs, labels, own)), labels)
    torch.testing.assert_close(patched.train()(**inputs, labels=labels, decoder_input_ids=own).loss, wanted)
    embedded = plain.shared(own)
    torch.testing.assert_close(patched(**inputs, labels=labels, decoder_inputs_embeds=embedded).loss, wanted)


def test_regularisers_act_while_training():
    plain, patched = pair("bart", z_loss=0.1, label_smoothing=0.3)
    inputs, labels = inputs_of("bart"), labels_of("bart")
    values = phi(z_of("bart", plain, inputs, labels))[labels != -100]
    smoothed = F.cross_entropy(values, labels[labels != -100], label_smoothing=0.3)
    wanted = smoothed + 0.1 * torch.logsumexp(values, -1).square().mean()
    torch.testing.assert_close(patched.train()(**inputs, labels=labels).loss, wanted)


@pytest.mark.parametrize("name", ["t5", "bert", "modernbert"])
def test_a_loss_function_of_the_user_gets_the_logits_that_the_model_returns(name):
    plain, patched = pair(name)
    inputs, labels = inputs_of(name), labels_of(name)
    patched.loss_function = lambda logits, labels, **_: logits.mean() + (labels == -100).sum()
    output = patched.train()(**inputs, labels=labels)
    wanted = phi(z_of(name, plain, inputs, labels))
    torch.testing.assert_close(output.loss, wanted.mean() + 3)
    torch.testing.assert_close(output.logits, wanted)


# --- mixtures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["mos(K=3)", "moss(K=3)", "mixture(gss(k=learned:0.5), K=3)"])
@pytest.mark.parametrize("name", KINDS)
def test_mixtures_are_those_of_the_formula(name, function):
    plain, patched = pair(name, function)
    mixture = patched.output_function
    mixture.latent_weight.data.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(5))
    inputs, labels = inputs_of(name), labels_of(name)
    hidden, weight_Vd, bias_V = head_of(name, plain, inputs, labels)
    latent = hidden[..., None, :] + F.linear(hidden, mixture.latent_weight.double()).unflatten(-1, (3, -1))
    of_member = {"mos(K=3)": lambda z: z, "moss(K=3)": phi}.get(function, lambda z: gss(z, 0.5))
    of_prior = phi if function == "moss(K=3)" else (lambda z: z)
    values = of_member(F.linear(latent, weight_Vd, bias_V))
    log_prior = torch.log_softmax(of_prior(F.linear(hidden, mixture.prior_weight.double())), -1)
    log_p = torch.logsumexp(log_prior[..., None] + torch.log_softmax(values, -1), -2)
    level = (log_prior.exp() * values.logsumexp(-1)).sum(-1)
    output = patched.train()(**inputs, labels=labels)
    assert "logits" not in output
    torch.testing.assert_close(output.loss, loss_of(log_p, labels), rtol=1e-8, atol=0)
    found = patched.eval()(**inputs, labels=labels).logits
    torch.testing.assert_close(found, log_p + level[..., None], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
def test_a_mixture_begins_as_the_model_that_it_is_put_on(name):
    plain = kind(name, dtype=torch.float32).eval()
    patched = apply_output_function(copy.deepcopy(plain), "mos(K=4)").eval()
    inputs, labels = inputs_of(name, torch.float32), labels_of(name)
    wanted, found = plain(**inputs, labels=labels), patched(**inputs, labels=labels)
    assert (found.logits - wanted.logits).abs().max() <= 1e-6 * wanted.logits.abs().max()
    torch.testing.assert_close(found.loss, wanted.loss)
    patched.train()(**inputs, labels=labels).loss.backward()
    first, *others = patched.output_function.latent_weight.grad.unflatten(0, (4, -1))
    assert all((first - other).norm() > 1e-3 * other.norm() for other in others)


# --- generation and scores ------------------------------------------------------------------------------------------


def next_log_probs(name, plain, inputs, decoder_BL):
    with torch.no_grad():
        return torch.log_softmax(phi(z_of(name, plain, inputs, None, decoder_BL))[:, -1], -1)


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_greedy_generation_and_sampling(name):
    plain, patched = (model.eval() for model in pair(name))
    inputs = inputs_of(name)
    greedy = patched.generate(
        **inputs, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    ids = torch.full((3, 1), START)
    for logits in greedy.logits:
        wanted = next_log_probs(name, plain, inputs, ids)
        torch.testing.assert_close(torch.log_softmax(logits.double(), -1), wanted, rtol=1e-4, atol=1e-4)
        ids = torch.cat([ids, wanted.argmax(-1, keepdim=True)], 1)
    sequences = greedy.sequences
    assert torch.equal(sequences[:, -4:], ids[:, 1:])
    processor = [OutputFunctionLogitsProcessor("sigsoftmax")]
    options = {"do_sample": True, "temperature": 0.8, "top_k": 5, "max_new_tokens": 6}
    torch.manual_seed(3)
    drawn = patched.generate(**inputs, **options)
    torch.manual_seed(3)
    assert torch.equal(drawn, plain.generate(**inputs, logits_processor=processor, **options))
    with pytest.raises(ValueError, match="hold its output function already"):
        patched.generate(**inputs, logits_processor=processor, **options)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_beams_find_what_an_exhaustive_search_finds(name):
    plain, patched = (model.eval() for model in pair(name))
    inputs = {key: value[:1] for key, value in inputs_of(name).items()}
    found = patched.generate(**inputs, num_beams=V, max_new_tokens=2, do_sample=False, length_penalty=0.0)
    first = next_log_probs(name, plain, inputs, torch.tensor([[START]]))[0]
    begun = torch.cat([torch.full((V, 1), START), torch.arange(V)[:, None]], 1)
    many = {key: value.expand(V, -1) for key, value in inputs.items()}
    totals = first[:, None] + next_log_probs(name, plain, many, begun)
    assert tuple(found[0, -2:].tolist()) == divmod(int(totals.argmax()), V)


def test_a_mixture_generates_with_a_cache():
    _, patched = pair("t5", "moss(K=2)")
    patched.eval().output_function.latent_weight.data.normal_(0.0, 0.2)
    inputs = inputs_of("t5")
    ids = torch.full((3, 1), START)
    for _ in range(4):
        with torch.no_grad():
            logits = patched(**inputs, decoder_input_ids=ids).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(patched.generate(**inputs, max_new_tokens=4, do_sample=False), ids)


def test_the_pipeline_fills_masks_with_the_probabilities_of_the_function():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(V)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, mask_token="w3", pad_token="w0")
    plain, patched = (model.eval() for model in pair("bert"))
    found = pipeline("fill-mask", model=patched.float(), tokenizer=tokenizer, device="cpu")("w5 w3 w7", top_k=V)
    with torch.no_grad():
        p = torch.softmax(phi(plain(torch.tensor([[5, 3, 7]])).logits[0, 1]), -1)
    assert [one["token"] for one in found] == p.argsort(descending=True).tolist()
    torch.testing.assert_close(torch.tensor([one["score"] for one in found]), p.sort(descending=True)[0].float())


@pytest.mark.parametrize("name", KINDS)
def test_log_likelihoods_of_labels(name):
    plain, patched = (model.eval() for model in pair(name))
    inputs, labels = inputs_of(name), labels_of(name)
    log_p = torch.log_softmax(phi(z_of(name.removesuffix(" sparse"), plain, inputs, labels)), -1)
    wanted = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    torch.testing.assert_close(token_log_likelihoods(patched, **inputs, labels=labels), wanted.float())
    with pytest.raises(ValueError, match="pass labels, with -100 where nothing counts"):
        token_log_likelihoods(patched, **inputs)


def test_the_start_of_a_retrofit_counts_positions_of_the_decoder():
    plain = kind("t5").eval()
    inputs, labels = inputs_of("t5"), labels_of("t5")
    z = z_of("t5", plain, inputs, labels)
    smallest = smallest_logit(plain, [{**inputs, "labels": labels}])
    assert smallest == pytest.approx(float(z[labels != -100].min().detach()))
    start = shifted_start(plain, [{**inputs, "labels": labels}], bound=1e-3)
    patched = apply_output_function(copy.deepcopy(plain), f"shifted_sigsoftmax(b={start})")
    error = (torch.log_softmax(patched(**inputs, labels=labels).logits, -1) - torch.log_softmax(z, -1)).abs()
    assert error[labels != -100].max() <= 1e-3
    with pytest.raises(ValueError, match="labels or decoder_input_ids"):
        smallest_logit(plain, [inputs["input_ids"]])
    masked = kind("bert").eval()
    z = z_of("bert", masked, inputs_of("bert"), None)[inputs_of("bert")["attention_mask"] == 1]
    assert smallest_logit(masked, [inputs_of("bert")]) == pytest.approx(float(z.min().detach()))


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["sigsoftmax", "mos(K=2)"])
@pytest.mark.parametrize("name", ["t5", "bart", "bert"])
def test_a_step_holds_no_logits_of_all_tokens(name, function):
    classes, labels = 32_064, tokens(8, 60, classes=32_064)
    model = apply_output_function(
        kind(name, dtype=torch.float32, vocab_size=classes), function, chunk_bytes=2**22
    ).train()

    def step():
        model(input_ids=labels, labels=labels).loss.backward()
        model.zero_grad()

    step()
    gradients = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert allocations_of(step).peak - gradients < 4 * labels.numel() * classes / 4
