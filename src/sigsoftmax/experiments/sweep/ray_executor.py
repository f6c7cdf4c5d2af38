"""Trials on Ray: a Ray of its own on this machine, or a cluster by its address.

A Ray of its own listens on the loopback interface alone, asks every caller for a token that only this command knows,
has no dashboard, sends no usage statistics, and keeps its files in the folder of the sweep where that is short enough
for the sockets among them.

Its processes end with this one, however it ends: Linux kills the servers, and a worker without them ends within
seconds. Until then it holds the lock of its trial's folder, so that the next command waits for it.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sigsoftmax._version import install_extra
from sigsoftmax.experiments.sweep.plan import Trial
from sigsoftmax.experiments.sweep.trials import Failed, Place, run_trial
from sigsoftmax.lm.training.interruption import SoftStop
from sigsoftmax.records.schemas.sweeps import TrialRecord

__all__ = ["Share", "check_ray", "ray_folder", "ray_session", "remove_leftovers", "run_on_ray"]

FOLDER = "ray"
FALLBACK_PREFIX = "sigsoftmax-ray-"
SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107
"""bytes that the path of a Unix socket may have"""
SOCKET_NAME_LENGTH = 68
"""at most, of a session and a socket in it: /session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.1"""
OBJECT_STORE_BYTES = 100 * 2**20
"""little more than the least: trials keep what they make in files"""
LOOK_SECONDS = 0.5
REACH_SECONDS = 10.0
LOSSES = 3
"""how often the process of a trial may die before the trial counts as failed"""
STOP_SECONDS = 120.0
"""that trials have to save when they are asked to stop"""

# Read when ray is imported and by the processes that it starts. The name of the second is Ray's: it makes Ray bind to
# the loopback interface on any system.
LOCAL_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
}


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a trial takes."""

    cpus: float
    gpus: float

    def __str__(self) -> str:
        gpus = f" and {self.gpus:g} GPU" if self.gpus else ""
        return f"{self.cpus:g} CPU{'s' if self.cpus != 1 else ''}{gpus}"

    def fits(self, resources: dict[str, float]) -> int:
        """How many trials a machine with these resources can run at the same time."""
        by_cpu = resources.get("CPU", 0.0) / self.cpus
        # Ray gives a trial a share of one GPU, never of two.
        by_gpu = resources.get("GPU", 0.0) * int(1.0 / self.gpus + 1e-9) if self.gpus else by_cpu
        return int(min(by_cpu, by_gpu) + 1e-9)


def check_ray() -> None:
    """Refuse to go on without what a sweep needs."""
    missing = [name for name in ("ray", "safetensors") if find_spec(name) is None]
    if missing:
        raise ValueError(f"a sweep needs {' and '.join(missing)}: {install_extra('sweep')}")


# --- a session --------------------------------------------------------------------------------------------------------


def ray_folder(out: Path) -> Path | None:
    """Where Ray may keep its files in the folder of the sweep; None where paths of sockets would be too long."""
    folder = out.absolute() / FOLDER
    return folder if len(os.fsencode(folder)) + SOCKET_NAME_LENGTH <= SOCKET_PATH_LIMIT else None


