"""Loading, choosing what trains, and saving: the only place that calls `from_pretrained` on a model."""

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model, load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from rlhf_stages.args import ModelArgs
from rlhf_stages.models.actor_critic import ActorCritic
from rlhf_stages.models.checkpointing import checkpoint_layers
from rlhf_stages.models.compiling import compile_layers
from rlhf_stages.models.dropout import disable_dropout
from rlhf_stages.models.forward import without_adapters
from rlhf_stages.models.quantization import merge_quantized, quantization
from rlhf_stages.models.scalar import EncoderScalarModel, ScalarModel
from rlhf_stages.terminal import first_line

ADAPTER_DIR = "adapter"
VALUE_HEAD = "value_head.safetensors"


def load_causal(name_or_path: str | Path, tokenizer: PreTrainedTokenizerBase, args: ModelArgs) -> Any:
    """Load a causal language model with fp32 weights whose embedding has a row for every token.

    The model's own generation config is replaced by one that only knows the special tokens, so that no penalty or
    minimum length stored with some model makes the sampler differ from the scorer.

    Raises:
        ValueError: nothing loads from there, or some of the weights are missing.
    """
    model, _ = _load(AutoModelForCausalLM, name_or_path, args)
    _fit_embedding(model, tokenizer)
    _set_special_ids(model, tokenizer)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    if args.disable_dropout:
        disable_dropout(model)
    return model


def load_scalar(
    name_or_path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    args: ModelArgs,
    *,
    trained_head: bool,
    token_scores: bool = False,
) -> ScalarModel:
    """Load a reward model or critic, fp32.

    Args:
        trained_head: the checkpoint must bring its head. Without, a causal model is given a new one (normal with
            variance 1 / (H + 1), as in Stiennon et al. 2020), and an encoder the one that transformers gives it.
        token_scores: every token must have a score of its own, which an encoder such as BERT does not give.

    Raises:
        ValueError: nothing loads from there, weights are missing, or the architecture has another kind of head.
    """
    hf, missing = load_classifying(name_or_path, tokenizer, args, num_labels=1)
    model = ScalarModel(hf) if hasattr(hf, "score") else EncoderScalarModel(hf)
    if token_scores and isinstance(model, EncoderScalarModel):
        raise ValueError(
            f"{name_or_path}: {type(hf).__name__} is an encoder, which scores whole texts and no single tokens. Train a"
            " reward model of it with --loss_type=last_token; it can score the responses of PPO, but no critic can"
            " start from it: give PPO --critic_init=sft"
        )
    if missing and trained_head:
        raise ValueError(f"{name_or_path} has no trained reward head ({min(missing)}); is it a reward model?")
    if missing and hasattr(hf, "score"):
        nn.init.normal_(hf.score.weight, std=(hf.score.in_features + 1) ** -0.5)
    return model


def load_classifying(
    name_or_path: str | Path, tokenizer: PreTrainedTokenizerBase, args: ModelArgs, **config: Any
) -> tuple[Any, set[str]]:
    """Load a sequence classifier of transformers, fp32, whose embedding has a row for every token.

    Args:
        config: what its config is to say instead of what stands there; none keeps the labels of the checkpoint.

    Returns:
        The model, and which weights of its head are new because the checkpoint lacks them.

    Raises:
        ValueError: nothing loads from there, weights are missing, or the architecture has another kind of head.
    """
    hf, missing = _load(AutoModelForSequenceClassification, name_or_path, args, **config)
    if not hasattr(hf, "score") and not hasattr(hf, "classifier"):
        raise ValueError(
            f"{name_or_path}: {type(hf).__name__} has no linear `score` head (causal models) and no `classifier`"
            " (encoders) to read"
        )
    _fit_embedding(hf, tokenizer)
    if hasattr(hf, "score"):  # RoBERTa counts its positions from its padding id, so an encoder keeps its own
        _set_special_ids(hf, tokenizer)
    if args.disable_dropout:
        disable_dropout(hf)
    return hf, missing


def load_critic(
    name_or_path: str | Path, tokenizer: PreTrainedTokenizerBase, args: ModelArgs, *, trained_head: bool
) -> ScalarModel:
    """Load a critic: a reward model with its head, or a causal model with a head of 0 that at first says nothing.

    Raises:
        ValueError: as `load_scalar`; the model is an encoder.
    """
    critic = load_scalar(name_or_path, tokenizer, args, trained_head=trained_head, token_scores=True)
    if not trained_head:
        nn.init.zeros_(critic.hf.score.weight)
    return critic


