"""Texts compared with references; libraries do the counting."""

import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cache, lru_cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

ROUGE_KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
# where `make nltk-data` puts WordNet
NLTK_DATA = Path("nltk_data")
# words and references come again, and to stem, look up or part one takes longer than all the rest
_REMEMBERED = 2**16
# each Chinese or Japanese character, and each mark of full width, since no spaces part them; words elsewhere
_FULL_WIDTH = r"\u3001-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uffef"
_UNITS = re.compile(rf"[{_FULL_WIDTH}]|[^\s{_FULL_WIDTH}]+")
_FULL_STOP = re.compile(r"""(?<!\.)\.(?=["')\]]*\s)""")


def meteor(responses: Sequence[str], references: Sequence[str]) -> list[float]:
    """METEOR of each response, 0 to 1: nltk's, with alpha 0.9, beta 3, gamma 0.5, stems and synonyms of WordNet, in
    lower case, words as nltk's word tokenizer parts them (Banerjee and Lavie 2005).

    Raises:
        FileNotFoundError: WordNet is not there.
    """
    from nltk.translate.meteor_score import single_meteor_score

    lexicon = _lexicon()
    return [
        float(
            single_meteor_score(
                words(reference), words(response), stemmer=lexicon, wordnet=lexicon, alpha=0.9, beta=3.0, gamma=0.5
            )
        )
        for response, reference in zip(responses, references, strict=True)
    ]


def rouge(responses: Sequence[str], references: Sequence[str], kind: str = "rougeL") -> list[float]:
    """ROUGE f-measure of each response with stems, 0 to 1, as Google's rouge-score counts it (Lin 2004)."""
    if kind not in ROUGE_KINDS:
        raise ValueError(f"kind is one of {', '.join(ROUGE_KINDS)}, got {kind!r}")
    return all_rouge(responses, references, (kind,))[kind]


def all_rouge(
    responses: Sequence[str], references: Sequence[str], kinds: Sequence[str] = ROUGE_KINDS
) -> dict[str, list[float]]:
    """`rouge` of several kinds at once."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(kinds), use_stemmer=True)
    rows = [scorer.score(reference, response) for response, reference in zip(responses, references, strict=True)]
    return {kind: [float(row[kind].fmeasure) for row in rows] for kind in kinds}


def sentence_bleu(responses: Sequence[str], references: Sequence[str]) -> list[float]:
    """BLEU of each response, 0 to 1, with sacrebleu's smoothing for sentences."""
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU(tokenize="intl", effective_order=True)
    pairs = zip(responses, references, strict=True)
    return [float(bleu.sentence_score(response, [reference]).score) / 100 for response, reference in pairs]


def bleu_counts(responses: Sequence[str], references: Sequence[str]) -> list[list[float]]:
    """What BLEU counts in each response: matches and n-grams of one to four words, and words here and there.

    The sums over responses are what `bleu_of_counts` takes.
    """
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU(tokenize="intl", effective_order=True)
    scores = [bleu.sentence_score(response, [ref]) for response, ref in zip(responses, references, strict=True)]
    return [[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in scores]


def bleu_of_counts(counts: Sequence[float]) -> float:
    """BLEU of a corpus, 0 to 1, from the sums of its `bleu_counts`; sacrebleu's default otherwise."""
    from sacrebleu.metrics.bleu import BLEU

    *ngrams, own, other = (round(count) for count in counts)
    return float(BLEU.compute_bleu(ngrams[:4], ngrams[4:], own, other, smooth_method="exp").score) / 100


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Different n-grams of words per n-gram, over all texts together (Li et al. 2016); 0 where there is none.

    A Chinese or Japanese character counts as a word, and so does a mark of full width.
    """
    units = map(_UNITS.findall, texts)
    grams = [tuple(text[i : i + n]) for text in units for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repeats_a_token(tokens: Sequence[Hashable]) -> bool:
    """Whether one token comes more than once and makes up at least half of a text: the sign of a collapsed policy."""
    most = max(Counter(tokens).values(), default=0)
    return most > 1 and 2 * most >= len(tokens)


@lru_cache(maxsize=_REMEMBERED)
def words(text: str) -> tuple[str, ...]:
    """Words and punctuation as the Penn Treebank has them, by nltk.

    Its `word_tokenize` finds sentences first, with a trained model that would be a download, since its word tokenizer
    only parts the last full stop from the word. Here every full stop before a space is parted: they differ at
    abbreviations, Mr. is two words here.
    """
    return tuple(_tokenizer().tokenize(_FULL_STOP.sub(" .", text)))


@cache
def _tokenizer() -> Any:
    from nltk.tokenize import NLTKWordTokenizer

    return NLTKWordTokenizer()


class _Name(NamedTuple):
    text: str

    def name(self) -> str:
        return self.text


class _Synonyms(NamedTuple):
    """One synset in place of all that a word has: METEOR only asks them for the names of their lemmas."""

    names: tuple[_Name, ...]

    def lemmas(self) -> tuple[_Name, ...]:
        return self.names


class _Lexicon:
    """What METEOR asks of a stemmer and of WordNet, remembered; for all threads, and for processes forked from here."""

    def __init__(self, wordnet: Any) -> None:
        from nltk.stem.porter import PorterStemmer

        self._wordnet = wordnet
        self._renew_lock()
        if hasattr(os, "register_at_fork"):  # a lock that another thread holds at a fork is never free in the child
            os.register_at_fork(after_in_child=self._renew_lock)
        self.stem = lru_cache(maxsize=_REMEMBERED)(PorterStemmer().stem)
        self.synsets = lru_cache(maxsize=_REMEMBERED)(self._look_up)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def _look_up(self, word: str) -> tuple[_Synonyms]:
        with self._lock:  # a look-up moves the reader's place in its files
            names = {lemma.name() for synset in self._wordnet.synsets(word) for lemma in synset.lemmas()}
        return (_Synonyms(tuple(_Name(name) for name in names if "_" not in name)),)


@cache
def _lexicon() -> _Lexicon:
    import nltk.data
    from nltk.corpus.reader.wordnet import WordNetCorpusReader

    class InMemory(WordNetCorpusReader):  # type: ignore[misc]
        """WordNet with its files in memory, where a forked process has a place of its own in them, and without the
        tables for other languages, which would take more time than the rest.
        """

        def open(self, file: str) -> StringIO:
            with super().open(file) as stream:
                return StringIO(stream.read())

        def map_wn(self, version: str = "wordnet") -> None:
            return None

    # nltk itself looks at the variable only when it is imported, and opens nothing outside of these places
    own = [path for path in os.environ.get("NLTK_DATA", str(NLTK_DATA.resolve())).split(os.pathsep) if path]
    nltk.data.path[:0] = [path for path in own if path not in nltk.data.path]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The multilingual functions")
            reader = InMemory(nltk.data.find("corpora/wordnet"), None)
        reader.synsets("well")  # noun, verb, adjective and adverb: opens the files of all four
        return _Lexicon(reader)
    except (OSError, LookupError, ValueError) as error:
        reason = "" if isinstance(error, LookupError) else f" ({type(error).__name__}: {error})"
        raise FileNotFoundError(
            f"METEOR needs WordNet, and nltk finds none{reason}: `make nltk-data` fetches it into ./nltk_data, or set"
            " NLTK_DATA to the folder that holds corpora/wordnet"
        ) from None
