import json
import os
import shutil

import pytest

from rlhf_stages.demo.choices import (
    PRETRAINED,
    Source,
    checkpoints_of,
    different_data,
    examples_of,
    find_experiments,
    settings_of,
    source_of,
)

TEMPLATE = "{{ messages[0]['content'] }} =>"


def experiment(folder, stage="sft", steps=(2, 10), latest=10, best=2, **content):
    """A folder as a stage leaves it, without weights."""
    args = {
        "stage": stage,
        "model_args": {"model_name": "some/base"},
        "data_args": {"chat_template": TEMPLATE},
        **content,
    }
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(args))
    for step in steps:
        checkpoint = folder / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text("{}")
        (checkpoint / "manifest.json").write_text(json.dumps({"files": {"config.json": {"size": 2, "sha256": ""}}}))
    for pointer, step in (("latest", latest), ("best", best)):
        (folder / pointer).write_text(f"step-{step:06d}\n")
    return folder


def test_experiments_are_found_newest_first_and_damage_hides_none(tmp_path):
    for age, (name, stage) in enumerate([("a/x/ppo", "ppo"), ("a/x/sft", "sft"), ("a/x/rm", "rm"), ("b/dpo", "dpo")]):
        file = experiment(tmp_path / name, stage) / "args.json"
        os.utime(file, (1e9 - age, 1e9 - age))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "args.json").write_text('{"stage": "sf')
    names = lambda *stages: [str(p.relative_to(tmp_path)) for p in find_experiments(tmp_path, stages)]  # noqa: E731
    assert names("sft", "ppo", "dpo") == ["a/x/ppo", "a/x/sft", "b/dpo"]
    assert names("rm") == ["a/x/rm"]
    assert find_experiments(tmp_path / "nowhere", ("sft",)) == []


def test_the_latest_checkpoint_comes_first_and_pretrained_last(tmp_path):
    folder = experiment(tmp_path / "d" / "n" / "sft", latest=2, best=10)
    assert checkpoints_of(str(folder)) == [
        ("step-000002 · latest", "step-000002"),
        ("step-000010 · best", "step-000010"),
        ("pretrained · some/base", PRETRAINED),
    ]
    (folder / "checkpoints" / "step-000010" / "config.json").write_text("{ }")
    assert ("step-000010 · best · damaged", "step-000010") in checkpoints_of(str(folder))
    assert checkpoints_of("some/hub-model") == [("as it is", "")]


def test_a_checkpoint_stands_for_its_folder_and_pretrained_for_what_the_stage_started_from(tmp_path):
    sft = experiment(tmp_path / "d" / "n" / "sft")
    step = sft / "checkpoints" / "step-000010"
    assert source_of(str(sft), "step-000010") == Source(str(step), None, "n sft step-000010")
    assert source_of(str(sft), PRETRAINED) == Source("some/base", TEMPLATE, "n sft pretrained")
    parents = {"sft": {"path": str(step), "sha256": ""}, "rm": {"path": "elsewhere", "sha256": ""}}
    ppo = experiment(tmp_path / "d" / "n" / "ppo", "ppo", parents=parents, model_args={"model_name": None})
    assert source_of(str(ppo), PRETRAINED) == Source(str(step), TEMPLATE, "n ppo pretrained")
    (tmp_path / "moved").mkdir()
    shutil.move(tmp_path / "d", tmp_path / "moved" / "d")
    moved = tmp_path / "moved" / "d" / "n"
    found = source_of(str(moved / "ppo"), PRETRAINED)  # what was beside it still is
    assert found.path == str((moved / "sft" / "checkpoints" / "step-000010").resolve())


def test_a_base_model_beside_moved_experiments_is_found(tmp_path, monkeypatch):
    folder = experiment(tmp_path / "experiments" / "d" / "n" / "sft", model_args={"model_name": "models/base"})
    (tmp_path / "models" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "experiments")
    assert source_of(str(folder), PRETRAINED).path == str(tmp_path / "models" / "base")


@pytest.mark.parametrize(("stage", "phrase"), [("rm", "is a reward model"), ("classifier", "is a classifier")])
def test_the_wrong_stage_is_refused_by_name(tmp_path, stage, phrase):
    folder = experiment(tmp_path / "d" / "n" / stage, stage)
    with pytest.raises(ValueError, match=f"{folder} {phrase}.*Expected an experiment of sft, dpo, ppo"):
        checkpoints_of(str(folder))


def test_what_is_not_there_is_said(tmp_path):
    folder = experiment(tmp_path / "d" / "n" / "sft")
    shutil.rmtree(folder / "checkpoints" / "step-000002")
    with pytest.raises(FileNotFoundError, match=r"has no step-000002.*it has step-000010, pretrained"):
        source_of(str(folder), "step-000002")
    for outside in ("..", "../checkpoints/step-000010", str(tmp_path)):
        with pytest.raises(FileNotFoundError, match="has no"):
            source_of(str(folder), outside)
    with pytest.raises(ValueError, match="no experiment is chosen"):
        source_of(" ", "")
    empty = experiment(tmp_path / "d" / "n" / "dpo", "dpo", steps=())
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet"):
        checkpoints_of(str(empty))


def test_runs_on_different_data_are_said(tmp_path):
    sft, ppo, other = (experiment(tmp_path / name, stage) for name, stage in
                       (("tea/n/sft", "sft"), ("tea/n/ppo", "ppo"), ("bikes/n/sft", "sft")))  # fmt: skip
    assert different_data([str(sft), str(other)]) == (
        "These are runs on different data (tea and bikes): the replies may differ for that alone."
    )
    assert different_data([str(sft), str(ppo)]) == different_data([str(sft), "some/hub-model"]) == ""


def test_settings_and_examples_are_those_of_the_run(tmp_path):
    settings = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 9, "stop_token": None}
    folder = experiment(tmp_path / "d" / "n" / "sft", gen_args=settings)
    two_turns = "\n\nHuman: one?\n\nAssistant: a\n\nHuman: two?\n\nAssistant:"
    prompts = [two_turns, "\n\nHuman: one?\n\nAssistant:", "plain\n"]
    lines = [{"step": i, "prompt": prompt, "response": "r"} for i, prompt in enumerate(prompts)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "pro')
    assert settings_of(str(folder)) == {"temperature": 0.5, "top_k": 7, "max_new_tokens": 9}
    assert examples_of(str(folder)) == ["one?", "plain"]
    assert settings_of("some/hub-model") == {}
    assert examples_of("some/hub-model") == []
