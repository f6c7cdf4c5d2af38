"""What tests of trainers share."""

import pytest


@pytest.fixture
def liger_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger changes modules and classes of transformers, and torch's own cross-entropy; all is as it was afterwards."""
    import torch
    from transformers.models.llama import modeling_llama

    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", modeling_llama.LlamaForCausalLM.forward)
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", torch.nn.functional.cross_entropy)
