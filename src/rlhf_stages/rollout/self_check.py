"""A look at the first batch of a PPO run: is what was sampled also what is scored and trained?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.engines import engine_of
from rlhf_stages.functional.advantages import k3
from rlhf_stages.functional.masking import masked_mean
from rlhf_stages.rollout.collect import join, policy_outputs
from rlhf_stages.rollout.generation import Sampler
from rlhf_stages.rollout.generators import Generator

# largest mean KL and |log-ratio| that rounding explains, in nats; fp32 leaves room for TF32, cf. the 0.03 nats (RMS)
# that are reported for bf16. Dropout, a temperature or a penalty on one side are ten times that and more.
TOLERANCES = {"32-true": (1e-4, 0.1), "bf16-mixed": (5e-3, 2.0), "16-mixed": (5e-3, 2.0)}
CAUSES = (
    "usual causes: dropout that acts in one of them, a setting of the sampler that the scorer does not know (penalties,"
    " top-k, minimum length, temperature), padding or positions, a model that computes otherwise with a cache; or"
    " actor and reference start from different weights"
)


@dataclass(frozen=True)
class Agreement:
    """Largest |log-ratio| and mean KL (k3) between two ways to compute the log-probabilities of the same tokens."""

    name: str
    max_log_ratio: float
    mean_kl: float

    def __str__(self) -> str:
        return f"{self.name}: max |log-ratio| {self.max_log_ratio:.2g}, mean KL {self.mean_kl:.2g}"


@torch.no_grad()
def self_check(
    actor: nn.Module,
    reference: nn.Module,
    prompts: PromptBatch,
    generator: Generator,
    sampler: Sampler,
    fabric: Fabric,
) -> list[Agreement]:
    """Sample one batch and compare log-probabilities: sampler to scorer, scorer to update, actor to reference.

    Takes no randomness from the run. To be called before the first update, when all three are to be equal.

    Raises:
        ValueError: they differ by more than rounding does; on every device.
    """
    devices = [fabric.device] if fabric.device.type == "cuda" else []
    with engine_of(fabric).gathered(actor), torch.random.fork_rng(devices=devices):
        [responses] = generator([prompts], logprobs=True)
    with fabric.autocast():
        actor.eval()
        texts = join(prompts.repeat(len(responses.ids) // len(prompts.input_ids)), responses)
        scored = policy_outputs(actor, texts, responses.ids, sampler).logprobs
        referred = policy_outputs(reference, texts, responses.ids, sampler).logprobs
        actor.train()
        trained = policy_outputs(actor, texts, responses.ids, sampler).logprobs
    found = [
        _agreement("sampler and scorer", cast(Tensor, responses.logprobs), scored, responses.mask, fabric),
        _agreement("scorer and update", scored, trained, responses.mask, fabric),
        _agreement("actor and reference", scored, referred, responses.mask, fabric),
    ]
    for agreement, models in zip(found, ([actor], [actor], [actor, reference]), strict=True):
        mean, largest = TOLERANCES[_coarsest(fabric, models)]
        if not (agreement.mean_kl <= mean and agreement.max_log_ratio <= largest):
            raise ValueError(
                f"self-check: the log-probabilities of {agreement} (rounding explains {largest:g} and {mean:g});"
                f" {CAUSES}. --self_check=False trains all the same"
            )
    return found


def _coarsest(fabric: Fabric, models: Sequence[nn.Module]) -> str:
    """The precision that models compute in: that of the run, or bf16 where their weights are."""
    is_coarse = any(parameter.dtype != torch.float32 for model in models for parameter in model.parameters())
    precision = str(fabric._precision.precision)
    return "bf16-mixed" if is_coarse and precision == "32-true" else precision


def _agreement(name: str, one: Tensor, other: Tensor, mask: Tensor, fabric: Fabric) -> Agreement:
    log_ratio = torch.where(mask, one - other, 0)
    worst = torch.stack([log_ratio.abs().max(), masked_mean(k3(log_ratio), mask)])
    total: Any = fabric.all_reduce(worst, reduce_op="max")  # so that every device stops, or none
    return Agreement(name, *total.tolist())
