"""TRL's fused output layer on a patched model gives what the formula gives: values and gradients."""

import copy
import types

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")

import torch
from tests.allocations import allocations_of
from tests.integrations.huggingface.tiny import phi, tiny, tokens
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from trl.trainer.utils import add_fused_lm_head

import sigsoftmax
from sigsoftmax.integrations.huggingface import apply_output_function, remove_output_function
from sigsoftmax.integrations.huggingface.trainers import trl_fused_head

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def example():
    ids = tokens(4, 9)
    labels = ids.clone()
    labels[0, :4] = -100
    labels[2, 6:] = -100
    return ids, labels


def gss(z):
    return 0.5 * z + 0.5 * F.softplus(z)


def formula(logits_BLV, labels_BL, temperature):
    """Every field that TRL names, of phi, written down plainly."""
    scaled = logits_BLV[:, :-1] / temperature
    mask = labels_BL[:, 1:] != -100
    target = labels_BL[:, 1:].clamp(min=0)
    log_p = scaled.log_softmax(-1)
    fields = {
        "log_probs": log_p.gather(-1, target[..., None])[..., 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1).detach(),
        "mean_logits": scaled.mean(-1).detach(),
        "is_top1": scaled.argmax(-1) == target,
    }
    fields = {name: value.masked_fill(~mask, 0) for name, value in fields.items()}
    return {**fields, "label_mask": mask, "loss": -fields["log_probs"].sum() / mask.sum()}


