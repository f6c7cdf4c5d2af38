"""Mixtures on models of transformers against the formula in plain torch, and their start as the model that they are on.

Shapes: B sequences of L tokens, d width, K components, V classes.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tests.allocations import allocations_of
from tests.integrations.huggingface.tiny import V, phi, plain_loss, tiny, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from sigsoftmax.family.heads import Head
from sigsoftmax.integrations.huggingface import apply_output_function, remove_output_function, token_log_likelihoods
from sigsoftmax.integrations.huggingface.examination.output_layers import Examined
from sigsoftmax.integrations.huggingface.patching.mixture_head import MixtureHead, completed, restored_head
from sigsoftmax.integrations.huggingface.patching.patched_model import PatchedModel

MODELS = ("llama", "llama tied", "gemma2", "granite")
ADJUSTMENTS = {"gemma2": lambda z: 4.0 * torch.tanh(z / 4.0), "granite": lambda z: z / 3.0}
PHIS = {
    "mos(K=3)": (lambda z: z, lambda p: p),
    "moss(K=3)": (phi, phi),
    # The prior of a member with parameters is softmax.
    "mixture(gss(k=0.2), K=2)": (lambda z: 0.2 * z + 0.8 * F.softplus(z), lambda p: p),
    "mixture(gss(k=learned:0.5), K=2)": (lambda z: 0.5 * z + 0.5 * F.softplus(z), lambda p: p),
    "mos(K=3, latent=tanh)": (lambda z: z, lambda p: p),
    "moss(K=2, latent=linear, prior=softmax)": (phi, lambda p: p),
}


def pair(name: str = "llama", function: str = "mos(K=3)", dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """A model, and the same with a mixture whose components differ."""
    plain = tiny(name, dtype=dtype)
    patched = apply_output_function(copy.deepcopy(plain), function)
    generator = torch.Generator().manual_seed(5)
    for parameter in (patched.output_function.latent_weight, patched.output_function.latent_bias):
        if parameter is not None:
            parameter.data.normal_(0.0, 0.2, generator=generator)
    return plain, patched


def formula(plain: Any, head: MixtureHead, name: str, function: str, ids: Tensor, **options: Any) -> tuple[Any, Any]:
    """log P and the level of the logits, written down plainly; all of N x K x V."""
    seen: list[Tensor] = []
    handle = plain.lm_head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    plain(ids, **options)
    handle.remove()
    (hidden_BLd,) = seen
    adjusted, (of_member, of_prior) = ADJUSTMENTS.get(name, lambda z: z), PHIS[function]
    weight, prior = head.latent_weight.to(hidden_BLd.dtype), head.prior_weight.to(hidden_BLd.dtype)
    bias = None if head.latent_bias is None else head.latent_bias.to(hidden_BLd.dtype)
    latent_BLKd = F.linear(hidden_BLd, weight, bias).unflatten(-1, (head.components, -1))
    if "tanh" in function:
        latent_BLKd = torch.tanh(latent_BLKd)
    elif "linear" not in function:
        latent_BLKd = hidden_BLd[..., None, :] + latent_BLKd
    phi_BLKV = of_member(adjusted(plain.lm_head(latent_BLKd)))
    log_pi_BLK = torch.log_softmax(of_prior(F.linear(hidden_BLd, prior)), -1)
    log_p_BLV = torch.logsumexp(log_pi_BLK[..., None] + torch.log_softmax(phi_BLKV, -1), -2)
    level_BL = (log_pi_BLK.exp() * torch.logsumexp(phi_BLKV, -1)).sum(-1)
    return log_p_BLV, level_BL


@pytest.mark.parametrize("function", PHIS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_gradients_and_logits_are_those_of_the_formula(name: str, function: str) -> None:
    plain, patched = pair(name, function)
    twin = copy.deepcopy(patched.output_function)
    ids = tokens()
    log_p_BLV, level_BL = formula(plain, twin, name, function, ids)
    wanted = plain_loss(log_p_BLV, ids)
    output = patched.train()(ids, labels=ids)
    assert "logits" not in output
    torch.testing.assert_close(output.loss, wanted, rtol=1e-7, atol=0)
    for loss in (wanted, output.loss):
        loss.backward()
    for (key, own), value in zip(plain.named_parameters(), patched.parameters(), strict=False):
        torch.testing.assert_close(
            value.grad, own.grad, rtol=1e-6, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}"
        )
    for key in ("prior_weight", "latent_weight", "latent_bias"):
        if getattr(twin, key) is not None:
            found, own = getattr(patched.output_function, key).grad, getattr(twin, key).grad
            torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-7)
            assert own.abs().sum() > 0
    expected = (log_p_BLV + level_BL[..., None]).detach()
    with torch.no_grad():
        torch.testing.assert_close(patched(ids).logits, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(patched(ids, logits_to_keep=2).logits, expected[:, -2:], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(patched(ids, labels=ids, return_dict=False)[1], expected, rtol=1e-6, atol=1e-6)
        in_evaluation = patched.eval()(ids, labels=ids)
        torch.testing.assert_close(in_evaluation.logits, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(in_evaluation.loss, wanted.detach(), rtol=1e-7, atol=0)
        scores = log_p_BLV[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(token_log_likelihoods(patched, ids).double(), scores.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_loss_of_others_on_the_logits_has_the_right_gradients(name: str) -> None:
    plain, patched = pair(name)
    twin, ids = copy.deepcopy(patched.output_function), tokens()
    plain_loss(formula(plain, twin, name, "mos(K=3)", ids)[0], ids).backward()
    plain_loss(patched.train()(ids).logits, ids).backward()
    for own, value in zip(plain.parameters(), patched.parameters(), strict=False):
        torch.testing.assert_close(value.grad, own.grad, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(patched.output_function.prior_weight.grad, twin.prior_weight.grad, rtol=1e-4, atol=1e-7)


class HeadProducts(TorchDispatchMode):
    """Counts the rows of all products that have a column per class."""

    rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        is_product = function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        if is_product and result.ndim == 2 and result.shape[1] == V:
            self.rows += result.shape[0]
        return result


@pytest.mark.parametrize("labels", [False, True])
def test_logits_take_one_product_for_each_component(labels: bool) -> None:
    _, patched = pair(function="mos(K=3)")
    ids = tokens()
    with torch.no_grad(), HeadProducts() as counted:
        patched.eval()(ids, labels=ids if labels else None)
    # A loss beside the logits takes products of its own.
    assert counted.rows == (1 + labels) * 3 * ids.numel()


def test_regularisers_counts_and_kept_logits() -> None:
    plain, patched = pair()
    apply_output_function(patched, z_loss=0.1, label_smoothing=0.3, logits_with_labels="always")
    ids = tokens()
    log_p_BLV, _ = formula(plain, patched.output_function, "llama", "mos(K=3)", ids)
    smoothed = F.cross_entropy(log_p_BLV[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.3)
    output = patched.train()(ids, labels=ids)
    assert output.loss > smoothed
    torch.testing.assert_close(torch.log_softmax(output.logits, -1), log_p_BLV, rtol=1e-6, atol=1e-6)
    apply_output_function(patched, label_smoothing=0.3)
    torch.testing.assert_close(patched(ids, labels=ids).loss, smoothed)
    apply_output_function(patched)
    counted = patched(ids, labels=ids, num_items_in_batch=7).loss
    torch.testing.assert_close(counted, plain_loss(log_p_BLV, ids, reduction="sum") / 7)


def test_a_loss_function_of_the_user_gets_the_logits_of_the_mixture() -> None:
    plain, patched = pair()
    ids = tokens()
    log_p_BLV, level_BL = formula(plain, patched.output_function, "llama", "mos(K=3)", ids)
    patched.loss_function = lambda logits, labels, vocab_size, **_: plain_loss(logits, labels) + logits.sum()
    output = patched.train()(ids, labels=ids)
    expected = log_p_BLV + level_BL[..., None]
    torch.testing.assert_close(output.loss, plain_loss(expected, ids) + expected.sum(), rtol=1e-6, atol=0)
    torch.testing.assert_close(output.logits, expected, rtol=1e-6, atol=1e-6)


def test_a_loss_computed_outside_of_returned_logits() -> None:
    _, patched = pair()
    ids, patched = tokens(), patched.eval()
    output = patched(ids, labels=ids)
    torch.testing.assert_close(patched.loss_function(output.logits, ids, vocab_size=V), output.loss)
    apply_output_function(patched, z_loss=0.1).train()
    with pytest.raises(ValueError, match="call the model with labels, or leave z_loss out"):
        patched.loss_function(output.logits, ids, vocab_size=V)
    with pytest.raises(ValueError, match="a function of hidden vectors, not of logits"):
        patched.output_function(output.logits)


# --- generation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["moss(K=3)", "mos(K=3, latent=tanh)"])
@pytest.mark.parametrize("name", MODELS)
def test_generation_draws_the_tokens_of_the_formula(name: str, function: str) -> None:
    plain, patched = (model.eval() for model in pair(name, function))
    prompt = tokens(2, 3)

    def next_log_probs(ids: Tensor) -> Tensor:
        with torch.no_grad():
            return formula(plain, patched.output_function, name, function, ids)[0][:, -1]

    greedy = drawn = prompt
    torch.manual_seed(7)
    for _ in range(5):
        greedy = torch.cat([greedy, next_log_probs(greedy).argmax(-1, keepdim=True)], 1)
        drawn = torch.cat([drawn, torch.multinomial(torch.softmax(next_log_probs(drawn) / 0.8, -1), 1)], 1)
    assert torch.equal(patched.generate(prompt, max_new_tokens=5, do_sample=False), greedy)
    torch.manual_seed(7)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": 5}
    assert torch.equal(patched.generate(prompt, **options), drawn)


def test_beams_and_assisted_generation() -> None:
    plain, patched = (model.eval() for model in pair())
    prompt = tokens(1, 3)

    def next_log_probs(ids: Tensor) -> Tensor:
        with torch.no_grad():
            return formula(plain, patched.output_function, "llama", "mos(K=3)", ids)[0][:, -1]

    found = patched.generate(prompt, num_beams=V, max_new_tokens=2, do_sample=False, length_penalty=0.0)
    after = next_log_probs(torch.cat([prompt.expand(V, -1), torch.arange(V)[:, None]], 1))
    best = divmod(int((next_log_probs(prompt)[0][:, None] + after).argmax()), V)
    assert tuple(found[0, -2:].tolist()) == best
    options = {"max_new_tokens": 6, "do_sample": False}
    alone = patched.generate(prompt, **options)
    assert torch.equal(patched.generate(prompt, assistant_model=plain, **options), alone)


# --- the start ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", [*MODELS, "gpt2", "qwen3"])
def test_a_mixture_begins_as_the_model_that_it_is_put_on(name: str, dtype: torch.dtype, tolerance: float) -> None:
    plain = tiny(name, dtype=dtype).eval()
    patched = apply_output_function(copy.deepcopy(plain), "mos(K=4)").eval()
    ids = tokens()
    wanted, found = plain(ids).logits, patched(ids).logits
    assert found.dtype == wanted.dtype
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert torch.equal(
        patched.generate(ids, max_new_tokens=4, do_sample=False), plain.generate(ids, max_new_tokens=4, do_sample=False)
    )
    torch.testing.assert_close(
        patched(ids, labels=ids).loss.float(), plain_loss(wanted.float(), ids), rtol=1e-3, atol=0
    )


def test_another_member_begins_as_that_member() -> None:
    plain = tiny().eval()
    ids = tokens()
    wanted = apply_output_function(copy.deepcopy(plain), "sigsoftmax")(ids).logits
    torch.testing.assert_close(apply_output_function(plain, "moss(K=4)")(ids).logits, wanted)


def test_only_what_cannot_begin_as_the_model_warns_of_a_jump(tmp_path: Any) -> None:
    tiny().save_pretrained(tmp_path)
    apply_output_function(LlamaForCausalLM.from_pretrained(tmp_path), "mos(K=2)")
    for function in ("moss(K=2)", "mos(K=2, latent=tanh)"):
        with pytest.warns(UserWarning, match="every one of its probabilities changes"):
            apply_output_function(LlamaForCausalLM.from_pretrained(tmp_path), function)


def test_components_part_in_training_and_the_loss_goes_down() -> None:
    model = apply_output_function(tiny(), "mos(K=4)").train()
    ids = tokens(8, 12)
    model(ids, labels=ids).loss.backward()
    first_KDd = model.output_function.latent_weight.grad.unflatten(0, (4, -1))
    assert all((first_KDd[0] - other).norm() > 1e-3 * other.norm() for other in first_KDd[1:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5
    weight_KDd = model.output_function.latent_weight.detach().unflatten(0, (4, -1))
    for one in range(4):
        for other in range(one):
            assert (weight_KDd[one] - weight_KDd[other]).norm() > 0.1 * weight_KDd[one].norm()


def test_equal_components_get_the_common_gradient_times_the_prior() -> None:
    plain = tiny(dtype=torch.float64)
    patched = apply_output_function(copy.deepcopy(plain), "mos(K=3)").train()
    ids = tokens(1, 2)
    seen: list[Tensor] = []
    plain.lm_head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    hidden_grad = []
    logits = plain(ids).logits
    seen[0].register_hook(hidden_grad.append)
    plain_loss(logits, ids).backward()
    patched(ids, labels=ids).loss.backward()
    # One token counts, so the gradient of A_k is pi_k times the outer product of the common gradient and h.
    pi_K = torch.softmax(F.linear(seen[0][0, 0], patched.output_function.prior_weight.double()), -1)
    common = torch.outer(hidden_grad[0][0, 0], seen[0][0, 0])
    found_KDd = patched.output_function.latent_weight.grad.double().unflatten(0, (3, -1))
    torch.testing.assert_close(found_KDd, pi_K[:, None, None] * common, rtol=1e-5, atol=1e-7)


# --- the model around it --------------------------------------------------------------------------------------------


def test_undoing_leaves_the_model_as_it_was() -> None:
    model = tiny().eval()
    ids = tokens()
    before = (type(model), model.config.to_dict(), set(model.state_dict()), set(vars(model)), model(ids).logits)
    apply_output_function(model, "moss(K=2)").train()
    model(ids, labels=ids)
    remove_output_function(model.eval())
    assert (type(model), model.config.to_dict(), set(model.state_dict()), set(vars(model))) == before[:4]
    assert torch.equal(model(ids).logits, before[4])
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
def test_copies_are_independent(copied: Any) -> None:
    _, model = pair()
    twin, ids = copied(model), tokens()
    assert torch.equal(twin(ids).logits, model(ids).logits)
    twin.train()(ids, labels=ids).loss.backward()
    assert model.output_function.prior_weight.grad is None
    remove_output_function(twin)
    assert "logits" not in model.train()(ids, labels=ids)


@pytest.mark.parametrize("name", ["llama", "llama tied"])
def test_resized_vocabularies(name: str) -> None:
    _, model = pair(name, "mixture(shifted_sigsoftmax(b=per_class:1), K=2)", torch.float32)
    ids = tokens()
    model.resize_token_embeddings(V + 4, mean_resizing=False)
    logits = model.train()(ids).logits
    assert logits.shape[-1] == V + 4
    torch.testing.assert_close(model(ids, labels=ids).loss, plain_loss(logits, ids))


def test_gradient_checkpointing() -> None:
    _, model = pair(dtype=torch.float32)
    model.train()
    ids = tokens()
    wanted = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = torch.autograd.grad(model(ids, labels=ids, use_cache=False).loss, list(model.parameters()))
    for own, value in zip(wanted, got, strict=True):
        torch.testing.assert_close(value, own)


def test_torch_export_holds_the_mixture() -> None:
    model, ids = apply_output_function(tiny(), "mos(K=2)").eval(), tokens()
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    found = torch.export.export(model, (), inputs).module()(**inputs)
    expected = model(**inputs)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


def test_torch_compile_keeps_step_and_logits_whole() -> None:
    _, model = pair(dtype=torch.float32)
    ids = tokens()
    compiled = torch.compile(model.train(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=ids, labels=ids).loss, model(ids, labels=ids).loss)
    torch.testing.assert_close(compiled(input_ids=ids).logits, model(ids).logits)


def test_autocast_and_half_precision() -> None:
    _, model = pair(dtype=torch.float32)
    ids = tokens()
    exact = model.train()(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
        logits = model(ids).logits
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    assert plain_loss(logits.float(), ids).item() == pytest.approx(exact.item(), rel=0.05)
    half = copy.deepcopy(model).bfloat16()
    assert {p.dtype for p in half.output_function.parameters()} == {torch.float32}
    loss = half(ids, labels=ids).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)


def test_a_step_holds_no_logits_of_all_components() -> None:
    classes, ids = 16_000, tokens(4, 64, classes=16_000)
    model = apply_output_function(tiny("llama tied", vocab_size=classes), "mos(K=4)", chunk_bytes=2**20).train()

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    step()
    # Less than the logits of a single component.
    assert allocations_of(step).peak < 4 * ids.numel() * classes


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("mos(K=0)", "at least one component"),
        ("mos(K=2.5)", "K a whole number"),
        ("mos(K=-1)", "K a whole number"),
        ("mos(K=2, latent=cubic)", "latent must be one of 'tanh', 'linear', 'residual', got 'cubic'"),
        ("mos(K=2, prior=cubic)", "unknown output function 'cubic'"),
        ("mos(K=2, prior=gss(k=learned))", "must be a plain number"),
        ("mos(K=2, width=3)", "cannot read the mixture"),
    ],
)
def test_heads_that_cannot_be_made_leave_the_model_alone(function: str, text: str) -> None:
    model = tiny()
    state, attributes = set(model.state_dict()), set(vars(model))
    with pytest.raises(ValueError, match=text):
        apply_output_function(model, function)
    assert type(model) is LlamaForCausalLM
    assert (set(model.state_dict()), set(vars(model))) == (state, attributes)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(("first", "second"), [("sigsoftmax", "mos(K=2)"), ("mos(K=2)", "sigsoftmax")])
def test_a_mixture_is_not_exchanged_in_place(first: str, second: str) -> None:
    model = apply_output_function(tiny(), first)
    ids = tokens()
    before = model(ids).logits
    with pytest.raises(ValueError, match=r"remove_output_function\(model\) before"):
        apply_output_function(model, second)
    assert isinstance(model, PatchedModel)
    assert torch.equal(model(ids).logits, before)
    apply_output_function(model, z_loss=0.1)  # options alone


class Odd(nn.Linear):
    """A linear map with a forward pass of its own, as quantised layers have."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_an_output_layer_that_is_no_plain_linear_map_is_refused() -> None:
    model = tiny()
    model.lm_head.__class__ = Odd
    with pytest.raises(ValueError, match=r"its output layer is a \S+\.Odd, not a plain linear map\. Use a single"):
        apply_output_function(model, "mos(K=2)")
    assert type(model) is LlamaForCausalLM
    model.lm_head.__class__ = nn.Linear
    apply_output_function(model, "mos(K=2)")
    model.lm_head.__class__ = Odd
    with pytest.raises(ValueError, match="needs an output layer that is a plain linear map"):
        model(tokens())


