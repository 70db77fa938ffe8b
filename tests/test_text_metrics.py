"""Numbers that other programs count, checked against the libraries' own documentation and by hand."""

import re
import shutil
import subprocess
import sys
from itertools import pairwise

import pytest
import sacrebleu
from nltk.tokenize import NLTKWordTokenizer
from nltk.translate.meteor_score import single_meteor_score

from rlhf_stages import text_metrics
from rlhf_stages.text_metrics import (
    all_rouge,
    bleu_counts,
    bleu_of_counts,
    distinct_n,
    meteor,
    repeats_a_token,
    rouge,
    sentence_bleu,
)

RESPONSES = [
    "This is a plan that makes sure that the crew always follows the rules of the ship.",
    "I'd like two tickets, please!",
    "The children were running home.",
    "",
]
REFERENCES = [
    "This is a plan which makes sure that the crew will ever follow the ship's rules.",
    "Two tickets for me, please.",
    "A child runs to the house.",
    "Nobody said a thing.",
]

WORDS = re.findall(
    r"\w+", "run child house go big small see say good bad home work day time way man woman eat drink well fast set"
)


@pytest.fixture(autouse=True)
def _wordnet(wordnet):
    """WordNet has to be there."""


def test_meteor_of_words_in_two_pieces_and_a_stem():
    # all five match, `grow` by its stem: F = 1; in two pieces: 1 - 0.5 (2/5)^3
    assert meteor(["my aunt grows red beans"], ["red beans my aunt grow"]) == [pytest.approx(0.968)]


def test_what_is_remembered_changes_no_meteor():
    words = NLTKWordTokenizer().tokenize
    plain = [single_meteor_score(words(b), words(a)) for a, b in zip(RESPONSES, REFERENCES, strict=True)]
    assert meteor(RESPONSES, REFERENCES) == plain
    assert meteor(RESPONSES, REFERENCES) == plain
    # stems (run) and synonyms (home, house) count: there are no two equal words but none here is 0
    assert plain[2] > 0.2
    assert plain[3] == 0


def test_meteor_by_hand():
    # two of three words in one piece: precision 1, recall 2/3, F = P R / (0.9 P + 0.1 R), penalty 0.5 (1/2)^3
    score = (2 / 3) / (0.9 + 0.1 * 2 / 3) * (1 - 0.5 / 8)
    assert meteor(["blue sky"], ["blue sky tomorrow"]) == [pytest.approx(score)]


def test_words_of_several_sentences():
    text = "Old boats cost $4.25\nin our town.  Please don't sell me two of them.\n\nBye."
    expected = "Old boats cost $ 4.25 in our town . Please do n't sell me two of them . Bye ."
    assert " ".join(text_metrics.words(text)) == expected


def test_a_full_stop_is_a_word_wherever_its_sentence_ends():
    assert text_metrics.words('"Go." he said (now.) Well... version 2.0 is it. ') == (
        "``", "Go", ".", "''", "he", "said", "(", "now", ".", ")", "Well", "...", "version", "2.0", "is", "it", ".",
    )  # fmt: skip
    # (precision, recall) = (2/4, 2/3) in one piece: `yes .` counts although another sentence follows it
    score = (2 / 4) * (2 / 3) / (0.9 * 2 / 4 + 0.1 * 2 / 3) * (1 - 0.5 / 8)
    assert meteor(["Yes. Good dog"], ["quite yes."]) == [pytest.approx(score)]


def test_real_dialogues_score_as_nltk_alone_has_it(shared_data):
    from nltk.corpus import wordnet

    lines = (shared_data / "dailydialog/test/dialogues_test.txt").read_text(encoding="utf-8").splitlines()[:25]
    turns = [turn.strip() for line in lines for turn in line.split("__eou__") if turn.strip()]
    plain = [single_meteor_score(text_metrics.words(b), text_metrics.words(a)) for a, b in pairwise(turns)]
    assert type(text_metrics._lexicon()) is not type(wordnet)
    assert meteor(turns[:-1], turns[1:]) == plain
    assert sum(score > 0 for score in plain) > 100