def _make_folder(out: Path) -> Path:
    folder = ray_folder(out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    for place in dict.fromkeys([tempfile.gettempdir(), "/tmp"]):
        # mkdtemp adds eight letters.
        if len(os.fsencode(place)) + 1 + len(FALLBACK_PREFIX) + 8 + SOCKET_NAME_LENGTH <= SOCKET_PATH_LIMIT:
            with suppress(OSError):
                return Path(tempfile.mkdtemp(prefix=FALLBACK_PREFIX, dir=place))
    raise ValueError(
        f"the paths of Ray's sockets may have {SOCKET_PATH_LIMIT} bytes, which {out.absolute()} leaves no room for, "
        f"nor does {tempfile.gettempdir()}; choose a shorter --out, or set TMPDIR to a short path"
    )


def remove_leftovers(out: Path, noted: str) -> None:
    """The files of a Ray whose command is gone. ``noted`` is the folder that it had said, if any."""
    shutil.rmtree(out / FOLDER, ignore_errors=True)
    folder = Path(noted)
    # Whatever a file says, nothing but a folder of this kind is removed.
    if noted and folder.is_absolute() and folder.name.startswith(FALLBACK_PREFIX) and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_session(address: str | None, out: Path, note: Callable[[str], None]) -> Iterator[Any]:
    """The module ray, connected. ``note`` is told of the folder that a Ray of its own uses, to be removed if we die."""
    if address is not None:
        _check_reachable(address)
        # Read when ray is imported: it would try for a quarter of an hour.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")
        ray = importlib.import_module("ray")
        is_ours = not ray.is_initialized()
        if is_ours:
            _init(
                ray,
                f"the Ray at {address} cannot be reached (does it ask for a token? Then set RAY_AUTH_MODE=token)",
                address=address,
            )
        try:
            with _quiet():
                yield ray
        finally:
            if is_ours:
                ray.shutdown()
        return
    folder = _make_folder(out)
    note(str(folder))
    with _environment({**LOCAL_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}):
        ray = importlib.import_module("ray")
        if ray.is_initialized():
            raise ValueError("this process is connected to a Ray already: ray.shutdown() first, or name its address")
        try:
            _init(
                ray,
                "Ray did not start",
                address="local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
            )
            with _quiet():
                yield ray
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _check_reachable(address: str) -> None:
    """A host that does not answer is told in a moment; what stands for other things than a host is left to Ray."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise OSError(f"the Ray at {address} cannot be reached: {error}; begin one with ray start --head") from None


def _init(ray: Any, problem: str, **options: Any) -> None:
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:
        # Ray has many: other versions, no answer, a start that took too long.
        text = str(error).strip() or type(error).__name__
        raise OSError(f"{problem}: {text}") from error


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray prints a paragraph about every lost worker among the results; a sweep says it in a line of its own."""
    worker = importlib.import_module("ray._private.worker")
    before = getattr(worker, "print_to_stdstream", None)
    if before is None:
        yield
        return
    worker.print_to_stdstream = lambda *_, **__: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        worker.print_to_stdstream = before  # type: ignore[attr-defined]


def trials_at_once(ray: Any, share: Share, *, is_local: bool) -> int:
    """How many trials there is room for. None at all is refused here, and on a cluster that may grow waited for."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(share.fits(resources) for resources in machines)
    if not room and is_local:
        [resources] = machines
        raise ValueError(
            f"a trial asks for {share}, and this machine has {resources.get('CPU', 0):g} CPUs and "
            f"{resources.get('GPU', 0):g} GPUs; lower --cpus-per-trial or --gpus-per-trial"
        )
    return max(room, 1)


# --- trials -----------------------------------------------------------------------------------------------------------


def run_on_ray(
    ray: Any,
    trials: Sequence[Trial],
    place: Place,
    share: Share,
    *,
    at_once: int | None,
    say: Callable[[str], None],
    look: Callable[[Sequence[Trial]], None],
) -> Iterator[tuple[Trial, TrialRecord | Failed]]:
    """Every trial with what came of it, as each ends. ``look`` is called now and then with those that may be running.

    A trial whose process dies is begun again, from its last checkpoint. Asked to stop, all save and KeyboardInterrupt
    is raised.
    """
    # Retries are ours: Ray's own would not be told. A process for each trial on a GPU gives its memory back.
    task = ray.remote(num_cpus=share.cpus, num_gpus=share.gpus, max_retries=0, max_calls=1 if share.gpus else 0)(
        run_trial
    )
    waiting, running, lost = list(trials), dict[Any, Trial](), Counter[Trial]()
    with SoftStop() as stop:
        try:
            while waiting or running:
                while waiting and (at_once is None or len(running) < at_once):
                    trial = waiting.pop(0)
                    running[task.remote(_absolute(trial), place)] = trial
                ready, _ = ray.wait(list(running), timeout=LOOK_SECONDS)
                if stop.asked:
                    raise KeyboardInterrupt
                for reference in ready:
                    trial = running.pop(reference)
                    outcome = _outcome(ray, reference)
                    if outcome is None:
                        lost[trial] += 1
                        if lost[trial] < LOSSES:
                            say(f"{trial.name}: its process died; another goes on from its last checkpoint")
                            waiting.insert(0, trial)
                            continue
                        outcome = Failed(f"its process died {LOSSES} times, perhaps for want of memory")
                    yield trial, outcome
                look(list(running.values()))
        except KeyboardInterrupt:
            say("stopping: the trials that run are saved; Ctrl-C again ends at once")
            _stop(ray, list(running))
            raise


def _absolute(trial: Trial) -> Trial:
    return replace(trial, run=replace(trial.run, folder=trial.folder.absolute()))


def _outcome(ray: Any, reference: Any) -> TrialRecord | Failed | None:
    """None where the process died or was told to end."""
    errors = ray.exceptions
    try:
        outcome: TrialRecord | Failed = ray.get(reference)
    except errors.TaskCancelledError:
        # Not by us: a worker that is terminated from outside saves first, and then ends so.
        return None
    except errors.RayTaskError as error:
        # It could not even begin, as where sigsoftmax is not installed.
        return Failed(str(getattr(error, "cause", None) or error).strip().splitlines()[-1])
    except errors.RayError:
        return None
    return outcome


def _stop(ray: Any, references: list[Any]) -> None:
    """Trials that run save and end; those that wait are dropped."""
    for reference in references:
        ray.cancel(reference)
    until = time.monotonic() + STOP_SECONDS
    while references and time.monotonic() < until:
        _, references = ray.wait(references, timeout=LOOK_SECONDS)
