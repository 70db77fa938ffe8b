"""Raw records to token shards: judge, tokenize, split, write.

Records are read one at a time and tokenized in chunks; only the tokens and a `Row` of facts about each stay in memory.
What concerns several records (splits, repeated ones, order) is settled when all are read; only then files are written.
"""

import json
import os
import random
import statistics
import tempfile
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import IO

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import TextDataArgs
from rlhf_stages.data.encoding import TextEncoder
from rlhf_stages.data.manifest import Counts, earlier_stages, write_manifest
from rlhf_stages.data.shards import ShardWriter, atomic_save
from rlhf_stages.data.sources import SPLITS, Judged, Records, Row, ToExample, fraction, judge
from rlhf_stages.data.tokenizer import describe_tokenizer, encode_prompt, load_tokenizer, separator_id
from rlhf_stages.files import write_text
from rlhf_stages.terminal import folded_command

CHUNK_SIZE = 256  # Records that a worker tokenizes at once

_Texts = tuple[str, tuple[str, ...]]  # Prompt and responses
# The arguments of ShardWriter.add; None is too long
_Encoded = tuple["array[int]", "list[array[int]]", list[bool]] | None


def prepare(
    args: TextDataArgs,
    *,
    dataset: str,
    records: Records,
    to_example: ToExample,
    example_prompt: str,
    chat_template: str | None,
    separator: str | None = None,
) -> Counts:
    """Write the shards of one stage into `args.destination_dir` and return the counts of kept and dropped records.

    `records` yields (train, validation or test, raw record). A source that has a train split keeps the splits it has;
    otherwise all is pooled. Missing splits are carved out of the training records by a hash of the key. Nothing is
    written before all is tokenized, and the other stages of the folder stay as they are. With a `separator` a prompt is
    turns that each end with it: as many of the newest as fit, each encoded on its own.

    Raises:
        ValueError: the folder belongs to other data, another tokenizer or other split settings; the separator is no
            token of the tokenizer; or no training record is left.
    """
    folder = Path(args.destination_dir)
    tokenizer = load_tokenizer(args.tokenizer_name, args.trust_remote_code)
    description = describe_tokenizer(tokenizer, args.tokenizer_name)
    earlier_stages(folder, args, dataset, description)  # fails before the work, not after it
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are the parallelism; a fork warns of threads
    writer, seen = ShardWriter(), set[str]()
    judged = judge(tqdm(records, desc=args.stage, unit=" records", disable=None), to_example, args, seen)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as texts:
        encoder = _Encoder(tokenizer, args.max_prompt_length, args.max_length, separator)
        rows = _tokenize(judged, encoder, args, writer, texts if args.save_skipped_examples else None)
        _place(rows, seen, args)
        order = {split: _select(rows, split, args) for split in SPLITS}
        counts = _count(rows, order, getattr(records, "skipped", {}), pooled="train" not in seen)
        if not order["train"]:
            dropped = "; ".join(f"{split}: {reasons}" for split, reasons in _dropped(counts).items())
            raise ValueError(f"no record is left to train on, so nothing was written; dropped from {dropped}")
        for split in SPLITS:
            path = folder / f"{args.stage}_{split}.pt"
            if order[split]:
                writer.save(path, [row.index for row in order[split]])
            else:
                path.unlink(missing_ok=True)
            _write_skipped(folder / f"{args.stage}_{split}_skipped.json", rows, split, texts)
    ids = torch.tensor([encode_prompt(tokenizer, example_prompt, separator)])
    content = {"prompt": example_prompt, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    atomic_save(content, folder / "example_prompt.pt")
    write_manifest(folder, args, dataset, description, chat_template, counts)
    _print_summary(args, counts, order, getattr(records, "first_skipped", None))
    return counts


class _Encoder:
    """Tokenizes a chunk of records; goes to each worker once."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int,
        max_length: int,
        separator: str | None = None,
    ) -> None:
        self._ids = TextEncoder(tokenizer)
        self._separator = separator
        self._separator_id = None if separator is None else separator_id(tokenizer, separator)
        self._bos = array("i", [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)])
        self._eos = array("i", [int(tokenizer.eos_token_id)])
        self._max_prompt_length = max_prompt_length
        self._max_length = max_length

    def __call__(self, chunk: list[_Texts]) -> list[_Encoded]:
        prompts = self._prompts([prompt for prompt, _ in chunk])
        fits = [len(prompt) <= self._max_prompt_length for prompt in prompts]
        texts = [text for (_, responses), fit in zip(chunk, fits, strict=True) if fit for text in responses]
        ids = iter(self._ids(texts))
        encoded: list[_Encoded] = []
        for (_, responses), prompt, fit in zip(chunk, prompts, fits, strict=True):
            room = self._max_length - len(prompt) - 1
            replies = [next(ids) for _ in responses] if fit else []
            ends = [reply[:room] + self._eos for reply in replies]
            encoded.append((prompt, ends, [len(reply) > room for reply in replies]) if fit else None)
        return encoded

    def _prompts(self, texts: list[str]) -> "list[array[int]]":
        """What `encode_prompt` gives, for many texts at once; the oldest turns leave until the prompt fits."""
        if self._separator is None or self._separator_id is None:
            return [self._bos + ids for ids in self._ids(texts)]
        turns = [text.removesuffix(self._separator).split(self._separator) for text in texts]
        ids = iter(self._ids(list(chain.from_iterable(turns))))
        prompts = []
        for of_text in turns:
            parts = [next(ids) + array("i", [self._separator_id]) for _ in of_text]
            while len(parts) > 1 and len(self._bos) + sum(map(len, parts)) > self._max_prompt_length:
                parts.pop(0)
            prompts.append(sum(parts, start=self._bos))
        return prompts


def _tokenize(
    judged: Iterator[Judged], encoder: _Encoder, args: TextDataArgs, writer: ShardWriter, texts: IO[str] | None
) -> list[Row]:
    """Tokenize what was not dropped into `writer`; return a row per record, and write a line each to `texts`."""
    rows: list[Row] = []
    chunks = iter(lambda: list(islice(judged, CHUNK_SIZE)), [])
    for chunk, encoded in _encode_chunks(chunks, encoder, args.num_workers):
        for row, usable, raw in chunk:
            result = next(encoded) if row.reason is None else None
            if result and args.remove_same_responses and len({ids.tobytes() for ids in result[1]}) < len(result[1]):
                row.reason, result = "same response when cut", None
            if result is not None:
                prompt, responses, truncated = result
                row.index, row.truncated = len(writer), any(truncated)
                row.length = len(prompt) + max(map(len, responses), default=0)
                writer.add(prompt, responses, truncated, row.ratings, row.metadata)
            row.metadata = None
            row.reason = row.reason or (None if result else "prompt too long")
            rows.append(row)
            if texts is not None:
                entry = {"raw": raw} if usable is None else {"prompt": usable[0], "responses": usable[1]}
                texts.write(json.dumps(entry, default=str) + "\n")
    return rows


def _encode_chunks(
    chunks: Iterator[list[Judged]], encoder: _Encoder, num_workers: int
) -> Iterator[tuple[list[Judged], Iterator[_Encoded]]]:
    """Each chunk with what it encodes to, in order; at most two chunks per worker are under way."""
    jobs = ((chunk, [texts for row, texts, _ in chunk if texts and row.reason is None]) for chunk in chunks)
    if num_workers == 1:
        yield from ((chunk, iter(encoder(texts))) for chunk, texts in jobs)
        return
    waiting: deque[tuple[list[Judged], Future[list[_Encoded]]]] = deque()
    with ProcessPoolExecutor(num_workers, initializer=_start_worker, initargs=(encoder,)) as pool:
        for chunk, texts in jobs:
            waiting.append((chunk, pool.submit(_encode_in_worker, texts)))
            if len(waiting) > 2 * num_workers:
                first, future = waiting.popleft()
                yield first, iter(future.result())
        yield from ((chunk, iter(future.result())) for chunk, future in waiting)


_worker_encoder: _Encoder  # Set in the workers only; a process pool has no other place for what they keep


def _start_worker(encoder: _Encoder) -> None:
    global _worker_encoder  # noqa: PLW0603
    _worker_encoder = encoder


def _encode_in_worker(chunk: list[_Texts]) -> list[_Encoded]:
    return _worker_encoder(chunk)


def _place(rows: list[Row], seen: set[str], args: TextDataArgs) -> None:
    """Send each row to its split, then drop what is in a split of higher precedence or twice in the data."""
    kept_splits = seen if "train" in seen else {"train"}
    for row in rows:
        row.split = row.split if row.split in kept_splits else "train"
        if row.split == "train" and row.digest:
            if "test" not in kept_splits and fraction(row.digest, 1) < args.test_percentage:
                row.split = "test"
            elif "validation" not in kept_splits and fraction(row.digest, 2) < args.validation_percentage:
                row.split = "validation"
    owner: dict[bytes, str] = {}
    inputs: set[bytes] = set()
    for split in ("test", "validation", "train"):
        for row in rows:
            if row.split == split and row.reason is None:
                if owner.setdefault(row.digest, split) != split:
                    row.reason = f"also in {owner[row.digest]}"
                elif args.remove_same_inputs and row.inputs in inputs:
                    row.reason = "duplicate input"
                inputs.add(row.inputs)


def _select(rows: list[Row], split: str, args: TextDataArgs) -> list[Row]:
    """The rows that a split keeps, in the order of its shard."""
    kept = [row for row in rows if row.split == split and row.reason is None]
    if args.shuffle:
        random.Random(args.seed).shuffle(kept)
    limit = len(kept) if args.num_samples is None else args.num_samples
    for row in kept[limit:]:
        row.reason = "over num_samples"
    return kept[:limit]


def _count(
    rows: list[Row], order: Mapping[str, list[Row]], unreadable: Mapping[str, Counter[str]], pooled: bool
) -> Counts:
    skipped: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    for split, reasons in unreadable.items():
        skipped["train" if pooled else split].update(reasons)
    for row in rows:
        if row.reason is not None:
            skipped[row.split][row.reason] += 1
    return {
        split: {
            "kept": len(order[split]),
            "truncated": sum(row.truncated for row in order[split]),
            "skipped": dict(skipped[split].most_common()),
        }
        for split in SPLITS
    }


def _write_skipped(path: Path, rows: list[Row], split: str, texts: IO[str]) -> None:
    """List the dropped records of a split with their reasons; remove an older list if there is nothing to list."""
    texts.seek(0)
    pairs = zip(rows, texts, strict=False)  # without --save_skipped_examples there are no texts
    dropped = ({"reason": row.reason, **json.loads(text)} for row, text in pairs if row.split == split and row.reason)
    entries = (json.dumps(entry, ensure_ascii=False) for entry in dropped)
    first = next(entries, None)
    if first is None:
        path.unlink(missing_ok=True)
    else:
        write_text(path, chain(["[\n", first], (",\n" + entry for entry in entries), ["\n]\n"]))


def _dropped(counts: Counts) -> dict[str, str]:
    """What was dropped from each split, and why."""
    skipped = {split: counts[split]["skipped"].items() for split in counts}
    return {split: ", ".join(f"{n:,} {reason}" for reason, n in skipped[split]) or "none" for split in counts}


def _print_summary(args: TextDataArgs, counts: Counts, order: Mapping[str, list[Row]], bad_line: str | None) -> None:
    for split, dropped in _dropped(counts).items():
        lengths = [row.length for row in order[split]]
        tokens = f", tokens median {statistics.median_low(lengths)}, max {max(lengths)}" if lengths else ""
        cut = f", {counts[split]['truncated']:,} cut to --max_length" if counts[split]["truncated"] else ""
        print(f"{split}: {len(lengths):,} kept{tokens}{cut}; dropped: {dropped}")
    if bad_line is not None:
        print(f"first bad line: {bad_line}")
    folder, model = args.destination_dir, args.tokenizer_name
    stage, parents = {
        "finetune": ("sft", f"--model_name={model}"),
        "preference": ("rm", "--sft_experiment_dir=<sft-dir>"),
        "prompt": ("ppo", "--sft_experiment_dir=<sft-dir> --rm_experiment_dir=<rm-dir>"),
    }[args.stage]
    command = f"python scripts/rlhf_{stage}.py --data_dir={folder} {parents}"
    print(f"wrote {args.stage} shards to {folder}\nnext:\n{folded_command(command)}")
