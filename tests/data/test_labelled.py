import json
from collections import Counter

import pytest

from rlhf_stages.args import ClassifierArgs
from rlhf_stages.data.collate import collate_labelled
from rlhf_stages.data.labelled import LabelledTexts, read_labelled, write_texts
from rlhf_stages.data.tokenizer import encode_whole

from helpers import make_tokenizer, write_labelled

WITHOUT = {"test_percentage": 0, "validation_percentage": 0}
pytestmark = pytest.mark.filterwarnings("ignore:no text for validation")


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(*pairs):
    return [{"text": text, "label": label} for text, label in pairs]


def read(path, **flags):
    return read_labelled(ClassifierArgs(source=str(path), **flags))


def by_name(data):
    """{split: [(text, name of its label)]}."""
    return {split: [(text, data.labels[i]) for text, i in texts] for split, texts in data.splits.items()}


def test_splits_and_labels_of_a_source(tmp_path):
    write(tmp_path / "sst" / "train.jsonl", rows(("a", "pos"), ("b", "neg"), ("c", "pos"), ("c", "pos")))
    write(tmp_path / "sst" / "dev.jsonl", rows(("d", "neg")))
    write(tmp_path / "sst" / "test.jsonl", rows(("e", "pos"), ("f", "neg")))
    data = read(tmp_path / "sst")
    assert (data.dataset, data.labels) == ("sst", ("neg", "pos"))
    assert by_name(data) == {
        "train": [("a", "pos"), ("b", "neg"), ("c", "pos"), ("c", "pos")],  # what comes twice stays so
        "validation": [("d", "neg")],
        "test": [("e", "pos"), ("f", "neg")],
    }
    assert data.raw["counts"]["train"] == {"kept": {"neg": 1, "pos": 3}, "dropped": {}}
    assert data.summary().splitlines()[0] == "train: 4 texts (1 neg, 3 pos); dropped: none"


def test_what_is_dropped_is_counted(tmp_path):
    write(tmp_path / "x" / "test.jsonl", rows(("both", "p"), ("both", "q"), ("t", "p"), ("t", "p")))
    write(tmp_path / "x" / "valid.jsonl", rows(("v", "p"), ("t", "p"), (" ", "p")))
    train = rows(("a", "p"), ("b", "q"), ("t", "q"), ("v", "p"), ("v", "q"), ("two", "p"), ("two", "q"), ("", "p"))
    train += [{"text": "a", "label": None}, {"text": 3, "label": "p"}, {"label": "p"}, {"text": "\ud800", "label": "p"}]
    write(tmp_path / "x" / "train.jsonl", [*train, {"text": "a", "label": ["p"]}, {"text": "b", "label": "  "}])
    with (tmp_path / "x" / "train.jsonl").open("a") as file:
        file.write("not json\n")
    data = read(tmp_path / "x")
    assert by_name(data) == {
        "train": [("a", "p"), ("b", "q")], "validation": [("v", "p")], "test": [("t", "p"), ("t", "p")]
    }  # fmt: skip
    assert {split: counts["dropped"] for split, counts in data.raw["counts"].items()} == {
        "train": {
            "no label": 3, "no text": 3, "two labels": 2, "also in validation": 2, "empty text": 1, "also in test": 1,
            "bad line": 1,
        },
        "validation": {"empty text": 1, "also in test": 1},
        "test": {"two labels": 2},
    }  # fmt: skip


def test_a_source_without_splits_is_split_by_text(tmp_path):
    texts = [f"text {i}" for i in range(400)]
    path = write(tmp_path / "one.jsonl", rows(*((t, str(i % 2)) for i, t in enumerate(texts + texts[:100]))))
    flags = {"validation_percentage": 0.25, "test_percentage": 0.25}
    data = read(path, **flags)
    sides = {split: {text for text, _ in pairs} for split, pairs in data.splits.items()}
    assert sum(map(len, sides.values())) == 400  # no text on two sides
    assert {split: len(pairs) for split, pairs in data.splits.items()} != {split: len(t) for split, t in sides.items()}
    # shares 0.25 of 400, and 0.25 of the rest: 100 and 75, standard deviations 8.7 and 7.8
    assert 70 < len(sides["test"]) < 130
    assert 48 < len(sides["validation"]) < 102
    assert read(path, **flags).splits == data.splits
    other = read(path, **flags, seed=1)
    assert {text for text, _ in other.splits["test"]} != sides["test"]
    more = write(tmp_path / "more.jsonl", rows(*((t, str(i % 2)) for i, t in enumerate([*texts, "x", "y"]))))
    assert sides["test"] <= {text for text, _ in read(more, **flags).splits["test"]}  # whatever else there is


