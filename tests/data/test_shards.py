import random
import time

import psutil
import pytest
import torch

from rlhf_stages.data import shards as module
from rlhf_stages.data.shards import FORMAT_VERSION, ShardWriter, atomic_save, open_shard

# (prompt, responses, which were cut): a text, a ranked list, a prompt alone, an empty prompt, empty responses
RECORDS = [
    ([1, 2], [[3, 4, 5]], [False]),
    ([1], [[6], [7, 8], [9, 9, 9]], [False, True, False]),
    ([4, 5, 6], [], []),
    ([], [[7]], [True]),
    ([2**31 - 1, 0], [[], [5]], [False, False]),
]


def write(path, records=RECORDS, order=None):
    writer = ShardWriter()
    for prompt, responses, truncated in records:
        writer.add(prompt, responses, truncated)
    assert len(writer) == len(records)
    writer.save(path, order)
    return path


def unpack(record):
    for tensor in (record.prompt, *record.responses):
        assert tensor.dtype == torch.int64
    return record.prompt.tolist(), [response.tolist() for response in record.responses], list(record.truncated)


def unpacked(shard):
    return [unpack(shard[i]) for i in range(len(shard))]


def columns(**changes):
    """One record: prompt 1 2, responses 3 and 4 5."""
    good = {
        "format_version": FORMAT_VERSION,
        "tokens": torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32),
        "segment_offsets": torch.tensor([0, 2, 3, 5]),
        "record_offsets": torch.tensor([0, 3]),
        "truncated": torch.tensor([False, False, True]),
    }
    return {**good, **changes}


def described(offsets, records=1):
    """Columns of metadata of 4 bytes; with two records also those of two prompts."""
    two = {"record_offsets": torch.tensor([0, 1, 3])} if records == 2 else {}
    content = {"metadata": torch.tensor(list(b"{}{}"), dtype=torch.uint8)}
    return content | {"metadata_offsets": torch.tensor(offsets, dtype=torch.int64)} | two


def saved(content, path):
    torch.save(content, path)
    return path


# --- columns ---


@pytest.mark.parametrize(
    ("responses", "sizes"),
    [
        (0, [(1, 2), (1, 1), (1, 2)]),
        (1, [(1, 5), (1, 2), (1, 2)]),  # prompt and first response
        (2, [(1, 5), (3, 4), (2, 3)]),  # prompt and longest response, as many texts as responses
    ],
)
def test_sizes_are_those_of_what_is_read(tmp_path, responses, sizes):
    path = write(tmp_path / "a.pt", [RECORDS[0], RECORDS[1], RECORDS[4]])
    shard = open_shard(path)
    shard.responses = responses
    assert shard.sizes == sizes
    assert open_shard(path, responses=1).sizes == [(1, 5), (1, 2), (1, 2)]


def test_round_trip(tmp_path):
    shard = open_shard(write(tmp_path / "new" / "folder" / "a.pt"))
    assert len(shard) == len(RECORDS)
    assert unpacked(shard) == RECORDS
    assert all(shard[i].targets is None for i in range(len(shard)))
    assert shard.path == tmp_path / "new" / "folder" / "a.pt"


def test_a_sequence_is_the_prompt_and_one_response(tmp_path):
    record = open_shard(write(tmp_path / "a.pt"))[1]
    assert [record.sequence(i).tolist() for i in range(3)] == [[1, 6], [1, 7, 8], [1, 9, 9, 9]]
    assert record.sequence().tolist() == [1, 6]


def test_responses_that_are_not_said_to_be_cut_were_not(tmp_path):
    writer = ShardWriter()
    writer.add([1], [[2], [3]])
    writer.add([1])
    writer.save(tmp_path / "a.pt")
    assert unpacked(open_shard(tmp_path / "a.pt")) == [([1], [[2], [3]], [False, False]), ([1], [], [])]


@pytest.mark.parametrize("order", [[4, 2, 0, 1, 3], [3], [1, 1, 0], list(range(5))])
def test_records_are_saved_in_the_order_asked_for(tmp_path, order):
    assert unpacked(open_shard(write(tmp_path / "a.pt", order=order))) == [RECORDS[i] for i in order]


