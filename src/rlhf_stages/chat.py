"""A conversation with a model: the history, the prompt made of it, and the reply as it comes."""

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_stages.args import GenerationArgs
from rlhf_stages.data.dialogue import ASSISTANT, CHAT_TEMPLATE, HUMAN
from rlhf_stages.data.tokenizer import encode_prompt, encode_text, load_tokenizer, separator_id
from rlhf_stages.experiment import resolve_checkpoint
from rlhf_stages.models.streaming import Generation
from rlhf_stages.terminal import first_line

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PROBES = ("Qa", "Qb", "Qc")  # Messages to see what a chat template puts around them
DEFAULT_SETTINGS = GenerationArgs(temperature=0.7, top_k=0)  # Those of chat.py


class ChatSession:
    """A model, its tokenizer, and what was said.

    Attributes:
        history: turns `{"role": "user" or "assistant", "content": text}`, user and assistant by turns.
        notes: sentences that whoever talks should know about this model.
        window: tokens that prompt and reply may have together; None: no limit.
        last: ids of the newest prompt, the reply to it as the model wrote it, with space around it and no marker, and
            how many tokens that took, the one that ends it left out.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str = "model") -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.history: list[dict[str, str]] = []
        self.notes: list[str] = []
        self.last: tuple[list[int], str, int] = ([], "", 0)
        self.window: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if not tokenizer.chat_template:
            tokenizer.chat_template = CHAT_TEMPLATE
            self.notes.append(f"{name} brings no chat template; using Human: and Assistant:")
        self._stop_ids = {int(i) for i in _as_list(model.generation_config.eos_token_id)} | {tokenizer.eos_token_id}
        # generate() fills what a call leaves open from here; the model's own penalties and bans would get in that way.
        model.generation_config = GenerationConfig()
        roles = ("user", "assistant", "user")
        probe = self._text([{"role": role, "content": text} for role, text in zip(roles, _PROBES, strict=True)])
        bos = tokenizer.bos_token or ""
        added = any(token in probe.removeprefix(bos) for token in tokenizer.get_added_vocab())
        self._separator = self._find_separator(probe.removeprefix(bos)) if probe.startswith(bos) else None
        self._is_plain = probe.startswith(bos) and not added
        self._markers = tuple(marker for marker in (HUMAN, ASSISTANT, self._separator) if marker and marker in probe)

    def _find_separator(self, probe: str) -> str | None:
        """What ends each message, where a template does no more than that; None if it is not one token."""
        before, *ends = re.split("|".join(_PROBES), probe)
        if before or len(ends) != len(_PROBES) or len(set(ends)) != 1:
            return None
        try:
            separator_id(self.tokenizer, ends[0])
        except ValueError:
            return None
        return ends[0]

    @classmethod
    def load(
        cls,
        path_or_hub_id: str | Path,
        *,
        device: str = "auto",
        dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
        chat_template: str | None = None,
    ) -> "ChatSession":
        """Load a policy from an experiment, a checkpoint, a model folder or the hub.

        Args:
            device: `auto` is the first of cuda, mps, cpu that is there.
            dtype: of weights and compute; None is float32.
            chat_template: the format of the prompts; None is that of the tokenizer.

        Raises:
            FileNotFoundError: no such folder, or no checkpoint in it yet.
            ValueError: a reward model, a model that cannot write text, damaged weights, no such hub id or device.
        """
        source = _locate(str(path_or_hub_id))
        place = _device(device)
        with _loading(source):
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        _refuse_scorer(config, source)
        with _loading(source):
            model, report = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=dtype or torch.float32,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])
            raise ValueError(f"{source} lacks {len(missing)} of its weights ({missing[0]}, ...); copy it again")
        tokenizer = load_tokenizer(source, trust_remote_code)
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        return cls(model.to(place), tokenizer, name=source)

    def reply(self, text: str, settings: GenerationArgs = DEFAULT_SETTINGS) -> str:
        """Say something and wait for the whole reply. Raises as `stream` does."""
        return "".join(self.stream(text, settings))

    def stream(
        self, text: str, settings: GenerationArgs = DEFAULT_SETTINGS, *, repetition_penalty: float = 1.0
    ) -> Generator[str, None, None]:
        """Say something and get the reply in pieces, as they come.

        `repetition_penalty` divides the logits of tokens that were there before, prompt included, where they are above
        0, and multiplies them where they are below (Keskar et al. 2019); 1 is off.

        What no longer fits the context window stays out of the prompt: the oldest exchanges (the oldest turns, where a
        template tells no roles apart), then the beginning of `text`. The exchange joins the history when the reply
        ends, or with what was said so far when the caller stops (close the iterator, or Ctrl-C). After an error the
        history is as it was.

        Raises:
            ValueError: beams or several sequences are asked for, or the prompt cannot be made.
        """
        if settings.num_beams != 1 or settings.num_return_sequences != 1:
            raise ValueError("a chat gives one reply as it comes; use num_beams=1 and num_return_sequences=1")
        turns = [*self.history, {"role": "user", "content": text}]
        ids = self._prompt(turns, settings.max_new_tokens)
        shown = ""
        self.last = ids, "", 0
        config = self._generation_config(len(ids), settings)
        config.repetition_penalty = repetition_penalty if repetition_penalty != 1.0 else None
        generation = Generation(self.model, ids, config)
        try:
            for visible in self._visible(iter(generation)):
                if len(visible) > len(shown):
                    piece, shown = visible[len(shown) :], visible
                    yield piece
        except (GeneratorExit, KeyboardInterrupt):
            if shown:
                self.history = [*turns, {"role": "assistant", "content": shown}]
            raise
        finally:
            generation.stop()
        self.history = [*turns, {"role": "assistant", "content": shown}]

    def reset(self) -> None:
        """Forget the conversation."""
        self.history = []

    def _visible(self, tokens: Iterator[int]) -> Iterator[str]:
        """What may be shown after each token: never the start of a new turn, half a character or space at the end."""
        ids: list[int] = []
        text = ""
        for token in tokens:
            if token in self._stop_ids:
                yield text.strip()
                return
            ids.append(token)
            text = self._decode(ids)
            cut = min((text.find(marker) for marker in self._markers if marker in text), default=None)
            self.last = self.last[0], text[:cut], len(ids)
            if cut is not None:
                yield text[:cut].strip()
                return
            yield _hold_back(text, self._markers)

    def _decode(self, ids: Sequence[int]) -> str:
        # The whole reply each time: the text of a token depends on its neighbours.
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _prompt(self, turns: list[dict[str, str]], max_new_tokens: int) -> list[int]:
        """Ids of the newest turns that leave room for the reply (at most half of the window is kept for it)."""
        ids: list[int] = self._render(turns)
        if self.window is None:
            return ids
        room = self.window - min(max_new_tokens, self.window // 2)
        while len(ids) > room and len(turns) > 1:
            turns = turns[2 if self._separator is None else 1 :]
            ids = self._render(turns)
        rest = encode_text(self.tokenizer, turns[-1]["content"])
        while len(ids) > room:
            if not rest:
                raise ValueError(f"the chat template alone takes {len(ids)} tokens of {self.name}'s {self.window}")
            rest = rest[len(ids) - room :]
            ids = self._render([{"role": "user", "content": self._decode(rest)}])
        return ids

    def _render(self, turns: list[dict[str, str]]) -> list[int]:
        """Ids of the conversation up to where the assistant speaks."""
        text = self._text(turns)
        if self._is_plain or self._separator is not None:
            # BOS and text: as our stages encode it, a special token that someone spells stays text
            ids = encode_prompt(self.tokenizer, text.removeprefix(self.tokenizer.bos_token or ""), self._separator)
        else:
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        rows = self.model.get_input_embeddings().num_embeddings
        if max(ids, default=0) >= rows:
            raise ValueError(f"the tokenizer of {self.name} gives id {max(ids)}, but the model knows {rows} tokens")
        return ids

    def _text(self, turns: list[dict[str, str]]) -> str:
        """The conversation as the chat template renders it."""
        try:
            return str(self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # a template comes with the model, and can fail like any program
            raise ValueError(f"the chat template of {self.name} fails: {error}") from None

    def _generation_config(self, prompt_size: int, settings: GenerationArgs) -> GenerationConfig:
        room = settings.max_new_tokens if self.window is None else self.window - prompt_size
        sampling = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
        return GenerationConfig(
            max_new_tokens=min(settings.max_new_tokens, room),
            # generate() does not count the stop token, GenerationArgs does
            min_new_tokens=min(settings.min_new_tokens, room + 1) - 1 if settings.min_new_tokens > 1 else None,
            do_sample=settings.do_sample,
            **(sampling if settings.do_sample else {}),
            eos_token_id=sorted(self._stop_ids),
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
        )


@contextmanager
def _loading(source: str) -> Iterator[None]:
    """Turn whatever loading raises into one clear error."""
    try:
        yield
    except Exception as error:  # a damaged folder raises half a dozen types
        reason = first_line(error)
        raise ValueError(f"no language model could be loaded from {source!r} (hub id or folder?): {reason}") from None


def _locate(source: str) -> str:
    """The model folder as a string, or the hub id.

    Raises:
        FileNotFoundError: it looks like a folder, but there is no model in it.
    """
    path = Path(source)
    inside_a_folder = path.parent != Path() and path.parent.is_dir()
    if path.exists() or inside_a_folder or not _HUB_ID.fullmatch(source):
        return str(resolve_checkpoint(path))
    return source


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise ValueError(f"device {name!r} cannot be used ({reason}); take cpu, cuda, mps or auto") from None
    return device


def _refuse_scorer(config: Any, source: str) -> None:
    kinds = [kind for kind in config.architectures or [] if kind.endswith("ForSequenceClassification")]
    if kinds:
        raise ValueError(
            f"{source} is a reward model ({kinds[0]}): it scores texts and cannot talk;"
            " point at the folder of an SFT or PPO experiment, or at another language model, instead"
        )


def _hold_back(text: str, markers: Sequence[str]) -> str:
    """The text without what the next token may turn into something else, and without space around it."""
    text = text.rstrip("\ufffd")
    for marker in markers:
        begun = next((n for n in range(len(marker) - 1, 0, -1) if text.endswith(marker[:n])), 0)
        text = text[: len(text) - begun]
    return text.strip()


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
