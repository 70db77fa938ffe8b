import json

import pytest

from rlhf_stages.models.start import check_model_name, starting_point


@pytest.fixture
def sft(tmp_path):
    """An SFT experiment with one checkpoint, made from the model `base`."""
    checkpoint = tmp_path / "sft" / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    (tmp_path / "sft" / "latest").write_text("step-000002\n")
    (tmp_path / "sft" / "args.json").write_text(json.dumps({"stage": "sft", "model_args": {"model_name": "base"}}))
    return tmp_path / "sft"


def test_a_model_name_alone_is_the_start():
    assert starting_point("base", sft=None) == ("base", {})


@pytest.mark.parametrize("name", [None, "base"])
def test_the_experiments_checkpoint_is_the_start(sft, name):
    checkpoint = sft / "checkpoints" / "step-000002"
    assert starting_point(name, sft=str(sft)) == (checkpoint, {"sft": checkpoint})
    assert starting_point(name, sft=str(checkpoint)) == (checkpoint, {"sft": checkpoint})


def test_nothing_to_start_from():
    with pytest.raises(ValueError, match=r"give --sft_experiment_dir .* or --model_name"):
        starting_point(None, sft=None)


def test_a_contradicting_model_name(sft):
    with pytest.raises(
        ValueError, match="--model_name=other contradicts --sft_experiment_dir, which was made from base"
    ):
        starting_point("other", sft=str(sft))


def test_an_experiment_without_a_model_name_contradicts_nothing():
    check_model_name("other", {"model_args": {"model_name": None}}, "--sft_experiment_dir")
    check_model_name("other", {}, "--sft_experiment_dir")