def test_order_and_selection_of_many_random_records(tmp_path):
    draw = random.Random(0)
    records = [
        (
            [draw.randrange(100) for _ in range(draw.randrange(5))],
            [[draw.randrange(100) for _ in range(draw.randrange(4))] for _ in range(k)],
            [draw.random() < 0.5 for _ in range(k)],
        )
        for k in (draw.randrange(4) for _ in range(200))
    ]
    order = draw.sample(range(200), 120)
    assert unpacked(open_shard(write(tmp_path / "a.pt", records, order))) == [records[i] for i in order]


def test_a_writer_can_save_several_splits(tmp_path):
    writer = ShardWriter()
    for prompt, responses, truncated in RECORDS:
        writer.add(prompt, responses, truncated)
    for name, order in (("train", [0, 2]), ("test", [1])):
        writer.save(tmp_path / name, order)
    assert unpacked(open_shard(tmp_path / "train")) == [RECORDS[0], RECORDS[2]]
    assert unpacked(open_shard(tmp_path / "test")) == [RECORDS[1]]


@pytest.mark.parametrize("index", [-1, 5, 1_000])
def test_an_index_outside_is_an_index_error(tmp_path, index):
    with pytest.raises(IndexError, match=rf"record {index} of .*a\.pt, which has 5"):
        open_shard(write(tmp_path / "a.pt"))[index]


def test_what_is_on_disk(tmp_path):
    path = write(tmp_path / "a.pt", [([1, 2], [[3], [4, 5]], [False, True])])
    content = torch.load(path)
    assert content.keys() == columns().keys()
    for name, expected in columns().items():
        if name == "format_version":
            assert content[name] == expected
        else:
            torch.testing.assert_close(content[name], expected, rtol=0, atol=0)


def test_a_large_shard_opens_at_once_and_stays_on_disk(tmp_path):
    count = 200_000  # records of 100 tokens: 80 MB of tokens that nobody has asked for yet
    content = {
        "format_version": FORMAT_VERSION,
        "tokens": torch.arange(count * 100, dtype=torch.int32),
        "segment_offsets": torch.arange(0, count * 100 + 1, 50),
        "record_offsets": torch.arange(0, 2 * count + 1, 2),
        "truncated": torch.zeros(2 * count, dtype=torch.bool),
    }
    path = saved(content, tmp_path / "large.pt")
    before, seconds, shards = psutil.Process().memory_info().rss, [], []
    for _ in range(3):
        started = time.perf_counter()
        shards.append(open_shard(path, responses=1))
        seconds.append(time.perf_counter() - started)
    assert psutil.Process().memory_info().rss - before < 60e6  # three times 80 MB if they were read
    assert min(seconds) < 0.2
    shard = shards[0]
    assert len(shard) == count
    assert shard[count - 1].responses[0].tolist() == list(range(count * 100 - 50, count * 100))


# --- ratings ---


def write_rated(path, rows, order=None):
    """A shard of records given as the ratings of their responses, () for none."""
    writer = ShardWriter()
    for number, ratings in enumerate(rows):
        writer.add([number], [[9]] * max(len(ratings), 2), ratings=ratings)
    writer.save(path, order)
    return path


def test_ratings_round_trip_in_any_order_and_only_where_there_are_some(tmp_path):
    rows = [(5.0, 1.5), (3.0, 2.0, -1.0), (), (0.0, 0.0)]
    for order in (None, [3, 1, 0, 2], [2, 1]):
        shard = open_shard(write_rated(tmp_path / "a.pt", rows, order))
        for place, number in enumerate(order or range(4)):
            record = shard[place]
            assert record.prompt.tolist() == [number]
            if rows[number]:
                assert record.ratings == rows[number]
            else:
                assert [rating == rating for rating in record.ratings] == [False, False]  # NaN
    content = torch.load(tmp_path / "a.pt")
    assert content["ratings"].isnan().tolist() == [True] * 3 + [True, False, False, False]
    unrated = open_shard(write_rated(tmp_path / "b.pt", [(), ()]))
    assert unrated[0].ratings is None
    assert "ratings" not in torch.load(tmp_path / "b.pt")


