"""Hugging Face causal language models as something to audit: their output layer, and contexts from a text.

Hidden vectors are taken where they enter the output layer, by a hook, so that whatever a model does before it is done.
The hook hands on one position alone, so that the logits of a text are never computed.

Shapes: B windows, L tokens of a window, N contexts, V words, d width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sigsoftmax.analysis.head_weights import Contexts, HeadWeights, detached
from sigsoftmax.experiments.audit.audited_models import Source
from sigsoftmax.experiments.audit.default_text import generated_text
from sigsoftmax.experiments.audit.detect_function import Adjustment, Detected, declared_by, detect
from sigsoftmax.experiments.audit.huggingface_files import (
    loading_dtype,
    note_on_missing,
    output_module,
    quiet,
    read_config,
    read_tokenizer,
    reading_errors,
    skeleton_of,
    stored_tensor,
    text_config,
    transformers_library,
)
from sigsoftmax.family import OutputFunction
from sigsoftmax.family.heads import Head

__all__ = ["HuggingFaceModel", "Windows", "open_head_only", "open_model"]

Progress = Callable[[str], None]
PROBE_TOKENS = 8


@dataclass(frozen=True)
class Windows:
    """Pieces of a text as token ids."""

    ids_BL: Tensor
    description: str

    @property
    def contexts(self) -> int:
        return self.ids_BL.shape[0] * (self.ids_BL.shape[1] - 1)


@dataclass
class HuggingFaceModel:
    """A loaded model, what is known of its output layer, and the windows that it was shown last."""

    name: str
    model: Any
    tokenizer: Any | None
    layer: HeadWeights
    """its bias, and the hidden vectors below, are multiplied by the scale of the logits"""
    scale: float
    how_known: str
    notes: list[str] = field(default_factory=list)
    shown: Windows | None = None

    def windows(
        self, text: str | None, count: int, *, window: int, seed: int, text_name: str = "the given text"
    ) -> Windows:
        """At most so many contexts of a text, from windows spread evenly over it."""
        limits = [
            getattr(text_config(self.model.config), key, None) for key in ("max_position_embeddings", "n_positions")
        ]
        length = min([window, *(limit for limit in limits if isinstance(limit, int) and limit > 1)])
        needed = math.ceil(count / (length - 1))
        if self.tokenizer is None:
            generator = torch.Generator().manual_seed(seed)
            random_BL = torch.randint(self.layer.vocabulary, (needed, length), generator=generator)
            return Windows(random_BL, "random tokens")
        source = text_name if text is not None else "a generated English text"
        start = self.tokenizer.bos_token_id
        own = length - 1 if start is not None else length
        ids = _token_ids(self.tokenizer, generated_text(2 * count + 200, seed) if text is None else text)
        if len(ids) < 2:
            raise ValueError(f"the text has {len(ids)} tokens; an audit needs at least 2, and better some thousands")
        if len(ids) < own:
            own = len(ids)
        whole = len(ids) // own
        firsts = torch.linspace(0, whole - 1, min(needed, whole)).round().long().unique() * own
        windows_BL = torch.tensor([ids[first : first + own] for first in firsts.tolist()])
        if start is not None:
            windows_BL = torch.cat([torch.full((len(windows_BL), 1), start), windows_BL], 1)
        return Windows(windows_BL, f"{source}, {windows_BL.shape[0]:,} windows of {windows_BL.shape[1]} tokens")

    def contexts(self, windows: Windows, count: int, progress: Progress, *, batch_tokens: int = 1024) -> Contexts:
        """The hidden vectors of the windows' positions, each with the token that follows."""
        known = min(self.layer.vocabulary, self.model.get_input_embeddings().weight.shape[0])
        if int(windows.ids_BL.max()) >= known:
            raise ValueError(
                f"the tokenizer makes token {int(windows.ids_BL.max())}, but {self.name} has {known} words; the "
                "tokenizer belongs to another model"
            )
        per_batch = max(1, batch_tokens // windows.ids_BL.shape[1])
        hidden: list[Tensor] = []
        batches = windows.ids_BL.split(per_batch)
        for number, ids_BL in enumerate(batches, start=1):
            progress(f"running the model: batch {number} of {len(batches)}")
            hidden.append(self.hidden(ids_BL)[:, :-1].flatten(0, 1))
        hidden_Nd = torch.cat(hidden)[:count]
        following_N = windows.ids_BL[:, 1:].flatten()[:count]
        self.shown = windows
        return Contexts.of_rows(hidden_Nd, next_tokens_N=following_N, description=windows.description)

    def hidden(self, ids_BL: Tensor) -> Tensor:
        """What enters the output layer, times the scale of the logits, (B, L, d)."""
        return _run(self.model, ids_BL, keep_logits=False)[0].float().cpu() * self.scale

    def source(self, text: str | None, *, window: int, seed: int, text_name: str = "the given text") -> Source:
        if self.tokenizer is None and text is not None:
            raise ValueError(
                f"--text cannot be read by {self.name}: no tokenizer lies with it. Store the tokenizer in its folder, "
                "or leave --text out and random tokens are taken"
            )

        def contexts(count: int, progress: Progress) -> Contexts:
            windows = self.windows(text, count, window=window, seed=seed, text_name=text_name)
            return self.contexts(windows, count, progress)

        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return Source(
            name=self.name,
            words=self.layer.vocabulary,
            dtype=str(self.layer.weight_Vd.dtype).removeprefix("torch."),
            layer=self.layer,
            how_known=self.how_known,
            scale=self.scale,
            contexts=contexts,
            operations_per_context=2.0 * (parameters - self.layer.weight_Vd.numel()),
            notes=tuple(self.notes),
        )


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
    transformers = transformers_library(name)
    with quiet(transformers):
        progress(f"reading the configuration of {name}")
        settings = read_config(transformers, name, trust_remote_code=trust_remote_code)
        # The skeleton has no memory: it tells the size before anything is loaded.
        skeleton = skeleton_of(transformers, name, settings, trust_remote_code=trust_remote_code)
        numbers = sum(parameter.numel() for parameter in skeleton.parameters())
        dtype = loading_dtype(name, settings, numbers, memory)
        progress(f"loading {name}: {numbers / 1e6:,.0f} million parameters in {str(dtype).removeprefix('torch.')}")
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, output_loading_info=True, trust_remote_code=trust_remote_code
            )
            tokenizer = read_tokenizer(transformers, name, trust_remote_code=trust_remote_code)
        except reading_errors() as error:
            raise ValueError(f"the weights of {name} cannot be read, a file may be truncated: {error}") from None
    model = model.eval().to(device)
    output = output_module(name, model)
    missing = [key for key, value in model.named_parameters(remove_duplicate=False) if value is output.weight]
    if missing and all(key in report["missing_keys"] for key in missing):
        raise ValueError(
            f"{name} has no output layer: its files lack {missing[0]}. It was stored without its language-model head"
        )
    notes = note_on_missing(name, model, report["missing_keys"])
    weight_Vd = output.weight.detach()
    bias_V = output.bias.detach() if getattr(output, "bias", None) is not None else None
    found, words = _found_function(name, model, weight_Vd, bias_V, function)
    if words < weight_Vd.shape[0]:
        notes.append(
            f"The model leaves out the last {weight_Vd.shape[0] - words} rows of its output matrix; so does this."
        )
        weight_Vd, bias_V = weight_Vd[:words], None if bias_V is None else bias_V[:words]
    if dtype != torch.float32:
        notes.append(
            f"The model ran in {str(dtype).removeprefix('torch.')}; what is computed from H and W is in float64."
        )
    if tokenizer is None:
        notes.append(
            "No tokenizer lies with the model, so the contexts are random tokens, and no text looks like that."
        )
    scaled_bias_V = None if bias_V is None else bias_V.to(torch.float64) * found.scale
    layer = HeadWeights(weight_Vd=weight_Vd, bias_V=scaled_bias_V, head=Head(found.function))
    return HuggingFaceModel(name, model, tokenizer, layer, found.scale, found.explanation, notes)


