"""What only a hostile file has; the formats themselves are tested with the sources."""

import gzip
import json
import struct
import tracemalloc

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rlhf_stages.data import readers
from rlhf_stages.data.sources import read_source


def test_a_packed_line_longer_than_memory_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE", 2**20)
    bomb = gzip.compress(b'{"a": 1}\n' + b"x" * 2**26 + b'\n{"a": 2}\n', compresslevel=1)
    assert len(bomb) < 2**19
    (tmp_path / "a.jsonl.gz").write_bytes(bomb)
    source = read_source(str(tmp_path / "a.jsonl.gz"))
    tracemalloc.start()
    found = list(source)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [("train", {"a": 1}), ("train", {"a": 2})]
    assert source.skipped == {"train": {"bad line": 1}}
    assert source.first_skipped == f"{tmp_path / 'a.jsonl.gz'}, line 2: {readers.TOO_LONG}"
    assert peak < 8 * 2**20  # of the 64 that it unpacks to


@pytest.mark.parametrize(("levels", "records"), [(100, 1), (101, 0)])
def test_a_record_nested_too_deep_to_be_written_again(tmp_path, levels, records):
    (tmp_path / "a.jsonl").write_text('{"a":' * levels + "1" + "}" * levels + "\n")
    source = read_source(str(tmp_path / "a.jsonl"))
    assert len(list(source)) == records
    assert (source.first_skipped is None) == bool(records)


def test_a_long_field_of_a_table_is_one_field(tmp_path):
    field = "words, words\n" * 20_000
    (tmp_path / "a.csv").write_text(f'prompt,chosen\nq1,a\nq2,"{field}"\nq3,c\n')
    source = read_source(str(tmp_path / "a.csv"))
    assert [tuple(record.values()) for _, record in source] == [("q1", "a"), ("q2", field), ("q3", "c")]
    assert not source.skipped


def saved(folder):
    datasets.Dataset.from_list([{"prompt": "a", "chosen": "bc"}]).save_to_disk(folder)
    return folder


@pytest.mark.parametrize("name", ["../outside.arrow", "/outside.arrow", "a/b.arrow", "..", ".", "", "a\0", 3, None])
def test_a_saved_dataset_names_files_of_its_folder_only(tmp_path, name):
    folder = saved(tmp_path / "saved")
    (tmp_path / "outside.arrow").write_bytes(next(folder.glob("*.arrow")).read_bytes())
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(ValueError, match=r"saved' is not a readable .* is not the name of a file in the folder"):
        read_source(str(folder))
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    with pytest.raises(ValueError, match=r"saved' is not a readable .* is not the name of a file in the folder"):
        read_source(str(folder))


@pytest.mark.parametrize("content", [{}, {"_data_files": "a"}, {"_data_files": ["a"]}])
def test_a_saved_dataset_without_its_files(tmp_path, content):
    folder = saved(tmp_path / "saved")
    (folder / "state.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"state.json lists no _data_files"):
        read_source(str(folder))


def test_a_saved_dataset_whose_features_name_files_opens_none(tmp_path):
    """Reading it through `datasets` would open the path as an image."""
    secret = tmp_path / "secret"
    secret.write_text("not an image")
    form = datasets.Features({"prompt": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}})
    rows = [{"prompt": {"path": str(secret), "bytes": None}}]
    datasets.Dataset.from_list(rows, features=form).save_to_disk(tmp_path / "saved")
    facts = json.loads((tmp_path / "saved" / "dataset_info.json").read_text())
    facts["features"] = {"prompt": {"_type": "Image"}}
    (tmp_path / "saved" / "dataset_info.json").write_text(json.dumps(facts))
    with pytest.raises(OSError, match="cannot identify image file"):
        list(datasets.load_from_disk(tmp_path / "saved"))
    assert list(read_source(str(tmp_path / "saved"))) == [("train", {"prompt": {"path": str(secret), "bytes": None}})]


def test_offsets_outside_of_an_arrow_file(tmp_path):
    """Without a check this reads the memory of the process, or ends it."""
    folder = tmp_path / "saved"
    datasets.Dataset.from_list([{"prompt": "x" * 7919}]).save_to_disk(folder)
    (file,) = folder.glob("*.arrow")
    content = file.read_bytes()
    offsets, wrong = struct.pack("<ii", 0, 7919), struct.pack("<ii", 0, 2**30)
    place = content.rindex(offsets)  # an earlier one says how long the buffers are
    file.write_bytes(content[:place] + wrong + content[place + 8 :])
    with pytest.raises(ValueError, match=r"\.arrow is not a readable Arrow file \(ArrowInvalid"):
        list(read_source(str(folder)))


def test_a_table_whose_rows_are_larger_than_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_BATCH", 2**20)
    table = pyarrow.table({"prompt": pyarrow.array(["x" * 2**16]).dictionary_encode().take([0] * 10_000)})
    pyarrow.parquet.write_table(table.cast(pyarrow.schema({"prompt": pyarrow.string()})), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 2**18
    with pytest.raises(ValueError, match=r"a.parquet is not a readable .* 100 of its rows take"):
        list(read_source(str(tmp_path / "a.parquet")))
