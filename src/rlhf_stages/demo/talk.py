"""Replies of one or two models to the same words, as they come, and what a reward model makes of them."""

import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlhf_stages.args import DemoArgs, GenerationArgs, ModelArgs
from rlhf_stages.chat import ChatSession
from rlhf_stages.data.tokenizer import encode_prompt, encode_response, fingerprint, load_tokenizer
from rlhf_stages.demo.choices import Source, source_of
from rlhf_stages.experiment import parent_checkpoint, resolve_checkpoint
from rlhf_stages.models.frozen import freeze
from rlhf_stages.models.loading import load_scalar
from rlhf_stages.models.scalar import end_scores
from rlhf_stages.terminal import first_line

KEPT = 3  # Models in memory: two side by side and their judge


@dataclass
class Reply:
    """What a model answered, so far. first, seconds: until its first piece and its last, from when it was asked."""

    name: str
    text: str = ""
    error: str = ""
    score: float | None = None
    unscored: str = ""
    tokens: int = 0
    first: float | None = None
    seconds: float = 0.0
    stopped: bool = False
    done: bool = False


@dataclass
class Turn:
    """What a person said, and the replies, one for each model."""

    text: str
    replies: list[Reply] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """How to answer: experiment and checkpoint of each model, the judge, and the sampling."""

    models: Sequence[tuple[str, str]]
    reward_model: str
    sampling: GenerationArgs
    repetition_penalty: float = 1.0
    seed: int | None = None
    remembers: bool = True


class Scorer:
    """A reward model that reads prompt and reply, closed with EOS as the texts that it was trained on."""

    def __init__(self, path: str, device: torch.device, trust_remote_code: bool) -> None:
        source = _reward_model(path)
        self._tokenizer = load_tokenizer(source, trust_remote_code)
        self._fingerprint = fingerprint(self._tokenizer)
        args = ModelArgs(trust_remote_code=trust_remote_code)
        self._model = freeze(load_scalar(source, self._tokenizer, args, trained_head=True), device)
        self._device = device

    @torch.no_grad()
    def __call__(self, session: ChatSession) -> float:
        """The score of the session's last exchange."""
        prompt, written, _ = session.last
        if fingerprint(session.tokenizer) != self._fingerprint:
            text = str(session.tokenizer.decode(prompt, clean_up_tokenization_spaces=False))
            prompt = encode_prompt(self._tokenizer, text.removeprefix(session.tokenizer.bos_token or ""))
        row = prompt + encode_response(self._tokenizer, written.rstrip())
        ids = torch.tensor([row], device=self._device)
        return float(end_scores(self._model, ids, torch.ones_like(ids, dtype=torch.bool)))


class Models:
    """The models of a server: each is loaded when it is first asked, and the ones used last stay."""

    def __init__(self, args: DemoArgs) -> None:
        self._args = args
        self._kept: OrderedDict[object, Any] = OrderedDict()

    def session(self, source: Source, *, fresh: bool = False) -> ChatSession:
        """The model as a conversation of its own, with nothing said yet. Raises as `ChatSession.load` does."""
        args = self._args
        dtype = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}[args.precision]
        load = lambda: ChatSession.load(  # noqa: E731
            source.path,
            device=args.device,
            dtype=dtype,
            trust_remote_code=args.trust_remote_code,
            chat_template=source.chat_template,
        )
        session: ChatSession = self._get(source, load, fresh)
        return copy.copy(session)

    def scorer(self, path: str, device: torch.device, *, fresh: bool = False) -> Scorer:
        """A reward model. Raises ValueError, FileNotFoundError if it is none."""
        scorer: Scorer = self._get((path, device), lambda: Scorer(path, device, self._args.trust_remote_code), fresh)
        return scorer

    def _get(self, key: object, load: Callable[[], Any], fresh: bool) -> Any:
        if fresh:
            self._kept.pop(key, None)
        if key not in self._kept:
            while len(self._kept) >= KEPT:
                self._kept.popitem(last=False)
            self._kept[key] = load()
        self._kept.move_to_end(key)
        return self._kept[key]


def answer(
    models: Models, turns: list[Turn], text: str, request: Request, stopped: Callable[[], bool]
) -> Iterator[None]:
    """Add a turn, and yield whenever there is more of it to show; what goes wrong stands in the reply.

    The models speak one after the other, each from the same seed. `stopped` is asked after every piece.
    """
    turn = Turn(text, [Reply(" ".join(names)) for names in request.models])
    turns.append(turn)
    yield
    for k, (names, reply) in enumerate(zip(request.models, turn.replies, strict=True)):
        history = _history(turns[:-1], k) if request.remembers else []
        try:
            source = source_of(*names)
            reply.name = source.name
            if stopped():
                reply.stopped = True
            else:
                yield from _speak(models, source, reply, history, text, request, stopped)
        except Exception as error:  # torch and transformers raise anything; the page goes on
            reply.error = reason_of(error)
        reply.done = True
        yield


def reason_of(error: Exception) -> str:
    """What went wrong, in a line."""
    line = first_line(error)
    return line if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {line}"


def _speak(
    models: Models,
    source: Source,
    reply: Reply,
    history: list[dict[str, str]],
    text: str,
    request: Request,
    stopped: Callable[[], bool],
) -> Iterator[None]:
    """Fill in a reply."""
    session = models.session(source)
    session.history = history
    torch.manual_seed(request.seed) if request.seed is not None else torch.seed()
    started = time.perf_counter()
    pieces = session.stream(text, request.sampling, repetition_penalty=request.repetition_penalty)
    try:
        for piece in pieces:
            reply.text += piece
            reply.seconds = time.perf_counter() - started
            reply.first = reply.seconds if reply.first is None else reply.first
            yield
            if stopped():
                reply.stopped = True
                break
    finally:
        pieces.close()
    reply.tokens = session.last[2]
    if request.reward_model and reply.text:
        try:
            reply.score = models.scorer(request.reward_model, session.model.device)(session)
        except Exception as error:  # the reply is there; only its score is not
            reply.unscored = reason_of(error)


def _history(turns: Sequence[Turn], k: int) -> list[dict[str, str]]:
    """What a model has said and heard: the exchanges in which the one in its place answered."""
    history = []
    for turn in turns:
        if k < len(turn.replies) and turn.replies[k].text and not turn.replies[k].error:
            history.append({"role": "user", "content": turn.text})
            history.append({"role": "assistant", "content": turn.replies[k].text})
    return history


def _reward_model(path: str) -> str:
    """The model folder of a reward model, or the hub id."""
    if not Path(path).exists():
        return path
    checkpoint = resolve_checkpoint(path)
    if (checkpoint.parent.parent / "args.json").is_file():
        checkpoint, _ = parent_checkpoint(path, stage="rm", flag="reward model")
    return str(checkpoint)