def test_a_rating_per_response(tmp_path):
    with pytest.raises(ValueError, match="zip"):
        ShardWriter().add([1], [[2], [3]], ratings=[1.0])


def test_ratings_that_give_no_margins_are_refused(tmp_path):
    open_shard(write_rated(tmp_path / "a.pt", [(5.0, 1.5), (3.0, 2.0, 2.0), (0.0, 0.0)]), rated=True)
    for rows, message in (
        ([(), ()], r"a\.pt has no ratings to take margins from; write them too, or leave --use_margin out"),
        ([(5.0, 1.0), ()], "a response of record 1 is not rated; a margin needs a rating of each"),
        ([(1.0, 0.0), (5.0, 1.0), (2.0, float("inf"))], "a response of record 2 is not rated"),
        ([(5.0, 1.0), (3.0, 2.0, 2.5)], "a response of record 1 is rated above a better one"),
        ([(1.0, 2.0), (9.0, 8.0)], "a response of record 0 is rated above a better one"),
    ):
        path = write_rated(tmp_path / "a.pt", rows)
        with pytest.raises(ValueError, match=message):
            open_shard(path, rated=True)
        open_shard(path)  # as long as nobody asks for margins


def test_what_stands_at_prompts_in_the_column_of_ratings_means_nothing(tmp_path):
    ratings = torch.tensor([-8.0, 2.0, 1.0])  # the first response is no better than its prompt
    assert open_shard(saved(columns(ratings=ratings), tmp_path / "a.pt"), rated=True)[0].ratings == (2.0, 1.0)


# --- metadata ---

METADATA = [{"act": "inform", "turns": [1, 2]}, {}, {"text": "naïve 答案 \N{ESCAPE}"}, {"act": None}]


def write_described(path, rows=METADATA, order=None):
    """A shard of records with metadata; the prompt is the number of the record."""
    writer = ShardWriter()
    for number, metadata in enumerate(rows):
        writer.add([number], [[9]], metadata=metadata)
    writer.save(path, order)
    return path


@pytest.mark.parametrize("order", [None, [3, 1, 0, 2], [2, 1, 1], [1]])
def test_metadata_round_trip_in_any_order(tmp_path, order):
    shard = open_shard(write_described(tmp_path / "a.pt", order=order))
    numbers = order or range(4)
    assert [shard[i].prompt.tolist() for i in range(len(shard))] == [[number] for number in numbers]
    assert [shard[i].metadata for i in range(len(shard))] == [METADATA[number] for number in numbers]


def test_metadata_on_disk_is_json_and_only_there_if_a_record_has_some(tmp_path):
    content = torch.load(write_described(tmp_path / "a.pt", [{}, {"a": "é"}, {"b": [1]}]))
    assert bytes(content["metadata"].tolist()) == '{"a":"é"}{"b":[1]}'.encode()  # 10 bytes, then 9
    assert content["metadata_offsets"].tolist() == [0, 0, 10, 19]
    plain = torch.load(write_described(tmp_path / "b.pt", [{}, {}]))
    assert plain.keys() == columns().keys()
    assert open_shard(tmp_path / "b.pt")[1].metadata == {}


def test_a_shard_without_metadata_has_the_bytes_that_it_always_had(tmp_path):
    write_described(tmp_path / "a.pt", [{}, {}])
    same = columns(
        tokens=torch.tensor([0, 9, 1, 9], dtype=torch.int32),
        segment_offsets=torch.tensor([0, 1, 2, 3, 4]),
        record_offsets=torch.tensor([0, 2, 4]),
        truncated=torch.zeros(4, dtype=torch.bool),
    )
    atomic_save(same, tmp_path / "as" / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "as" / "a.pt").read_bytes()