def open_head_only(name: str, *, function: str | None = None, trust_remote_code: bool = False) -> Source:
    """The output layer of a model stored as safetensors, and nothing else of it."""
    transformers = transformers_library(name)
    with quiet(transformers):
        settings = read_config(transformers, name, trust_remote_code=trust_remote_code)
        skeleton = skeleton_of(transformers, name, settings, trust_remote_code=trust_remote_code)
        output = output_module(name, skeleton)
        names = {key for key, value in skeleton.named_parameters(remove_duplicate=False) if value is output.weight}
        biases = {key for key, value in skeleton.named_parameters() if value is getattr(output, "bias", None)}
        if getattr(text_config(settings), "tie_word_embeddings", False):
            embedding = skeleton.get_input_embeddings().weight
            names |= {key for key, value in skeleton.named_parameters(remove_duplicate=False) if value is embedding}
        weight_Vd = stored_tensor(name, names)
        bias_V = stored_tensor(name, biases) if biases else None
    if function is not None:
        member, how_known = OutputFunction.parse(function), "stated; not checked against the model's output"
    else:
        member, how_known = declared_by(text_config(settings).to_dict())
    layer = HeadWeights(weight_Vd=weight_Vd, bias_V=bias_V, head=Head(member))

    return Source(
        name=name,
        words=layer.vocabulary,
        dtype=str(weight_Vd.dtype).removeprefix("torch."),
        layer=layer,
        how_known=how_known,
        notes=("Only the output layer was read: what depends on real contexts was not measured.",),
    )


