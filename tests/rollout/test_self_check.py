import pytest
import torch
from torch import nn

from rlhf_stages.args import FabricArgs, FrozenArgs, ModelArgs, RolloutArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.loop import start_fabric
from rlhf_stages.models.dropout import disable_dropout
from rlhf_stages.models.frozen import freeze
from rlhf_stages.models.loading import load_causal
from rlhf_stages.rollout.generators import HuggingFaceGenerator
from rlhf_stages.rollout.self_check import self_check

from helpers import KINDS, left_padded, make_tokenizer, plain_sampler, save_causal

PAD, EOS = 3, 2
ROWS = [[1, 5, 6, 7], [1], [1, 9, 10, 11, 12, 13, 14], [1, 15]]
PROMPTS = PromptBatch(*left_padded(ROWS, PAD))
HOSTILE = {"repetition_penalty": 1.5, "top_k": 3, "top_p": 0.5, "min_length": 9, "temperature": 3.0, "do_sample": True}
ARGS = RolloutArgs(max_new_tokens=12, temperature=0.7)
SAMPLER = plain_sampler(0.7)


def check(folder, kind="gpt2", edit=None, args=ARGS, sampler=SAMPLER, precision="32-true", pad=PAD, frozen=None):
    """The self-check of a fresh actor and reference; `edit` may break the actor, `frozen` is done to the reference."""
    fabric = start_fabric(FabricArgs(accelerator="cpu", devices="1", precision=precision), seed=1)
    folder = save_causal(folder, kind, dropout=0.3, generation_config=HOSTILE)
    actor, reference = (load_causal(folder, make_tokenizer(), ModelArgs(disable_dropout=True)) for _ in range(2))
    if edit is not None:
        edit(actor)
    reference = freeze(reference, fabric.device, frozen)
    prompts = PromptBatch(*left_padded(ROWS, pad))
    generator = HuggingFaceGenerator(actor, args, sampler, pad, fabric)
    return self_check(fabric.setup_module(actor), reference, prompts, generator, sampler, fabric)


@pytest.mark.parametrize("pad", [PAD, EOS])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sampled_is_what_is_scored_and_trained(tmp_path, kind, pad):
    """Dropout and a hostile generation config in the folder, mixed lengths, temperature, padding that may be EOS."""
    sampled, trained, referred = check(tmp_path, kind, pad=pad)
    assert sampled.max_log_ratio < 1e-5
    assert sampled.mean_kl < 1e-9
    assert trained.max_log_ratio == referred.max_log_ratio == 0
    assert str(trained) == "scorer and update: max |log-ratio| 0, mean KL 0"


def test_bf16_has_more_room(tmp_path):
    sampled, *_ = check(tmp_path, "llama", precision="bf16-mixed")
    assert 0 < sampled.max_log_ratio < 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_in_bf16_has_more_room_and_no_more_than_that(tmp_path, kind, precision):
    half = FrozenArgs(frozen_dtype="bf16")
    *_, referred = check(tmp_path, kind, precision=precision, frozen=half)
    assert 1e-4 < referred.max_log_ratio < 2
    assert 0 < referred.mean_kl < 5e-3
    if kind == "gpt2" and precision == "32-true":
        with pytest.raises(ValueError, match=r"actor and reference: .*rounding explains 2 and 0\.005"):
            check(tmp_path, kind, moved, frozen=half)
        with pytest.raises(ValueError, match=r"sampler and scorer: .*rounding explains 0\.1 and 0\.0001"):
            check(tmp_path, kind, penalty, frozen=half)


def wrong_dropout(actor):
    for module in actor.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1


def penalty(actor):
    actor.generation_config.repetition_penalty = 1.5


def moved(actor):
    actor.transformer.ln_f.bias.data.normal_(std=0.5)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (wrong_dropout, "scorer and update: max"),
        (penalty, "sampler and scorer: max"),
        (moved, "actor and reference: max"),
    ],
)
def test_it_stops_and_names_the_causes(tmp_path, edit, message):
    with pytest.raises(ValueError, match=rf"^self-check: the log-probabilities of {message}.*usual causes: dropout"):
        check(tmp_path, edit=edit)


def test_another_temperature_in_the_scorer_is_found(tmp_path):
    with pytest.raises(ValueError, match="sampler and scorer"):
        check(tmp_path, sampler=plain_sampler(1.0))


def test_a_scorer_that_does_not_know_the_minimum_length_is_found(tmp_path):
    def sampled_otherwise(actor):
        original = actor.generate
        actor.generate = lambda **kwargs: original(**{**kwargs, "logits_processor": longer.processor(7)})

    longer = plain_sampler(0.7, min_new_tokens=10, stop_ids=range(2, 60))
    with pytest.raises(ValueError, match="sampler and scorer"):
        check(tmp_path, edit=sampled_otherwise)


def test_the_run_does_not_notice(tmp_path):
    fabric = start_fabric(FabricArgs(accelerator="cpu", devices="1"), seed=1)
    actor, reference = (load_causal(save_causal(tmp_path), make_tokenizer(), ModelArgs()) for _ in range(2))
    disable_dropout(actor)
    before = torch.get_rng_state()
    weights = {name: weight.clone() for name, weight in actor.state_dict().items()}
    generator = HuggingFaceGenerator(actor, ARGS, SAMPLER, PAD, fabric)
    self_check(fabric.setup_module(actor), reference, PROMPTS, generator, SAMPLER, fabric)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(weights[name], weight) for name, weight in actor.state_dict().items())
    assert all(parameter.grad is None for parameter in actor.parameters())
