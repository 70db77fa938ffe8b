"""What the votes on two models say: counts, win rate with its interval, sign test, and a Markdown report."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rlhf_stages.args import CompareArgs
from rlhf_stages.feedback.contest import Contestant, is_identical
from rlhf_stages.feedback.records import JUDGE, Item, Judgement
from rlhf_stages.feedback.store import Store
from rlhf_stages.functional.comparison import sign_test, wilson_interval

LEVEL = 0.05  # Of the sign test
HEADERS = ("judge", "A wins", "B wins", "ties", "of them identical", "both bad", "skipped", "open",
           "B preferred (95 % interval)", "sign test p")  # fmt: skip


@dataclass(frozen=True)
class Tally:
    """Pairs by what a judge (or most of several) said of them; `identical` ones are among the ties.

    `both_bad` are no ties: nobody said that the replies are equally good. They count for neither.
    """

    judge: str
    wins_a: int
    wins_b: int
    ties: int
    identical: int
    both_bad: int
    skipped: int
    open: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the share of B among the pairs that somebody won."""
        return wilson_interval(self.wins_b, self.wins_a + self.wins_b)

    @property
    def p(self) -> float:
        """Of the sign test on the pairs that somebody won."""
        return sign_test(self.wins_a, self.wins_b)

    def cells(self) -> list[str]:
        """A row under HEADERS."""
        won = self.wins_a + self.wins_b
        low, high = self.interval
        rate = f"{self.wins_b / won:.3f} ({low:.3f} to {high:.3f})" if won else "-"
        counts = (self.wins_a, self.wins_b, self.ties, self.identical, self.both_bad, self.skipped, self.open)
        return [self.judge, *map(str, counts), rate, _probability(self.p) if won else "-"]


def tallies_of(items: Sequence[Item], store: Store) -> list[Tally]:
    """A tally for all people together, if there are several, and one for each judge.

    Together, a pair goes to whom most people prefer, and is a tie where they are even: votes of several people on one
    pair are not independent, pairs are.
    """
    numbers = {item.id for item in items}
    judged = [judgement for judgement, item in store.judgements() if item.id in numbers]
    judged.sort(key=lambda judgement: judgement.annotator)
    by_name = {name: list(said) for name, said in groupby(judged, lambda judgement: judgement.annotator)}
    people = [name for name in by_name if not name.startswith(JUDGE)]
    found = [_tally(name, items, said) for name, said in by_name.items()]
    if len(people) > 1:
        every = [judgement for name in people for judgement in by_name[name]]
        found.insert(0, _tally(f"{len(people)} people together", items, every))
    return found


def _tally(name: str, items: Sequence[Item], judged: Sequence[Judgement]) -> Tally:
    counts = dict.fromkeys(("a", "b", "tie", "identical", "both_bad", "skipped", "open"), 0)
    for item in items:
        said = [judgement.opinion for judgement in judged if judgement.item == item.id]
        votes = [opinion.ranks for opinion in said if opinion.ranks is not None]
        balance = sum((ranks[0] < ranks[1]) - (ranks[0] > ranks[1]) for ranks in votes)
        verdicts = {opinion.verdict for opinion in said}
        if is_identical(item):
            kind = "identical"
        elif votes:
            kind = "a" if balance > 0 else "b" if balance < 0 else "tie"
        else:
            kind = "both_bad" if "all_bad" in verdicts else "skipped" if verdicts else "open"
        counts[kind] += 1
    return Tally(
        judge=name, wins_a=counts["a"], wins_b=counts["b"], ties=counts["tie"] + counts["identical"],
        identical=counts["identical"], both_bad=counts["both_bad"], skipped=counts["skipped"], open=counts["open"],
    )  # fmt: skip


def conclusion(tally: Tally, contestants: tuple[Contestant, Contestant]) -> str:
    """The result in a sentence, which says no more than the test does."""
    won = tally.wins_a + tally.wins_b
    if not won:
        return f"{tally.judge}: no pair has been won yet."
    better = contestants[tally.wins_b > tally.wins_a].name
    most = max(tally.wins_a, tally.wins_b)
    if tally.p < LEVEL:
        return f"{tally.judge}: {better} is preferred, in {most} of {won} decided pairs (p {_equals(tally.p)})."
    return f"{tally.judge}: no difference can be told from {won} decided pairs (p {_equals(tally.p)})."


def report(
    args: CompareArgs, contestants: tuple[Contestant, Contestant], items: Sequence[Item], store: Store,
    warnings: Sequence[str],
) -> str:  # fmt: skip
    """The whole comparison as Markdown; texts of models and names of people are text in it."""
    tallies = tallies_of(items, store)
    drawn = f"temperature {args.temperature:g}, top-k {args.top_k}, top-p {args.top_p:g}"
    drawn = f"{drawn if args.do_sample else 'the most probable tokens'}, at most {args.max_new_tokens} tokens"
    lines = [f"# {_plain(contestants[0].name)} (A) and {_plain(contestants[1].name)} (B)", ""]
    lines += [line for warning in warnings for line in (f"> **Note.** {_plain(warning)}", "")]
    lines += ["| | name | from | dataset | SHA-256 of the weights |", "| --- | --- | --- | --- | --- |"]
    for letter, one in zip("AB", contestants, strict=True):
        cells = (one.name, one.source, one.dataset or "not known", one.digest[:16] or "not known")
        lines.append(f"| {letter} | {' | '.join(map(_plain, cells))} |")
    about = f"{len(items)} prompts of {args.prompts}, one reply of each model to each: {drawn}, seed {args.seed}."
    lines += ["", _plain(about), ""]
    lines += [f"| {' | '.join(HEADERS)} |", "| --- " * len(HEADERS) + "|"]
    lines += [f"| {' | '.join(map(_plain, tally.cells()))} |" for tally in tallies] or ["| nobody yet |" + " |" * 9]
    lines += ["", *(f"- {_plain(conclusion(tally, contestants))}" for tally in tallies), ""]
    lines += [
        "The share and its interval (Wilson) and the exact two-sided sign test are about the pairs that somebody won;"
        " ties (identical replies among them), both bad and skipped are left out of them. People saw the two replies in"
        " random order and without names.",
        "", "## Replies", "",
    ]  # fmt: skip
    for item in items[: args.num_samples]:
        for name, text in zip(("prompt", "A", "B"), (item.prompt, *item.replies), strict=True):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            lines += [f"{name}:", "", f"{fence}text", text.strip("\n"), fence, ""]
    return "\n".join(lines)


def _probability(p: float) -> str:
    return f"{p:.4f}" if p >= 1e-4 else "< 0.0001"


def _equals(p: float) -> str:
    return f"= {p:.4f}" if p >= 1e-4 else "< 0.0001"


def _plain(text: str) -> str:
    """Text on one line that Markdown and HTML leave as it is."""
    return re.sub(r"([\\`*_{}\[\]<>#|&!~])", r"\\\1", " ".join(text.split()))
