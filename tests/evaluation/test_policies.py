from types import SimpleNamespace

import pytest
import torch

from rlhf_stages.args import FabricArgs, GenerationArgs, ModelArgs
from rlhf_stages.data.shards import ShardWriter, open_shard
from rlhf_stages.evaluation.policies import Reply, measures, policy_replies, with_probabilities
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


def reply(text, tokens=2, ended=True, kl=0.0, reward=None, gold=None, **more):
    return Reply("p", text, tokens, ended, kl, reward, gold, **more)


REPLIES = [
    reply("a b c", 4, True, 1.0, reward=0.0, gold=1.0, probability=0.9),
    reply(" ", 1, True, 2.0, reward=-3.0, gold=0.0, probability=0.0),
    reply("a b d e", 7, False, 6.0, reward=6.0, gold=0.5, repeats=True, probability=0.4),
    reply("a b", 4, True, -1.0, reward=1.0, gold=0.5, repeats=True, probability=0.1),
]


@pytest.mark.parametrize("each", [1, 2])
def test_measures_by_hand(each):
    found, whole = measures(REPLIES, each)
    assert {name: measure.value(measure.counts.sum(0)) for name, measure in found.items()} == pytest.approx(
        {
            "gold score": 0.5,
            "reward-model score": 1.0,
            "classifier probability": 0.35,
            "KL to the reference (nats)": 2.0,
            "mean length (tokens)": 4.0,
            "repeated token (%)": 50.0,
            "empty replies (%)": 25.0,
            "cut-off replies (%)": 25.0,
        }
    )
    assert whole == {"distinct-1": 5 / 9, "distinct-2": 4 / 6}  # a b c d e of nine; ab bc bd de of ab bc ab bd de ab
    # what is resampled are prompts, with all their replies
    assert found["gold score"].counts.tolist() == ([[1, 1], [0, 1], [0.5, 1], [0.5, 1]], [[1, 2], [1, 2]])[each - 1]


def test_what_nothing_gave_is_no_measure():
    assert not {"gold score", "reward-model score", "classifier probability"} & set(measures([reply("a b")])[0])


def test_the_classifier_reads_prompts_and_responses():
    def judge(prompts, responses, metadata):
        assert (prompts, responses, metadata) == (["p", "p"], [" good", " bad"], [{}, {}])
        return [0.75, 0.0]

    replies = [reply(" good"), reply(" bad")]
    assert [r.probability for r in with_probabilities(replies, judge)] == [0.75, 0.0]
