"""Checkpoints whose checksum is right and whose content is not, as an attacker or a damaged writer would make them."""

import json
import zlib

from sigsoftmax.lm.saving import checkpoints
from sigsoftmax.lm.saving.checkpoints import NO_CHECKSUM, VERSION, VERSION_KEY


def write_crafted(path, entries, data=b"", meta="{}", **metadata):
    """A file with these entries in its header, and the checksum that belongs to them."""
    metadata = {VERSION_KEY: str(VERSION), "checksum": NO_CHECKSUM, "bytes": str(len(data)), "meta": meta} | metadata
    header = entries if isinstance(entries, str) else json.dumps({"__metadata__": metadata, **entries})
    header = header.replace('"checksum": "', '"checksum":"').encode()
    checksum = f"{zlib.crc32(data, zlib.crc32(header)):08x}"
    header = header.replace(f'"checksum":"{NO_CHECKSUM}"'.encode(), f'"checksum":"{checksum}"'.encode(), 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def changed(source, target, *, tensors=None, meta=None):
    """A copy of a checkpoint with tensors and meta changed in place by two functions."""
    checkpoint = checkpoints.load(source)
    if tensors is not None:
        tensors(checkpoint.tensors)
    if meta is not None:
        meta(checkpoint.meta)
    checkpoints.save(target, checkpoint.tensors, checkpoint.meta)
