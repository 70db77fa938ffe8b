"""docs/concepts.md is run: its formulas against the package's, its numbers against both, its shapes against tensors."""

import re
from dataclasses import fields
from functools import cache

import pytest
import torch

from rlhf_stages.args import ModelArgs, PPOArgs
from rlhf_stages.data.collate import PromptBatch, collate_finetune, collate_preference
from rlhf_stages.data.shards import Record
from rlhf_stages.functional.advantages import gae, kl_estimate, token_rewards
from rlhf_stages.functional.dpo import dpo_loss
from rlhf_stages.functional.losses import last_token_reward_loss, per_sample_reward_loss
from rlhf_stages.functional.masking import moments, whiten
from rlhf_stages.functional.ppo import clip_bounds, kl_loss, log_ratio, policy_loss, value_loss
from rlhf_stages.functional.tokens import sft_loss
from rlhf_stages.kl_control import HorizonKL
from rlhf_stages.models.loading import load_causal, load_scalar
from rlhf_stages.rollout.collect import join, score_responses
from rlhf_stages.rollout.experience import make_experience
from rlhf_stages.rollout.generation import Responses

from helpers import (
    ROOT,
    left_padded,
    make_tokenizer,
    model_scorer,
    plain_sampler,
    right_padded,
    save_causal,
    save_classifier,
)
from ragged import close, doubles

PAGE = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
MASK = torch.tensor([[True, True, True, False]])


