"""The published package, and the workflows that check and publish it."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")}
INFORMATION = [f"sigsoftmax-1.0.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")]
INFORMATION.append("sigsoftmax-1.0.dist-info/licenses/LICENSE")


def load_try_package():
    spec = importlib.util.spec_from_file_location("try_package", ROOT / ".ci/try_package.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


try_package = load_try_package()


# --- archives ---------------------------------------------------------------------------------------------------------


def test_a_wheel_holds_the_modules_and_nothing_else():
    sources = ["sigsoftmax/__init__.py", "sigsoftmax/py.typed"]
    try_package.check_wheel([*sources, *INFORMATION], sources, "1.0")
    with pytest.raises(try_package.PackageError, match=r"lacks sigsoftmax/py\.typed"):
        try_package.check_wheel([sources[0], *INFORMATION], sources, "1.0")
    with pytest.raises(try_package.PackageError, match=r"lacks .*licenses/LICENSE"):
        try_package.check_wheel([*sources, *INFORMATION[:-1]], sources, "1.0")
    with pytest.raises(try_package.PackageError, match=r"does not belong there: tests/test_family\.py"):
        try_package.check_wheel([*sources, *INFORMATION, "tests/test_family.py"], sources, "1.0")


@pytest.mark.parametrize(
    "leftover",
    [".hypothesis/trace.json", "src/a/__pycache__/b.pyc", ".venv/bin/python", "runs/x", ".mypy_cache/y", "dist/z"],
)
def test_a_source_archive_holds_no_leftovers(leftover):
    names = ["sigsoftmax-1.0/README.md", "sigsoftmax-1.0/docs/building.md"]
    try_package.check_source_archive(names, ["README.md"], "1.0")
    with pytest.raises(try_package.PackageError, match=re.escape(leftover)):
        try_package.check_source_archive([*names, f"sigsoftmax-1.0/{leftover}"], ["README.md"], "1.0")


def test_a_source_archive_holds_all_that_is_tracked():
    with pytest.raises(try_package.PackageError, match=r"lacks tests/test_a\.py, 1 in all"):
        try_package.check_source_archive(["sigsoftmax-1.0/README.md"], ["README.md", "tests/test_a.py"], "1.0")


def test_the_modules_are_those_of_the_source_tree():
    found = try_package.modules(ROOT)
    assert {"sigsoftmax/__init__.py", "sigsoftmax/py.typed", "sigsoftmax/report/page.css"} <= set(found)
    assert not [name for name in found if "__pycache__" in name]


def test_a_clean_environment_sees_the_core_alone():
    names = {found.name.lower() for found in try_package.needed(try_package.CORE)}
    assert {"torch", "numpy", "sympy"} <= names
    assert names.isdisjoint({"scipy", "matplotlib", "transformers", "pytest", "sigsoftmax"})


def test_the_tag_is_that_of_the_version_and_the_changelog_has_its_day():
    dated = "# Changelog\n\n## 1.0 (2026-12-01)\n\n## 0.9 (2026-11-01)\n"
    try_package.check_tag("v1.0", "1.0", dated)
    with pytest.raises(try_package.PackageError, match=r"expected the tag v1\.0"):
        try_package.check_tag("v1.1", "1.0", dated)
    with pytest.raises(try_package.PackageError, match=r"'Unreleased: 1\.0', expected '1\.0 "):
        try_package.check_tag("v1.0", "1.0", "## Unreleased: 1.0\n")
    with pytest.raises(try_package.PackageError, match="absent"):
        try_package.check_tag("v1.0", "1.0", "nothing")


def test_the_version_is_read_where_it_is_written():
    from sigsoftmax import __version__

    text = (ROOT / "src/sigsoftmax/_version.py").read_text(encoding="utf-8")
    assert try_package.version_in(text) == __version__
    assert PROJECT["dynamic"] == ["version"]
    with pytest.raises(try_package.PackageError, match="no line"):
        try_package.version_in("version = 1")


def test_a_wrong_tag_ends_with_its_message():
    done = subprocess.run(
        [sys.executable, ".ci/try_package.py", "--tag", "v0"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("try_package.py: the tag is v0, but")


# --- workflows --------------------------------------------------------------------------------------------------------


def steps_of(workflow: str) -> list[dict]:
    return [step for job in WORKFLOWS[workflow]["jobs"].values() for step in job.get("steps", [])]


def test_the_workflow_runs_what_everybody_can_run():
    ran = [step["run"] for step in steps_of("ci") if "run" in step]
    assert ran == ["bash .ci/run", 'make test-versions TORCH="$TORCH" TRANSFORMERS="$TRANSFORMERS"']
    tested = WORKFLOWS["ci"]["jobs"]["checks"]["strategy"]["matrix"]["python"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert tested == named
    # YAML 1.1 reads the key "on" as true.
    assert {"push", "pull_request", "workflow_call"} <= WORKFLOWS["ci"][True].keys()


def test_the_oldest_versions_that_are_tried_are_those_that_are_allowed():
    oldest, newest = WORKFLOWS["ci"]["jobs"]["versions"]["strategy"]["matrix"]["include"]
    required = {*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["hf"]}
    assert {
        f"{name}{oldest[name].replace('==', '>=').removesuffix('.0')}" for name in ("torch", "transformers")
    } <= required
    assert (newest["torch"], newest["transformers"]) == ("", "")
    example = f"make test-versions TORCH={oldest['torch']} TRANSFORMERS={oldest['transformers']}"
    needed = f"transformers {oldest['transformers'].removeprefix('==')} or newer"
    places = {
        "Makefile": example,
        "docs/faq.md": example,
        "docs/huggingface.md": needed,
        "src/sigsoftmax/integrations/huggingface/__init__.py": needed,
    }
    for path, text in places.items():
        assert text in (ROOT / path).read_text(encoding="utf-8"), path


def test_every_step_of_ci_is_a_target_of_make():
    steps = re.findall(r"^\s*step ([a-z-]+)", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.M)
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert {"lint", "types", "imports", "examples", "test-all", "demo", "package"} <= set(steps) <= set(targets)


def test_a_release_is_checked_before_it_is_built_and_built_before_it_is_published():
    jobs = WORKFLOWS["release"]["jobs"]
    assert jobs["checks"]["uses"] == "./.github/workflows/ci.yml"
    assert (jobs["build"]["needs"], jobs["publish"]["needs"]) == ("checks", "build")
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}
    assert 'make package ARGS="--tag $TAG"' in [step.get("run") for step in steps_of("release")]


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_workflows_may_do_little_and_end(workflow: str):
    assert WORKFLOWS[workflow]["permissions"] == {"contents": "read"}
    assert "concurrency" in WORKFLOWS[workflow]
    granted = {name: job["permissions"] for name, job in WORKFLOWS[workflow]["jobs"].items() if "permissions" in job}
    assert granted == ({"publish": {"id-token": "write"}} if workflow == "release" else {})
    for job in WORKFLOWS[workflow]["jobs"].values():
        assert "uses" in job or job["timeout-minutes"] <= 120
    for step in steps_of(workflow):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", step["uses"]), step["uses"]
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False
