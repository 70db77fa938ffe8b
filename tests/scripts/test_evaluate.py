"""evaluate.py on lists of checkpoints, and on data of which there is little or nothing."""

import json
import math
import shutil

import pytest

from rlhf_stages.data.shards import ShardWriter, open_shard

from helpers import load_script, save_classifier


def evaluate(data, *flags):
    """What the script returns, without its replies."""
    common = [f"--data_dir={data}", "--num_prompts=5", "--max_new_tokens=4", "--mini_batch_size=3", "--accelerator=cpu"]
    return load_script("scripts/evaluate.py").main([*common, "--devices=1", "--bootstrap_samples=100", *flags])


def numbers_in(value):
    if isinstance(value, dict):
        return [number for entry in value.values() for number in numbers_in(entry)]
    return [value] if isinstance(value, float) else []


def test_policies_reward_models_and_the_base_model_side_by_side(tiny_run, tmp_path, capsys):
    other = save_classifier(tmp_path / "other-rm", seed=3)
    flags = [f"--markdown={tmp_path}/t.md", f"--output={tmp_path}/t.json", "--use_pretrained", "--experiment_dirs"]
    results = evaluate(tiny_run.data, *flags, *map(str, (tiny_run.sft, tiny_run.rm, other)))
    base, sft = results["summary"].values()
    assert list(results["summary"]) == ["base", "sft"]
    assert results["checkpoints"]["base"] == str(tiny_run.model)
    # the KL is to what was given, and not to what was added
    assert results["reference"] == "sft"
    assert sft["KL to the reference (nats)"]["value"] == 0 != base["KL to the reference (nats)"]["value"]
    assert sft["perplexity"]["value"] != base["perplexity"]["value"]
    assert sft["reward-model score"]["low"] <= sft["reward-model score"]["value"]
    accuracy = results["reward_accuracy"]
    assert {split: rows["all pairs"]["n"] for split, rows in accuracy.items()} == {
        "train": 24,
        "validation": 8,
        "test": 8,
    }
    assert list(accuracy["test"]["all pairs"]["share"]) == ["longer wins", "rm", "other-rm"]
    assert results["notes"] == []
    text, page = capsys.readouterr().out, (tmp_path / "t.md").read_text()
    assert max(map(len, text.split("\n\n")[1].splitlines())) <= 100
    for part in ("perplexity", "test: all pairs", "longer wins"):
        assert part in text
        assert part in page
    assert json.loads((tmp_path / "t.json").read_text())["reward_accuracy"] == accuracy


def test_the_named_reward_model_scores_and_the_first_of_the_list_where_none_is_named(tiny_run, tmp_path):
    other = save_classifier(tmp_path / "other-rm", seed=3)

    def rewards(*flags):
        found = evaluate(tiny_run.data, *flags, "--experiment_dirs", str(other), str(tiny_run.sft))
        return list(found["reward_accuracy"]["test"]["all pairs"]["share"])[1:], found["replies"]["sft"][0]["reward"]

    listed, named = rewards(), rewards(f"--rm_experiment_dir={tiny_run.rm}")
    assert (listed[0], named[0]) == (["other-rm"], ["rm", "other-rm"])
    assert listed[1] != named[1]


def test_a_base_model_is_listed_once(tiny_run):
    results = evaluate(tiny_run.data, "--use_pretrained", "--experiment_dirs", str(tiny_run.model), str(tiny_run.sft))
    assert list(results["summary"]) == ["model", "sft"]


def test_only_so_many_pairs(tiny_run):
    results = evaluate(tiny_run.data, "--num_pairs=5", f"--rm_experiment_dir={tiny_run.rm}")
    assert {rows["all pairs"]["n"] for rows in results["reward_accuracy"].values()} == {5}
    assert "summary" not in results


@pytest.fixture
def little(tiny_run, tmp_path):
    """A function that copies the data, with shards that are empty, hold their first record, or are gone."""

    def make(empty=(), single=(), gone=()):
        data = shutil.copytree(tiny_run.data, tmp_path / "data")
        for name in (*empty, *single):
            writer, first = ShardWriter(), open_shard(data / name)[0]
            if name in single:
                writer.add(first.prompt.tolist(), [response.tolist() for response in first.responses])
            writer.save(data / name)
        for name in gone:
            (data / name).unlink()
        return data

    return make


