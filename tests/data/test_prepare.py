import json
from dataclasses import asdict

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_stages.args import TextDataArgs
from rlhf_stages.data import prepare as module
from rlhf_stages.data.prepare import prepare
from rlhf_stages.data.shards import open_shard
from rlhf_stages.data.sources import Example, SkipRecord
from rlhf_stages.data.tokenizer import encode_prompt, encode_response, load_tokenizer

EOS, BOS, PAD = 256, 257, 258


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """Folders of tokenizers without merges, so that a token is a byte; called with the special tokens to have."""

    def make(**special):
        path = tmp_path_factory.mktemp("tokenizer")
        vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<eos>", "<bos>", "<pad>"])
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
        return str(path)

    return make


@pytest.fixture(scope="module")
def tokenizer_path(byte_tokenizer):
    return byte_tokenizer(eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")


@pytest.fixture
def run(tmp_path, tokenizer_path):
    """Prepare records of {prompt, responses, key}, a reason in place of the prompt being one to skip."""

    def prepare_records(records, *, dataset="toy", folder="data", **changed):
        settings = {"tokenizer_name": tokenizer_path, "num_workers": 1, "stage_split": "1,0,0"} | changed
        if settings.get("stage", "finetune") != "finetune" and "stage_split" not in changed:
            settings["stage_split"] = {"preference": "0,1,0", "prompt": "0,0,1"}[settings["stage"]]
        args = TextDataArgs(destination_dir=str(tmp_path / folder), **settings)
        return prepare(
            args, dataset=dataset, records=records, to_example=to_example, example_prompt="Hi", chat_template="{{ 1 }}"
        )

    return prepare_records


def to_example(record):
    if "skip" in record:
        raise SkipRecord(record["skip"])
    key, ratings = record.get("key", record["prompt"]), record.get("ratings", ())
    return Example(record["prompt"], tuple(record["responses"]), key, ratings, record.get("metadata", {}))


def records(count, split="train", responses=("good", "bad"), prefix="prompt"):
    return [(split, {"prompt": f"{prefix} {n}", "responses": [f"{r} {n}" for r in responses]}) for n in range(count)]


def texts(path, tokenizer_path):
    """What a shard holds, as texts: [(prompt, response, ...)]."""
    tokenizer = load_tokenizer(tokenizer_path)
    return [
        tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in (record.prompt, *record.responses))
        for record in open_shard(path)
    ]