@pytest.mark.parametrize(
    "metadata", [{"a": {1}}, {"a": torch.zeros(1)}, {"a": float("nan")}, {"a": "\ud800"}, ["a"]]
)  # fmt: skip
def test_metadata_that_json_cannot_hold_is_refused_and_nothing_is_added(tmp_path, metadata):
    writer = ShardWriter()
    with pytest.raises((TypeError, ValueError)):
        writer.add([1], [[2]], metadata=metadata)
    writer.add([3], [[4]], metadata={"b": 1})
    writer.save(tmp_path / "a.pt")
    shard = open_shard(tmp_path / "a.pt")
    assert [(record.prompt.tolist(), record.metadata) for record in shard] == [([3], {"b": 1})]


@pytest.mark.parametrize("text", [b"{", b"[1]", b"\xff", b"3", b"[" * 10_000])
def test_damaged_metadata_is_named_when_it_is_read(tmp_path, text):
    content = columns(metadata=torch.tensor(list(text), dtype=torch.uint8))
    shard = open_shard(saved({**content, "metadata_offsets": torch.tensor([0, len(text)])}, tmp_path / "a.pt"))
    with pytest.raises(ValueError, match=r"a\.pt: the metadata of record 0 is damaged .*; prepare it again"):
        shard[0]


def test_the_fingerprint_tells_metadata_apart(tmp_path):
    shards = [open_shard(write_described(tmp_path / name, [{"a": name}])) for name in "ab"]
    assert shards[0].fingerprint != shards[1].fingerprint
    assert open_shard(tmp_path / "a").fingerprint == shards[0].fingerprint


# --- lists of dictionaries ---


def test_reads_texts_as_a_list_of_dictionaries(tmp_path):
    rows = [
        {"prompt_len": 2, "input_ids": torch.tensor([1, 2, 3]), "targets": torch.tensor([-1, -1, 3])},
        {"prompt_len": torch.tensor(0), "input_ids": [4, 5]},
    ]
    shard = open_shard(saved(rows, tmp_path / "a.pt"), responses=1, vocab_size=6)
    assert unpacked(shard) == [([1, 2], [[3]], [False]), ([], [[4, 5]], [False])]
    assert shard[0].targets.tolist() == [-1, -1, 3]
    assert shard[0].targets.dtype == torch.int64
    assert shard[1].targets is None


def test_reads_preferences_as_a_list_of_dictionaries(tmp_path):
    rows = [
        {"prompt_len": 2, "chosen_input_ids": torch.tensor([1, 2, 3]), "rejected_input_ids": torch.tensor([1, 2])},
        # tokenized as whole texts, the two part before the end of the prompt: nothing of either may be lost
        {"prompt_len": 2, "chosen_input_ids": torch.tensor([1, 5, 3]), "rejected_input_ids": torch.tensor([1, 6, 4])},
    ]
    shard = open_shard(saved(rows, tmp_path / "a.pt"), responses=2)
    assert unpacked(shard) == [([1, 2], [[3], []], [False, False]), ([1], [[5, 3], [6, 4]], [False, False])]


def test_reads_the_margin_of_a_pair_in_a_list_of_dictionaries(tmp_path):
    pair = {"prompt_len": 1, "chosen_input_ids": [1, 2, 3], "rejected_input_ids": [1, 2]}
    shard = open_shard(
        saved([{**pair, "margin": 1.5}, {**pair, "margin": torch.tensor(0)}], tmp_path / "a.pt"), rated=True
    )
    assert [shard[i].ratings for i in range(2)] == [(1.5, 0.0), (0.0, 0.0)]
    path = saved([{**pair, "margin": 1.5}, pair], tmp_path / "b.pt")
    with pytest.raises(ValueError, match="a response of record 1 is not rated"):
        open_shard(path, rated=True)
    with pytest.raises(ValueError, match="a response of record 0 is rated above a better one"):
        open_shard(saved([{**pair, "margin": -1}], tmp_path / "c.pt"), rated=True)


