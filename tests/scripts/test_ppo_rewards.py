"""PPO with rewards of other kinds than a reward model, and with what users register."""

import json
import math

import pytest
import torch

from rlhf_stages import plugins
from rlhf_stages.experiment import resolve_checkpoint
from rlhf_stages.rewards import composite  # noqa: F401  # what it registers is there before each test

from conftest import ROOT
from helpers import read_metrics, run_stage

SHORT = [
    "--max_steps=2", "--rollout_size=8", "--rollout_mini_batch_size=4", "--mini_batch_size=4", "--micro_batch_size=2",
    "--max_new_tokens=6", "--log_interval=1", "--actor_learning_rate=1e-3",
]  # fmt: skip

SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")


@pytest.fixture(autouse=True)
def _own_registries():
    """What a test registers is gone after it."""
    before = [dict(registry) for registry in (plugins.REWARDS, plugins.METRICS, plugins.ACTORS, plugins.CRITICS)]
    yield
    registries = (plugins.REWARDS, plugins.METRICS, plugins.ACTORS, plugins.CRITICS)
    for registry, content in zip(registries, before, strict=True):
        registry.clear()
        registry.update(content)


def run_ppo(tiny_run, folder, *flags):
    return run_stage("ppo", folder, tiny_run.data, f"--sft_experiment_dir={tiny_run.sft}", *SHORT, *flags)


def values(folder, name):
    return [value for _, value in sorted(read_metrics(folder)[name].items())]


def test_no_reward_model_is_needed(tiny_run, tmp_path):
    folder = run_ppo(tiny_run, tmp_path, "--reward", "length=-0.5,unit=tokens", "--reward=repetition")
    assert values(folder, "reward/length_weight") == [-0.5, -0.5]
    expected = [
        -0.5 * length + repetition
        for length, repetition in zip(
            values(folder, "reward/length_mean"), values(folder, "reward/repetition_mean"), strict=True
        )
    ]
    assert values(folder, "train/reward_mean") == pytest.approx(expected, rel=1e-5)
    assert values(folder, "reward/length_mean") == pytest.approx(values(folder, "train/response_length"))
    assert all(map(math.isfinite, values(folder, "val/reward_length")))
    kept = json.loads((folder / "args.json").read_text())
    assert kept["rewards"]["length"]["options"] == {"unit": "tokens"}
    assert list(kept["parents"]) == ["sft"]


