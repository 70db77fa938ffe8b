"""Every way to run stage 3 that has code of its own, and that PPO learns what it is paid for."""

import math

import pytest
import torch
from torch import nn

from rlhf_stages import loop
from rlhf_stages.experiment import resolve_checkpoint
from rlhf_stages.models import loading
from rlhf_stages.models.actor_critic import ActorCritic
from rlhf_stages.models.forward import unwrap
from rlhf_stages.rollout import experience as rollout_experience

from helpers import make_tokenizer, read_metrics, run_stage, save_causal, write_data

SHORT = [
    "--max_steps=3", "--rollout_size=8", "--rollout_mini_batch_size=4", "--mini_batch_size=4", "--micro_batch_size=2",
    "--max_new_tokens=6", "--temperature=0.7", "--log_interval=1", "--actor_learning_rate=1e-3",
]  # fmt: skip


def run_ppo(tiny_run, folder, *flags, critic_rate=True):
    start = [f"--sft_experiment_dir={tiny_run.sft}", f"--rm_experiment_dir={tiny_run.rm}"]
    rate = ["--critic_learning_rate=1e-3"] if critic_rate else []
    return run_stage("ppo", folder, tiny_run.data, *start, *SHORT, *rate, *flags)


def finite(metrics):
    return all(math.isfinite(value) for column in metrics.values() for value in column.values())


@pytest.fixture
def trained(monkeypatch):
    """The models whose optimizer stepped, and the experiences, in order."""
    seen = {"models": [], "experience": []}
    step, make = loop.update, rollout_experience.make_experience

    def stepping(fabric, model, *rest):
        seen["models"].append(unwrap(model))
        return step(fabric, model, *rest)

    def making(*args, **more):
        seen["experience"].append(make(*args, **more))
        return seen["experience"][-1]

    monkeypatch.setattr(loop, "update", stepping)
    monkeypatch.setattr(rollout_experience, "make_experience", making)
    return seen


def weights(folder):
    from safetensors.torch import load_file

    return load_file(resolve_checkpoint(folder) / "model.safetensors")


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_self_check_speaks_before_the_first_update(tiny_run, tmp_path, capsys):
    run_ppo(tiny_run, tmp_path)
    output = capsys.readouterr().out
    assert "self-check\n  sampler and scorer: max |log-ratio| " in output
    assert "actor and reference: max |log-ratio| 0, mean KL 0" in output


def test_the_self_check_stops_a_run_whose_models_disagree(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "disable_dropout", lambda model: None)
    # the models of `tiny_run` have dropout: what is trained is not what was scored
    with pytest.raises(ValueError, match="self-check: the log-probabilities of scorer and update"):
        run_ppo(tiny_run, tmp_path / "a")
    run_ppo(tiny_run, tmp_path / "b", "--self_check=False")


@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_several_responses_and_no_critic(tiny_run, tmp_path, trained, estimator):
    flags = [f"--advantage_estimator={estimator}", "--num_return_sequences=2"]
    metrics = read_metrics(run_ppo(tiny_run, tmp_path, *flags, critic_rate=False))
    assert len(set(map(id, trained["models"]))) == 1  # nothing but the actor
    assert "train/critic_loss" not in metrics
    assert "info/explained_variance" not in metrics  # which a warning would come of
    assert finite(metrics)
    for experience in trained["experience"]:
        assert len(experience.rollout.scores) == 16
        first = experience.advantages[:, 0].reshape(-1, 2)
        assert (first[:, 0] + first[:, 1]).abs().max() < 1e-4  # of two responses one wins what the other loses
        spread = torch.where(experience.rollout.response_mask, experience.advantages - experience.advantages[:, :1], 0)
        assert not spread.any()


def test_one_response_is_no_group(tiny_run, tmp_path):
    with pytest.raises(ValueError, match="--advantage_estimator=rloo needs --num_return_sequences of at least 2"):
        run_ppo(tiny_run, tmp_path, "--advantage_estimator=rloo", critic_rate=False)


@pytest.mark.slow
def test_a_shared_trunk(tiny_run, tmp_path, trained):
    ppo = run_ppo(tiny_run, tmp_path, "--share_actor_critic", "--vf_coeff=0.5", critic_rate=False)
    (model,) = {id(model): model for model in trained["models"]}.values()
    assert isinstance(model, ActorCritic)
    assert model.value_head.weight.abs().sum() > 0
    assert not trained["experience"][0].rollout.values.any()  # the head starts at 0
    assert trained["experience"][2].rollout.values[:, 0].abs().min() > 0
    assert finite(read_metrics(ppo))
    assert weights(ppo).keys() == weights(tiny_run.sft).keys()  # the saved policy is a plain causal model


@pytest.mark.slow
def test_critic_warm_up_leaves_the_actor_bit_equal(tiny_run, tmp_path):
    ppo = run_ppo(tiny_run, tmp_path, "--critic_warmup_steps=2", "--save_interval=2")
    before, after = (ppo / "checkpoints" / f"step-{step:06d}" for step in (2, 3))
    assert same(weights(before), weights(tiny_run.sft))
    assert not same(weights(after), weights(tiny_run.sft))
    metrics = read_metrics(ppo)
    assert sorted(metrics["train/actor_loss"]) == [3]
    assert sorted(metrics["train/critic_loss"]) == [1, 2, 3]


@pytest.mark.slow
def test_a_critic_that_starts_from_the_actor(tiny_run, tmp_path, trained):
    run_ppo(tiny_run, tmp_path, "--critic_init=sft")
    assert not trained["experience"][0].rollout.values.any()
    assert trained["experience"][1].rollout.values.any()


