"""The class of a patched model: its own forward pass, with the output function at its two ends.

Without labels, ``.logits`` is phi of the model's logits. With labels, the loss takes the input of the output layer and
computes logits a chunk at a time. A mixture takes that input for its logits, too. Everything between is the model's. A
model that computes its loss itself is run without labels (``label_convention``).

Shapes: B sequences of L tokens, d width, V classes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sigsoftmax.integrations.huggingface.examination.label_convention import (
    IGNORED,
    LOSS_KEYWORDS,
    DecoderInput,
    decoder_input_of,
    without_labels,
)
from sigsoftmax.integrations.huggingface.examination.model_state import (
    empty_instance,
    in_forward,
    loss_function_set,
    remove_hook,
)
from sigsoftmax.integrations.huggingface.examination.output_layers import (
    Examined,
    linear_layer,
    output_layer,
    tensor_named,
)
from sigsoftmax.integrations.huggingface.logits_processor import OutputFunctionLogitsProcessor
from sigsoftmax.integrations.huggingface.patching import output_layer_hook, receipts
from sigsoftmax.integrations.huggingface.patching.causal_loss import CausalLoss, CausalLossOptions, Count
from sigsoftmax.integrations.huggingface.patching.head_function import HeadFunction
from sigsoftmax.integrations.huggingface.patching.mixture_head import restored_head
from sigsoftmax.integrations.huggingface.patching.output_layer_hook import WaitingCall
from sigsoftmax.integrations.huggingface.patching.output_without_logits import without_logits
from sigsoftmax.integrations.huggingface.patching.product_conditions import found_change, logit_settings
from sigsoftmax.integrations.huggingface.storage import adapters, checkpoints
from sigsoftmax.integrations.huggingface.trainers.trl_fused_head import FusedHead, FusedLoss


class PatchedModel:
    """The attributes that a patched model has beyond its own class; the first base of :func:`patched_class`."""

    output_function: HeadFunction
    loss_options: CausalLossOptions
    waiting_call: WaitingCall | None = None
    scores: list[Tensor] | None = None
    """Losses of single tokens, kept while texts are scored."""
    fused_head: FusedHead | None = None
    """The arguments with which TRL gave the model a fused output layer."""
    has_receipt: bool = False
    """True if the call that ran last went through the output function (``receipts``)."""
    has_loss_of_function: bool = False
    """True once the model's own forward pass has taken its loss from :attr:`loss_function`."""
    calls_in_forward: int = 0
    """Calls of the forward pass that have not ended; more than one if threads share the model."""
    logit_settings: dict[str, float | None] | None = None
    """Scales and caps as they were when the model was examined (``product_conditions``)."""
    trained_past: str | None = None
    """The function that the last training step went through, if that left no receipt."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        """A model from a configuration that remembers its output function, as loading makes it."""
        super().__init__(config, *arguments, **options)  # type: ignore[call-arg]
        stored = checkpoints.stored_in(config)
        attach(self, restored_head(stored), CausalLossOptions())
        self.logit_settings = stored.get("logit_settings", self.logit_settings)
        if stored.pop(checkpoints.BEING_FILLED, False):
            checkpoints.expect_stored_shapes(self, stored["reshaped"])

    @classmethod
    def from_pretrained(cls, name_or_path: Any, *, config: Any = None, **options: Any) -> Any:
        """Load a saved model of this class with its output function, as :func:`loading.from_pretrained` does."""
        if (getattr(config, checkpoints.KEY, None) or {}).get(checkpoints.BEING_FILLED):
            return super().from_pretrained(name_or_path, config=config, **options)  # type: ignore[misc]
        # Imported here: loading builds on this module.
        from sigsoftmax.integrations.huggingface.storage import loading

        result = loading.SavedModel.from_pretrained(name_or_path, config=config, **options)
        model = result[0] if isinstance(result, tuple) else result
        if not isinstance(model, cls):
            raise ValueError(
                f"{name_or_path} holds a {type(model).__name__}, not a {cls.__name__}; load it with "
                "sigsoftmax.integrations.huggingface.from_pretrained, which finds the class itself"
            )
        return result

    @property
    def examined(self) -> Examined:
        return self.output_function.examined

    @property
    def class_bias(self) -> Tensor | None:
        """The bias that the model adds after its output layer."""
        name = self.examined.class_bias
        return None if name is None else tensor_named(self, name)

    @torch.compiler.assume_constant_result
    def found_change(self, *identities: int) -> str | None:
        """The answer of the function ``found_change`` for this model.

        A compiled call keeps what was found when it was compiled, as it keeps the hooks of that time. Compiled code
        asks this method because torch 2.11 passes no modules to a function with a constant result. The ``id`` of the
        model and of its layers are arguments so that another model of the class, or another layer, is asked anew.
        """
        return found_change(self)

    @property
    def loss_function(self) -> Any:
        """The loss of this output function, unless one was set."""
        own = getattr(self, "_loss_function", None)
        return self.loss_of_output_function if own is None else functools.partial(self.loss_of_user, own)

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        self._loss_function = value

    def loss_of_output_function(
        self, logits: Tensor, labels: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        """The loss that the model calls with its logits; these have no rows if it was computed in their place."""
        self.has_loss_of_function = True
        waiting = None if self.waiting_call is None else self.waiting_call.loss
        call = waiting or self.causal_loss(labels, **options)
        loss = call.loss
        if loss is None:
            # Whoever calls this from outside holds what the model returned.
            loss = call.of_logits(logits, are_returned=self.calls_in_forward == 0)
        if self.scores is None:
            return loss
        self.scores.append(loss)
        return loss.sum()

    def loss_of_user(self, loss: Callable[..., Tensor], logits: Tensor, *rest: Any, **options: Any) -> Tensor:
        """A loss that somebody set: its softmax is right if it sees phi, as everybody does outside."""
        self.has_loss_of_function = True
        if self.waiting_call is not None and self.waiting_call.logits is not None:
            return loss(self.waiting_call.logits.to(logits.dtype), *rest, **options)
        # Not in place: the model returns its logits afterwards, and they are transformed then.
        is_raw = self.calls_in_forward > 0 and not self.output_function.is_plain_softmax
        return loss(self.output_function.transformed(logits) if is_raw else logits, *rest, **options)

    @property
    def needs_receipts(self) -> bool:
        """True if a loss of plain softmax would be another one than this model's."""
        return not self.output_function.is_plain_softmax or self.loss_options.is_regularised

    def causal_loss(
        self,
        labels: Tensor | None,
        *,
        num_items_in_batch: Count = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> CausalLoss:
        """The loss that the keywords of a call ask for, as the loss of transformers reads them."""
        return CausalLoss(
            head=self.output_function,
            options=self.loss_options,
            targets_BL=self.examined.labels.targets(labels, shift_labels, ignore_index),
            count=num_items_in_batch,
            ignore_index=ignore_index,
            by_token=self.scores is not None,
            is_training=self.training,  # type: ignore[attr-defined]
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            receipts.assign(self, value)
        else:
            super().__setattr__(name, value)

    @property
    def peft_config(self) -> Any:
        """The adapters on this model; PEFT sets it."""
        if "adapter_configs" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no adapters, so no attribute 'peft_config'")
        return self.__dict__["adapter_configs"]

    @peft_config.setter
    def peft_config(self, configs: Any) -> None:
        self.__dict__["adapter_configs"] = configs
        if not self.output_function.is_plain_softmax:
            adapters.guard_configs(configs, self.output_function.described())

    @peft_config.deleter
    def peft_config(self) -> None:
        del self.__dict__["adapter_configs"]

    def tie_weights(self, *arguments: Any, **options: Any) -> Any:
        # transformers cuts the bias of a tied layer to the rows of its weight, and in the stored shape that has one.
        checkpoints.restore_shapes(self)
        return super().tie_weights(*arguments, **options)  # type: ignore[misc]

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> Any:
        embeddings = super().resize_token_embeddings(*arguments, **options)  # type: ignore[misc]
        self.output_function.resize(output_layer(self).weight.shape[0])
        checkpoints.remember(self)
        return embeddings

    def save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> Any:
        return checkpoints.save(self, super().save_pretrained, save_directory, *arguments, **options)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By its own class: the patched one is made anew in each process.
        return empty_instance, (patched_class, own_class(self)), self.__dict__


@functools.cache
def patched_class(own: Any) -> Any:
    """The class of a patched model; it keeps the name of ``own``, by which transformers knows what it is."""
    forward = inspect.unwrap(own.forward)
    kinds = inspect.signature(forward).parameters.values()
    names = [one.name for one in kinds if one.kind is one.POSITIONAL_OR_KEYWORD][1:]
    call = _OwnCall(own, names, decoder_input_of(own))

    @functools.wraps(own.forward)
    def patched_forward(self: Any, *arguments: Any, **options: Any) -> Any:
        if not is_patched(self):
            # The patch was removed, and somebody kept this method.
            return own.forward(self, *arguments, **options)
        options = call.by_name(arguments, options)
        if options.pop("fused_lm_head", False):
            return _fused_output(self, call, options)
        labels, asked = options.get("labels"), options.pop("return_dict", None)
        wants_tuple = not (getattr(self.config, "return_dict", True) if asked is None else asked)
        wants_logits = labels is None or wants_tuple or _stores_logits(self)
        layer = None
        if self.output_function.takes_hidden or not wants_logits:
            layer = output_layer_hook.layer_with_hook(self)
        if layer is None:
            output = call.output(self, options)
            output["logits"] = self.output_function(output["logits"])
        else:
            loss = None if labels is None else self.causal_loss(**options)
            output = _output_of_hidden(self, call, options, layer, loss, wants_logits=wants_logits)
        receipts.leave(self)
        return output.to_tuple() if wants_tuple else output

    # The signature without `__wrapped__`: accelerate follows that when it takes its wrappers off, past this function.
    del patched_forward.__wrapped__
    patched_forward.__signature__ = inspect.signature(own.forward)  # type: ignore[attr-defined]

    attributes = {
        "forward": patched_forward,
        # As of `own`, too: conversions of stored weights are looked up for classes of transformers alone.
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        # A shift or an exponent keeps its digits when a model is loaded in half precision. A list, since older versions
        # of transformers ignore a set.
        "_keep_in_fp32_modules_strict": [*(own._keep_in_fp32_modules_strict or ()), "output_function"],
    }
    if hasattr(own, "generate"):
        attributes["generate"] = _generate
    kind: Any = type(own)
    return receipts.metaclass_for(kind)(own.__name__, (PatchedModel, own), attributes)


def _generate(self: Any, *arguments: Any, **options: Any) -> Any:
    """``generate`` of a patched model, which takes no processor that would act as an output function again."""
    processors = [*(options.get("logits_processor") or ()), *(x for x in arguments if isinstance(x, list))]
    flat = [one for entry in processors for one in (entry if isinstance(entry, list) else [entry])]
    if any(isinstance(one, OutputFunctionLogitsProcessor) for one in flat):
        raise ValueError(
            "the logits of this model hold its output function already, and OutputFunctionLogitsProcessor would "
            "apply another; leave the processor out, or undo the patch with remove_output_function(model)"
        )
    return super(PatchedModel, self).generate(*arguments, **options)


@dataclass(frozen=True)
class _OwnCall:
    """Calls of the forward pass that a model's own class has."""

    own: Any
    names: list[str]
    """Its arguments in order, without ``self``."""
    decoder_input: DecoderInput | None

    def by_name(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        if len(arguments) > len(self.names):
            raise TypeError(
                f"{self.own.__name__} takes {len(self.names)} arguments, got {len(arguments)}: {', '.join(self.names)}"
            )
        return {**dict(zip(self.names, arguments, strict=False)), **options}

    def output(self, model: Any, options: dict[str, Any]) -> Any:
        """The output of the model's own class; a loss in it must have come from ``loss_function``."""
        labels = options.get("labels")
        of_loss = {key: options[key] for key in LOSS_KEYWORDS if key in options}
        is_own_loss = labels is not None and model.examined.labels.is_own_loss
        if is_own_loss:
            options = without_labels(model, options, self.names, self.decoder_input)
        model.has_loss_of_function = False
        with in_forward(model):
            output = self.own.forward(model, return_dict=True, **options)
            if is_own_loss:
                loss = model.loss_function(output["logits"], labels, vocab_size=model.examined.num_classes, **of_loss)
                # Made anew, since the order of the fields is that of the tuple.
                output = type(output)(**{**output, "loss": loss})
        if output.get("loss") is not None and not model.has_loss_of_function:
            # Somebody replaced the forward pass of that class.
            receipts.check_result(model, self.own.forward, output)
        return output


def _output_of_hidden(
    model: Any,
    call: _OwnCall,
    options: dict[str, Any],
    layer: nn.Linear,
    loss: CausalLoss | None,
    *,
    wants_logits: bool,
) -> Any:
    """The output whose loss, logits or both are made of what enters the output layer."""
    waiting = WaitingCall(
        loss=loss if getattr(model, "_loss_function", None) is None else None,
        head=model.output_function if wants_logits else None,
        class_bias=model.class_bias,
    )
    with output_layer_hook.waiting(model, layer, waiting):
        output = call.output(model, options)
    if output.get("loss") is not None:
        output["loss"] = waiting.joined(output["loss"])
    if not wants_logits:
        # No logits rather than none of their rows: whoever needs them should hear of it at once.
        return without_logits(output)
    if waiting.logits is None:
        forward = call.own.forward
        raise RuntimeError(
            f"{receipts.described(forward)} gave logits without calling its output layer, so they are not those of "
            f"{model.output_function.described()}. {receipts.remedy(forward)}"
        )
    output["logits"] = waiting.joined(waiting.logits).to(output["logits"].dtype)
    return output


def _stores_logits(model: Any) -> bool:
    is_asked = model.loss_options.keep_logits(is_training=model.training)
    return is_asked or model.examined.why_stored is not None or getattr(model, "_loss_function", None) is not None


def _fused_output(model: Any, call: _OwnCall, options: dict[str, Any]) -> Any:
    """The output that TRL asks for with ``fused_lm_head=True``; see ``trl_fused_head``."""
    if not model.examined.labels.is_shifted:
        raise ValueError(
            f"fused_lm_head=True scores the token after each position, and {type(model).__name__} is not a causal "
            "model; leave the argument out"
        )
    labels, shift_labels = options.pop("labels", None), options.pop("shift_labels", None)
    loss = FusedLoss.of_call(model, labels, shift_labels, options.pop("num_items_in_batch", None))
    # Whatever the options say about logits: nobody gets any here.
    layer = output_layer_hook.layer_with_hook(model) if model.examined.why_stored is None else None
    waiting = WaitingCall(loss=loss, class_bias=model.class_bias)
    with output_layer_hook.waiting(model, layer, waiting), loss_function_set(model, None):
        options = {**options, "use_cache": False, "labels": shift_labels if labels is None else labels}
        output = call.output(model, options)
    if not loss.statistics:
        raise RuntimeError(
            f"{receipts.described(call.own.forward)} computed a loss without its output layer and without "
            f"model.loss_function, so nothing is known of single tokens. {receipts.remedy(call.own.forward)}"
        )
    receipts.leave(model)
    output["loss"] = waiting.joined(output["loss"])
    loss.statistics = {name: waiting.joined(one) if one.requires_grad else one for name, one in loss.statistics.items()}
    return loss.answer(output, is_shifted=shift_labels is not None)


def own_class(model: Any) -> Any:
    """The class that a patched model had before."""
    return type(model).__mro__[type(model).__mro__.index(PatchedModel) + 1]


def is_patched(model: Any) -> bool:
    return isinstance(model, PatchedModel)


def attach(model: Any, function: HeadFunction, options: CausalLossOptions) -> None:
    """Give a model of a patched class what that class needs."""
    model.output_function, model.loss_options = function, options
    function.write_mark()
    model.logit_settings = logit_settings(model)
    layer = linear_layer(output_layer(model))
    if layer is not None:
        output_layer_hook.add_hook(layer)
    if "forward" in model.__dict__:
        receipts.keep_checked(model, model.__dict__["forward"])
    checkpoints.read_guarded_checkpoints(model)
    model.register_state_dict_pre_hook(_guard_adapters)
    adapters.explain_to_peft(even_if_not_imported=True)


def detach(model: Any) -> None:
    """Undo :func:`attach`."""
    receipts.release(model)
    output_layer_hook.remove_hooks(model)
    remove_hook(model._state_dict_pre_hooks, _guard_adapters)
    del model.output_function
    for name in (*PatchedModel.__annotations__, "warned_of_stored_logits"):
        model.__dict__.pop(name, None)


def _guard_adapters(model: Any, prefix: str, keep_vars: bool) -> None:
    """Guard an adapter that was added later when it is stored, since PEFT then asks for the state dict."""
    if "adapter_configs" in model.__dict__:
        receipts.refuse_to_save(model)
        model.peft_config = model.peft_config
