"""Several whole texts in each row of a fixed length, so that hardly a place of a batch is padding.

No text is cut, none sees another, and the order is a function of seed, epoch and lengths.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rlhf_stages.data.info import DataInfo
from rlhf_stages.data.shards import Record, Shard, Size


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of the texts in each row: the longest text first, each into the row that it fills best (Johnson 1973).

    At most 11/9 of the fewest rows possible, and one. Rows wait by their free space, and an integer has a bit for every
    space that a row has, so that the smallest that is large enough is found at once: 160,000 texts take less than 1 s.

    Args:
        lengths: of the texts, none above `capacity`. Equals keep their order, and how many rows there are does not
            depend on it.
    """
    rows: list[list[int]] = []
    waiting: dict[int, list[list[int]]] = defaultdict(list)
    spaces = 0
    for text in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[text]
        enough = spaces >> length
        if enough:
            free = length + (enough & -enough).bit_length() - 1  # its lowest bit
            row = waiting[free].pop()
            if not waiting[free]:
                spaces ^= 1 << free
        else:
            free, row = capacity, []
            rows.append(row)
        row.append(text)
        if free > length:
            waiting[free - length].append(row)
            spaces |= 1 << (free - length)
    return rows


class PackedShard:
    """The texts of a fine-tuning shard in rows of `length` tokens; indexing gives the records of a row.

    Every epoch has as many rows; which texts share one differs.

    Raises:
        ValueError: a text is longer than a row.
    """

    def __init__(self, shard: Shard, length: int, seed: int, epoch: int = 0) -> None:
        self._shard, self._length, self._seed = shard, length, seed
        tokens = [longest for _, longest in shard.sizes]
        if max(tokens) > length:
            raise ValueError(
                f"--packing_length {length} is less than the longest text of {shard.path}, which has {max(tokens)}"
                f" tokens, and no text is cut; raise it to at least {max(tokens)}"
            )
        order = list(range(len(tokens)))
        random.Random(f"{seed} {epoch}").shuffle(order)
        packed = best_fit_decreasing([tokens[number] for number in order], length)
        self.rows = [[order[place] for place in row] for row in packed]

    def at(self, epoch: int) -> "PackedShard":
        """The rows of an epoch."""
        return PackedShard(self._shard, self._length, self._seed, epoch)

    @property
    def path(self) -> Path:
        """File of the texts."""
        return self._shard.path

    @property
    def fingerprint(self) -> str:
        """Tells the texts from others."""
        return self._shard.fingerprint

    @property
    def sizes(self) -> list[Size]:
        """Each row is one text to a forward pass."""
        return [(1, self._length)] * len(self)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[Record]:
        return [self._shard[number] for number in self.rows[index]]


def row_length(packing_length: int | None, info: DataInfo, shard: Shard) -> int:
    """Tokens of a row: as asked for, or else the `--max_length` of the data, or the longest text if nothing says it."""
    if packing_length is not None:
        return packing_length
    try:
        return int(info.raw["stages"]["finetune"]["args"]["max_length"])
    except (KeyError, TypeError, ValueError):  # shards that somebody brought along
        return max(longest for _, longest in shard.sizes)
