"""Who samples rollouts: slots and CUDA graphs where that works, Hugging Face's `generate` everywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from lightning.fabric import Fabric
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import RolloutArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.engines import engine_of
from rlhf_stages.models.actor_critic import policy_of
from rlhf_stages.rollout.generation import Responses, Sampler, generate
from rlhf_stages.rollout.slots import SlotGenerator
from rlhf_stages.terminal import first_line

DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Generator(Protocol):
    """Samples responses to batches of prompts from the actor as it is now."""

    def __call__(self, batches: Sequence[PromptBatch], logprobs: bool = False) -> list[Responses]:
        """Responses to each batch (B is prompts x num_return_sequences), on request with their log-probabilities."""


@dataclass(frozen=True)
class HuggingFaceGenerator:
    """`generate` of transformers, batch by batch."""

    model: Any
    args: RolloutArgs
    sampler: Sampler
    pad_token_id: int
    fabric: Fabric

    def __call__(self, batches: Sequence[PromptBatch], logprobs: bool = False) -> list[Responses]:
        """See `Generator`."""
        training = self.model.training
        self.model.eval()
        with self.fabric.autocast():
            responses = [
                generate(self.model, prompts, self.args, self.sampler, self.pad_token_id, logprobs)
                for prompts in batches
            ]
        self.model.train(training)
        return responses


def make_generator(
    actor: nn.Module,
    args: RolloutArgs,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    fabric: Fabric,
    size: tuple[int, int],
) -> Generator:
    """The generator that `--generator` names; `auto` falls back to Hugging Face's with one printed line.

    Args:
        size: prompts that are sampled at a time, and tokens of the longest one with what is sampled.

    Raises:
        ValueError: `--generator=slots` cannot serve this model.
    """
    model, pad, engine = policy_of(actor), int(tokenizer.pad_token_id), engine_of(fabric)
    plain = HuggingFaceGenerator(model, args, sampler, pad, fabric)
    if args.generator == "hf" or (args.generator == "auto" and fabric.device.type != "cuda"):
        return plain
    try:
        slots = SlotGenerator(
            model,
            args,
            sampler,
            pad,
            slots=size[0] * args.num_return_sequences,
            longest=size[1],
            dtype=DTYPES[str(fabric._precision.precision)],
            copied=policy_of(engine.whole(fabric, actor, everywhere=True)) if engine.divides_optimizer else None,
            compiled=sampler.fused,
        )
    except Exception as error:  # whatever a model says that does not know of such a cache
        reason = first_line(error)
        if args.generator == "slots":
            raise ValueError(f"--generator=slots: {type(model).__name__} cannot be sampled so: {reason}") from error
        fabric.print(f"rollouts: Hugging Face's generate, since slots cannot serve {type(model).__name__} ({reason})")
        return plain
    fabric.print(f"rollouts: {slots}")
    return slots