def prepare_training(model: Any, args: ModelArgs) -> Any:
    """Choose what trains: all weights, the last layer, or LoRA adapters (then the model comes back wrapped by peft).

    The last layer is the output embedding of a causal model, the head of a scalar one. With LoRA a head trains fully.

    Raises:
        ValueError: the LoRA targets are not in the model, or it cannot do what a flag asks for.
    """
    hf = model.hf if isinstance(model, ScalarModel) else model
    if args.gradient_checkpointing:
        checkpoint_layers(hf, dropout=not args.disable_dropout)
    if args.finetune_mode == "all":
        return model.requires_grad_(True)
    model.requires_grad_(False)
    if args.finetune_mode == "last_layer":
        head = getattr(hf, model.head_name) if isinstance(model, ScalarModel) else hf.get_output_embeddings()
        head.requires_grad_(True)
        return model
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS if isinstance(model, ScalarModel) else TaskType.CAUSAL_LM,
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=0.0 if args.disable_dropout else args.lora_dropout,
        target_modules=args.lora_target_modules,
        modules_to_save=[model.head_name] if isinstance(model, ScalarModel) else None,
    )
    try:
        with warnings.catch_warnings():
            # of transformers to peft, which asks a model by its old name whether it checkpoints gradients
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            wrapped = get_peft_model(hf, config)
    except ValueError as error:
        raise ValueError(f"--lora_targets={args.lora_targets}: {first_line(error)}") from None
    if isinstance(model, ScalarModel):
        model.hf = wrapped
        return model
    return wrapped


def save_model(model: Any, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write a model folder that loads on its own: config, weights, generation config, tokenizer.

    LoRA adapters are kept under `adapter/`, and merged into the weights beside it; the value head of a model that is
    actor and critic in one is kept in `value_head.safetensors`.
    """
    if isinstance(model, ActorCritic):
        directory.mkdir(parents=True, exist_ok=True)
        save_file(model.value_head.state_dict(), directory / VALUE_HEAD)
    hf = model.hf if isinstance(model, (ScalarModel, ActorCritic)) else model
    if hasattr(hf, "merge_and_unload"):
        hf.save_pretrained(directory / ADAPTER_DIR)
        # merged in a copy: undoing a merge in place would change the weights by rounding
        hf = copy.deepcopy(hf)
        hf = merge_quantized(hf) if getattr(hf.get_base_model(), "is_quantized", False) else hf.merge_and_unload()
    hf.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def restore_model(model: Any, directory: Path) -> None:
    """Put the weights that `save_model` wrote into a model that was built in the same way."""
    if isinstance(model, ActorCritic):
        model.value_head.load_state_dict(load_file(directory / VALUE_HEAD))
    hf = model.hf if isinstance(model, (ScalarModel, ActorCritic)) else model
    if hasattr(hf, "merge_and_unload"):
        set_peft_model_state_dict(hf, load_peft_weights(str(directory / ADAPTER_DIR), device="cpu"))
        return
    with quiet():
        stored = type(hf).from_pretrained(directory, dtype=torch.float32).state_dict()
    for file in directory.glob("*.safetensors"):  # and what a user's own class has that transformers does not know
        stored = {**load_file(file), **stored}
    hf.load_state_dict({name: stored[name] for name in hf.state_dict()})


def parameter_summary(model: nn.Module) -> str:
    """One line: parameters that train and that do not, by dtype, and the share that trains."""
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for parameter in model.parameters():
        counts[parameter.requires_grad][str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    trainable, frozen = (
        ", ".join(f"{n:,} {dtype}" for dtype, n in counts[kind].items()) or "0" for kind in (True, False)
    )
    total = sum(sum(c.values()) for c in counts.values())
    return f"trainable {trainable} · frozen {frozen} · {sum(counts[True].values()) / max(total, 1):.2%} trainable"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the loading reports and progress bars of transformers; errors still raise."""
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("transformers")
    level = logger.level
    bars = transformers_logging.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _load(auto: Any, name_or_path: str | Path, args: ModelArgs, **kwargs: Any) -> tuple[Any, set[str]]:
    """The model, and which of its weights the checkpoint lacks: the head at most, never a part of the trunk."""
    name = str(name_or_path)
    kwargs |= quantization(args)
    try:
        with quiet():
            config = AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code)
            architectures = config.architectures or []
            if auto is AutoModelForCausalLM and any("SequenceClassification" in a for a in architectures):
                raise ValueError(f"it is a {architectures[0]}, which scores texts; expected a causal language model")
            model, info = auto.from_pretrained(
                name,
                dtype=torch.float32,
                trust_remote_code=args.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # those are refused below, by name
                **kwargs,
            )
    except Exception as error:  # a damaged folder raises half a dozen types
        reason = first_line(error)
        raise ValueError(f"no model could be loaded from {name!r} (hub id or model folder?): {reason}") from None
    missing = set(info["missing_keys"])
    # an encoder that was never trained to classify may lack the pooler of its trunk too
    head = {k for k in missing if not k.startswith(f"{model.base_model_prefix}.") or ".pooler." in k}
    if auto is AutoModelForCausalLM:
        head = set()
    wrong = sorted(missing - head) + [key for key, *_ in info["mismatched_keys"]]
    if wrong:
        raise ValueError(
            f"{name!r}: {len(wrong)} weights are missing or have another shape than config.json says, among them"
            f" {wrong[0]!r}; the checkpoint is damaged, of another architecture, or a"
            " classifier of another number of labels"
        )
    if args.compile:
        compile_layers(model)
    return model, missing


def _fit_embedding(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Grow the embedding to the tokenizer (new rows at the mean); never shrink: many models keep spare rows."""
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        with quiet():
            model.resize_token_embeddings(len(tokenizer))


def _set_special_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    model.config.pad_token_id = tokenizer.pad_token_id
    without_adapters(model).config.eos_token_id = tokenizer.eos_token_id
