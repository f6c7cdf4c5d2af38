"""The pages on Hugging Face and on serving: what they show runs, in as few lines as they promise."""

import re
import sys
import types
import warnings
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import write_docs
from tests.integrations.huggingface.tiny import phi

ROOT = Path(__file__).parents[3]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("huggingface", "serving")}


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.S)


def stub_of_vllm() -> dict[str, types.ModuleType]:
    """Modules with the one class that the page takes from vLLM."""
    names = ("vllm", "vllm.v1", "vllm.v1.sample", "vllm.v1.sample.logits_processor")
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].LogitsProcessor = type("LogitsProcessor", (), {})
    return modules


def test_getting_started_takes_less_than_fifteen_lines():
    part = PAGES["huggingface"].split("## Get started")[1].split("\n## ")[0]
    lines = [line for block in re.findall(r"```\w+\n(.*?)```", part, re.S) for line in block.splitlines() if line]
    assert lines[0].startswith("pip install")
    assert "generate" in "".join(lines)
    assert len(lines) < 15


def test_the_python_of_both_pages_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    for name, module in stub_of_vllm().items():
        monkeypatch.setitem(sys.modules, name, module)
    names: dict[str, object] = {"__name__": "docs"}
    torch.manual_seed(0)
    blocks = [block for text in PAGES.values() for block in python_blocks(text)]
    with warnings.catch_warnings():
        # The Trainer's defaults suppose an accelerator, and a loaded model that gets another function is warned.
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        warnings.filterwarnings("ignore", message=".*every one of its probabilities.*")
        for block in blocks:
            exec(compile(block, "docs", "exec"), names)
            if "print(" in block:
                # It has learned its sentence, and lost nothing on the way to the disk and back.
                assert "the lazy dog" in capsys.readouterr().out
    z = torch.randn(2, 5)
    torch.testing.assert_close(names["Sigsoftmax"](None, None, None).apply(z), phi(z))


def test_the_measurements_are_those_of_the_records():
    stale = write_docs.run(ROOT / "benchmarks/records/huggingface", ROOT / "docs/huggingface.md", check=True)
    assert stale == []
