"""Adapters of PEFT on a patched model: kept from being loaded onto a softmax model, and loaded onto the right one.

An adapter is stored without its model. Its file names the model by its name alone, and PEFT puts it on whatever model
it is given. So the adapter of a patched model is stored with a kind that PEFT does not know, ``sigsoftmax:LORA``
instead of ``LORA``, and a patched model that was never saved has a name that nobody can load by mistake
(``checkpoints.rename``). PEFT then says what to do with such a kind (:func:`explain_to_peft`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from sigsoftmax.family import Learned
from sigsoftmax.family.heads import Head
from sigsoftmax.family.parameters import ParameterKind
from sigsoftmax.integrations.huggingface.examination.model_state import empty_instance
from sigsoftmax.integrations.huggingface.patching.mixture_head import completed
from sigsoftmax.integrations.huggingface.storage import checkpoints
from sigsoftmax.records.atomic_write import atomic_write
from sigsoftmax.records.parsing import parse_json

ADAPTER_FILE = "adapter_config.json"
MARK = f"{checkpoints.KEY}:"
MODULE_NAME = "output_function"


# --- storing --------------------------------------------------------------------------------------------------------


def guard_configs(configs: Any, function: str) -> None:
    """Let the configurations of a patched model's adapters be stored with a kind of their own and the function."""
    for config in configs.values() if isinstance(configs, Mapping) else ():
        own: Any = type(config)
        if not issubclass(own, _Guarded):
            config.__class__ = _guarded_class(own)
        config.output_function_of_model = function


def release_configs(configs: Any) -> None:
    """Undo :func:`guard_configs`."""
    for config in configs.values() if isinstance(configs, Mapping) else ():
        if isinstance(config, _Guarded):
            config.__class__ = type(config).__mro__[2]
            del config.output_function_of_model


class _Guarded:
    """A PEFT configuration that is stored with another kind, and with the output function of its model."""

    output_function_of_model: str

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        super().save_pretrained(save_directory, **options)  # type: ignore[misc]
        path = Path(save_directory) / ADAPTER_FILE
        settings = json.loads(path.read_text(encoding="utf-8"))
        settings["peft_type"] = MARK + settings["peft_type"]
        settings[checkpoints.KEY] = self.output_function_of_model
        with atomic_write(path) as file:
            file.write(json.dumps(settings, indent=2, sort_keys=True).encode())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return empty_instance, (_guarded_class, type(self).__mro__[2]), self.__dict__


@functools.cache
def _guarded_class(own: Any) -> Any:
    return type(own.__name__, (_Guarded, own), {"__module__": own.__module__})


# --- loading --------------------------------------------------------------------------------------------------------


def is_adapter(path: str, hub_options: Mapping[str, Any]) -> bool:
    """Tell whether a folder, or a repository of the hub, that holds no model holds an adapter."""
    quietly: dict[str, Any] = {
        f"_raise_exceptions_for_{kind}": False for kind in ("missing_entries", "gated_repo", "connection_errors")
    }
    return cached_file(path, ADAPTER_FILE, **quietly, **hub_options) is not None


def read_config(path: str) -> Any:
    """The configuration of a stored adapter, as PEFT has it."""
    settings = _settings(path)
    settings["peft_type"] = settings["peft_type"].removeprefix(MARK)
    settings.pop(checkpoints.KEY, None)
    return _peft(path).PeftConfig.from_peft_type(**settings)


def put_on(model: Any, path: str, config: Any) -> Any:
    """The adapter in ``path`` on a model; returns the PEFT model."""
    return _peft(path).PeftModel.from_pretrained(model, path, config=config)


