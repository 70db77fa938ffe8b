"""Texts compared with references; libraries do the counting."""

import os
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

ROUGE_KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
# where `make nltk-data` puts WordNet
NLTK_DATA = Path("nltk_data")


def meteor(responses: Sequence[str], references: Sequence[str]) -> list[float]:
    """METEOR of each response, 0 to 1: nltk's, with alpha 0.9, beta 3, gamma 0.5, stems and synonyms of WordNet, in
    lower case, words as nltk's word tokenizer parts them (Banerjee and Lavie 2005).

    Raises:
        FileNotFoundError: WordNet is not there.
    """
    from nltk.translate.meteor_score import single_meteor_score

    stemmer, wordnet, words = _stemmer(), _wordnet(), _tokenizer().tokenize
    return [
        float(single_meteor_score(words(reference), words(response), stemmer=stemmer, wordnet=wordnet))
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
    """Different n-grams of words per n-gram, over all texts together (Li et al. 2016); 0 where there is none."""
    grams = [tuple(words[i : i + n]) for words in map(str.split, texts) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


@cache
def _tokenizer() -> Any:
    from nltk.tokenize import NLTKWordTokenizer  # needs no data, unlike word_tokenize

    return NLTKWordTokenizer()


@cache
def _stemmer() -> Any:
    from nltk.stem.porter import PorterStemmer

    class Remembering(PorterStemmer):  # type: ignore[misc]
        """The same words come again and again."""

        @lru_cache(maxsize=2**16)  # noqa: B019  # there is one, for good
        def stem(self, word: str, to_lowercase: bool = True) -> str:
            return str(super().stem(word, to_lowercase))

    return Remembering()


class _WordNet:
    """The part of nltk's WordNet that METEOR asks for, remembered."""

    def __init__(self, reader: Any) -> None:
        self.synsets = lru_cache(maxsize=2**16)(reader.synsets)


@cache
def _wordnet() -> _WordNet:
    import nltk.data
    from nltk.corpus import wordnet

    # nltk itself looks at the variable only when it is imported
    own = os.environ.get("NLTK_DATA", str(NLTK_DATA.resolve())).split(os.pathsep)
    nltk.data.path[:0] = [path for path in own if path and path not in nltk.data.path]
    try:
        wordnet.ensure_loaded()
    except LookupError:
        raise FileNotFoundError(
            "METEOR needs WordNet, and nltk finds none: `make nltk-data` fetches it into ./nltk_data, or set NLTK_DATA"
            " to the folder that holds corpora/wordnet"
        ) from None
    return _WordNet(wordnet)
