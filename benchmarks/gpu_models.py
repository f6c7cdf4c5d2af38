"""Cases of the GPU benchmark on training steps of Hugging Face models of public sizes, with random weights.

A step is forward and backward; an optimiser would add the same to all of them. Attention and the other layers are those
of transformers for every implementation, so that a difference is that of the output layer and its loss.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from gpu_losses import Loss, Peers
from gpu_machine import Machine, gpu_case
from measuring import Measurement, Step
from torch import Tensor

BASELINE = "transformers softmax"
OURS = ("softmax", "sigsoftmax", "gss(k=0.2)", "mos(K=4)")
LENGTH = 2048
"""tokens of a sequence"""
STEPS = 3
"""more batches that are tried between the largest power of two that fits and the next"""


class Shape(NamedTuple):
    """A model; all of them tie the embedding and the output layer."""

    name: str
    kind: str
    """``model_type`` of transformers"""
    classes: int
    features: int
    hidden: int
    """features between the two products of a layer"""
    layers: int
    heads: int
    key_value_heads: int

    def made(self, device: str) -> Any:
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            self.kind,
            vocab_size=self.classes,
            hidden_size=self.features,
            intermediate_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            use_cache=False,
        )
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(device).train()


SHAPES = (
    Shape("SmolLM 135M", "llama", 49_152, 576, 1536, layers=30, heads=9, key_value_heads=3),
    Shape("Qwen2.5 0.5B", "qwen2", 151_936, 896, 4864, layers=24, heads=14, key_value_heads=2),
    Shape("Llama 3.2 1B", "llama", 128_256, 2048, 8192, layers=16, heads=32, key_value_heads=8),
    Shape("four layers of Llama 3.2 1B", "llama", 128_256, 2048, 8192, layers=4, heads=32, key_value_heads=8),
)


@dataclass(frozen=True)
class Trained:
    """A model, and its loss on a batch whose labels are its own tokens."""

    model: Any
    loss: Callable[[Tensor], Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def step(self, ids_BL: Tensor) -> Step:
        return Step(lambda: self.loss(ids_BL), self.leaves)


def with_its_loss(model: Any) -> Trained:
    return Trained(model, lambda ids_BL: model(input_ids=ids_BL, labels=ids_BL).loss)


def with_liger(shape: Shape, device: str) -> Trained:
    """With Liger's fused loss, and none of its other kernels."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen2

    model = shape.made(device)
    patch = {"llama": apply_liger_kernel_to_llama, "qwen2": apply_liger_kernel_to_qwen2}[shape.kind]
    patch(rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True, model=model)
    return with_its_loss(model)


def with_cut(shape: Shape, device: str, loss: Loss) -> Trained:
    """With cut-cross-entropy on the hidden vectors: the patch that comes with it needs an older transformers."""
    model = shape.made(device)

    def of(ids_BL: Tensor) -> Tensor:
        hidden_BLd = model.model(input_ids=ids_BL).last_hidden_state
        return loss(hidden_BLd[:, :-1].flatten(0, 1), model.lm_head.weight, ids_BL[:, 1:].flatten())

    return Trained(model, of)


def with_ours(shape: Shape, device: str, function: str, **options: str) -> Trained:
    from sigsoftmax.integrations.huggingface import apply_output_function

    return with_its_loss(apply_output_function(shape.made(device), function, **options))


def makers(shape: Shape, device: str, peers: Peers) -> dict[str, Callable[[], Trained]]:
    found: dict[str, Callable[[], Trained]] = {BASELINE: lambda: with_its_loss(shape.made(device))}
    if peers.liger_linear is not None:
        found["Liger softmax"] = lambda: with_liger(shape, device)
    if (cut := peers.cut) is not None:
        found["cut-cross-entropy softmax"] = lambda: with_cut(shape, device, cut)
    for function in OURS:
        found[f"ours {function}"] = lambda function=function: with_ours(shape, device, function)
    found["ours softmax, fast"] = lambda: with_ours(shape, device, "softmax", weight_gradient="fast")
    return found


def largest_fitting(fits: Callable[[int], bool], at_most: int) -> int:
    """About the largest number that fits: the largest power of two, and then ``STEPS`` halvings; 0 if not even 1 does.

    Every number above one that does not fit is taken not to fit either.
    """
    fitting, beyond = 0, at_most + 1
    tried = 1
    while tried <= at_most and fits(tried):
        fitting, tried = tried, 2 * tried
    if tried <= at_most:
        beyond = tried
    for _ in range(STEPS):
        middle = (fitting + beyond) // 2
        if middle in (fitting, beyond):
            break
        fitting, beyond = (middle, beyond) if fits(middle) else (fitting, middle)
    return fitting


def most_tokens(machine: Machine, made: Trained, length: int, classes: int, at_most: int) -> int:
    """Tokens of about the largest batch of which a step fits into the memory that the machine has left."""

    def fits(sequences: int) -> bool:
        try:
            made.step(torch.randint(classes, (sequences, length), device=machine.device))()
            machine.synchronize()
        except torch.OutOfMemoryError:
            for leaf in made.leaves:
                leaf.grad = None
            return False
        finally:
            gc.collect()
            machine.empty_cache()
        return True

    return length * largest_fitting(fits, at_most)


def training_step(
    machine: Machine,
    peers: Peers,
    shape: Shape,
    rounds: int,
    *,
    batch: int = 4,
    length: int = LENGTH,
    at_most: int = 512,
) -> list[Measurement]:
    """Time and memory of a step, and the longest batch of each implementation, alone on the device."""
    ids_BL = torch.randint(shape.classes, (batch, length), device=machine.device)
    steps: dict[str, Step] = {}
    longest: dict[str, int] = {}
    working: dict[str, Callable[[], Trained]] = {}
    for name, make in makers(shape, machine.device, peers).items():
        try:
            made = make()
            made.step(ids_BL)()
            machine.synchronize()
        except Exception as error:  # whatever a peer raises, the others are measured
            if not name.startswith(("Liger", "cut")):
                raise
            print(f"{name} is left out: {type(error).__name__}: {str(error).strip()[:120]}", flush=True)
            continue
        longest[name] = most_tokens(machine, made, length, shape.classes, at_most)
        working[name] = make
        del made
        gc.collect()
        machine.empty_cache()
    for name, make in working.items():
        steps[name] = make().step(ids_BL)
    targets: Mapping[str, str] = {}
    if "Liger softmax" in steps:
        targets = dict.fromkeys(("ours softmax", "ours sigsoftmax"), "<= 1.0x of Liger softmax")
    case = gpu_case(
        name=f"training step of {shape.name}, bf16, {batch} x {length} tokens, d={shape.features} V={shape.classes}",
        baseline=BASELINE,
        implementations=steps,
        targets=targets,
    )
    return [
        dataclasses.replace(
            m,
            tokens_per_second=1e3 * ids_BL.numel() / m.milliseconds,
            most_tokens=longest[m.implementation],
        )
        for m in machine.measured(case, rounds)
    ]