def test_reads_the_metadata_in_a_list_of_dictionaries(tmp_path):
    row = {"prompt_len": 1, "input_ids": [1, 2]}
    shard = open_shard(saved([{**row, "metadata": {"act": "inform"}}, row], tmp_path / "a.pt"))
    assert [shard[i].metadata for i in range(2)] == [{"act": "inform"}, {}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (3, "record 1 is not a dictionary with prompt_len"),
        ({"prompt_len": 1, "input_ids": [1, 2], "metadata": "act"}, "metadata is a str, expected a dictionary"),
        ({"prompt_len": 1, "input_ids": [1, 2], "metadata": {"a": torch.zeros(1)}}, "record 1 is not.*TypeError"),
        ("text", "record 1 is not a dictionary with prompt_len"),
        ({"input_ids": [1]}, r"record 1 is not a dictionary.*KeyError: 'prompt_len'"),
        ({"prompt_len": 1}, r"record 1 is not a dictionary.*KeyError: 'input_ids'"),
        ({"prompt_len": 1, "chosen_input_ids": [1]}, "KeyError: 'rejected_input_ids'"),
        ({"prompt_len": None, "input_ids": [1]}, "TypeError"),
        ({"prompt_len": 1, "input_ids": None}, "RuntimeError"),
        ({"prompt_len": 1, "input_ids": [2**70]}, "Overflow"),
        ({"prompt_len": 1, "input_ids": "1 2"}, "TypeError"),
        ({"prompt_len": 1, "input_ids": [1.5, 2.0]}, r"flat tensor of 32-bit integers, got torch.float32 of shape \(2"),
        ({"prompt_len": 1, "input_ids": [[1, 2]]}, r"flat tensor of 32-bit integers, got torch.int64 of shape \(1, 2"),
        ({"prompt_len": 1, "input_ids": [2**31]}, "flat tensor of 32-bit integers"),
        ({"prompt_len": 3, "input_ids": [1, 2]}, "record 1 has prompt_len 3, expected 0 to 2"),
        ({"prompt_len": -1, "input_ids": [1, 2]}, "record 1 has prompt_len -1, expected 0 to 2"),
        ({"prompt_len": 2, "chosen_input_ids": [1, 2], "rejected_input_ids": [1]}, "prompt_len 2, expected 0 to 1"),
        ({"prompt_len": 1, "input_ids": [1, 2], "targets": [1]}, "record 1 has 1 targets for 2 ids"),
        (
            {"prompt_len": 1, "chosen_input_ids": [1, 2], "rejected_input_ids": [1], "margin": "wide"},
            "record 1 is not a dictionary.*could not convert string to float",
        ),
    ],
)
def test_a_bad_dictionary_is_named(tmp_path, row, message):
    path = saved([{"prompt_len": 1, "input_ids": [1, 2]}, row], tmp_path / "a.pt")
    with pytest.raises(ValueError, match=message) as error:
        open_shard(path)
    assert str(error.value).startswith(f"{path}: record 1 ")


# --- refusals ---


def test_a_missing_shard_names_what_writes_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no shard .*a\.pt; data_prep/<dataset>/prepare_data.py writes it"):
        open_shard(tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError):
        open_shard(tmp_path)  # a folder is no shard


@pytest.mark.parametrize("content", [[], columns(record_offsets=torch.tensor([0]))])
def test_a_shard_without_records_is_refused(tmp_path, content):
    if content:
        content |= {"tokens": torch.empty(0, dtype=torch.int32), "segment_offsets": torch.tensor([0])}
        content |= {"truncated": torch.empty(0, dtype=torch.bool)}
    with pytest.raises(ValueError, match=r"holds no records; look at the counts in .*args\.json"):
        open_shard(saved(content, tmp_path / "a.pt"))


def test_a_shard_with_too_few_responses_is_refused(tmp_path):
    path = write(tmp_path / "a.pt", RECORDS[:2])
    open_shard(path, responses=1)
    with pytest.raises(ValueError, match=r"record 0 has 1 responses, expected at least 2 \(a finetune shard"):
        open_shard(path, responses=2)
    with pytest.raises(ValueError, match="record 2 has 0 responses, expected at least 1"):
        open_shard(write(path), responses=1)


