"""Two models that answer the same prompts: who they are, what should be known about them, and their replies as items.

An item of a comparison holds the reply of model A and that of model B, in this order; `comparison` among its settings
says which comparison it belongs to. That is a digest of all that the replies depend on, so the same command finds them
again, with the votes.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from lightning.fabric import Fabric, seed_everything

from rlhf_stages import loop
from rlhf_stages.args import CompareArgs, GenerationArgs, ModelArgs
from rlhf_stages.data.collate import pad_left
from rlhf_stages.data.info import read_data_info
from rlhf_stages.data.tokenizer import encode_prompt, load_tokenizer
from rlhf_stages.experiment import dataset_of, digest, resolve_checkpoint, stage_name
from rlhf_stages.feedback.desk import Shown, Ticket, check_name, save, shuffled
from rlhf_stages.feedback.records import Item, Judgement, Opinion
from rlhf_stages.feedback.sampling import check_prompt, read_prompts, reply_text
from rlhf_stages.feedback.store import Store
from rlhf_stages.feedback.wording import Refusal
from rlhf_stages.models.forward import check_context
from rlhf_stages.models.loading import load_causal
from rlhf_stages.plan import to_device
from rlhf_stages.rollout.samples import sample


@dataclass(frozen=True)
class Contestant:
    """A model: its name in tables, where it lies, SHA-256 of its weights ("" on the hub), and the data of its run."""

    name: str
    source: str
    digest: str
    dataset: str | None


def contestants_of(models: Sequence[str]) -> tuple[Contestant, Contestant]:
    """The two models.

    Raises:
        FileNotFoundError, ValueError: one is not there; or both are the same.
    """
    found: list[Contestant] = []
    for model in models:
        is_folder = Path(model).exists() or (Path(model).parent != Path(".") and Path(model).parent.is_dir())
        source = resolve_checkpoint(model) if is_folder else Path(model)
        name = stage_name(source, taken=[one.name for one in found]) if is_folder else model
        found.append(Contestant(name, str(source), digest(source) if is_folder else "", dataset_of(source)))
    first, second = found
    if first.source == second.source or first.digest == second.digest != "":
        raise ValueError(f"{models[0]} and {models[1]} are the same model; there is nothing to compare")
    return first, second


def warnings_of(contestants: tuple[Contestant, Contestant], prompts: str) -> list[str]:
    """What whoever reads the result should know, a sentence each."""
    first, second = contestants
    found = []
    if None not in (first.dataset, second.dataset) and first.dataset != second.dataset:
        found.append(
            f"The models come from runs on different datasets: {first.name} from {first.dataset}, {second.name} from"
            f" {second.dataset}. A difference may come from the data as much as from the training."
        )
    shard = Path(prompts)
    if shard.suffix == ".pt":
        dataset = read_data_info(shard.parent).dataset
        others = [one.name for one in contestants if one.dataset not in (None, dataset)]
        if others:
            found.append(f"The prompts are those of {dataset}, which {' and '.join(others)} did not train on.")
        if shard.stem.endswith("_train"):
            found.append(f"{shard.name} is a training split: the models may have seen these prompts.")
    return found


def open_contest(
    args: CompareArgs, contestants: tuple[Contestant, Contestant], store: Store, fabric: Fabric
) -> list[Item]:
    """The replies of both models to each prompt; what is in the database already is not sampled again.

    Raises:
        ValueError, OSError: prompts or a model cannot be read, or a prompt is too long for a model.
    """
    prompts = [
        check_prompt(prompt, args.prompt_format)
        for prompt in read_prompts(str(args.prompts), args.models)[: args.num_prompts]
    ]
    names = [field.name for field in fields(GenerationArgs)] + ["seed", "prompt_format", "mini_batch_size"]
    settings = {name: getattr(args, name) for name in names} | {"precision": str(fabric._precision.precision)}
    facts = [[one.source if one.digest == "" else one.digest for one in contestants], settings, prompts]
    number = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    items = store.items_with("comparison", number)
    if len(items) < len(prompts):
        columns = [_replies(one, prompts, args, fabric) for one in contestants]
        sources, digests = (" | ".join(getattr(one, key) for one in contestants) for key in ("source", "digest"))
        rows = [(prompt, replies) for prompt, *replies in zip(prompts, *columns, strict=True)]
        # the same command may have run meanwhile: then its replies are the ones that people are asked about
        items = store.add_missing("comparison", rows, sources, digests, settings | {"comparison": number})
    return items


def _replies(contestant: Contestant, prompts: Sequence[str], args: CompareArgs, fabric: Fabric) -> list[str]:
    """One reply to each prompt, from the seed of the command line."""
    tokenizer = load_tokenizer(contestant.source, args.trust_remote_code)
    model_args = ModelArgs(disable_dropout=True, trust_remote_code=args.trust_remote_code)
    model = loop.freeze(fabric, load_causal(contestant.source, tokenizer, model_args))
    seed_everything(args.seed, verbose=False)
    rows = [torch.tensor(encode_prompt(tokenizer, prompt)) for prompt in prompts]
    check_context(model, max(map(len, rows)) + args.max_new_tokens)
    replies = []
    for start in range(0, len(rows), args.mini_batch_size):
        batch = pad_left(rows[start : start + args.mini_batch_size], int(tokenizer.pad_token_id))
        answers = sample(model, to_device(batch, fabric.device), tokenizer, args, fabric)
        for ids, mask in zip(answers.ids, answers.mask, strict=True):
            replies.append(reply_text(tokenizer, ids[mask].tolist(), args.prompt_format))
    return replies


def is_identical(item: Item) -> bool:
    """Whether both models said the same: a tie that nobody is asked about."""
    first, second = item.replies
    return first.strip() == second.strip()


class ContestDesk:
    """Everything behind the page of a comparison; its methods may be called from many threads."""

    def __init__(self, args: CompareArgs, contestants: tuple[Contestant, Contestant], items: Sequence[Item],
                 store: Store, warnings: Sequence[str]) -> None:  # fmt: skip
        self.args, self.contestants, self.items, self.store, self.warnings = args, contestants, items, store, warnings
        self._chance = random.Random()
        self._asked = [item for item in items if not is_identical(item)]

    def next(self, annotator: str) -> tuple[Shown | None, int]:
        """The first pair that a person has not judged, in random order, or None; and how many that person has."""
        person, numbers = check_name(annotator), {item.id for item in self._asked}
        done = {item.id for _, item in self.store.judgements(annotator=person)} & numbers
        item = next((item for item in self._asked if item.id not in done), None)
        return None if item is None else shuffled(item, self._chance), len(done)

    @property
    def count(self) -> int:
        """Pairs that people are asked about."""
        return len(self._asked)

    def vote(self, annotator: str, ticket: str, choice: str) -> Judgement:
        """Save `left`, `right`, `equal`, `both_bad` or `skip`; left and right are those of the page."""
        seen = Ticket.read(ticket)
        ranks = {"left": (1, 2), "right": (2, 1), "equal": (1, 1)}.get(choice)
        if ranks is None:
            opinion = Opinion("all_bad" if choice == "both_bad" else "skipped")
        else:
            if sorted(seen.order) != [0, 1]:
                raise Refusal("nothing_to_judge")
            opinion = Opinion("ranked", tuple(ranks[seen.order.index(reply)] for reply in (0, 1)))
        return save(self.store, annotator, seen, opinion)
