"""The page on Hugging Face: its tables are those of the records. Its code is run by tests/test_docs.py."""

from pathlib import Path

import write_docs

ROOT = Path(__file__).parents[3]


def test_the_measurements_are_those_of_the_records():
    stale = write_docs.run(ROOT / "benchmarks/records/huggingface", ROOT / "docs/huggingface.md", check=True)
    assert stale == []
