from types import SimpleNamespace

import pytest
import torch

from rlhf_stages.args import FabricArgs, GenerationArgs, ModelArgs
from rlhf_stages.data.shards import ShardWriter, open_shard
from rlhf_stages.evaluation.policies import Reply, policy_replies, reward_accuracy, summarize, with_probabilities
from rlhf_stages.loop import freeze, start_fabric
from rlhf_stages.models.loading import load_causal, load_scalar

from helpers import make_tokenizer, save_causal, save_classifier


@pytest.fixture
def fabric():
    return start_fabric(FabricArgs(accelerator="cpu", devices="1"), seed=1)


@pytest.fixture
def shard(tmp_path):
    writer = ShardWriter()
    for prompt, better, worse in (
        ([1, 5, 6], [20, 21, 2], [22, 2]),
        ([1, 7], [23, 2], [24, 25, 26, 2]),
        ([1, 8, 9, 10, 11], [27, 2], [28, 2]),
    ):
        writer.add(prompt, [better, worse])
    writer.save(tmp_path / "pairs.pt")
    return open_shard(tmp_path / "pairs.pt")


def load(fabric, folder, seed=0):
    return freeze(fabric, load_causal(save_causal(folder, seed=seed), make_tokenizer(), ModelArgs()))


def load_reward(fabric, folder, kind="gpt2"):
    return freeze(fabric, load_scalar(save_classifier(folder, kind), make_tokenizer(), ModelArgs(), trained_head=True))


@pytest.mark.parametrize("sequences", [1, 2])
@torch.no_grad()
def test_replies_equal_a_loop_over_texts(tmp_path, fabric, shard, sequences):
    tokenizer = make_tokenizer()
    model, reference = load(fabric, tmp_path / "a"), load(fabric, tmp_path / "b", seed=1)
    reward_model = load_reward(fabric, tmp_path / "c")
    sampled = []
    original = model.generate
    model.generate = lambda **kwargs: sampled.append(original(**kwargs)) or sampled[-1]
    records = [shard[i] for i in range(3)]
    args = GenerationArgs(max_new_tokens=6, num_return_sequences=sequences)
    replies = policy_replies(
        model, reference, records, tokenizer, args, fabric, 2, reward_model, lambda prompt, text: float(len(text))
    )
    prompts = [record.prompt.tolist() for record in records for _ in range(sequences)]
    assert [reply.prompt for reply in replies] == [tokenizer.decode(prompt[1:]) for prompt in prompts]

    sizes = [3] * 2 * sequences + [5] * sequences  # the first batch is padded to three tokens, the second has five
    rows = [row.tolist()[size:] for row, size in zip((r for b in sampled for r in b.sequences), sizes, strict=True)]
    for reply, prompt, row in zip(replies, prompts, rows, strict=True):
        response = row[: row.index(2) + 1] if 2 in row else row
        assert (reply.tokens, reply.ended) == (len(response), response[-1] == 2)
        assert reply.text == tokenizer.decode(response, skip_special_tokens=True)
        assert reply.gold == len(reply.text)
        words = response[:-1] if reply.ended else response
        assert reply.repeats is any(words.count(i) > 1 and words.count(i) >= len(words) / 2 for i in words)
        text = torch.tensor([prompt + response])
        kl = 0.0
        for place, token in enumerate(response, start=len(prompt)):
            ours, theirs = (m(text).logits[0, place - 1].log_softmax(-1)[token] for m in (model, reference))
            kl += (ours - theirs).item()
        assert reply.kl == pytest.approx(kl, abs=1e-4)
        score = reward_model.hf(text).logits[0, 0]
        assert reply.reward == pytest.approx(score.item(), abs=2e-5)


def test_the_stop_token_is_no_part_of_what_repeats(tmp_path, fabric, shard):
    model = load(fabric, tmp_path)
    rows = [[20, 20, 21, 22, 2], [20, 20, 21, 22, 23], [20, 2, 3, 3, 3], [2, 3, 3, 3, 3]]
    model.generate = lambda input_ids, **_: SimpleNamespace(
        sequences=torch.cat([input_ids.repeat(4, 1), torch.tensor(rows)], dim=1)
    )
    args = GenerationArgs(max_new_tokens=5, num_return_sequences=4)
    replies = policy_replies(
        model, model, [shard[0]], make_tokenizer(), args, fabric, 1, gold_score=lambda prompt, text: 0.0
    )
    # two of four before the end, two of five, one alone and nothing; padding does not count
    assert [reply.repeats for reply in replies] == [True, False, False, False]


