"""Stored models with an output function, which are kept from running as softmax.

A patched model is saved as transformers saves models, with three differences, each of which stops another kind of
reader that does not know the output function:

- ``config.json`` has the model type ``sigsoftmax`` and names ``modeling_sigsoftmax.py``, which imports this package;
- the weight of the output layer, and whatever is tied to it, has the shape (1, V, d) instead of (V, d), so that a class
  of transformers that is told to load the folder anyway finds a shape that does not fit;
- the state dict has the entry ``output_function.requires_sigsoftmax``, at which a strict ``load_state_dict`` stops.

Plain softmax changes no probability, and such a model is saved as any reader expects it.

Shapes: d width, V classes.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sigsoftmax.integrations.huggingface.examination.label_convention import LabelConvention
from sigsoftmax.integrations.huggingface.examination.model_state import remove_hook
from sigsoftmax.integrations.huggingface.examination.output_layers import names_of, output_layer
from sigsoftmax.integrations.huggingface.patching import receipts
from sigsoftmax.integrations.huggingface.storage.auto_classes import SAVED_AS, auto_classes_of
from sigsoftmax.records.atomic_write import atomic_write

KEY = "sigsoftmax"
"""The entry of a configuration that remembers the output function; also the model type of a guarded checkpoint."""
FORMAT, MIXTURE_FORMAT, LABELS_FORMAT = 1, 2, 3
"""The format of members, that of mixtures, and that of models with another use of labels than causal ones, each of
which versions that know less must refuse."""
MODULE_FILE = "modeling_sigsoftmax.py"
MODULE_TEXT = '''"""This model has an output function other than softmax, and needs the package sigsoftmax to run.

