"""The rewards and metrics of a PPO run, from its flags."""

from pathlib import Path

from lightning.fabric import Fabric
from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import ModelArgs, PPOArgs
from rlhf_stages.engines import engine_of
from rlhf_stages.experiment import parent_checkpoint
from rlhf_stages.models.forward import check_context
from rlhf_stages.models.scalar import reward_scale
from rlhf_stages.models.sharing import Backbone
from rlhf_stages.plugins import METRICS, call, where
from rlhf_stages.rewards.composite import Rewards, make_rewards
from rlhf_stages.rewards.learned import RewardContext, RewardModel
from rlhf_stages.rewards.spec import RewardSpec, read_specs
from rlhf_stages.rollout.collect import Rollout


def rewards_of_run(
    args: PPOArgs,
    model_args: ModelArgs,
    tokenizer: PreTrainedTokenizerBase,
    fabric: Fabric,
    longest: int,
    backbone: Backbone | None = None,
) -> tuple[Rewards, tuple[float, float], Path | None]:
    """The reward model of `--rm_experiment_dir`, called `rm`, and the parts of `--reward_config` and `--reward`.

    Args:
        longest: tokens of the longest prompt and response.
        backbone: what `--share_backbone` shares.

    Returns:
        Rewards; mean and deviation by which `--standardize_rewards` scales the scores; the reward model's checkpoint.

    Raises:
        ValueError, FileNotFoundError: a flag, a file or a model is not what it should be.
    """
    taken = ("sft", "rm") if args.rm_experiment_dir is not None else ("sft",)
    specs, checkpoint = read_specs(args.reward_config, args.reward, taken), None
    if args.rm_experiment_dir is not None:
        checkpoint, _ = parent_checkpoint(args.rm_experiment_dir, stage="rm", flag="--rm_experiment_dir")
        specs.insert(0, RewardSpec(name="rm", kind="reward_model", options={"path": str(checkpoint)}))
    shared = backbone if args.share_backbone == "all" else None
    rewards = make_rewards(specs, RewardContext(tokenizer, fabric.device, model_args, shared, args))
    for part in rewards.parts:
        if isinstance(part.reward, RewardModel):
            if part.reward.same_ids:  # else it cuts the texts that it encodes
                check_context(part.reward.model, longest, f"for the reward {part.spec.name!r} prompts and responses")
            part.reward.model = engine_of(fabric).divide(fabric, part.reward.model, args)
    if checkpoint is None:
        return rewards, (0.0, 1.0), None
    first: RewardModel = rewards.parts[0].reward
    if args.critic == "separate" and args.critic_start == "rm" and not first.same_ids:
        raise ValueError(
            f"the tokenizer of {checkpoint} is not that of --sft_experiment_dir: it can score texts, but the critic"
            " must read the actor's ids; pass --critic_init=sft"
        )
    return rewards, reward_scale(first.model) if args.standardize_rewards else (0.0, 1.0), checkpoint


def plugin_metrics(rollout: Rollout) -> dict[str, float]:
    """What the functions of `register_metrics` say about this device's rollout.

    Raises:
        ValueError: one of them fails, or returns anything but numbers by name.
    """
    found: dict[str, float] = {}
    for name, function in METRICS.items():
        try:
            numbers = call(function, RolloutView(rollout))
            found |= {str(key): float(value) for key, value in numbers.items()}
        except Exception as error:  # it is anybody's code
            raise ValueError(f"the metrics {name!r} failed: {where(error)}") from error
    return found


class RolloutView:
    """What a function of a rollout may ask for: the rollout, and its texts."""

    names = ("rollout", "prompts", "responses", "references", "metadata")

    def __init__(self, rollout: Rollout) -> None:
        self.rollout, samples = rollout, rollout.samples
        self.prompts, self.responses = samples.prompts, samples.responses
        self.references, self.metadata = samples.references, samples.metadata
