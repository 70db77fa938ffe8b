"""PPO on the scores of a person: a rollout is as many replies as there are scores, one of them at least.

The losses, the sampler and the KL controller are those of `rlhf_ppo.py`. A single sample has no deviation, so nothing
is whitened (see `ScoreAndStepArgs.ppo`); what tells a good score from a bad one is the value head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_stages import loop
from rlhf_stages.args import ModelArgs, ScoreAndStepArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.data.tokenizer import encode_prompt
from rlhf_stages.engines import engine_of
from rlhf_stages.kl_control import make_kl_control
from rlhf_stages.models.actor_critic import policy_of
from rlhf_stages.models.forward import check_context
from rlhf_stages.models.frozen import load_reference
from rlhf_stages.models.loading import quiet, restore_model, save_model
from rlhf_stages.models.start import start_actor
from rlhf_stages.optim import set_up
from rlhf_stages.plan import update_windows
from rlhf_stages.rollout.collect import Rollout, Scores, concatenate, not_finite, policy_outputs, score_responses
from rlhf_stages.rollout.experience import Experience, make_experience, policy_objective, value_objective
from rlhf_stages.rollout.generation import cut_at_stop, make_sampler
from rlhf_stages.rollout.samples import sample
from rlhf_stages.rollout.statistics import rollout_metrics
from rlhf_stages.rollout.texts import text_of
from rlhf_stages.state import on_host, read_state, write_state

_STATE = "learner"


@dataclass(frozen=True)
class Reply:
    """A prompt with a sampled response: its text, and its tokens with the stop token."""

    prompt: str
    text: str
    ids: tuple[int, ...]


class Learner:
    """The model that learns, its reference, and all that a PPO step needs; on one device.

    Raises:
        ValueError: as the functions that it calls.
    """

    def __init__(
        self,
        fabric: Fabric,
        start: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        args: ScoreAndStepArgs,
        model_args: ModelArgs,
    ) -> None:
        self._fabric, self._tokenizer, self._args, self._ppo = fabric, tokenizer, args, args.ppo
        actor = start_actor(start, tokenizer, self._ppo, model_args, args.max_new_tokens + 1)
        self._actor, self._optimizer, _ = set_up(fabric, actor, self._ppo, self._ppo.actor_rate, total_steps=1)

        def freeze(model: torch.nn.Module) -> torch.nn.Module:
            return loop.freeze(fabric, model, self._ppo)

        self._reference = load_reference(self._actor, start, tokenizer, self._ppo, model_args, freeze)
        self._sampler = make_sampler(args, tokenizer)
        self._kl = make_kl_control(self._ppo.kl_control, args.init_kl_coeff, args.target_kl_coeff, args.kl_horizon)
        self.steps = 0

    def reply(self, prompt: str, seed: int) -> Reply:
        """What the model says now, drawn from this seed.

        Raises:
            ValueError: the prompt is too long for the model.
        """
        self.check(prompt)
        prompts = self._prompts(prompt)
        torch.manual_seed(seed)
        responses = sample(policy_of(self._actor), prompts, self._tokenizer, self._args, self._fabric)
        text = text_of(self._tokenizer, responses.ids[0], responses.mask[0])
        return Reply(prompt, text, tuple(responses.ids[0][responses.mask[0]].tolist()))

    def check(self, prompt: str) -> None:
        """Refuse a prompt that leaves no room for a reply. Raises ValueError."""
        tokens = self._prompts(prompt).input_ids.shape[1]
        check_context(policy_of(self._actor), tokens + self._args.max_new_tokens)

    def learn(self, scored: Sequence[tuple[Reply, float]]) -> dict[str, float]:
        """One PPO step on these replies; returns loss, gradient norm, KL of a response to the start, KL coefficient.

        Raises:
            FloatingPointError: something is not finite; of the passes before that the weights keep what they learned.
        """
        with self._fabric.autocast():
            rollout = concatenate([self._read(*pair) for pair in scored])
        if fault := not_finite(rollout)[0]:
            raise FloatingPointError(fault)
        experience = make_experience(rollout, self._ppo, self._kl.coeff)
        lengths = [sum(pair) for pair in rollout.lengths]
        self._actor.train()
        for window in update_windows(self._fabric, lengths, self._ppo, self.steps):
            batches = [experience.select(rows) for rows in window]
            done = loop.update(
                self._fabric, self._actor, self._optimizer, batches, self._loss_sum, _count, self._ppo.gradient_clip_val
            )
            if done.fault:
                raise FloatingPointError(done.fault)
        self.steps += 1
        kl = float(rollout_metrics(rollout, "train")["train/kl_sequence"])
        self._kl.update(kl, len(scored))
        return {"loss": float(done.loss), "grad_norm": float(done.norm), "kl": kl, "kl_coeff": self._kl.coeff}

    def snapshot(self) -> dict[str, Any]:
        """A copy of everything that a step changes, in host memory."""
        state: dict[str, Any] = on_host({"model": self._actor.state_dict(), **self._state()})
        return state

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Everything as it was when the snapshot was taken, bit by bit."""
        self._actor.load_state_dict(snapshot["model"])
        self._load_state(snapshot)

    def writers(self) -> list[Any]:
        """What writes a checkpoint: functions of a folder."""
        model = engine_of(self._fabric).whole(self._fabric, self._actor)

        def write_model(folder: Path) -> None:
            with quiet():
                save_model(model, self._tokenizer, folder)

        return [write_model, lambda folder: write_state(on_host(self._state()), _STATE, folder)]

    def load(self, folder: Path) -> None:
        """Take over a checkpoint. Raises ValueError if it does not fit."""
        try:
            engine_of(self._fabric).restore(self._fabric, self._actor, lambda model: restore_model(model, folder))
            self._load_state(read_state(folder, _STATE))
        except Exception as error:  # each part refuses what is not its own in its own way
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(f"--resume: {folder} does not fit this run ({reason})") from None

    def _state(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict(), "kl": self._kl.state_dict(), "steps": self.steps}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._kl.load_state_dict(state["kl"])
        self.steps = state["steps"]

    def _prompts(self, prompt: str) -> PromptBatch:
        ids = torch.tensor([encode_prompt(self._tokenizer, prompt)], device=self._fabric.device)
        return PromptBatch(ids, torch.ones_like(ids, dtype=torch.bool))

    def _read(self, reply: Reply, score: float) -> Rollout:
        """A rollout of one row, with the score of the person."""
        ids = torch.tensor([reply.ids], device=self._fabric.device)
        responses = cut_at_stop(ids, self._sampler.stop_ids, int(self._tokenizer.pad_token_id))
        parts, tokens = torch.tensor([[score]], device=ids.device), torch.zeros(ids.shape, device=ids.device)
        return score_responses(
            self._prompts(reply.prompt), responses, actor=self._actor, reference=self._reference, critic=None,
            scorer=lambda *_: Scores(parts, tokens), sampler=self._sampler,
        )  # fmt: skip

    def _loss_sum(self, batch: Experience) -> Tensor:
        rollout = batch.rollout
        logprobs, _, values = policy_outputs(self._actor, rollout.texts, rollout.response_ids, self._sampler)
        loss, _ = policy_objective(batch, logprobs, None, self._ppo)
        assert values is not None  # for the type checker: actor and critic are one
        return loss + self._ppo.vf_coeff * value_objective(batch, values, self._ppo)


def _count(batch: Experience) -> Tensor:
    return batch.rollout.response_mask.sum()
