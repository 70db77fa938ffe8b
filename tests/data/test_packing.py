import random
import time
from types import SimpleNamespace

import pytest

from rlhf_stages.data.packing import PackedShard, best_fit_decreasing, row_length
from rlhf_stages.data.shards import ShardWriter, open_shard


def random_lengths(count, capacity, seed=0):
    draw = random.Random(seed)
    return [min(capacity, max(1, round(draw.lognormvariate(3, 0.8)))) for _ in range(count)]


def test_best_fit_by_hand():
    # 7 and 6 and 5 start rows of 10; 3 fills the row of 7; 2 and 2 go to the row of 6, where less is free than beside 5
    assert best_fit_decreasing([5, 3, 7, 2, 2, 6], 10) == [[2, 1], [5, 3, 4], [0]]


def test_a_text_as_long_as_a_row_is_a_row():
    assert best_fit_decreasing([4, 1, 4], 4) == [[0], [2], [1]]


def slow_best_fit(lengths, capacity):
    """What each row holds, by looking at all rows for each text."""
    rows = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if capacity - sum(row) >= length]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


@pytest.mark.parametrize("capacity", [9, 64, 100, 513])
def test_best_fit_is_what_a_search_of_all_rows_finds(capacity):
    lengths = random_lengths(400, capacity)
    rows = best_fit_decreasing(lengths, capacity)
    assert sorted(text for row in rows for text in row) == list(range(400))
    loads = [sum(lengths[text] for text in row) for row in rows]
    assert max(loads) <= capacity
    assert sorted(loads) == sorted(map(sum, slow_best_fit(lengths, capacity)))


def test_160_000_texts_take_less_than_two_seconds():
    lengths = random_lengths(160_000, 512)
    started = time.process_time()  # others may have the core meanwhile
    rows = best_fit_decreasing(lengths, 512)
    assert time.process_time() - started < 2
    assert sum(lengths) / (512 * len(rows)) > 0.99


def shard_of(folder, lengths):
    """Text i is [i] * its length, the last token the response."""
    writer = ShardWriter()
    for i, length in enumerate(lengths):
        writer.add([i] * (length - 1), [[i]])
    writer.save(folder / "finetune_train.pt")
    return open_shard(folder / "finetune_train.pt", responses=1)


def contents(packed):
    return [[int(record.responses[0]) for record in packed[i]] for i in range(len(packed))]


def test_rows_of_an_epoch(tmp_path):
    lengths = random_lengths(60, 30)
    shard = shard_of(tmp_path, lengths)
    packed = PackedShard(shard, 40, seed=1)
    assert contents(packed) == packed.rows
    assert (packed.path, packed.fingerprint) == (shard.path, shard.fingerprint)
    assert packed.sizes == [(1, 40)] * len(packed)
    seen = {}
    for seed in (1, 2):
        for epoch in range(3):
            rows = PackedShard(shard, 40, seed).at(epoch).rows
            assert sorted(text for row in rows for text in row) == list(range(60))
            assert all(sum(lengths[text] for text in row) <= 40 for row in rows)
            assert len(rows) == len(packed)
            assert rows == PackedShard(shard, 40, seed, epoch).rows
            seen[seed, epoch] = str(rows)
    assert seen[1, 0] == str(packed.rows)
    assert len(set(seen.values())) == 6


def test_no_text_is_cut(tmp_path):
    shard = shard_of(tmp_path, [3, 7, 5])
    assert len(PackedShard(shard, 7, seed=0)) == 3
    with pytest.raises(ValueError, match=r"--packing_length 6 is less .*finetune_train\.pt, .*has 7 .*at least 7$"):
        PackedShard(shard, 6, seed=0)


@pytest.mark.parametrize(
    ("given", "raw", "length"),
    [
        (20, {"stages": {"finetune": {"args": {"max_length": 12}}}}, 20),
        (None, {"stages": {"finetune": {"args": {"max_length": 12}}}}, 12),
        (None, {}, 7),
        (None, {"stages": {"finetune": {"args": {"max_length": None}}}}, 7),
        (None, {"stages": ["finetune"]}, 7),
    ],
)
def test_length_of_a_row(tmp_path, given, raw, length):
    assert row_length(given, SimpleNamespace(raw=raw), shard_of(tmp_path, [3, 7, 5])) == length