def load_onto(model: Any, path: str, *, now: Head | None) -> Any:
    """The adapter in ``path`` on a model that is patched already; ``now`` is its function, None if it has none."""
    wanted = function_in(_settings(path))
    if now is None and wanted is None:
        raise ValueError(
            f"neither this model nor the adapter in {path} has an output function; load it with "
            "peft.PeftModel.from_pretrained(model, path), or, if the adapter was trained on a patched model, patch "
            "this model alike first: apply_output_function(model, function)"
        )
    if now is None or (wanted is not None and _kind(now) != _kind(completed(Head.parse(wanted, allow_options=True)))):
        has = "has none: it is a softmax model" if now is None else f"has {_kind(now)}"
        raise ValueError(
            f"the adapter in {path} was trained on a model with the output function {wanted}, but this model {has}. "
            f"Patch the model before you load the adapter: apply_output_function(model, {wanted!r}); or load both with "
            f"from_pretrained({path!r})"
        )
    return put_on(model, path, read_config(path))


def function_in(settings: Mapping[str, Any]) -> str | None:
    """The output function that a stored adapter was trained with; None if its file does not say."""
    named = checkpoints.split_name(settings.get("base_model_name_or_path") or "")
    return settings.get(checkpoints.KEY) or (None if named is None else named[0])


def _kind(head: Head) -> str:
    """A head up to the values of what is learned, which an adapter may change."""
    kinds = head.function.kinds.items()
    learned = {key: Learned(per_class=kind is ParameterKind.PER_CLASS) for key, kind in kinds}
    return str(dataclasses.replace(head, function=head.function.with_parameters(**learned)))


def _settings(path: str) -> dict[str, Any]:
    """The stored settings of an adapter, which is a file of others: what is needed of it is checked."""
    file = cached_file(path, ADAPTER_FILE)
    assert file is not None
    try:
        settings = parse_json(Path(file).read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from None
    named = ("peft_type", "base_model_name_or_path", checkpoints.KEY)
    if not isinstance(settings, dict) or not isinstance(settings.get("peft_type"), str):
        raise ValueError(f"{file} is no configuration of an adapter: it names no peft_type")
    for name in named:
        if not isinstance(settings.get(name), str | None):
            raise ValueError(f"{file} is damaged: {name} should be a text, and is {settings[name]!r:.60}")
    return settings


def _peft(path: str) -> Any:
    try:
        import peft
    except ImportError:
        raise ImportError(f"{path} is an adapter, and needs peft: pip install peft") from None
    return peft


# --- refusing -------------------------------------------------------------------------------------------------------


class _Refusing:
    """Stands in PEFT's table of configurations for an adapter that PEFT alone must not put on a model.

    PEFT makes the configuration before it looks at the model, so even an adapter whose model is patched alike is
    refused here: nothing would stop the same call on a softmax model.
    """

    def __init__(self, **settings: Any) -> None:
        _refuse("this adapter", settings)

    @classmethod
    def from_pretrained(cls, path: Any, **options: Any) -> None:
        _refuse(f"the adapter in {path}", _settings(str(path)) if Path(path).is_dir() else {})


def _refuse(adapter: str, settings: Mapping[str, Any]) -> None:
    function = function_in(settings)
    raise ValueError(
        f"{adapter} was trained on a model with the output function {function or '(not recorded)'}, and PEFT would put "
        "it on a softmax model as well. Use sigsoftmax.integrations.huggingface instead: load_adapter(model, path) "
        "puts it on a model that is patched with that function, and from_pretrained(path) loads its model and the "
        "adapter"
    )


def explain_to_peft(*, even_if_not_imported: bool) -> None:
    """Let PEFT answer with what to do, instead of a bare ``KeyError``, if it meets the adapter of a patched model."""
    if "peft" not in sys.modules and not (even_if_not_imported and importlib.util.find_spec("peft")):
        return
    with contextlib.suppress(ImportError):
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING as kinds

        table: dict[Any, Any] = kinds
        for kind in [kind for kind in table if not kind.startswith(MARK)]:
            table.setdefault(f"{MARK}{getattr(kind, 'value', kind)}", _Refusing)
