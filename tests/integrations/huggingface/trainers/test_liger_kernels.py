"""Liger's kernels for norms, rotary embeddings and SwiGLU run beside our loss, and its fused loss is refused.

They run on a GPU, or in Triton's interpreter, for which ``test_liger`` starts a process.
"""

import copy

import pytest

pytest.importorskip("transformers")
pytest.importorskip("liger_kernel")
pytest.importorskip("triton")

import torch
from liger_kernel.transformers import apply_liger_kernel_to_llama
from tests.backends.triton.device import DEVICE, IS_INTERPRETED
from tests.integrations.huggingface.tiny import phi, plain_loss, tiny, tokens
from transformers import Trainer, TrainingArguments

from sigsoftmax.integrations.huggingface import apply_output_function

pytestmark = pytest.mark.usefixtures("liger_undone")

if IS_INTERPRETED:
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    # The interpreter hands numbers to kernels as Python's floats, which lack the methods of the language's scalars, and
    # has no functions of CUDA's library.
    _converted = interpreter._implicit_cvt

    def _convert(value):
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
        return _converted(value)

    interpreter._implicit_cvt = _convert
    rms_norm.rsqrt = lambda x: 1.0 / tl.sqrt(x)


@pytest.mark.parametrize("function", ["softmax", "sigsoftmax"])
def test_its_other_kernels_beside_our_loss(function):
    plain = tiny(hidden_size=64, intermediate_size=128).to(DEVICE).train()
    ids = tokens().to(DEVICE)
    wanted = plain_loss(phi(plain(ids).logits) if function == "sigsoftmax" else plain(ids).logits, ids)
    wanted.backward()
    model = apply_output_function(copy.deepcopy(plain), function)
    model.zero_grad()
    apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=False)
    assert "Liger" in model.model.norm.forward.__qualname__
    output = model(input_ids=ids, labels=ids)
    assert "logits" not in output
    torch.testing.assert_close(output.loss, wanted, rtol=1e-3, atol=1e-3)
    output.loss.backward()
    for own, value in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(value.grad, own.grad, rtol=1e-2, atol=1e-3)


def test_the_trainer_with_its_other_kernels(tmp_path):
    rows = tokens(4, 8)
    trainer = Trainer(
        model=apply_output_function(tiny(), "sigsoftmax"),
        args=TrainingArguments(
            tmp_path,
            report_to=[],
            max_steps=1,
            logging_steps=1,
            learning_rate=0.0,
            per_device_train_batch_size=4,
            use_cpu=DEVICE.type == "cpu",
            use_liger_kernel=True,
            liger_kernel_config={"fused_linear_cross_entropy": False},
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    trainer.train()
    assert "Liger" in trainer.model.model.norm.forward.__qualname__
    wanted = float(plain_loss(phi(tiny()(rows).logits.detach()), rows))
    assert trainer.state.log_history[0]["loss"] == pytest.approx(wanted, rel=1e-2)


def test_its_fused_loss_is_refused_where_it_can_run():
    model = tiny(hidden_size=64, intermediate_size=128).to(DEVICE).train()
    apply_output_function(model, "sigsoftmax")
    apply_liger_kernel_to_llama(rope=False, rms_norm=False, swiglu=False)
    with pytest.raises(RuntimeError, match=r"`lce_forward`.*fused_linear_cross_entropy=False"):
        model(input_ids=tokens().to(DEVICE), labels=tokens().to(DEVICE))
