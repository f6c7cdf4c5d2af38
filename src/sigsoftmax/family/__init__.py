"""Output functions: formulas of phi, members and their parameters, known properties, and heads made of members."""

from sigsoftmax.family.members import (
    Definition,
    OutputFunction,
    definition_by_name,
    form_by_name,
    names,
    register_function,
    registrations,
    table,
)
from sigsoftmax.family.parameters import Learned, Parameter

__all__ = [
    "Definition",
    "Learned",
    "OutputFunction",
    "Parameter",
    "definition_by_name",
    "form_by_name",
    "names",
    "register_function",
    "registrations",
    "table",
]
