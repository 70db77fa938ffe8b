import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch

from rlhf_stages.cli import run
from rlhf_stages.data.dialogue import CHAT_TEMPLATE
from rlhf_stages.data.shards import open_shard
from rlhf_stages.data.sources import SkipRecord
from rlhf_stages.data.tokenizer import encode_prompt, encode_text, load_tokenizer

FOLDER = Path(__file__).resolve().parents[2] / "data_prep"
H, A = "\n\nHuman:", "\n\nAssistant:"


def load(name):
    spec = importlib.util.spec_from_file_location(f"prepare_{name}", FOLDER / name / "prepare_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def prepare(tmp_path, monkeypatch, shared_data):
    """Run a dataset's script with flags; the folder that it wrote."""
    tokenizer = shared_data / "models/stories260K"

    def call(name, *flags, stage="finetune"):
        argv = [f"--destination_dir={tmp_path / 'out'}", f"--tokenizer_name={tokenizer}", "--num_workers=1"]
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *argv, f"--stage={stage}", *flags])
        run(load(name).main)
        return tmp_path / "out"

    return call


def read(folder, stage="finetune"):
    """The texts of a shard's records, over all splits."""
    tokenizer = load_tokenizer(json.loads((folder / "args.json").read_text())["tokenizer"]["name"])
    return [
        tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in (record.prompt, *record.responses))
        for path in sorted(folder.glob(f"{stage}_*.pt"))
        for record in open_shard(path)
    ]


def counts(folder, stage="finetune"):
    return json.loads((folder / "args.json").read_text())["stages"][stage]["counts"]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


# ---- helpful_harmless


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {"prompt": f"{H} q{A}", "chosen": " yes ", "rejected": "no"},
            (f"{H} q{A}", (" yes", " no"), "q"),
        ),
        (
            {"prompt": f"{H} q{A} a{H} r{A} ", "selected": "yes\n", "rejected": "  no"},
            (f"{H} q{A} a{H} r{A}", (" yes", " no"), "q"),
        ),
        (
            {"chosen": f"{H} q{A} a{H} r{A}  yes", "rejected": f"{H} q{A} a{H} r{A} no"},
            (f"{H} q{A} a{H} r{A}", (" yes", " no"), "q"),
        ),
        (
            {"prompt": "a plain question?", "chosen": "yes"},
            (f"{H} a plain question?{A}", (" yes",), "a plain question?"),
        ),
        ({"prompt": f"{H} q{A}"}, (f"{H} q{A}", (), "q")),
    ],
)
def test_helpful_harmless_records(record, expected):
    example = load("helpful_harmless").to_example(record)
    assert (example.prompt, example.responses, example.key) == expected


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, "missing chosen"),
        ({"rejected": f"{H} q{A} a"}, "missing chosen"),
        ({"prompt": f"{H} q{A}", "rejected": "a"}, "missing chosen"),
        ({"chosen": f"{H} q{A} a"}, "missing rejected"),
        ({"chosen": f"{H} q{A} a", "rejected": f"{H} p{A} a"}, "no shared prompt"),
        ({"chosen": "plain", "rejected": "text"}, "no shared prompt"),
        ({"chosen": f"{H} q{A} a{A} b", "rejected": f"{H} q{A} c"}, "reply of several turns"),
        ({"prompt": f"{H} q{A}", "chosen": f"a{H} r", "rejected": "b"}, "reply of several turns"),
        ({"prompt": f"{H} q{A}", "chosen": 3, "rejected": "b"}, "not text"),
    ],
)
def test_helpful_harmless_records_that_are_skipped(record, reason):
    with pytest.raises(SkipRecord, match=f"^{reason}$"):
        load("helpful_harmless").to_example(record)


