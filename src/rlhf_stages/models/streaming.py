"""Tokens of one reply as they come."""

import queue
import threading
from collections.abc import Iterator

import torch
from transformers import GenerationConfig, PreTrainedModel


class Generation:
    """`generate` in a thread of its own; iterating gives the token ids as they come, and raises what it raises."""

    def __init__(self, model: PreTrainedModel, prompt: list[int], config: GenerationConfig) -> None:
        self._tokens: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._is_prompt = True
        self._thread = threading.Thread(target=self._run, args=(model, prompt, config), daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[int]:
        while (token := self._tokens.get()) is not None:
            if isinstance(token, BaseException):
                raise token
            yield token

    def stop(self) -> None:
        """End after the token in work."""
        self._stopped.set()
        self._thread.join()

    def put(self, ids: torch.Tensor) -> None:
        """Called by `generate` with the prompt, then with every token."""
        if not self._is_prompt:
            self._tokens.put(int(ids))
        self._is_prompt = False

    def end(self) -> None:
        """Called by `generate` after the last token."""

    def _run(self, model: PreTrainedModel, prompt: list[int], config: GenerationConfig) -> None:
        ids = torch.tensor([prompt], device=model.device)
        try:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=self,
                stopping_criteria=[lambda rows, scores: torch.full_like(rows[:, 0], self._stopped.is_set()).bool()],
            )
            self._tokens.put(None)
        except BaseException as error:  # it belongs to the thread that reads
            self._tokens.put(error)
