"""Results as text."""

from dataclasses import asdict

import pytest

from rlhf_stages.args import EvaluateArgs, GenerationArgs
from rlhf_stages.evaluation.document import document, settings_line, side_by_side
from rlhf_stages.evaluation.policies import Reply


def reply(prompt, text, gold=None):
    return Reply(prompt=prompt, text=text, tokens=1, ended=True, kl=0.0, reward=None, gold=gold)


def test_replies_side_by_side():
    replies = {
        "sft": [reply("\n\nHuman: one?", " no \n idea ", gold=0.25), reply("two?", "b")],
        "ppo": [reply("one?", "yes", gold=1.0), reply("two?", "")],
    }
    assert side_by_side(replies, count=2) == (
        "Human: one?\nsft  no idea  [gold 0.25]\nppo  yes  [gold 1.00]\n\ntwo?\nsft  b\nppo  "
    )
    assert side_by_side(replies, count=1).count("sft") == 1
    assert side_by_side(replies, count=9).count("sft") == 2


def test_long_replies_are_wrapped_under_their_name():
    lines = side_by_side({"sft": [reply("?", "word " * 30)]}, count=1, width=40).splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert [line[:5] for line in lines[1:]] == ["sft  "] + ["     "] * (len(lines) - 2)
    assert " ".join(line[5:] for line in lines[1:]).split() == ["word"] * 30


def test_how_the_replies_were_drawn():
    sampled = GenerationArgs(max_new_tokens=20, min_new_tokens=2, top_k=20, num_return_sequences=3)
    assert settings_line(sampled, 7) == "temperature 1, top-k 20, top-p 1, 2 to 20 tokens, 3 to a prompt, seed 7"
    beams = settings_line(GenerationArgs(do_sample=False, num_beams=4), 42)
    assert beams == "most probable token, 4 beams, 0 to 128 tokens, seed 42"


ENTRY = {"value": 0.5, "low": 0.4, "high": 0.6}
SHARE = {"longer wins": {"value": 0.25, "low": 0.1, "high": 0.4}, "rm": ENTRY}
RESULTS = {
    "dataset": "toy",
    "args": asdict(EvaluateArgs(experiment_dirs=["a"])),
    "generation": asdict(GenerationArgs()),
    "prompts": 9,
    "texts": 4,
    "reference": "sft",
    "checkpoints": {"sft": "a/sft", "rm": "a/<rm>"},
    "summary": {"sft": {"METEOR": ENTRY}},
    "whole": {"sft": {"distinct-1": 0.25}},
    "reward_accuracy": {"test": {"all pairs": {"n": 1234, "share": SHARE}}},
    "notes": ["no accuracy on train pairs: there is no preference_train.pt"],
}


@pytest.mark.parametrize("markdown", [False, True])
def test_a_document_has_everything_that_was_found(markdown):
    text = document(RESULTS, markdown)
    flat = " ".join(text.split())
    for part in (
        "toy: 9 held-out prompts (test split); temperature 1, top-k 50, top-p 1, 0 to 128 tokens, seed 42",
        "KL is to sft, in nats per reply; perplexity is that of 4 of the data's own responses; ± is half of the 95 %"
        " interval of 1,000 resamples of the prompts",
        "0.500 ±0.100", "0.250 (0.100-0.400)", "0.500 (0.400-0.600)", "1,234",
        "no accuracy on train pairs: there is no preference_train.pt", "sft: a/sft",
    ):  # fmt: skip
        assert part in flat, part
    assert ("<rm>" in text) is not markdown
    assert markdown or max(map(len, text.splitlines())) <= 100


def test_what_was_not_measured_is_not_spoken_of():
    kept = ("dataset", "args", "generation", "checkpoints", "prompts", "texts")
    text = document({name: RESULTS[name] for name in kept} | {"notes": ["no replies: x.pt holds no records"]}, False)
    assert text == "sft: a/sft\nrm: a/<rm>\n\nno replies: x.pt holds no records"


def test_a_single_prompt():
    text = document(RESULTS | {"prompts": 1, "texts": 0, "summary": {"sft": {"METEOR": {"value": 0.5}}}}, False)
    assert text.startswith("toy: 1 held-out prompt (")
    assert "±" not in text
    assert "perplexity" not in text
