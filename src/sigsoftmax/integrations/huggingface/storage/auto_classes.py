"""The automatic classes of transformers, and which of them load a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.models.auto import modeling_auto

CAUSAL = "AutoModelForCausalLM"
SAVED_AS = {
    CAUSAL: "SigsoftmaxForCausalLM",
    "AutoModelForSeq2SeqLM": "SigsoftmaxForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq": "SigsoftmaxForSpeechSeq2Seq",
    "AutoModelForMaskedLM": "SigsoftmaxForMaskedLM",
}
"""The automatic classes that load models with an output function, and what each of them loads such a model with."""
_ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    CAUSAL: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForSpeechSeq2Seq": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}


def auto_classes_of(model: Any) -> list[str]:
    """The automatic classes that load a model of this class, or of the nearest of its bases that any of them knows."""
    if getattr(model, "_auto_class", None) in SAVED_AS:
        return [model._auto_class]
    for kind in type(model).__mro__:
        found = _auto_classes_by_name(model.config.model_type, kind.__name__)
        if found:
            return found
    return [CAUSAL]


def auto_class_of_files(settings: Mapping[str, Any]) -> str:
    """The automatic class for the model that a configuration of transformers describes."""
    model_type = str(settings.get("model_type"))
    for architecture in settings.get("architectures") or ():
        own_code = (settings.get("auto_map") or {}).items()
        found = [name for name, path in own_code if name in SAVED_AS and str(path).endswith(f".{architecture}")]
        found += _auto_classes_by_name(model_type, architecture)
        if found:
            return found[0]
    known = [name for name, architectures in _ARCHITECTURES.items() if model_type in architectures]
    if settings.get("is_encoder_decoder"):
        known = [name for name in known if name != CAUSAL]
    return (known or [CAUSAL])[0]


def _auto_classes_by_name(model_type: str, architecture: str) -> list[str]:
    found = []
    for name, architectures in _ARCHITECTURES.items():
        known = architectures.get(model_type, ())
        if architecture in ((known,) if isinstance(known, str) else known):
            found.append(name)
    return found
