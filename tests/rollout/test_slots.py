"""Sampling in slots against Hugging Face's `generate`, and against scoring each text alone."""

import copy
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from transformers import AutoModelForCausalLM

from rlhf_stages.args import ModelArgs, RolloutArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.functional.tokens import gather_logprobs
from rlhf_stages.models.loading import load_causal, prepare_training
from rlhf_stages.rollout.generation import generate
from rlhf_stages.rollout.generators import HuggingFaceGenerator, make_generator
from rlhf_stages.rollout.slot_cache import ATTENTION, SlotLayer
from rlhf_stages.rollout.slots import SlotGenerator

from helpers import (
    KINDS,
    left_padded,
    make_config,
    make_tokenizer,
    plain_sampler,
    save_causal,
    shake_adapters,
)

PAD, EOS = 3, 2
ROWS = [[1, 5, 6, 7], [1], [1, 9, 10, 11, 12, 13, 14], [1, 15], [1, 8, 8, 8, 20], [1, 30, 31], [1, 4], [1, 50, 51]]
LONGEST = 7
GREEDY = 1e-4  # a temperature at which sampling is taking the best


def model_of(kind="llama", **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config(kind, **changes)).eval()


def slots_of(model, args, sampler, slots=3, dtype=torch.float32, **more):
    return SlotGenerator(
        model, args, sampler, PAD, slots=slots, longest=LONGEST + args.max_new_tokens, dtype=dtype, **more
    )


def batches(*sizes):
    rows = iter(ROWS)
    return [PromptBatch(*left_padded([next(rows) for _ in range(size)], PAD)) for size in sizes]


