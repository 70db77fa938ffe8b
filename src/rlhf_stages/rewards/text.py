"""Rewards of what a response says, which need no model.

Each is made with its options and called with the texts of a batch; it returns a score for every response.
"""

import re
from collections.abc import Sequence
from typing import Literal

from rlhf_stages import text_metrics
from rlhf_stages.plugins import register_reward


def _given(references: Sequence[str | None], name: str) -> list[str]:
    """The references; all must be there."""
    if None in references:
        raise ValueError(
            f"{name} compares with the data's own responses, which these prompts lack: PPO takes its prompts from"
            " finetune_train.pt where there is no prompt_train.pt"
        )
    return [reference for reference in references if reference is not None]


@register_reward("meteor")
def meteor(responses: Sequence[str], references: Sequence[str | None]) -> list[float]:
    """METEOR against the data's response, 0 to 1 (Banerjee and Lavie 2005, as nltk counts it)."""
    return text_metrics.meteor(responses, _given(references, "meteor"))


@register_reward("rouge")
def rouge(responses: Sequence[str], references: Sequence[str | None], kind: str = "rougeL") -> list[float]:
    """ROUGE f-measure against the data's response, 0 to 1; kind is rouge1, rouge2, rougeL or rougeLsum."""
    return text_metrics.rouge(responses, _given(references, "rouge"), kind)


@register_reward("bleu")
def bleu(responses: Sequence[str], references: Sequence[str | None]) -> list[float]:
    """BLEU of each response against the data's, smoothed as sacrebleu does for sentences, 0 to 1."""
    return text_metrics.sentence_bleu(responses, _given(references, "bleu"))


@register_reward("length")
def length(
    responses: Sequence[str],
    tokens: Sequence[Sequence[str]],
    target: float | None = None,
    unit: Literal["words", "tokens"] = "words",
) -> list[float]:
    """Words (or tokens) of a response; with a target, -|length - target| / target: 0 is best, -1 an empty response."""
    if unit not in ("words", "tokens"):
        raise ValueError(f"unit is words or tokens, got {unit!r}")
    counts = [len(row) for row in (tokens if unit == "tokens" else map(str.split, responses))]
    return [float(count) if target is None else -abs(count - target) / target for count in counts]


@register_reward("repetition")
def repetition(responses: Sequence[str], n: int = 3) -> list[float]:
    """Minus the share of a response's n-grams of words that it has said before: 0 is best, close to -1 one phrase."""
    scores = []
    for words in map(str.split, responses):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        scores.append(len(set(grams)) / len(grams) - 1 if grams else 0.0)
    return scores


@register_reward("regex")
class Regex:
    """1 where a regular expression is found in the response, else 0; with `whole` it has to match all of it."""

    def __init__(self, pattern: str, whole: bool = False, ignore_case: bool = False) -> None:
        try:
            compiled = re.compile(str(pattern), re.IGNORECASE if ignore_case else 0)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r}: {error}") from None
        self._found = compiled.fullmatch if whole else compiled.search

    def __call__(self, responses: Sequence[str]) -> list[float]:
        """1 or 0 for each response."""
        return [float(self._found(response) is not None) for response in responses]
