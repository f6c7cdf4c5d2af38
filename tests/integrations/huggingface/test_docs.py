"""The page on Hugging Face: its tables are those of the records. Its code is run by tests/test_docs.py.

The example for TRL is run here: TRL looks for vLLM when it is imported, and tests/test_docs.py puts a stand-in there.
"""

import re
import textwrap
from pathlib import Path

import pytest
import write_docs

ROOT = Path(__file__).parents[3]


def test_the_measurements_are_those_of_the_records():
    stale = write_docs.run(ROOT / "benchmarks/records/huggingface", ROOT / "docs/huggingface.md", check=True)
    assert stale == []


# The defaults of SFTConfig suppose an accelerator.
@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_the_example_for_trl_trains_and_saves_the_output_function(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("trl")
    from tests.integrations.huggingface.tiny import config, tokens
    from transformers import AutoModelForCausalLM

    from sigsoftmax.integrations.huggingface import apply_output_function, from_pretrained

    monkeypatch.chdir(tmp_path)
    section = (ROOT / "docs/huggingface.md").read_text(encoding="utf-8").split("## With TRL and Liger\n")[1]
    example = re.search(r"(?:^    .*\n|^\n)+", section[section.index("    from datasets") :], re.MULTILINE)[0]
    names = {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "apply_output_function": apply_output_function,
        "config": config("llama", vocab_size=256),
        "text": tokens(1, 450, classes=256)[0],
    }
    exec(compile(textwrap.dedent(example), "docs/huggingface.md", "exec"), names)
    assert names["tuned"].fused_head is not None
    assert str(from_pretrained("sft").output_function.function) == "sigsoftmax"
