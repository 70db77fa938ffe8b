import csv
import gzip
import json
from functools import partial

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rlhf_stages.args import TextDataArgs
from rlhf_stages.data.sources import Example, SkipRecord, judge, read_source, text_of

RECORDS = [
    {"prompt": "Wie geht's?", "chosen": "Gut, danke – und dir?", "rejected": "äh"},
    {"prompt": "two\nlines", "chosen": 'a "quoted", word', "rejected": "𝛑"},
    {"prompt": "你好", "chosen": "x" * 300, "rejected": "y"},
]


def write_jsonl(path, records=RECORDS):
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")


def write_gzip(path):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(r) + "\n" for r in RECORDS)


def write_csv(path):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, RECORDS[0])
        writer.writeheader()
        writer.writerows(RECORDS)


def write_parquet(path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)


def save_dataset(path):
    datasets.Dataset.from_list(RECORDS).save_to_disk(path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_jsonl),
        ("a.JSONL.GZ", write_gzip),
        ("a.csv", write_csv),
        ("a.parquet", write_parquet),
        ("saved", save_dataset),
    ],
)
def test_every_format_gives_the_same_records_each_time(tmp_path, name, write):
    write(tmp_path / name)
    source = read_source(str(tmp_path / name))
    assert list(source) == list(source) == [("train", record) for record in RECORDS]
    assert not source.skipped
    assert source.first_skipped is None


@pytest.mark.parametrize(
    ("stem", "split"),
    [
        ("train", "train"),
        ("training_set", "train"),
        ("train-00000-of-00002", "train"),
        ("test", "test"),
        ("Test_prefs", "test"),
        ("validation", "validation"),
        ("valid1", "validation"),
        ("val", "validation"),
        ("dev", "validation"),
        ("testimonials", "train"),
        ("device", "train"),
        ("comparisons", "train"),
    ],
)
def test_the_start_of_a_file_name_is_its_split(tmp_path, stem, split):
    write_jsonl(tmp_path / f"{stem}.jsonl", RECORDS[:1])
    assert list(read_source(str(tmp_path))) == [(split, RECORDS[0])]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("default/test/0000.jsonl", "test"),
        ("test/dev/a/0000.jsonl", "validation"),
        ("test/train.jsonl", "train"),
        ("default/0000.jsonl", "train"),
    ],
)
def test_a_folder_says_the_split_where_the_file_does_not(tmp_path, name, split):
    source = tmp_path / "test"  # what lies above the files says nothing
    (source / name).parent.mkdir(parents=True)
    write_jsonl(source / name, RECORDS[:1])
    assert list(read_source(str(source))) == [(split, RECORDS[0])]


def test_a_folder_is_read_recursively_in_order_without_hidden_and_other_files(tmp_path):
    for name in ("b/test.jsonl", "a/train.jsonl", "a/valid1.jsonl", "a/valid2.jsonl", ".cache/x.jsonl", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, [{"from": name}])
    read = list(read_source(str(tmp_path), ignore=("valid2",)))
    expected = [("train", "a/train.jsonl"), ("validation", "a/valid1.jsonl"), ("test", "b/test.jsonl")]
    assert read == [(split, {"from": name}) for split, name in expected]


def test_a_saved_dictionary_and_the_hub_give_their_splits(tmp_path, monkeypatch):
    splits = {name: datasets.Dataset.from_list([{"from": name}]) for name in ("train", "valid1", "valid2", "test")}
    loaded = datasets.DatasetDict(splits)
    expected = [("train", {"from": "train"}), ("validation", {"from": "valid1"}), ("test", {"from": "test"})]
    loaded.save_to_disk(tmp_path / "saved")
    assert list(read_source(str(tmp_path / "saved"), ignore=("valid2",))) == expected

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name: asked.append(name) or loaded)
    assert list(read_source("some-owner/some.name", ignore=("valid2",))) == expected
    assert asked == ["some-owner/some.name"]


