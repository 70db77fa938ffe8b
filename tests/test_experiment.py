import hashlib
import json
import shutil

import pytest

from rlhf_stages.args import SFTArgs
from rlhf_stages.experiment import (
    Experiment,
    describe,
    digest,
    parent_checkpoint,
    resolve_checkpoint,
    stage_name,
)

from helpers import make_tokenizer, save_causal


def create(directory, stage="sft", overwrite=False, **parents):
    arguments = {"train_args": SFTArgs(seed=7), "data_args": {"dataset": "toy"}}
    return Experiment.create(directory, describe(stage, arguments, {"a.pt": "12ab"}, parents), overwrite=overwrite)


def save(experiment, step, text="weights"):
    def write(folder):
        (folder / "config.json").write_text("{}")
        (folder / "adapter").mkdir()
        (folder / "adapter" / "model.safetensors").write_text(text)

    folder = experiment.checkpoints.publish(step, [write])
    experiment.point_to("latest", step)
    return folder


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# Writing


def test_args_json_says_what_the_run_is(tmp_path):
    parent = save_causal(tmp_path / "base")
    content = json.loads((create(tmp_path / "run", stage="rm", sft=parent).dir / "args.json").read_text())
    assert content["stage"] == "rm"
    assert (content["train_args"]["seed"], content["train_args"]["learning_rate"]) == (7, 1e-4)
    assert content["data_args"] == {"dataset": "toy"}
    weights = hashlib.sha256((parent / "model.safetensors").read_bytes()).digest()
    assert content["parents"] == {"sft": {"path": str(parent), "sha256": hashlib.sha256(weights).hexdigest()}}
    assert {"rlhf_stages", "torch", "transformers", "lightning"} <= set(content["versions"])


def test_the_digest_of_weights_that_are_not_safetensors(tmp_path):
    assert digest(tmp_path) == ""
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    (tmp_path / "training_args.bin").write_bytes(b"no weights")
    assert digest(tmp_path) == hashlib.sha256(hashlib.sha256(b"weights").digest()).hexdigest()


def test_an_existing_run_is_left_alone(tmp_path):
    experiment = create(tmp_path / "run")
    save(experiment, 1)
    before = files(experiment.dir)
    with pytest.raises(FileExistsError, match=r"run holds a run already; continue it with --resume, choose another"):
        create(tmp_path / "run")
    assert files(experiment.dir) == before


def test_overwrite_replaces_the_whole_run(tmp_path):
    experiment = create(tmp_path / "run")
    save(experiment, 1)
    experiment.finish({"steps": 1})
    create(tmp_path / "run", overwrite=True)
    assert files(experiment.dir) == ["args.json"]


def test_overwrite_of_a_run_whose_checkpoints_lie_elsewhere(tmp_path):
    experiment = create(tmp_path / "run")
    (tmp_path / "disk").mkdir()
    experiment.checkpoints.path(1).parent.rmdir()
    (experiment.dir / "checkpoints").symlink_to(tmp_path / "disk")
    save(experiment, 1)
    create(tmp_path / "run", overwrite=True)
    assert files(experiment.dir) == ["args.json"]


def test_a_resumed_run_leaves_hidden_files_of_others_alone(tmp_path):
    experiment = create(tmp_path / "run")
    save(experiment, 1)
    (experiment.dir / ".ipynb_checkpoints").mkdir()
    (experiment.dir / ".gitignore").write_text("*")
    (experiment.dir / ".latest.4711").write_text("step-0000")  # of a run that was killed
    experiment.cut_back(1)
    assert {path.name for path in experiment.dir.glob(".*")} == {".ipynb_checkpoints", ".gitignore"}


def test_overwrite_refuses_a_folder_that_is_no_experiment(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"is not an experiment folder \(no args\.json\), so it is not replaced"):
        create(tmp_path, overwrite=True)
    assert files(tmp_path) == ["thesis.txt"]


def test_an_empty_folder_is_used(tmp_path):
    assert create(tmp_path).dir == tmp_path


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(OSError, match="run"):
        create(tmp_path / "run")


def test_checkpoints_are_named_by_step_and_the_last_is_latest(tmp_path):
    experiment = create(tmp_path / "run")
    assert save(experiment, 5) == experiment.dir / "checkpoints" / "step-000005"
    save(experiment, 12)
    experiment.point_to("best", 5)
    assert (experiment.dir / "latest").read_text() == "step-000012\n"
    assert (experiment.dir / "best").read_text() == "step-000005\n"
    assert files(experiment.dir) == [
        "args.json",
        "best",
        "checkpoints/step-000005/adapter/model.safetensors",
        "checkpoints/step-000005/config.json",
        "checkpoints/step-000005/manifest.json",
        "checkpoints/step-000012/adapter/model.safetensors",
        "checkpoints/step-000012/config.json",
        "checkpoints/step-000012/manifest.json",
        "latest",
    ]


