"""What an output function is: its formulas, its members, what is known of them, and heads that are made of them."""

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
