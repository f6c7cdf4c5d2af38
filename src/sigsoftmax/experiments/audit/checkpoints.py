"""Language models that a run of this package has trained, as something to audit.

Contexts are those of the model's own test text, or of another text in its vocabulary. A model that learned a language
whose truth is known brings its target with it.

Shapes: L tokens of a text, R rows of its only column, T positions of a window, N contexts, K components, V vocabulary,
d width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from sigsoftmax.analysis.head_weights import Contexts, HeadWeights, detached
from sigsoftmax.experiments.audit.audited_models import AuditedModel, Progress, check_length
from sigsoftmax.experiments.runs.run import checkpoint_file
from sigsoftmax.layers.mixture import MixtureOutputLayer
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.data.corpus_files import read_split
from sigsoftmax.lm.data.windows import batchify, evaluation_windows
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.saving.saved_models import LoadedModel, check_same_corpus, load_model

__all__ = ["open_checkpoint"]

POSITIONS = 256
"""length of a window"""
UNKNOWN = "<unk>"


def open_checkpoint(
    path: str,
    *,
    text: Path | None = None,
    data: Path | None = None,
    layer_alone: bool = False,
    device: str = "cpu",
) -> AuditedModel:
    """``best.safetensors`` of a run, or the folder of the run; of its layer alone no text is read.

    Contexts are those of ``text``, or of the run's own text, which may lie in the folder ``data``.
    """
    try:
        file = checkpoint_file(Path(path))
    except ValueError as error:
        hint = "; the folder of a Hugging Face model has a config.json, and this one has none"
        raise ValueError(f"{error}{hint if Path(path).is_dir() else ''}") from None
    loaded = load_model(file, device=device)
    model, notes = loaded.model, list[str]()
    if isinstance(model.output, MixtureOutputLayer) and model.output.floor:
        notes.append(f"The floor of {model.output.floor:g} under the model's probabilities is left out here.")
    alone = _layer(path, loaded, notes)
    if layer_alone:
        return alone
    corpus: Corpus | None = None
    if text is not None:
        ids_L, description = _ids_of(text, loaded, notes), f"the tokens of {text}"
    else:
        corpus = _own_corpus(loaded, file, data)
        ids_L, description = corpus.test, f"the test text of {corpus.name!r}"
    check_length(ids_L.numel())

    def truth(count: int) -> Tensor:
        assert corpus is not None and corpus.language is not None and corpus.test_contexts is not None
        # The context in which each word was drawn is that of the position before it.
        return corpus.language.log_p_NV[corpus.test_contexts[1 : count + 1]]

    parameters = sum(parameter.numel() for parameter in model.parameters()) - model.output.weight.numel()
    return dataclasses.replace(
        alone,
        available=ids_L.numel() - 1,
        contexts=lambda count, progress: _contexts(model, ids_L[: count + 1], description, progress),
        truth=truth if corpus is not None and corpus.language is not None else None,
        operations_per_context=2.0 * parameters,
        notes=tuple(notes),
    )


def _layer(path: str, loaded: LoadedModel, notes: Iterable[str]) -> AuditedModel:
    """The output layer, without contexts."""
    output, head = loaded.model.output, loaded.recipe.model.parsed_head
    made = "" if head == head.plain else f"{head} "
    return AuditedModel(
        name=path,
        layer=HeadWeights(
            weight_Vd=output.weight.detach(),
            bias_V=None if output.bias is None else output.bias.detach(),
            head=dataclasses.replace(head, function=detached(output.function)),
        ),
        how_known=f"{made}of the recipe {loaded.recipe.name!r}, as trained after epoch {loaded.epoch}",
        notes=tuple(notes),
    )


@torch.no_grad()
def _contexts(model: LanguageModel, ids_L: Tensor, description: str, progress: Progress) -> Contexts:
    device = model.embedding.device
    text_R1 = batchify(ids_L, 1).to(device)
    states = model.zero_state(1)
    rows: list[Tensor] = []
    for window in evaluation_windows(text_R1.shape[0], POSITIONS):
        progress(f"running the model: position {window.start + window.length} of {text_R1.shape[0] - 1}")
        features = model.features(text_R1[window.start : window.start + window.length], states)
        states = features.states
        rows.append(features.dropped_TBH[:, 0])
    features_Nd, prior_logits_NK = torch.cat(rows), None
    hidden_NKd = features_Nd[:, None]
    if isinstance(model.output, MixtureOutputLayer):
        hidden_NKd, prior_logits_NK = model.output.latent_vectors(features_Nd), model.output.prior(features_Nd)
    return Contexts(
        hidden_NKd=hidden_NKd,
        prior_logits_NK=prior_logits_NK,
        next_tokens_N=ids_L[1:],
        description=f"{description}, {ids_L.numel() - 1:,} positions",
    )


def _own_corpus(loaded: LoadedModel, file: Path, data: Path | None) -> Corpus:
    name = loaded.recipe.corpus
    try:
        # The text of a language comes with its truth, but only under its own words.
        corpus = Corpus.load(name, data, vocabulary=None if name == "language" else loaded.vocabulary)
        check_same_corpus(loaded.meta, corpus, file)
    except ValueError as error:
        raise ValueError(f"{error}. Or name a text in the model's words with --text") from None
    return corpus


def _ids_of(text: Path, loaded: LoadedModel, notes: list[str]) -> Tensor:
    vocabulary = loaded.vocabulary
    unknown: list[str] = []

    def known(word: str) -> str:
        if word in vocabulary or UNKNOWN not in vocabulary:
            return word
        unknown.append(word)
        return UNKNOWN

    def encode(words: Iterable[str]) -> Tensor:
        return vocabulary.encode([known(word) for word in words])

    ids_L = read_split(text, encode)
    if unknown:
        notes.append(f"{len(unknown):,} of {ids_L.numel():,} words are not among the model's, and became {UNKNOWN}.")
    return ids_L
