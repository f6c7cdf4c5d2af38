"""Copies of a model that go over a text and adapt to it: one by autograd on any device, several side by side on a GPU.

A window is a few tokens, so that on a GPU all that counts is how often weights are read and written. There forward and
backward are written out (``few_tokens``), so that gradients of matrices stay thin factors and the step (``adaptation``)
forms them while it reads the weights. Everything is in the dtype of the weights: products of a few tokens in another
precision would save nothing.

Shapes: L tokens of a text, B columns (one), P models, T tokens of a window, N = P T, S parts of a sum, V vocabulary, D
embedding, H hidden of the last layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from sigsoftmax.layers.mixture import MixtureOutputLayer
from sigsoftmax.layers.output_layer import OutputLayer
from sigsoftmax.lm import kernels
from sigsoftmax.lm.dynamic.adaptation import Adapted, Factors, Gradient, TokenSum, adapt_, pull_and_step
from sigsoftmax.lm.dynamic.few_tokens import LstmSteps, linear, linear_input_gradient, lstm, lstm_gate_gradients
from sigsoftmax.lm.dynamic.windows import PassOptions, WindowGradients, WindowPass, trainable_copy
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.model.recurrent import LayerState, carry_over
from sigsoftmax.lm.training.capture import new_stream, on_stream
from sigsoftmax.lm.training.precision import arithmetic
from sigsoftmax.losses import functional

__all__ = ["WIDEST_WINDOW", "AdaptingModels", "OneAdaptingModel", "kernels_serve"]

WIDEST_WINDOW = 16
"""tokens; with more of them products are no longer bound by memory, and their sums no longer fit into registers"""

ALIGNMENT = 16
"""elements; kernels then load 16 bytes at once"""

Gradients = dict[str, Gradient]


def kernels_serve(model: LanguageModel, window: int) -> bool:
    """Tell whether kernels make passes of these windows fast, so that several models go side by side."""
    return window <= WIDEST_WINDOW and all(map(kernels.run_on, model.parameters()))


class OneAdaptingModel(WindowGradients):
    """A copy of one model, by autograd and plain torch on any device. Its memory is about five times the weights."""

    def __init__(
        self,
        model: LanguageModel,
        rms: Mapping[str, Tensor],
        ids_L: Tensor,
        *,
        window: int,
        **options: Unpack[PassOptions],
    ) -> None:
        adapted = trainable_copy(model)
        super().__init__(adapted, ids_L.unsqueeze(1), self._update, window=window, **options)
        self._start, self._weights = ([p.detach() for p in own.parameters()] for own in (model, adapted))
        self._rms = [rms[name] for name, _ in model.named_parameters()]
        self._pull, self._step = ([torch.empty_like(weights) for weights in self._weights] for _ in range(2))

    def restart(self, rates_14: Tensor) -> None:
        """Put the model back to where it began, and set its rates (see ``adapt_``)."""
        torch._foreach_copy_(self._weights, self._start)
        for rms, *kept in zip(self._rms, self._pull, self._step, strict=True):
            torch._foreach_copy_(kept, [new[0] for new in pull_and_step(rms, rates_14)])

    def _update(self, gradients: list[Tensor]) -> None:
        torch._foreach_lerp_(self._weights, self._start, self._pull)
        torch._foreach_addcmul_(self._weights, self._step, gradients, value=-1.0)


class AdaptingModels(WindowPass):
    """``models`` copies of one model, which start where it is and share the statistics of its gradients."""

    def __init__(
        self,
        model: LanguageModel,
        rms: Mapping[str, Tensor],
        ids_L: Tensor,
        *,
        models: int,
        window: int,
        **options: Unpack[PassOptions],
    ) -> None:
        device, dtype = model.embedding.device, model.embedding.dtype
        super().__init__(model, ids_L.unsqueeze(1), window=window, models=models, **options)
        # Whatever precision is asked for, since no other could save time.
        self.precision = "float32"
        self._adapted: dict[str, Adapted] = {}
        for name, parameter in model.named_parameters():
            start, own_rms = parameter.detach(), rms[name]
            weights = start.new_empty(models, *start.shape)
            if name.startswith("stack.") and start.ndim == 2:
                weights = _aligned(weights.shape, start)
                start, own_rms = (_aligned(start.shape, start).copy_(tensor) for tensor in (start, own_rms))
            self._adapted[name] = Adapted(weights, start, own_rms)
        self._rates_P4 = torch.zeros(models, 4, dtype=dtype, device=device)
        self._outputs = [self._output_of(model, index) for index in range(models)]
        self._states = [LayerState(*(part[0] for part in state)) for state in model.zero_state(models, dtype)]
        self._side = new_stream(device)
        """the stream on which layers adapt while the layers below are computed"""
        self._adapted_aside = {name for index in range(1, len(self._states)) for name in _of_layer(index)}
        """parameters that adapt as soon as their gradients are known"""
        self._vocabulary_V = torch.arange(model.vocabulary_size, device=device)

    def restart(self, rates_P4: Tensor) -> None:
        """Put all models back to where they began, and set their rates (see ``adapt_``)."""
        self._rates_P4.copy_(rates_P4)
        for weights, start, _ in self._adapted.values():
            weights.copy_(start.expand_as(weights))

    def _output_of(self, model: LanguageModel, index: int) -> OutputLayer | MixtureOutputLayer:
        """The head of one of the models, on its weights."""
        output = copy.deepcopy(model.output).requires_grad_()
        if isinstance(output, MixtureOutputLayer):
            output.latent_dropout = nn.Identity()
        for name, parameter in output.named_parameters():
            parameter.data = self._weights(_name_in_model(name))[index]
        return output

    def _weights(self, name: str) -> Tensor:
        return self._adapted[name].weights

    @torch.no_grad()
    def _compute(self, tokens_TB: Tensor, targets_TB: Tensor) -> Tensor:
        tokens_T, targets_T = tokens_TB[:, 0], targets_TB[:, 0]
        with arithmetic("float32", self.device):
            inputs, steps = self._forward(tokens_T)
            hidden_PTH = steps[-1].hidden[1:].transpose(0, 1).contiguous()
            head = self._mixture if isinstance(self._outputs[0], MixtureOutputLayer) else self._single
            loss_P, gradient_PSTH, gradients = head(hidden_PTH, targets_T)
            gradient_PTD = self._backward(gradient_PSTH, inputs, steps, gradients)
            self._add_rows(gradients, tokens_T, gradient_PTD)
            self._adapt([name for name in gradients if name not in self._adapted_aside], gradients)
            if self._side is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._side)
        carry_over(self._states, [LayerState(step.hidden[-1], step.cell[-1]) for step in steps])
        return loss_P

    def _forward(self, tokens_T: Tensor) -> tuple[list[Tensor], list[LstmSteps]]:
        """The inputs of all layers, and their steps."""
        inputs, steps = [self._weights("embedding").index_select(1, tokens_T)], list[LstmSteps]()
        for index, state in enumerate(self._states):
            weight_ih, weight_hh, *biases = (self._weights(name) for name in _of_layer(index))
            steps.append(lstm(linear(inputs[-1], weight_ih, *biases), weight_hh, *state))
            inputs.append(steps[-1].hidden[1:].transpose(0, 1))
        return inputs[:-1], steps

    def _backward(self, gradient: Tensor, inputs: list[Tensor], steps: list[LstmSteps], gradients: Gradients) -> Tensor:
        """Add the gradients of all layers to the others, and return that of the first one's input."""
        for index in reversed(range(len(steps))):
            names = _of_layer(index)
            of_gates = lstm_gate_gradients(gradient, self._weights(names[1]), steps[index])
            gradients[names[0]] = Factors(of_gates, inputs[index])
            gradients[names[1]] = Factors(of_gates, steps[index].hidden[:-1].transpose(0, 1))
            gradients[names[2]] = gradients[names[3]] = TokenSum(of_gates)
            gradient = linear_input_gradient(of_gates, self._weights(names[0]))
            if index > 0:
                # Steps wait for memory, and the recurrence of the layer below for its own last step.
                if self._side is not None:
                    self._side.wait_stream(torch.cuda.current_stream(self.device))
                with on_stream(self._side):
                    self._adapt(names, gradients)
        return gradient.sum(dim=1)

    def _adapt(self, names: Sequence[str], gradients: Gradients) -> None:
        adapt_([self._adapted[name] for name in names], [gradients[name] for name in names], self._rates_P4)

    def _single(self, hidden_PTD: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Gradients]:
        """The loss of each model, the gradient of the hidden vectors in parts, and those of the head's parameters."""
        logits_PTV = linear(hidden_PTD, self._weights("embedding"), self._weights("output.bias")).requires_grad_()
        names = list(self._outputs[0].function_parameters)
        learned = [output.function_parameters[name] for name in names for output in self._outputs]
        with torch.enable_grad():
            # The parameters that a function learns differ between models after the first window.
            parts = logits_PTV.split(1) if learned else [logits_PTV]
            losses = [
                functional.cross_entropy(
                    part.flatten(0, 1), targets_T.repeat(len(part)), function=output.function, reduction="none"
                )
                for part, output in zip(parts, self._outputs, strict=False)
            ]
            loss_N = torch.cat(losses) if len(losses) > 1 else losses[0]
            loss_P = loss_N.view(len(hidden_PTD), -1).mean(dim=1)
            of_logits, *of_learned = torch.autograd.grad(loss_P.sum(), [logits_PTV, *learned])
        gradients: Gradients = {"embedding": Factors(of_logits, hidden_PTD), "output.bias": TokenSum(of_logits)}
        for index, name in enumerate(names):
            of_models = of_learned[index * len(hidden_PTD) : (index + 1) * len(hidden_PTD)]
            gradients[f"output.function_parameters.{name}"] = torch.stack(of_models)
        return loss_P.detach(), linear_input_gradient(of_logits, self._weights("embedding")), gradients

    def _mixture(self, hidden_PTH: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Gradients]:
        """The same for a mixture."""
        losses, found = [], []
        for output, hidden_TH in zip(self._outputs, hidden_PTH, strict=True):
            hidden_TH = hidden_TH.detach().requires_grad_()
            with torch.enable_grad():
                loss = output.loss(hidden_TH, targets_T)
                found.append(torch.autograd.grad(loss, [hidden_TH, *output.parameters()]))
            losses.append(loss.detach())
        of_hidden, *of_parameters = (torch.stack(of_models) for of_models in zip(*found, strict=True))
        names = [_name_in_model(name) for name, _ in self._outputs[0].named_parameters()]
        return torch.stack(losses), of_hidden.unsqueeze(1), dict(zip(names, of_parameters, strict=True))

    def _add_rows(self, gradients: Gradients, tokens_T: Tensor, rows_PTD: Tensor) -> None:
        """Add the input's share to the gradient of the tied matrix: its rows at the tokens."""
        is_token_PTV = (tokens_T.unsqueeze(1) == self._vocabulary_V).to(rows_PTD.dtype).expand(len(rows_PTD), -1, -1)
        of_head = gradients["embedding"]
        if isinstance(of_head, Factors):
            both = zip(of_head, (is_token_PTV, rows_PTD), strict=True)
            gradients["embedding"] = Factors(*(torch.cat(pair, dim=1) for pair in both))
        else:
            assert isinstance(of_head, Tensor)
            gradients["embedding"] = torch.baddbmm(of_head, is_token_PTV.mT, rows_PTD)


def _aligned(shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros of this shape, in memory where every row begins at a multiple of 16 elements."""
    *rest, columns = shape
    return like.new_zeros(*rest, -(-columns // ALIGNMENT) * ALIGNMENT)[..., :columns]


def _name_in_model(name_in_output: str) -> str:
    return "embedding" if name_in_output == "weight" else f"output.{name_in_output}"


def _of_layer(index: int) -> list[str]:
    return [f"stack.layers.{index}.{name}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