@pytest.mark.parametrize("error", [RuntimeError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", [1, 2])
def test_a_save_that_breaks_half_way_leaves_what_was_there(tmp_path, step, error):
    experiment = create(tmp_path / "run")
    save(experiment, 1, "old")
    before = files(experiment.dir)

    def write(folder):
        (folder / "config.json").write_text("half")
        raise error

    with pytest.raises(type(error)):
        experiment.checkpoints.publish(step, [write])
    assert files(experiment.dir) == before
    assert [path.name for path in (experiment.dir / "checkpoints").iterdir()] == ["step-000001"]
    checkpoint = resolve_checkpoint(experiment.dir)
    assert (checkpoint.name, (checkpoint / "adapter" / "model.safetensors").read_text()) == ("step-000001", "old")


def test_what_a_killed_save_left_behind_is_neither_read_nor_in_the_way(tmp_path):
    experiment = create(tmp_path / "run")
    save(experiment, 1)
    half = experiment.dir / "checkpoints" / ".step-000002"
    half.mkdir()
    (half / "junk").touch()
    assert resolve_checkpoint(experiment.dir).name == "step-000001"
    assert files(save(experiment, 2)) == ["adapter/model.safetensors", "config.json", "manifest.json"]
    assert not half.exists()


def test_the_same_step_again_replaces_its_checkpoint(tmp_path):
    experiment = create(tmp_path / "run")
    save(experiment, 1, "old")
    assert (save(experiment, 1, "new") / "adapter" / "model.safetensors").read_text() == "new"


def test_samples_are_lines_of_json(tmp_path):
    experiment = create(tmp_path / "run")
    for step in (1, 2):
        experiment.append("samples.jsonl", {"step": step, "prompt": "two\nlines", "response": "答案"})
    lines = (experiment.dir / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_digest_follows_the_weights(tmp_path):
    one, same, other = (save_causal(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert digest(one) == digest(same) != digest(other)


# Reading


def test_an_experiment_means_its_latest_checkpoint(tmp_path):
    experiment = create(tmp_path / "run")
    for step in (2, 10, 9):
        save(experiment, step)
    assert resolve_checkpoint(experiment.dir) == experiment.checkpoints.path(9)
    assert resolve_checkpoint(str(experiment.checkpoints.path(2))) == experiment.checkpoints.path(2)


def test_a_model_folder_means_itself(tmp_path):
    assert resolve_checkpoint(save_causal(tmp_path / "model")) == tmp_path / "model"


def test_a_moved_experiment_opens(tmp_path):
    save(create(tmp_path / "here" / "run"), 3)
    shutil.move(tmp_path / "here" / "run", tmp_path / "elsewhere")
    checkpoint, args = parent_checkpoint(tmp_path / "elsewhere", stage="sft", flag="--sft_experiment_dir")
    assert checkpoint == tmp_path / "elsewhere" / "checkpoints" / "step-000003"
    assert args["stage"] == "sft"


def test_missing_folder(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"--sft_experiment_dir=.*gone: no folder .*gone; expected an experiment"
    ):
        parent_checkpoint(tmp_path / "gone", stage="sft", flag="--sft_experiment_dir")


def test_a_folder_that_is_neither(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither an experiment \(no args\.json\) nor a model folder"):
        resolve_checkpoint(tmp_path)


def test_an_experiment_without_a_checkpoint(tmp_path):
    experiment = create(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="has no finished checkpoint yet; let its stage run to the first save"):
        resolve_checkpoint(experiment.dir)
    (experiment.dir / "latest").write_text("step-000009\n")  # a pointer to nothing
    with pytest.raises(FileNotFoundError, match="has no finished checkpoint yet"):
        resolve_checkpoint(experiment.dir)
    (experiment.dir / "latest").write_text("../../../elsewhere\n")
    with pytest.raises(FileNotFoundError, match="has no finished checkpoint yet"):
        resolve_checkpoint(experiment.dir)


def test_wrong_stage(tmp_path):
    save(create(tmp_path / "run", stage="rm"), 1)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-000001"):
        with pytest.raises(
            ValueError, match=rf"--sft_experiment_dir={path} is an experiment of stage 'rm', expected 'sft'"
        ):
            parent_checkpoint(path, stage="sft", flag="--sft_experiment_dir")


def test_a_link_to_a_checkpoint_is_that_checkpoint(tmp_path):
    folder = save(create(tmp_path / "run"), 1)
    (tmp_path / "chosen").symlink_to(folder)
    assert parent_checkpoint(tmp_path / "chosen", stage="sft", flag="--sft_experiment_dir")[0] == folder.resolve()


def test_a_model_folder_is_no_experiment(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not lie in an experiment folder"):
        parent_checkpoint(save_causal(tmp_path / "model"), stage="sft", flag="--sft_experiment_dir")


def test_damaged_args_json(tmp_path):
    experiment = create(tmp_path / "run")
    save(experiment, 1)
    (experiment.dir / "args.json").write_text("{")
    with pytest.raises(ValueError, match=r"args\.json is not valid JSON"):
        parent_checkpoint(experiment.dir, stage="sft", flag="--sft_experiment_dir")


def test_names_for_tables(tmp_path):
    paths = [
        save(create(tmp_path / name, stage=stage), 1) for name, stage in (("a", "sft"), ("b", "ppo"), ("c", "ppo"))
    ]
    names = []
    for path in paths:
        names.append(stage_name(path, taken=names))
    assert names == ["sft", "ppo", "ppo-2"]
    model = tmp_path / "my-model"
    model.mkdir()
    make_tokenizer().save_pretrained(model)
    assert stage_name(model) == "my-model"
