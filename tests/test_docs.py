"""The documentation: every block of every page runs or is parsed (tests/pages.py says how); links are well formed."""

import importlib
import re
import sys
import types
import urllib.parse
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests import pages
from tests.pages import PageError, Run, blocks_of

ROOT = pages.ROOT
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")])

# What a page needs besides the core, and what its code warns of with reason: (message, why).
NEEDS = {
    "docs/audit.md": ("transformers", "scipy"),
    "docs/faq.md": ("transformers",),
    "docs/get-started.md": ("transformers",),
    "docs/huggingface.md": ("transformers", "accelerate", "trl"),
    "docs/serving.md": ("transformers", "onnxscript", "onnxruntime"),
}
WARNINGS = {
    "docs/huggingface.md": [
        ("pin_memory", "the Trainer's defaults suppose an accelerator"),
        ("every one of its probabilities", "a trained model gets another function on purpose"),
    ],
}
# Blocks that are parsed, not run. A new one is listed here, or the test below fails.
PARSED_ONLY = {
    "docs/audit.md": ["path/to/... stands for models of yours", "many fits, for minutes"],
    "docs/benchmark-tables.md": ["needs a GPU"],
    "docs/choosing.md": ["trains eight heads for minutes"],
    "docs/faq.md": ["installs another torch"],
    "docs/language-models.md": [
        "trains four heads with three seeds for minutes",
        "trains three heads with three seeds for minutes",
    ],
    "docs/reproduction.md": ["downloads a corpus and trains for hours", "half an hour of one H200 each"],
    "docs/serving.md": ["needs a GPU"],
    "docs/sweeps.md": [pages.WHOLE_PAGES["docs/sweeps.md"]] * 3,
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


WITH_BLOCKS = [page for page in PAGES if blocks_of(page)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A page in an empty folder, started by nobody's torchrun."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield Run(tmp_path)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def stub_of_vllm() -> dict[str, types.ModuleType]:
    """Modules with the one class that a page takes from vLLM, which no extra brings."""
    names = ("vllm", "vllm.v1", "vllm.v1.sample", "vllm.v1.sample.logits_processor")
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].LogitsProcessor = type("LogitsProcessor", (), {})
    return modules


STARTS_PROCESSES = ("distributed.md", "serving.md")
"""pages whose blocks take seconds, since they start processes and export models"""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.thorough] if page.name in STARTS_PROCESSES else []) for page in WITH_BLOCKS],
    ids=name_of,
)
def test_every_block_runs(page: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if name_of(page) == "docs/serving.md":
        for name, module in stub_of_vllm().items():
            monkeypatch.setitem(sys.modules, name, module)
    for package in NEEDS.get(name_of(page), ()):
        pytest.importorskip(package)
    with warnings.catch_warnings():
        for message, _ in WARNINGS.get(name_of(page), ()):
            warnings.filterwarnings("ignore", message=f".*{message}.*")
        run.run_page(page)
    CHECKS.get(name_of(page), lambda _: None)(run)


# What a page must have reached at its end.


def _learned_and_reloaded(run: Run) -> None:
    # It has learned its sentence, and lost nothing on the way to the disk and back.
    assert "the lazy dog" in bytes(run.names["written"][0].tolist()).decode(errors="replace")
    # TRL's trainer has trained the output function, and saved it.
    assert run.names["tuned"].fused_head is not None
    from sigsoftmax.integrations.huggingface import from_pretrained

    assert str(from_pretrained("sft").output_function.function) == "sigsoftmax"


def _left_no_processes(run: Run) -> None:
    assert not torch.distributed.is_initialized()


def _served_phi(run: Run) -> None:
    z = torch.randn(2, 5)
    torch.testing.assert_close(
        run.names["Sigsoftmax"](None, None, None).apply(z), z + torch.nn.functional.logsigmoid(z)
    )


CHECKS: dict[str, Callable[[Run], None]] = {
    "docs/distributed.md": _left_no_processes,
    "docs/huggingface.md": _learned_and_reloaded,
    "docs/serving.md": _served_phi,
}


def test_the_front_page_is_short() -> None:
    """Who, why, how and when not, in five minutes."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_getting_started_takes_less_than_fifteen_lines() -> None:
    """From pip install to a trained, saved, reloaded, generating model: all code up to the second heading."""
    for page, last in ((ROOT / "docs/get-started.md", "## "), (ROOT / "docs/huggingface.md", "## What changes")):
        until = page.read_text(encoding="utf-8").split(f"\n{last}")[0].count("\n")
        blocks = [block for block in blocks_of(page) if block.line < until and block.language in ("sh", "python")]
        lines = [line for block in blocks for line in block.text.splitlines() if line.strip()]
        assert lines[0].startswith("pip install")
        for word in ("apply_output_function", "backward()|Trainer", "save_pretrained", "from_pretrained", "generate"):
            assert re.search(re.escape(word).replace(r"\|", "|"), "\n".join(lines)), word
        assert len(lines) < 15


def test_what_is_parsed_only_is_listed_here() -> None:
    found: dict[str, list[str]] = {}
    for page, reason in pages.unrun(PAGES):
        found.setdefault(page, []).append(reason)
    assert found == PARSED_ONLY


# --- the rules themselves ---------------------------------------------------------------------------------------------


def page_of(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```rust\nfn\n```\n", "no rule for a block in 'rust'"),
        ("```\nplain\n```\n", "no rule for a block in 'no language'"),
        ("```sh\ncurl somewhere\n```\n", "no rule for the command 'curl'"),
        ("```sh\nsigsoftmax functions | head\n```\n", "needs a shell"),
        ("```text\nhello\n```\n", "write '<!-- output -->' above it"),
    ],
)
def test_a_block_without_a_rule_is_refused(text: str, message: str, run: Run, tmp_path: Path) -> None:
    page = page_of(tmp_path, text)
    with pytest.raises(PageError, match=re.escape(message)):
        run.run_page(page)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nassert False\n```\n",
        "```python\nprint(1)\n```\n\n<!-- output -->\n```text\n2\n```\n",
        "```sh\nsigsoftmax functions --no-such\n```\n",
        "<!-- parsed, not run: long -->\n```sh\nsigsoftmax trian ptb-softmax\n```\n",
        "```sh\npip install '.[nothing]'\n```\n",
        "```sh\nmake no-such-target\n```\n",
        "```sh\npython examples/absent.py\n```\n",
        "<!-- parsed, not run: long -->\n```sh\npython benchmarks/spectrum.py --no-such\n```\n",
    ],
)
def test_a_block_that_is_wrong_fails(text: str, run: Run, tmp_path: Path) -> None:
    page = page_of(tmp_path, text)
    with pytest.raises(AssertionError):
        run.run_page(page)


def test_a_block_without_an_end_is_refused(tmp_path: Path) -> None:
    page = page_of(tmp_path, "text\n\n```python\nx = 1\n")
    with pytest.raises(PageError, match="without an end"):
        blocks_of(page)


SHARED = """
```python
from pathlib import Path
x = 1
Path("file").write_text("hi")
```

- in a list

    ```python
    print(x + 1)
    ```

<!-- output -->
```text
2
```
"""


def test_blocks_share_a_namespace_and_a_folder(run: Run, tmp_path: Path) -> None:
    run.run_page(page_of(tmp_path, SHARED))
    assert (tmp_path / "file").read_text() == "hi"


# --- what is generated ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script", ["write_choosing", "write_records", "write_reproduction", "write_overview", "write_transcripts"]
)
def test_tables_are_what_the_records_give(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    assert importlib.import_module(script).main() == 0


def test_every_generated_part_is_made_by_some_script() -> None:
    """A misspelt name would never be made anew."""
    overview, choosing, records_page, reproduction, transcripts = (
        importlib.import_module(f"write_{name}")
        for name in ("overview", "choosing", "records", "reproduction", "transcripts")
    )
    fits = importlib.import_module("capacity_tables").Fits({})
    suites = importlib.import_module("overview").Suites({}, {})
    records = reproduction.Records(ROOT / "no-such-folder")
    made = {
        "README.md": set(overview.parts(suites, records)),
        "docs/benchmarks.md": set(overview.parts(suites, records)),
        "docs/distributed.md": set(overview.parts(suites, records)),
        "docs/choosing.md": set(choosing.parts(fits, suites, records)),
        "docs/records.md": set(records_page.PARTS),
        "docs/reproduction.md": set(reproduction.PARTS),
    }
    for transcript in transcripts.TRANSCRIPTS:
        made.setdefault(transcript.page, set()).add(transcript.name)
    for page, names in made.items():
        found = re.findall(r"<!-- generated: ([\w-]+) -->", (ROOT / page).read_text(encoding="utf-8"))
        assert found, page
        assert set(found) <= names, page


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_external_links_are_well_formed(page: Path) -> None:
    """Without a network that is all that can be known; links inside the site are checked when it is built."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for link in re.findall(r"\]\((\w+:[^)\s]*)\)|<(https?:[^>\s]*)>", text):
        address = urllib.parse.urlsplit("".join(link))
        assert address.scheme == "https", link
        assert re.fullmatch(r"(?:[a-z0-9-]+\.)+[a-z]{2,}", address.netloc), link
        assert " " not in address.geturl()
