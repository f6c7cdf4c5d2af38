"""Loading a model with its output function.

Importing this module makes ``AutoConfig``, the automatic classes of language models and, for the model without its
output layer, ``AutoModel`` of transformers load such models, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sigsoftmax.contract.spec import Function
from sigsoftmax.family.heads import Head
from sigsoftmax.family.parameters import ParameterKind
from sigsoftmax.integrations.huggingface.patching.apply import apply_output_function, language_model, patch
from sigsoftmax.integrations.huggingface.patching.mixture_head import completed
from sigsoftmax.integrations.huggingface.patching.patched_model import is_patched, patched_class
from sigsoftmax.integrations.huggingface.storage import adapters, checkpoints
from sigsoftmax.integrations.huggingface.storage.auto_classes import CAUSAL, SAVED_AS, auto_class_of_files
from sigsoftmax.records.parsing import TOO_DEEP

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def from_pretrained(
    name_or_path: str | os.PathLike[str], *, function: Function | Head | None = None, **options: Any
) -> Any:
    """Load a language model with the output function that it was saved with.

    ``name_or_path`` is a folder or a name on the hub, of a model or of an adapter that belongs to one. ``options`` are
    those of ``from_pretrained`` of transformers' automatic classes. For a model that remembers no output function,
    ``function`` says which one to apply. Code that a model brings along is run if ``trust_remote_code=True`` is given;
    nobody is asked.
    """
    path = os.fspath(name_or_path)
    # Left out, it would make transformers ask at the terminal, and run the code after a `y`.
    options.setdefault("trust_remote_code", False)
    hub = {key: options[key] for key in HUB_OPTIONS if key in options}
    try:
        settings, _ = PreTrainedConfig.get_config_dict(path, **hub)
    except OSError:
        settings = {}
        if not adapters.is_adapter(path, hub):
            raise
    except RecursionError:
        raise ValueError(f"the config.json of {path} cannot be read: {TOO_DEEP}") from None
    if not settings:
        if not adapters.is_adapter(path, hub):
            raise ValueError(f"{path} holds no config.json and no adapter_config.json, so there is no model in it")
        return _load_adapter_and_model(path, function, options)
    if checkpoints.KEY not in settings:
        if function is None:
            raise ValueError(
                f"{path} remembers no output function; name one, as in from_pretrained({path!r}, function='sigsoftmax')"
            )
        return apply_output_function(_plain_model(path, settings, options), function)
    saved = checkpoints.stored_in(settings)["function"]
    if function is not None and str(completed(Head.parse(function, allow_options=True))) != saved:
        raise ValueError(
            f"{path} was saved with {saved}, not with {function}; load it without function=, and apply "
            "another one to it afterwards if that is what you want"
        )
    return load_remembered(path, settings, **options)


def _plain_model(path: str, settings: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """A model without output function, by the automatic class for what it is."""
    return getattr(transformers, auto_class_of_files(settings)).from_pretrained(path, **options)


def _load_adapter_and_model(path: str, function: Function | Head | None, options: Mapping[str, Any]) -> Any:
    """The adapter in ``path`` on the model that it names, with that model's output function."""
    config = adapters.read_config(path)
    base = config.base_model_name_or_path or ""
    renamed = checkpoints.split_name(base)
    if renamed is None:
        return adapters.put_on(from_pretrained(base, function=function, **options), path, config)
    text, name = renamed
    if not name:
        raise ValueError(
            f"the adapter in {path} belongs to a model with {text} that was never saved; save that model with "
            "save_pretrained, load it, and train the adapter on what you loaded"
        )
    head = Head.parse(text, allow_options=True)
    kinds = head.function.kinds.items()
    unknown = [f"{key} for each class" for key, kind in kinds if kind is ParameterKind.PER_CLASS]
    unknown += ["the prior and the latent vectors"] if head.components > 1 else []
    if unknown and adapters.MODULE_NAME not in (config.modules_to_save or ()):
        raise ValueError(
            f"the adapter in {path} does not hold the values of {' and of '.join(unknown)}; train it with "
            f"modules_to_save=[{adapters.MODULE_NAME!r}], or save the patched model and train the adapter on that"
        )
    hub = {key: options[key] for key in HUB_OPTIONS if key in options}
    model = _plain_model(name, PreTrainedConfig.get_config_dict(name, **hub)[0], options)
    patch(model, head)
    return adapters.put_on(model, path, config)


