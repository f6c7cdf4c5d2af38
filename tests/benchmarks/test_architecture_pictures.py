"""The pictures of the architecture show the layers that are enforced, and files that exist."""

import architecture_pictures
import pytest


@pytest.mark.parametrize("name", architecture_pictures.PICTURES)
def test_the_pictures_are_up_to_date(name: str) -> None:
    drawn = (architecture_pictures.IMAGES / name).read_text(encoding="utf-8")
    assert drawn == architecture_pictures.PICTURES[name](), "run make architecture-docs"


def test_every_module_of_the_package_is_in_the_picture() -> None:
    package = architecture_pictures.ROOT / "src/sigsoftmax"
    modules = {path.stem for path in package.iterdir() if path.suffix in ("", ".py") and not path.name.startswith("_")}
    shown = {name for row in architecture_pictures.layers() for name in row} | {"records", "synthetic"}
    assert shown == modules
    assert shown == architecture_pictures.SENTENCES.keys()


@pytest.mark.parametrize("file", [file for _, file, _, _ in architecture_pictures.ROAD])
def test_the_files_of_the_road_exist(file: str) -> None:
    assert list((architecture_pictures.ROOT / "src/sigsoftmax").glob(file.rstrip("/")))
