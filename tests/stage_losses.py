"""What each stage does to eight samples in an optimizer step: its loss, cut into micro-batches of any sizes."""

import copy
from functools import partial

import torch

from rlhf_stages import loop
from rlhf_stages.args import ModelArgs, PPOArgs, TrainArgs
from rlhf_stages.data.collate import PromptBatch, collate_finetune, collate_labelled, collate_preference
from rlhf_stages.data.labelled import LabelledText
from rlhf_stages.data.shards import Record
from rlhf_stages.engines import engine_of
from rlhf_stages.functional.dpo import dpo_loss
from rlhf_stages.functional.losses import REWARD_LOSSES, classification_loss
from rlhf_stages.functional.tokens import sft_loss
from rlhf_stages.models.classifier import new_classifier
from rlhf_stages.models.forward import sequence_logprobs, text_logits
from rlhf_stages.models.loading import load_causal, load_scalar
from rlhf_stages.rollout.collect import policy_outputs, response_values, score_responses
from rlhf_stages.rollout.experience import make_experience, policy_objective, value_objective
from rlhf_stages.rollout.generation import Responses

from helpers import left_padded, make_tokenizer, model_scorer, plain_sampler, right_padded, save_causal, save_classifier

PAD, IGNORE = 3, -1


def texts(count, seed=0, responses=2):
    """Prompts of 1 to 4 tokens, responses of up to 6: the first may be empty, the others have an end."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low, high):
        return torch.randint(5, 90, (int(torch.randint(low, high, (), generator=generator)),), generator=generator)

    def record():
        prompt, better = torch.cat([torch.tensor([1]), ids(0, 4)]), ids(0, 6)
        worse = [torch.cat([ids(0, 6), end]) for _ in range(responses - 1)]
        return Record(prompt, (better, *worse), (False,) * responses)

    end = torch.tensor([91])
    return [record() for _ in range(count)]


class SFT:
    """Loss of stage 1 on eight texts."""

    def __init__(self, folder):
        self.model = load_causal(save_causal(folder), make_tokenizer(), ModelArgs())

    def batches(self, sizes):
        records = iter(texts(8))
        for size in sizes:
            yield collate_finetune(
                [next(records) for _ in range(size)],
                pad_token_id=PAD, ignore_index=IGNORE, use_targets=True, mask_prompt=True,
            )  # fmt: skip

    def count(self, batch):
        return (batch.targets[:, 1:] != IGNORE).sum()

    def loss_sum(self, model, batch):
        return sft_loss(text_logits(model, batch.input_ids, batch.attention_mask), batch.targets, IGNORE)[0]


class Classifier:
    """Loss of a classifier on eight texts of three labels, each label with a weight of its own."""

    weights = torch.tensor([1.0, 3.0, 1.5])

    def __init__(self, folder):
        self.model = new_classifier(save_causal(folder), make_tokenizer(), ModelArgs(), ["a", "b", "c"])
        torch.nn.init.normal_(self.model.hf.score.weight)

    def batches(self, sizes):
        records = enumerate(texts(8))
        for size in sizes:
            batch = [LabelledText(record.sequence(), i % 3) for i, record in (next(records) for _ in range(size))]
            yield collate_labelled(batch, pad_token_id=PAD)

    def count(self, batch):
        return self.weights[batch.labels].sum()

    def loss_sum(self, model, batch):
        return classification_loss(model(batch.input_ids, batch.attention_mask), batch.labels, self.weights)[0]


class RM:
    """Loss of stage 2 on eight pairs."""

    def __init__(self, folder, loss="per_sample"):
        self.model = load_scalar(save_causal(folder), make_tokenizer(), ModelArgs(), trained_head=False)
        self.loss = REWARD_LOSSES[loss]

    def batches(self, sizes):
        records = iter(texts(8, seed=1))
        for size in sizes:
            yield collate_preference([next(records) for _ in range(size)], pad_token_id=PAD)

    def count(self, batch):
        return torch.tensor(len(batch.better))

    def loss_sum(self, model, batch):
        scores = model(batch.input_ids, batch.attention_mask)
        better, worse, lengths = batch.better, batch.worse, batch.lengths
        return self.loss(scores[better], scores[worse], batch.starts, lengths[better], lengths[worse], batch.margins)[0]


class RankLists(RM):
    """The same on eight lists of 2 to 4 texts, with margins."""

    def batches(self, sizes):
        pool = iter(texts(16, seed=3))
        records = []
        for k in (3, 2, 4, 2, 3, 4, 2, 2):
            first, second = next(pool), next(pool)
            responses = (*first.responses, *second.responses)[:k]
            records.append(Record(first.prompt, responses, (False,) * k, ratings=tuple(range(k, 0, -1))))
        rest = iter(records)
        for size in sizes:
            yield collate_preference([next(rest) for _ in range(size)], pad_token_id=PAD, use_margin=True)


class DPO(RM):
    """Loss of DPO on eight pairs, or on eight lists of three."""

    def __init__(self, folder, responses=2):
        tokenizer, args = make_tokenizer(), ModelArgs()
        self.model = load_causal(save_causal(folder / "a"), tokenizer, args)
        self.reference = load_causal(save_causal(folder / "b", seed=1), tokenizer, args)
        self.responses = responses

    def batches(self, sizes):
        records = iter(texts(8, seed=1, responses=self.responses))
        for size in sizes:
            yield collate_preference([next(records) for _ in range(size)], pad_token_id=PAD)

    def loss_sum(self, model, batch):
        text = batch.input_ids, batch.attention_mask, batch.prompt_lengths, batch.response_ends
        text = *text, batch.response_mask.shape[1]
        with torch.no_grad():
            reference = sequence_logprobs(self.reference, *text)
        logprobs, better, worse = sequence_logprobs(model, *text), batch.better, batch.worse
        return dpo_loss(logprobs[better], logprobs[worse], reference[better], reference[worse], 0.3, 0.1)[0]


class Actor:
    """Policy loss of stage 3 on eight responses."""

    def __init__(self, folder):
        tokenizer, args = make_tokenizer(), ModelArgs(disable_dropout=True)
        self.model = load_causal(save_causal(folder / "a"), tokenizer, args)
        self.critic = load_scalar(save_classifier(folder / "c"), tokenizer, args, trained_head=True)
        records = texts(8, seed=2)
        prompts = PromptBatch(*left_padded([record.prompt.tolist() for record in records], PAD))
        responses = Responses(
            *right_padded([record.responses[1].tolist() for record in records], PAD), torch.ones(8, dtype=torch.bool)
        )
        other = load_causal(save_causal(folder / "b", seed=1), tokenizer, args)
        models = {"actor": self.model, "reference": other, "critic": self.critic, "scorer": model_scorer(self.critic)}
        rollout = score_responses(prompts, responses, **models, sampler=plain_sampler(0.7))
        self.args = PPOArgs(
            sft_experiment_dir="", rm_experiment_dir="", entropy_coeff=0.1, kl_loss_coeff=0.1, normalize_rewards=False
        )
        self.experience = make_experience(rollout, self.args, kl_coeff=0.1)

    def batches(self, sizes):
        rows = iter(range(8))
        for size in sizes:
            yield self.experience.select([next(rows) for _ in range(size)])

    def count(self, batch):
        return batch.rollout.response_mask.sum()

    def loss_sum(self, model, batch):
        r = batch.rollout
        logprobs, entropies, _ = policy_outputs(model, r.texts, r.response_ids, plain_sampler(0.7), entropies=True)
        return policy_objective(batch, logprobs, entropies, self.args)[0]


class Critic(Actor):
    """Value loss of stage 3 on eight responses."""

    def __init__(self, folder):
        super().__init__(folder)
        self.model = self.critic

    def loss_sum(self, model, batch):
        return value_objective(batch, response_values(model, batch.rollout.texts), self.args)


def three_steps(fabric, stage, sizes, weight=1.0, clip=1.0):
    """Losses, gradient norms and parameters of three steps over the same eight samples; each process takes its share.

    SGD: where a gradient is 0 but for rounding (the bias of attention keys), Adam makes whole steps of it.
    """
    engine, args = engine_of(fabric), TrainArgs(gradient_clip_val=clip, mini_batch_size=2, micro_batch_size=1)
    model, optimizer, _ = engine.set_up(
        fabric, copy.deepcopy(stage.model), args, lambda module: torch.optim.SGD(module.parameters(), lr=0.1)
    )
    losses, norms = [], []
    for _ in range(3):
        batches = list(stage.batches(sizes))
        mine = batches[fabric.global_rank :: fabric.world_size]
        update = loop.update(fabric, model, optimizer, mine, partial(stage.loss_sum, model), stage.count, clip, weight)
        assert update.count == sum(stage.count(batch) for batch in batches)
        assert update.fault is None
        losses.append(update.loss)
        norms.append(update.norm)
    whole = engine.whole(fabric, model, everywhere=True)
    return torch.stack(losses), torch.stack(norms), [parameter.detach() for parameter in whole.parameters()]


STAGES = {
    "sft": SFT,
    "classifier": Classifier,
    "rm": RM,
    "rm_average": partial(RM, loss="average"),
    "rank_lists": RankLists,
    "actor": Actor,
    "critic": Critic,
    "dpo": DPO,
    "dpo_lists": partial(DPO, responses=3),
}