# --- running --------------------------------------------------------------------------------------------------------


def _run(model: Any, ids_BL: Tensor, *, keep_logits: bool) -> tuple[Tensor, Tensor]:
    """Hidden vectors (B, L, d) and the model's logits, of all positions or of the first alone."""
    captured: list[Tensor] = []

    def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        captured.append(arguments[0].detach())
        return None if keep_logits else (arguments[0][..., :1, :], *arguments[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(hook)
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
) -> tuple[Detected, int]:
    """The output function, and how many words the model's logits have."""
    generator = torch.Generator().manual_seed(0)
    ids_BL = torch.randint(
        min(weight_Vd.shape[0], model.get_input_embeddings().weight.shape[0]), (2, PROBE_TOKENS), generator=generator
    )
    hidden_BLd, logits_BLV = _run(model, ids_BL, keep_logits=True)
    words = logits_BLV.shape[-1]
    if words > weight_Vd.shape[0] or hidden_BLd.shape[-1] != weight_Vd.shape[1]:
        raise ValueError(
            f"{name}: the output layer has a matrix of {tuple(weight_Vd.shape)}, but takes {hidden_BLd.shape[-1]} "
            f"numbers and the model returns {words} logits; store H, W and b in an .npz file and audit that"
        )
    layer = HeadWeights(weight_Vd=weight_Vd[:words], bias_V=None if bias_V is None else bias_V[:words])
    raw_RV = layer.logits(hidden_BLd.flatten(0, 1))
    settings = text_config(model.config).to_dict()
    own = getattr(model, "output_function", None)
    reason = "stated"
    member = None if stated is None else OutputFunction.parse(stated)
    if own is None:
        probed = _probed(model)
    else:
        probed = Adjustment(model.examined.adjustment.scale, model.examined.adjustment.cap)
        if member is None:
            member, reason = detached(own.of_raw_logits(model.examined.adjustment)), "stored with the model"
    found = detect(raw_RV, logits_BLV.flatten(0, 1), settings, probed=probed, stated=member, reason=reason)
    return found, words


def _probed(model: Any) -> Adjustment:
    """The scale and cap that the model's forward pass applies to its logits, as far as a probe shows them."""
    from sigsoftmax.integrations.huggingface.patching.examination import examine

    try:
        found = examine(model).adjustment
    except ValueError:
        # A model that cannot be trained here, because it computes its loss itself, can be audited all the same.
        return Adjustment()
    return Adjustment(found.scale, found.cap)


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = []
    # A line at a time: tokenizers warn about texts that are longer than the model.
    for line in text.splitlines(keepends=True):
        ids += tokenizer(line, add_special_tokens=False)["input_ids"]
    return ids