def test_a_model_without_output_layer_is_refused() -> None:
    model = tiny()
    model.lm_head = None
    with pytest.raises(ValueError, match="has no output layer with a weight matrix"):
        apply_output_function(model, "mos(K=2)")
    assert type(model) is LlamaForCausalLM


def test_logits_that_came_from_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply_output_function(tiny(), "mos(K=2)").eval()

    def others(self: Any, input_ids: Any = None, **_: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        hidden = self.model(input_ids=input_ids).last_hidden_state
        return CausalLMOutput(logits=hidden @ self.lm_head.weight.T)

    monkeypatch.setattr(LlamaForCausalLM, "forward", others)
    with pytest.raises(RuntimeError, match="without calling its output layer"):
        model(input_ids=tokens())


def test_a_mixture_comes_back_from_what_is_stored_of_it() -> None:
    head = Head.parse("mixture(gss(k=learned:0.5), K=3, latent=linear)", allow_options=True)
    stored = MixtureHead(head, Examined(num_classes=5), 4, frozen=("k",)).stored()
    assert stored["function"] == "mixture(gss(k=learned), K=3, latent=linear, prior=softmax)"
    found = restored_head(stored)
    assert isinstance(found, MixtureHead)
    assert found.stored() == stored
    assert str(completed(Head.parse("moss(K=2)"))) == "moss(K=2, latent=residual, prior=sigsoftmax)"