def test_a_shard_of_another_tokenizer_is_refused(tmp_path):
    path = write(tmp_path / "a.pt", RECORDS[:2])
    open_shard(path, vocab_size=10)
    with pytest.raises(ValueError, match="token ids from 1 to 9, but the model's vocabulary has 9: it was prepared"):
        open_shard(path, vocab_size=9)
    with pytest.raises(ValueError, match="token ids from -4 to 2"):
        open_shard(write(path, [([1, -4], [[2]], [False])]), vocab_size=10)
    open_shard(write(path, [([], [[]], [False])]), vocab_size=10)  # no token at all


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text", r"a\.pt is a str, expected a shard"),
        (7, r"a\.pt is a int, expected a shard"),
        ({}, r"a\.pt is a dict, expected a shard"),
        ({"weight": torch.zeros(2)}, r"a\.pt is a dict, expected a shard"),
        (columns(format_version=2), "has format 2, this version reads 1"),
        *((columns(**{name: None}), f"column '{name}' is missing or not a flat") for name in list(columns())[1:]),
        *((columns(**{name: torch.zeros(3)}), f"column '{name}' is missing") for name in list(columns())[1:]),
        (columns(tokens=torch.zeros(1, 5, dtype=torch.int32)), "column 'tokens' is missing or not a flat torch.int32"),
        (columns(record_offsets=torch.tensor([], dtype=torch.int64)), "offsets do not fit"),
        (columns(segment_offsets=torch.tensor([], dtype=torch.int64)), "offsets do not fit"),
        (columns(record_offsets=torch.tensor([1, 3])), "offsets do not fit"),
        (columns(segment_offsets=torch.tensor([1, 2, 3, 5])), "offsets do not fit"),
        (columns(record_offsets=torch.tensor([0, 2])), "offsets do not fit"),
        (columns(truncated=torch.zeros(2, dtype=torch.bool)), "offsets do not fit"),
        (columns(tokens=torch.zeros(4, dtype=torch.int32)), "offsets do not fit"),
        (columns(record_offsets=torch.tensor([0, 0, 3])), "offsets do not fit"),  # a record without a prompt
        (columns(record_offsets=torch.tensor([0, 4, 3])), "offsets do not fit"),
        (columns(segment_offsets=torch.tensor([0, 3, 2, 5])), "offsets do not fit"),
        (columns(ratings=torch.zeros(2)), "offsets do not fit"),
        (columns(**described([0, 3])), "offsets do not fit"),
        (columns(**described([1, 4])), "offsets do not fit"),
        (columns(**described([0, 2, 4])), "offsets do not fit"),
        (columns(**described([0])), "offsets do not fit"),
        (columns(**described([])), "offsets do not fit"),
        (columns(**described([0, 9, 4], records=2)), "offsets do not fit"),
        (columns(metadata=torch.zeros(4, dtype=torch.uint8)), "offsets do not fit"),
        (columns(metadata_offsets=torch.tensor([0, 0])), "offsets do not fit"),
        (columns(metadata=None), "column 'metadata' is missing or not a flat torch.uint8"),
        (columns(metadata=torch.zeros(4)), "column 'metadata' is missing or not a flat torch.uint8"),
        (columns(metadata_offsets=torch.zeros(2)), "column 'metadata_offsets' is missing or not a flat torch.int64"),
        (columns(ratings=None), "column 'ratings' is missing or not a flat torch.float32"),
        (columns(ratings=torch.zeros(3, dtype=torch.float64)), "column 'ratings' is missing or not a flat"),
    ],
)
def test_content_that_is_no_shard_is_refused(tmp_path, content, message):
    path = saved(content, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=message) as error:
        open_shard(path)
    assert str(error.value).startswith(str(path))
    open_shard(saved(columns(), path))  # unchanged, the same content is fine


