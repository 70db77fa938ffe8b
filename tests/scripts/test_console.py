"""What training runs print: lines of at most 100 columns, the time left, and at the end where everything is."""

import re

import pytest

from helpers import ROOT, run_stage, save_encoder, write_labelled

SHORT = ["--max_steps=2", "--log_interval=1"]
PPO = ["--rollout_size=8", "--rollout_mini_batch_size=4", "--mini_batch_size=8", "--micro_batch_size=2"]


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "ppo", "classifier"])
def test_a_run_fits_100_columns_and_ends_with_what_comes_next(stage, tiny_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # paths as people have them, and not those of a test's folders
    for name in ("data", "sft", "rm"):
        (tmp_path / name).symlink_to(getattr(tiny_run, name))
    data, flags = "data", {
        "sft": [f"--model_name={tiny_run.model}", "--max_new_tokens=4"],
        "rm": ["--sft_experiment_dir=sft"],
        "dpo": ["--sft_experiment_dir=sft", "--max_new_tokens=4"],
        "ppo": ["--sft_experiment_dir=sft", "--rm_experiment_dir=rm", "--max_new_tokens=4", *PPO],
        "classifier": [f"--model_name={save_encoder(tmp_path / 'bert')}"],
    }[stage]  # fmt: skip
    if stage == "classifier":
        data = write_labelled(tmp_path / "toy" / "tiny").relative_to(tmp_path)
    folder = run_stage(stage, "runs", data, *flags, *SHORT)
    output, bar = capsys.readouterr()
    bars = bar.replace("\r", "\n").split("\n")
    assert max(map(len, [*output.split("\n"), *bars])) <= 100
    assert any(re.search(r"\| 2/2 \[00:\d\d<00:00, ", line) for line in bars)
    # what is done is said with a place for each, and commands that start scripts of this project
    said = output[output.index("experiment  ") :].split("\n")
    listed = said[: said.index("to look at it:")]
    assert listed[0].split() == ["experiment", str(folder)]
    assert listed[1].split() == ["checkpoints/step-000002"]
    assert all((folder / line.strip()).exists() for line in listed[1:])
    scripts = re.findall(r"^  python (\S+)", "\n".join(said), re.MULTILINE)
    assert scripts[0] == "scripts/report.py"
    assert len(scripts) == 2
    assert all((ROOT / script).is_file() for script in scripts)