def test_only_the_split_that_is_missing_is_made(tmp_path):
    pairs = [(f"text {i}", str(i % 2)) for i in range(100)]
    write(tmp_path / "x" / "train.jsonl", rows(*pairs[:80]))
    write(tmp_path / "x" / "test.jsonl", rows(*pairs[80:]))
    data = read(tmp_path / "x", validation_percentage=0.3)
    assert [text for text, _ in data.splits["test"]] == [text for text, _ in pairs[80:]]
    assert 10 < len(data.splits["validation"]) < 40
    with pytest.warns(UserWarning, match="no text for validation"):
        assert read(tmp_path / "x", validation_percentage=0).splits["validation"] == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3, 1, 20], ("1", "3", "20")),  # as numbers
        (["3", "-1", "20"], ("-1", "3", "20")),
        ([1.0, 0.0, 2.0], ("0", "1", "2")),  # as a table with gaps has them
        ([True, False], ("False", "True")),
        (["b", "B", "10", "9"], ("10", "9", "B", "b")),
    ],
)
def test_labels_of_any_kind_are_sorted_names(tmp_path, values, expected):
    path = write(tmp_path / "t.jsonl", rows(*((f"text {v}", v) for v in values)))
    data = read(path, **WITHOUT)
    assert data.labels == expected
    assert sorted(i for _, i in data.splits["train"]) == list(range(len(expected)))


def test_given_names_are_an_order_or_the_names_of_numbers(tmp_path):
    named = write(tmp_path / "n.jsonl", rows(("a", "no"), ("b", "yes")))
    numbered = write(tmp_path / "i.jsonl", rows(("a", 0), ("b", 1)))
    data = read(named, labels="yes,no,maybe", **WITHOUT)
    assert (data.labels, data.splits["train"]) == (("yes", "no", "maybe"), [("a", 1), ("b", 0)])
    data = read(numbered, labels="negative,positive", **WITHOUT)
    assert (data.labels, data.splits["train"]) == (("negative", "positive"), [("a", 0), ("b", 1)])
    with pytest.raises(ValueError, match="--labels=yes,oui names neither 'no' itself nor, as the number"):
        read(named, labels="yes,oui", **WITHOUT)
    path = write(tmp_path / "h.jsonl", rows(("a", 1), ("b", 2)))  # counted from 1: nothing is guessed
    with pytest.raises(ValueError, match="names neither '2' itself"):
        read(path, labels="negative,positive", **WITHOUT)


def test_labels_that_training_does_not_know(tmp_path):
    write(tmp_path / "x" / "train.jsonl", rows(("a", "p"), ("b", "q")))
    write(tmp_path / "x" / "test.jsonl", rows(("c", "r")))
    with pytest.raises(ValueError, match=r"the test texts have the label 'r', which no training text has \(p, q\)"):
        read(tmp_path / "x")
    assert read(tmp_path / "x", labels="p,q,r", **WITHOUT).splits["test"] == [("c", 2)]


def test_fewer_than_two_labels_or_far_too_many(tmp_path):
    one = write(tmp_path / "one.jsonl", rows(*((f"t{i}", "p") for i in range(9))))
    with pytest.raises(ValueError, match=r"the training texts have 1 label \(p\); there is nothing to tell apart"):
        read(one)
    many = write(tmp_path / "many.jsonl", rows(*((f"t{i}", i) for i in range(1500))))
    with pytest.raises(ValueError, match=r"--label_column=label holds 1,\d\d\d different values, more than 1,000"):
        read(many)


def test_columns_that_are_not_there(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"review": "a", "stars": 1}] * 2)
    wanted = r"has no labelled text \(2 no text\); --text_column=text --label_column=label, and the columns are review,"
    with pytest.raises(ValueError, match=wanted):
        read(path)
    with pytest.raises(ValueError, match="2 no label"):
        read(path, text_column="review")
    (tmp_path / "bad.jsonl").write_text("oh\n")
    with pytest.raises(ValueError, match=r"\(1 bad line\).*the columns are none; first bad line: .*line 1: not JSON"):
        read(tmp_path / "bad.jsonl")


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("is_valid", ["False", "True", "False"], ["train", "validation", "train"]),
        ("is_test", [0, 1, False], ["train", "test", "train"]),
        ("split", ["training", "dev", "TEST"], ["train", "validation", "test"]),
    ],
)
def test_a_column_that_says_the_split(tmp_path, column, values, expected):
    content = [{"text": f"text {i}", "label": i % 2, column: values[i % 3]} for i in range(6)]
    data = read(write(tmp_path / "x.jsonl", content), split_column=column, **WITHOUT)
    found = {text: split for split, pairs in data.splits.items() for text, _ in pairs}
    assert [found[f"text {i}"] for i in range(6)] == expected * 2


@pytest.mark.parametrize(("column", "value"), [("is_valid", "perhaps"), ("fold", 1), ("missing", None)])
def test_a_column_that_says_no_split(tmp_path, column, value):
    content = {"text": "a", "label": 1} | ({column: value} if value is not None else {})
    with pytest.raises(
        ValueError, match=rf"--split_column={column} is .* in a row; expected train, validation or test"
    ):
        read(write(tmp_path / "x.jsonl", [content]), split_column=column)


