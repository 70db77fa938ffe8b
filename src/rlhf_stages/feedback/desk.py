"""What the annotation page does, without the page: takes items, saves what people say, shows and exports it.

A page keeps a ticket of what it shows, and sends it back with what the person says, so that the server remembers
nothing between two requests and a page outlives a restart of it.
"""

import json
import random
import shlex
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from rlhf_stages.args import AnnotateArgs, GenerationArgs
from rlhf_stages.experiment import experiment_of, resolve_checkpoint
from rlhf_stages.feedback.export import Exported, export
from rlhf_stages.feedback.ranks import complete_ranks, read_ranks
from rlhf_stages.feedback.records import JUDGE, Item, Judgement, Opinion
from rlhf_stages.feedback.sampling import Replier, check_prompt, read_prompts
from rlhf_stages.feedback.store import Store
from rlhf_stages.feedback.wording import Refusal
from rlhf_stages.files import read_json

MAX_NAME = 60
SCORE_RANGE = (-2.0, 2.0)  # That of transformers_tasks' terminal


@dataclass(frozen=True)
class Ticket:
    """What a page shows: an item, the order of its replies there, a token for the answer, and since when."""

    item: int
    order: tuple[int, ...]
    token: str
    started: float

    def text(self) -> str:
        """As the page keeps it."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Ticket":
        """The ticket of a page. Raises Refusal if it shows nothing."""
        try:
            content = json.loads(text)
            return cls(int(content["item"]), tuple(map(int, content["order"])), str(content["token"]),
                       float(content["started"]))  # fmt: skip
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            raise Refusal("nothing_to_judge") from None


@dataclass(frozen=True)
class Shown:
    """An item as a person sees it: blind, its replies shuffled."""

    ticket: Ticket
    prompt: str
    replies: tuple[str, ...]


def check_name(name: str) -> str:
    """The name of an annotator without space around it. Raises Refusal if it will not do."""
    name = name.strip()
    if not name:
        raise Refusal("no_name")
    if len(name) > MAX_NAME or not name.isprintable() or name.startswith(JUDGE):
        raise Refusal("name_length", limit=MAX_NAME)
    return name


def shuffled(item: Item, chance: random.Random) -> Shown:
    """An item as one person sees it now, with its replies in a new order."""
    order = list(range(len(item.replies)))
    chance.shuffle(order)
    ticket = Ticket(item.id, tuple(order), uuid.uuid4().hex, time.time())
    return Shown(ticket, item.prompt.lstrip("\n"), tuple(item.replies[i] for i in order))


def save(store: Store, annotator: str, seen: Ticket, opinion: Opinion) -> Judgement:
    """Store what a person says of what a page shows.

    Raises:
        Refusal: as `Store.save` does, or something else was said with this ticket before.
    """
    stored = store.save(seen.item, check_name(annotator), opinion, time.time() - seen.started, seen.token)
    if stored.opinion != opinion:  # a double click is the same twice; this one was two buttons
        raise Refusal("judged_before", number=stored.id)
    return stored


class Desk:
    """Everything behind the page of one server; its methods may be called from many threads."""

    def __init__(self, args: AnnotateArgs, store: Store) -> None:
        self.args, self.store = args, store
        self._replier = Replier(args)
        self._prompts: dict[str, list[str]] = {}
        self._random = random.Random(args.seed)
        self._exporting = threading.Lock()

    def random_prompt(self, source: str) -> str:
        """A prompt of one of the files that the server offers. Raises Refusal if there is none."""
        if source not in self.args.prompts:
            raise Refusal("no_source")
        if source not in self._prompts:
            try:
                self._prompts[source] = read_prompts(source, self.args.models)
            except (ValueError, OSError) as error:
                raise Refusal("bad_source", reason=error) from error
        return self._random.choice(self._prompts[source])

    def next(
        self, annotator: str, model: str, source: str, count: int, temperature: float, max_new_tokens: int
    ) -> Shown:
        """The next item for a person to rank: in `repeat_share` of the cases one that somebody else has ranked."""
        if self._random.random() < self.args.repeat_share and (item := self.store.repeat_for(check_name(annotator))):
            return self.show(item)
        prompt = self.random_prompt(source)
        return self.sample(annotator, model, prompt, count, temperature, max_new_tokens)

    def sample(
        self, annotator: str, model: str, prompt: str, count: int, temperature: float, max_new_tokens: int
    ) -> Shown:
        """New replies to a prompt, stored as an item before anybody sees them."""
        check_name(annotator)
        asked = check_prompt(prompt, self.args.prompt_format)
        names = [field.name for field in fields(GenerationArgs)]
        try:
            settings = replace(
                GenerationArgs(**{name: getattr(self.args, name) for name in names}),
                temperature=float(temperature), max_new_tokens=int(max_new_tokens),
            )  # fmt: skip
        except ValueError as error:
            raise Refusal("bad_sampling", reason=error) from None
        replies, weights = self._replier.replies(model, asked, min(max(int(count), 1), 9), settings)
        return self.show(self.store.add_item(asked, replies, model, weights, asdict(settings)))

    def show(self, item: Item) -> Shown:
        """An item with its replies in a new order."""
        return shuffled(item, self._random)

    def seen(self, ticket: str) -> tuple[str, ...]:
        """The replies that a page shows, in its order. Raises Refusal if it shows nothing."""
        held = Ticket.read(ticket)
        replies = self.store.item(held.item).replies
        if sorted(held.order) != list(range(len(replies))):
            raise Refusal("nothing_to_judge")
        return tuple(replies[i] for i in held.order)

    def rank(self, annotator: str, ticket: str, ranks: Sequence[int | None], ties: bool) -> Judgement:
        """Save ranks that a person gave to the replies in the order of the page."""
        seen = Ticket.read(ticket)
        given = complete_ranks(list(ranks)[: len(seen.order)], ties)
        of_reply = dict(zip(seen.order, given, strict=False))
        return save(self.store, annotator, seen, Opinion("ranked", tuple(of_reply[i] for i in sorted(of_reply))))

    def say(self, annotator: str, ticket: str, verdict: str) -> Judgement:
        """Save that all replies are bad, or that a person skipped them."""
        return save(self.store, annotator, Ticket.read(ticket), Opinion(verdict))

    def score(self, annotator: str, ticket: str, score: float) -> Judgement:
        """Save the score of the one reply that the page shows."""
        seen = Ticket.read(ticket)
        low, high = SCORE_RANGE
        if not low <= score <= high or not seen.order:
            raise Refusal("score_text")
        return save(self.store, annotator, seen, Opinion("scored", reply=seen.order[0], score=score))

    def edit(self, annotator: str, number: int, revision: int, verdict: str, text: str, token: str) -> Judgement:
        """Change a judgement: `text` is ranks, or a score, for the replies in the order in which they were sampled."""
        ranks, reply, score = None, None, None
        if verdict == "ranked":
            ranks = read_ranks(text, len(self.item_of(number).replies))
        elif verdict == "scored":
            try:
                score = float(text)
            except ValueError:
                raise Refusal("score_text") from None
            if not SCORE_RANGE[0] <= score <= SCORE_RANGE[1]:
                raise Refusal("score_text")
            reply = self.store.history(number)[0].opinion.reply or 0
        opinion = Opinion(verdict, ranks, reply, score)
        return self.store.edit(number, revision, opinion, check_name(annotator), token)

    def remove(self, annotator: str, number: int, revision: int, token: str) -> Judgement:
        """Mark a judgement as deleted."""
        return self.store.delete(number, revision, check_name(annotator), token)

    def item_of(self, number: int) -> Item:
        """The item of a judgement. Raises Refusal if there is no such judgement."""
        history = self.store.history(number)
        if not history:
            raise Refusal("gone", number=number)
        return self.store.item(history[0].item)

    def export(self) -> Exported:
        """Write everything that is not deleted to the export folder."""
        name = self.args.tokenizer_name or next(iter(self.args.models), None)
        judged = self.store.judgements()[::-1]
        with self._exporting:
            try:
                if name is None:
                    raise Refusal("no_model")
                tokenizer = (
                    name if self.args.tokenizer_name or not Path(name).is_dir() else str(resolve_checkpoint(name))
                )
                return export(judged, Path(self.args.export_dir), tokenizer, self.args.trust_remote_code)
            except Refusal:
                raise
            except (ValueError, OSError) as error:
                raise Refusal("bad_export", reason=error) from error

    def training_command(self) -> str:
        """The command that trains a reward model on the export, from the first of the models."""
        start = _start_of(next(iter(self.args.models), None))
        return shlex.join(["python", "scripts/rlhf_rm.py", f"--data_dir={self.args.export_dir}", start])


def _start_of(model: str | None) -> str:
    """The flag of rlhf_rm.py that begins with a model; it takes an experiment of SFT, and a checkpoint of others."""
    if model is None:
        return "--model_name=..."
    if not Path(model).is_dir():
        return f"--model_name={model}"
    try:
        checkpoint = resolve_checkpoint(model)
        experiment = experiment_of(checkpoint)
        stage = None if experiment is None else read_json(experiment / "args.json").get("stage")
    except (ValueError, OSError):  # the page cannot load it either
        return "--model_name=..."
    return f"--sft_experiment_dir={model}" if stage == "sft" else f"--model_name={checkpoint}"
