"""Damaged files and wrong values: bytes of a valid file changed, parts of a JSON tree replaced, plain rubbish."""

import copy
import json

from hypothesis import strategies as st

# what a damaged header is likely to be believed in
NUMBERS = [0, 1, 2, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
TEXTS = [
    "",
    " ",
    "\n",
    "\0",
    "\ud800",
    "\r\n",
    "a\tb",
    "../../x",
    "/",
    ".",
    "..",
    "x" * 300,
    "\x1b[31m",
    "𝛑",
    "nan",
    "-1",
]
SCALARS = [None, True, False, 0, -1, 3, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e400, float("nan"), 1e-320, *TEXTS]


def one_of(values):
    """One of the values; unlike `sampled_from`, a failure does not print them all."""
    return st.integers(0, len(values) - 1).map(lambda place: values[place])


scalars = st.one_of(one_of(SCALARS), st.integers(), st.floats(), st.text(max_size=8))
trees = st.one_of(
    scalars,
    st.lists(scalars, max_size=4),
    st.dictionaries(st.text(max_size=4), st.one_of(scalars, st.lists(scalars, max_size=2)), max_size=3),
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [[[[]]]]),
)


@st.composite
def damaged(draw, files):
    """One of `files` (bytes), with one to four changes; now and then bytes that were never a file."""
    content = bytearray(draw(one_of(files)))
    if draw(st.integers(0, 29)) == 0:
        return draw(st.binary(max_size=64))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(len(content) - 1, 0)))
        match draw(st.integers(0, 7)):
            case 0:
                content[start : start + 1] = bytes([draw(st.integers(0, 255))])
            case 1:
                content[start : start + 1] = bytes([content[start] ^ 1 << draw(st.integers(0, 7))] if content else [])
            case 2:
                del content[start:]
            case 3:
                del content[start : start + draw(st.integers(1, 16))]
            case 4:
                content[start:start] = draw(st.binary(min_size=1, max_size=16))
            case 5:
                size = draw(one_of([1, 2, 4, 8]))
                number = draw(one_of(NUMBERS)) % 256**size
                content[start : start + size] = number.to_bytes(size, draw(one_of(["little", "big"])))
            case 6:
                other = draw(one_of(files))
                begin = draw(st.integers(0, max(len(other) - 1, 0)))
                content[start : start + draw(st.integers(0, 64))] = other[begin : begin + draw(st.integers(1, 64))]
            case 7:
                content[start:start] = content[start : start + draw(st.integers(1, 64))] * draw(st.integers(1, 3))
    return bytes(content)


def places(tree, path=()):
    """The path of every node of a tree of dictionaries and lists, the root first."""
    yield path
    if isinstance(tree, (dict, list)):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[key], (*path, key))


@st.composite
def changed_trees(draw, valid, values=trees):
    """One of the `valid` trees, with one to three of its nodes replaced, removed or added."""
    tree = copy.deepcopy(draw(one_of(valid)))
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(tree))
        path = found[draw(st.integers(0, len(found) - 1))]
        if not path:
            tree = draw(values) if draw(st.integers(0, 9)) == 0 else tree
            continue
        *above, key = path
        parent = tree
        for step in above:
            parent = parent[step]
        match draw(st.integers(0, 3)):
            case 0 | 1:
                parent[key] = draw(values)
            case 2:
                del parent[key]
            case 3 if isinstance(parent, dict):
                parent[draw(st.text(max_size=4))] = draw(values)
            case 3:
                parent.insert(key, draw(values))
    return tree


def json_files(valid):
    """JSON files: trees that are wrong, bytes that are wrong, and brackets without end."""
    files = [json.dumps(tree).encode() for tree in valid]
    deep = [b"[" * 100_000, b'{"a":' * 5_000 + b"1" + b"}" * 5_000, b"1" * 5_000, b'{"a": 1e999999}']
    written = changed_trees(valid).map(lambda tree: json.dumps(tree).encode())
    return st.one_of(written, written, damaged(files), one_of(deep))
