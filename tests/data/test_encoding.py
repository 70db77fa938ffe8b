"""What comes out is compared with the tokenizer itself, text by text."""

import gzip
import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_stages.data import encoding
from rlhf_stages.data.encoding import TextEncoder, parts_at_spaces
from rlhf_stages.data.tokenizer import encode_text

from helpers import SENTENCES, make_tokenizer

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
WORDS = {
    "gpt2": BYTE_LEVEL,
    "smollm2": pre_tokenizers.Sequence([DIGITS, BYTE_LEVEL]),
    "runs of digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(), BYTE_LEVEL]),
}
# letters, contractions, digits, every kind of space, what only some call a space, other scripts, half words, specials
PIECES = [
    "a", "the", "Assistant:", "'s", "'ll", "'", "5", "1990", ".", "...", "-", "_", "<s>", "</s>", "é", "e\u0301", "ß",
    "中文", "🙂", "²", "½", " ", " ", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2003", "\u200b",
    "\x1c", "\x85", "\x0b", "\u3000",
]  # fmt: skip


def byte_level(words=BYTE_LEVEL, dropout=None, normalizer=None, added=()):
    """A BPE of 600 tokens over bytes, with merges over spaces within words."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = words
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    texts = [*SENTENCES, *("".join(random.Random(i).choices(PIECES, k=30)) for i in range(300))]
    backend.train_from_iterator(texts, trainer)
    backend.model.dropout = dropout
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def same_ids(tokenizer, texts, encoder=None):
    encoded = (encoder or TextEncoder(tokenizer))(texts)
    for text, ids in zip(texts, encoded, strict=True):
        assert (ids.typecode, ids.tolist()) == ("i", encode_text(tokenizer, text)), repr(text)


@pytest.fixture(scope="module", params=WORDS)
def tokenizer(request):
    return byte_level(WORDS[request.param])


def test_random_texts(tokenizer):
    assert parts_at_spaces(tokenizer)
    draw = random.Random(7)
    texts = ["".join(draw.choices(PIECES, k=draw.randrange(12))) for _ in range(4000)]
    same_ids(tokenizer, ["", " ", "a", " a", "a ", "a b", "a  b", " a b ", "a \nb", "a\n b", *texts])


def test_what_is_known_is_forgotten_before_it_is_too_much(monkeypatch):
    monkeypatch.setattr(encoding, "_MOST_STRETCHES", 20)
    tokenizer = byte_level()
    encoder = TextEncoder(tokenizer)
    for start in range(0, 100, 10):
        same_ids(tokenizer, [f"the {i} and {i + 1}" for i in range(start, start + 10)], encoder)
        assert len(encoder._known) < 20 + 23  # what was known, and 11 or 12 numbers, "the", "and"


def test_what_a_tokenizer_would_cut_or_pad_stays_whole():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    (ids,) = TextEncoder(tokenizer)(["name the colour of it"])
    assert ids.tolist() == encode_text(byte_level(), "name the colour of it")
    assert 2 < len(ids) < 50


@pytest.mark.parametrize(
    "changes",
    [
        {"words": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"words": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)},
        {"words": pre_tokenizers.Sequence([pre_tokenizers.Split("e b", "isolated"), BYTE_LEVEL])},
        {"words": pre_tokenizers.Sequence([DIGITS])},
        {"dropout": 0.5},
        {"normalizer": normalizers.Lowercase()},
        {"added": [AddedToken("the price", special=False)]},
    ],
)
def test_a_tokenizer_with_other_rules_is_asked_for_whole_texts(changes):
    tokenizer = byte_level(**changes)
    assert not parts_at_spaces(tokenizer)
    if "dropout" not in changes:
        same_ids(tokenizer, [*SENTENCES[:20], "the blue bike", "the price"])


def test_words_that_are_marked_at_their_start_are_not_parted():
    tokenizer = make_tokenizer()
    assert not parts_at_spaces(tokenizer)
    same_ids(tokenizer, SENTENCES[:20])


def real_texts(folder):
    for path in sorted(folder.glob("hh-rlhf/*/*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).splitlines():
            yield from json.loads(line).values()
    for name in ("tldr_comparisons/comparisons.jsonl", "zh_sentiment_pairs/sentiment_comments.jsonl", "sst2/train.tsv"):
        yield from (folder / name).read_text(encoding="utf-8").splitlines(keepends=True)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 40])
def test_real_texts(shared_data, every):
    tokenizer = byte_level(WORDS["smollm2"])
    texts = list(real_texts(shared_data))[::every]
    assert len(texts) > 15_000 / every
    encoder = TextEncoder(tokenizer)
    for start in range(0, len(texts), 500):
        same_ids(tokenizer, texts[start : start + 500], encoder)
