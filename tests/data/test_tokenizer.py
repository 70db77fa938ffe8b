import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhf_stages.data.tokenizer import (
    describe_tokenizer,
    encode_prompt,
    encode_response,
    encode_text,
    fingerprint,
    load_tokenizer,
)

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def make(folder, first, *, merges=(), vocabulary=(), add_bos=False, **special):
    """Save a byte-level BPE tokenizer whose ids start with the tokens `first`; returns the folder."""
    vocab = {token: i for i, token in enumerate([*first, *BYTES, *vocabulary, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token=special.get("unk_token")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if add_bos:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, vocab[bos])])
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    return str(folder)


def spell(tokenizer, text):
    """Ids of a text byte by byte, from the vocabulary alone."""
    return [tokenizer.get_vocab()[token] for token in text.replace(" ", "Ġ").replace("\n", "Ċ")]


# --- padding ---


@pytest.mark.parametrize(
    ("first", "special", "pad", "pad_id"),
    [
        # its own
        (["<e>", "<p>"], {"eos_token": "<e>", "pad_token": "<p>"}, "<p>", 1),
        (["<e>", "<p>", "<pad>"], {"eos_token": "<e>", "pad_token": "<p>"}, "<p>", 1),
        # an unused one of the vocabulary
        (["<e>", "<|padding|>"], {"eos_token": "<e>"}, "<|padding|>", 1),
        (["<e>", "<|padding|>"], {"eos_token": "<e>", "pad_token": "<e>"}, "<|padding|>", 1),
        (["<e>", "<u>", "[PAD]"], {"eos_token": "<e>", "unk_token": "<u>"}, "[PAD]", 2),
        # the unknown token
        (["<e>", "<u>"], {"eos_token": "<e>", "unk_token": "<u>"}, "<u>", 1),
        (["<e>", "<u>"], {"eos_token": "<e>", "unk_token": "<u>", "pad_token": "<e>"}, "<u>", 1),
        # a new one, behind the last id
        (["<e>"], {"eos_token": "<e>"}, "<|pad|>", 257),
        (["<e>"], {"eos_token": "<e>", "bos_token": "<e>", "unk_token": "<e>"}, "<|pad|>", 257),
        (["<e>", "<s>"], {"eos_token": "<e>", "bos_token": "<s>", "unk_token": "<s>"}, "<|pad|>", 258),
        (["<pad>"], {"eos_token": "<pad>", "pad_token": "<pad>"}, "<|pad|>", 257),
    ],
)
def test_padding_token_is_its_own_then_spare_then_unknown_then_new(tmp_path, first, special, pad, pad_id):
    tokenizer = load_tokenizer(make(tmp_path / "t", first, **special))
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == (pad, pad_id)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) == max(tokenizer.get_vocab().values()) + 1


def test_a_tokenizer_that_was_given_a_padding_token_keeps_it_when_saved_and_loaded(tmp_path):
    tokenizer = load_tokenizer(make(tmp_path / "a", ["<e>"], eos_token="<e>"))
    tokenizer.save_pretrained(tmp_path / "b")
    again = load_tokenizer(str(tmp_path / "b"))
    assert (again.pad_token_id, len(again), fingerprint(again)) == (257, 258, fingerprint(tokenizer))


def test_the_tokenizer_of_an_encoder_begins_and_ends_texts_with_its_own_tokens(tmp_path):
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    tokenizer = load_tokenizer(make(tmp_path / "t", ["[PAD]", "[CLS]", "[SEP]"], **special))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert encode_prompt(tokenizer, "a") + encode_response(tokenizer, "b") == [1, *spell(tokenizer, "ab"), 2]
    assert encode_text(tokenizer, "[SEP]") == spell(tokenizer, "[SEP]")
    tokenizer.save_pretrained(tmp_path / "again")
    assert fingerprint(load_tokenizer(str(tmp_path / "again"))) == fingerprint(tokenizer)


# --- encoding ---


@pytest.fixture
def tokenizer(tmp_path):
    special = {
        "bos_token": "<s>",
        "eos_token": "<e>",
        "pad_token": "<p>",
        "additional_special_tokens": ["<|im_start|>"],
    }
    return load_tokenizer(make(tmp_path / "t", ["<s>", "<e>", "<p>"], merges=[("o", "o")], add_bos=True, **special))


@pytest.mark.parametrize("text", ["<s>a<e>", "<p>", "x<|im_start|>system", "<e>\n\nHuman: <e>"])
def test_special_tokens_in_a_text_stay_text(tokenizer, text):
    assert encode_text(tokenizer, text) == spell(tokenizer, text)
    assert encode_prompt(tokenizer, text) == [0, *spell(tokenizer, text)]
    assert encode_response(tokenizer, text) == [*spell(tokenizer, text), 1]
    assert tokenizer.decode(encode_text(tokenizer, text)) == text


