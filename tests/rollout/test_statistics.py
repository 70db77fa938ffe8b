import pytest
import torch

from rlhf_stages.rollout.collect import Rollout
from rlhf_stages.rollout.statistics import rollout_metrics


def test_rollout_metrics_by_hand():
    junk = 99.0
    rollout = Rollout(
        prompt_ids=torch.zeros(3, 1),
        prompt_mask=torch.ones(3, 1, dtype=torch.bool),
        response_ids=torch.zeros(3, 4),
        response_mask=torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool(),
        logprobs=torch.tensor([[-1.0, -2, -3, junk], [-1, junk, junk, junk], [-1, -1, -1, -1]]),
        ref_logprobs=torch.tensor([[-1.5, -2.5, -3.5, -junk], [-2, 0, 0, 0], [-1, -2, -1, -2]]),
        entropies=torch.zeros(3, 4),
        values=torch.zeros(3, 4),
        part_scores=torch.zeros(3, 1),
        token_scores=torch.zeros(3, 4),
        scores=torch.tensor([1.0, 2.0, 6.0]),
        ended=torch.tensor([True, True, False]),
    )
    metrics = {name: value.item() for name, value in rollout_metrics(rollout, "val").items()}
    assert metrics == pytest.approx(
        {
            "val/reward_mean": 3.0,  # (1 + 2 + 6) / 3
            "val/kl_div_mean": 2 / 3,  # per token: 0.5, 1, 2 / 4
            "val/kl_sequence": 4.5 / 3,  # summed: 1.5, 1, 2
            "val/response_length": 8 / 3,
            "val/cut_off_percentage": 100 / 3,  # the third has no EOS
            "val/empty_percentage": 100 / 3,  # the second is EOS alone
        }
    )


def test_the_mean_reward_counts_scores_of_tokens_but_not_under_the_padding():
    mask = torch.tensor([[True, True], [True, False]])
    zeros = torch.zeros(2, 2)
    tokens = torch.tensor([[0.5, 0.25], [1.0, 99.0]])
    rollout = Rollout(zeros, mask, zeros, mask, *[zeros] * 4, torch.tensor([1.0, 2.0]), zeros, tokens, mask[:, 0])
    assert rollout_metrics(rollout, "x")["x/reward_mean"].item() == (1.75 + 3) / 2


def test_one_token_that_was_cut_off_is_not_an_empty_response():
    one = torch.ones(1, 1)
    rollout = Rollout(*[one, one.bool()] * 2, *[one] * 4, torch.ones(1), one, one, torch.tensor([False]))
    assert rollout_metrics(rollout, "x")["x/empty_percentage"] == 0
