"""The executor of runs on Ray: a Ray of its own on this machine, or a cluster by its address.

A Ray of its own listens on the loopback interface alone, asks every caller for a token that only this command knows,
has no dashboard, sends no usage statistics, and keeps its files in the folder of the sweep where that is short enough
for the sockets among them.

Its processes end with this one, however it ends: Linux kills the servers, and a worker without them ends within
seconds. Until then it holds the lock of its run's folder, so that the next command waits for it.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, cast

import torch

from sigsoftmax._version import install_extra
from sigsoftmax.experiments.runs.executors import After, Failed, R, T, train_alone
from sigsoftmax.experiments.runs.folder_locks import FolderLock
from sigsoftmax.experiments.runs.run import Resources
from sigsoftmax.lm.data.corpus import Corpus
from sigsoftmax.lm.data.corpus_files import DATA_VARIABLE
from sigsoftmax.lm.training.interruption import SoftStop
from sigsoftmax.report.number_text import counted

__all__ = [
    "Place",
    "RayExecutor",
    "Share",
    "check_ray",
    "ray_folder",
    "ray_session",
    "remove_leftovers",
    "trials_at_once",
    "work",
]

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
"""times that the process of a run may die before the run counts as failed"""
STOP_SECONDS = 120.0
"""time that runs have to save when they are asked to stop"""
ERROR_FILE = "error.txt"
CHECKPOINT_SECONDS = 30.0
"""time between two checkpoints: a worker may be lost at any moment, and loses no more than this"""
LOCK_PATIENCE = 120.0
"""seconds that a worker of a command that was killed may need to notice that it is alone"""

# Read when ray is imported and by the processes that it starts. The name of the second is Ray's: it makes Ray bind to
# the loopback interface on any system.
LOCAL_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
}
LOCAL_OPTIONS = {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}


@dataclass(frozen=True, kw_only=True)
class Share:
    """The CPUs and GPUs that one trial takes."""

    cpus: float
    gpus: float

    def __str__(self) -> str:
        return counted(self.cpus, "CPU") + (f" and {self.gpus:g} GPU" if self.gpus else "")

    def fits(self, resources: dict[str, float]) -> int:
        """The number of trials that a machine with these resources can run at the same time."""
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
    """The folder for Ray's files in that of the sweep; None where paths of sockets would be too long."""
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
    with ExitStack() as stack:
        if address is None:
            folder = _make_folder(out)
            note(str(folder))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(_environment({**LOCAL_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}))
            problem, options = "Ray did not start", {**LOCAL_OPTIONS, "_temp_dir": str(folder)}
        else:
            _check_reachable(address)
            # Read when ray is imported: it would try for a quarter of an hour.
            os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")
            problem = f"the Ray at {address} cannot be reached (does it ask for a token? Then set RAY_AUTH_MODE=token)"
            options = {"address": address}
        ray = importlib.import_module("ray")
        if address is None and ray.is_initialized():
            raise ValueError("this process is connected to a Ray already: ray.shutdown() first, or name its address")
        if not ray.is_initialized():
            stack.callback(ray.shutdown)
            _init(ray, problem, options)
        # Ray prints a paragraph about every lost worker among the results; a sweep says it in a line of its own.
        stack.enter_context(redirect_stdout(cast(TextIO, _OneThread(sys.stdout))))
        yield ray


class _OneThread:
    """A stream that drops what other threads than the present one write, as those of Ray."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return self._stream.write(text) if threading.get_ident() == self._thread else len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _check_reachable(address: str) -> None:
    """A host that does not answer is told in a moment; what stands for other things than a host is left to Ray."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise OSError(f"the Ray at {address} cannot be reached: {error}; begin one with ray start --head") from None


def _init(ray: Any, problem: str, options: Mapping[str, Any]) -> None:
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:
        # Ray has many: other versions, no answer, a start that took too long.
        text = str(error).strip() or type(error).__name__
        raise OSError(f"{problem}: {text}") from error


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def trials_at_once(ray: Any, share: Share, *, is_local: bool) -> int:
    """The number of trials there is room for; 0 is refused on this machine, and 1 on a cluster, which may grow."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(share.fits(resources) for resources in machines)
    if not room and is_local:
        [resources] = machines
        raise ValueError(
            f"a trial asks for {share}, and this machine has {resources.get('CPU', 0):g} CPUs and "
            f"{resources.get('GPU', 0):g} GPUs; lower --cpus-per-trial or --gpus-per-trial"
        )
    return max(room, 1)


# --- the workers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """Everything that a worker may use, on whatever machine it runs."""

    witness: Path
    """a file in the folder of the runs, absolute: a machine that does not see it does not share the folder"""
    folder: Path
    """the folder in which the command was given"""
    arguments: tuple[str, ...]
    """the words of the command, for records"""
    data_variable: str | None
    """the value of the environment variable that says where corpora are"""
    threads: int
    resources: Mapping[str, Any]
    """fields of :class:`Resources`, which looks for the device and is therefore made by the worker"""

    @classmethod
    def here(cls, witness: Path, *, threads: int, data: Path | None, **resources: Any) -> Place:
        return cls(
            witness=witness.absolute(),
            folder=Path.cwd(),
            arguments=tuple(sys.argv),
            data_variable=os.environ.get(DATA_VARIABLE),
            threads=threads,
            resources={"data": None if data is None else data.absolute(), **resources},
        )

    def settle(self) -> Resources:
        """Make this process work as the command's own would."""
        # A recipe may name its text by a path from there; on another machine that folder need not exist.
        with suppress(OSError):
            os.chdir(self.folder)
        if self.data_variable is not None:
            os.environ[DATA_VARIABLE] = self.data_variable
        sys.argv = list(self.arguments)
        torch.set_num_threads(self.threads)
        return Resources(checkpoint_seconds=CHECKPOINT_SECONDS, **self.resources)