def test_bos_comes_exactly_once_though_the_tokenizer_would_add_one(tokenizer):
    assert tokenizer("hi")["input_ids"][0] == 0  # it does, on its own
    assert encode_prompt(tokenizer, "hi").count(0) == 1
    assert 0 not in encode_text(tokenizer, "hi") + encode_response(tokenizer, "hi")
    assert encode_prompt(tokenizer, "") == [0]


def test_a_tokenizer_without_bos_adds_none(tmp_path):
    tokenizer = load_tokenizer(make(tmp_path / "t", ["<e>", "<p>"], eos_token="<e>", pad_token="<p>"))
    assert encode_prompt(tokenizer, "hi") == spell(tokenizer, "hi")
    assert encode_prompt(tokenizer, "") == []


def test_a_response_ends_in_eos_exactly_once(tokenizer):
    assert encode_response(tokenizer, "hi").count(1) == 1
    assert encode_response(tokenizer, "") == [1]


def test_no_merge_crosses_from_the_prompt_to_the_response(tokenizer):
    joined = tokenizer.get_vocab()["oo"]
    assert encode_text(tokenizer, "foo") == [*spell(tokenizer, "f"), joined]
    assert encode_prompt(tokenizer, "fo") + encode_response(tokenizer, "o") == [0, *spell(tokenizer, "foo"), 1]


# --- fingerprint ---


def variants(folder):
    special = {"eos_token": "<e>", "pad_token": "<p>"}
    yield make(folder / "same", ["<e>", "<p>", "<q>"], **special)
    yield make(folder / "pad", ["<e>", "<p>", "<q>"], **{**special, "pad_token": "<q>"})
    yield make(folder / "eos", ["<e>", "<p>", "<q>"], **{**special, "eos_token": "<q>"})
    yield make(folder / "bos", ["<e>", "<p>", "<q>"], bos_token="<q>", **special)
    yield make(folder / "order", ["<p>", "<e>", "<q>"], **special)
    yield make(folder / "larger", ["<e>", "<p>", "<q>"], vocabulary=["xyz"], **special)
    yield make(folder / "word", ["<e>", "<p>", "<q>"], vocabulary=["uc"], **special)
    yield make(folder / "merge", ["<e>", "<p>", "<q>"], merges=[("u", "c")], **special)


def test_fingerprint_differs_by_vocabulary_special_ids_and_merges(tmp_path):
    prints = [fingerprint(load_tokenizer(folder)) for folder in variants(tmp_path)]
    assert len(set(prints)) == len(prints)
    assert all(len(text) == 16 and set(text) <= set("0123456789abcdef") for text in prints)


def test_fingerprint_differs_where_only_the_cutting_does(tmp_path):
    # the same vocabulary with and without the merge that uses it ("uc" of "much")
    special = {"eos_token": "<e>", "pad_token": "<p>"}
    plain = load_tokenizer(make(tmp_path / "a", ["<e>", "<p>"], vocabulary=["uc"], **special))
    merging = load_tokenizer(make(tmp_path / "b", ["<e>", "<p>"], merges=[("u", "c")], **special))
    assert plain.get_vocab() == merging.get_vocab()
    assert fingerprint(plain) != fingerprint(merging)


def test_fingerprint_is_the_same_for_a_copy_elsewhere_and_in_another_process(tmp_path):
    special = {"eos_token": "<e>", "pad_token": "<p>"}
    here, there = (make(tmp_path / name, ["<e>", "<p>"], **special) for name in ("here", "there"))
    # written down from an earlier process: data folders keep this value for years
    assert fingerprint(load_tokenizer(here)) == fingerprint(load_tokenizer(there)) == "66577b89c115da03"


def test_description(tokenizer):
    assert describe_tokenizer(tokenizer, "tiny") == {
        "name": "tiny",
        "fingerprint": fingerprint(tokenizer),
        "vocab_size": 261,  # 3 special ones, 256 bytes, a merge, and the additional special one
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


# --- refusals ---


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no EOS token.*tokenizer_config\.json \(\"eos_token\"\)"):
        load_tokenizer(make(tmp_path / "t", ["<u>"], unk_token="<u>"))


def test_a_folder_that_is_not_there_is_refused_without_asking_the_hub(tmp_path):
    with pytest.raises(ValueError, match=r"no folder '.*/nowhere', though '.*' is one; a hub id is owner/name"):
        load_tokenizer(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("damage", ["no files", "tokenizer.json", "tokenizer_config.json", "schema"])
def test_a_folder_without_a_whole_tokenizer_is_one_line_that_says_so(tmp_path, damage):
    folder = Path(make(tmp_path / "t", ["<e>"], eos_token="<e>"))
    if damage == "no files":
        for file in folder.iterdir():
            file.unlink()
    elif damage == "schema":
        (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "Nonesuch"}}))
    else:
        (folder / damage).write_text((folder / damage).read_text()[:40])
    with pytest.raises(
        ValueError, match=r"no tokenizer could be loaded from '.*/t' \(hub id or folder\?\): ."
    ) as error:
        load_tokenizer(str(folder))
    assert "\n" not in str(error.value)