@pytest.mark.slow
def test_updates_stop_early_at_a_large_kl(tiny_run, tmp_path, trained):
    many = ["--ppo_epochs=4", "--actor_learning_rate=1e-2"]
    run_ppo(tiny_run, tmp_path / "all", *many)
    every = len(trained["models"])
    assert every == 3 * 4 * 2 * 2  # steps, epochs, mini-batches, models
    trained["models"].clear()
    metrics = read_metrics(run_ppo(tiny_run, tmp_path / "early", *many, "--early_stop_kl=1e-4"))
    # the first update of a step finds the actor that sampled, and the second where that one took it
    assert len(trained["models"]) == 3 * 2 * 2
    assert max(metrics["info/approx_kl"].values()) > 1e-4


@pytest.mark.slow
def test_learning_rates_have_schedules_of_their_own(tiny_run, tmp_path, monkeypatch):
    rates = {}
    step = loop.update

    def stepping(fabric, model, optimizer, *rest):
        name = "actor" if hasattr(unwrap(model), "lm_head") else "critic"
        rates.setdefault(name, []).append(optimizer.param_groups[0]["lr"])
        return step(fabric, model, optimizer, *rest)

    monkeypatch.setattr(loop, "update", stepping)
    schedules = ["--actor_lr_schedule=linear", "--critic_lr_warmup_steps=1", "--mini_batch_size=8"]
    run_ppo(tiny_run, tmp_path, *schedules)
    # from 1e-3 over three steps down to the floor of 1e-6; and one step of warm-up at half the rate
    assert rates["actor"] == pytest.approx([1e-3, 5.005e-4, 1e-6])
    assert rates["critic"] == pytest.approx([5e-4, 1e-3, 1e-3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--normalize_values", "--value_loss=huber"],
        ["--entropy_coeff=0.01", "--kl_loss_coeff=0.1", "--kl_estimator=k3", "--init_kl_coeff=0"],
        ["--adaptive_kl_coeff", "--target_kl_coeff=6", "--kl_target_per=response", "--clip_coeff_high=0.28"],
        ["--adaptive_kl_coeff", "--kl_controller=error", "--init_kl_coeff=0.2", "--dual_clip=3", "--min_new_tokens=4"],
        ["--share_actor_critic", "--finetune_mode=lora", "--precision=bf16-mixed"],
    ],
)
def test_options_together(tiny_run, tmp_path, trained, flags):
    rate = "--share_actor_critic" not in flags
    ppo = run_ppo(tiny_run, tmp_path, *flags, "--ppo_epochs=2", critic_rate=rate)
    assert finite(read_metrics(ppo))
    assert not same(weights(ppo), weights(tiny_run.sft))
    if "--min_new_tokens=4" in flags:
        assert min(int(e.rollout.response_mask.sum(1).min()) for e in trained["experience"]) >= 4


# What it is paid for


class ShareOfSeven(nn.Module):
    """A reward model: the share of token 7 in the text behind the prompt of three tokens."""

    def forward(self, input_ids, attention_mask):
        """Scores (B, T)."""
        places = torch.arange(1, input_ids.shape[1] + 1)
        return (input_ids == 7).cumsum(1) / (places - 3).clamp(min=1)


@pytest.fixture(scope="module")
def sevens(tmp_path_factory):
    """Prompts of three tokens, a tiny Llama as SFT experiment, and a stand-in for the RM experiment."""
    folder = tmp_path_factory.mktemp("sevens")
    tokenizer = make_tokenizer()
    words = [tokenizer.decode([first, second]) for first in range(20, 40) for second in range(40, 60)]
    prompts = [word for word in words if len(tokenizer(word)["input_ids"]) == 2]
    data = write_data(
        folder / "toy" / "seven", tokenizer, prompt={"train": prompts[:160], "validation": prompts[160:192]}
    )
    write_data(
        data,
        tokenizer,
        finetune={"train": [(prompts[0], prompts[1])] * 4},
        preference={"train": [(prompts[0], prompts[1], prompts[2])] * 4},
    )
    model = save_causal(folder / "model", "llama", hidden_size=32, intermediate_size=64, initializer_range=0.1)
    sft = run_stage(
        "sft", folder, data, f"--model_name={model}", "--max_steps=1", "--learning_rate=0", "--max_new_tokens=2"
    )
    rm = run_stage("rm", folder, data, f"--sft_experiment_dir={sft}", "--max_steps=1")
    return data, sft, rm


def pay_for_sevens(sevens, folder, monkeypatch, seed, kl_coeff):
    data, sft, rm = sevens
    monkeypatch.setattr(loading, "load_scalar", lambda *args, **more: ShareOfSeven())
    ppo = run_stage(
        "ppo", folder, data, f"--sft_experiment_dir={sft}", f"--rm_experiment_dir={rm}", "--epochs=20",
        "--share_actor_critic", "--actor_learning_rate=1e-2", "--normalize_rewards=False",
        f"--init_kl_coeff={kl_coeff}",
        "--max_steps=30", "--rollout_size=64", "--rollout_mini_batch_size=64", "--mini_batch_size=64",
        "--micro_batch_size=64", "--max_new_tokens=8", "--log_interval=1", "--eval_iters=1", f"--seed={seed}",
    )  # fmt: skip
    return read_metrics(ppo)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ppo_learns_the_share_of_token_seven(sevens, tmp_path, monkeypatch, seed):
    metrics = pay_for_sevens(sevens, tmp_path / "free", monkeypatch, seed, kl_coeff=0.01)
    rewards = metrics["val/reward_mean"]
    assert rewards[30] > rewards[0] + 0.3
    bound = pay_for_sevens(sevens, tmp_path / "bound", monkeypatch, seed, kl_coeff=0.3)
    assert bound["val/kl_sequence"][30] < 0.5 * metrics["val/kl_sequence"][30]
