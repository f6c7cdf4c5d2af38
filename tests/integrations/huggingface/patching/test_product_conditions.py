"""Changes after a model was patched that stand between its output layer and its loss."""

import copy
import json
import threading
import types
import warnings
from pathlib import Path

import pytest
import torch
from tests.integrations.huggingface.tiny import phi, plain_loss, tiny, tokens
from torch import nn

from sigsoftmax.integrations.huggingface import apply_output_function, from_pretrained, remove_output_function
from sigsoftmax.integrations.huggingface.patching import output_layer_hook


def halved_by_a_hook(model):
    model.lm_head.register_forward_hook(lambda layer, arguments, output: 0.5 * output)


def halved_in_place_by_a_hook(model):
    model.lm_head.register_forward_hook(lambda layer, arguments, output: output.mul_(0.5))


def halved_by_another_forward(model):
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 0.5 * own(hidden)


def halved_before_accelerate(model):
    hooks = pytest.importorskip("accelerate.hooks")
    halved_by_another_forward(model)
    hooks.add_hook_to_module(model.lm_head, hooks.ModelHook())


def another_cap(model):
    model.config.final_logit_softcapping = 1.0


def no_cap(model):
    model.config.final_logit_softcapping = None


def another_scale(model):
    model.config.logits_scaling = 1.0


def another_scale_of_the_model(model):
    model.logit_scale = 1.0


CHANGES = [
    ("llama", halved_by_a_hook, "forward hook"),
    ("llama", halved_in_place_by_a_hook, "forward hook"),
    ("llama", halved_by_another_forward, "another `forward`"),
    ("llama", halved_before_accelerate, "another `forward`"),
    ("gemma2", another_cap, "final_logit_softcapping was 4.0 when the model was patched and is 1.0 now"),
    ("gemma2", no_cap, "final_logit_softcapping was 4.0 when the model was patched and is None now"),
    ("granite", another_scale, "logits_scaling was 3.0 when the model was patched and is 1.0 now"),
    ("cohere", another_scale_of_the_model, "logit_scale was 0.3 when the model was patched and is 1.0 now"),
]


def right_loss(model, ids):
    """The loss from the logits that the model has without its output function."""
    plain = remove_output_function(copy.deepcopy(model))
    with torch.no_grad():
        return plain_loss(phi(plain.eval()(ids).logits), ids)