def test_real_dialogues_in_both_stages(prepare, shared_data):
    flags = (f"--source={shared_data / 'hh-rlhf'}", "--num_samples=60", "--max_length=256", "--max_prompt_length=128")
    prepare("helpful_harmless", *flags)
    folder = prepare("helpful_harmless", *flags, stage="preference")
    found = {stage: read(folder, stage) for stage in ("finetune", "preference")}
    first_turns = {
        stage: {row[0].split(H)[1].split(A)[0].strip() for row in rows} for stage, rows in found.items()
    }  # fmt: skip
    assert not first_turns["finetune"] & first_turns["preference"]
    for stage, rows in found.items():
        for split, of_split in counts(folder, stage).items():
            assert of_split["kept"] == 60 or (split != "train" and 20 < of_split["kept"] < 60)
            assert of_split["skipped"]["prompt too long"] > 0
        # Which stage they belong to is not known, so each reports all 14; empty are 7, of which only chosen ones count.
        skipped = counts(folder, stage)["train"]["skipped"]
        assert skipped["reply of several turns"] == 14
        assert skipped["empty reply"] == {"finetune": 4, "preference": 7}[stage]
        for prompt, *responses in rows:
            assert prompt.startswith(H)
            assert prompt.endswith(A)
            assert all(response.startswith(" ") and response[1] != " " for response in responses)
    manifest = json.loads((folder / "args.json").read_text())
    assert manifest["dataset"] == "helpful_harmless"
    assert manifest["chat_template"] == CHAT_TEMPLATE
    example = torch.load(folder / "example_prompt.pt", weights_only=True)
    assert example["prompt"].startswith(f"{H} ")
    assert example["prompt"].endswith(A)
    assert example["input_ids"].shape == example["attention_mask"].shape
    assert example["input_ids"].shape[0] == 1


def full_records(count):
    return [{"prompt": f"{H} Question {n}?{A}", "chosen": f" Yes {n}.", "rejected": f"No {n}."} for n in range(count)]


def test_the_hub_a_saved_dataset_and_parquet_give_the_same(prepare, tmp_path, monkeypatch):
    train, test = full_records(60), full_records(75)[60:]
    loaded = datasets.DatasetDict(train=datasets.Dataset.from_list(train), test=datasets.Dataset.from_list(test))
    loaded.save_to_disk(tmp_path / "saved")
    for name, rows in (("train-00000-of-00001.parquet", train), ("test-00000-of-00001.parquet", test)):
        (tmp_path / "parquet/data").mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "parquet/data" / name)
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name: asked.append(name) or loaded)
    found = []
    for flags in ((), (f"--source={tmp_path / 'saved'}",), (f"--source={tmp_path / 'parquet'}",)):
        folder = prepare("helpful_harmless", "--stage_split=0,1,0", *flags, stage="preference")
        found.append({path.name: path.read_bytes() for path in folder.glob("*.pt")})
        assert counts(folder, "preference")["test"]["kept"] == 15
    assert found[0] == found[1] == found[2]
    assert asked == ["Dahoas/full-hh-rlhf"]
    assert sorted(read(folder, "preference")) == sorted(
        (row["prompt"], row["chosen"], f" {row['rejected']}") for row in train + test
    )


def test_bad_input_is_counted_or_one_clear_error(prepare, tmp_path, capsys):
    bad = [
        {"prompt": f"{H} a{A}", "rejected": "no"},
        {"prompt": f"{H} b{A}", "chosen": " ", "rejected": "no"},
        {"prompt": f"{H} c{A}", "chosen": "same", "rejected": " same "},
        {"prompt": H + " long" * 300 + A, "chosen": "yes", "rejected": "no"},
    ]
    write_jsonl(tmp_path / "data.jsonl", full_records(40) + bad)
    with (tmp_path / "data.jsonl").open("ab") as file:
        file.write(b'{"prompt": "\xff"}\n{"prompt": \n')
    flags = ("--stage_split=1,1,0", "--test_percentage=0", "--validation_percentage=0")
    all_preferences = ("--stage_split=0,1,0", *flags[1:], f"--source={tmp_path / 'data.jsonl'}")
    folder = prepare("helpful_harmless", *all_preferences, stage="preference")
    assert counts(folder, "preference")["train"] == {
        "kept": 40,
        "truncated": 0,
        "skipped": {"bad line": 2, "missing chosen": 1, "empty reply": 1, "same response": 1, "prompt too long": 1},
    }
    assert f"first bad line: {tmp_path / 'data.jsonl'}, line 45: not UTF-8" in capsys.readouterr().out

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "broken.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00 broken")
    for flags, named in (
        ((f"--source={tmp_path / 'broken.jsonl.gz'}",), "broken gzip"),
        ((f"--source={tmp_path / 'nowhere.jsonl'}",), "no such file or folder"),
        ((f"--source={tmp_path / 'data.jsonl'}", "--seed=1"), "seed 42, now 1"),
        ((f"--source={tmp_path / 'data.jsonl'}", "--max_prompt_length=3"), "no record is left to train on"),
    ):
        with pytest.raises(SystemExit) as caught:
            prepare("helpful_harmless", "--stage_split=0,1,0", "--test_percentage=0", *flags, stage="preference")
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert named in error
        assert error.count("\n") == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# ---- summarization


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {"prompt": "SUBREDDIT: r/a\nPOST: b\n", "chosen": "TL;DR: yes", "rejected": "no "},
            ("SUBREDDIT: r/a\nPOST: b\nTL;DR:", (" yes", " no")),
        ),
        ({"prompt": "POST: b\n\nTL;DR: ", "selected": "yes"}, ("POST: b\nTL;DR:", (" yes",))),
        ({"prompt": "POST: b"}, ("POST: b\nTL;DR:", ())),
    ],
)
def test_summarization_records(record, expected):
    example = load("summarization").to_example(record)
    assert (example.prompt, example.responses) == expected
    assert example.key == example.prompt


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"chosen": "a", "rejected": "b"}, "missing prompt"),
        ({"prompt": " ", "chosen": "a", "rejected": "b"}, "empty prompt"),
        ({"prompt": "a", "rejected": "b"}, "missing chosen"),
        ({"prompt": ["a"], "chosen": "a"}, "not text"),
    ],
)
def test_summarization_records_that_are_skipped(record, reason):
    with pytest.raises(SkipRecord, match=f"^{reason}$"):
        load("summarization").to_example(record)


