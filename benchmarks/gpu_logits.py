"""Cases of the GPU benchmark on logits that the caller holds.

Shapes: N tokens, V classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from gpu_losses import Peers, logits_losses, ours_logits, step_of, those_that_work
from gpu_machine import Machine, gpu_case
from gpu_problems import DEVIATIONS, Problem, logits_problem, relative_errors
from measuring import MEMBERS, Measurement, Products, Step

from sigsoftmax import OutputFunction

Maker = Callable[[], Problem]
IN_PLACE = "Liger softmax, in place"
NEAR_SOFTMAX = ("shifted_sigsoftmax(b=1)", "gss(k=0)", "sigmoid", "relu")
"""members whose loss is to cost hardly more than that of softmax"""
BOUND_BY_FUNCTIONS = ("gss(k=0.2)", "softcap")
"""members whose price is that of their special functions"""


def shape_text(tokens: int, classes: int) -> str:
    return f"N={tokens} V={classes}"


def random_logits(machine: Machine, tokens: int, classes: int) -> dict[str, Maker]:
    return {
        f"deviation {deviation:g}": lambda deviation=deviation: logits_problem(
            machine.device, tokens, classes, deviation=deviation
        )
        for deviation in DEVIATIONS
    }


def whole_steps(
    machine: Machine, peers: Peers, tokens: int, classes: int, *, peaked: bool, rounds: int
) -> list[Measurement]:
    """Forward and backward as a training step calls them, beside torch and peers."""
    if peaked:
        kinds: Mapping[str, Maker] = {
            "peaked": lambda: logits_problem(machine.device, tokens, classes, peaked=True),
        }
    else:
        kinds = random_logits(machine, tokens, classes)
    first = next(iter(kinds.values()))()
    losses = those_that_work(machine, logits_losses(machine, peers), first)
    errors = relative_errors(losses, kinds)
    machine.empty_cache()
    steps = {name: step_of(loss.loss, first) for name, loss in losses.items()}
    if "Liger softmax" in steps and peers.liger_logits is not None:
        liger = peers.liger_logits
        del steps["Liger softmax"]
        errors[IN_PLACE] = errors.pop("Liger softmax")
        # It overwrites its input. A copy would be timed with it, so its next input is whatever it left.
        scratch = first.hidden.detach().clone().requires_grad_()
        steps[IN_PLACE] = Step(lambda: liger(scratch, first.target), [scratch])
    case = gpu_case(
        name=f"cross-entropy of {'peaked ' if peaked else ''}bf16 logits, {shape_text(tokens, classes)}",
        baseline="torch.compile softmax",
        implementations=steps,
        targets={
            "ours sigsoftmax": "<= 1.6 ms, <= 1.03x of ours softmax, <= 1.2x torch's error, aim 1.25 ms",
            "ours softmax": "<= 1.2x torch's error",
        },
    )
    # What overwrites its input has no gradient to set apart.
    return machine.measured(case, rounds, errors=errors, without_peak=(IN_PLACE,))


def rows_in_the_cache(function: str, tokens: int, classes: int) -> Products:
    """The kernel on rows that overlap, of which all fit the cache: what it computes, with no memory to wait for."""
    from sigsoftmax.backends.triton.logits_kernels import LogitsKernels
    from sigsoftmax.contract.rows import RowCoefficients, RowTargets

    step = 16
    logits_NV, out_NV = (
        torch.randn(tokens * step + classes, device="cuda", dtype=torch.bfloat16).as_strided(
            (tokens, classes), (step, 1)
        )
        for _ in range(2)
    )
    by_normalizer_N = torch.full((tokens,), 1.0 / tokens, device="cuda")
    target_N = torch.randint(classes, (tokens,), device="cuda")
    coefficients = RowCoefficients(by_normalizer_N, -by_normalizer_N, None, None)
    output_function = OutputFunction(function)
    rows = LogitsKernels(output_function.form, output_function.arguments(), logits_NV)

    def run() -> torch.Tensor:
        return rows.stats_and_gradient(logits_NV, RowTargets(target_N), coefficients, None, out_NV).normalizer

    return Products(run, [])


def device_alone(machine: Machine, tokens: int, classes: int, rounds: int, special: float) -> list[Measurement]:
    """Every member and the rarer options in CUDA graphs, and what reading and writing the logits takes.

    ``special`` is the price that members bound by special functions may have, relative to softmax.
    """
    problem = logits_problem(machine.device, tokens, classes)
    steps = {f"ours {function}": step_of(ours_logits(function), problem) for function in (*MEMBERS, "gss(k=0)")}
    options = {"label smoothing": {"label_smoothing": 0.1}, "z-loss": {"z_loss": 1e-4}}
    for name, values in options.items():
        steps[f"ours sigsoftmax with {name}"] = step_of(ours_logits("sigsoftmax", **values), problem)
    for name, shape in (("learned k and c", ()), ("learned k and c per class", (classes,))):
        k = torch.full((), 0.5, device=machine.device, requires_grad=True)
        c = torch.zeros(shape, device=machine.device, requires_grad=True)
        steps[f"ours gss with {name}"] = step_of(ours_logits(OutputFunction("gss", k=k, c=c)), problem, k, c)
    replays: dict[str, Step] = {name: machine.captured(step) for name, step in steps.items()}
    copied = torch.empty_like(problem.hidden)
    replays["a copy: one read and one write of the logits"] = machine.captured(
        Products(lambda: copied.copy_(problem.hidden.detach()), [])
    )
    if machine.is_cuda:
        for function in ("softmax", "sigsoftmax"):
            replays[f"the kernel of {function} with all rows in the cache"] = machine.captured(
                rows_in_the_cache(function, tokens, classes)
            )
    targets = dict.fromkeys((f"ours {function}" for function in NEAR_SOFTMAX), "<= 1.15x")
    targets |= dict.fromkeys((f"ours {function}" for function in BOUND_BY_FUNCTIONS), f"<= {special}x")
    targets |= {"ours sigsoftmax": "<= 1.6 ms, <= 1.03x, aim 1.25 ms", "ours gss with learned k and c": "<= 2x"}
    name = f"cross-entropy of bf16 logits without the host (CUDA graphs), {shape_text(tokens, classes)}"
    return machine.measured(gpu_case(name, "ours softmax", replays, targets), rounds)


def beside_softmax(machine: Machine, tokens: int, classes: int, rounds: int) -> list[Measurement]:
    """sigsoftmax and softmax alone, so that their ratio is taken within a round."""
    problem = logits_problem(machine.device, tokens, classes)
    case = gpu_case(
        name=f"sigsoftmax beside softmax, bf16 logits, {shape_text(tokens, classes)}",
        baseline="ours softmax",
        implementations={f"ours {f}": step_of(ours_logits(f), problem) for f in ("softmax", "sigsoftmax")},
        targets={"ours sigsoftmax": "<= 1.03x"},
    )
    return machine.measured(case, rounds, has_host_times=True)


def classifier(
    machine: Machine, tokens: int, classes: int, rounds: int, *, label_smoothing: float
) -> list[Measurement]:
    """Few logits, where the host's time counts; each baseline has the options of what is compared with it."""
    problem = logits_problem(machine.device, tokens, classes)
    steps = {
        "torch softmax": step_of(
            lambda p: F.cross_entropy(p.hidden, p.target, label_smoothing=label_smoothing), problem
        ),
        **{
            f"ours {function}": step_of(ours_logits(function, label_smoothing=label_smoothing), problem)
            for function in ("softmax", "sigsoftmax")
        },
    }
    case = gpu_case(
        name=f"a classifier's bf16 logits, {f'label smoothing {label_smoothing:g}, ' if label_smoothing else ''}"
        f"{shape_text(tokens, classes)}",
        baseline="torch softmax",
        implementations=steps,
        targets={},
    )
    return machine.measured(case, rounds, has_host_times=True)