def load_adapter(model: Any, path: str | os.PathLike[str]) -> Any:
    """Put an adapter that was trained on a patched model onto one that is patched alike; returns the PEFT model."""
    inner: Any = language_model(model)
    now = Head.parse(inner.output_function.described(), allow_options=True) if is_patched(inner) else None
    return adapters.load_onto(model, os.fspath(path), now=now)


def load_remembered(path: str, settings: Mapping[str, Any], **options: Any) -> Any:
    """The model that a guarded configuration describes, filled from its files."""
    stored = checkpoints.stored_in(settings)
    try:
        Head.parse(stored["function"], allow_options=True)
    except ValueError as error:
        raise ValueError(
            f"{path} was saved with an output function that is not known here: {error}. One of your own must be "
            "registered, with register_function, before the model is loaded"
        ) from None
    config, own_class = own_classes(path, settings, trust_remote_code=bool(options.get("trust_remote_code")))
    checkpoints.stored_in(config)[checkpoints.BEING_FILLED] = True
    wants_report = options.pop("output_loading_info", False)
    model, report = patched_class(own_class).from_pretrained(path, config=config, output_loading_info=True, **options)
    checkpoints.restore_shapes(model)
    checkpoints.check_filled(model, stored["reshaped"])
    model.output_function.freeze()
    model.output_function.write_mark()  # files of older versions have none
    lost = [key for key in report["missing_keys"] if key.startswith("output_function.")]
    if lost:
        raise ValueError(
            f"{path} lacks {', '.join(lost)}: its files do not belong together, or were not written by save_pretrained"
        )
    unknown = [key for key in report["unexpected_keys"] if key.startswith("output_function.")]
    if unknown:
        raise ValueError(
            f"{path} holds {', '.join(sorted(unknown))}, which {stored['function']} has not: its files do not belong "
            "together, or config.json was changed by hand"
        )
    return (model, report) if wants_report else model


