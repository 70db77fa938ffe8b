import json
from functools import partial

import pytest
import torch

from rlhf_stages.args import FabricArgs, GenerationArgs, ModelArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.experiment import Experiment, describe
from rlhf_stages.loop import start_fabric
from rlhf_stages.models.loading import load_causal
from rlhf_stages.rollout.collect import Rollout
from rlhf_stages.rollout.samples import load_example_prompt, log_example, log_rollout_sample, sample, text_of
from rlhf_stages.tracking import Tracker

from helpers import left_padded, make_tokenizer, save_causal, write_data


@pytest.fixture
def fabric():
    return start_fabric(FabricArgs(accelerator="cpu", devices="1"), seed=1)


@pytest.fixture
def tracker(tmp_path, fabric):
    folder = Experiment.create(tmp_path / "run", describe("sft", {}, {}, {}), overwrite=False)
    return Tracker(folder, fabric, total_steps=1, arguments={})


def logged(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]


def test_example_prompt_as_prepare_writes_it(tmp_path, fabric):
    tokenizer = make_tokenizer()
    prompt = load_example_prompt(write_data(tmp_path, tokenizer), fabric)
    assert prompt.input_ids.dtype == torch.int64
    assert prompt.attention_mask.dtype == torch.bool
    assert prompt.input_ids[0, 0] == tokenizer.bos_token_id
    assert text_of(tokenizer, prompt.input_ids[0], prompt.attention_mask[0]).startswith("Human: name the price")


def test_no_example_prompt(tmp_path, fabric):
    with pytest.raises(
        FileNotFoundError, match=r"no .*example_prompt\.pt; data_prep/<dataset>/prepare_data\.py writes"
    ):
        load_example_prompt(tmp_path, fabric)


@pytest.mark.parametrize("content", [{"prompt": "text alone"}, [1, 2], "text", b"PK damaged"])
def test_an_example_prompt_of_another_kind(tmp_path, fabric, content):
    path = tmp_path / "example_prompt.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=r"example_prompt\.pt is damaged, .*prepare the data again") as caught:
        load_example_prompt(tmp_path, fabric)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        (torch.tensor([[1, 100]]), torch.ones(1, 2)),
        (torch.tensor([[1, -1]]), torch.ones(1, 2)),
        (torch.tensor([1, 5]), torch.ones(2)),
        (torch.tensor([[1, 5]]), torch.ones(1, 3)),
        (torch.tensor([[1], [5]]), torch.ones(2, 1)),
        (torch.empty(1, 0, dtype=torch.int64), torch.empty(1, 0)),
        (torch.ones(1, 1, dtype=torch.int64).expand(1, 2**40), torch.ones(1, 1).expand(1, 2**40)),
    ],
    ids=["id too large", "negative id", "no row", "lengths", "two rows", "empty", "stride 0"],
)
def test_an_example_prompt_that_no_model_can_read(tmp_path, fabric, ids, mask):
    torch.save({"input_ids": ids, "attention_mask": mask}, tmp_path / "example_prompt.pt")
    with pytest.raises(ValueError, match=r"example_prompt\.pt is damaged, or not a dictionary with"):
        load_example_prompt(tmp_path, fabric, vocab_size=100)


@pytest.mark.parametrize("training", [True, False])
def test_sampling_is_in_evaluation_mode_and_leaves_the_mode_as_it_was(tmp_path, fabric, training):
    tokenizer = make_tokenizer()
    model = load_causal(save_causal(tmp_path, dropout=0.5), tokenizer, ModelArgs()).train(training)
    args = GenerationArgs(max_new_tokens=4, do_sample=False)
    prompts = PromptBatch(*left_padded([[1, 5, 6], [1, 7]], 3))
    modes = []
    model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    first, second = (sample(model, prompts, tokenizer, args, fabric).ids for _ in range(2))
    assert torch.equal(first, second)
    assert not any(modes)
    assert model.training == training


def test_every_reply_to_the_example_is_logged(tmp_path, fabric, tracker):
    tokenizer = make_tokenizer()
    model = load_causal(save_causal(tmp_path / "model"), tokenizer, ModelArgs())
    prompts = load_example_prompt(write_data(tmp_path / "data", tokenizer), fabric)
    args = GenerationArgs(max_new_tokens=4, num_return_sequences=2)
    sampled = partial(sample, model, tokenizer=tokenizer, args=args, fabric=fabric)
    log_example(sampled, prompts, tokenizer, fabric, tracker, step=7)
    lines = logged(tmp_path)
    assert [(line["step"], line["name"]) for line in lines] == [(7, "example_sample")] * 2
    assert all(line["prompt"] == "Human: name the price of the red tea. Assistant:" for line in lines)


def test_rollout_sample_by_hand(tmp_path, tracker):
    tokenizer = make_tokenizer()
    prompt, response = (tokenizer(text)["input_ids"] for text in ("the red tea", " is good"))
    rollout = Rollout(
        prompt_ids=torch.tensor([[3, 1, *prompt]]),
        prompt_mask=torch.tensor([[False] + [True] * (len(prompt) + 1)]),
        response_ids=torch.tensor([[*response, 2, 3]]),
        response_mask=torch.tensor([[True] * (len(response) + 1) + [False]]),
        logprobs=torch.tensor([[-1.0] * (len(response) + 1) + [0]]),
        ref_logprobs=torch.tensor([[-1.5] * (len(response) + 1) + [0]]),
        entropies=torch.zeros(3, 4),
        values=torch.zeros(1, len(response) + 2),
        scores=torch.tensor([2.5]),
        part_scores=torch.tensor([[2.5]]),
        token_scores=torch.zeros(1, len(response) + 2),
        ended=torch.tensor([True]),
    )
    log_rollout_sample(rollout, tokenizer, tracker, step=3)
    assert logged(tmp_path) == [
        {
            "step": 3, "name": "rollout_sample", "prompt": "the red tea", "response": " is good",
            "score": 2.5, "kl": 0.5 * (len(response) + 1),
        }
    ]  # fmt: skip