@pytest.mark.parametrize(("name", "change", "reason"), CHANGES)
def test_a_change_of_logits_after_the_patch_is_in_the_loss_and_is_told(name, change, reason):
    model, ids = apply_output_function(tiny(name), "sigsoftmax"), tokens()
    change(model)
    wanted = right_loss(model, ids)
    with pytest.warns(UserWarning, match=reason):
        loss = model.train()(ids, labels=ids).loss
    torch.testing.assert_close(loss.detach(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.eval()(ids, labels=ids).loss.detach(), wanted, rtol=1e-4, atol=1e-5)


def test_a_hook_that_was_there_before_the_patch():
    model, ids = tiny(), tokens()
    halved_by_a_hook(model)
    apply_output_function(model, "sigsoftmax")
    with pytest.warns(UserWarning, match="forward hook"):
        loss = model.train()(ids, labels=ids).loss
    torch.testing.assert_close(loss.detach(), right_loss(model, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("function", ["sigsoftmax", "mos(K=2)"])
def test_a_hook_before_the_layer_counts_whenever_it_was_registered(function):
    ids = tokens()

    def halved(model):
        model.lm_head.register_forward_pre_hook(lambda layer, arguments: (0.5 * arguments[0],))
        return model

    before = apply_output_function(halved(tiny()), function)
    after = apply_output_function(tiny(), function)
    after.load_state_dict(before.state_dict())
    halved(after)
    one, other = (model.train()(ids, labels=ids).loss for model in (before, after))
    assert torch.equal(one, other)
    evaluated = after.eval()(ids, labels=ids)
    torch.testing.assert_close(evaluated.loss, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain_loss(evaluated.logits, ids), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", [halved_by_a_hook, another_cap])
def test_a_compiled_step_has_the_changes_that_were_there_when_it_was_compiled(change):
    model, ids = apply_output_function(tiny("gemma2"), "sigsoftmax"), tokens()
    change(model)
    wanted = right_loss(model, ids)
    with warnings.catch_warnings(action="ignore"):
        loss = torch.compile(model.train(), backend="aot_eager")(ids, labels=ids).loss
    torch.testing.assert_close(loss.detach(), wanted, rtol=1e-4, atol=1e-5)


def test_a_compiled_step_does_not_take_the_changes_of_another_model():
    # A setting rather than a hook: torch.compile does not compile a model's own forward pass anew for another hook.
    model, ids = apply_output_function(tiny("gemma2"), "sigsoftmax"), tokens()
    changed = copy.deepcopy(model)
    another_cap(changed)
    wanted = [right_loss(model, ids), right_loss(changed, ids)]
    assert abs(wanted[0] - wanted[1]) > 0.1
    with warnings.catch_warnings(action="ignore"):
        losses = [torch.compile(one.train(), backend="aot_eager")(ids, labels=ids).loss for one in (model, changed)]
    torch.testing.assert_close([loss.detach() for loss in losses], wanted, rtol=1e-4, atol=1e-5)


def test_a_compiled_step_is_compiled_anew_for_another_layer():
    # Nothing that was compiled for a layer without a hook may serve here.
    torch.compiler.reset()
    model, ids = apply_output_function(tiny("gemma2"), "sigsoftmax"), tokens()
    compiled = torch.compile(model.train(), backend="aot_eager")
    compiled(ids, labels=ids)
    model.lm_head = copy.deepcopy(model.lm_head)
    halved_by_a_hook(model)
    wanted = right_loss(model, ids)
    model.train()
    with warnings.catch_warnings(action="ignore"):
        loss = compiled(ids, labels=ids).loss
    torch.testing.assert_close(loss.detach(), wanted, rtol=1e-4, atol=1e-5)


def test_a_mixture_cannot_be_computed_beside_a_hook():
    model, ids = apply_output_function(tiny(), "mos(K=2)"), tokens()
    halved_by_a_hook(model)
    with pytest.raises(ValueError, match=r"forward hook.*; leave the output layer .* without hooks"):
        model(ids)


@pytest.mark.filterwarnings("error")
def test_hooks_that_move_weights_cost_no_stored_logits():
    hooks = pytest.importorskip("accelerate.hooks")
    model, ids = apply_output_function(tiny(), "sigsoftmax"), tokens()
    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook("cpu", io_same_device=True))
    assert "logits" not in model.train()(ids, labels=ids)


def test_an_offloaded_output_layer_stores_logits_and_is_right(tmp_path: Path):
    accelerate = pytest.importorskip("accelerate")
    ids = tokens()
    wanted = right_loss(apply_output_function(tiny(), "sigsoftmax"), ids)
    model = accelerate.cpu_offload(apply_output_function(tiny(), "sigsoftmax"), execution_device="cpu")
    with pytest.warns(UserWarning, match="offloaded"):
        loss = model.train()(ids, labels=ids).loss
    torch.testing.assert_close(loss.detach(), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="get_state_dict_offloaded_model"):
        model.save_pretrained(tmp_path)
    model.save_pretrained(
        tmp_path, state_dict=accelerate.utils.modeling.get_state_dict_offloaded_model(model), is_main_process=True
    )
    loaded = from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.train()(ids, labels=ids).loss.detach(), wanted, rtol=1e-4, atol=1e-5)


def test_a_cap_that_was_changed_in_a_stored_configuration(tmp_path: Path):
    apply_output_function(tiny("gemma2"), "sigsoftmax").save_pretrained(tmp_path)
    path, ids = tmp_path / "config.json", tokens()
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"final_logit_softcapping": 1.0}))
    model = from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="final_logit_softcapping was 4.0"):
        loss = model.train()(ids, labels=ids).loss
    torch.testing.assert_close(loss.detach(), right_loss(model, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", ["sigsoftmax", "mos(K=2)"])
def test_threads_get_their_own_loss_or_are_told_to_take_turns(monkeypatch, function):
    """A second call comes while the first one is inside the model, and has other hidden vectors."""
    model = apply_output_function(tiny(), function).train()
    ids, others = tokens(), tokens(seed=2)
    wanted, entered, told = model(ids, labels=ids).loss, threading.Event(), []
    take = output_layer_hook.WaitingCall.take

    def call_from_another_thread():
        try:
            model(others, labels=others)
        except RuntimeError as error:
            told.append(str(error))

    def slow_take(self, layer, hidden):
        if not entered.is_set():
            entered.set()
            thread = threading.Thread(target=call_from_another_thread)
            thread.start()
            thread.join()
        take(self, layer, hidden)

    monkeypatch.setattr(output_layer_hook.WaitingCall, "take", slow_take)
    assert torch.equal(model(ids, labels=ids).loss, wanted)
    assert len(told) == 1
    assert "take turns with a lock" in told[0]


def test_a_call_without_labels_in_another_thread_leaves_a_loss_alone(monkeypatch):
    model = apply_output_function(tiny(), "sigsoftmax").train()
    ids, others = tokens(), tokens(seed=2)
    wanted, logits = model(ids, labels=ids).loss, model(others).logits
    take, found = output_layer_hook.WaitingCall.take, []

    def slow_take(self, layer, hidden):
        thread = threading.Thread(target=lambda: found.append(model(others).logits))
        thread.start()
        thread.join()
        take(self, layer, hidden)

    monkeypatch.setattr(output_layer_hook.WaitingCall, "take", slow_take)
    assert torch.equal(model(ids, labels=ids).loss, wanted)
    assert torch.equal(found[0], logits)


def test_an_evaluation_is_right_while_another_thread_comes_and_goes():
    model = apply_output_function(tiny(), "sigsoftmax").eval()
    ids, others = tokens(), tokens(seed=2)
    wanted = model(ids, labels=ids).loss
    is_first = True

    def meanwhile(layer, arguments):
        nonlocal is_first
        if is_first:
            is_first = False
            thread = threading.Thread(target=lambda: model(others))
            thread.start()
            thread.join()

    model.model.register_forward_pre_hook(meanwhile)
    assert torch.equal(model(ids, labels=ids).loss, wanted)


def softmax_forward(self, input_ids=None, labels=None, **options):
    logits = nn.functional.linear(self.model(input_ids).last_hidden_state, self.lm_head.weight)
    return types.SimpleNamespace(loss=plain_loss(logits, labels), logits=logits)


def test_a_class_made_of_the_patched_one_is_checked():
    model, ids = apply_output_function(tiny(), "sigsoftmax"), tokens()
    model.__class__ = type("Other", (type(model),), {"forward": softmax_forward})
    with pytest.raises(RuntimeError, match=r"came from `softmax_forward`"):
        model.train()(ids, labels=ids)


def test_a_forward_put_past_the_class_is_refused_when_the_model_is_saved(tmp_path):
    model = apply_output_function(tiny(), "sigsoftmax")
    model.__dict__["forward"] = types.MethodType(softmax_forward, model)
    with pytest.raises(RuntimeError, match=r"`softmax_forward` .* past its class"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("function", ["mos(K=2)", "shifted_sigsoftmax(b=learned:1)"])
def test_parameters_of_the_output_function_that_are_offloaded_are_refused(tmp_path: Path, function: str):
    accelerate = pytest.importorskip("accelerate")
    apply_output_function(tiny(), function).save_pretrained(tmp_path / "model")
    places = {"model": "cpu", "lm_head": "cpu", "output_function": "disk"}
    advice = "give the module output_function a device in device_map"
    with pytest.raises(ValueError, match=advice):
        from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "loaded")
    ids, model = tokens(), from_pretrained(tmp_path / "model")
    accelerate.dispatch_model(model, places, offload_dir=tmp_path / "dispatched")
    with pytest.raises(ValueError, match=advice):
        model.eval()(ids)
    with pytest.raises(ValueError, match=advice):
        model.train()(ids, labels=ids)


def test_a_patched_model_runs_on_the_meta_device():
    model = apply_output_function(tiny(), "shifted_sigsoftmax(b=learned:1)").to("meta")
    assert model(tokens().to("meta")).logits.is_meta