def own_classes(path: str, settings: Mapping[str, Any], *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The configuration as the model's own class reads it, and that class."""
    stored = checkpoints.stored_in(settings)
    model_type, architecture, auto_map = stored["own_model_type"], stored["architecture"], stored["auto_map"]
    auto_class = _auto_classes(stored)[0]
    config_class: Any
    own_class: Any
    own: dict[str, Any] = {**settings, "model_type": model_type, "architectures": [architecture]}
    own.pop("auto_map", None)
    if auto_map:
        if not trust_remote_code:
            raise ValueError(
                f"{path} is a model with code of its own; look at that code, and pass trust_remote_code=True to run it"
            )
        own["auto_map"] = dict(auto_map)
        config_class = get_class_from_dynamic_module(auto_map["AutoConfig"], path)
        own_class = get_class_from_dynamic_module(auto_map[auto_class], path)
        own_class.register_for_auto_class(auto_class)
        config_class.register_for_auto_class()
    elif model_type in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[model_type]
        listed = getattr(transformers, auto_class)._model_mapping.get(config_class, None)
        own_class = getattr(transformers, architecture, None) or listed
        is_model = isinstance(own_class, type) and issubclass(own_class, transformers.PreTrainedModel)
        if not is_model or (own_class is not listed and own_class.config_class is not config_class):
            raise ValueError(
                f"{path} says that its model is a {architecture} of the type {model_type}, and transformers has no "
                "such model; restore the config.json that save_pretrained wrote"
            )
    else:
        raise ValueError(
            f"{path} holds a {architecture}, which transformers {transformers.__version__} does not know; "
            "install a newer version of transformers"
        )
    return config_class.from_dict(own), own_class


class SigsoftmaxConfig(PreTrainedConfig):
    """The configuration of a saved model with an output function, as ``AutoConfig`` meets it."""

    model_type = checkpoints.KEY


def _auto_classes(stored: Mapping[str, Any]) -> list[str]:
    """The automatic classes that load a stored model; what was stored before there were others is causal."""
    return [name for name in stored.get("auto_classes") or () if name in SAVED_AS] or [CAUSAL]


class SavedModel:
    """The class that transformers loads such a model with; the result is of the model's own class, patched."""

    config_class = SigsoftmaxConfig
    auto_class: str | None = None
    """The automatic class that uses this one; None for any model."""

    @classmethod
    def from_pretrained(cls, name_or_path: str, *, config: Any = None, **options: Any) -> Any:
        adapter = (options.pop("adapter_kwargs", None) or {}).get("_adapter_model_path")
        if adapter is not None:
            raise ValueError(
                f"{adapter} is an adapter of a model with an output function; load it with "
                "sigsoftmax.integrations.huggingface.from_pretrained"
            )
        options.pop("_from_auto", None)
        if config is None:
            return from_pretrained(name_or_path, **options)
        settings = config.to_dict()
        cls._check(os.fspath(name_or_path), checkpoints.stored_in(settings))
        return load_remembered(os.fspath(name_or_path), settings, **options)

    @classmethod
    def _check(cls, path: str, stored: Mapping[str, Any]) -> None:
        known = _auto_classes(stored)
        if cls.auto_class is not None and cls.auto_class not in known:
            raise ValueError(
                f"{path} holds a {stored['architecture']}, which {cls.auto_class} does not load; use {known[0]}, or "
                "sigsoftmax.integrations.huggingface.from_pretrained, which finds the class itself"
            )

    @classmethod
    def _from_config(cls, config: Any, *, trust_remote_code: bool = False, **options: Any) -> Any:
        """``from_config`` of automatic classes keeps the permission to itself: ask here for a model with own code."""
        cls._check(config.name_or_path or "the configuration", checkpoints.stored_in(config))
        own_config, own_class = own_classes(config.name_or_path, config.to_dict(), trust_remote_code=trust_remote_code)
        return patched_class(own_class)._from_config(own_config, **options)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: ``save_pretrained`` of the patched model writes what such a folder needs."""


class SigsoftmaxForCausalLM(SavedModel):
    """The class that ``AutoModelForCausalLM`` loads with."""

    auto_class = CAUSAL


class SigsoftmaxForSeq2SeqLM(SavedModel):
    """The class that ``AutoModelForSeq2SeqLM`` loads with."""

    auto_class = "AutoModelForSeq2SeqLM"


class SigsoftmaxForSpeechSeq2Seq(SavedModel):
    """The class that ``AutoModelForSpeechSeq2Seq`` loads with."""

    auto_class = "AutoModelForSpeechSeq2Seq"


class SigsoftmaxForMaskedLM(SavedModel):
    """The class that ``AutoModelForMaskedLM`` loads with."""

    auto_class = "AutoModelForMaskedLM"


class SigsoftmaxModel(SavedModel):
    """The class that ``AutoModel`` loads with: it gives the model below the output layer, without output function."""

    @classmethod
    def from_pretrained(cls, name_or_path: str, **options: Any) -> Any:
        result = super().from_pretrained(name_or_path, **options)
        return (_body(result[0]), result[1]) if isinstance(result, tuple) else _body(result)

    @classmethod
    def _from_config(cls, config: Any, **options: Any) -> Any:
        return _body(super()._from_config(config, **options))


def _body(model: Any) -> Any:
    """The model below the output layer."""
    if model.base_model is model:
        raise ValueError(
            f"a {type(model).__name__} holds no model of its own below its output layer; load it with "
            "sigsoftmax.integrations.huggingface.from_pretrained, and take its get_encoder() or get_decoder()"
        )
    return model.base_model


AutoConfig.register(checkpoints.KEY, SigsoftmaxConfig, exist_ok=True)
AutoModel.register(SigsoftmaxConfig, SigsoftmaxModel, exist_ok=True)
for _saved in (SigsoftmaxForCausalLM, SigsoftmaxForSeq2SeqLM, SigsoftmaxForSpeechSeq2Seq, SigsoftmaxForMaskedLM):
    assert SAVED_AS[_saved.auto_class] == _saved.__name__
    getattr(transformers, _saved.auto_class).register(SigsoftmaxConfig, _saved, exist_ok=True)
adapters.explain_to_peft(even_if_not_imported=False)
