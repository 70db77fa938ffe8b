import io
import shutil
import zipfile

import pytest

from rlhf_stages.args import DailyDialogArgs
from rlhf_stages.data import daily_dialog_files as module
from rlhf_stages.data.daily_dialog import Dialogues
from rlhf_stages.data.daily_dialog_files import read_dialogues

SPLITS = ("train", "validation", "test")


def texts(split):
    """The three files of a split, as the official ones look."""
    return {
        f"dialogues_{split}.txt": f"Hi , {split} . __eou__ Who ? __eou__\nYes . __eou__ No ’ t . __eou__ A __eou__\n",
        f"dialogues_act_{split}.txt": "1 2 \n3 4 1 \n",
        f"dialogues_emotion_{split}.txt": "0 6 \n4 0 0 \n",
    }


EXPECTED = [
    row
    for split in SPLITS
    for row in (
        (split, {"dialog": [f"Hi , {split} . ", " Who ? "], "act": [1, 2], "emotion": [0, 6]}),
        (split, {"dialog": ["Yes . ", " No ’ t . ", " A "], "act": [3, 4, 1], "emotion": [4, 0, 0]}),
    )
]


def write_folder(folder, nested=True):
    for split in SPLITS:
        inner = folder / split if nested else folder
        inner.mkdir(parents=True, exist_ok=True)
        for name, content in texts(split).items():
            (inner / name).write_text(content, encoding="utf-8")
    return folder