def test_real_summaries(prepare, shared_data):
    source = shared_data / "tldr_comparisons/comparisons.jsonl"
    flags = (f"--source={source}", "--max_length=2048", "--max_prompt_length=1900", "--remove_same_inputs=False")
    folder = prepare("summarization", *flags, "--stage_split=0,1,0", stage="preference")
    records = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    assert sorted(read(folder, "preference")) == sorted(
        (f"{r['prompt'].strip()}\nTL;DR:", f" {r['chosen'].strip()}", f" {r['rejected'].strip()}") for r in records
    )
    manifest = json.loads((folder / "args.json").read_text())
    assert manifest["dataset"] == "summarization"

    tokenizer = load_tokenizer(manifest["tokenizer"]["name"])
    tokenizer.chat_template = manifest["chat_template"]
    messages = [{"role": "user", "content": "POST: old"}, {"role": "assistant", "content": "x"}]
    messages.append({"role": "user", "content": "POST: new"})
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert rendered == encode_prompt(tokenizer, "POST: new\nTL;DR:")
    assert tokenizer.apply_chat_template(messages[:2], tokenize=False) == "<s>POST: old\nTL;DR: x"


def test_the_first_validation_split_of_the_hub_is_used_and_the_second_left_out(prepare, monkeypatch):
    def split(name, count):
        rows = [{"prompt": f"POST: {name} {n}", "chosen": f"yes {n}", "rejected": "no"} for n in range(count)]
        return datasets.Dataset.from_list(rows)

    sizes = {"train": 20, "valid1": 5, "valid2": 6, "test": 7}
    loaded = datasets.DatasetDict({name: split(name, count) for name, count in sizes.items()})
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name: asked.append(name) or loaded)
    folder = prepare("summarization", "--stage_split=1,0,0")
    assert asked == ["CarperAI/openai_summarize_comparisons"]
    kept = {name: of_split["kept"] for name, of_split in counts(folder).items()}
    assert kept == {"train": 20, "validation": 5, "test": 7}


# ---- daily_dialog


