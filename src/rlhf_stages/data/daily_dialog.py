"""DailyDialog (Li et al. 2017): dialogues of everyday life, with the act and the emotion of each utterance."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_stages.args import DailyDialogArgs
from rlhf_stages.data.labelled import write_texts
from rlhf_stages.data.readers import is_text
from rlhf_stages.data.sources import SPLITS, Example, SkipRecord, Source

ACTS = {1: "inform", 2: "question", 3: "directive", 4: "commissive"}
EMOTIONS = {0: "none", 1: "anger", 2: "disgust", 3: "fear", 4: "happiness", 5: "sadness", 6: "surprise"}

_TYPOGRAPHIC = str.maketrans({"’": "'", "‘": "'", "′": "'", "“": '"', "”": '"', "。": ".", "、": ",", "\x7f": " "})
_DETOKENIZE: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<=\w) ?' ?(?=(?:s|t|m|d|re|ll|ve|am|clock)\b)", re.IGNORECASE), "'"),  # don ' t
    (re.compile(r"(?<=')(?:Ve|Re|Ll)\b"), lambda match: match[0].lower()),  # I'Ve
    (re.compile(r"\b([ap]) ?\. ?(m) ?\."), r"\1.\2."),  # 8 p . m .
    (re.compile(r"(?<=\d) , (?=\d{3}\b)"), ","),  # 1 , 000
    (re.compile(r"(?<=\d) ?: (?=\d\d\b)"), ":"),  # 7 : 30
    (re.compile(r" +(?=[.,?!;:%)])"), ""),
    (re.compile(r"(?<=\() +|(?<=[$£¥]) +(?=\d)"), ""),
    (re.compile(r"(?<=[A-Za-z][a-z])([.?!])(?=[A-Z])(?!\w+\.[a-z])"), r"\1 "),  # right.But, no address
]
_QUOTED = re.compile(r'" *([^"]*[^" ]) *"')


def clean(text: str) -> str:
    """Normal English of what the official files part into words: `I don ’ t know , Bob .` is "I don't know, Bob."

    Pretrained models know that form, and people who chat write it. Typographic quotes become plain ones; spaces go in
    contractions, before punctuation, within brackets and quotes, in times and amounts; one comes between sentences that
    have none. What is ambiguous stays (`hand - supported`, `kids ' ability`), and so does text that is normal already.
    """
    text = " ".join(text.translate(_TYPOGRAPHIC).split())
    for pattern, replacement in _DETOKENIZE:
        text = pattern.sub(replacement, text)
    return _QUOTED.sub(r'"\1"', text)


@dataclass(frozen=True)
class Dialogue:
    """A dialogue: its utterances with the names of their acts and emotions.

    `key` is its letters and digits: dialogues of the same key say the same.
    """

    utterances: tuple[str, ...]
    acts: tuple[str, ...]
    emotions: tuple[str, ...]
    key: str


def to_dialogue(record: Mapping[str, Any], separator: str, keep_tokenization: bool) -> Dialogue:
    """The dialogue of a record `{"dialog": utterances, "act": numbers, "emotion": numbers}`.

    Raises:
        SkipRecord: it is none; the message is the reason to count, and after a colon what is wrong.
    """
    texts, acts, emotions = (record.get(name) for name in ("dialog", "act", "emotion"))
    if not (isinstance(texts, list) and all(isinstance(text, str) and is_text(text) for text in texts)):
        raise SkipRecord("dialogue is not text")
    if not isinstance(acts, list) or not isinstance(emotions, list) or not len(texts) == len(acts) == len(emotions):
        counts = [len(labels) if isinstance(labels, list) else "no" for labels in (acts, emotions)]
        raise SkipRecord(
            f"dialogue with missing labels: {len(texts)} utterances, {counts[0]} acts, {counts[1]} emotions"
        )
    if not (_known(acts, ACTS) and _known(emotions, EMOTIONS)):
        raise SkipRecord(f"dialogue with unknown labels: acts {acts}, emotions {emotions}")
    cleaned = [text if keep_tokenization else clean(text) for text in texts]
    cleaned = [" ".join(text.replace(separator, " ").split()) for text in cleaned]
    if not all(cleaned):
        raise SkipRecord("dialogue with an empty utterance")
    key = "\n".join(re.sub(r"[\W_]+", "", text).lower() for text in texts)
    return Dialogue(tuple(cleaned), tuple(ACTS[i] for i in acts), tuple(EMOTIONS[i] for i in emotions), key)


def _known(labels: list[Any], names: Mapping[int, str]) -> bool:
    return all(isinstance(label, int) and label in names for label in labels)


class Dialogues:
    """The dialogues of a source, read and sifted; iterating gives (split, sample), one for each utterance to learn.

    Attributes:
        dialogues: those of each split that can be used.
        skipped: the reasons why others cannot, counted by split.
        first_skipped: where the first is that cannot be read.
    """

    def __init__(self, source: Source, args: DailyDialogArgs) -> None:
        self._args = args
        self.dialogues: dict[str, list[Dialogue]] = {split: [] for split in SPLITS}
        self.skipped: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
        self.first_skipped: str | None = None
        numbers: Counter[str] = Counter()
        for split, record in source:
            numbers[split] += 1
            try:
                dialogue = to_dialogue(record, args.separator, args.keep_tokenization)
            except SkipRecord as skip:
                reason, _, what = str(skip).partition(": ")
                self.skipped[split][reason] += 1
                self.first_skipped = self.first_skipped or f"{split}, dialogue {numbers[split]:,}: {what or reason}"
            else:
                self.dialogues[split].append(dialogue)
        self.first_skipped = source.first_skipped or self.first_skipped
        for split, reasons in source.skipped.items():
            self.skipped[split].update(reasons)
        missing = [split for split in SPLITS if not self.dialogues[split]]
        if missing:
            raise ValueError(
                f"--source gives no dialogue to use for {', '.join(missing)}; DailyDialog comes in {', '.join(SPLITS)}"
            )
        self._sift()

    def _sift(self) -> None:
        """Drop what is in a split of higher precedence, what train has twice, and what is too short."""
        owner: dict[str, str] = {}
        for split in ("test", "validation", "train"):
            kept: list[Dialogue] = []
            for dialogue in self.dialogues[split]:
                first = owner.setdefault(dialogue.key, split)
                if first != split and self._args.remove_overlap:
                    self.skipped[split][f"dialogue also in {first}"] += 1
                elif len(dialogue.utterances) <= self._args.minimum_turns:
                    self.skipped[split]["dialogue of too few utterances"] += 1
                else:
                    kept.append(dialogue)
            distinct = kept if split != "train" else list({dialogue.key: dialogue for dialogue in kept}.values())
            if len(distinct) < len(kept):
                self.skipped[split]["dialogue repeated"] += len(kept) - len(distinct)
            self.dialogues[split] = distinct

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for split, dialogues in self.dialogues.items():
            for dialogue in dialogues:
                for place in range(self._args.minimum_turns, len(dialogue.utterances)):
                    context = dialogue.utterances[max(0, place - self._args.context_turns) : place]
                    yield (
                        split,
                        {
                            "prompt": "".join(utterance + self._args.separator for utterance in context),
                            "response": dialogue.utterances[place],
                            "key": f"{split}\n{dialogue.key}",  # Dialogues that two splits share may stay in both
                            "act": dialogue.acts[place],
                            "emotion": dialogue.emotions[place],
                            "last_turn": context[-1],
                        },
                    )


def to_example(sample: Mapping[str, Any]) -> Example:
    """A prompt of utterances that each end with the separator, and the utterance that comes next."""
    metadata = {name: sample[name] for name in ("act", "emotion", "last_turn")}
    return Example(sample["prompt"], (sample["response"],), key=sample["key"], metadata=metadata)


def chat_template(separator: str, context_turns: int) -> str:
    """Renders messages to the prompts of the data: the newest ones, each ended by the separator."""
    end = json.dumps(separator)
    return (
        "{{ bos_token or '' }}"
        f"{{% for message in messages[-{context_turns}:] %}}"
        f"{{{{ message['content'] | trim | replace({end}, ' ') + {end} }}}}"
        "{% endfor %}"
    )


def write_labelled(
    samples: Iterable[tuple[str, Mapping[str, Any]]], folder: Path, args: DailyDialogArgs
) -> dict[str, int]:
    """Write `act_<split>.jsonl` and `emotion_<split>.jsonl`: texts with the label of the last utterance.

    A text is the utterance before, a line break, and the utterance; its label is a name. Returns the rows by split.
    """
    rows: dict[str, list[Mapping[str, Any]]] = {split: [] for split in SPLITS}
    for split, sample in samples:
        rows[split].append(sample)
    for split, of_split in rows.items():
        if args.shuffle:
            random.Random(args.seed).shuffle(of_split)
        rows[split] = of_split[: args.num_samples]
    for label in ("act", "emotion"):
        texts = {
            split: [(f"{row['last_turn']}\n{row['response']}", row[label]) for row in of_split]
            for split, of_split in rows.items()
        }
        write_texts(folder, label, texts)
    return {split: len(of_split) for split, of_split in rows.items()}