Loaded as a softmax model it would give wrong probabilities, so nothing but that package loads it.
"""

from sigsoftmax.integrations.huggingface import (  # noqa: F401
    SigsoftmaxConfig,
    SigsoftmaxForCausalLM,
    SigsoftmaxForMaskedLM,
    SigsoftmaxForSeq2SeqLM,
    SigsoftmaxForSpeechSeq2Seq,
    SigsoftmaxModel,
)
'''


FIELDS: dict[str, tuple[type, ...]] = {
    "format": (int,),
    "function": (str,),
    "frozen": (list,),
    "num_classes": (int,),
    "logit_scale": (float, int),
    "softcap": (float, int, type(None)),
    "why_stored": (str, type(None)),
    "own_model_type": (str,),
    "architecture": (str,),
    "reshaped": (list,),
    "auto_map": (dict, type(None)),
    # What models lack that were stored before there were others than causal ones.
    "class_bias": (str, type(None)),
    "labels": (dict, type(None)),
    "auto_classes": (list, type(None)),
}
"""The types of what :func:`remember` writes; a configuration is a file of others."""

BEING_FILLED = "is_being_filled"
"""Mark, beside what is stored, of the configuration of a model that is about to be filled from a guarded checkpoint."""


def stored_in(config: Any) -> dict[str, Any]:
    """The entry of a configuration that :func:`remember` wrote."""
    found = config.get(KEY) if isinstance(config, Mapping) else getattr(config, KEY, None)
    if not isinstance(found, dict):
        raise ValueError(
            "the configuration remembers no output function; name one, as in apply_output_function(model, 'sigsoftmax')"
        )
    if found.get("format") not in (FORMAT, MIXTURE_FORMAT, LABELS_FORMAT):
        raise ValueError(
            f"the output function is stored in format {found.get('format')!r}, but this version of sigsoftmax "
            f"reads {FORMAT} to {LABELS_FORMAT}; install the version that wrote it, or a newer one"
        )
    for name, kinds in FIELDS.items():
        if type(found.get(name)) not in kinds:
            raise ValueError(
                f"the output function in the configuration is damaged: {name!r} should be "
                f"{' or '.join(kind.__name__ for kind in kinds)}, and is {found.get(name)!r:.60}; restore the "
                "config.json that save_pretrained wrote"
            )
    return found


def remember(model: Any) -> None:
    """Write the output function of a patched model into its configuration."""
    function, examined = model.output_function, model.examined
    is_causal = examined.labels == LabelConvention() and examined.class_bias is None
    stored = {
        "format": LABELS_FORMAT if not is_causal else MIXTURE_FORMAT if function.takes_hidden else FORMAT,
        **function.stored(),
        # The model type of the model's own configuration.
        "own_model_type": model.config.model_type,
        "architecture": type(model).__name__,
        # Parameters that are stored with the shape (1, V, d).
        "reshaped": [] if function.is_plain_softmax else names_of(model, output_layer(model).weight),
        "auto_classes": auto_classes_of(model),
        # The `auto_map` of a model whose own code lies with it.
        "auto_map": None,
        "logit_settings": model.logit_settings,
    }
    setattr(model.config, KEY, stored)


def rename(model: Any) -> None:
    """Give a patched model a name of which nobody can load its unpatched twin.

    Adapters remember the name of the model they belong to, and whoever loads them loads that model. A trainer that
    wants a reference model loads the one that the configuration names.
    """
    model.name_before_patch = (model.name_or_path, model.config.name_or_path)
    if not model.output_function.is_plain_softmax:
        start = f"{KEY}[{model.output_function.described()}]:"
        model.name_or_path = f"{start}{model.name_or_path}"
        model.config.name_or_path = f"{start}{model.config.name_or_path}"


def own_name(model: Any) -> str:
    """The name under which the weights of a model were loaded, patched or not; empty if they were not."""
    return str(model.__dict__.get("name_before_patch", (None, model.config.name_or_path))[1] or "")


def split_name(name: str) -> tuple[str, str] | None:
    """The function and the own name in a name that :func:`rename` gave; None if it gave it not."""
    head, separator, rest = name.partition("]:")
    start = f"{KEY}["
    return (head.removeprefix(start), rest) if separator and head.startswith(start) else None


def forget(model: Any) -> None:
    """Leave no trace of the output function in the configuration, the name and the hooks of a model."""
    if hasattr(model.config, KEY):
        delattr(model.config, KEY)
    if "name_before_patch" in model.__dict__:
        model.name_or_path, model.config.name_or_path = model.__dict__.pop("name_before_patch")
    remove_hook(model._load_state_dict_pre_hooks, _restore_shapes)


# --- saving ---------------------------------------------------------------------------------------------------------


def save(model: Any, save_own: Callable[..., Any], directory: Any, *arguments: Any, **options: Any) -> Any:
    """``save_pretrained`` of a patched model; ``save_own`` is that of its own class."""
    receipts.refuse_to_save(model)
    remember(model)
    is_adapter = getattr(model, "_hf_peft_config_loaded", False)
    if model.output_function.is_plain_softmax or is_adapter:
        return save_own(directory, *arguments, **options)
    given = dict(inspect.signature(save_own).bind(directory, *arguments, **options).arguments)
    given = {**given, **given.pop("kwargs", {})}
    if given.get("distributed_checkpoint"):
        raise ValueError(
            "a patched model cannot be saved with distributed_checkpoint=True, which would store its output layer as "
            "that of a softmax model; leave the argument out"
        )
    wants_upload = given.pop("push_to_hub", False)
    upload = {name: given.pop(name) for name in ("repo_id", "commit_message", "create_pr", "private") if name in given}
    state = given.pop("state_dict", None)
    state = dict(model.state_dict() if state is None else state)
    if any(value.is_meta for value in state.values()):
        raise ValueError(
            f"weights of this {type(model).__name__} are offloaded and not in its state dict; gather them, as in "
            "model.save_pretrained(folder, state_dict="
            "accelerate.utils.modeling.get_state_dict_offloaded_model(model))"
        )
    for name in names_of(model, output_layer(model).weight):
        if name in state:
            state[name] = _guarded_shape(state[name])
    for name, value in state.items():
        if name.startswith("output_function.function_parameters.") and value.ndim == 0:
            state[name] = value.reshape(1)
    save_own(**given, state_dict=state)
    folder = Path(directory)
    if given.get("is_main_process", True) and (folder / "config.json").is_file():
        guard_configuration(folder)
        check_guard_of_weights(folder, tuple(output_layer(model).weight.shape))
    if wants_upload:
        model.push_to_hub(upload.pop("repo_id", folder.name), **upload)
    return None


def _guarded_shape(weight_Vd: Tensor) -> Tensor:
    try:
        return weight_Vd.unsqueeze(0)
    except NotImplementedError:
        raise ValueError(
            f"the weight of the output layer is of the class {type(weight_Vd).__name__}, which cannot be stored with "
            "the shape that keeps it from being loaded as that of a softmax model; save the model before you quantise "
            "it, and quantise it again after loading"
        ) from None


def guard_configuration(folder: Path) -> None:
    """Make the configuration one that needs this package."""
    path = folder / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings[KEY]["auto_map"] = settings.get("auto_map")
    saved_as = {name: SAVED_AS[name] for name in settings[KEY]["auto_classes"]}
    names = {"AutoConfig": "SigsoftmaxConfig", "AutoModel": "SigsoftmaxModel", **saved_as}
    auto_map = {name: f"{Path(MODULE_FILE).stem}.{saved}" for name, saved in names.items()}
    settings.update(model_type=KEY, architectures=[next(iter(saved_as.values()))], auto_map=auto_map)
    with atomic_write(folder / MODULE_FILE) as file:
        file.write(MODULE_TEXT.encode())
    with atomic_write(path) as file:
        file.write(f"{json.dumps(settings, indent=2, sort_keys=True)}\n".encode())


def check_guard_of_weights(folder: Path, shape: tuple[int, ...]) -> None:
    """The files must not hold an output layer that a softmax model would accept."""
    from safetensors import safe_open

    files = sorted(folder.glob("model*.safetensors"))
    shapes: list[tuple[int, ...]] = []
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            shapes += [tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()]  # noqa: SIM118
    if files and (1, *shape) not in shapes:
        raise RuntimeError(
            f"{folder} holds the output layer as a softmax model has it, though the configuration there says "
            "otherwise: the weights were gathered or offloaded in a way that sigsoftmax does not know. Delete what was "
            "written, and pass a whole state dict, as in model.save_pretrained(folder, state_dict=...)"
        )


# --- loading --------------------------------------------------------------------------------------------------------


def read_guarded_checkpoints(model: nn.Module) -> None:
    """Let ``load_state_dict`` of a patched model, and thereby the Trainer, read what ``save_pretrained`` wrote."""
    model.register_load_state_dict_pre_hook(_restore_shapes)


def _restore_shapes(model: nn.Module, state: dict[str, Tensor], prefix: str, *others: Any) -> None:
    for name in names_of(model, output_layer(model).weight):
        stored = state.get(prefix + name)
        if stored is not None and stored.ndim == 3 and stored.shape[0] == 1:
            state[prefix + name] = stored.squeeze(0)
    for name, value in model.named_parameters():
        stored = state.get(prefix + name)
        if stored is not None and name.startswith("output_function.") and stored.numel() == value.numel():
            state[prefix + name] = stored.reshape(value.shape)


def expect_stored_shapes(model: Any, names: Iterable[str]) -> None:
    """Give parameters the shape in which they are stored, so that transformers can fill them."""
    model.in_stored_shape = tuple(names)
    _replace_parameters(model, names, lambda stored: stored.unsqueeze(0))


def restore_shapes(model: Any) -> None:
    """Undo :func:`expect_stored_shapes` on a model that has been filled, unless that has happened."""
    _replace_parameters(model, model.__dict__.pop("in_stored_shape", ()), lambda stored: stored.squeeze(0))


def check_filled(model: Any, names: Iterable[str]) -> None:
    """Refuse a model whose output layer or output function was left on another medium than a device."""
    if any(model.get_parameter(name).is_meta for name in names):
        raise ValueError(
            "the output layer of a model with an output function cannot be offloaded; give it a device in device_map"
        )
    model.output_function.check_values()


def _replace_parameters(model: nn.Module, names: Iterable[str], change: Callable[[Tensor], Tensor]) -> None:
    """Change parameters in every module that holds them: tied weights stay tied."""
    names, known = list(names), {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"the configuration says that {unknown[0]!r:.60} is stored in another shape, and {type(model).__name__} "
            "has no such parameter; restore the config.json that save_pretrained wrote"
        )
    for old in {model.get_parameter(name) for name in names}:
        new = nn.Parameter(change(old.detach()), old.requires_grad)
        for module in model.modules():
            module._parameters.update({name: new for name, held in module._parameters.items() if held is old})
