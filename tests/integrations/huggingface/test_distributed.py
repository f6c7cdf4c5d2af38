"""Two processes train a patched model as one does: DDP, and FSDP with the output layer in the root or in a group."""

import pytest

pytest.importorskip("transformers")

import os

import torch
import torch.distributed as dist
from tests.integrations.huggingface.tiny import tiny, tokens
from torch import multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sigsoftmax.integrations.huggingface import apply_output_function

FUNCTION, MIXTURE = "gss(k=learned:0.5)", "mixture(gss(k=learned:0.5), K=3)"
WAYS = {
    "ddp": lambda model: DistributedDataParallel(model),
    "fsdp": lambda model: sharded(model),
    "fsdp, output layer apart": lambda model: sharded(model, [model.lm_head]),
    "fsdp, output layer and norm": lambda model: sharded(model, [model.model.norm, model.lm_head]),
    "fsdp, tied and norm": lambda model: sharded(model, [model.model.embed_tokens, model.model.norm, model.lm_head]),
}


def sharded(model, group=None):
    for layer in model.model.layers:
        fully_shard(layer)
    if group is not None:
        fully_shard(group)
    return fully_shard(model)


def model_of(name, function):
    return apply_output_function(tiny(name), function).train()


def gradients(model):
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name.removeprefix("module.")] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def process(rank, folder, way, name, function):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    # In a function of its own: DDP waits forever if it is freed after its process group.
    found = gradients_of_part(rank, way, name, function)
    if rank == 0:
        torch.save(found, f"{folder}/gradients.pt")
    dist.barrier()
    dist.destroy_process_group()
    # Threads of gloo can outlive the interpreter, and abort a process that has done its work.
    os._exit(0)


def gradients_of_part(rank, way, name, function):
    ids = tokens(4, 7)[2 * rank : 2 * rank + 2]
    model = WAYS[way](model_of(name, function))
    output = model(input_ids=ids, labels=ids)
    assert "logits" not in output
    output.loss.backward()
    return gradients(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "name", "function"),
    [
        ("ddp", "llama tied", FUNCTION),
        ("fsdp", "llama tied", FUNCTION),
        ("fsdp", "llama", FUNCTION),
        ("fsdp, output layer apart", "llama", FUNCTION),
        ("ddp", "llama", MIXTURE),
        ("fsdp, output layer apart", "llama", MIXTURE),
        ("fsdp, output layer and norm", "llama", FUNCTION),
        ("fsdp, output layer and norm", "llama", MIXTURE),
        ("fsdp, tied and norm", "llama tied", FUNCTION),
    ],
)
def test_two_processes_get_the_gradients_of_one(tmp_path, way, name, function):
    multiprocessing.spawn(process, (str(tmp_path), way, name, function), nprocs=2)
    model = model_of(name, function)
    ids = tokens(4, 7)
    model(input_ids=ids, labels=ids).loss.backward()
    found, wanted = torch.load(tmp_path / "gradients.pt"), gradients(model)
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(
            found[key], gradient, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