def scored_alone(model, sampler, prompt, response):
    """Log-probabilities of a response, from one forward over its text."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[:, len(prompt) - 1 : -1]
    return gather_logprobs(sampler.logits(logits), torch.tensor([response]))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_each_text_alone(kind):
    """Eight prompts of different lengths in three slots, some of which end early and are filled again."""
    model, sampler = model_of(kind), plain_sampler(0.7, min_new_tokens=2, stop_ids=[EOS, *range(40, 52)])
    found = slots_of(model, RolloutArgs(max_new_tokens=9, temperature=0.7, min_new_tokens=2), sampler)(batches(5, 3))
    assert [len(responses.ids) for responses in found] == [5, 3]
    lengths = []
    with torch.no_grad():
        for responses, rows in zip(found, (ROWS[:5], ROWS[5:]), strict=True):
            for row, prompt in enumerate(rows):
                count = int(responses.mask[row].sum())
                lengths.append(count)
                ids = responses.ids[row, :count].tolist()
                alone = scored_alone(model, sampler, prompt, ids)
                torch.testing.assert_close(responses.logprobs[row, :count], alone, rtol=0, atol=2e-5)
                assert bool(responses.ended[row]) == (ids[-1] in sampler.stop_ids)
                assert not {*ids[:1]} & {*sampler.stop_ids}  # the stop token is the second at the earliest
                assert responses.ids[row, count:].eq(PAD).all()
                assert not responses.logprobs[row, count:].any()
    assert min(lengths) < 9 == max(lengths)  # so slots were given up at different times


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_tokens_are_those_of_hugging_face_in_any_number_of_slots(kind, slots):
    model, sampler = model_of(kind), plain_sampler(GREEDY, stop_ids=[EOS, *range(40, 60)])
    args = RolloutArgs(max_new_tokens=9, temperature=GREEDY, num_return_sequences=2)
    found = slots_of(model, args, sampler, slots)(batches(5, 3))
    for prompts, responses in zip(batches(5, 3), found, strict=True):
        expected = generate(model, prompts, args, sampler, PAD)
        size = expected.ids.shape[1]
        assert torch.equal(responses.ids[:, :size], expected.ids)
        assert torch.equal(responses.mask[:, :size], expected.mask)
        assert torch.equal(responses.ended, expected.ended)
        assert not responses.mask[:, size:].any()


def test_tokens_come_as_often_as_they_are_probable():
    model, sampler = model_of(vocab_size=120, initializer_range=0.2), plain_sampler(1.3)
    args = RolloutArgs(max_new_tokens=1, temperature=1.3, num_return_sequences=20_000)
    torch.manual_seed(0)
    [responses] = slots_of(model, args, sampler, slots=20_000)(batches(1))
    with torch.no_grad():
        logits = model(torch.tensor([ROWS[0]])).logits[0, -1, :100] / 1.3  # rows from 100 on are spare
    expected = 20_000 * logits.softmax(0)
    observed = torch.bincount(responses.ids[:, 0], minlength=100)
    assert len(observed) == 100
    # chi-squared with 99 degrees of freedom has mean 99 and deviation 14
    assert 40 < float(((observed - expected) ** 2 / expected).sum()) < 170


def test_a_narrow_copy_follows_the_weights():
    model, args, sampler = model_of(), RolloutArgs(max_new_tokens=5), plain_sampler()
    slots = slots_of(model, args, sampler, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    [responses] = slots(batches(3))
    narrow = copy.deepcopy(model).bfloat16()
    with torch.no_grad():
        for row in range(3):
            ids = responses.ids[row, : int(responses.mask[row].sum())].tolist()
            alone = scored_alone(narrow, sampler, ROWS[row], ids)
            torch.testing.assert_close(responses.logprobs[row, : len(ids)], alone, rtol=0, atol=0.15)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_adapters_are_merged_into_the_copy(tmp_path):
    args = ModelArgs(finetune_mode="lora", lora_alpha=16.0, disable_dropout=True)
    model = prepare_training(load_causal(save_causal(tmp_path, "llama"), make_tokenizer(), args), args)
    rollout_args, sampler = RolloutArgs(max_new_tokens=6, temperature=GREEDY), plain_sampler(GREEDY)
    slots = slots_of(model, rollout_args, sampler, dtype=torch.float64)  # wider, so that rounding decides nothing
    before = slots(batches(5))[0].ids
    shake_adapters(model)
    [after] = slots(batches(5))
    expected = generate(model.eval(), batches(5)[0], rollout_args, sampler, PAD)
    assert torch.equal(after.ids[:, : expected.ids.shape[1]], expected.ids)
    assert before.shape != after.ids.shape or not torch.equal(before, after.ids)


def test_the_run_and_the_model_do_not_notice():
    model, args, sampler = model_of().train(), RolloutArgs(max_new_tokens=5), plain_sampler()
    before = torch.get_rng_state()
    slots = slots_of(model, args, sampler)
    assert torch.equal(torch.get_rng_state(), before)
    slots(batches(3))
    assert not torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert model.config._attn_implementation != ATTENTION


def test_the_same_seed_draws_the_same():
    slots = slots_of(model_of(), RolloutArgs(max_new_tokens=9), plain_sampler(stop_ids=[EOS, *range(40, 70)]))
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(slots(batches(5, 3)))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(drawn[0], drawn[1], strict=True))
    assert not all(a.ids.shape == b.ids.shape and torch.equal(a.ids, b.ids) for a, b in zip(*drawn[1:], strict=True))


# A model that slots cannot serve


def misplaced(self, key_states, value_states, *_, **__):
    """A cache that writes every token over the first."""
    self.keys[:, :, 0], self.values[:, :, 0] = key_states[:, :, 0], value_states[:, :, 0]
    return self.keys[:, :, : self.limit], self.values[:, :, : self.limit]


def of_flags(generator, model, capsys=None, device="cuda"):
    fabric = Fabric(accelerator="cpu", devices=1)
    shown = SimpleNamespace(device=torch.device(device), _precision=fabric._precision, print=fabric.print)
    args = RolloutArgs(max_new_tokens=5, generator=generator)
    return make_generator(model, args, plain_sampler(), make_tokenizer(), shown, (2, LONGEST + args.max_new_tokens))


def test_what_decodes_otherwise_than_it_scores_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(SlotLayer, "update", misplaced)
    with pytest.raises(
        ValueError, match="--generator=slots: LlamaForCausalLM cannot be sampled so: it decodes otherwise"
    ):
        of_flags("slots", model_of())
    assert isinstance(of_flags("auto", model_of()), HuggingFaceGenerator)
    assert (
        "rollouts: Hugging Face's generate, since slots cannot serve LlamaForCausalLM (it decodes"
        in capsys.readouterr().out
    )


def test_which_generator_the_flag_means(capsys):
    assert isinstance(of_flags("hf", model_of()), HuggingFaceGenerator)
    assert isinstance(of_flags("auto", model_of(), device="cpu"), HuggingFaceGenerator)
    assert isinstance(of_flags("auto", model_of()), SlotGenerator)
    assert "rollouts: 2 slots of 16 tokens, no CUDA graph, ready in " in capsys.readouterr().out


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_sample_what_is_scored(kind):
    model, sampler = model_of(kind).cuda(), plain_sampler(GREEDY, stop_ids=[EOS, *range(40, 60)])
    args = RolloutArgs(max_new_tokens=40, temperature=GREEDY)
    slots = slots_of(model, args, sampler)
    assert 1 < len(slots.graphs) <= 4
    prompts = [PromptBatch(b.input_ids.cuda(), b.attention_mask.cuda()) for b in batches(5, 3)]
    for batch, responses in zip(prompts, slots(prompts), strict=True):
        expected = generate(model, batch, args, sampler, PAD)
        size = expected.ids.shape[1]
        assert torch.equal(responses.ids[:, :size], expected.ids)
        assert torch.equal(responses.mask[:, :size], expected.mask)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_follow_the_weights_and_the_seed(compiled):
    model, sampler = model_of().cuda(), plain_sampler()
    slots = slots_of(model, RolloutArgs(max_new_tokens=12), sampler, dtype=torch.bfloat16, compiled=compiled)
    prompts = [PromptBatch(b.input_ids.cuda(), b.attention_mask.cuda()) for b in batches(5, 3)]
    drawn = []
    for seed, scale in ((1, 1.0), (1, 1.0), (2, 1.0), (1, 1.5)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        torch.manual_seed(seed)
        drawn.append(slots(prompts)[0].ids.tolist())
    assert drawn[0] == drawn[1]
    assert drawn[2] != drawn[1] != drawn[3]
