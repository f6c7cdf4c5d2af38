"""Pages made once for all tests."""

from pathlib import Path

import pytest
from tests.report import synthetic_runs

from sigsoftmax.report import ReportConfig, write_report


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Invented records of every subject."""
    folder = tmp_path_factory.mktemp("runs")
    synthetic_runs.write_all(folder)
    return folder


@pytest.fixture(scope="session")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of these records, with plots."""
    pytest.importorskip("plotly", reason="the plots need plotly: pip install '.[report]' in the folder of sigsoftmax")
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report(ReportConfig(paths=(runs,), out=out))
    return out
