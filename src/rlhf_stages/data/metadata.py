"""What a data set says about a record, as the bytes that a shard holds."""

import json
from collections.abc import Mapping
from typing import Any


def pack(metadata: Mapping[str, Any]) -> bytes:
    """The metadata of a record as bytes, none if it has none.

    Raises:
        TypeError, ValueError: it is not a dictionary, or JSON cannot hold its values.
    """
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata is a {type(metadata).__name__}, expected a dictionary")
    if not metadata:
        return b""
    return json.dumps(dict(metadata), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def unpack(content: bytes) -> dict[str, Any]:
    """What `pack` made bytes of.

    Raises:
        ValueError, RecursionError: it is not that.
    """
    metadata = json.loads(content) if content else {}
    if not isinstance(metadata, dict):
        raise ValueError(f"a JSON {type(metadata).__name__}, expected an object")
    return metadata
