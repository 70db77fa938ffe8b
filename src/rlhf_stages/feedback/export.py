"""What people said, as data: preference shards for the reward model, jsonl for everything, and TSV of lists.

    preference_{train,validation,test}.pt, args.json, example_prompt.pt   as data_prep/<dataset>/prepare_data.py writes
    rankings.jsonl   a line per judgement of an item: prompt, replies, ranks, verdict, who, when, model, settings
    scores.jsonl     a line per score: prompt, response, score, who, when, model, settings
    rank_lists.tsv   a list per line, best first, prompt and reply in one text, tabs between them

A ranking without ties is one list of all its replies. One with ties becomes its strict pairs, a list each: the loss of
the reward model is a mean over pairs, so that is the loss of the list with the tied pairs left out. "All bad" and
"skipped" are in the jsonl alone, votes of programs nowhere. Each person's ranking of an item is a record of its own. A
tenth of the prompts goes to validation, a tenth to the test, by a hash of the prompt; with fewer than 20 different ones
all are to train on.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_stages.args import TextDataArgs
from rlhf_stages.data.dialogue import CHAT_TEMPLATE
from rlhf_stages.data.prepare import prepare
from rlhf_stages.data.sources import Example, fraction
from rlhf_stages.feedback.ranks import ordered_lists
from rlhf_stages.feedback.records import JUDGE, Item, Judgement
from rlhf_stages.feedback.wording import Refusal
from rlhf_stages.files import read_json, write_text

Judged = tuple[Judgement, Item]
DATASET = "feedback"  # What args.json calls the data
HELD_OUT = 20  # Different prompts that are needed for some of them to be held out


@dataclass(frozen=True)
class Exported:
    """What an export wrote: rankings that prefer something, the lists they became, scores, and names of files."""

    rankings: int
    lists: int
    scores: int
    files: tuple[str, ...]


def export(judged: Sequence[Judged], folder: Path, tokenizer_name: str, trust_remote_code: bool = False) -> Exported:
    """Write all of the above into a folder; files of an earlier export are replaced.

    Raises:
        Refusal: there is nothing to export. ValueError, OSError: as `prepare` does, a full disk among them.
    """
    judged = [pair for pair in judged if not pair[0].annotator.startswith(JUDGE)]
    rankings = [pair for pair in judged if pair[0].opinion.verdict != "scored"]
    scores = [pair for pair in judged if pair[0].opinion.verdict == "scored"]
    lists = [(item, order) for judgement, item in rankings for order in ordered_lists(judgement.opinion.ranks or ())]
    preferring = sum(bool(ordered_lists(judgement.opinion.ranks or ())) for judgement, _ in rankings)
    if not lists and not scores:
        raise Refusal("no_rows")
    parts = {
        "rankings.jsonl": [_line(ranking_row(*pair)) for pair in rankings],
        "scores.jsonl": [_line(score_row(*pair)) for pair in scores],
        "rank_lists.tsv": list(tsv_lines(lists)),
    }
    if lists:
        _prepare(lists, folder, tokenizer_name, trust_remote_code)
    else:
        _remove_shards(folder)
    for name, lines in parts.items():
        if lines:
            write_text(folder / name, lines)
        else:
            (folder / name).unlink(missing_ok=True)
    written = [name for name, lines in parts.items() if lines]
    shards = sorted(path.name for path in folder.glob("preference_*.pt")) if lists else []
    return Exported(preferring, len(lists), len(scores), (*shards, *written))


def ranking_row(judgement: Judgement, item: Item) -> dict[str, Any]:
    """A line of rankings.jsonl; replies in the order in which they were sampled."""
    opinion = judgement.opinion
    said = {"verdict": opinion.verdict, "ranks": None if opinion.ranks is None else list(opinion.ranks)}
    return {"prompt": item.prompt, "replies": list(item.replies), **said, **_origin(judgement, item)}


def score_row(judgement: Judgement, item: Item) -> dict[str, Any]:
    """A line of scores.jsonl."""
    reply, score = judgement.opinion.reply, judgement.opinion.score
    text = item.replies[reply or 0]
    return {"prompt": item.prompt, "response": text, "score": score, **_origin(judgement, item)}


def tsv_lines(lists: Iterable[tuple[Item, Sequence[int]]]) -> Iterator[str]:
    """Lines of rank_lists.tsv. The format has no escapes: every run of white space is a space there.

    A list in which two texts are then the same is left out.
    """
    for item, order in lists:
        texts = [" ".join((item.prompt + item.replies[reply]).split()) for reply in order]
        if len(set(texts)) == len(texts):
            yield "\t".join(texts) + "\n"


def split_of_prompts(prompts: Iterable[str]) -> dict[str, str]:
    """The split of each prompt; it does not change when others are added, once there are `HELD_OUT`."""
    drawn = {prompt: fraction(hashlib.sha256(prompt.encode()).digest(), 0) for prompt in prompts}
    if len(drawn) < HELD_OUT or min(drawn.values()) >= 0.8:
        return dict.fromkeys(drawn, "train")
    return {prompt: "train" if x < 0.8 else "validation" if x < 0.9 else "test" for prompt, x in drawn.items()}


def _origin(judgement: Judgement, item: Item) -> dict[str, Any]:
    row = asdict(judgement)
    kept = {name: row[name] for name in ("id", "revision", "item", "annotator", "author", "seconds", "created")}
    return {**kept, "model": item.model, "model_digest": item.digest, "settings": dict(item.settings)}


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _prepare(
    lists: Sequence[tuple[Item, Sequence[int]]], folder: Path, tokenizer_name: str, trust_remote_code: bool
) -> None:
    args = TextDataArgs(
        destination_dir=str(folder), tokenizer_name=tokenizer_name, stage="preference", stage_split="0,1,0",
        max_length=4096, max_prompt_length=2048, remove_same_inputs=False, minimum_response_length=1, num_workers=1,
        validation_percentage=0, test_percentage=0,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    splits = split_of_prompts({item.prompt for item, _ in lists})
    records = [
        (splits[item.prompt], {"prompt": item.prompt, "texts": [item.replies[i] for i in order]})
        for item, order in lists
    ]
    first = lists[0][0].prompt
    prepare(
        args, dataset=DATASET, records=records, to_example=_example, example_prompt=first,
        chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def _remove_shards(folder: Path) -> None:
    """Remove what `_prepare` wrote for an earlier export; the data of others stay."""
    if (folder / "args.json").is_file() and read_json(folder / "args.json").get("dataset") == DATASET:
        for path in (*folder.glob("preference_*.pt"), folder / "example_prompt.pt", folder / "args.json"):
            path.unlink(missing_ok=True)


def _example(record: Mapping[str, Any]) -> Example:
    return Example(record["prompt"], tuple(record["texts"]), key=record["prompt"])