def test_a_policy_has_no_kl_to_itself(tmp_path, fabric, shard):
    model = load(fabric, tmp_path)
    replies = policy_replies(model, model, [shard[0]], make_tokenizer(), GenerationArgs(max_new_tokens=5), fabric, 4)
    assert [(reply.kl, reply.reward, reply.gold) for reply in replies] == [(0.0, None, None)]


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@torch.no_grad()
def test_accuracy_against_single_texts(tmp_path, fabric, kind):
    writer = ShardWriter()
    for prompt, *responses in (
        ([1, 5, 6], [20, 21, 2], [22, 2], [4, 5, 2]),
        ([1, 7], [23, 2], [24, 25, 26, 2]),
        ([1, 8, 9, 10, 11], [27, 2], [28, 2]),
    ):
        writer.add(prompt, responses)
    writer.save(tmp_path / "lists.pt")
    shard = open_shard(tmp_path / "lists.pt")
    reward_model = load_reward(fabric, tmp_path / "c", kind)
    right = in_order = 0
    for record in shard:
        scores = [reward_model.hf(record.sequence(k)[None]).logits.item() for k in range(len(record.responses))]
        wins = [scores[i] > scores[j] for i in range(len(scores)) for j in range(i + 1, len(scores))]
        right += sum(wins)
        in_order += all(wins)
    for batch_size in (1, 2, 50):
        result = reward_accuracy(reward_model, shard, make_tokenizer(), fabric, batch_size)
        # the first list has 3 pairs, and only in it is a better text the longer one: than the second
        expected = {"pairs": 5, "accuracy": right / 5, "longer_wins": 1 / 5, "lists": 3, "order_accuracy": in_order / 3}
        assert result == pytest.approx(expected)


def test_a_tie_is_wrong(fabric, shard):
    assert (
        reward_accuracy(lambda ids, mask: torch.zeros(ids.shape), shard, make_tokenizer(), fabric, 2)["accuracy"] == 0
    )


def reply(text, tokens=2, ended=True, kl=0.0, reward=None, gold=None, **more):
    return Reply("p", text, tokens, ended, kl, reward, gold, **more)


def test_summary_by_hand():
    replies = [
        reply("a b c", 4, True, 1.0, reward=0.0, gold=1.0, probability=0.9),
        reply(" ", 1, True, 2.0, reward=-3.0, gold=0.0, probability=0.0),
        reply("a b d e", 7, False, 6.0, reward=6.0, gold=0.5, repeats=True, probability=0.4),
        reply("a b", 4, True, -1.0, reward=1.0, gold=0.5, repeats=True, probability=0.1),
    ]
    assert summarize(replies) == {
        "gold score": 0.5,
        "reward-model score": 1.0,
        "classifier probability": pytest.approx(0.35),
        "KL to the reference (nats)": 2.0,
        "mean length (tokens)": 4.0,
        "distinct-2": 4 / 6,  # ab bc ab bd de ab
        "repeated token (%)": 50.0,
        "empty replies (%)": 25.0,
        "cut-off replies (%)": 25.0,
    }
    assert not {"gold score", "reward-model score", "classifier probability"} & set(summarize([reply("a b")]))


def test_the_classifier_reads_prompt_and_response():
    class Judge:
        labels = ("negative", "positive")

        def probabilities(self, texts):
            assert texts == ["p good", "p bad"]
            return torch.tensor([[0.25, 0.75], [1.0, 0.0]])

    replies = [reply(" good"), reply(" bad")]
    for label, expected in (("positive", [0.75, 0.0]), ("negative", [0.25, 1.0])):
        assert [r.probability for r in with_probabilities(replies, Judge(), label)] == expected
    with pytest.raises(ValueError, match="knows no label 'fine', but negative, positive"):
        with_probabilities(replies, Judge(), "fine")