def test_a_hub_that_does_not_answer_is_one_line_with_the_way_out(monkeypatch):
    def refuse(name):
        raise ConnectionError("Couldn't reach the hub\nand much more")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match="--source") as caught:
        read_source("owner/name")
    assert "owner/name" in str(caught.value)
    assert "Couldn't reach the hub" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source", ["missing.jsonl", "data/missing.csv", "./missing", "a/b/c", "~/missing/x", "owner/x.gz"]
)
def test_a_path_that_is_not_there_never_reaches_the_hub(source, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        read_source(source)


def test_what_cannot_be_read_at_all_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"holds no file that ends in \.jsonl, \.jsonl\.gz, \.csv, \.tsv, \.parquet"):
        read_source(str(tmp_path))
    (tmp_path / "data.txt").write_text("a\tb\n")
    with pytest.raises(ValueError, match=r"data\.txt: expected a name that ends in"):
        read_source(str(tmp_path / "data.txt"))
    (tmp_path / "data.jsonl.gz").touch()
    with pytest.raises(ValueError, match=r"data\.jsonl\.gz is empty"):
        read_source(str(tmp_path))
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/state.json").write_text("{")
    with pytest.raises(ValueError, match="saved' is not a readable save_to_disk folder"):
        read_source(str(tmp_path / "saved"))
    (tmp_path / "data.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"data\.parquet is not a readable parquet file"):
        list(read_source(str(tmp_path / "data.parquet")))


def test_bad_lines_are_counted_with_the_place_of_the_first(tmp_path):
    lines = [b'\xef\xbb\xbf{"n": 1}', b"", b'{"n": "\xff"}', b"[1, 2]", b"{broken", b"[" * 100_000, b'{"n": 2}']
    path = tmp_path / "test.jsonl"
    path.write_bytes(b"\n".join(lines))
    source = read_source(str(path))
    for _ in range(2):  # the counts are of one pass
        assert list(source) == [("test", {"n": 1}), ("test", {"n": 2})]
        assert source.skipped == {"test": {"bad line": 4}}
        assert source.first_skipped == f"{path}, line 3: not UTF-8"


def test_tabs_part_fields_and_quotes_are_text(tmp_path):
    (tmp_path / "dev.tsv").write_text('text\tlabel\n"so" they say\t1\n"\t0\na, b\t1\n')
    rows = [{"text": text, "label": label} for text, label in (('"so" they say', "1"), ('"', "0"), ("a, b", "1"))]
    assert list(read_source(str(tmp_path))) == [("validation", row) for row in rows]


@pytest.mark.parametrize(("name", "mark"), [("train.csv", ","), ("train.tsv", "\t")])
def test_columns_of_a_table_without_a_header(tmp_path, name, mark):
    (tmp_path / name).write_text(f"good{mark}1\nbad{mark}0\nbad{mark}0{mark}x\n")
    source = read_source(str(tmp_path / name), columns=("text", "label"))
    assert list(source) == [("train", {"text": "good", "label": "1"}), ("train", {"text": "bad", "label": "0"})]
    assert source.first_skipped.endswith(f"{name}, line 3: 3 fields, --columns names 2")
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"a\.jsonl: --columns names the columns of \.csv and \.tsv files only"):
        read_source(str(tmp_path), columns=("text", "label"))


def test_a_bad_csv_row_spoils_no_other(tmp_path, request):
    request.addfinalizer(partial(csv.field_size_limit, csv.field_size_limit(130_000)))
    path = tmp_path / "a.csv"
    rows = [b"\xef\xbb\xbfa,b", b'"two', b'lines",2', b"3", b"\xff,4", b"", b"5,6,7", b"x" * 140_000 + b",8", b"9,10"]
    path.write_bytes(b"\r\n".join(rows))
    source = read_source(str(path))
    assert list(source) == [("train", {"a": "two\r\nlines", "b": "2"}), ("train", {"a": "9", "b": "10"})]
    assert source.skipped == {"train": {"bad line": 4}}
    assert source.first_skipped == f"{path}, line 4: 1 fields, the header has 2"


def test_a_broken_gzip_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    write_gzip(path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for content in (whole[:-9], whole[: len(whole) // 2], b"not gzip at all", bytes(flipped), whole + b"rubbish"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz is a broken gzip file"):
            list(read_source(str(path)))


def test_reading_is_lazy(tmp_path):
    with (tmp_path / "a.jsonl.gz").open("wb") as file:
        for _ in range(2):
            file.write(gzip.compress((json.dumps(RECORDS[0]) + "\n").encode() * 20_000))
        file.write(b"rubbish")
    assert next(iter(read_source(str(tmp_path)))) == ("train", RECORDS[0])


def test_text_of_takes_the_first_name_that_has_a_value():
    assert text_of({"chosen": None, "selected": "b"}, "chosen", "selected") == "b"
    assert text_of({"chosen": "a", "selected": "b"}, "chosen", "selected") == "a"
    assert text_of({}, "chosen") is None
    with pytest.raises(SkipRecord, match="not text"):
        text_of({"chosen": ["a"]}, "chosen")


@pytest.mark.parametrize(
    ("stage", "responses", "reason"),
    [
        ("prompt", (), None),
        ("finetune", (), "missing chosen"),
        ("finetune", ("good",), None),
        ("finetune", ("good", " "), None),  # the second response is not used
        ("finetune", ("\n",), "empty reply"),
        ("finetune", (" x ",), "too short"),  # minimum_response_length is 2 characters
        ("preference", ("good",), "missing rejected"),
        ("preference", ("good", ""), "empty reply"),
        ("preference", ("good", "good"), "same response"),
        ("preference", ("best", "good", "best"), "same response"),
        ("preference", ("best", "good", "bad"), None),
        ("preference", ("good", "half \ud83d of a pair"), "not text"),
    ],
)
def test_judge_names_the_reason(stage, responses, reason):
    args = TextDataArgs(destination_dir="x", tokenizer_name="x", stage=stage, stage_split="1,1,1")
    # Of a few dozen keys some belong to this stage; those that no stage could use are counted by each.
    examples = [Example("prompt", responses, key=str(n)) for n in range(40)]
    rows = [row for row, _, _ in judge((("train", {"e": e}) for e in examples), lambda r: r["e"], args, set())]
    assert rows
    assert {row.reason for row in rows} == {reason}


def test_judge_refuses_an_unknown_split_and_an_empty_prompt():
    args = TextDataArgs(destination_dir="x", tokenizer_name="x")
    with pytest.raises(ValueError, match="'holdout', expected one of train, validation, test"):
        list(judge([("holdout", {})], lambda r: Example("p", ("r",), key="k"), args, set()))
    ((row, texts, raw),) = judge([("test", {"n": 1})], lambda r: Example(" \n", ("r",), key="k"), args, set())
    assert (row.reason, row.split, texts, raw) == ("empty prompt", "test", None, {"n": 1})
