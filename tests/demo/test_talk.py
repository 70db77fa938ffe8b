from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_stages.args import DemoArgs, GenerationArgs
from rlhf_stages.demo import talk
from rlhf_stages.demo.choices import Source
from rlhf_stages.demo.talk import Models, Reply, Request, Turn, answer

from helpers import make_tokenizer, save_causal, save_classifier

SAMPLING = GenerationArgs(max_new_tokens=8, min_new_tokens=8, top_k=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talk")
    save_causal(folder / "one", seed=1)
    save_causal(folder / "two", seed=2)
    save_classifier(folder / "judge", seed=3)
    return folder


@pytest.fixture
def models():
    return Models(DemoArgs(device="cpu"))


def ask(models, folder, *names, turns=None, text="name the colour", judge="", stopped=lambda: False, **how):
    turns = [] if turns is None else turns
    request = Request([(str(folder / name), "") for name in names], judge, SAMPLING, **how)
    shown = [[reply.text for reply in turns[-1].replies] for _ in answer(models, turns, text, request, stopped)]
    return turns[-1].replies, shown


def test_a_reply_grows_piece_by_piece_and_two_models_answer_in_turn(models, folder):
    (first, second), shown = ask(models, folder, "one", "two", seed=5)
    assert shown[0] == ["", ""]
    for earlier, later in pairwise(shown):
        assert all(b.startswith(a) for a, b in zip(earlier, later, strict=True))
    assert len({row[0] for row in shown}) > 3
    assert [first.text, second.text] == shown[-1]
    assert first.text != second.text
    assert (first.done, first.error, first.stopped, first.tokens) == (True, "", False, 8)
    assert 0 < first.first <= first.seconds
    assert first.name.startswith(str(folder / "one"))


def test_the_same_seed_gives_the_same_reply_and_none_another(models, folder):
    (left, right), _ = ask(models, folder, "one", "one", seed=5)
    assert left.text == right.text
    texts = {ask(models, folder, "one")[0][0].text for _ in range(4)}
    assert len(texts) > 1


def test_the_score_is_that_of_the_reward_model(models, folder):
    reply = ask(models, folder, "one", judge=str(folder / "judge"), seed=5)[0][0]
    session = models.session(Source(str(folder / "one"), None, ""))
    assert session.last == ([], "", 0)  # nobody's conversation is another's
    torch.manual_seed(5)
    assert session.reply("name the colour", SAMPLING) == reply.text
    tokenizer = make_tokenizer()
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "judge").eval()
    prompt = tokenizer("\n\nHuman: name the colour\n\nAssistant:", add_special_tokens=False)["input_ids"]
    written = tokenizer(session.last[1].rstrip(), add_special_tokens=False)["input_ids"]
    expected = judge(torch.tensor([[1, *prompt, *written, 2]])).logits.item()  # from BOS to EOS
    assert reply.score == pytest.approx(expected, abs=1e-5)


def test_what_is_no_reward_model_leaves_the_reply(models, folder):
    reply = ask(models, folder, "one", judge=str(folder / "two"))[0][0]
    assert reply.text
    assert reply.score is None
    assert "no trained reward head" in reply.unscored


def test_stopping_keeps_what_was_said(models, folder):
    pieces = iter([False, True])
    reply, other = ask(models, folder, "one", "two", seed=5, stopped=lambda: next(pieces, True))[0]
    whole = ask(models, folder, "one", seed=5)[0][0]
    assert reply.stopped
    assert reply.done
    assert reply.text
    assert whole.text.startswith(reply.text)
    assert other.stopped or len(other.text) < len(ask(models, folder, "two", seed=5)[0][0].text)


def test_an_error_stands_in_the_reply_and_the_next_request_works(models, folder, monkeypatch):
    turns = []
    session = models.session(Source(str(folder / "one"), None, str(folder / "one")))

    def fail(*args, **kwargs):
        raise RuntimeError("CUDA out of memory\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(type(session.model), "generate", fail)
        reply = ask(models, folder, "one", turns=turns)[0][0]
    assert reply.error == "RuntimeError: CUDA out of memory"
    assert reply.done
    reply = ask(models, folder, "one", turns=turns)[0][0]
    assert (reply.error, bool(reply.text)) == ("", True)
    wrong = ask(models, folder, "judge", "nowhere", turns=turns)[0]
    assert "is a reward model" in wrong[0].error
    assert "nowhere" in wrong[1].error


def test_each_model_remembers_its_own_replies_and_no_failed_ones():
    turns = [
        Turn("q1", [Reply("a", "a1"), Reply("b", "b1")]),
        Turn("q2", [Reply("a", "a2", error="broke"), Reply("b", "b2")]),
        Turn("q3", [Reply("a", "a3")]),
    ]
    said = lambda k: [message["content"] for message in talk._history(turns, k)]  # noqa: E731
    assert said(0) == ["q1", "a1", "q3", "a3"]
    assert said(1) == ["q1", "b1", "q2", "b2"]


def test_models_are_kept_and_only_so_many(models, folder, monkeypatch):
    monkeypatch.setattr(talk, "KEPT", 2)
    one, two = (Source(str(folder / name), None, name) for name in ("one", "two"))
    first = models.session(one).model
    assert models.session(one).model is first
    models.session(two)
    models.scorer(str(folder / "judge"), torch.device("cpu"))
    assert models.session(one).model is not first
    again = models.session(one).model
    assert models.session(one, fresh=True).model is not again


def test_the_format_of_the_prompts_can_be_that_of_the_data(models, folder):
    template = "{{ bos_token or '' }}{{ messages[-1]['content'] }} name the"
    session = models.session(Source(str(folder / "one"), template, "base"))
    session.reply("red tea", SAMPLING)
    tokenizer = make_tokenizer()
    assert session.last[0] == [1, *tokenizer("red tea name the", add_special_tokens=False)["input_ids"]]