def write_dialogues(folder, dialogues):
    """The official text files; each split has the same dialogues with its name in front, all of act 2, emotion 4."""
    for split in ("train", "validation", "test"):
        files = {"": [], "act_": [], "emotion_": []}
        for texts in dialogues:
            files[""].append("".join(f"{split} {text} __eou__ " for text in texts))
            files["act_"].append("2 " * len(texts))
            files["emotion_"].append("4 " * len(texts))
        (folder / split).mkdir(parents=True)
        for kind, lines in files.items():
            (folder / split / f"dialogues_{kind}{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


DIALOGUES = [
    ["Hi , Bob .", "Hi !", "How are you ?", "Fine , and you ?", "Not bad .", "Good .", "Bye ."],
    ["Yes ?", "No ."],
]


def test_prompts_are_bos_and_the_ids_of_each_utterance_and_the_separator(prepare, tmp_path, shared_data):
    source = write_dialogues(tmp_path / "source", DIALOGUES)
    folder = prepare("daily_dialog", f"--source={source}", "--shuffle=False")
    assert {split: of_split["kept"] for split, of_split in counts(folder).items()} == dict.fromkeys(
        ("train", "validation", "test"), 7
    )
    tokenizer = load_tokenizer(str(shared_data / "models/stories260K"))
    texts = [f"test {t}" for t in ("Hi, Bob.", "Hi!", "How are you?", "Fine, and you?", "Not bad.", "Good.", "Bye.")]
    newline = tokenizer.convert_tokens_to_ids("<0x0A>")
    shard = open_shard(folder / "finetune_test.pt", responses=1)
    for place, record in zip(range(1, 7), shard, strict=False):
        expected = [1]
        for text in texts[max(0, place - 5) : place]:
            expected += [*encode_text(tokenizer, text), newline]
        assert record.prompt.tolist() == expected
        assert record.responses[0].tolist() == [*encode_text(tokenizer, texts[place]), 2]
        assert record.metadata == {"act": "question", "emotion": "happiness", "last_turn": texts[place - 1]}
    example = torch.load(folder / "example_prompt.pt", weights_only=True)
    assert (example["input_ids"][0] == newline).nonzero().flatten().tolist()[-1] == example["input_ids"].shape[1] - 1
    assert json.loads((folder / "args.json").read_text())["dataset"] == "daily_dialog"


def test_the_oldest_utterances_leave_until_the_prompt_fits(prepare, tmp_path):
    source = write_dialogues(tmp_path / "source", DIALOGUES)
    whole = prepare("daily_dialog", f"--source={source}", "--shuffle=False")
    longest = list(open_shard(whole / "finetune_test.pt"))[4].prompt.tolist()  # five utterances
    ends = [i for i, token in enumerate(longest) if token == 13]
    assert len(ends) == 5
    room = len(longest) - ends[0]  # BOS and all but the first utterance, exactly
    for limit, kept_from in ((room, ends[0]), (room - 1, ends[1])):
        for path in whole.iterdir():
            path.unlink()
        flags = (f"--max_prompt_length={limit}", "--shuffle=False")
        prompt = list(open_shard(prepare("daily_dialog", f"--source={source}", *flags) / "finetune_test.pt"))[4].prompt
        assert prompt.tolist() == [1, *longest[kept_from + 1 :]]


def test_the_hub_a_saved_dataset_and_the_official_files_give_the_same(prepare, tmp_path, monkeypatch):
    source = write_dialogues(tmp_path / "source", DIALOGUES)
    splits = {
        split: datasets.Dataset.from_list(
            [
                {"dialog": [f"{split} {t} " for t in texts], "act": [2] * len(texts), "emotion": [4] * len(texts)}
                for texts in DIALOGUES
            ]
        )
        for split in ("train", "validation", "test")
    }
    loaded = datasets.DatasetDict(splits)
    loaded.save_to_disk(tmp_path / "saved")
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name: asked.append(name) or loaded)
    found = []
    for flags in ((), (f"--source={tmp_path / 'saved'}",), (f"--source={source}",)):
        folder = prepare("daily_dialog", *flags)
        prepare("daily_dialog", *flags, stage="classify")
        found.append({path.name: path.read_bytes() for path in folder.glob("*_*.*")})
        assert len(found[-1]) == 10
    assert found[0] == found[1] == found[2]
    assert asked == ["daily_dialog"] * 2
    rows = [json.loads(line) for line in (folder / "act_test.jsonl").read_text().splitlines()]
    assert {"text": "test Yes?\ntest No.", "label": "question"} in rows
    assert len(rows) == 7


def test_a_separator_that_is_no_token_is_refused_with_one_that_is(prepare, tmp_path, capsys):
    source = write_dialogues(tmp_path / "source", DIALOGUES)
    with pytest.raises(SystemExit):
        prepare("daily_dialog", f"--source={source}", "--turn_separator= <EOU> ")
    error = capsys.readouterr().err
    assert "error: --turn_separator ' <EOU> ' is not one token" in error
    assert "pass '\\n' or " in error
    assert not list((tmp_path / "out").glob("*.pt"))


# ---- all


@pytest.mark.parametrize("name", ["helpful_harmless", "summarization", "daily_dialog"])
def test_help_needs_no_heavy_import(name):
    script = FOLDER / name / "prepare_data.py"
    code = f"""
import runpy, sys
sys.argv = ["prepare_data.py", "--help"]
try:
    runpy.run_path({str(script)!r}, run_name="__main__")
finally:
    assert not {{"torch", "transformers", "datasets"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "--destination_dir" in done.stdout