# in a program of its own: a fork of pytest's process, which has threads of everybody, may wait for ever
THREADS_AND_FORKS = f"""
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from rlhf_stages import text_metrics

texts = [f"{{a}} {{b}}" for a, b in zip({WORDS}, reversed({WORDS}), strict=True)]
references = texts[1:] + texts[:1]
expected = text_metrics.meteor(texts, references)

def score(_):
    return text_metrics.meteor(texts, references)

def fresh():
    text_metrics._lexicon.cache_clear()
    text_metrics.meteor(["warm"], ["warm"])

fresh()
with ThreadPoolExecutor(4) as pool:
    assert list(pool.map(score, range(4))) == [expected] * 4
fresh()
with text_metrics._lexicon()._lock:  # as if a thread looked something up
    pool = ProcessPoolExecutor(2, mp_context=get_context("fork"))
    found = [pool.submit(score, i) for i in range(4)]
assert [task.result(timeout=60) for task in found] == [expected] * 4
"""


def test_threads_and_forks_score_alike():
    command = [sys.executable, "-c", THREADS_AND_FORKS]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("left_out", ["", "lexnames", "data.noun"])
def test_without_wordnet_the_message_says_what_to_do(tmp_path, monkeypatch, wordnet, left_out):
    import nltk.data

    if left_out:
        there = wordnet / "corpora" / "wordnet"
        shutil.copytree(there, tmp_path / "corpora" / "wordnet", ignore=shutil.ignore_patterns(left_out))
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    monkeypatch.setattr(text_metrics, "_lexicon", text_metrics._lexicon.__wrapped__)  # not the remembered one
    with pytest.raises(FileNotFoundError, match=f"{left_out}.*make nltk-data"):
        meteor(["a"], ["b"])


def test_rouge_by_hand():
    found = all_rouge(["the cats sat"], ["the cat sat down"])
    # with stems three of three and of four words; two of two and of three pairs
    assert found["rouge1"] == found["rougeL"] == found["rougeLsum"] == [pytest.approx(6 / 7)]
    assert found["rouge2"] == [pytest.approx(4 / 5)]
    assert rouge(["a b c"], ["c b a"]) == [pytest.approx(1 / 3)]
    with pytest.raises(ValueError, match="kind is one of"):
        rouge(["a"], ["b"], "rouge")


def test_sums_of_counts_give_the_bleu_of_the_corpus():
    counts = [sum(column) for column in zip(*bleu_counts(RESPONSES, REFERENCES), strict=True)]
    expected = sacrebleu.corpus_bleu(RESPONSES, [REFERENCES], tokenize="intl").score / 100
    assert bleu_of_counts(counts) == pytest.approx(expected)
    assert 0 < expected < 1
    assert bleu_of_counts([0] * 10) == 0


def test_sentence_bleu_is_that_of_sacrebleu():
    expected = sacrebleu.sentence_bleu(RESPONSES[0], [REFERENCES[0]], tokenize="intl").score / 100
    assert sentence_bleu(RESPONSES[:1], REFERENCES[:1]) == [pytest.approx(expected)]
    assert sentence_bleu(["a b c d"], ["a b c d"]) == [pytest.approx(1)]


def test_distinct_n():
    assert distinct_n(["a a a", "a a"], 1) == 1 / 5
    assert distinct_n(["a b", "b a"], 2) == 1.0
    assert distinct_n(["a", ""], 2) == 0.0
    assert distinct_n([], 2) == 0.0


def test_chinese_characters_count_as_words_of_a_distinct_n():
    # 很 好 ， 很 好 ！ has the pairs 很好 好， ，很 很好 好！, four of five different
    assert distinct_n(["很好，很好！"], 2) == 4 / 5
    assert distinct_n(["，，，，", "，　，"], 2) == 1 / 4  # the wide space is one
    assert distinct_n(["iPhone 8很好", "iPhone 8 很 好"], 2) == 3 / 6  # words of Latin letters stay whole
    assert distinct_n(["ab-cd, 12.5 ef"], 1) == 1.0
    assert distinct_n(["なるほど なる"], 1) == 4 / 6


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], False),
        ([5], False),  # once is no repetition
        ([5, 6], False),
        ([5, 5], True),
        ([5, 6, 5, 7], True),  # exactly half
        ([5, 6, 5, 7, 8], False),  # two of five
        ([5, 5, 6, 7, 5, 8], True),
        (list("，差，差，好"), True),  # three of six
    ],
)
def test_a_token_that_makes_up_half_of_a_text(tokens, expected):
    assert repeats_a_token(tokens) is expected
