"""A look at the header of a GGUF file before anything else reads it.

Readers believe the lengths in it: an array that is said to have a million million elements is counted to the end, long
after the file has ended.
"""

import mmap
import struct
from pathlib import Path

# bytes of each type of value; strings and arrays have a length of their own
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
MAX_ELEMENTS = 2**21  # Of all arrays; a vocabulary of 262,144 tokens with scores, types and merges has half of that


def check_gguf_header(path: Path) -> None:
    """Walk the keys and values of a GGUF file.

    Raises:
        ValueError: it is no GGUF file, or a length in it does not fit the file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _Header(content).walk()
    except (ValueError, struct.error) as error:
        raise ValueError(f"{path} is cut off or damaged ({error}); get it again") from None


class _Header:
    """A place in the header that moves on."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._place = 4
        self._elements = 0
        # written on a machine of the other byte order, the version looks like a multiple of 65536
        self._order = "<" if struct.unpack_from("<I", content, 4)[0] & 0xFFFF else ">"

    def walk(self) -> None:
        if self._content[:4] != b"GGUF":
            raise ValueError(f"it begins with {self._content[:4]!r}, expected b'GGUF'")
        self._number("I")
        self._number("Q")
        for _ in range(self._number("Q")):
            self._skip(self._number("Q"))  # the key
            self._value(self._number("I"))

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip(self._number("Q"))
        elif kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            self._elements += count
            if self._elements > MAX_ELEMENTS:
                raise ValueError(f"an array is said to have {count:,} elements")
            if kind == _ARRAY:
                raise ValueError("it has an array of arrays")
            for _ in range(count):
                self._value(kind)
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            raise ValueError(f"it has a value of type {kind}")

    def _number(self, code: str) -> int:
        number: int = struct.unpack_from(self._order + code, self._content, self._place)[0]
        self._place += struct.calcsize(self._order + code)
        return number

    def _skip(self, size: int) -> None:
        self._place += size
        if self._place > len(self._content):
            raise ValueError("a value reaches behind the end of the file")
