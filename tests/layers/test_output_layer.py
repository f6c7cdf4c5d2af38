"""OutputLayer and the nn-style shells.

Shapes: N tokens, V classes, d width.
"""

import copy
import io
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.allocations import allocations_of
from torch import Tensor, nn
from torch.nn import functional as F

import sigsoftmax
from sigsoftmax import Learned, OutputFunction, OutputLayer, family
from sigsoftmax.layers.output_layer import CrossEntropyLoss, LogProbs, LogSigsoftmax, Probs, Sigsoftmax

N, V, D = 9, 12, 5
assert_close = torch.testing.assert_close


def functions() -> list[str]:
    return [*family.names(), "softmax(alpha=1.5)", "gss(k=0.2)", "gss(k=learned:0.5, c=per_class)"]


def hidden_and_target(*leading: int) -> tuple[Tensor, Tensor]:
    shape = leading or (N,)
    return torch.randn(*shape, D, requires_grad=True), torch.randint(V, shape)


def saved_and_loaded(module: nn.Module) -> Any:
    """The module as another process would read it, pickled whole."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def train(module: nn.Module, loss: Callable[[], Tensor], steps: int = 30) -> tuple[float, float]:
    """The loss before and after some steps of plain gradient descent on all parameters of the module."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
    before = loss().item()
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return before, loss().item()


def chi_square(counts_V: Tensor, probs_V: Tensor) -> float:
    expected_V = probs_V.detach().double() * counts_V.sum()
    return float(((counts_V - expected_V) ** 2 / expected_V).sum())


def chi_square_bound(classes: int) -> float:
    """Five standard deviations above the mean of a chi-square variable."""
    return classes - 1 + 5.0 * math.sqrt(2.0 * (classes - 1))


class TestOutputLayer:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("function", functions())
    def test_log_probs_are_normalised_and_those_of_the_function(self, function: str, bias: bool) -> None:
        layer = OutputLayer(D, V, function=function, bias=bias)
        hidden, _ = hidden_and_target(3, 4)
        logits = layer.logits(hidden)
        log_probs = layer.log_probs(hidden)
        assert log_probs.shape == (3, 4, V)
        assert_close(log_probs.exp().sum(-1), torch.ones(3, 4))
        assert_close(logits, hidden @ layer.weight.T + (layer.bias if layer.bias is not None else 0.0))
        assert_close(log_probs, torch.log_softmax(layer.function.phi(logits), -1))
        assert_close(layer(hidden), log_probs)

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("function", functions())
    def test_loss_and_gradients_are_those_of_the_log_probs(self, function: str, bias: bool) -> None:
        layer = OutputLayer(D, V, function=function, bias=bias).double()
        if layer.bias is not None:
            nn.init.normal_(layer.bias)
        hidden, target = hidden_and_target()
        hidden = hidden.detach().double().requires_grad_()
        inputs = [hidden, *layer.parameters()]
        plain = F.nll_loss(torch.log_softmax(layer.function.phi(layer.logits(hidden)), -1), target)
        loss = layer.loss(hidden, target)
        assert_close(loss, plain)
        assert_close(torch.autograd.grad(loss, inputs), torch.autograd.grad(plain, inputs))

    def test_loss_passes_every_option_on(self) -> None:
        layer = OutputLayer(D, V, function="gss(k=0.5)")
        hidden, target = hidden_and_target(3, 4)
        target[0, 0] = -1
        options: dict[str, Any] = {
            "weight": torch.rand(V),
            "ignore_index": -1,
            "reduction": "sum",
            "label_smoothing": 0.1,
            "z_loss": 0.01,
            "token_weights": torch.rand(3, 4),
            "chunk_bytes": 200,
            "backend": "blocked",
            "extras": ("argmax", "entropy", "log_normalizer"),
        }
        loss, extras = layer.loss(hidden, target, **options)
        plain_loss, plain_extras = sigsoftmax.linear_cross_entropy(
            hidden, layer.weight, target, function="gss(k=0.5)", linear_bias=layer.bias, **options
        )
        assert_close(loss, plain_loss)
        assert_close(extras, plain_extras)
        assert extras.argmax is not None
        assert torch.equal(extras.argmax, layer.topk(hidden, 1).indices.squeeze(-1))

    def test_a_function_may_be_text_or_an_object(self) -> None:
        hidden, target = hidden_and_target()
        by_text = OutputLayer(D, V, function="gss(k=0.2)")
        by_object = OutputLayer(D, V, function=OutputFunction("gss", k=0.2), weight=by_text.weight)
        assert_close(by_text.loss(hidden, target), by_object.loss(hidden, target))
        assert str(by_text.function) == str(by_object.function) == "gss(k=0.2)"

    def test_a_registered_function(self) -> None:
        sigsoftmax.register_function("steep", lambda z, a: a * z + torch.tanh(z), parameters={"a": 2.0})
        layer = OutputLayer(D, V, function=OutputFunction("steep", a=Learned()))
        hidden, target = hidden_and_target()
        logits = layer.logits(hidden)
        a = layer.function_parameters["a"]
        plain = F.cross_entropy(a * logits + torch.tanh(logits), target)
        loss = layer.loss(hidden, target)
        assert_close(loss, plain)
        assert_close(torch.autograd.grad(loss, a), torch.autograd.grad(plain, a))

    def test_the_weight_starts_as_that_of_linear_and_the_bias_at_zero(self) -> None:
        torch.manual_seed(3)
        layer = OutputLayer(400, 500)
        bound = 1.0 / math.sqrt(400)
        assert layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3.0), rel=0.01)
        assert layer.bias is not None
        assert not layer.bias.any()

    def test_without_bias_there_is_none(self) -> None:
        layer = OutputLayer(D, V, bias=False)
        assert layer.bias is None
        assert [name for name, _ in layer.named_parameters()] == ["weight"]

    def test_mixed_precision_of_hidden_and_weight(self) -> None:
        layer = OutputLayer(D, V)
        hidden, target = hidden_and_target()
        loss = layer.loss(hidden.bfloat16(), target)
        loss.backward()
        assert loss.dtype == torch.bfloat16
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.float32


