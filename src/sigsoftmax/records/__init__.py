"""Records: what a run measured, typed and versioned, one JSON object a line.

``envelope`` holds the file format and ``storing`` keeps files up to date; the other modules hold the payloads, one
module a subject, so that whoever writes a record and whoever reads it (the report, the tables) share one definition.
"""

from sigsoftmax.records.envelope import Environment, Payload, Record, append, read, read_payloads
from sigsoftmax.records.storing import store

__all__ = ["Environment", "Payload", "Record", "append", "read", "read_payloads", "store"]
