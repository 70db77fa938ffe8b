import gzip
import json
from collections import Counter

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_stages.data.dialogue import CHAT_TEMPLATE, as_prompt, first_human_turn, is_one_turn, split_dialogue, turns
from rlhf_stages.data.tokenizer import encode_prompt, load_tokenizer

H, A = "\n\nHuman:", "\n\nAssistant:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        (f"{H} q{A} yes", f"{H} q{A} no", (f"{H} q{A}", " yes", " no")),
        # Several turns; the replies may begin alike.
        (f"{H} q{A} a{H} r{A} yes!", f"{H} q{A} a{H} r{A} yes?", (f"{H} q{A} a{H} r{A}", " yes!", " yes?")),
        # One reply is the start of the other.
        (f"{H} q{A} yes", f"{H} q{A} yes, sir", (f"{H} q{A}", " yes", " yes, sir")),
        (f"{H} q{A}", f"{H} q{A} no", (f"{H} q{A}", "", " no")),
        # Equal texts are split at their last turn.
        (f"{H} q{A} a{H} r{A} s", f"{H} q{A} a{H} r{A} s", (f"{H} q{A} a{H} r{A}", " s", " s")),
        # A role that speaks twice in a row, in the prompt and at the end.
        (f"{H} q{H} r{A} a{A} b", f"{H} q{H} r{A} a{A} c", (f"{H} q{H} r{A} a{A}", " b", " c")),
        (f"{H} q{A} a{A} b", f"{H} q{A} c", (f"{H} q{A}", f" a{A} b", " c")),
        # They part at a human turn: all from the reply before it.
        (f"{H} q{A} a{H} r{A} b", f"{H} q{A} a{H} s{A} c", (f"{H} q{A}", f" a{H} r{A} b", f" a{H} s{A} c")),
        # One goes on where the other ends.
        (f"{H} q{A} a", f"{H} q{A} a{H} r{A} b", (f"{H} q{A}", " a", f" a{H} r{A} b")),
        # A preamble, and "Human:" inside a line is no turn.
        (f"Be kind.{H} q Human: x{A} a", f"Be kind.{H} q Human: x{A} b", (f"Be kind.{H} q Human: x{A}", " a", " b")),
    ],
)
def test_split_dialogue(chosen, rejected, expected):
    assert split_dialogue(chosen, rejected) == expected
    prompt, left, right = split_dialogue(rejected, chosen)
    assert (prompt, right, left) == expected
    assert prompt + left == rejected


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [("", ""), ("plain", "text"), (f"{H} q{A} a", f"{H} p{A} a"), (f"{A} a", f"{A} b"), (f"{H} q", f"{H} q")],
)
def test_dialogues_that_share_no_prompt_are_refused(chosen, rejected):
    with pytest.raises(ValueError, match="share no turn"):
        split_dialogue(chosen, rejected)


def test_turns():
    assert turns(f"front{H} q{A} a\n\nb{H}") == ["front", f"{H} q", f"{A} a\n\nb", H]
    assert turns("") == []
    assert is_one_turn(" Human: no turn, \nAssistant: neither\n\nHumans")
    assert not is_one_turn(f" a{H} b")
    assert not is_one_turn(A)


def test_first_human_turn():
    assert first_human_turn(f"{H} Hi there \n\nyou {A} a{H} second{A}") == "Hi there \n\nyou"
    assert first_human_turn(f"front{A} a{H} late{A}") == "late"
    assert first_human_turn(f"{H} a{H} b{A}") == "a"
    assert first_human_turn(" a plain prompt ") == "a plain prompt"


def test_as_prompt():
    assert as_prompt(f"{H} q{A}") == f"{H} q{A}"
    assert as_prompt(f"{H} q{A} \n") == f"{H} q{A}"
    assert as_prompt(f"{H} q ") == f"{H} q{A}"
    assert as_prompt(" q ") == f"{H} q{A}"
    assert as_prompt(" ") == ""


def bpe_tokenizer(path, **special):
    """A byte-level BPE that has learnt to merge across spaces and line breaks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{H} How are you?{A} I am well, thanks.{H} Good!{A} Bye"] * 5, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    return load_tokenizer(str(path))


DIALOGUES = [
    ([("user", "How are you?")], f"{H} How are you?{A}"),
    (
        [("user", "你好 <b>"), ("assistant", "I am well,\n\nthanks. "), ("user", " Good!\n"), ("user", "?")],
        f"{H} 你好 <b>{A} I am well,\n\nthanks. {H}  Good!\n{H} ?{A}",
    ),
    ([("system", "Be kind."), ("user", "Hi"), ("assistant", ""), ("user", "?")], f"Be kind.{H} Hi{A} {H} ?{A}"),
]


@pytest.mark.parametrize(("messages", "prompt"), DIALOGUES)
def test_the_template_gives_the_ids_of_the_data(messages, prompt, shared_data, tmp_path):
    messages = [{"role": role, "content": content} for role, content in messages]
    tokenizers = [
        load_tokenizer(str(shared_data / "models/stories260K")),
        bpe_tokenizer(tmp_path / "a", bos_token="<bos>", eos_token="<eos>"),
        bpe_tokenizer(tmp_path / "b", eos_token="<eos>"),
    ]
    for tokenizer in tokenizers:
        tokenizer.chat_template = CHAT_TEMPLATE
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert rendered["input_ids"] == encode_prompt(tokenizer, prompt)
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=False)
        assert text == (tokenizer.bos_token or "") + prompt.removesuffix(A)


def test_the_template_refuses_an_unknown_role(tmp_path):
    tokenizer = bpe_tokenizer(tmp_path, eos_token="<eos>")
    tokenizer.chat_template = CHAT_TEMPLATE
    with pytest.raises(Exception, match="roles are user, assistant and system, got tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_the_edge_cases_of_real_dialogues(shared_data):
    seen = Counter()
    for path in sorted((shared_data / "hh-rlhf").rglob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for record in map(json.loads, file):
                prompt, chosen, rejected = split_dialogue(record["chosen"], record["rejected"])
                assert prompt + chosen == record["chosen"]
                assert prompt + rejected == record["rejected"]
                assert prompt.endswith(A)
                assert first_human_turn(prompt)
                seen["pairs"] += 1
                seen["equal"] += chosen == rejected
                seen["of several turns"] += not (is_one_turn(chosen) and is_one_turn(rejected))
                seen["empty"] += (not chosen.strip()) + (not rejected.strip())
    # The counts that the description of the data gives.
    assert seen == {"pairs": 4366, "equal": 2, "of several turns": 14, "empty": 7}