class TiedModel(nn.Module):
    def __init__(self, function: str = "sigsoftmax") -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.head = OutputLayer(D, V, function=function, weight=self.embedding.weight)

    def loss(self, token: Tensor, target: Tensor) -> Tensor:
        return self.head.loss(self.embedding(token), target)


class TestTiedWeight:
    def test_it_is_one_parameter(self) -> None:
        model = TiedModel()
        assert model.head.weight is model.embedding.weight
        assert len(list(model.parameters())) == 2
        assert {name for name, _ in model.named_parameters()} == {"embedding.weight", "head.bias"}

    def test_one_step_applies_the_sum_of_both_gradients_once(self) -> None:
        model = TiedModel()
        token, target = torch.randint(V, (N,)), torch.randint(V, (N,))
        as_input, as_output = (model.embedding.weight.detach().clone().requires_grad_() for _ in range(2))
        plain = F.nll_loss(torch.log_softmax(model.head.function.phi(as_input[token] @ as_output.T), -1), target)
        by_input, by_output = torch.autograd.grad(plain, [as_input, as_output])
        before = model.embedding.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.loss(token, target).backward()
        optimizer.step()
        assert_close(model.embedding.weight.detach(), before - 0.1 * (by_input + by_output))
        assert torch.equal(model.head.weight, model.embedding.weight)

    def test_the_tie_outlives_copies_moves_and_files(self) -> None:
        model = TiedModel()
        for other in (copy.deepcopy(model), saved_and_loaded(model), copy.deepcopy(model).double()):
            assert other.head.weight is other.embedding.weight
            assert other.head.weight is not model.head.weight
        fresh = TiedModel()
        fresh.load_state_dict(model.state_dict())
        assert fresh.head.weight is fresh.embedding.weight
        assert torch.equal(fresh.head.weight, model.head.weight)

    def test_the_bias_takes_the_dtype_of_the_weight(self) -> None:
        layer = OutputLayer(D, V, weight=nn.Parameter(torch.randn(V, D, dtype=torch.float64)))
        assert layer.bias is not None
        assert layer.bias.dtype == torch.float64
        assert layer.log_probs(torch.randn(N, D, dtype=torch.float64)).dtype == torch.float64


