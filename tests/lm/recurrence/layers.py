"""The layers and batches of all recipes, and a GPU as planners know it."""

from sigsoftmax.lm.recipes import recipe
from sigsoftmax.lm.recurrence.plans import GpuDescription, LayerPlan, plan_layer

H200 = GpuDescription(capability=(9, 0), multiprocessors=132, shared_bytes=232_448, cooperative=True)
SHARED_H200 = GpuDescription(
    capability=(9, 0), multiprocessors=132, shared_bytes=232_448, cooperative=True, concurrent_runs=2
)
PRECISIONS = ("bf16", "tf32")


def recipe_layers():
    """(hidden units, columns) of training, validation, test, dynamic evaluation and its statistics."""
    found = {}
    for name in ("ptb-softmax", "ptb-mos", "wt2-softmax", "wt2-mos", "tiny-softmax", "language-softmax"):
        chosen = recipe(name)
        training = chosen.training
        batches = (
            training.group or training.batch,
            training.evaluation_batch,
            1,
            chosen.dynamic_evaluation.statistics_batch,
        )
        found |= {(hidden, batch): None for hidden in chosen.model.hidden for batch in batches}
    return list(found)


def recipe_plans():
    """Every plan of the recipes, alone on the GPU and with others."""
    plans = [
        plan_layer(hidden, batch, precision, gpu)
        for gpu in (H200, SHARED_H200)
        for precision in PRECISIONS
        for hidden, batch in recipe_layers()
    ]
    return list(dict.fromkeys(plan for plan in plans if isinstance(plan, LayerPlan)))


def plan_id(plan):
    forward, backward = plan.forward, plan.backward
    return f"{forward.precision}-{forward.hidden}x{forward.batch}-{forward.ctas}-{backward.ctas}"