def shards(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.pt")}


def prompts_of(folder, stage, tokenizer_path):
    found = {}
    for split in ("train", "validation", "test"):
        path = folder / f"{stage}_{split}.pt"
        found[split] = {row[0] for row in texts(path, tokenizer_path)} if path.exists() else set()
    return found


def test_a_record_becomes_bos_prompt_and_response_eos(run, tmp_path):
    counts = run(
        [("train", {"prompt": "ab", "responses": ["c<eos>é"]})], test_percentage=0.0, validation_percentage=0.0
    )
    (record,) = open_shard(tmp_path / "data/finetune_train.pt")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert record.prompt.tolist() == [BOS, alphabet.index("a"), alphabet.index("b")]
    # <eos> in the text stays text, é is the bytes C3 A9, which byte-level BPE spells Ã ©.
    assert record.responses[0].tolist() == [*map(alphabet.index, "c<eos>Ã©"), EOS]
    assert record.truncated == (False,)
    assert counts == {
        "train": {"kept": 1, "truncated": 0, "skipped": {}},
        "validation": {"kept": 0, "truncated": 0, "skipped": {}},
        "test": {"kept": 0, "truncated": 0, "skipped": {}},
    }


def test_ids_are_those_of_the_tokenizer_helpers_and_decode_to_the_text(run, shared_data, tmp_path):
    name = str(shared_data / "models/stories260K")
    raw = [
        (
            "train",
            {"prompt": f"\n\nHuman: 你好 <s> {n}?\n\nAssistant:", "responses": [f" Once</s>  upon {n}", " a\ttime"]},
        )
        for n in range(300)
    ]
    run(raw, tokenizer_name=name, stage="preference", shuffle=False, test_percentage=0.0, validation_percentage=0.0)
    tokenizer = load_tokenizer(name)
    shard = open_shard(tmp_path / "data/preference_train.pt", responses=2)
    assert len(shard) == 300
    for record, (_, source) in zip(shard, raw, strict=True):
        assert record.prompt.tolist() == encode_prompt(tokenizer, source["prompt"])
        assert [r.tolist() for r in record.responses] == [encode_response(tokenizer, r) for r in source["responses"]]
    decoded = texts(tmp_path / "data/preference_train.pt", name)
    assert decoded == [(source["prompt"], *source["responses"]) for _, source in raw]


def test_a_long_response_is_cut_and_keeps_eos_and_a_long_prompt_is_dropped(run, tmp_path, tokenizer_path):
    # A token per character. BOS and 4 characters fit in 5, BOS and 5 do not; of 9, BOS + 4 leave 4 to response and EOS.
    rows = [("pppp", ["123", "4321"]), ("ppppp", ["123", "12"]), ("pp", ["12345", "543210"]), ("pq", ["1234567", "12"])]
    source = [("train", {"prompt": prompt, "responses": responses}) for prompt, responses in rows]
    limits = {"max_prompt_length": 5, "max_length": 9, "test_percentage": 0.0, "validation_percentage": 0.0}
    counts = run(source, stage="preference", shuffle=False, **limits)
    assert counts["train"] == {"kept": 3, "truncated": 3, "skipped": {"prompt too long": 1}}
    path = tmp_path / "data/preference_train.pt"
    assert texts(path, tokenizer_path) == [("pppp", "123", "432"), ("pp", "12345", "54321"), ("pq", "12345", "12")]
    assert [record.truncated for record in open_shard(path)] == [(False, True), (False, True), (True, False)]
    for record in open_shard(path):
        assert all(int(response[-1]) == EOS for response in record.responses)
        assert max(len(record.sequence(i)) for i in range(2)) <= 9


def test_pairs_that_only_differ_in_what_was_cut_off_are_dropped_and_counted(run, tmp_path, tokenizer_path):
    rows = [("pppp", ["123", "1234"]), ("pppp", ["1234", "124"]), ("ppp", ["12", "123"])]
    source = [("train", {"prompt": prompt, "responses": responses}) for prompt, responses in rows]
    limits = {"max_prompt_length": 5, "max_length": 9, "test_percentage": 0.0, "validation_percentage": 0.0}
    counts = run(source, stage="preference", shuffle=False, **limits)  # 3 tokens of a response fit after pppp
    assert counts["train"] == {"kept": 2, "truncated": 1, "skipped": {"same response when cut": 1}}
    path = tmp_path / "data/preference_train.pt"
    assert texts(path, tokenizer_path) == [("pppp", "123", "124"), ("ppp", "12", "123")]
    counts = run(source, stage="preference", shuffle=False, remove_same_responses=False, **limits)
    assert counts["train"]["kept"] == 3


def test_stages_are_disjoint_by_key_in_any_order_and_beside_any_data(run, tmp_path, tokenizer_path):
    source = records(300)
    for folder, order in (("one", ("finetune", "preference", "prompt")), ("two", ("prompt", "preference", "finetune"))):
        for stage in order:
            run(source, folder=folder, stage=stage, stage_split="1,1,2")
    found = {
        stage: prompts_of(tmp_path / "one", stage, tokenizer_path) for stage in ("finetune", "preference", "prompt")
    }
    sides = [prompts for splits in found.values() for prompts in splits.values()]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 300
    # Binomial: 300 x 1/4 = 75 +- 7.5 and 300 x 1/2 = 150 +- 8.7; four standard deviations.
    sizes = [sum(map(len, splits.values())) for splits in found.values()]
    assert 45 < sizes[0] < 105
    assert 45 < sizes[1] < 105
    assert 115 < sizes[2] < 185
    # 300 x 0.1 = 30 +- 5.2 to test, and 300 x 0.9 x 0.1 = 27 +- 5 to validation.
    assert 10 < sum(len(splits["test"]) for splits in found.values()) < 51
    assert 7 < sum(len(splits["validation"]) for splits in found.values()) < 47
    assert shards(tmp_path / "one") == shards(tmp_path / "two")

    # The same records beside others, in another order, go where they went.
    run([*records(40, prefix="other"), *reversed(source)], folder="three", stage_split="1,1,2")
    again = prompts_of(tmp_path / "three", "finetune", tokenizer_path)
    for split, prompts in found["finetune"].items():
        assert {prompt for prompt in again[split] if prompt.startswith("prompt")} == prompts


def test_another_seed_makes_other_splits(run, tmp_path, tokenizer_path):
    for seed in (1, 2):
        run(records(100), folder=str(seed), seed=seed, stage_split="1,1,0")
    one, two = (prompts_of(tmp_path / name, "finetune", tokenizer_path)["train"] for name in "12")
    assert one != two


def test_records_with_one_key_stay_together(run, tmp_path, tokenizer_path):
    source = [
        ("train", {"prompt": f"{key} turn {turn}", "responses": ["good"], "key": str(key)})
        for turn in range(5)
        for key in range(60)
    ]
    run(source, stage_split="1,1,0")
    splits = prompts_of(tmp_path / "data", "finetune", tokenizer_path)
    keys = [{prompt.split()[0] for prompt in prompts} for prompts in splits.values()]
    assert sum(map(len, keys)) == len(set.union(*keys))
    assert all(len(splits[name]) == 5 * len(keys[i]) for i, name in enumerate(splits))


def test_splits_of_a_source_with_train_and_test_are_kept(run, tmp_path, tokenizer_path):
    source = [*records(100, prefix="a"), *records(20, "test", prefix="b")]
    counts = run(source)
    splits = prompts_of(tmp_path / "data", "finetune", tokenizer_path)
    assert splits["test"] == {f"b {n}" for n in range(20)}
    assert splits["train"] | splits["validation"] == {f"a {n}" for n in range(100)}
    assert 1 <= counts["validation"]["kept"] <= 25  # 100 x 0.1

    run([*source, *records(5, "validation", prefix="c")], folder="own")
    splits = prompts_of(tmp_path / "own", "finetune", tokenizer_path)
    assert splits["validation"] == {f"c {n}" for n in range(5)}
    assert splits["train"] == {f"a {n}" for n in range(100)}


def test_a_source_without_train_is_pooled(run, tmp_path, tokenizer_path):
    run([*records(100, "test", prefix="a"), *records(100, "validation", prefix="b")])
    run(records(100, prefix="a") + records(100, prefix="b"), folder="train")
    for folder in ("data", "train"):
        splits = prompts_of(tmp_path / folder, "finetune", tokenizer_path)
        assert sum(map(len, splits.values())) == 200
        assert all(5 < len(splits[split]) < 40 for split in ("validation", "test"))
    assert shards(tmp_path / "data") == shards(tmp_path / "train")


def test_a_key_that_is_also_in_test_leaves_the_training_data(run, tmp_path, tokenizer_path):
    source = [*records(30), *records(40, "validation")[25:], *records(50, "test")[35:]]
    counts = run(source)
    splits = prompts_of(tmp_path / "data", "finetune", tokenizer_path)
    assert splits["train"] == {f"prompt {n}" for n in range(25)}
    assert splits["validation"] == {f"prompt {n}" for n in range(25, 35)}
    assert splits["test"] == {f"prompt {n}" for n in range(35, 50)}
    assert counts["train"]["skipped"] == {"also in validation": 5}
    assert counts["validation"]["skipped"] == {"also in test": 5}


def test_repeated_inputs_are_dropped_unless_asked_to_stay(run):
    rows = [("p", ["a", "x"]), ("p", ["b", "x"]), ("p", ["a", "y"]), ("q", ["a", "x"]), ("p", ["a", "x"])]
    rows = [(prompt, [2 * response for response in responses]) for prompt, responses in rows]
    source = [("train", {"prompt": prompt, "responses": responses}) for prompt, responses in rows]
    none = {"test_percentage": 0.0, "validation_percentage": 0.0}
    for stage, kept in (("finetune", 3), ("preference", 3), ("prompt", 2)):
        counts = run(source, stage=stage, folder=stage, **none)["train"]
        assert (counts["kept"], counts["skipped"]) == (kept, {"duplicate input": 5 - kept})
        assert run(source, stage=stage, folder=stage, remove_same_inputs=False, **none)["train"]["kept"] == 5


def test_equal_responses_stay_only_if_asked_to(run):
    source = records(40, responses=("same", "same")) + records(40, prefix="other")
    counts = run(source, stage="preference")
    assert sum(c["kept"] for c in counts.values()) == 40
    assert sum(c["skipped"].get("same response", 0) for c in counts.values()) == 40
    counts = run(source, stage="preference", remove_same_responses=False)
    assert sum(c["kept"] for c in counts.values()) == 80
    assert sum(c["kept"] for c in run(source, folder="sft").values()) == 80


def test_every_dropped_record_is_counted_and_listed_with_its_reason(run, tmp_path):
    source = [
        *records(20),
        ("train", {"skip": "missing chosen", "id": 7}),
        ("train", {"prompt": "empty", "responses": [" \n", "x"]}),
        ("train", {"prompt": "short 答", "responses": ["x"]}),
        ("train", {"prompt": "long" * 100, "responses": ["xx"]}),
        ("train", {"prompt": "half \ud83d of a pair", "responses": ["xx"]}),
        ("test", {"prompt": "fine", "responses": ["xx"]}),
        ("test", {"prompt": "fine", "responses": ["xx"]}),
    ]
    counts = run(source, save_skipped_examples=True, validation_percentage=0.0)
    assert counts["train"]["kept"] == 20
    assert counts["train"]["skipped"] == {
        "missing chosen": 1, "empty reply": 1, "too short": 1, "prompt too long": 1, "not text": 1
    }  # fmt: skip
    assert counts["test"] == {"kept": 1, "truncated": 0, "skipped": {"duplicate input": 1}}
    folder = tmp_path / "data"
    listed = json.loads((folder / "finetune_train_skipped.json").read_text(encoding="utf-8"))
    assert listed == [
        {"reason": "missing chosen", "raw": source[20][1]},
        {"reason": "empty reply", "raw": source[21][1]},
        {"reason": "too short", "prompt": "short 答", "responses": ["x"]},
        {"reason": "prompt too long", "prompt": "long" * 100, "responses": ["xx"]},
        {"reason": "not text", "raw": source[24][1]},
    ]
    assert json.loads((folder / "finetune_test_skipped.json").read_text()) == [
        {"reason": "duplicate input", "prompt": "fine", "responses": ["xx"]}
    ]
    assert not (folder / "finetune_validation_skipped.json").exists()
    run(source, validation_percentage=0.0)  # the lists of an earlier run would be wrong
    assert not list(folder.glob("*_skipped.json"))


def test_num_samples_counts_what_is_left_of_each_split(run, tmp_path, tokenizer_path):
    source = [
        ("train", {"skip": "bad"}),
        *records(50),
        *records(30, "test", prefix="t"),
        *records(3, "validation", prefix="v"),
    ]
    counts = run(source, num_samples=10)
    assert {split: c["kept"] for split, c in counts.items()} == {"train": 10, "validation": 3, "test": 10}
    assert counts["train"]["skipped"] == {"over num_samples": 40, "bad": 1}
    shuffled = [row[0] for row in texts(tmp_path / "data/finetune_train.pt", tokenizer_path)]
    run(source, num_samples=10, shuffle=False)
    assert [row[0] for row in texts(tmp_path / "data/finetune_train.pt", tokenizer_path)] == [
        f"prompt {n}" for n in range(10)
    ]
    assert not set(shuffled) <= {f"prompt {n}" for n in range(10)}  # drawn from all: 1 in 10^10 otherwise


def test_shuffling_changes_the_order_only(run, tmp_path, tokenizer_path):
    found = {}
    for name, settings in {"a": {}, "b": {}, "plain": {"shuffle": False}}.items():
        run(records(200), folder=name, **settings)
        found[name] = texts(tmp_path / name / "finetune_train.pt", tokenizer_path)
    assert found["a"] == found["b"] != found["plain"]
    assert sorted(found["a"]) == sorted(found["plain"])
    order = [int(prompt.split()[1]) for prompt, _ in found["plain"]]
    assert order == sorted(order)


def test_the_number_of_workers_changes_nothing(run, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(module, "CHUNK_SIZE", 16)
    source = records(150)
    for n in range(0, 150, 7):
        source[n] = ("train", [{"skip": "bad"}, {"prompt": "x" * 400, "responses": ["good", "bad"]}][n % 2])
    counts = [
        run(source, folder=str(workers), stage="preference", num_workers=workers, save_skipped_examples=True)
        for workers in (1, 2)
    ]
    assert counts[0] == counts[1]
    assert shards(tmp_path / "1") == shards(tmp_path / "2")
    names = sorted(path.name for path in (tmp_path / "1").glob("*.json"))
    assert "preference_train_skipped.json" in names
    for name in set(names) - {"args.json"}:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    assert "fork" not in capfd.readouterr().err


def test_prompt_shards_hold_prompts_alone(run, tmp_path):
    run([("train", {"prompt": f"p{n}", "responses": []}) for n in range(20)], stage="prompt")
    assert all(record.responses == () for record in open_shard(tmp_path / "data/prompt_train.pt"))


def test_rank_lists_keep_their_order(run, tmp_path, tokenizer_path):
    run(
        records(5, responses=("best", "good", "bad")),
        stage="preference",
        test_percentage=0.0,
        validation_percentage=0.0,
    )
    rows = texts(tmp_path / "data/preference_train.pt", tokenizer_path)
    assert sorted(rows) == [(f"prompt {n}", f"best {n}", f"good {n}", f"bad {n}") for n in range(5)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_metadata_stay_with_their_records(run, tmp_path, tokenizer_path, num_workers):
    rows = [{"prompt": f"prompt {n}", "responses": [f"reply {n}"], "metadata": {"n": n}} for n in range(600)]
    rows[3]["responses"] = ["x"]  # too short
    rows[4]["prompt"] *= 50  # too long
    run([("train", row) for row in rows], num_workers=num_workers)
    found = {}
    for path in (tmp_path / "data").glob("finetune_*.pt"):
        for (prompt, _), record in zip(texts(path, tokenizer_path), open_shard(path), strict=True):
            found[prompt] = record.metadata
    assert found == {f"prompt {n}": {"n": n} for n in range(600) if n not in (3, 4)}


def test_ratings_reach_the_shard_in_its_order(run, tmp_path):
    rows = [(f"prompt {n}", ["a", "b", "c"][: 2 + n % 2], (5.0 + n, 4.0, 1.5)[: 2 + n % 2]) for n in range(20)]
    source = [("train", {"prompt": p, "responses": r, "ratings": ratings}) for p, r, ratings in rows]
    run(source, stage="preference", minimum_response_length=1, test_percentage=0.0, validation_percentage=0.0)
    shard = open_shard(tmp_path / "data/preference_train.pt", rated=True)
    assert [record.ratings for record in shard] != [ratings for *_, ratings in rows]  # shuffled
    assert sorted(record.ratings for record in shard) == sorted(ratings for *_, ratings in rows)
    assert all(len(record.ratings) == len(record.responses) for record in shard)
    run(source, stage="finetune", minimum_response_length=1, test_percentage=0.0, folder="other")
    assert open_shard(tmp_path / "other/finetune_train.pt", rated=True)[0].ratings[0] >= 5.0


def test_the_folder_says_how_it_was_made(run, tmp_path, tokenizer_path):
    counts = run(records(40), stage_split="1,1,0", mask_prompt=False, ignore_index=-100)
    other = run(records(40), stage_split="1,1,0", stage="preference", max_length=300)
    manifest = json.loads((tmp_path / "data/args.json").read_text())
    assert manifest["dataset"] == "toy"
    assert manifest["chat_template"] == "{{ 1 }}"
    assert (manifest["mask_prompt"], manifest["ignore_index"]) == (False, -100)  # they speak of the finetune shards
    assert manifest["tokenizer"]["name"] == tokenizer_path
    assert manifest["tokenizer"]["vocab_size"] == 259
    assert [manifest["tokenizer"][f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [BOS, EOS, PAD]
    assert {stage: entry["counts"] for stage, entry in manifest["stages"].items()} == {
        "finetune": counts,
        "preference": other,
    }
    assert manifest["stages"]["preference"]["args"] == asdict(
        TextDataArgs(
            destination_dir=str(tmp_path / "data"), tokenizer_name=tokenizer_path, stage="preference", max_length=300,
            num_workers=1,
        )
    )  # fmt: skip
    example = torch.load(tmp_path / "data/example_prompt.pt", weights_only=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert example["prompt"] == "Hi"
    assert example["input_ids"].tolist() == [[BOS, alphabet.index("H"), alphabet.index("i")]]
    assert example["attention_mask"].tolist() == [[1, 1, 1]]
    assert example["input_ids"].dtype == torch.int64


def test_a_second_stage_leaves_the_first_as_it_is(run, tmp_path):
    run(records(100), stage_split="1,1,0")
    before = shards(tmp_path / "data")
    run(records(100), stage_split="1,1,0", stage="preference", num_samples=5)
    after = shards(tmp_path / "data")
    assert before.items() <= after.items()
    assert set(after) - set(before) == {f"preference_{split}.pt" for split in ("train", "validation", "test")}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 43}, "seed 42, now 43"),
        ({"stage_split": "1,2,0"}, "stage_split '1,1,0', now '1,2,0'"),
        ({"test_percentage": 0.2}, "test_percentage 0.1, now 0.2"),
        ({"dataset": "other"}, "dataset 'toy', now 'other'"),
        ({"tokenizer_name": "new"}, "with other ids"),
    ],
)
def test_a_folder_of_other_settings_is_refused(run, tmp_path, byte_tokenizer, changed, named):
    run(records(50), stage_split="1,1,0")
    before = shards(tmp_path / "data")
    if "tokenizer_name" in changed:
        changed = {"tokenizer_name": byte_tokenizer(eos_token="<eos>", pad_token="<pad>")}
    with pytest.raises(ValueError, match="another --destination_dir") as caught:
        run(iter(()), **({"stage_split": "1,1,0", "stage": "preference"} | changed))
    assert named in str(caught.value)
    assert shards(tmp_path / "data") == before


@pytest.mark.parametrize("content", ["{", "[]", '{"tokenizer_name": "x", "seed": 42}', '{"stages": {"finetune": 1}}'])
def test_a_folder_of_something_else_is_refused(run, tmp_path, content):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/args.json").write_text(content)
    with pytest.raises(ValueError, match=r"args\.json was not written by this version"):
        run(records(5))
    assert (tmp_path / "data/args.json").read_text() == content


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_fails_half_way_leaves_the_earlier_files(run, tmp_path, workers, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_SIZE", 16)
    run(records(100), stage_split="1,1,0")
    before = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}

    def broken():
        yield from records(100)
        raise ValueError("a.jsonl.gz is a broken gzip file")

    for stage in ("finetune", "preference"):
        with pytest.raises(ValueError, match="broken gzip"):
            run(broken(), stage_split="1,1,0", stage=stage, num_workers=workers)
    assert {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()} == before


def test_without_a_training_record_nothing_is_written(run, tmp_path):
    with pytest.raises(ValueError, match="no record is left to train on") as caught:
        run([("train", {"skip": "missing chosen"}), ("train", {"prompt": "a", "responses": [" "]})])
    assert "train: 1 missing chosen, 1 empty reply; validation: none; test: none" in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_a_split_that_came_out_empty_removes_its_older_file(run, tmp_path, capsys):
    run(records(100))
    assert (tmp_path / "data/finetune_validation.pt").exists()
    capsys.readouterr()
    counts = run(records(100), validation_percentage=0.0)
    assert not (tmp_path / "data/finetune_validation.pt").exists()
    assert counts["validation"]["kept"] == 0
    assert "validation: 0 kept; dropped: none" in capsys.readouterr().out


def test_the_summary_says_what_is_there_and_what_comes_next(run, tmp_path, capsys, tokenizer_path):
    # Two characters of prompt with BOS, and 2, 2, 4 of response with EOS: 6, 6 and 8 tokens.
    rows = [("aa", "xx"), ("bb", "xx"), ("cc", "xxxx"), ("dd", "")]
    source = [("train", {"prompt": prompt, "responses": [response]}) for prompt, response in rows]
    run(source, test_percentage=0.0, validation_percentage=0.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train: 3 kept, tokens median 6, max 8; dropped: 1 empty reply"
    command = f"python scripts/rlhf_sft.py --data_dir={tmp_path / 'data'} --model_name={tokenizer_path}"
    after = lines[lines.index("next:") + 1 :]
    assert " ".join(line.removesuffix("\\").strip() for line in after) == command


def test_tokenizers_that_lack_special_tokens(run, tmp_path, byte_tokenizer):
    everything = {"test_percentage": 0.0, "validation_percentage": 0.0}
    source = [("train", {"prompt": "ab", "responses": ["c"]})] * 2 + records(3)
    run(
        source, tokenizer_name=byte_tokenizer(eos_token="<eos>"), minimum_response_length=1, shuffle=False, **everything
    )
    record = open_shard(tmp_path / "data/finetune_train.pt")[0]
    assert (len(record.prompt), len(record.responses[0])) == (2, 2)  # no BOS; EOS
    manifest = json.loads((tmp_path / "data/args.json").read_text())["tokenizer"]
    assert manifest["bos_token_id"] is None
    assert manifest["pad_token_id"] not in (None, manifest["eos_token_id"])
    with pytest.raises(ValueError, match="no EOS token"):
        run(source, folder="none", tokenizer_name=byte_tokenizer(bos_token="<bos>"))
    with pytest.raises(ValueError, match="nowhere"):
        run(source, folder="none", tokenizer_name=str(tmp_path / "nowhere"))


def test_nothing_temporary_is_left(run, tmp_path):
    run(records(100), save_skipped_examples=True, num_samples=3)
    names = {path.name for path in (tmp_path / "data").iterdir()}
    splits = ("train", "validation", "test")
    expected = {f"finetune_{split}.pt" for split in splits} | {f"finetune_{split}_skipped.json" for split in splits}
    assert names == expected | {"args.json", "example_prompt.pt"}