class TestLearnedParameters:
    @pytest.mark.parametrize(
        ("function", "shapes"),
        [
            ("sigsoftmax", {}),
            ("shifted_sigsoftmax", {"b": ()}),
            ("shifted_sigsoftmax(b=1.5)", {}),
            ("shifted_sigsoftmax(b=per_class:4)", {"b": (V,)}),
            (OutputFunction("shifted_sigsoftmax", b=Learned(per_class=True)), {"b": (V,)}),
            ("gss", {}),
            ("gss(k=learned)", {"k": ()}),
            ("gss(k=learned:0.5, c=per_class)", {"k": (), "c": (V,)}),
            ("softmax(alpha=learned:1.5)", {"alpha": ()}),
        ],
    )
    def test_which_are_registered(self, function: str | OutputFunction, shapes: dict[str, tuple[int, ...]]) -> None:
        layer = OutputLayer(D, V, function=function)
        assert {key: tuple(value.shape) for key, value in layer.function_parameters.items()} == shapes
        named = {name for name, _ in layer.named_parameters()}
        assert named == {"weight", "bias", *(f"function_parameters.{key}" for key in shapes)}

    def test_first_values(self) -> None:
        assert OutputLayer(D, V, function="shifted_sigsoftmax").function_parameters["b"].item() == 0.0
        assert OutputLayer(D, V, function="gss(k=learned)").function_parameters["k"].item() == 2.0
        whole = OutputLayer(D, V, function=OutputFunction("gss", k=Learned(1), c=Learned(-3, per_class=True)))
        assert whole.function_parameters["k"].item() == 1.0
        assert whole.function_parameters["c"].tolist() == [-3.0] * V

    @pytest.mark.parametrize(
        "function", ["shifted_sigsoftmax", "shifted_sigsoftmax(b=per_class)", "gss(k=learned:0.5)", "gss(c=per_class)"]
    )
    def test_training_moves_them_and_lowers_the_loss(self, function: str) -> None:
        layer = OutputLayer(D, V, function=function)
        hidden, target = hidden_and_target(40)
        first = {key: value.detach().clone() for key, value in layer.function_parameters.items()}
        before, after = train(layer, lambda: layer.loss(hidden, target))
        assert after < before
        for key, value in layer.function_parameters.items():
            assert (value != first[key]).all()

    def test_only_their_gradient_can_lower_the_loss_of_a_frozen_layer(self) -> None:
        layer = OutputLayer(D, V, function="shifted_sigsoftmax(b=per_class)")
        layer.weight.requires_grad_(False)
        assert layer.bias is not None
        layer.bias.requires_grad_(False)
        hidden = torch.randn(40, D)
        before, after = train(layer, lambda: layer.loss(hidden, torch.zeros(40, dtype=torch.long)), steps=100)
        assert after < 0.9 * before
        assert layer.function_parameters["b"].argmax() == 0

    def test_a_given_parameter_is_shared(self) -> None:
        shift = nn.Parameter(torch.randn(V))
        function = OutputFunction("shifted_sigsoftmax", b=shift)
        first, second = OutputLayer(D, V, function=function), OutputLayer(D, V, function=function)
        assert first.function_parameters["b"] is second.function_parameters["b"] is shift

    def test_a_given_tensor_is_a_buffer(self) -> None:
        shift = torch.randn(V)
        layer = OutputLayer(D, V, function=OutputFunction("shifted_sigsoftmax", b=shift))
        assert [name for name, _ in layer.named_buffers()] == ["function_b"]
        assert "function_b" in layer.state_dict()
        hidden, target = hidden_and_target()
        plain = F.nll_loss(torch.log_softmax(layer.function.phi(layer.logits(hidden)), -1), target)
        assert_close(layer.loss(hidden, target), plain)
        layer.double()
        moved = layer.function.parameters["b"]
        assert isinstance(moved, Tensor)
        assert moved.dtype == torch.float64


