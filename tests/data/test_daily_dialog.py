import json
import re

import pytest

from rlhf_stages.args import DailyDialogArgs
from rlhf_stages.data.daily_dialog import Dialogues, chat_template, clean, to_dialogue, to_example, write_labelled
from rlhf_stages.data.readers import BadLine
from rlhf_stages.data.sources import SkipRecord, Source


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I don ’ t know , Bob . ", "I don't know, Bob."),
        ("I don't know , Bob .", "I don't know, Bob."),
        ("It ' s 7 o ’ clock , ma ’ am !", "It's 7 o'clock, ma'am!"),
        ("I ’ Ve seen it . You ’ ll see . We ’ d go .", "I've seen it. You'll see. We'd go."),
        ("Is it at 8 p . m . or at 7 : 30 ?", "Is it at 8 p.m. or at 7:30?"),
        ("That's $ 500 , or 1 , 000 , 15 % off ( in cash ) .", "That's $500, or 1,000, 15% off (in cash)."),
        ('She sings " Happy Birthday " .', 'She sings "Happy Birthday".'),
        ("He said “ no ” ... I see .", 'He said "no"... I see.'),
        ("Good.Let ' s go . I see Mr.Smith .", "Good. Let's go. I see Mr. Smith."),
        ("It is 。", "It is."),
        ("a hand - supported scooter , the kids ' ability", "a hand - supported scooter, the kids ' ability"),
        ("At www.stars.com , in the U.S. , 3.5 of 5", "At www.stars.com, in the U.S., 3.5 of 5"),
        ("  a\t b\n c ", "a b c"),
        ('an odd " quote', 'an odd " quote'),
    ],
)
def test_clean_makes_normal_english(text, expected):
    assert clean(text) == expected
    assert clean(expected) == expected


def test_clean_changes_no_letter_of_the_real_texts(shared_data):
    lines = (shared_data / "dailydialog/test/dialogues_test.txt").read_text(encoding="utf-8").splitlines()
    texts = [text for line in lines for text in line.split("__eou__") if text.strip()]
    assert len(texts) == 6998
    for text in texts:
        cleaned = clean(text)
        assert re.sub(r"[\W_]", "", cleaned).lower() == re.sub(r"[\W_]", "", text).lower()
        assert clean(cleaned) == cleaned
        assert not re.search(r" [.,?!;:]|’|  ", cleaned)


def record(*texts, acts=None, emotions=None):
    return {"dialog": list(texts), "act": acts or [1] * len(texts), "emotion": emotions or [0] * len(texts)}


def args(**changes):
    return DailyDialogArgs(destination_dir="x", tokenizer_name="x", **changes)


def sifted(*splits, **changes):
    """Dialogues of records given by split: train, validation, test."""
    names = ("train", "validation", "test")
    parts = [(name, name, lambda rows=rows: rows) for name, rows in zip(names, splits, strict=True)]
    return Dialogues(Source(parts), args(**changes))


OTHERS = ([record("Val one .", "Val two .")], [record("Test one .", "Test two .")])


def test_a_dialogue_has_the_names_of_its_labels():
    found = to_dialogue(record("Hi , Bob .", "What ? ", acts=[4, 2], emotions=[0, 6]), "\n", False)
    assert found.utterances == ("Hi, Bob.", "What?")
    assert found.acts == ("commissive", "question")
    assert found.emotions == ("none", "surprise")
    assert found.key == "hibob\nwhat"
    names = [to_dialogue(record("a", acts=[act]), "\n", False).acts[0] for act in (1, 2, 3, 4)]
    assert names == ["inform", "question", "directive", "commissive"]
    names = [to_dialogue(record("a", emotions=[emotion]), "\n", False).emotions[0] for emotion in range(7)]
    assert names == ["none", "anger", "disgust", "fear", "happiness", "sadness", "surprise"]


def test_the_tokenization_can_stay_but_no_separator_does():
    assert to_dialogue(record("Hi , Bob .\n  Yes"), "\n", True).utterances == ("Hi , Bob . Yes",)
    assert to_dialogue(record("a |b | c"), " |", False).utterances == ("a b c",)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "dialogue is not text"),
        ({"dialog": "text"}, "dialogue is not text"),
        ({"dialog": ["a", 3]}, "dialogue is not text"),
        ({"dialog": ["\ud800"], "act": [1], "emotion": [0]}, "dialogue is not text"),
        ({"dialog": ["a"]}, "dialogue with missing labels: 1 utterances, no acts, no emotions"),
        ({"dialog": ["a", "b"], "act": [1], "emotion": [0, 0]}, "missing labels: 2 utterances, 1 acts, 2 emotions"),
        (record("a", acts=[5]), "dialogue with unknown labels"),
        (record("a", acts=["1"]), "dialogue with unknown labels"),
        (record("a", acts=[[]]), "dialogue with unknown labels"),
        (record("a", emotions=[7]), "dialogue with unknown labels"),
        (record("a", "  "), "dialogue with an empty utterance"),
    ],
)
def test_what_is_no_dialogue_has_a_reason(wrong, message):
    with pytest.raises(SkipRecord, match=message):
        to_dialogue(wrong, "\n", False)


