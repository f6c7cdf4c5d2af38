"""Hugging Face causal language models as something to audit: their output layer, and contexts from a text.

Hidden vectors are taken where they enter the output layer, by a hook, so that whatever a model does before it is done.
The hook hands on one position alone, so that the logits of a text are never computed. This module needs transformers.

Shapes: B windows, L tokens of a window, R rows of all windows, N contexts, V vocabulary, d width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sigsoftmax.analysis.head_weights import Contexts, HeadWeights
from sigsoftmax.analysis.spectrum.entry_checks import dtype_name
from sigsoftmax.experiments.audit.audited_models import AuditedModel, Progress, check_length
from sigsoftmax.experiments.audit.default_text import generated_text
from sigsoftmax.experiments.audit.detect_function import (
    Detected,
    agreement,
    declared_by,
    detect,
    relative_difference,
)
from sigsoftmax.experiments.audit.huggingface_files import ModelFiles, quiet
from sigsoftmax.experiments.audit.patched_heads import (
    gaussian_contexts,
    has_mixture,
    latent_contexts,
    read_stored,
    stated_member,
    stored_head,
)
from sigsoftmax.family.heads import Head
from sigsoftmax.integrations.huggingface.examination.output_layers import examine, names_of
from sigsoftmax.integrations.huggingface.patching.patched_model import is_patched

__all__ = ["HuggingFaceModel", "Windows", "open_head_only", "open_model"]

PROBE_TOKENS = 8


@dataclass(frozen=True)
class Windows:
    """Pieces of a text as token ids."""

    ids_BL: Tensor
    description: str


@dataclass
class HuggingFaceModel:
    """A loaded model, what is known of its output layer, and the windows that it was shown last."""

    known: AuditedModel
    """without contexts; the bias of its layer, and the hidden vectors, are multiplied by the scale of the logits"""
    model: Any
    tokenizer: Any | None
    shown: Windows | None = None

    @property
    def vocabulary(self) -> int:
        return self.known.vocabulary

    def windows(
        self, text: str | None, count: int, *, window: int, seed: int, text_name: str = "the given text"
    ) -> Windows:
        """Windows spread evenly over a text, for at most so many contexts."""
        config = self.model.config.get_text_config()
        limits = [getattr(config, key, None) for key in ("max_position_embeddings", "n_positions")]
        length = min([window, *(limit for limit in limits if isinstance(limit, int) and limit > 1)])
        needed = math.ceil(count / (length - 1))
        if self.tokenizer is None:
            generator = torch.Generator().manual_seed(seed)
            random_BL = torch.randint(self.vocabulary, (needed, length), generator=generator)
            return Windows(random_BL, "random tokens")
        if text is None:
            text, text_name = generated_text(2 * count + 200, seed), "a generated English text"
        # A line at a time: tokenizers warn about texts that are longer than the model.
        lines = text.splitlines(keepends=True)
        ids = [one for line in lines for one in self.tokenizer(line, add_special_tokens=False)["input_ids"]]
        check_length(len(ids))
        start = self.tokenizer.bos_token_id
        own = min(len(ids), length if start is None else length - 1)
        whole = len(ids) // own
        chosen = torch.linspace(0, whole - 1, min(needed, whole)).round().long().unique()
        windows_BL = torch.tensor(ids[: whole * own]).view(whole, own)[chosen]
        if start is not None:
            windows_BL = nn.functional.pad(windows_BL, (1, 0), value=start)
        return Windows(windows_BL, f"{text_name}, {windows_BL.shape[0]:,} windows of {windows_BL.shape[1]} tokens")

    def contexts(self, windows: Windows, count: int, progress: Progress, *, batch_tokens: int = 1024) -> Contexts:
        """The hidden vectors of the windows' positions, each with the token that follows."""
        known = min(self.vocabulary, self.model.get_input_embeddings().weight.shape[0])
        if int(windows.ids_BL.max()) >= known:
            raise ValueError(
                f"the tokenizer makes token {int(windows.ids_BL.max())}, but {self.known.name} has {known} tokens; the "
                "tokenizer belongs to another model"
            )
        hidden: list[Tensor] = []
        batches = windows.ids_BL.split(max(1, batch_tokens // windows.ids_BL.shape[1]))
        for number, ids_BL in enumerate(batches, start=1):
            progress(f"running the model: batch {number} of {len(batches)}")
            hidden_BLd, _ = _run(self.model, ids_BL, keep_logits=False)
            hidden.append(hidden_BLd[:, :-1].float().flatten(0, 1))
        self.shown = windows
        hidden_Nd = torch.cat(hidden)[:count]
        known = {"next_tokens_N": windows.ids_BL[:, 1:].flatten()[:count], "description": windows.description}
        if has_mixture(self.model):
            return latent_contexts(self.model, hidden_Nd, **known)
        return Contexts.of_rows(hidden_Nd.cpu() * self.known.scale, **known)

    def with_text(self, text: str | None, *, window: int, seed: int, text_name: str = "the given text") -> AuditedModel:
        """The model with the contexts of a text."""
        if self.tokenizer is None and text is not None:
            raise ValueError(
                f"--text cannot be read by {self.known.name}: no tokenizer lies with it. Store the tokenizer in its "
                "folder, or leave --text out and random tokens are taken"
            )

        def contexts(count: int, progress: Progress) -> Contexts:
            windows = self.windows(text, count, window=window, seed=seed, text_name=text_name)
            return self.contexts(windows, count, progress)

        return dataclasses.replace(self.known, contexts=contexts)


def open_model(
    name: str,
    *,
    memory: int,
    function: str | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    progress: Progress = lambda _: None,
) -> HuggingFaceModel:
    """Load a causal language model from a folder or the hub, and find out its output function.

    A model that brings code of its own is refused unless ``trust_remote_code`` says that this code may run.
    """
    files = ModelFiles(name, trust_remote_code)
    with quiet():
        progress(f"reading the configuration of {name}")
        config = files.config()
        # The skeleton tells the size before anything is loaded.
        numbers = sum(parameter.numel() for parameter in files.skeleton(config).parameters())
        dtype = _loading_dtype(name, config, numbers, memory)
        progress(f"loading {name}: {numbers / 1e6:,.0f} million parameters in {dtype_name(dtype)}")
        model, missing = files.model(dtype)
        tokenizer = files.tokenizer()
    model = model.eval().to(device)
    output = _output_module(name, model)
    notes = _note_on_missing(name, model, output.weight, missing)
    weight_Vd = output.weight.detach()
    bias_V = output.bias.detach() if getattr(output, "bias", None) is not None else None
    head, found, vocabulary = _found_function(name, model, weight_Vd, bias_V, function)
    if vocabulary < weight_Vd.shape[0]:
        notes.append(
            f"The model leaves out the last {weight_Vd.shape[0] - vocabulary} rows of its output matrix; so does this."
        )
        weight_Vd, bias_V = weight_Vd[:vocabulary], None if bias_V is None else bias_V[:vocabulary]
    if dtype != torch.float32:
        notes.append(f"The model ran in {dtype_name(dtype)}; what is computed from H and W is in float64.")
    if tokenizer is None:
        notes.append(
            "No tokenizer lies with the model, so the contexts are random tokens, and no text looks like that."
        )
    scaled_bias_V = None if bias_V is None else bias_V.to(torch.float64) * found.scale
    known = AuditedModel(
        name=name,
        layer=HeadWeights(weight_Vd=weight_Vd, bias_V=scaled_bias_V, head=head),
        how_known=found.explanation,
        scale=found.scale,
        operations_per_context=2.0 * (sum(x.numel() for x in model.parameters()) - weight_Vd.numel()),
        notes=tuple(notes),
    )
    return HuggingFaceModel(known, model, tokenizer)


def open_head_only(
    name: str, *, function: str | None = None, trust_remote_code: bool = False, seed: int = 0
) -> AuditedModel:
    """The output layer of a model stored as safetensors, and nothing else of it.

    A mixture makes its own vectors of Gaussian ones; other heads leave the choice of vectors to the bounds.
    """
    files = ModelFiles(name, trust_remote_code)
    with quiet():
        config = files.config()
        skeleton = files.skeleton(config)
        output = _output_module(name, skeleton)
        weights = [output.weight]
        if getattr(config.get_text_config(), "tie_word_embeddings", False):
            weights.append(skeleton.get_input_embeddings().weight)
        bias = getattr(output, "bias", None)
        # Patched models store matrices in a shape that other readers refuse.
        weight_Vd = files.tensor({key for weight in weights for key in names_of(skeleton, weight)})
        weight_Vd = weight_Vd.reshape(output.weight.shape)
        bias_V = None if bias is None else files.tensor(set(names_of(skeleton, bias))).reshape(bias.shape)
        stated, scale = stated_member(name, skeleton, function), 1.0
        if is_patched(skeleton):
            read_stored(files, skeleton)
            scale = skeleton.output_function.examined.adjustment.scale
    if stated is not None:
        head, how_known = Head(stated), "stated; not checked against the model's output"
    elif is_patched(skeleton):
        head, how_known = stored_head(skeleton), "stored with the model; not checked against its output"
    else:
        member, how_known = declared_by(config.get_text_config().to_dict())
        head = Head(member)
    known = AuditedModel(
        name=name,
        layer=HeadWeights(weight_Vd=weight_Vd, bias_V=None if bias_V is None else bias_V * scale, head=head),
        how_known=how_known,
        scale=scale,
        notes=("Only the output layer was read: what depends on real contexts was not measured.",),
    )
    if not has_mixture(skeleton):
        return known
    contexts = gaussian_contexts(skeleton, seed)
    return dataclasses.replace(known, available=len(contexts), contexts=lambda count, progress: contexts[:count])


# --- loading --------------------------------------------------------------------------------------------------------


def _loading_dtype(name: str, config: Any, numbers: int, memory: int) -> torch.dtype:
    """float32 if that takes less than half of the memory, else the dtype of the files."""
    if 4 * numbers <= memory // 2:
        return torch.float32
    stored = getattr(config, "dtype", None)
    stored = stored if isinstance(stored, torch.dtype) else torch.float32
    if stored.itemsize * numbers > memory:
        raise ValueError(
            f"{name} has {numbers / 1e9:.2f} billion parameters, {stored.itemsize * numbers / 2**30:.1f} GiB, more "
            f"than the {memory / 2**30:.1f} GiB of --memory; raise it, or read the output layer alone with "
            "--bounds-only"
        )
    return stored


def _output_module(name: str, model: Any) -> Any:
    output = model.get_output_embeddings()
    weight = getattr(output, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        found = "none" if output is None else type(output).__name__
        raise ValueError(
            f"{name} has no output layer that can be read: expected a module with a floating-point matrix `weight`, "
            f"got {found}. Store H, W and b in an .npz file and audit that"
        )
    return output


def _note_on_missing(name: str, model: Any, weight: Tensor, missing: list[str]) -> list[str]:
    """A note on parameters that the files lack and that were drawn at random; ValueError if the head is among them."""
    of_weight = names_of(model, weight)
    lacks_weight = of_weight and set(of_weight) <= set(missing)
    of_head = [key for key in missing if not key.startswith(f"{model.base_model_prefix}.")]
    if lacks_weight or of_head:
        lacking = of_weight[0] if lacks_weight else ", ".join(of_head[:4])
        raise ValueError(
            f"{name} has no {'' if lacks_weight else 'whole '}output layer: its files lack {lacking}. It was stored "
            "without its language-model head"
        )
    if not missing:
        return []
    named = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    random = "were drawn at random: this is not the model that was trained"
    return [f"The files lack {len(missing)} of the model's parameters ({named}), which {random}."]


# --- running --------------------------------------------------------------------------------------------------------


def _run(model: Any, ids_BL: Tensor, *, keep_logits: bool) -> tuple[Tensor, Tensor]:
    """Hidden vectors (B, L, d) and the model's logits, of all positions or of the first alone."""
    captured: list[Tensor] = []

    def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        captured.append(arguments[0].detach())
        return None if keep_logits else (arguments[0][..., :1, :], *arguments[1:])

    # Before the hook of a patched model, which takes the vectors and hands none on.
    handle = model.get_output_embeddings().register_forward_pre_hook(hook, prepend=True)
    try:
        with torch.no_grad():
            logits = model(input_ids=ids_BL.to(model.device), use_cache=False).logits
    finally:
        handle.remove()
    if len(captured) != 1 or captured[0].shape[:-1] != ids_BL.shape:
        raise ValueError(
            "the hidden vectors could not be taken from this model, since it does not call its output layer once for "
            "all positions; store H, W and b in an .npz file and audit that"
        )
    return captured[0], logits


def _found_function(
    name: str, model: Any, weight_Vd: Tensor, bias_V: Tensor | None, stated: str | None
) -> tuple[Head, Detected, int]:
    """The head, the evidence for its function, and how many tokens the model's logits have."""
    member, reason = stated_member(name, model, stated), "stated"
    generator = torch.Generator().manual_seed(0)
    known = min(weight_Vd.shape[0], model.get_input_embeddings().weight.shape[0])
    hidden_BLd, logits_BLV = _run(model, torch.randint(known, (2, PROBE_TOKENS), generator=generator), keep_logits=True)
    vocabulary = logits_BLV.shape[-1]
    if vocabulary > weight_Vd.shape[0] or hidden_BLd.shape[-1] != weight_Vd.shape[1]:
        raise ValueError(
            f"{name}: the output layer has a matrix of {tuple(weight_Vd.shape)}, but takes {hidden_BLd.shape[-1]} "
            f"numbers and the model returns {vocabulary} logits; store H, W and b in an .npz file and audit that"
        )
    own_bias_V = None if bias_V is None else bias_V[:vocabulary]
    if has_mixture(model):
        return *_found_mixture(model, weight_Vd[:vocabulary], own_bias_V, hidden_BLd, logits_BLV), vocabulary
    layer = HeadWeights(weight_Vd=weight_Vd[:vocabulary], bias_V=own_bias_V)
    probed = None
    if is_patched(model):
        probed = model.examined.adjustment
        if member is None:
            member, reason = stored_head(model).function, "stored with the model"
    else:
        # A model that cannot be trained here, because it computes its loss itself, can be audited all the same.
        with contextlib.suppress(ValueError):
            probed = examine(model).adjustment
    settings = model.config.get_text_config().to_dict()
    raw_RV, output_RV = layer.logits(hidden_BLd.flatten(0, 1)), logits_BLV.flatten(0, 1)
    found = detect(raw_RV, output_RV, settings, probed=probed, stated=member, reason=reason)
    return Head(found.function), found, vocabulary


def _found_mixture(
    model: Any, weight_Vd: Tensor, bias_V: Tensor | None, hidden_BLd: Tensor, logits_BLV: Tensor
) -> tuple[Head, Detected]:
    """The mixture that a patched model has stored, compared with its output."""
    head, scale = stored_head(model), model.examined.adjustment.scale
    scaled_bias_V = None if bias_V is None else bias_V.to(torch.float64) * scale
    layer = HeadWeights(weight_Vd=weight_Vd, bias_V=scaled_bias_V, head=head)
    contexts = latent_contexts(model, hidden_BLd.flatten(0, 1).float())
    error = relative_difference(layer.log_probs(contexts), logits_BLV.flatten(0, 1))
    reason = f"{model.output_function.described()}, stored with the model"
    return head, Detected(head.function, scale, agreement(reason, error, logits_BLV.dtype), error)