class TestLifeOfALayer:
    """Saving, copying, moving and compiling."""

    FUNCTIONS = ("sigsoftmax", "shifted_sigsoftmax", "gss(k=learned:0.5, c=per_class)", "gss(k=0.2)")

    @staticmethod
    def layer(function: str) -> OutputLayer:
        layer = OutputLayer(D, V, function=function)
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        return layer

    @pytest.mark.parametrize("function", FUNCTIONS)
    def test_state_dict_round_trip(self, function: str) -> None:
        layer, other = self.layer(function), self.layer(function)
        hidden, target = hidden_and_target()
        assert not torch.equal(layer.loss(hidden, target), other.loss(hidden, target))
        other.load_state_dict(layer.state_dict())
        assert torch.equal(layer.loss(hidden, target), other.loss(hidden, target))

    @pytest.mark.parametrize("function", FUNCTIONS)
    @pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded], ids=["deepcopy", "pickle"])
    def test_a_copy_is_equal_and_independent(self, function: str, copied: Callable[[OutputLayer], OutputLayer]) -> None:
        layer = self.layer(function)
        other = copied(layer)
        hidden, target = hidden_and_target()
        loss = layer.loss(hidden, target)
        assert torch.equal(other.loss(hidden, target), loss)
        assert str(other) == str(layer)
        for parameter in other.parameters():
            nn.init.normal_(parameter)
        assert torch.equal(layer.loss(hidden, target), loss)
        assert not torch.equal(other.loss(hidden, target), loss)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("function", FUNCTIONS)
    def test_another_dtype(self, function: str, dtype: torch.dtype) -> None:
        layer = self.layer(function)
        hidden, target = hidden_and_target()
        expected = layer.loss(hidden, target)
        layer.to(dtype)
        loss = layer.loss(hidden.to(dtype), target)
        loss.backward()
        assert loss.dtype == layer.log_probs(hidden.to(dtype)).dtype == dtype
        for parameter in layer.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == dtype
        # The inputs themselves are rounded: a few units of the last place of the logits.
        tolerance = 32 * torch.finfo(dtype if dtype != torch.float64 else torch.float32).eps
        assert_close(loss.float(), expected, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("function", FUNCTIONS)
    def test_the_loss_compiles_whole(self, function: str) -> None:
        torch._dynamo.reset()
        layer = self.layer(function)
        hidden, target = hidden_and_target()
        inputs = [hidden, *layer.parameters()]
        loss = layer.loss(hidden, target)
        compiled_loss = torch.compile(layer.loss, fullgraph=True, backend="aot_eager")(hidden, target)
        assert_close(compiled_loss, loss)
        assert_close(torch.autograd.grad(compiled_loss, inputs), torch.autograd.grad(loss, inputs))

    def test_what_print_shows(self) -> None:
        assert (
            OutputLayer(D, V, function="gss(k=0.2)", bias=False).extra_repr()
            == "5, 12, function='gss(k=0.2)', bias=False"
        )
        assert "function='shifted_sigsoftmax(b=per_class)'" in repr(
            OutputLayer(D, V, function="shifted_sigsoftmax(b=per_class)")
        )


class TestSampling:
    DRAWS = 40_000

    @staticmethod
    def layer_and_hidden(function: str = "sigsoftmax") -> tuple[OutputLayer, Tensor]:
        layer = OutputLayer(D, V, function=function)
        nn.init.normal_(layer.weight)
        return layer, torch.randn(2, D)

    @pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
    @pytest.mark.parametrize("function", ["softmax", "sigsoftmax", "gss(k=0.2)"])
    def test_frequencies_are_the_probabilities(self, function: str, temperature: float) -> None:
        layer, hidden = self.layer_and_hidden(function)
        generator = torch.Generator().manual_seed(1)
        drawn = layer.sample(hidden, self.DRAWS, temperature=temperature, generator=generator)
        # By the definition: the temperature divides log g.
        probs = torch.softmax(layer.function.phi(layer.logits(hidden)) / temperature, -1)
        for counts, row in zip((torch.bincount(row, minlength=V) for row in drawn), probs, strict=True):
            assert chi_square(counts, row) < chi_square_bound(V)

    def test_the_bound_tells_functions_apart(self) -> None:
        layer, hidden = self.layer_and_hidden("sigsoftmax")
        drawn = layer.sample(hidden, self.DRAWS, generator=torch.Generator().manual_seed(1))
        softmax = torch.softmax(layer.logits(hidden), -1)
        assert chi_square(torch.bincount(drawn[0], minlength=V), softmax[0]) > 3 * chi_square_bound(V)

    def test_half_precision_draws_from_unrounded_log_probs(self) -> None:
        classes, draws = 3000, 1_000_000
        layer = OutputLayer(1, classes, bias=False).bfloat16()
        nn.init.constant_(layer.weight, 0.0)
        nn.init.constant_(layer.weight[: classes // 2], 0.25)
        hidden = torch.ones(1, dtype=torch.bfloat16)
        log_probs = sigsoftmax.log_sigsoftmax(layer.logits(hidden).float())
        exact, rounded = (
            torch.softmax(values, -1)[: classes // 2].sum().item()
            for values in (log_probs, log_probs.bfloat16().float())
        )
        drawn = layer.sample(hidden, draws, generator=torch.Generator().manual_seed(1))
        frequency = (drawn < classes // 2).double().mean().item()
        deviation = math.sqrt(exact * (1.0 - exact) / draws)
        assert abs(rounded - exact) > 10 * deviation
        assert abs(frequency - exact) < 4 * deviation

    @pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,), (2, 0)])
    def test_shapes(self, leading: tuple[int, ...]) -> None:
        layer = OutputLayer(D, V)
        hidden = torch.randn(*leading, D)
        assert layer.sample(hidden).shape == leading
        assert layer.sample(hidden, 1).shape == (*leading, 1)
        assert layer.sample(hidden, 7).shape == (*leading, 7)
        assert [part.shape for part in layer.topk(hidden, 3)] == [(*leading, 3)] * 2

    def test_a_generator_repeats_the_draw(self) -> None:
        layer, hidden = self.layer_and_hidden()
        first, second = (layer.sample(hidden, 50, generator=torch.Generator().manual_seed(4)) for _ in range(2))
        assert torch.equal(first, second)
        assert not torch.equal(first, layer.sample(hidden, 50, generator=torch.Generator().manual_seed(5)))

    def test_a_temperature_near_zero_gives_the_likeliest_class(self) -> None:
        layer, hidden = self.layer_and_hidden()
        best = layer.topk(hidden, 1).indices
        for temperature in (1e-3, 1e-30):
            assert (layer.sample(hidden, 20, temperature=temperature) == best).all()

    def test_a_masked_class_is_never_drawn(self) -> None:
        layer, hidden = self.layer_and_hidden()
        assert layer.bias is not None
        layer.bias.data[: V - 1] = -math.inf
        assert (layer.sample(hidden, 100) == V - 1).all()

    def test_topk_is_the_head_of_the_sorted_log_probs(self) -> None:
        layer, hidden = self.layer_and_hidden()
        values, indices = layer.topk(hidden, 4)
        log_probs, order = layer.log_probs(hidden).sort(-1, descending=True)
        assert_close(values, log_probs[:, :4])
        assert torch.equal(indices, order[:, :4])
        assert not values.requires_grad


@pytest.mark.parametrize("make", [OutputLayer, lambda *a, **o: sigsoftmax.MixtureOutputLayer(D, *a, 3, **o)])
def test_device_and_dtype_as_in_nn_linear(make: Callable[..., nn.Module]) -> None:
    layer = make(D, V, function="gss(k=learned, c=per_class)", device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float64)}


class TestShells:
    def test_sigsoftmax_and_its_logarithm(self) -> None:
        logits = torch.randn(3, V, 4)
        assert torch.equal(Sigsoftmax(dim=1)(logits), sigsoftmax.sigsoftmax(logits, dim=1))
        assert torch.equal(LogSigsoftmax(dim=1)(logits), sigsoftmax.log_sigsoftmax(logits, dim=1))
        assert torch.equal(Sigsoftmax()(logits), sigsoftmax.sigsoftmax(logits))

    @pytest.mark.parametrize("function", ["softmax", "gss(k=0.2)", "softcap"])
    def test_probs_and_log_probs(self, function: str) -> None:
        logits = torch.randn(3, V, 4)
        assert torch.equal(Probs(function=function, dim=1)(logits), sigsoftmax.probs(logits, function=function, dim=1))
        assert torch.equal(
            LogProbs(function=function, dim=1)(logits), sigsoftmax.log_probs(logits, function=function, dim=1)
        )

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"weight": torch.linspace(0.5, 2.0, V)},
            {"ignore_index": 3},
            {"reduction": "sum"},
            {"reduction": "none", "label_smoothing": 0.2},
        ],
        ids=str,
    )
    def test_cross_entropy_loss_with_softmax_is_that_of_torch(self, options: dict[str, Any]) -> None:
        logits, target = torch.randn(4, V, 3), torch.randint(V, (4, 3))
        assert_close(
            CrossEntropyLoss(function="softmax", **options)(logits, target),
            nn.CrossEntropyLoss(**options)(logits, target),
        )

    def test_cross_entropy_loss_beyond_torch(self) -> None:
        logits, target, token_weights = torch.randn(4, V), torch.randint(V, (4,)), torch.rand(4)
        shell = CrossEntropyLoss(function="sigsoftmax", z_loss=0.1, extras=("entropy",), dim=-1)
        expected = sigsoftmax.cross_entropy(
            logits, target, function="sigsoftmax", z_loss=0.1, extras=("entropy",), dim=-1, token_weights=token_weights
        )
        assert_close(shell(logits, target, token_weights), expected)

    def test_class_weights_are_a_buffer(self) -> None:
        shell = CrossEntropyLoss(function="sigsoftmax", weight=torch.rand(V)).double()
        assert shell.weight is not None
        assert shell.weight.dtype == torch.float64
        assert list(shell.state_dict()) == ["weight"]

    def test_shells_learn(self) -> None:
        shell = CrossEntropyLoss(function="shifted_sigsoftmax")
        logits, target = torch.randn(20, V), torch.randint(V, (20,))
        before, after = train(shell, lambda: shell(logits, target))
        assert after < before

    @pytest.mark.parametrize(
        "shell",
        [Sigsoftmax(1), LogSigsoftmax(1), Probs(function="gss(k=learned)", dim=1), LogProbs(function="relu", dim=1)],
        ids=repr,
    )
    def test_shells_are_saved_and_copied(self, shell: nn.Module) -> None:
        logits = torch.randn(3, V, 2)
        for other in (saved_and_loaded(shell), copy.deepcopy(shell)):
            assert torch.equal(other(logits), shell(logits))

    def test_what_print_shows(self) -> None:
        assert Sigsoftmax(1).extra_repr() == "function='sigsoftmax', dim=1"
        assert CrossEntropyLoss(function="gss(k=0.5)").extra_repr() == "function='gss(k=0.5)'"


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (lambda: OutputLayer(0, V), "in_features must be a positive integer, got 0"),
        (lambda: OutputLayer(D, -1), "num_classes must be a positive integer, got -1"),
        (lambda: OutputLayer(D, 2.0), "num_classes must be a positive integer, got 2.0"),
        (lambda: OutputLayer(D, True), "num_classes must be a positive integer, got True"),
        (
            lambda: OutputLayer(D, V, function="sigsoftmx"),
            "unknown output function 'sigsoftmx' (did you mean 'sigsoftmax'?)",
        ),
        (
            lambda: OutputLayer(D, V, function=nn.Softmax(-1)),
            "function must be a name or an OutputFunction, got Softmax",
        ),
        (
            lambda: OutputLayer(D, V, weight=nn.Parameter(torch.randn(D, V))),
            "a tied weight must have the shape (num_classes, features) = (12, 5), got (5, 12)",
        ),
        (
            lambda: OutputLayer(D, V, weight=torch.randn(V, D)),
            "a tied weight must be the nn.Parameter of another module, got Tensor",
        ),
        (
            lambda: OutputLayer(D, V, function=OutputFunction("shifted_sigsoftmax", b=torch.zeros(3))).loss(
                *hidden_and_target()
            ),
            "parameter 'b' of 'shifted_sigsoftmax' has 3 values, but there are 12 classes",
        ),
        (
            lambda: LogProbs(function="shifted_sigsoftmax(b=per_class)"),
            "is to be learned per class, and the number of classes is not known here; pass num_classes",
        ),
        (
            lambda: OutputLayer(D, V).sample(torch.randn(D), temperature=0.0),
            "temperature must be a finite number greater than 0, got 0.0; for the likeliest class use topk",
        ),
        (
            lambda: OutputLayer(D, V).sample(torch.randn(D), temperature=math.inf),
            "temperature must be a finite number greater than 0, got inf",
        ),
        (lambda: OutputLayer(D, V).sample(torch.randn(D), 0), "num_samples must be a positive integer, got 0"),
        (
            lambda: OutputLayer(D, V).loss(torch.randn(N, D + 1), torch.zeros(N, dtype=torch.long)),
            "input has 6 features but linear_weight has 5",
        ),
        (
            lambda: OutputLayer(D, V).loss(torch.randn(N, D), torch.full((N,), V)),
            "target 12 at row 0 is out of range: expected a class in [0, 12)",
        ),
    ],
)
def test_errors(action: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        action()


class TestMemory:
    """The logits of all tokens never exist: not even one byte per token and class is allocated in one piece."""

    TOKENS, CLASSES, FEATURES = 300, 700, 16
    CHUNK_BYTES = 50 * 700 * 4

    def loss_and_gradients(self, *, dense_targets: bool = False, **options: Any) -> Callable[[], object]:
        layer = OutputLayer(self.FEATURES, self.CLASSES, function=options.pop("function"))
        hidden = torch.randn(self.TOKENS, self.FEATURES, requires_grad=True)
        target = torch.randint(self.CLASSES, (self.TOKENS,))
        if dense_targets:
            target = torch.rand(self.TOKENS, self.CLASSES)

        def action() -> None:
            result = layer.loss(hidden, target, **options)
            loss = result[0] if isinstance(result, tuple) else result
            loss.sum().backward()

        action()  # Gradients exist afterwards, as in the second step of training.
        return action

    @pytest.mark.parametrize("function", functions())
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"reduction": "none"},
            {"label_smoothing": 0.1, "z_loss": 1e-3, "extras": ("argmax", "entropy", "log_normalizer")},
        ],
        ids=str,
    )
    def test_linear_cross_entropy_never_holds_the_logits(self, function: str, options: dict[str, Any]) -> None:
        action = self.loss_and_gradients(function=function, chunk_bytes=self.CHUNK_BYTES, **options)
        allocated = allocations_of(action)
        assert self.CHUNK_BYTES <= allocated.largest < self.TOKENS * self.CLASSES
        assert str(sigsoftmax.explain()).startswith("blocked")

    def test_probability_targets_cost_no_more_than_a_byte_per_token_and_class(self) -> None:
        # They are N x V themselves; the check for NaN among them makes an N x V of booleans.
        action = self.loss_and_gradients(function="sigsoftmax", chunk_bytes=self.CHUNK_BYTES, dense_targets=True)
        assert allocations_of(action).largest <= self.TOKENS * self.CLASSES

    def test_the_measurement_sees_logits_where_they_are_held(self) -> None:
        action = self.loss_and_gradients(function="sigsoftmax", backend="reference")
        assert allocations_of(action).largest >= 4 * self.TOKENS * self.CLASSES

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_by_default_a_chunk_is_32_mebibytes(self, reduction: str) -> None:
        tokens, classes = 1200, 10_000
        weight = torch.randn(classes, 8, requires_grad=True)
        hidden, target = torch.randn(tokens, 8, requires_grad=True), torch.randint(classes, (tokens,))

        def action() -> None:
            sigsoftmax.linear_cross_entropy(
                hidden, weight, target, function="sigsoftmax", reduction=reduction
            ).sum().backward()

        action()
        allocated = allocations_of(action)
        assert allocated.largest <= 32 * 2**20 < 4 * tokens * classes
        assert allocated.peak <= 40 * 2**20


@pytest.mark.parametrize("alpha", [-0.5, 0.0, 0.5])
def test_a_learned_alpha_may_become_negative(alpha: float) -> None:
    """Phi then falls: the likeliest class has the lowest logit."""
    layer = OutputLayer(4, 9, function=OutputFunction("softmax", alpha=Learned()))
    with torch.no_grad():
        layer.function_parameters["alpha"].fill_(alpha)
        hidden, target = torch.randn(6, 4), torch.randint(9, (6,))
        loss, extras = layer.loss(hidden, target, extras=("argmax",))
        log_probs = layer.log_probs(hidden)
        assert_close(loss, F.nll_loss(log_probs, target))
        assert_close(log_probs, torch.log_softmax(alpha * layer.logits(hidden), -1))
        if alpha:
            assert torch.equal(extras.argmax, log_probs.argmax(-1))
