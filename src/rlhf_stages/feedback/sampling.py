"""Prompts and the replies to judge: files of prompts, models that are loaded when they are first asked."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import AnnotateArgs, GenerationArgs
from rlhf_stages.chat import ChatSession
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.data.dialogue import HUMAN, as_prompt
from rlhf_stages.data.info import DataInfo, read_data_info
from rlhf_stages.data.shards import open_shard
from rlhf_stages.data.sources import read_source
from rlhf_stages.data.tokenizer import encode_prompt, fingerprint, load_tokenizer
from rlhf_stages.experiment import digest, resolve_checkpoint
from rlhf_stages.feedback.wording import Refusal
from rlhf_stages.rollout.generation import generate, make_sampler
from rlhf_stages.terminal import first_line

MAX_PROMPT = 8000  # Characters
MAX_PROMPTS = 100_000  # Of a file
DRAWS = 3  # How often a model is asked before its replies are found to be too few
_FIELDS = ("prompt", "question", "instruction", "text")


def read_prompts(source: str, models: Sequence[str] = ()) -> list[str]:
    """The prompts of a file: a shard, a text file with one a line, or records (jsonl, csv, parquet, ...).

    Args:
        models: where the tokenizer of a shard may lie, too; data and models may have been moved.

    Raises:
        ValueError, OSError: it cannot be read, or holds no prompt.
    """
    path = Path(source)
    if path.suffix == ".pt":
        tokenizer = _tokenizer_of(read_data_info(path.parent), models)
        shard = open_shard(path, vocab_size=len(tokenizer))
        ids = (shard[i].prompt.tolist() for i in range(min(len(shard), MAX_PROMPTS)))
        found = [str(tokenizer.decode(i, skip_special_tokens=True, clean_up_tokenization_spaces=False)) for i in ids]
    elif path.suffix == ".txt":
        found = path.read_text(encoding="utf-8-sig").splitlines()[:MAX_PROMPTS]
    else:
        found = []
        for _, record in read_source(source):
            text = next((record[name] for name in _FIELDS if isinstance(record.get(name), str)), "")
            found.append(text)
            if len(found) == MAX_PROMPTS:
                break
    prompts = [text for text in dict.fromkeys(found) if text.strip() and len(text) <= MAX_PROMPT]
    if not prompts:
        raise ValueError(f"{source} holds no prompt (fields that are looked for: {', '.join(_FIELDS)})")
    return prompts


def _tokenizer_of(info: DataInfo, models: Sequence[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a shard: that of a model which is the same, else the one that the data name."""
    for model in models:
        try:
            tokenizer = load_tokenizer(str(resolve_checkpoint(model)))
        except (ValueError, OSError):  # a hub id, or nothing that loads: whoever samples from it will say so
            continue
        if fingerprint(tokenizer) == info.fingerprint:
            return tokenizer
    return load_tokenizer(info.tokenizer_name)


def check_prompt(text: str, prompt_format: str) -> str:
    """What the model is asked for a text that a person wrote or left as it was.

    Raises:
        Refusal: there is none, or too much.
    """
    if not text.strip():
        raise Refusal("no_prompt")
    if len(text) > MAX_PROMPT:
        raise Refusal("prompt_length", length=len(text), limit=MAX_PROMPT)
    if prompt_format == "text":
        return text
    # a text box shows a dialogue without the empty lines that open it
    return as_prompt("\n\n" + text.lstrip("\n") if text.lstrip().startswith(HUMAN.strip()) else text)


def reply_text(tokenizer: PreTrainedTokenizerBase, ids: list[int], prompt_format: str) -> str:
    """A reply as people read it; in a dialogue it ends where the human would speak."""
    text = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return text.partition(HUMAN)[0].rstrip() if prompt_format == "dialogue" else text


class Replier:
    """The models of a server, and the replies that they give, one request at a time."""

    def __init__(self, args: AnnotateArgs) -> None:
        self._args = args
        self._lock = threading.Lock()
        self._loaded: dict[str, tuple[ChatSession, str]] = {}

    def replies(self, model: str, prompt: str, count: int, settings: GenerationArgs) -> tuple[list[str], str]:
        """Up to `count` different replies of a model to a prompt, and the digest of its weights.

        Empty replies and repeated ones are drawn again, `DRAWS` times in all. In a dialogue a reply ends where the
        human would speak.

        Raises:
            Refusal: the model cannot be loaded, the prompt does not fit, or fewer than two replies came (of one wanted:
                none).
        """
        with self._lock:
            session, weights = self._load(model)
            try:
                return self._sample(session, prompt, count, settings), weights
            except Refusal:
                raise
            except Exception as error:  # torch and transformers raise anything
                reason = first_line(error)
                raise Refusal("bad_sampling", reason=reason) from error

    def _load(self, model: str) -> tuple[ChatSession, str]:
        if model not in self._args.models:
            raise Refusal("no_model")
        if model not in self._loaded:
            args = self._args
            dtype = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}[args.precision]
            try:
                session = ChatSession.load(
                    model, device=args.device, dtype=dtype, trust_remote_code=args.trust_remote_code
                )
            except Exception as error:  # also out of memory; the page goes on without it
                reason = first_line(error)
                raise Refusal("bad_model", reason=reason) from error
            weights = digest(resolve_checkpoint(model)) if Path(model).is_dir() else ""
            self._loaded[model] = session, weights or str(getattr(session.model.config, "_commit_hash", "") or "")
        return self._loaded[model]

    def _sample(self, session: ChatSession, prompt: str, count: int, settings: GenerationArgs) -> list[str]:
        tokenizer = session.tokenizer
        ids = torch.tensor([encode_prompt(tokenizer, prompt)], device=session.model.device)
        if session.window is not None and ids.shape[1] + settings.max_new_tokens > session.window:
            raise Refusal("prompt_tokens", length=ids.shape[1], reply=settings.max_new_tokens, limit=session.window)
        found: dict[str, str] = {}
        for _ in range(DRAWS):
            wanted = replace(settings, num_return_sequences=count)
            batch = PromptBatch(ids, torch.ones_like(ids, dtype=torch.bool))
            sampler = make_sampler(wanted, tokenizer)
            answers = generate(session.model, batch, wanted, sampler, int(tokenizer.pad_token_id))
            for row, mask in zip(answers.ids, answers.mask, strict=True):
                text = reply_text(tokenizer, row[mask].tolist(), self._args.prompt_format)
                if text.strip() and len(found) < count:
                    found.setdefault(text.strip(), text)
            if len(found) == count:
                break
        if len(found) < min(count, 2):
            raise Refusal("few_replies", count=len(found), needed=min(count, 2))
        return list(found.values())
