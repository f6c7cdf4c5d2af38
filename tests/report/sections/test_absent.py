"""A subject without records."""

import dataclasses

from sigsoftmax.report.material import Material
from sigsoftmax.report.sections import audits, benchmarks, capacity, comparison, learning, reproduction, spectra, sweeps
from sigsoftmax.report.sections.section import Absent
from sigsoftmax.report.theme import Looks


def test_without_records_a_section_says_what_makes_some():
    empty = Material(
        **{field.name: [] for field in dataclasses.fields(Material) if field.name != "replaced"}, replaced=0
    )
    for module in (audits, capacity, comparison, learning, reproduction, spectra, sweeps):
        absent = module.section(empty, Looks([]))
        assert isinstance(absent, Absent)
        assert absent.command.startswith("sigsoftmax ")
    assert isinstance(benchmarks.section(empty, Looks([])), Absent)
