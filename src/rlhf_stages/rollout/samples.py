"""The example prompt of a data folder, and what a model says to it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import GenerationArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.rollout.collect import Rollout
from rlhf_stages.rollout.generation import Responses, generate, make_sampler
from rlhf_stages.rollout.texts import text_of
from rlhf_stages.tracking import Tracker


def load_example_prompt(data_dir: Path, fabric: Fabric, vocab_size: int | None = None) -> PromptBatch:
    """Read example_prompt.pt: a dictionary with `input_ids`, of a vocabulary, and `attention_mask`, (1, P) each.

    Raises:
        FileNotFoundError: not there. ValueError: not such a dictionary.
    """
    path = data_dir / "example_prompt.pt"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}; data_prep/<dataset>/prepare_data.py writes it")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        ids, mask = content["input_ids"], content["attention_mask"]
        if not ids.shape == mask.shape == (1, ids.numel()) or not ids.is_contiguous() or not mask.is_contiguous():
            raise TypeError  # also what a stride of 0 makes look like terabytes
        if not 0 <= int(ids.min()) <= int(ids.max()) < (2**31 if vocab_size is None else vocab_size):
            raise IndexError
        return PromptBatch(ids.to(fabric.device).long(), mask.to(fabric.device).bool())
    except Exception as error:  # torch raises half a dozen types on a damaged file
        raise ValueError(
            f"{path} is damaged, or not a dictionary with `input_ids` and `attention_mask` ({type(error).__name__});"
            " prepare the data again"
        ) from None


def sample(
    model: Any, prompts: PromptBatch, tokenizer: PreTrainedTokenizerBase, args: GenerationArgs, fabric: Fabric
) -> Responses:
    """Let an unwrapped model continue prompts in the run's precision; its training mode is as before afterwards."""
    training = model.training
    model.eval()
    with fabric.autocast():
        responses = generate(model, prompts, args, make_sampler(args, tokenizer), int(tokenizer.pad_token_id))
    model.train(training)
    return responses


def log_example(
    sampled: Callable[[PromptBatch], Responses],
    prompts: PromptBatch,
    tokenizer: PreTrainedTokenizerBase,
    fabric: Fabric,
    tracker: Tracker,
    step: int,
) -> None:
    """Log what comes when the example prompt is sampled (first process only)."""
    if not fabric.is_global_zero:
        return
    responses = sampled(prompts)
    prompt = text_of(tokenizer, prompts.input_ids[0], prompts.attention_mask[0])
    for ids, mask in zip(responses.ids, responses.mask, strict=True):
        tracker.log_sample("example_sample", step, prompt, text_of(tokenizer, ids, mask))


def log_rollout_sample(rollout: Rollout, tokenizer: PreTrainedTokenizerBase, tracker: Tracker, step: int) -> None:
    """Log the first response of a rollout, whose parts of the reward are combined, with its score and KL."""
    tracker.log_sample(
        "rollout_sample",
        step,
        text_of(tokenizer, rollout.prompt_ids[0], rollout.prompt_mask[0]),
        text_of(tokenizer, rollout.response_ids[0], rollout.response_mask[0]),
        score=float(rollout.scores[0] + rollout.token_scores[0].sum()),
        kl=float((rollout.logprobs - rollout.ref_logprobs)[0].sum()),
    )