def test_a_part_without_weight_is_measured_and_changes_nothing(tiny_run, tmp_path):
    """Gold of the demo: the reward model alone, and with a part that nobody is paid for, are one run."""
    scorer = f"--rm_experiment_dir={tiny_run.rm}"
    alone = run_ppo(tiny_run, tmp_path / "alone", scorer)
    measured = run_ppo(tiny_run, tmp_path / "measured", scorer, "--reward", "gold=0,type=length")
    before, after = read_metrics(alone), read_metrics(measured)
    assert {name: after[name] for name in before} == before
    assert len(values(measured, "reward/gold_mean")) == 2
    assert len(values(measured, "val/reward_gold")) == 2  # before the first step, and at the end
    weights = [resolve_checkpoint(folder) / "model.safetensors" for folder in (alone, measured)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_validation_and_samples_count_each_part_as_it_is_paid(tiny_run, tmp_path):
    (tmp_path / "own.py").write_text(
        "def gold(responses): return [10.0 for _ in responses]\n"
        "def ones(tokens): return [[1.0] * len(row) for row in tokens]\n"
    )
    (tmp_path / "r.yaml").write_text(
        f"gold: {{type: '{tmp_path}/own.py:gold', weight: 0}}\n"
        f"ones: {{type: '{tmp_path}/own.py:ones', per_token: true, weight: {{0: 0.0, 2: 1.0}}}}\n"
    )
    rates = ["--actor_learning_rate=0", "--critic_learning_rate=0", "--eval_interval=1"]
    folder = run_ppo(tiny_run, tmp_path, f"--reward_config={tmp_path}/r.yaml", *rates)
    # the weight that the schedule ends in, whatever the step
    assert values(folder, "val/reward_mean") == pytest.approx(values(folder, "val/reward_ones"))
    logged = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    scores = {line["step"]: line["score"] for line in logged if line["name"] == "rollout_sample"}
    tokens = values(folder, "train/response_length")
    assert 0 < scores[1] <= 0.5 * 6  # half a point for each token, and nothing for gold
    assert 0 < scores[2] <= 6
    assert values(folder, "train/reward_mean") == pytest.approx([0.5 * tokens[0], tokens[1]])


def test_a_reward_model_may_stand_beside_others(tiny_run, tmp_path):
    folder = run_ppo(tiny_run, tmp_path, f"--rm_experiment_dir={tiny_run.rm}", "--reward", "length=0")
    assert values(folder, "train/reward_mean") == pytest.approx(values(folder, "reward/rm_mean"), rel=1e-5)
    assert list(json.loads((folder / "args.json").read_text())["parents"]) == ["sft", "rm"]


def test_references_and_metadata_reach_a_reward(tiny_run, tmp_path):
    log = tmp_path / "seen.jsonl"
    (tmp_path / "own.py").write_text(
        "import json\n"
        "def own(prompts, responses, references, metadata, tokens):\n"
        f"    with open({str(log)!r}, 'a') as file:\n"
        "        print(json.dumps([prompts, responses, references, metadata, tokens]), file=file)\n"
        "    return [0.0] * len(prompts)\n"
    )
    run_ppo(tiny_run, tmp_path, f"--reward={tmp_path}/own.py:own", "--num_return_sequences=2", "--self_check=False")
    prompts, responses, references, metadata, tokens = json.loads(log.read_text().splitlines()[0])
    assert prompts[0] == prompts[1] != prompts[2]  # two responses to each
    assert all(prompt.endswith("Assistant:") and prompt.startswith("Human:") for prompt in prompts)
    things = [prompt.split()[-2].rstrip(".") for prompt in prompts]
    assert all(thing in reference for thing, reference in zip(things, references, strict=True))
    assert metadata == [{}] * len(prompts)
    assert ["".join(piece for piece in row if piece not in SPECIAL) for row in tokens] == responses


@pytest.mark.parametrize("reward", ["return [1.0]", "return [float('nan')] * len(responses)", "raise KeyError('x')"])
def test_a_reward_that_fails_ends_the_run_with_nothing_half_saved(tiny_run, tmp_path, reward):
    (tmp_path / "own.py").write_text(
        "calls = []\n"
        "def own(responses):\n"
        "    calls.append(1)\n"
        f"    if len(calls) > 4:\n        {reward}\n"
        "    return [0.0] * len(responses)\n"
    )
    with pytest.raises(ValueError, match=r"reward 'own' (returned|failed).*; response \d was '"):
        run_ppo(tiny_run, tmp_path / "runs", f"--reward={tmp_path}/own.py:own", "--save_interval=1", "--max_steps=9")
    (folder,) = (tmp_path / "runs").glob("*/*/ppo")
    assert not (folder / "summary.json").exists()
    for checkpoint in (folder / "checkpoints").iterdir():
        assert (checkpoint / "manifest.json").is_file()


def test_the_examples_run(tiny_run, tmp_path):
    examples = ROOT / "examples"
    plain = run_ppo(
        tiny_run, tmp_path / "a", f"--plugins={examples}/custom_reward.py", f"--plugins={examples}/custom_metrics.py",
        "--reward", "polite=1", "concise=0.2,words=3", "--reward=no_shouting=1,per_token=true,fine=0.5",
    )  # fmt: skip
    assert {"mine/question_share", "reward/polite_std", "reward/concise_mean"} <= read_metrics(plain).keys()
    assert values(plain, "reward/concise_mean")[0] <= 0


@pytest.mark.parametrize(
    "flags",
    [["--critic_class=deep_critic"], ["--share_actor_critic", "--actor_class=deep_heads"]],
    ids=["own", "shared"],
)
def test_own_actor_and_critic_train_and_resume(tiny_run, tmp_path, flags):
    flags = [f"--plugins={ROOT}/examples/custom_model.py", "--reward=length", *flags, "--save_interval=1"]
    whole = run_ppo(tiny_run, tmp_path / "whole", *flags)
    part = run_ppo(tiny_run, tmp_path / "part", *flags)
    again = run_ppo(tiny_run, tmp_path / "part", *flags, "--resume=1")
    assert part == again
    for name in ("train/critic_loss", "train/actor_loss"):
        if name in read_metrics(whole):
            assert values(whole, name) == values(again, name)
    from safetensors.torch import load_file

    for file in resolve_checkpoint(whole).rglob("*.safetensors"):
        other = resolve_checkpoint(again) / file.relative_to(resolve_checkpoint(whole))
        one, two = load_file(file), load_file(other)
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert file.name == "model.safetensors" or "0.weight" in one  # the deeper head


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--actor_class=nobody", "--reward=length"], "no plugin of --plugins registers it"),
        (["--reward=nothing"], "no reward is called 'nothing'"),
        (["--reward=length", "--plugins=gone.py"], "no file gone.py"),
        (["--reward=classifier,model=nowhere/at/all,label=x"], "classifier"),
    ],
)
def test_what_is_not_there(tiny_run, tmp_path, flags, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_ppo(tiny_run, tmp_path, *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing gives a reward"),
        (["--reward=length", "--critic_init=rm"], "--critic_init=rm starts from"),
        (["--reward=length", "--standardize_rewards"], "--standardize_rewards is for"),
    ],
)
def test_flags_that_do_not_fit(tiny_run, tmp_path, flags, message, capsys):
    with pytest.raises(SystemExit):
        run_ppo(tiny_run, tmp_path, *flags)
    assert message in capsys.readouterr().err