def test_a_prepared_folder(tmp_path):
    folder = write_labelled(tmp_path / "toy" / "tiny")
    write_labelled(folder, name="emotion", train=12)
    data = read_labelled(ClassifierArgs(data_dir=str(folder)))
    assert (data.dataset, data.labels) == ("toy", ("blame", "neither", "praise"))
    lines = [json.loads(line) for line in (folder / "act_test.jsonl").read_text().splitlines()]
    assert by_name(data)["test"] == [(line["text"], line["label"]) for line in lines]
    other = read_labelled(ClassifierArgs(data_dir=str(folder), label_kind="emotion"))
    assert 0 < len(other.splits["train"]) <= 12 < len(data.splits["train"])
    (folder / "args.json").write_text('{"dataset": "given"}')
    assert read_labelled(ClassifierArgs(data_dir=str(folder))).dataset == "given"
    (folder / "args.json").write_text('{"dataset": "../up"}')
    with pytest.raises(ValueError, match=r"dataset is '\.\./up', expected a name"):
        read_labelled(ClassifierArgs(data_dir=str(folder)))
    with pytest.raises(FileNotFoundError, match=r"no .*act_train\.jsonl; prepare the texts"):
        read_labelled(ClassifierArgs(data_dir=str(tmp_path)))


def test_a_split_of_no_texts_has_no_file(tmp_path):
    texts = {"train": [("好", "a"), ("x\ny", "b")], "validation": [("w", "b")], "test": []}
    write_texts(tmp_path, "act", {**texts, "test": [("of an earlier time", "a")]})
    write_texts(tmp_path, "act", texts)
    assert {path.name for path in tmp_path.iterdir()} == {"act_train.jsonl", "act_validation.jsonl"}
    data = read_labelled(ClassifierArgs(data_dir=str(tmp_path), test_percentage=0.0))
    assert by_name(data) == texts


def test_real_data(shared_data):
    """Sentences of SST-2 counted with cut, sort and uniq; the sample of IMDB has 800 reviews and 200 held out."""
    sst = read_labelled(
        ClassifierArgs(source=str(shared_data / "sst2"), columns="text,label", labels="negative,positive")
    )
    assert {split: len(texts) for split, texts in sst.splits.items()} == {
        "train": 6920 - 3, "validation": 872, "test": 1821
    }  # fmt: skip
    assert Counter(i for _, i in sst.splits["test"]) == {0: 912, 1: 909}
    imdb = read_labelled(ClassifierArgs(source=str(shared_data / "imdb_sample" / "texts.csv"), split_column="is_valid"))
    assert (imdb.dataset, imdb.labels, len(imdb.splits["validation"])) == ("imdb_sample", ("negative", "positive"), 200)
    assert len(imdb.splits["train"]) + len(imdb.splits["test"]) == 800
    assert any("<br />" in text for text, _ in imdb.splits["train"])
    hotels = read_labelled(
        ClassifierArgs(
            source=str(shared_data / "zh_sentiment" / "ChnSentiCorp_htl_all.csv"), text_column="review", seed=3
        )
    )
    assert sum(counts["dropped"].get("empty text", 0) for counts in hotels.raw["counts"].values()) == 1


# Encoded


def test_texts_as_batches(tmp_path):
    tokenizer = make_tokenizer()
    write(tmp_path / "x" / "train.jsonl", rows(("the bike is good", "p"), ("bad", "q"), ("so so", "p")))
    write(tmp_path / "x" / "test.jsonl", rows(("red", "q")))
    write(tmp_path / "x" / "dev.jsonl", rows(("blue", "q")))
    data = read(tmp_path / "x")
    train = data.encode("train", tokenizer, 4, batch=2)
    assert train.label_counts.tolist() == [2, 1]
    assert train.sizes == [(1, len(text.ids)) for text in map(train.__getitem__, range(3))]
    ids = [tokenizer(text)["input_ids"] for text in ("the bike is good", "bad", "so so")]
    assert [text.ids.tolist() for text in train] == [row[-4:] for row in ids]
    batch = collate_labelled([train[1], train[0]], pad_token_id=3)
    assert batch.labels.tolist() == [1, 0]
    assert batch.input_ids[batch.attention_mask].tolist() == [*ids[1][-4:], *ids[0][-4:]]
    assert batch.attention_mask.sum(1).tolist() == [min(len(ids[1]), 4), 4]


def test_fingerprint_tells_ids_labels_and_borders_apart():
    prints = {
        LabelledTexts("train", ids, labels, 2).fingerprint
        for ids, labels in (
            ([[1, 2], [3]], [0, 1]),
            ([[1], [2, 3]], [0, 1]),
            ([[1, 2], [3]], [1, 0]),
            ([[1, 2], [4]], [0, 1]),
        )
    }
    assert len(prints) == 4
    assert LabelledTexts("test", [[1, 2], [3]], [0, 1], 2).fingerprint in prints


def test_encoding_leaves_the_tokenizer_as_it_was(tmp_path):
    tokenizer = make_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    encode_whole(tokenizer, ["the bike is good"], 2)
    assert tokenizer.backend_tokenizer.to_str() == before
    assert tokenizer.truncation_side == "right"
