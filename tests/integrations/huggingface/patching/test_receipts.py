"""A result that did not come from the output function is refused; whoever only wraps the forward pass is not."""

import copy
import functools
import types

import pytest

pytest.importorskip("transformers")

import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.state import AcceleratorState
from tests.integrations.huggingface.tiny import phi, plain_loss, tiny, tokens
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast

from sigsoftmax.integrations.huggingface import apply_output_function, from_pretrained, remove_output_function

IDS = tokens()


def patched(function="sigsoftmax", **options):
    return apply_output_function(tiny(), function, **options).train()


def softmax_loss(self, input_ids, labels=None, **_):
    """The forward pass of TRL and Liger: the backbone, and the weight of the output layer."""
    logits = self.model(input_ids).last_hidden_state @ self.lm_head.weight.T
    return CausalLMOutputWithPast(loss=plain_loss(logits, labels), logits=logits)


def as_a_tuple(self, input_ids, labels=None, **_):
    return softmax_loss(self, input_ids, labels).loss, None


def as_logits(self, input_ids, labels=None, **_):
    return {"scores": softmax_loss(self, input_ids, labels).logits}


def hidden_vectors(self, input_ids, **_):
    return self.model(input_ids).last_hidden_state


def formula():
    return plain_loss(phi(tiny()(IDS).logits), IDS)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreign", [softmax_loss, as_a_tuple, as_logits])
def test_a_forward_assigned_to_the_model_is_refused(foreign):
    model = patched()

    # As TRL does it: `__wrapped__` leads to ours, and proves nothing.
    @functools.wraps(type(model).forward)
    def replaced(self, *arguments, **options):
        return foreign(self, *arguments, **options)

    model.forward = types.MethodType(replaced, model)
    for call in (model, model.forward):
        with pytest.raises(RuntimeError, match=r"sigsoftmax, but its result came from `.*replaced`"):
            call(input_ids=IDS, labels=IDS)
    del model.forward
    torch.testing.assert_close(model(IDS, labels=IDS).loss, formula())


def test_a_forward_that_was_there_before_is_refused():
    model = tiny().train()
    model.forward = types.MethodType(softmax_loss, model)
    with pytest.raises(ValueError, match="computes its training loss itself"):
        apply_output_function(model, "sigsoftmax")


def test_a_forward_assigned_to_the_patched_class_is_refused(monkeypatch):
    model = patched()
    monkeypatch.setattr(type(model), "forward", softmax_loss)
    for call in (model, model.forward):
        with pytest.raises(RuntimeError, match="which did not use it"):
            call(input_ids=IDS, labels=IDS)
    monkeypatch.undo()
    torch.testing.assert_close(model(IDS, labels=IDS).loss, formula())


def test_a_forward_assigned_to_the_class_of_the_model_is_refused(monkeypatch):
    model = patched()
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda self, return_dict, **k: softmax_loss(self, **k))
    with pytest.raises(RuntimeError, match="it gave a loss or logits of softmax"):
        model(input_ids=IDS, labels=IDS)


# The compiler looks at the tensors of the error's frame.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_call_is_refused_too():
    model = patched()
    model.forward = types.MethodType(softmax_loss, model)
    with pytest.raises(RuntimeError, match="which did not use it"):
        torch.compile(model, backend="eager")(input_ids=IDS, labels=IDS)


@pytest.mark.parametrize("options", [{"z_loss": 0.1}, {"label_smoothing": 0.1}])
def test_softmax_needs_no_receipt_unless_it_is_regularised(options):
    model = patched("softmax")
    model.forward = types.MethodType(softmax_loss, model)
    torch.testing.assert_close(model(input_ids=IDS, labels=IDS).loss, plain_loss(tiny()(IDS).logits, IDS))
    apply_output_function(model, **options)
    with pytest.raises(RuntimeError, match="which did not use it"):
        model(input_ids=IDS, labels=IDS)


def test_a_model_that_was_trained_as_softmax_is_not_saved_as_anything_else(tmp_path):
    model = patched()
    # It returns no loss that could be refused: the loss is made of it outside.
    model.forward = types.MethodType(hidden_vectors, model)
    model(IDS).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"`hidden_vectors`.*remove_output_function\(model\) and save it as the soft"
    ):
        model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    plain = remove_output_function(model)
    del plain.forward
    plain.save_pretrained(tmp_path)
    kept = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(kept) is LlamaForCausalLM
    torch.testing.assert_close(kept(IDS).logits, tiny()(IDS).logits)


def test_a_refused_step_is_not_saved_and_one_of_the_output_function_is(tmp_path):
    model = patched()
    model.forward = types.MethodType(softmax_loss, model)
    with pytest.raises(RuntimeError):
        model(input_ids=IDS, labels=IDS)
    with pytest.raises(RuntimeError, match="the last training step"):
        model.save_pretrained(tmp_path)
    del model.forward
    with torch.no_grad():
        model(IDS, labels=IDS)
    with pytest.raises(RuntimeError, match="the last training step"):
        model.save_pretrained(tmp_path)
    model(IDS, labels=IDS).loss.backward()
    model.save_pretrained(tmp_path)
    assert str(from_pretrained(tmp_path).output_function.function) == "sigsoftmax"