@pytest.mark.parametrize("name", ["llama", "llama tied", "gemma2", "granite"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("function", "of"), [("softmax", lambda z: z), ("sigsoftmax", phi), ("gss(k=learned:0.5)", gss)]
)
def test_every_field_and_its_gradient(name, temperature, function, of):
    plain = tiny(name, dtype=torch.float64).train()
    # So little memory for logits that there are several chunks.
    model = apply_output_function(copy.deepcopy(plain), function, chunk_bytes=2000)
    add_fused_lm_head(model, temperature=temperature, outputs=OUTPUTS)
    assert "forward" not in model.__dict__
    ids, labels = example()
    wanted = formula(of(plain(ids).logits), labels, temperature)
    output = model(input_ids=ids, labels=labels, fused_lm_head=True)
    for key, value in wanted.items():
        torch.testing.assert_close(output[key], value, rtol=1e-6, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")
    weights = torch.randn_like(wanted["log_probs"])
    for key in ("loss", "log_probs", "entropy"):
        own, got = (
            torch.autograd.grad(
                (weights * x[key]).sum() if x[key].ndim else x[key], list(parameters), retain_graph=True
            )
            for x, parameters in (
                (wanted, plain.parameters()),
                (output, list(model.parameters())[: len(list(plain.parameters()))]),
            )
        )
        for left, right in zip(got, own, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-8, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["llama tied", "gemma2", "granite"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("function", ["moss(K=3)", "mixture(gss(k=learned:0.5), K=2, latent=tanh)"])
def test_every_field_and_its_gradient_of_a_mixture(name, temperature, function):
    model = apply_output_function(tiny(name, dtype=torch.float64), function, chunk_bytes=2000).train()
    model.output_function.latent_weight.data.normal_(0.0, 0.2)
    # The logits of a mixture are compared with the formula in test_mixture_head.
    twin = copy.deepcopy(model)
    add_fused_lm_head(model, temperature=temperature, outputs=OUTPUTS)
    ids, labels = example()
    wanted = formula(twin(ids).logits, labels, temperature)
    output = model(input_ids=ids, labels=labels, fused_lm_head=True)
    for key, value in wanted.items():
        torch.testing.assert_close(output[key], value, rtol=1e-6, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")
    weights = torch.randn_like(wanted["log_probs"])
    for key in ("loss", "log_probs", "entropy"):
        own, got = (
            torch.autograd.grad(
                (weights * x[key]).sum() if x[key].ndim else x[key], list(of.parameters()), retain_graph=True
            )
            for x, of in ((wanted, twin), (output, model))
        )
        for left, right in zip(got, own, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}")


def test_the_gradient_of_an_entropy_reaches_learned_parameters():
    plain = tiny(dtype=torch.float64)
    model = apply_output_function(copy.deepcopy(plain), "gss(k=learned:0.5)", chunk_bytes=2000).train()
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    ids, labels = example()
    model(input_ids=ids, labels=labels, fused_lm_head=True).entropy.sum().backward()
    k = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    z = plain(ids).logits.detach()
    formula(k * z - (k - 1) * F.softplus(z), labels, 0.7)["entropy"].sum().backward()
    found = model.output_function.function_parameters["k"].grad
    torch.testing.assert_close(found.double(), k.grad.reshape(1), rtol=1e-4, atol=1e-6)


def test_an_unpatched_model_keeps_what_trl_gave_it():
    """The formula of these tests is TRL's."""
    plain = tiny().train()
    ids, labels = example()
    wanted = formula(plain(ids).logits, labels, 0.7)
    add_fused_lm_head(plain, temperature=0.7, outputs=OUTPUTS)
    output = plain(input_ids=ids, labels=labels, fused_lm_head=True)
    for key, value in wanted.items():
        torch.testing.assert_close(output[key], value, rtol=1e-4, atol=1e-5)


def test_labels_that_are_shifted_and_a_count():
    model = apply_output_function(tiny(), "sigsoftmax").train()
    add_fused_lm_head(model)
    ids, labels = example()
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    usual = model(input_ids=ids, labels=labels, fused_lm_head=True)
    for count in (7, torch.tensor(7)):
        output = model(input_ids=ids, shift_labels=shifted, num_items_in_batch=count, fused_lm_head=True)
        assert output.log_probs.shape == ids.shape
        torch.testing.assert_close(output.log_probs[:, :-1], usual.log_probs)
        torch.testing.assert_close(output.loss, usual.loss * usual.label_mask.sum() / 7)
    assert output.entropy is None


def test_no_label_gives_a_zero_that_can_be_differentiated():
    model = apply_output_function(tiny(), "sigsoftmax").train()
    add_fused_lm_head(model, outputs=OUTPUTS)
    ids, labels = example()
    output = model(input_ids=ids, labels=torch.full_like(labels, -100), fused_lm_head=True)
    assert output.loss == 0
    assert output.entropy.sum() == 0
    (output.loss + output.log_probs.sum() + output.entropy.sum()).backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_without_the_keyword_nothing_changes():
    model = apply_output_function(tiny(), "sigsoftmax").train()
    ids, labels = example()
    wanted = model(ids, labels=labels).loss
    add_fused_lm_head(model, temperature=0.5)
    torch.testing.assert_close(model(ids, labels=labels).loss, wanted)
    generated = model.generate(ids[:, :3], max_new_tokens=4, do_sample=False)
    assert generated.shape == (4, 7)


def test_a_loss_that_a_user_set_and_stored_logits_make_no_difference():
    model = apply_output_function(tiny(), "sigsoftmax", logits_with_labels="always").train()
    add_fused_lm_head(model)
    model.loss_function = lambda logits, *_, **__: logits.mean()
    plain = apply_output_function(tiny(), "sigsoftmax").train()
    add_fused_lm_head(plain)
    ids, labels = example()
    torch.testing.assert_close(
        *(one(input_ids=ids, labels=labels, fused_lm_head=True).log_probs for one in (model, plain))
    )
    assert model(ids, labels=labels).loss != plain(ids, labels=labels).loss


def test_an_output_layer_that_has_to_run():
    model = tiny().train()

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model.lm_head.__class__ = Doubled
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="needs its logits stored"):
        apply_output_function(model, "sigsoftmax")
    add_fused_lm_head(model, temperature=0.7, outputs=OUTPUTS)
    ids, labels = example()
    wanted = formula(phi(plain(ids).logits), labels, 0.7)
    output = model(input_ids=ids, labels=labels, fused_lm_head=True)
    for key, value in wanted.items():
        torch.testing.assert_close(output[key], value, rtol=1e-4, atol=1e-5)


def test_half_precision_with_an_output_layer_in_float32():
    exact = tiny(dtype=torch.float64)
    model = apply_output_function(copy.deepcopy(exact).bfloat16(), "sigsoftmax").train()
    head = model.lm_head.float()
    # As GRPO does, whose module tells that it changes the dtype of the product alone.
    of_trl = {"__name__": "trl.trainer.grpo_trainer", "F": F, "head": head}
    exec("def cast_forward_to_fp32(hidden):\n    return F.linear(hidden.float(), head.weight)", of_trl)
    head.forward = of_trl["cast_forward_to_fp32"]
    add_fused_lm_head(model, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy"))
    ids, labels = example()
    output = model(input_ids=ids, labels=labels, fused_lm_head=True)
    assert output.log_probs.dtype == output.entropy.dtype == torch.float32
    wanted = formula(phi(exact(ids).logits), labels, 1.0)
    torch.testing.assert_close(output.loss.double(), wanted["loss"], rtol=0.05, atol=0)
    output.entropy.sum().backward()
    assert model.lm_head.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("function", "temperature"),
    [("sigsoftmax", 1.0), pytest.param("mos(K=2)", 0.7, marks=pytest.mark.thorough)],
)
def test_a_step_stores_no_logits(function, temperature):
    classes = 32_064
    model = apply_output_function(tiny("llama tied", vocab_size=classes).train(), function, chunk_bytes=2**20)
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy", "is_top1"))
    ids = tokens(8, 60, classes=classes)

    def step():
        model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
        model.zero_grad()

    step()
    assert allocations_of(step).peak < 8 * 60 * classes * 4 / 4


@pytest.mark.parametrize("option", [{"z_loss": 0.1}, {"label_smoothing": 0.1}])
def test_regularisers_that_could_not_act_are_refused(option):
    model = apply_output_function(tiny(), "sigsoftmax", **option).train()
    add_fused_lm_head(model)
    ids, labels = example()
    with pytest.raises(ValueError, match="have no effect on TRL's losses"):
        model(input_ids=ids, labels=labels, fused_lm_head=True)
    model.eval()(input_ids=ids, labels=labels, fused_lm_head=True)


def test_the_keyword_without_a_head_is_refused():
    model = apply_output_function(tiny(), "sigsoftmax")
    with pytest.raises(ValueError, match=r"call trl\.trainer\.utils\.add_fused_lm_head"):
        model(input_ids=tokens(), labels=tokens(), fused_lm_head=True)


def test_patching_again_and_removing_keep_the_head():
    model = apply_output_function(tiny(), "softmax").train()
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    ids, labels = example()
    apply_output_function(model, "sigsoftmax")
    for of in (phi, lambda z: z):
        wanted = formula(of(tiny()(ids).logits), labels, 0.7)
        other = copy.deepcopy(model)
        for one in (model, other):
            output = one(input_ids=ids, labels=labels, fused_lm_head=True)
            torch.testing.assert_close(output.log_probs, wanted["log_probs"], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(output.entropy, wanted["entropy"], rtol=1e-4, atol=1e-5)
        if of is phi:
            remove_output_function(model)
            assert "forward" in model.__dict__


def test_a_head_that_asks_for_something_new_is_refused():
    model = apply_output_function(tiny(), "sigsoftmax")
    with pytest.raises(ValueError, match="asks its fused output layer for skewness"):
        add_fused_lm_head(model, outputs=("log_probs", "skewness"))

    def add_fused_lm_head_of_another_version():
        def _fused_forward(self):
            return None

        code = _fused_forward.__code__.replace(co_qualname=trl_fused_head.FORWARD_OF_TRL)
        return types.FunctionType(code, {})

    with pytest.raises(ValueError, match="has no temperature, cast_lm_head_to_fp32, outputs"):
        model.forward = types.MethodType(add_fused_lm_head_of_another_version(), model)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_function_that_is_registered_anew_is_the_new_one(name):
    ids, labels = example()
    for power in (1.0, 2.0):
        sigsoftmax.register_function("mine", lambda z, power=power: power * z)
        model = apply_output_function(tiny(name), "mine").train()
        add_fused_lm_head(model, temperature=0.7)
        wanted = formula(power * tiny(name)(ids).logits, labels, 0.7)["log_probs"]
        found = model(input_ids=ids, labels=labels, fused_lm_head=True).log_probs
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def fully_sharded(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def sharded_with_norm(model):
    fully_shard([model.model.norm, model.lm_head])
    return fully_sharded(model)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_sharded, sharded_with_norm])
def test_several_processes(wrap):
    model = apply_output_function(tiny(), "gss(k=learned:0.5)", chunk_bytes=2000).train()
    add_fused_lm_head(model, temperature=0.7, outputs=OUTPUTS)
    single = copy.deepcopy(model)
    wrapped = wrap(model)
    ids, labels = example()
    outputs = [one(input_ids=ids, labels=labels, fused_lm_head=True) for one in (wrapped, single)]
    for key in ("loss", *OUTPUTS):
        torch.testing.assert_close(outputs[0][key], outputs[1][key])
    for output in outputs:
        (output.loss - 0.1 * output.entropy.sum()).backward()
    for (name, one), own in zip(model.named_parameters(), single.parameters(), strict=True):
        gradient = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
        torch.testing.assert_close(gradient, own.grad, msg=lambda text, name=name: f"{name}: {text}")
