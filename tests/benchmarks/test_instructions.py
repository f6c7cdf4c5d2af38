"""The counts of the row kernel's instructions, which docs/benchmarks.md tells of."""

import os

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this process interprets kernels", allow_module_level=True)

from instructions import Loop, loops, loops_of_a_row

CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_2:
        /*0020*/                   MUFU.EX2 R8, R8 ;
        /*0030*/              @!P0 FMUL R8, R8, R8 ;
        /*0040*/               @P1 BRA `(.L_x_2) ;
        /*0050*/                   STG.E [R2.64], R4 ;
        /*0060*/               @P0 BRA `(.L_x_1) ;
        /*0070*/                   BRA `(.L_x_3) ;
.L_x_3:
        /*0080*/                   MUFU.EX2 R8, R8 ;
        /*0090*/                   MUFU.RCP R8, R8 ;
        /*00a0*/                   STG.E [R2.64], R4 ;
        /*00b0*/               @P0 BRA `(.L_x_3) ;
"""


def test_loops_are_the_innermost_ones() -> None:
    first, second = loops(CODE)
    assert first == Loop({"MUFU.EX2": 1, "FMUL": 1, "BRA": 1})
    assert second.operations == {"MUFU.EX2": 1, "MUFU.RCP": 1, "STG": 1, "BRA": 1}
    assert not first.writes
    assert second.writes
    assert second.special_for_four == 8.0
    assert second.instructions_an_element == 4.0


@pytest.mark.parametrize(("function", "special"), [("softmax", (4.0, 4.0)), ("sigsoftmax", (5.0, 5.0))])
def test_special_functions_are_as_many_as_the_page_says(function: str, special: tuple[float, float]) -> None:
    sums, gradient = loops_of_a_row(function)
    assert (sums.special_for_four, gradient.special_for_four) == special
    assert not sums.writes
    assert gradient.writes
