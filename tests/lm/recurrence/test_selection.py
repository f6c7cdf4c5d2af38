"""Cases without the persistent recurrence: why, in words, and that layers then run on torch's own LSTM."""

import copy
from dataclasses import replace

import pytest
import torch
from tests.lm.recurrence.layers import H200

from sigsoftmax.lm.config import ModelConfig
from sigsoftmax.lm.model.language_model import LanguageModel
from sigsoftmax.lm.recurrence import LayerKernels, Recurrence, RecurrenceFailed, Refusal, plan_layer, selection
from sigsoftmax.lm.recurrence.plans import feasible

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def chosen(dtype=torch.bfloat16, device=CUDA, hidden=400, **settings):
    return Recurrence(**settings).choose(hidden, 20, dtype, device, backward=True)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that plans can be made for; what would be launched there is not."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(selection, "describe_gpu", lambda device, runs: H200)
    monkeypatch.setattr(selection, "_loaded_and_tried", lambda kernels, dtype, backward: None)
    return monkeypatch


def test_a_cpu_runs_on_torch():
    refusal = chosen(torch.float32, CPU)
    assert refusal == Refusal("the layer is on cpu, not on an NVIDIA GPU")


def test_a_hopper_gpu_runs_on_persistent_kernels(gpu):
    kernels = chosen()
    assert isinstance(kernels, LayerKernels)
    assert kernels.plan == plan_layer(400, 20, "bf16", H200)


def test_an_environment_variable_asks_for_torch(gpu):
    gpu.setenv("SIGSOFTMAX_RECURRENCE", "torch")
    assert chosen() == Refusal("SIGSOFTMAX_RECURRENCE=torch was set")
    gpu.setenv("SIGSOFTMAX_RECURRENCE", "Torch")
    with pytest.raises(ValueError, match="SIGSOFTMAX_RECURRENCE must be torch, or not set, got 'Torch'"):
        chosen()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_run_on_torch(gpu, dtype):
    assert str(dtype) in chosen(dtype).reason


def test_float32_is_served_with_tf32_products_alone(gpu):
    gpu.setattr(torch.backends.cudnn.rnn, "fp32_precision", "tf32")
    assert isinstance(chosen(torch.float32), LayerKernels)
    gpu.setattr(torch.backends.cudnn.rnn, "fp32_precision", "ieee")
    assert chosen(torch.float32) == Refusal("IEEE float32 products were asked for, not TF32")


def test_a_partitioned_gpu_runs_on_torch(gpu):
    partitioned = replace(H200, partition="the GPU is partitioned (MIG)")
    gpu.setattr(selection, "describe_gpu", lambda device, runs: partitioned)
    assert chosen() == Refusal("the GPU is partitioned (MIG)")


def test_a_missing_library_is_a_reason(gpu):
    def missing(device, runs):
        raise ImportError("cuda")

    gpu.setattr(selection, "describe_gpu", missing)
    assert chosen() == Refusal("the package cuda-bindings is not installed")


def test_a_trial_that_fails_is_a_reason_and_is_not_repeated(gpu):
    trials = []

    def fails(kernels, dtype, backward):
        trials.append(backward)
        return Refusal("the GPU is busy")

    gpu.setattr(selection, "_loaded_and_tried", fails)
    recurrence = Recurrence()
    for _ in range(3):
        assert recurrence.choose(400, 20, torch.bfloat16, CUDA, backward=True) == Refusal("the GPU is busy")
    assert trials == [True]


def test_the_sentence_names_the_layers_that_differ(gpu):
    recurrence = Recurrence()
    alike = recurrence.describe((1150, 1150, 400), 20, torch.bfloat16, CUDA)
    assert alike == ("LSTM recurrence: persistent kernels, the recurrent weights staying on chip for a whole window")
    mixed = recurrence.describe((4096, 400), 20, torch.bfloat16, CUDA)
    assert "torch's own LSTM for layers of 4096 units, because a recurrent matrix" in mixed
    assert "persistent kernels for layers of 400 units" in mixed
    assert (
        Recurrence().describe((400,), 20, torch.float32, CPU).startswith("LSTM recurrence: torch's own LSTM, because")
    )


def test_plans_in_use_are_written_and_used_again(gpu):
    recurrence = Recurrence(concurrent_runs=2)
    recurrence.choose(1150, 20, torch.bfloat16, CUDA, backward=True)
    (used,) = recurrence.plans_in_use()
    assert used.forward.hidden == 1150
    # Another plan than the one that would be chosen, and one that fits.
    *_, forward = feasible("forward", 1150, 20, "bf16", H200)
    assert forward != used.forward
    asked, other = replace(used, forward=forward), Recurrence()
    assert other.restore([asked], (1150,), 20, torch.bfloat16, CUDA) is None
    assert other.choose(1150, 20, torch.bfloat16, CUDA, backward=True).plan == asked


@pytest.mark.parametrize("change", [{"row_tiles": 10**9}, {"groups": 0}, {"register_tiles": -5}, {"warps": 64}])
def test_a_plan_from_a_file_that_no_planner_makes_is_not_used(gpu, change):
    plan = plan_layer(400, 20, "bf16", H200)
    recurrence = Recurrence()
    told = recurrence.restore(
        [replace(plan, backward=replace(plan.backward, **change))], (400,), 20, torch.bfloat16, CUDA
    )
    assert "begun on a plan that does not fit this GPU" in told
    assert recurrence.choose(400, 20, torch.bfloat16, CUDA, backward=True).plan == plan


def test_a_plan_that_cannot_be_had_is_told(gpu):
    recurrence = Recurrence()
    recurrence.choose(400, 20, torch.bfloat16, CUDA, backward=True)
    written = recurrence.plans_in_use()
    gpu.setenv("SIGSOFTMAX_RECURRENCE", "torch")
    reason = Recurrence().restore(written, (400,), 20, torch.bfloat16, CUDA)
    assert reason.startswith("the persistent recurrence that the run was begun on cannot be had here: SIGSOFTMAX")
    gpu.delenv("SIGSOFTMAX_RECURRENCE")
    assert (
        Recurrence().restore([], (400,), 20, torch.bfloat16, CUDA).startswith("the run was begun on torch's own LSTM")
    )
    assert Recurrence().restore([], (400,), 20, torch.float32, CPU) is None


def test_copies_have_the_settings_and_no_kernels(gpu):
    recurrence = Recurrence(concurrent_runs=4)
    recurrence.choose(400, 20, torch.bfloat16, CUDA, backward=True)
    for duplicate in (copy.copy(recurrence), copy.deepcopy(recurrence)):
        assert duplicate.concurrent_runs == 4
        assert duplicate.plans_in_use() == ()


def test_a_flag_that_is_set_becomes_an_exception_until_it_is_cleared():
    recurrence = Recurrence()
    recurrence.raise_if_failed()
    recurrence._flag = torch.tensor([2], dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(
            RecurrenceFailed, match=r"backward LSTM recurrence waited in vain.*SIGSOFTMAX_RECURRENCE=torch"
        ):
            recurrence.raise_if_failed()
    recurrence._flag.zero_()
    recurrence.raise_if_failed()


def test_a_model_says_what_computes_its_layers():
    model = LanguageModel(ModelConfig(embedding=8, hidden=(12, 8)), 20)
    assert model.describe_recurrence(4, torch.float32).endswith("because the layer is on cpu, not on an NVIDIA GPU")