@pytest.mark.parametrize("damage", ["empty", "text", "head", "half", "header", "pickle"])
def test_a_damaged_file_is_one_line_that_says_so(tmp_path, damage):
    path = write(tmp_path / "a.pt")
    whole = path.read_bytes()
    flipped = bytes(byte ^ 0xFF for byte in whole[:64])
    path.write_bytes(
        {
            "empty": b"",
            "text": b'{"prompt": "a"}\n' * 20,
            "head": whole[:10],
            "half": whole[: len(whole) // 2],
            "header": flipped + whole[64:],
            "pickle": whole.replace(b"format_version", b"formal_version"),
        }[damage]
    )
    expected = "is a dict, expected a shard" if damage == "pickle" else "is not a readable shard"
    with pytest.raises(ValueError, match=rf"a\.pt {expected}.*; prepare it again$") as error:
        open_shard(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300 + len(str(path))


def test_a_pickle_that_would_run_code_is_not_opened(tmp_path):
    with pytest.raises(ValueError, match=r"is not a readable shard \(UnpicklingError: Weights only load failed\)"):
        open_shard(saved([random.Random(0)], tmp_path / "a.pt"))


# --- saving ---


def test_atomic_save_leaves_the_old_file_when_writing_fails(tmp_path, monkeypatch):
    path = write(tmp_path / "a.pt")
    before = path.read_bytes()

    def half(content, file):
        file.write(b"half of")
        raise OSError("disk full")

    monkeypatch.setattr(module.torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        atomic_save({"a": 1}, path)
    with pytest.raises(OSError, match="disk full"):
        atomic_save({"a": 1}, tmp_path / "new.pt")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]


def test_atomic_save_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "made" / "a.pt"
    for value in (1, 2):
        atomic_save({"value": value}, path)
        assert torch.load(path) == {"value": value}
    assert [file.name for file in path.parent.iterdir()] == ["a.pt"]


def test_a_shard_that_is_open_survives_being_prepared_again(tmp_path):
    path = write(tmp_path / "a.pt")
    shard = open_shard(path)
    write(path, [([9], [[9]], [False])])
    assert unpacked(shard) == RECORDS
    assert len(open_shard(path)) == 1


@pytest.mark.parametrize(
    "tokens",
    [torch.zeros(1, dtype=torch.int32).expand(2**45), torch.empty(5, dtype=torch.int32, device="meta")],
    ids=["stride 0", "no content"],
)
def test_a_small_file_that_claims_terabytes(tmp_path, tokens):
    offsets = torch.tensor([0, 2, len(tokens)])
    path = saved(
        columns(tokens=tokens, segment_offsets=offsets, record_offsets=torch.tensor([0, 2])), tmp_path / "a.pt"
    )
    assert path.stat().st_size < 10_000
    with pytest.raises(ValueError, match="column 'tokens' is missing or not a flat"):
        open_shard(path)
    path = saved([{"prompt_len": 0, "input_ids": tokens}], tmp_path / "b.pt")
    with pytest.raises(ValueError, match="its tensors are views, sparse or without content"):
        open_shard(path)


def test_offsets_whose_difference_runs_over(tmp_path):
    offsets = torch.tensor([0, 2**63 - 1, -2, 3])  # each step is positive in 64 bits
    assert (offsets.diff() > 0).all()
    with pytest.raises(ValueError, match="its offsets do not fit its tokens"):
        open_shard(saved(columns(record_offsets=offsets), tmp_path / "a.pt"))


def test_one_record_a_million_times(tmp_path):
    """Each of them is a reference of two bytes in the file, and 4 MB in memory."""
    row = {"prompt_len": 0, "input_ids": torch.ones(2**10, dtype=torch.int32)}
    path = saved([row] * 10_000, tmp_path / "a.pt")
    assert path.stat().st_size < 2**16
    with pytest.raises(ValueError, match=r"a\.pt holds more tokens or metadata than bytes"):
        open_shard(path)
    described = {"prompt_len": 0, "input_ids": [1], "metadata": {"text": "x" * 2**12}}
    with pytest.raises(ValueError, match=r"b\.pt holds more tokens or metadata than bytes"):
        open_shard(saved([described] * 10_000, tmp_path / "b.pt"))
