"""Adapters of PEFT on a patched model: kept from being loaded onto a softmax model, and loaded onto the right one.

An adapter is stored without its model. Its file names the model by its name alone, and PEFT puts it on whatever model
it is given. So the adapter of a patched model is stored with a kind that PEFT does not know, ``sigsoftmax:LORA``
instead of ``LORA``, and a patched model that was never saved has a name that nobody can load by mistake
(``checkpoints.rename``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.utils.hub import cached_file

from sigsoftmax.family import Learned, OutputFunction
from sigsoftmax.integrations.huggingface import checkpoints

ADAPTER_FILE = "adapter_config.json"
MARK = f"{checkpoints.KEY}:"
MODULE_NAME = "output_function"


# --- storing --------------------------------------------------------------------------------------------------------


def guard_configs(configs: Any) -> None:
    """Let the configurations of a patched model's adapters be stored with a kind of their own."""
    for config in configs.values() if isinstance(configs, Mapping) else ():
        own: Any = type(config)
        if not issubclass(own, _Guarded):
            config.__class__ = _guarded_class(own)


def release_configs(configs: Any) -> None:
    """Undo :func:`guard_configs`."""
    for config in configs.values() if isinstance(configs, Mapping) else ():
        if isinstance(config, _Guarded):
            config.__class__ = type(config).__mro__[2]


class _Guarded:
    """A PEFT configuration that is stored with another kind."""

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        super().save_pretrained(save_directory, **options)  # type: ignore[misc]
        path = Path(save_directory) / ADAPTER_FILE
        settings = json.loads(path.read_text(encoding="utf-8"))
        settings["peft_type"] = MARK + settings["peft_type"]
        checkpoints.write_whole(path, json.dumps(settings, indent=2, sort_keys=True))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty_guarded, (type(self).__mro__[2],), self.__dict__


@functools.cache
def _guarded_class(own: Any) -> Any:
    return type(own.__name__, (_Guarded, own), {"__module__": own.__module__})


def _empty_guarded(own: type) -> Any:
    made = _guarded_class(own)
    return made.__new__(made)


# --- loading --------------------------------------------------------------------------------------------------------


def is_adapter(path: str, hub_options: Mapping[str, Any]) -> bool:
    """Whether a folder, or a repository of the hub, that holds no model holds an adapter."""
    quietly: dict[str, Any] = {
        f"_raise_exceptions_for_{kind}": False for kind in ("missing_entries", "gated_repo", "connection_errors")
    }
    return cached_file(path, ADAPTER_FILE, **quietly, **hub_options) is not None


def load_with_model(path: str, load_model: Callable[..., Any], patch: Callable[..., Any], **options: Any) -> Any:
    """The adapter in ``path`` on the model that it names, with that model's output function."""
    config = _config(path)
    name = config.base_model_name_or_path or ""
    renamed = checkpoints.split_name(name)
    if renamed is None:
        return _put_on(load_model(name, **options), path, config)
    function, name = renamed
    if not name:
        raise ValueError(
            f"the adapter in {path} belongs to a model with {function} that was never saved; save that model with "
            "save_pretrained, load it, and train the adapter on what you loaded"
        )
    member = OutputFunction.parse(function)
    per_class = [key for key, value in member.given.items() if isinstance(value, Learned) and value.per_class]
    if per_class and MODULE_NAME not in (config.modules_to_save or ()):
        raise ValueError(
            f"the adapter in {path} does not hold the values of {', '.join(per_class)} for each class; train it with "
            f"modules_to_save=[{MODULE_NAME!r}], or save the patched model and train the adapter on that"
        )
    model = AutoModelForCausalLM.from_pretrained(name, **options)
    patch(model, member)
    return _put_on(model, path, config)


def load_onto(model: Any, path: str) -> Any:
    """The adapter in ``path`` on a model that is patched already."""
    return _put_on(model, path, _config(path))


def _put_on(model: Any, path: str, config: Any) -> Any:
    return _peft(path).PeftModel.from_pretrained(model, path, config=config)


def _config(path: str) -> Any:
    peft = _peft(path)
    file = cached_file(path, ADAPTER_FILE)
    assert file is not None
    settings = json.loads(Path(file).read_text(encoding="utf-8"))
    settings["peft_type"] = settings["peft_type"].removeprefix(MARK)
    return peft.PeftConfig.from_peft_type(**settings)


def _peft(path: str) -> Any:
    try:
        import peft
    except ImportError:
        raise ImportError(f"{path} is an adapter, and needs peft: pip install peft") from None
    return peft
