"""The files around the code: what they name exists, what they show runs, and they agree with each other."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sigsoftmax
from sigsoftmax import family

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def files_of_the_repository() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def commands(text: str) -> str:
    """The shell commands of a page: its sh blocks and what stands between backticks."""
    return "\n".join(re.findall(r"```sh\n(.*?)```", text, re.S) + re.findall(r"`([^`\n]+)`", text))


def test_nothing_is_installed_from_an_index_before_there_is_a_release():
    """An error that names a release which does not exist leaves its reader without a way on."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    if any(not heading.startswith("Unreleased") for heading in headings):
        pytest.skip("there is a release")
    for path in [
        *ROOT.glob("src/**/*.py"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*.py"),
        ROOT / "README.md",
    ]:
        assert not re.search(r"pip install '?sigsoftmax\b", path.read_text(encoding="utf-8")), path


def test_the_table_of_the_readme_is_the_family():
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", README, re.M)
    assert rows == [(member.name, member.formula) for member in family.table() if member.form.is_builtin]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_and_extras_that_pages_name_exist(page: Path):
    text = commands(page.read_text(encoding="utf-8"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.M))
    named = set(re.findall(r"\bmake (?:[A-Z_]+=\S+ )*([a-z][a-z-]*)", text))
    assert named <= targets
    extras = {extra for group in re.findall(r"\.\[([\w,-]+)\]", text) for extra in group.split(",")}
    assert extras <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_to_files(page: Path):
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page: Path):
    folders = r"(?:tests|benchmarks|examples|results|src)"
    text = page.read_text(encoding="utf-8")
    named = re.findall(rf"(?<![\w/.-])({folders}/[\w/.-]+\.(?:py|jsonl))\b", text)
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_no_file_names_a_machine_or_a_package_registry():
    # Written in pieces, so that this file passes its own test.
    places = [r"(?<![\w.~-])/(?:work|root|home|Users)/\w"]
    hosts = [re.escape(".".join(parts)) for parts in [("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org")]]
    switches = ["--(?:extra-)?index-" + "url", "--find-" + "links"]
    forbidden = re.compile("|".join([*places, *hosts, *switches]))
    found = []
    for path in files_of_the_repository():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in forbidden.finditer(text)]
    assert found == []


def test_the_core_needs_torch_and_numpy_alone():
    assert {Requirement(line).name for line in PROJECT["dependencies"]} == {"torch", "numpy"}
    optional = {"hypothesis", "matplotlib", "pandas", "rich", "safetensors", "scipy", "transformers"}
    code = "import sys, torch; known = set(sys.modules); import sigsoftmax; print(*(set(sys.modules) - known))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert optional.isdisjoint(result.stdout.split())


def test_constraints_pin_every_requirement_to_a_version_it_allows():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    requirements = [
        *PROJECT["dependencies"],
        *(line for lines in PROJECT["optional-dependencies"].values() for line in lines),
    ]
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        if name != PROJECT["name"]:
            assert requirement.specifier.contains(versions[name]), requirement


def test_one_version():
    assert f"version: {sigsoftmax.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert newest
    assert sigsoftmax.__version__ in newest.group(1)


def test_docstrings_open_with_a_noun_or_a_verb():
    opening = re.compile(r"(Of|Those|What|Whether|How|Where|That|Which)\b")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, documented) and (text := ast.get_docstring(node)) and opening.match(text)
    ]
    assert found == []


def test_legends_name_the_letters_of_shapes():
    """A letter that a tensor's name ends in stands in the legend of its file."""
    missing = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        legend = re.search(r"^Shapes: (.*?)(\n\n|\Z)", ast.get_docstring(tree) or "", re.M | re.S)
        nodes = list(ast.walk(tree))
        made = {node.arg for node in nodes if isinstance(node, ast.arg)}
        made |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        made |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        shapes = [re.fullmatch(r"[a-z]\w*_((?=.*[A-Z])[A-Znde0-9]{1,4})", name) for name in made]
        letters = {letter for shape in shapes if shape for letter in re.sub(r"\d", "", shape[1])}
        known = set(re.findall(r"\b[A-Zne]\b|\bd\b", legend[1] if legend else ""))
        missing += [f"{path.relative_to(ROOT)}: {letter}" for letter in sorted(letters - known)]
    assert missing == []


def test_public_names_are_documented():
    public = [name for name in sigsoftmax.__all__ if not name.startswith("__")]
    assert [name for name in public if not (getattr(sigsoftmax, name).__doc__ or "").strip()] == []


@pytest.mark.parametrize(
    "name",
    [
        module.name
        for module in pkgutil.walk_packages(sigsoftmax.__path__, "sigsoftmax.")
        if "__main__" not in module.name
    ],
)
def test_examples_in_docstrings_run(name: str):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).failed == 0
