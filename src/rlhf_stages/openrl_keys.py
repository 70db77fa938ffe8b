"""The table of OpenRL's configuration keys, both generations of them; docs/from-openrl.md explains each row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# what OpenRL has in code and not in its files: tokens of a reply, and environments of its train_ppo.py
_REPLY_TOKENS, _ENVIRONMENTS = 20, 10
# rows that are generated at a time, if nobody says
_GENERATION_BATCH = 32
# of OpenRL's NLPReward: KL coefficient and its controller, and scores that are taken as they are
_NLP_REWARD = ["init_kl_coeff=0.2", "target_kl_coeff=0.05", "adaptive_kl_coeff=True", "kl_controller=error"]
_NLP_REWARD += ["normalize_rewards=False"]


@dataclass(frozen=True)
class Context:
    """What a key's meaning may depend on: OpenRL's keys, the flags in the same file, those of the command line."""

    keys: Mapping[str, Any]
    flags: Mapping[str, Any]
    given: Mapping[str, Sequence[str]]

    def flag(self, name: str, default: Any) -> Any:
        """The value of a flag: the command line's, else the file's, else `default`."""
        if self.given.get(name):
            return self.given[name][-1]
        value = self.flags.get(name)
        return default if value is None else value

    @property
    def shares(self) -> bool:
        """Whether actor and critic are one network."""
        name = "share_actor_critic"
        if f"no_{name}" in self.given:
            return False
        if self.given.get(name) == []:
            return True
        return str(self.flag(name, self.keys.get("use_share_model", False))).lower() in ("true", "1", "yes")


# the tokens that a value becomes; None: it has no effect here
Tokens = Callable[[Any, Context], "list[str] | None"]


@dataclass(frozen=True)
class Key:
    """A key of OpenRL.

    Attributes:
        flags: the flags that it may set.
        tokens: how; None: it is a flag of the same name.
        renames: it is another name of its one flag, and nothing else.
    """

    flags: tuple[str, ...] = ()
    tokens: Tokens | None = None
    renames: bool = False


# Kinds of keys


def _flag(name: str) -> Key:
    """A flag of the same name."""
    return Key((name,))


def _renamed(name: str) -> Key:
    """Another name of a flag."""
    return Key((name,), lambda value, _: [f"--{name}={value}"], renames=True)


def _switch(on: Sequence[str] = (), off: Sequence[str] = ()) -> Key:
    """True and false stand for settings; those of the critic are left out where it has none of its own."""

    def tokens(value: Any, context: Context) -> list[str]:
        settings = on if _is_true(value) else off
        return [f"--{s}" for s in settings if not (context.shares and s.startswith("critic_"))]

    return Key(tuple(dict.fromkeys(setting.partition("=")[0] for setting in (*on, *off))), tokens)


def _nothing(why: str = "", *fine: Any) -> Key:
    """No effect; where `why` says why, other values than those that are `fine` are an error."""

    def tokens(value: Any, _: Context) -> None:
        if why and value not in fine:
            raise ValueError(f"{value!r} {why}")

    return Key((), tokens)


def _is_true(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {value!r}")
    return value


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is a whole number above 0, got {value!r}")
    return value


# Keys that need more than a line


def _rollout(value: Any, context: Context) -> list[str]:
    """episode_length * env_num tokens, in responses of max_new_tokens."""
    reply = int(context.flag("max_new_tokens", _REPLY_TOKENS))
    environments = _whole("env_num", context.keys.get("env_num") or _ENVIRONMENTS)
    responses = max(1, round(_whole("episode_length", value) * environments / max(reply, 1)))
    size = int(context.flag("rollout_size", responses))
    first = [f"--max_new_tokens={reply}", f"--rollout_size={size}"]
    return [*first, f"--rollout_mini_batch_size={min(size, _GENERATION_BATCH)}", *_batches(size, context)]


def _batches(rollout_size: int, context: Context) -> list[str]:
    """A rollout in num_mini_batch parts, each read at once."""
    parts = _whole("num_mini_batch", context.keys.get("num_mini_batch") or 1)
    mini = int(context.flag("mini_batch_size", max(1, round(rollout_size / parts))))
    return [f"--mini_batch_size={mini}", f"--micro_batch_size={context.flag('micro_batch_size', mini)}"]


def _num_mini_batch(_: Any, context: Context) -> list[str]:
    if context.keys.get("episode_length") is not None:  # said there
        return []
    return _batches(int(context.flag("rollout_size", 128)), context)


def _critic_lr(value: Any, context: Context) -> list[str]:
    if not context.shares:
        return [f"--critic_learning_rate={value}"]
    if float(context.keys.get("lr") or value) != float(value):
        raise ValueError("with use_share_model there is one network and one rate, so it must be that of lr")
    return []


def _huber_delta(value: Any, context: Context) -> list[str] | None:
    used = context.keys.get("use_huber_loss") is not False
    return ["--value_loss=huber", f"--huber_delta={value}"] if used else None


def _dual_clip(value: Any, context: Context) -> list[str]:
    return [f"--dual_clip={context.keys.get('dual_clip_coeff') or 3}"] if _is_true(value) else []


def _wandb_entity(value: Any, context: Context) -> list[str] | None:
    """As in OpenRL, where `use_wandb` of the program decides."""
    loggers = context.given.get("loggers") or context.flags.get("loggers") or []
    return [f"--wandb_entity={value}"] if "wandb" in loggers else None


def _reward_class(value: Any, context: Context) -> list[str]:
    """NLPReward: METEOR and intent, half each, and its KL controller; another id: a reward that a plugin registers."""
    prefix = "reward_class.args."
    args = {name.removeprefix(prefix): v for name, v in context.keys.items() if name.startswith(prefix)}
    if value != "NLPReward":
        settings = "".join(f",{name}={v}" for name, v in args.items() if v is not None)
        return _reward([f"{value}=1{settings}"], context)
    intent = args.get("intent_model") or args.get("reward_path")
    if not intent or "," in str(intent):
        raise ValueError("NLPReward needs the intent classifier: args.intent_model, a path or hub id without a comma")
    if args.get("intent_model") not in (None, args.get("reward_path") or intent):
        raise ValueError("args.intent_model and args.reward_path both name the intent classifier; give one of them")
    reference = args.get("ref_model") or args.get("model_path")
    start = context.keys.get("model_path")
    if reference and start and reference != start:
        raise ValueError(f"the reference is the actor's start (model_path), and cannot be another, {reference!r}")
    part = f"intent=0.5,type=classifier,model={intent},label_key=act,text=turn"
    # one from train_classifier.py has names for its labels, and read the two utterances with a line break between them
    as_there = ",separator='',labels=inform|question|directive|commissive"
    own = "" if Path(str(intent)).exists() else as_there
    return [*_reward(["meteor=0.5", part + own], context), *(f"--{setting}" for setting in _NLP_REWARD)]


def _reward(parts: list[str], context: Context) -> list[str]:
    """Unless the command line says what is rewarded."""
    return [] if {"reward", "reward_config"} & context.given.keys() else ["--reward", *parts]


_DEEPSPEED = "needs DeepSpeed, which goes by flag: leave it out, and pass --strategy=deepspeed_stage_2 or a file"
_REWARD_FLAGS = ("reward", *(setting.partition("=")[0] for setting in _NLP_REWARD))
_SIZES = ("rollout_size", "rollout_mini_batch_size", "mini_batch_size", "micro_batch_size")
_SAID_THERE = Key(("reward",), lambda *_: [])  # read by reward_class.id

KEYS: dict[str, Key] = {
    # names, places, logging
    "seed": _flag("seed"),
    "experiment_name": _flag("experiment_name"),
    "run_dir": _renamed("log_dir"),
    "log_interval": _flag("log_interval"),
    "wandb_entity": Key(("wandb_entity",), _wandb_entity),
    "vec_info_class.id": _nothing(),
    # data and models
    "data_path": _renamed("data_dir"),
    "env.args.data_path": _renamed("data_dir"),
    "env.args.tokenizer_path": _nothing(),
    "env.args.model_path": _nothing(),
    "model_path": _renamed("sft_experiment_dir"),
    "use_share_model": _switch(["share_actor_critic=True"], ["share_actor_critic=False"]),
    # reward
    "reward_class.id": Key(_REWARD_FLAGS, _reward_class),
    "reward_class.args.intent_model": _SAID_THERE,
    "reward_class.args.reward_path": _SAID_THERE,
    "reward_class.args.ref_model": Key(("sft_experiment_dir",), lambda *_: []),
    "reward_class.args.model_path": Key(("sft_experiment_dir",), lambda *_: []),
    "reward_class.args.use_deepspeed": _nothing(_DEEPSPEED, False),
    "reward_class.args.ref_ds_config": _nothing(),
    "reward_class.args.intent_ds_config": _nothing(),
    # sizes
    "episode_length": Key(("max_new_tokens", *_SIZES), _rollout),
    "env_num": Key(_SIZES, lambda _, c: [] if c.keys.get("episode_length") is not None else None),
    "num_mini_batch": Key(("mini_batch_size", "micro_batch_size"), _num_mini_batch),
    "ppo_epoch": _renamed("ppo_epochs"),
    # optimization
    "lr": _renamed("actor_learning_rate"),
    "critic_lr": Key(("critic_learning_rate",), _critic_lr),
    "use_linear_lr_decay": _switch(["actor_lr_schedule=linear", "critic_lr_schedule=linear"]),
    "opti_eps": _renamed("optimizer_eps"),
    "weight_decay": _flag("weight_decay"),
    "max_grad_norm": _renamed("gradient_clip_val"),
    "use_amp": _switch(["precision=16-mixed"], ["precision=32-true"]),
    # PPO
    "clip_param": _renamed("clip_coeff"),
    "dual_clip_ppo": Key(("dual_clip",), _dual_clip),
    "dual_clip_coeff": Key(("dual_clip",), lambda _, c: [] if c.keys.get("dual_clip_ppo") else None),
    "entropy_coef": _renamed("entropy_coeff"),
    "gamma": _renamed("gae_gamma"),
    "gae_lambda": _renamed("gae_lambd"),
    "use_adv_normalize": _switch(["normalize_advantages=True"], ["normalize_advantages=False"]),
    "use_valuenorm": _switch(["normalize_values=True"], ["normalize_values=False"]),
    "value_loss_coef": _renamed("vf_coeff"),
    "use_huber_loss": _switch(["value_loss=huber"], ["value_loss=mse"]),
    "huber_delta": Key(("value_loss", "huber_delta"), _huber_delta),
    "use_clipped_value_loss": _switch([], ["value_clip_coeff=1e12"]),
    # recurrent and multi-agent policies, which language models are not
    "use_recurrent_policy": _nothing(),
    "data_chunk_length": _nothing(),
    "hidden_size": _nothing(),
    "use_joint_action_loss": _nothing("asks for the loss of several agents, and there is one here", False),
    # DeepSpeed
    "use_deepspeed": _nothing(_DEEPSPEED, False),
    "use_fp16": _nothing(_DEEPSPEED, False),
    "use_offload": _nothing(_DEEPSPEED, False),
    "deepspeed_config": _nothing(),
    "local_rank": _nothing(),
}