def zipped(members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def official(**changes):
    """The members of ijcnlp_dailydialog.zip."""
    members = {"dialogues_text.txt": "Hi __eou__\n", "dialogues_act.txt": "1\n", "readme.txt": "..."}
    members |= {f"{split}.zip": zipped({f"{split}/{n}": c for n, c in texts(split).items()}) for split in SPLITS}
    return {f"ijcnlp_dailydialog/{name}": content for name, content in {**members, **changes}.items()}


def write_zip(path, members):
    path.write_bytes(zipped(members))
    return path


def test_the_official_files_in_each_of_their_shapes(tmp_path):
    sources = [
        write_folder(tmp_path / "folders"),
        write_folder(tmp_path / "flat", nested=False),
        write_zip(tmp_path / "ijcnlp_dailydialog.zip", official()),
    ]
    half_unpacked = tmp_path / "half"
    half_unpacked.mkdir()
    with zipfile.ZipFile(sources[2]) as archive:
        archive.extractall(half_unpacked)
    shutil.copytree(tmp_path / "folders/train", half_unpacked / "train")  # one of the three was unpacked further
    for source in (*sources, half_unpacked):
        assert list(read_dialogues(str(source))) == EXPECTED


def test_lines_that_are_no_text_and_labels_that_are_no_numbers(tmp_path):
    folder = write_folder(tmp_path / "a")
    (folder / "train/dialogues_train.txt").write_bytes(b"\xef\xbb\xbfHi __eou__ You\n\xff __eou__\n")
    (folder / "train/dialogues_act_train.txt").write_text("x 99999\n1\n\n\n")
    source = read_dialogues(str(folder))
    assert next(iter(source)) == ("train", {"dialog": ["Hi ", " You"], "act": [-1, -1], "emotion": [0, 6]})
    assert len(list(source)) == 5
    assert source.skipped["train"] == {"bad line": 1}
    assert source.first_skipped == f"{folder} [dialogues_train.txt], line 2: not UTF-8"


def test_missing_doubled_and_unequal_files_are_named(tmp_path):
    folder = write_folder(tmp_path / "a")
    (folder / "copy.txt").touch()
    (folder / "copy").mkdir()
    shutil.copy(folder / "test/dialogues_test.txt", folder / "copy")
    with pytest.raises(ValueError, match=r"holds dialogues_test\.txt twice"):
        read_dialogues(str(folder))
    shutil.rmtree(folder / "copy")
    (folder / "test/dialogues_act_test.txt").write_text("1 2\n")
    with pytest.raises(ValueError, match=r"do not fit each other \(dialogues_test\.txt 2, dialogues_act_test\.txt 1"):
        read_dialogues(str(folder))
    (folder / "test/dialogues_act_test.txt").unlink()
    with pytest.raises(ValueError, match=r"holds no dialogues_act_test\.txt; all of"):
        read_dialogues(str(folder))


def test_a_zip_file_that_is_damaged_or_wrong_is_one_error(tmp_path):
    whole = zipped(official())
    path = tmp_path / "a.zip"
    for content, message in (
        (whole[: len(whole) // 2], "is not a readable zip file"),
        (b"no zip", "is not a readable zip file"),
        (zipped(official(**{"test.zip": b"no zip"})), r"a\.zip/test\.zip is not a readable zip file"),
        (zipped({"a/readme.txt": "x"}), r"holds no dialogues_train\.txt"),
        (zipped(official(**{"more/train.zip": zipped(texts("train"))})), "twice"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            read_dialogues(str(path))
        assert str(path) in str(error.value)


def test_a_zip_file_writes_nothing_wherever_its_names_point(tmp_path):
    inner = {f"../../{name}": content for name, content in texts("train").items()}
    members = official(**{"train.zip": zipped(inner)}) | {"/outside.txt": "x", "../outside.txt": "x"}
    path = tmp_path / "in" / "a.zip"
    path.parent.mkdir()
    write_zip(path, members)
    assert list(read_dialogues(str(path))) == EXPECTED
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["a.zip"]


def test_a_zip_file_that_unpacks_to_more_than_is_allowed(tmp_path, monkeypatch):
    bomb = zipped({**texts("train"), "dialogues_train.txt": b"a" * 2**20})
    path = write_zip(tmp_path / "a.zip", official(**{"train.zip": bomb}))
    assert path.stat().st_size < 2**14
    monkeypatch.setattr(module, "MAX_BYTES", 2**19)
    with pytest.raises(ValueError, match=r"'dialogues_train\.txt' has more than 524,288 bytes"):
        read_dialogues(str(path))
    monkeypatch.setattr(module, "MAX_BYTES", 200)  # each of them fits, all together do not
    with pytest.raises(ValueError, match="its texts have more than 200 bytes"):
        read_dialogues(str(write_folder(tmp_path / "folder")))


def test_a_packing_that_grows_without_bound_is_refused(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("dialogues_train.txt", b"a" * 2**20)
    with pytest.raises(ValueError, match="is packed in a way that such files are not"):
        read_dialogues(str(path))


def test_the_known_faults_of_the_real_files(shared_data):
    args = DailyDialogArgs(destination_dir="x", tokenizer_name="x", keep_tokenization=True)
    found = Dialogues(read_dialogues(str(shared_data / "dailydialog")), args)
    # The notes beside the data: one line of train lacks a label; by letters and digits, 149 dialogues of test and 122
    # of validation are in train, some of them several times. Train has 11,118.
    keys = {split: {dialogue.key for dialogue in dialogues} for split, dialogues in found.dialogues.items()}
    assert not keys["train"] & (keys["validation"] | keys["test"])
    assert found.first_skipped == "train, dialogue 7,852: 12 utterances, 11 acts, 11 emotions"
    skipped = found.skipped["train"]
    assert skipped["dialogue with missing labels"] == 1
    assert sum(skipped.values()) + len(found.dialogues["train"]) == 11_118
    assert (len(found.dialogues["test"]), found.skipped["test"]) == (900, {})

    args = DailyDialogArgs(
        destination_dir="x", tokenizer_name="x", keep_tokenization=True, remove_overlap=False
    )  # fmt: skip
    both = Dialogues(read_dialogues(str(shared_data / "dailydialog")), args).dialogues
    train = {dialogue.key for dialogue in both["train"]}
    assert [sum(d.key in train for d in both[split]) for split in ("test", "validation")] == [149, 122]


def test_another_source_is_read_as_a_data_set(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        read_dialogues(str(tmp_path / "nothing.zip"))
    with pytest.raises(ValueError, match="holds no file"):
        read_dialogues(str(tmp_path))
