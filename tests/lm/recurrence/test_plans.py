"""Plans: every recipe is served, nothing is asked for that a GPU does not have, and a refusal says why."""

import json
import re
from dataclasses import replace

import pytest
from tests.lm.recurrence.layers import H200, PRECISIONS, SHARED_H200, recipe_layers

from sigsoftmax.lm.recurrence.plans import RANKS, KernelPlan, LayerPlan, Refusal, feasible, plan_layer
from sigsoftmax.records.envelope import from_plain, to_plain


def kernels_of(gpu):
    for precision in PRECISIONS:
        for hidden, batch in recipe_layers():
            plan = plan_layer(hidden, batch, precision, gpu)
            assert isinstance(plan, LayerPlan), (hidden, batch, precision, plan)
            yield plan.forward
            yield plan.backward


@pytest.mark.parametrize("gpu", [H200, SHARED_H200], ids=["alone", "shared"])
def test_every_recipe_has_plans_that_fit(gpu):
    for kernel in kernels_of(gpu):
        assert kernel.ctas <= gpu.multiprocessors
        assert kernel.shared_bytes <= gpu.shared_bytes
        assert kernel.groups * kernel.passes * kernel.column_tiles * 8 >= kernel.batch
        if kernel.direction == "backward":
            assert kernel.ctas % RANKS == 0


def test_all_weights_are_on_chip():
    for kernel in kernels_of(H200):
        in_registers = kernel.ctas * kernel.warps * kernel.register_tiles * 2 * 512
        matrix = 4 * kernel.padded**2 * kernel.element_bytes * kernel.groups
        assert kernel.ctas * kernel.weight_bytes + in_registers >= matrix


def test_runs_that_share_a_gpu_leave_room_for_each_other_where_the_matrix_allows_it():
    for direction in ("forward", "backward"):
        kernel = getattr(plan_layer(1150, 20, "bf16", SHARED_H200), direction)
        assert 2 * kernel.ctas <= H200.multiprocessors
    # In float32 half of the GPU cannot hold it: the grids take turns.
    assert plan_layer(1150, 20, "tf32", SHARED_H200).forward.ctas > H200.multiprocessors // 2


def test_the_same_plan_each_time_and_through_json():
    plan = plan_layer(1150, 20, "bf16", H200)
    assert plan_layer(1150, 20, "bf16", H200) == plan
    assert from_plain(LayerPlan, json.loads(json.dumps(to_plain(plan))), "plan") == plan


def test_the_fastest_by_the_measured_model_is_taken():
    plans = list(feasible("forward", 1150, 20, "bf16", H200))
    assert plan_layer(1150, 20, "bf16", H200).forward == min(plans, key=KernelPlan.microseconds)
    assert len(plans) > 5


@pytest.mark.parametrize(
    ("gpu", "hidden", "reason"),
    [
        (replace(H200, capability=(8, 0)), 400, r"compute capability 8\.0, not 9\.0 \(Hopper\)"),
        (replace(H200, cooperative=False), 400, "cannot launch cooperative grids"),
        (H200, 4096, "16,384 x 4,096 in bf16 for 20 columns does not fit on the 132 multiprocessors"),
        (replace(H200, multiprocessors=16), 1150, "does not fit on the 16 multiprocessors"),
    ],
)
def test_a_refusal_says_why(gpu, hidden, reason):
    plan = plan_layer(hidden, 20, "bf16", gpu)
    assert isinstance(plan, Refusal)
    assert re.search(reason, plan.reason)