def test_evaluation_is_no_training_step(tmp_path):
    model = patched().eval()
    model.forward = types.MethodType(hidden_vectors, model)
    model(IDS)
    model.save_pretrained(tmp_path)


def test_an_adapter_that_was_trained_as_softmax_is_not_saved(tmp_path):
    peft = pytest.importorskip("peft")
    inner = patched()
    model = peft.get_peft_model(inner, peft.LoraConfig(target_modules=["q_proj"]))
    inner.forward = types.MethodType(softmax_loss, inner)
    with pytest.raises(RuntimeError, match="which did not use it"):
        model(input_ids=IDS, labels=IDS)
    with pytest.raises(RuntimeError, match="the last training step"):
        model.save_pretrained(tmp_path)


# --- no false alarm --------------------------------------------------------------------------------------------------


def check(model, *, tolerance=1e-5):
    """A training step gives the formula's loss, and the same in evaluation."""
    loss = model(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(loss.float(), formula(), rtol=tolerance, atol=tolerance)
    loss.backward()
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    torch.testing.assert_close(logits.float(), phi(tiny()(IDS).logits), rtol=tolerance, atol=30 * tolerance)
    model.train()


def test_hooks_of_accelerate():
    model = patched()
    add_hook_to_module(model, ModelHook())
    assert "forward" in model.__dict__
    check(model)
    check(copy.deepcopy(model))


@pytest.fixture
def fresh_accelerate():
    """accelerate remembers the precision of the first Accelerator in a process, which may be another test's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_autocast_of_accelerate():
    model = patched()
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare_model(model)
    assert "forward" in model.__dict__
    check(prepared, tolerance=0.05)
    bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    check(bare)
    assert bare is model


@pytest.mark.parametrize("when", ["adapter first", "patch first"])
def test_peft(when):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(target_modules=["q_proj"])
    if when == "patch first":
        check(peft.get_peft_model(patched(), adapter))
    else:
        check(apply_output_function(peft.get_peft_model(tiny(), adapter), "sigsoftmax").train())


@pytest.mark.usefixtures("process_group")
def test_ddp():
    model = DistributedDataParallel(patched())
    check(model)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("use_orig_params", [False, True])
# One process has nothing to shard, and FSDP says so.
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`", "ignore:.*FullyShardedDataParallel.*deprecat")
def test_fsdp1(use_orig_params):
    model = FullyShardedDataParallel(patched(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    check(model)


@pytest.mark.usefixtures("process_group")
def test_fsdp2():
    model = patched()
    for layer in model.model.layers:
        fully_shard(layer)
    check(fully_shard(model))


def test_compiled_model():
    check(torch.compile(patched(), backend="aot_eager"))


def test_model_that_compiles_itself():
    model = patched()
    model.compile(backend="aot_eager")
    check(model)


def test_compiled_forward_is_compiled_once():
    model = patched()
    torch._dynamo.reset()
    graphs = []

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward

    model.forward = torch.compile(model.forward, backend=counting, fullgraph=True)
    for _ in range(4):
        loss = model(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(loss, formula())
    # A receipt that the compiler guards on would compile every call anew.
    assert len(graphs) == 1
    check(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = patched()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    check(model)


def test_deepcopy_runs_the_copy():
    model = patched()
    original = model.forward

    def wrapper(self, *arguments, **options):
        return type(self).forward(self, *arguments, **options)

    model.forward = types.MethodType(wrapper, model)
    other = copy.deepcopy(model)
    check(other)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    check(model)
    assert other(input_ids=IDS).logits.std() < 1e-6
    model.forward = original
    assert "forward" not in model.__dict__


def test_the_patch_can_be_removed_under_wrappers():
    model = patched()
    add_hook_to_module(model, ModelHook())
    kept = model.forward
    remove_output_function(model)
    torch.testing.assert_close(model(IDS).logits, tiny()(IDS).logits)
    torch.testing.assert_close(kept(input_ids=IDS).logits, tiny()(IDS).logits)


# --- losses of others ------------------------------------------------------------------------------------------------


def test_a_loss_from_outside_takes_the_logits_that_the_model_returned():
    model = patched().eval()
    output = model(IDS, labels=IDS)
    outside = model.loss_function(logits=output.logits, labels=IDS, vocab_size=model.config.vocab_size)
    torch.testing.assert_close(outside, output.loss)


def test_a_softmax_loss_that_somebody_set_is_that_of_the_output_function(tmp_path):
    from transformers.loss.loss_utils import ForCausalLMLoss

    model = patched()
    model.loss_function = ForCausalLMLoss
    torch.testing.assert_close(model(IDS, labels=IDS).loss, formula())
    output = model.eval()(IDS, labels=IDS)
    torch.testing.assert_close(output.logits, phi(tiny()(IDS).logits))
    torch.testing.assert_close(output.loss, formula())
    arguments = TrainingArguments(tmp_path, use_cpu=True, report_to=[])
    trainer = Trainer(
        model=patched(),
        args=arguments,
        compute_loss_func=lambda output, labels, **_: plain_loss(output.logits, labels),
    )
    loss = trainer.compute_loss(trainer.model, {"input_ids": IDS, "labels": IDS})
    torch.testing.assert_close(loss, formula())
