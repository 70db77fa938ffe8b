"""Rewards of your own: `--plugins examples/custom_reward.py --reward polite=0.5 --reward concise=0.2,words=12`.

A function is called with those of `prompts`, `responses`, `references`, `metadata` and `tokens` that it declares, for a
batch at a time, and returns a number per response. What else it declares are options.
"""

from collections.abc import Sequence

from rlhf_stages.plugins import register_reward

COURTESIES = ("thank", "please", "happy to", "sorry")


@register_reward("polite")
def polite(responses: Sequence[str]) -> list[float]:
    """1 for a courtesy, wherever it stands."""
    return [float(any(word in response.lower() for word in COURTESIES)) for response in responses]


@register_reward("concise")
def concise(responses: Sequence[str], words: int = 20) -> list[float]:
    """0 up to so many words, and -1 for each further dozen."""
    return [-max(0, len(response.split()) - words) / 12 for response in responses]


@register_reward("no_shouting")
class NoShouting:
    """Takes something from each token that is written in capitals: `--reward no_shouting=1,per_token=true`."""

    def __init__(self, fine: float = 0.1) -> None:
        self.fine = fine

    def __call__(self, tokens: Sequence[Sequence[str]]) -> list[list[float]]:
        """A list for each response, with a number for each of its tokens."""
        return [[-self.fine * (len(token.strip()) > 1 and token.isupper()) for token in row] for row in tokens]
