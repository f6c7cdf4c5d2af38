"""The ground of every test: the CPU settings torch needs, a fixed seed, and a family left as it was found."""

import os
import shutil
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

# torch 2.13's half-precision products fail on CPUs that advertise AMX unless oneDNN is told to leave it alone. It
# reads this at the first product, so it is set before torch is imported; child processes inherit it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread for each test process: otherwise processes times threads exceed the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tests.covering import RUNS_ALL, left_out

from sigsoftmax.family import members

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# What another browser would do on its own: nothing of it belongs to a page.
BROWSER_ARGUMENTS = ("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--no-first-run")

# A shell starts background jobs with SIGINT ignored, and child processes inherit that: tests that interrupt one would
# fail there. A signal that is handled, in contrast, is back to its default in children.
signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    import hypothesis
except ModuleNotFoundError:
    # The tests that need it fail; those of the kernels run on GPU machines that have little besides torch.
    pass
else:
    hypothesis.settings.register_profile("default", deadline=None)
    hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Grids are thinned out and thorough tests left out, unless a test was asked for by its id, or all tests were."""
    if RUNS_ALL or any("::" in argument for argument in config.args):
        return
    removed = left_out(items)
    config.hook.pytest_deselected(items=removed)
    ids = set(map(id, removed))
    items[:] = [item for item in items if id(item) not in ids]


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _registered_functions_do_not_outlive_their_test() -> Iterator[None]:
    registries = (members._DEFINITIONS, members._FORMS)
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)
    members._parsed_once.cache_clear()


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A Chromium: Debian's package, or what `playwright install chromium` brings."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    installed = next(filter(None, map(shutil.which, BROWSERS)), None)
    with api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=installed, args=list(BROWSER_ARGUMENTS))
        except api.Error as error:
            if os.environ.get("REQUIRE_BROWSER"):
                raise
            pytest.skip(f"no Chromium to open pages in: {str(error).splitlines()[0]}")
        yield opened
        opened.close()