def test_each_utterance_after_the_first_is_a_sample_with_at_most_five_before_it():
    texts = [f"Turn {n} ." for n in range(1, 8)]
    dialogue = record(*texts, acts=[1, 2, 3, 4, 1, 2, 3], emotions=[0, 1, 2, 3, 4, 5, 6])
    samples = [to_example(sample) for split, sample in sifted([dialogue], *OTHERS) if split == "train"]
    assert [example.responses[0] for example in samples] == [f"Turn {n}." for n in range(2, 8)]
    assert samples[0].prompt == "Turn 1.\n"
    assert samples[4].prompt == "Turn 1.\nTurn 2.\nTurn 3.\nTurn 4.\nTurn 5.\n"
    assert samples[5].prompt == "Turn 2.\nTurn 3.\nTurn 4.\nTurn 5.\nTurn 6.\n"
    assert samples[5].metadata == {"act": "directive", "emotion": "surprise", "last_turn": "Turn 6."}
    assert samples[0].metadata == {"act": "question", "emotion": "anger", "last_turn": "Turn 1."}
    assert len({example.key for example in samples}) == 1

    seed = sifted([dialogue], *([record(*"abcdef", "x")] for _ in "vt"), minimum_turns=5, remove_overlap=False)
    assert [sample["response"] for split, sample in seed if split == "train"] == ["Turn 6.", "Turn 7."]
    two = [to_example(sample).prompt for split, sample in sifted([dialogue], *OTHERS, context_turns=2)][:3]
    assert two == ["Turn 1.\n", "Turn 1.\nTurn 2.\n", "Turn 2.\nTurn 3.\n"]


def test_what_held_out_splits_have_is_dropped_from_train_by_letters_and_digits():
    train = [
        record("Test ONE ,", "test two !"),
        record("Val one", "Val two"),
        record("New", "one"),
        record("new .", "One"),
    ]
    train += [record("Test on", "e test two")]  # the same letters, other turns
    found = sifted(train, *OTHERS)
    assert [dialogue.key for dialogue in found.dialogues["train"]] == ["new\none", "teston\netesttwo"]
    assert found.skipped["train"] == {
        "dialogue also in test": 1, "dialogue also in validation": 1, "dialogue repeated": 1,
    }  # fmt: skip
    kept = sifted(train, *OTHERS, remove_overlap=False)
    assert len(kept.dialogues["train"]) == 4
    assert kept.skipped["train"] == {"dialogue repeated": 1}
    both = [to_example(sample).key for split, sample in kept if sample["response"].lower().startswith("test two")]
    assert len(set(both)) == 2  # so that no key is in two splits, which the preparation would refuse
    assert sifted(OTHERS[0], [*OTHERS[0], *OTHERS[1]], OTHERS[1], remove_overlap=False).skipped["validation"] == {}
    validation = sifted([record("a", "b")], [*OTHERS[0], *OTHERS[1]], OTHERS[1])
    assert validation.skipped["validation"] == {"dialogue also in test": 1}


def test_faults_are_counted_and_the_first_is_named():
    broken = {"dialog": ["a", "b"], "act": [1], "emotion": [0, 0]}
    found = sifted([record("a", "b"), broken, record("c"), broken], *OTHERS)
    assert found.skipped["train"] == {"dialogue with missing labels": 2, "dialogue of too few utterances": 1}
    assert found.first_skipped == "train, dialogue 2: 2 utterances, 1 acts, 2 emotions"
    lines = [record("a", "b"), BadLine(2, "not UTF-8")]
    assert sifted(lines, *OTHERS).first_skipped == "train, line 2: not UTF-8"
    assert sifted(lines, *OTHERS).skipped["train"] == {"bad line": 1}


def test_all_three_splits_are_needed():
    with pytest.raises(ValueError, match="gives no dialogue to use for test; DailyDialog comes in"):
        sifted([record("a", "b")], OTHERS[0], [])


def test_labelled_texts(tmp_path):
    dialogue = record("Hi .", "Who ?", "Me .", acts=[1, 2, 3], emotions=[4, 6, 0])
    samples = sifted([dialogue, record("c", "d")], *OTHERS)
    assert write_labelled(samples, tmp_path, args(shuffle=False)) == {"train": 3, "validation": 1, "test": 1}

    def read(name):
        return [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]

    assert read("act_train.jsonl") == [
        {"text": "Hi.\nWho?", "label": "question"},
        {"text": "Who?\nMe.", "label": "directive"},
        {"text": "c\nd", "label": "inform"},
    ]
    assert [row["label"] for row in read("emotion_train.jsonl")] == ["surprise", "none", "none"]
    assert read("act_test.jsonl") == [{"text": "Test one.\nTest two.", "label": "inform"}]
    assert write_labelled(samples, tmp_path, args(num_samples=2))["train"] == 2
    assert len(read("emotion_train.jsonl")) == 2


def test_the_template_names_the_newest_turns_only():
    template = chat_template("\n", 5)
    assert "messages[-5:]" in template
    assert r"replace(\"\n\"" not in template  # an escape within an escape would be two characters
