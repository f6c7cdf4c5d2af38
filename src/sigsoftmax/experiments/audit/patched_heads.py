"""The output functions of Hugging Face models that this package has patched, mixtures among them.

A mixture makes K hidden vectors and the logits of a prior of each vector that enters the output layer. These are the
contexts of its audit; its weights are those of the output layer.

Shapes: N contexts, K components, V vocabulary, d width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from sigsoftmax.analysis.audit.findings import contexts_for_bounds
from sigsoftmax.analysis.head_weights import Contexts, detached
from sigsoftmax.experiments.audit.huggingface_files import ModelFiles
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.heads import Head
from sigsoftmax.integrations.huggingface.patching.patched_model import is_patched

__all__ = ["gaussian_contexts", "has_mixture", "latent_contexts", "read_stored", "stated_member", "stored_head"]


def has_mixture(model: Any) -> bool:
    return is_patched(model) and model.output_function.takes_hidden


def stored_head(model: Any) -> Head:
    """The head of a patched model: its function of raw logits, with values in place of what is learned."""
    function = model.output_function
    member = detached(function.of_raw_logits())
    if not function.takes_hidden:
        return Head(member)
    return dataclasses.replace(function.head("softmax"), function=member)


def stated_member(name: str, model: Any, function: str | None) -> OutputFunction | None:
    """The member that was stated to be the model's output function; ValueError for a mixture, and of one."""
    if function is None:
        return None
    if has_mixture(model):
        raise ValueError(
            f"{name} has stored that its output is {model.output_function.described()}; leave --function out"
        )
    head = Head.parse(function, allow_options=True)
    if head.components > 1:
        raise ValueError(
            f"the output of {name} is a function of one hidden vector per context, and {head} takes a hidden vector "
            f"per component and the logits of a prior; --heads '{head.plain}' and a target (--teacher or --target) "
            "tell what that mixture would buy"
        )
    return head.function


@torch.no_grad()
def latent_contexts(model: Any, hidden_Nd: Tensor, **known: Any) -> Contexts:
    """The contexts that a mixture makes of vectors that enter the output layer; ``known`` are their other fields."""
    made = model.output_function.linear(hidden_Nd, model.get_output_embeddings())
    return Contexts(hidden_NKd=made.hidden, prior_logits_NK=made.prior_logits, **known)


def gaussian_contexts(model: Any, seed: int) -> Contexts:
    """The contexts that a mixture makes of Gaussian vectors, as many as the bounds need."""
    width = model.output_function.features
    needed = contexts_for_bounds(width)
    hidden_Nd = torch.randn(needed, width, generator=torch.Generator().manual_seed(seed))
    return latent_contexts(
        model, hidden_Nd, description=f"{needed:,} Gaussian vectors before the mixture's latent layer"
    )


def read_stored(files: ModelFiles, skeleton: Any) -> None:
    """Read the parameters of the output function into a model that has no memory for its own."""
    function = skeleton.output_function
    stored = {name: files.tensor({f"output_function.{name}"}) for name, _ in function.named_parameters()}
    shaped = {name: stored[name].reshape(parameter.shape) for name, parameter in function.named_parameters()}
    function.load_state_dict(shaped, strict=False, assign=True)
