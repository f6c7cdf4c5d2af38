from __future__ import annotations

import pytest

from sigsoftmax.backends.triton.tuning import FEWEST_STAGGERED_ROWS, softmax_shape, stagger, tuned_pipelined_shape

PROGRAMS = 132


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("classes", [100_000, 128_256, 256_000])
def test_programs_with_many_long_rows_begin_at_different_times(classes: int, element_bytes: int) -> None:
    cycles = stagger(8192, classes, element_bytes, PROGRAMS)
    # A cycle reads some bytes of a row, and it takes two passes.
    assert classes * element_bytes / 20 < cycles < classes * element_bytes
    assert cycles % 16 == 0


@pytest.mark.parametrize(
    ("rows", "classes"),
    [(FEWEST_STAGGERED_ROWS * PROGRAMS - 1, 128_256), (1, 128_256), (100_000, 32_000), (100_000, 2)],
)
def test_others_have_nothing_to_wait_for(rows: int, classes: int) -> None:
    assert stagger(rows, classes, 2, min(rows, PROGRAMS)) == 0


@pytest.mark.parametrize("is_sigsoftmax", [False, True], ids=["softmax", "sigsoftmax"])
@pytest.mark.parametrize("classes", [1, 2, 500, 10_000, 32_000, 50_257, 128_256, 1_000_000])
@pytest.mark.parametrize(("reduces", "writes"), [(True, True), (True, False), (False, True)])
def test_longer_rows_have_larger_tiles(classes: int, is_sigsoftmax: bool, reduces: bool, writes: bool) -> None:
    shape, longer = (
        softmax_shape(count, 2, is_sigsoftmax, reduces=reduces, writes=writes) for count in (classes, 2 * classes)
    )
    assert shape.lanes <= longer.lanes
    if reduces and writes:
        assert shape.per_processor >= longer.per_processor
    # Every thread has an element, and no tile more than 32 of them: there are four tiles, and 64 registers at worst.
    assert 1 <= shape.lanes / (32 * shape.warps) <= 32


@pytest.mark.parametrize("is_sigsoftmax", [False, True], ids=["softmax", "sigsoftmax"])
def test_long_rows_are_pipelined_in_tiles_as_wide_as_a_load(is_sigsoftmax: bool) -> None:
    shapes = [tuned_pipelined_shape(2 * classes, is_sigsoftmax) for classes in (10_000, 50_304, 128_256, 1_000_000)]
    assert shapes[0] is None
    assert None not in shapes[1:]
    # A thread has eight elements of a tile, and rows in flight that are read twice are to fit the cache.
    assert all(shape.lanes == 256 * shape.warps for shape in shapes[1:] if shape)
    assert [shape.per_processor for shape in shapes[1:] if shape] == [2, 1, 1]