@cache
def said():
    """What the code on the page computes."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    return names


def row(name, *, junk=float("nan")):
    """A list of the page as the one row of a batch, with a place of padding behind it."""
    return doubles([[*said()[name], junk]])


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def numbers():
    """(name, values) of the rows of the tables that hold numbers."""
    rows = [cells(line) for line in PAGE.splitlines() if re.match(r"\| (sum of )?`\w+` \| -?[\d.]+", line)]
    return [(name, [float(value) for value in values]) for name, *values in rows]


def shapes():
    """{class: {field: letters of its shape}} of the tables of fields."""
    found = {}
    for match in re.finditer(r"\| field of `(\w+)` \| shape \|\n\| --- \| --- \|\n((?:\| .*\n)+)", PAGE):
        for names, shape in map(cells, match[2].splitlines()):
            letters = re.findall(r"[A-Z]", shape)
            found.setdefault(match[1], {}).update(dict.fromkeys(re.findall(r"`(\w+)`", names), letters))
    return found


def test_the_page_has_code_and_tables():
    assert len(numbers()) == 17
    assert list(shapes()) == [
        "FinetuneBatch", "PreferenceBatch", "PromptBatch", "Responses", "Texts", "Rollout", "Experience"
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "values"), numbers(), ids=lambda text: str(text)[:20])
def test_every_number_of_the_tables_is_what_the_code_above_gives(name, values):
    computed = said()[re.search(r"\w+", name.removeprefix("sum of "))[0]]
    computed = computed if isinstance(computed, list) else [computed]
    if name.startswith("sum of "):
        computed = [sum(computed)]
    assert values == pytest.approx(computed, abs=5.1e-5)


def test_rewards_advantages_and_whitening_are_the_packages():
    page = said()
    kl = kl_estimate(row("logprobs"), row("ref_logprobs"), MASK)
    rewards = token_rewards(doubles([page["score"]]), kl, MASK, page["kl_coeff"])
    advantages, returns = gae(rewards, row("values"), MASK, page["gamma"], page["lambd"])
    whitened = whiten(advantages, MASK, moments(advantages, MASK), shift_mean=True)
    found = {"kl": kl, "rewards": rewards, "advantages": advantages, "returns": returns, "whitened": whitened}
    for name, tensor in found.items():
        close(tensor, row(name, junk=0.0))


def test_policy_and_value_losses_are_the_packages():
    page = said()
    ratio = log_ratio(row("new_logprobs"), row("logprobs"), MASK).exp()
    close(ratio, row("ratio", junk=1.0))
    close(ratio.clamp(*clip_bounds(page["clip_coeff"], None)), row("clipped", junk=1.0))
    for t in range(3):  # one token at a time, so that each number on the page is compared
        only = torch.arange(4)[None] == t
        policy, _ = policy_loss(row("new_logprobs"), row("logprobs"), row("whitened"), only, page["clip_coeff"])
        value, _ = value_loss(row("new_values"), row("values"), row("returns"), only, page["clip_coeff"])
        kl, _ = kl_loss(row("new_logprobs"), row("logprobs"), row("ref_logprobs"), only)
        close(policy, page["policy_losses"][t])
        close(value, page["value_losses"][t])
        close(kl, page["kl_losses"][t])


def test_what_is_said_of_the_second_token_is_so():
    logprobs = row("new_logprobs").requires_grad_()
    loss, count = policy_loss(logprobs, row("logprobs"), row("whitened"), MASK, said()["clip_coeff"])
    loss.backward()
    assert count == 3
    assert [bool(g) for g in logprobs.grad[0, :3]] == [True, False, True]


def test_the_kl_controller_is_the_packages():
    page = said()
    control = HorizonKL(page["kl_coeff"], page["target"], page["horizon"])
    control.update(page["measured"], page["n"])
    assert control.coeff == pytest.approx(page["new_kl_coeff"], rel=1e-12)


def test_losses_of_the_other_stages_are_the_packages():
    page = said()
    better, worse = doubles([page["better"]]), doubles([[*page["worse"], float("nan")]])
    places = [torch.tensor([n]) for n in (1, 3, 2)]  # first difference, and the lengths
    no_margin = torch.zeros(1, dtype=torch.float64)
    close(last_token_reward_loss(better, worse, *places, no_margin)[0], page["last_token_loss"])
    close(per_sample_reward_loss(better, worse, *places, no_margin)[0], page["per_sample_loss"])
    pairs = [doubles([page[name]]) for name in ("policy_better", "policy_worse", "ref_better", "ref_worse")]
    close(dpo_loss(*pairs, page["beta"])[0], page["dpo_loss"])
    # of the tokens 0, 1, 2: the logits at the first two places give the next one 1/2 and 1/4
    logits = torch.tensor([[[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]]).log()
    logits = logits[:, :, [0, 1, 2]]
    total, count = sft_loss(logits, torch.tensor([[0, 1, 2]]), ignore_index=-1)
    close(total / count, page["sft_loss"], rtol=1e-6)


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    """One object of each class that the page has a table of."""
    folder, args, tokenizer = tmp_path_factory.mktemp("concepts"), ModelArgs(), make_tokenizer()
    actor = load_causal(save_causal(folder / "a"), tokenizer, args)
    scalar = load_scalar(save_classifier(folder / "c"), tokenizer, args, trained_head=True)
    prompts = PromptBatch(*left_padded([[1, 5, 6, 7], [1], [1, 9, 10, 11, 12]], 3))
    responses = Responses(*right_padded([[20, 2], [21, 22, 2], [23, 2]], 3), torch.tensor([True] * 3))
    rollout = score_responses(
        prompts, responses, actor=actor, reference=actor, critic=scalar, scorer=model_scorer(scalar),
        sampler=plain_sampler(),
    )  # fmt: skip
    text, replies = torch.tensor([1, 5, 6]), tuple(torch.tensor([7, *[8] * n, 2]) for n in range(4))
    lists = [Record(text, replies, (False,) * 4), Record(text, replies[:2], (False,) * 2)]
    one = [Record(text, replies[:1], (False,)), Record(text, replies[3:], (False,))]
    experience = make_experience(rollout, PPOArgs(sft_experiment_dir="", rm_experiment_dir=""), kl_coeff=0.1)
    found = [
        collate_finetune(one, pad_token_id=3, ignore_index=-1, use_targets=True, mask_prompt=True),
        collate_preference(lists, pad_token_id=3),
        *(prompts, responses, join(prompts, responses), rollout, experience),
    ]
    return {type(each).__name__: each for each in found}


@pytest.mark.parametrize("name", shapes())
def test_shapes_are_those_of_real_tensors(tensors, name):
    sizes = {"Rollout": {"B": 3, "P": 5, "R": 3}, "Experience": {"B": 3, "R": 3}, "PreferenceBatch": {"S": 6, "Q": 7}}
    bound = dict(sizes.get(name, {}))
    for field, letters in shapes()[name].items():
        shape = getattr(tensors[name], field).shape
        assert len(shape) == len(letters), field
        for letter, size in zip(letters, shape, strict=True):
            assert bound.setdefault(letter, size) == size, f"{name}.{field}: {letter}"


def test_no_tensor_of_the_loop_is_left_out(tensors):
    # the parts of a reward, a column for each, stand in docs/rewards.md; what is text has no shape
    left_out = {
        "Rollout": {"part_scores", "samples"}, "Experience": {"rollout"}, "PromptBatch": {"records"},
        "Responses": {"logprobs"},
    }  # fmt: skip
    for name, rows in shapes().items():
        assert {field.name for field in fields(tensors[name])} == rows.keys() | left_out.get(name, set())


def test_every_name_on_the_page_is_one_of_the_package():
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    text = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    for name in re.findall(r"`(?:\w+\.)?(\w+)(?:\[[^`]*\])?`", text):
        defined = re.search(rf"^\s*(?:def|class) {name}\b|^\s+{name}: ", source, re.MULTILINE)
        assert defined or name in said() or name == "tests", name
    for name in re.findall(r"--(\w+)", text):
        assert re.search(rf"^    {name}: ", source, re.MULTILINE), f"--{name}"