def work(run: R, after: After[R, T], place: Place) -> T | Failed:
    """Train a run from where it was left, in a process of Ray; stopped, it saves and raises KeyboardInterrupt."""
    error_file = run.folder / ERROR_FILE
    try:
        resources = place.settle()
        if not place.witness.is_file():
            raise ValueError(
                f"{platform.node()} does not see {place.witness.parent}; on a cluster --out must be a folder that all "
                "nodes share"
            )
        with FolderLock(run.folder, patience=LOCK_PATIENCE):
            corpus = _corpus(run.recipe.corpus, resources)
            train_alone(run, corpus, resources)
            result = after(run, corpus, resources)
            error_file.unlink(missing_ok=True)
            return result
    except Exception as error:  # noqa: BLE001 - whatever one run raises, the others go on
        reason = str(error) or type(error).__name__
        if type(error).__name__ == "OutOfMemoryError":
            reason = f"the GPU has too little memory; give each trial a larger share (--gpus-per-trial). {reason}"
        elif not isinstance(error, ValueError | OSError | ArithmeticError):
            reason = f"{type(error).__name__}: {reason}"
            with suppress(OSError):
                error_file.parent.mkdir(parents=True, exist_ok=True)
                error_file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
                reason += f" (all of it in {error_file})"
        return Failed(reason)


@lru_cache(maxsize=1)
def _corpus(name: str, resources: Resources) -> Corpus:
    """The text of a run, read once for the runs of one process."""
    return resources.corpus(name)


# --- the executor -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RayExecutor:
    """Trains each run in a process of Ray.

    A run whose process dies is begun again, from its last checkpoint; whatever a run raises is the reason why it
    failed, and the others go on.
    """

    ray: Any
    place: Place
    share: Share
    at_once: int | None
    """number of runs at the same time, at most; None: as many as there is room for"""
    say: Callable[[str], None]
    look: Callable[[Sequence[Any]], None]
    """called now and then with the runs that may be going on"""

    def run(self, runs: Sequence[R], after: After[R, T]) -> Iterator[tuple[R, T | Failed]]:
        ray, share = self.ray, self.share
        # Ray's own retries would not be told, and leave out workers that are terminated from outside, which save and
        # end as if they had been cancelled. A process for each run on a GPU gives its memory back.
        options = {"num_cpus": share.cpus, "num_gpus": share.gpus, "max_calls": 1 if share.gpus else 0}
        task = ray.remote(max_retries=0, **options)(work)
        waiting, running, lost = deque(runs), dict[Any, R](), Counter[R]()
        with SoftStop() as stop:
            try:
                while waiting or running:
                    while waiting and (self.at_once is None or len(running) < self.at_once):
                        run = waiting.popleft()
                        here = replace(run, folder=run.folder.absolute())
                        running[task.remote(here, after, self.place)] = run
                    ready, _ = ray.wait(list(running), timeout=LOOK_SECONDS)
                    if stop.asked:
                        raise KeyboardInterrupt
                    for reference in ready:
                        run = running.pop(reference)
                        outcome = _outcome(ray, reference)
                        if outcome is not None:
                            yield run, outcome
                            continue
                        lost[run] += 1
                        if lost[run] == LOSSES:
                            yield run, Failed(f"its process died {LOSSES} times, perhaps for want of memory")
                        else:
                            self.say(f"{run.name}: its process died; another goes on from its last checkpoint")
                            waiting.appendleft(run)
                    self.look(list(running.values()))
            except KeyboardInterrupt:
                self.say("stopping: the trials that run are saved; Ctrl-C again ends at once")
                _stop(ray, list(running))
                raise


def _outcome(ray: Any, reference: Any) -> Any:
    """The result of a run; None where its process died or was told to end."""
    errors = ray.exceptions
    try:
        return ray.get(reference)
    except errors.TaskCancelledError:
        # Not by us: a worker that is terminated from outside saves first, and then ends so.
        return None
    except errors.RayTaskError as error:
        # It could not even begin, as where sigsoftmax is not installed.
        return Failed(str(getattr(error, "cause", None) or error).strip().splitlines()[-1])
    except errors.RayError:
        return None


def _stop(ray: Any, references: list[Any]) -> None:
    """Runs that are going on save and end; those that wait are dropped."""
    for reference in references:
        ray.cancel(reference)
    until = time.monotonic() + STOP_SECONDS
    while references and time.monotonic() < until:
        _, references = ray.wait(references, timeout=LOOK_SECONDS)