def test_splits_without_pairs_are_said_and_the_others_measured(little, tiny_run, capsys):
    data = little(["preference_test.pt"], ["preference_validation.pt"], ["preference_train.pt"])
    results = evaluate(data, f"--rm_experiment_dir={tiny_run.rm}", "--experiment_dirs", str(tiny_run.sft))
    assert results["notes"] == [
        f"no accuracy on train pairs: there is no {data}/preference_train.pt",
        f"accuracy on validation pairs: one record of {data}/preference_validation.pt says next to nothing of others",
        f"no accuracy on test pairs: {data}/preference_test.pt holds no records",
    ]
    assert list(results["reward_accuracy"]) == ["validation"]
    assert all(map(math.isfinite, numbers_in(results)))
    text = capsys.readouterr().out
    assert "holds no records" in " ".join(text.split())
    assert "nan" not in text


def test_no_prompts_leave_the_reward_model(little, tiny_run, capsys):
    data = little(empty=["finetune_test.pt"])
    results = evaluate(data, f"--rm_experiment_dir={tiny_run.rm}", "--experiment_dirs", str(tiny_run.sft))
    assert results["notes"] == [
        f"no {what}: {data}/finetune_test.pt holds no records" for what in ("replies", "perplexity")
    ]
    assert "summary" not in results
    assert results["reward_accuracy"]["test"]["all pairs"]["n"] == 8
    assert evaluate(data, "--experiment_dirs", str(tiny_run.sft))["notes"] == results["notes"]
    assert "nan" not in capsys.readouterr().out


def test_one_prompt_and_no_texts(little, tiny_run, capsys):
    """Prompts of their own; perplexity reads the fine-tuning data."""
    data = little(single=["finetune_train.pt"], empty=["finetune_test.pt"])
    for split in ("train", "test"):
        shutil.copy(tiny_run.data / "finetune_test.pt", data / f"prompt_{split}.pt")
    results = evaluate(data, "--num_prompts=1", "--experiment_dirs", str(tiny_run.sft), str(tiny_run.model))
    assert "perplexity" not in results["summary"]["sft"]
    assert set(results["summary"]["sft"]["mean length (tokens)"]) == {"value"}
    assert results["notes"] == [
        f"replies: one record of {data}/prompt_test.pt says next to nothing of others",
        f"no perplexity: {data}/finetune_test.pt holds no records",
    ]
    text = capsys.readouterr().out
    assert "1 held-out prompt (" in text
    assert "±" not in text
    assert "nan" not in text


def test_what_only_acts_on_policies(tiny_run, capsys):
    for flag in ("--use_pretrained", "--gold_score=a.py:b", "--suite=dialogue"):
        with pytest.raises(SystemExit):
            evaluate(tiny_run.data, f"--rm_experiment_dir={tiny_run.rm}", flag)
        assert "only act on policies: give --experiment_dirs" in capsys.readouterr().err


def test_what_has_no_checkpoint_or_learned_from_other_data_is_said_and_the_rest_compared(tiny_run, tmp_path, capsys):
    other = tmp_path / "other" / "sft"
    shutil.copytree(tiny_run.sft, other)
    args = json.loads((other / "args.json").read_text())
    args["data_args"]["dataset"] = "summaries"
    (other / "args.json").write_text(json.dumps(args))
    gone, begun = tmp_path / "gone", shutil.copytree(tiny_run.sft, tmp_path / "begun" / "sft")
    shutil.rmtree(begun / "checkpoints")
    with pytest.warns(UserWarning, match="has no finished checkpoint yet"):
        results = evaluate(tiny_run.data, "--experiment_dirs", *map(str, (gone, begun, tiny_run.sft, other)))
    assert list(results["summary"]) == ["sft", "sft-2"]
    assert results["notes"] == [
        f"left out: no folder {gone}; expected an experiment, one of its checkpoints, or a model folder",
        f"left out: {begun} has no finished checkpoint yet; let its stage run to the first save",
        "sft-2 comes from summaries; compared on toy: a difference may come from the data as much as from the training",
    ]
    assert "sft-2 comes from summaries; compared on toy" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(FileNotFoundError, match=r"no folder .*/gone; .*; .*/begun/sft has no finished checkpoint"):
        evaluate(tiny_run.data, "--experiment_dirs", str(gone), str(begun))
