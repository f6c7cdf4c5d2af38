"""Liger's losses are softmax and are refused on a patched model."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("liger_kernel")

import torch
from liger_kernel.transformers import apply_liger_kernel_to_llama
from tests.integrations.huggingface.tiny import phi, plain_loss, tiny, tokens
from tests.interpreted import run_interpreted
from transformers import Trainer, TrainingArguments

from sigsoftmax.integrations.huggingface import apply_output_function, remove_output_function

pytestmark = pytest.mark.usefixtures("liger_undone")

LOSS_ONLY = {"rope": False, "rms_norm": False, "swiglu": False}
REMEDY = "fused_linear_cross_entropy=False"


def test_the_fused_loss_on_a_patched_model_is_refused():
    model = apply_output_function(tiny(), "sigsoftmax").train()
    with pytest.raises(ValueError, match=f"sigsoftmax, and Liger is about to replace its forward pass.*{REMEDY}"):
        apply_liger_kernel_to_llama(model=model, **LOSS_ONLY)
    torch.testing.assert_close(
        model(tokens(), labels=tokens()).loss, plain_loss(phi(tiny()(tokens()).logits), tokens())
    )


@pytest.mark.parametrize("when", ["before the patch", "after the patch"])
def test_the_fused_loss_on_the_class_is_refused(when):
    model = tiny().train()
    if when == "before the patch":
        apply_liger_kernel_to_llama(**LOSS_ONLY)
    apply_output_function(model, "sigsoftmax")
    apply_liger_kernel_to_llama(**LOSS_ONLY)
    # On a CPU its kernel cannot run; a stand-in shows what happens where it can.
    with pytest.MonkeyPatch.context() as patch:
        stand_in = torch.zeros((), requires_grad=True)
        module = "liger_kernel.transformers.model.llama.lce_maybe_trainable_lm_head"
        patch.setattr(module, lambda *_, **__: stand_in)
        with pytest.raises(RuntimeError, match=f"`lce_forward`.*{REMEDY}"):
            model(input_ids=tokens(), labels=tokens())
    # It makes logits in evaluation, and these are phi.
    torch.testing.assert_close(model.eval()(tokens()).logits, phi(remove_output_function(model)(tokens()).logits))


def test_the_trainer_with_liger_is_refused_before_the_first_step(tmp_path):
    rows = tokens(4, 8)
    args = TrainingArguments(
        tmp_path, use_cpu=True, report_to=[], max_steps=1, use_liger_kernel=True, disable_tqdm=True
    )
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    # Older versions of transformers apply Liger as soon as the Trainer is made.
    with pytest.raises(ValueError, match=r'liger_kernel_config={"fused_linear_cross_entropy": False}'):
        Trainer(model=apply_output_function(tiny(), "sigsoftmax"), args=args, train_dataset=dataset).train()


def test_softmax_may_have_the_fused_loss():
    model = apply_output_function(tiny(), "softmax").train()
    apply_liger_kernel_to_llama(model=model, **LOSS_ONLY)
    assert "forward" in model.__dict__


def test_its_cross_entropy_is_not_the_one_that_a_patched_model_uses():
    model = apply_output_function(tiny(), "sigsoftmax", logits_with_labels="always").train()
    wanted = plain_loss(phi(tiny()(tokens()).logits), tokens())
    # It takes torch.nn.functional.cross_entropy away from everybody, and on a CPU it cannot run.
    apply_liger_kernel_to_llama(**LOSS_ONLY, cross_entropy=True, fused_linear_cross_entropy=False)
    torch.testing.assert_close(model(tokens(), labels=tokens()).loss, wanted)


@pytest.mark.slow
def test_its_kernels_run_beside_our_loss_in_the_interpreter():
    run_interpreted(Path(__file__).parent / "test_liger_kernels.py")
