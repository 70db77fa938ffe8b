import struct

import pytest

from rlhf_stages.data.gguf_header import MAX_ELEMENTS, check_gguf_header


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(*pairs, count=None, version=3):
    """The start of a GGUF file: keys with the type and bytes of their values."""
    content = b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs) if count is None else count)
    return content + b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in pairs)


def check(tmp_path, content):
    (tmp_path / "a.gguf").write_bytes(content)
    check_gguf_header(tmp_path / "a.gguf")


HALF = MAX_ELEMENTS // 2 + 1
GOOD = [(b"n", 4, b"\1\0\0\0"), (b"s", 8, text(b"tiny")), (b"a", 9, struct.pack("<IQ", 8, 2) + text(b"x") + text(b""))]


def test_values_of_every_kind(tmp_path):
    check(tmp_path, header(*GOOD, (b"", 9, struct.pack("<IQ", 1, 3) + b"\1\2\3")))


def test_the_other_byte_order(tmp_path):
    check(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + struct.pack(">Q", 1) + b"n" + struct.pack(">I", 7) + b"\1")


@pytest.mark.parametrize("size", range(len(header(*GOOD))))
def test_a_file_cut_off_anywhere(tmp_path, size):
    with pytest.raises(ValueError, match=r"a\.gguf is cut off or damaged \(.*\); get it again"):
        check(tmp_path, header(*GOOD)[:size])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"GGML" + header()[4:], "it begins with b'GGML'"),
        (header(count=2**60), "requires a buffer"),
        (header((b"n", 13, b"")), "a value of type 13"),
        (header((b"a", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 0))), "an array of arrays"),
        # what the package gguf counts to the end, long after the file has ended
        (header((b"a", 9, struct.pack("<IQ", 0, 2**40))), "an array is said to have 1,099,511,627,776 elements"),
        (
            header(*[(b"a", 9, struct.pack("<IQ", 0, HALF) + b"\0" * HALF)] * 2),
            "said",
        ),
        (header((b"s", 8, struct.pack("<Q", 2**63))), "behind the end"),
    ],
)
def test_lengths_that_do_not_fit(tmp_path, content, reason):
    with pytest.raises(ValueError, match=reason):
        check(tmp_path, content)
