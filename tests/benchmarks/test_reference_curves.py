"""Curves of reference implementations: read from what they print, and recorded with revision and command."""

import subprocess
from pathlib import Path

import pytest
import reference_curves

from sigsoftmax import records
from sigsoftmax.records.published import paper
from sigsoftmax.records.published.references import ReferenceCurve
from sigsoftmax.records.published.references import reference_curves as recorded_curves

MAIN = """
import sys
print("Args:", sys.argv[1:])
for epoch in (1, 2):
    print(f"| epoch {epoch:3d} |   200/  663 batches | lr 30.00000 | ms/batch 15.00 | loss  7.{epoch}0 | ppl  1211.9 |")
    print(f"| end of epoch {epoch:3d} | time: 11.50s | valid loss  5.80 | valid ppl   32{epoch}.41 | valid bpc    8.36")
"""


def checkout_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose main.py prints two epochs, at the revision that the script expects."""
    folder.mkdir()
    (folder / "main.py").write_text(MAIN)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        try:
            subprocess.run([*git, *arguments], cwd=folder, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("git is not installed")
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True).strip()
    reference = reference_curves.REFERENCES["awd-lstm"]
    changed = reference_curves.Reference(**{**reference.__dict__, "revision": commit[:7], "epochs": 2})
    monkeypatch.setitem(reference_curves.REFERENCES, "awd-lstm", changed)
    return folder


@pytest.mark.thorough
def test_a_run_is_recorded_with_revision_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = checkout_of(tmp_path / "reference", monkeypatch)
    out = tmp_path / "curves.jsonl"
    arguments = ["awd-lstm", "--checkout", str(checkout), "--data", str(tmp_path), "--device", "cpu", "--out", str(out)]
    assert reference_curves.main(arguments) == 0
    assert reference_curves.main(arguments) == 0  # in the place of the first
    (record,) = records.read(out)
    found = record.payload_as(ReferenceCurve)
    assert found.perplexities == {1: 321.41, 2: 322.41}
    assert found.first_train_losses == (7.1,)
    assert found.revision.startswith(reference_curves.REFERENCES["awd-lstm"].revision)
    assert len(found.revision) == 40
    assert "python main.py" in found.command
    assert "--seed 141" in found.command
    assert "--epochs 2" in found.command
    assert found.revision[:7] in found.source


def test_another_revision_and_changes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = checkout_of(tmp_path / "reference", monkeypatch)
    arguments = ["mos", "--checkout", str(checkout), "--data", str(tmp_path)]
    assert reference_curves.main(arguments) == 1
    assert "must be a checkout of zihangdai/mos at 9c0c608 without changes" in capsys.readouterr().err
    (checkout / "main.py").write_text("print('changed')\n")
    assert reference_curves.main(["awd-lstm", *arguments[1:]]) == 1
    assert "with changes" in capsys.readouterr().err


def test_a_run_that_ends_early_leaves_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = checkout_of(tmp_path / "reference", monkeypatch)
    out = tmp_path / "curves.jsonl"
    arguments = ["awd-lstm", "--checkout", str(checkout), "--data", str(tmp_path), "--out", str(out)]
    assert reference_curves.main([*arguments, "--epochs", "3"]) == 1
    assert "expected 3 epochs from salesforce/awd-lstm-lm, got 2" in capsys.readouterr().err
    assert not out.exists()


def test_the_curves_on_record_fall() -> None:
    assert [(curve.head, curve.seed) for curve in recorded_curves()] == [("softmax", 141), ("mos(K=15)", 28)]
    for curve in recorded_curves():
        assert list(curve.epochs) == sorted(curve.epochs)
        assert curve.epochs[0] == 1
        assert curve.valid_perplexities[-1] == min(curve.valid_perplexities)
        assert curve.first_train_losses
        assert curve.head in paper.HEADS
        assert curve.corpus in paper.CORPORA
        # A curve without a revision says so.
        assert curve.revision or "revision not recorded" in curve.source
