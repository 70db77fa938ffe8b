"""Sampling in slots: a key-value cache of fixed size, and one decode step that a CUDA graph replays.

Eager decoding is bound by Python and kernel launches, some twenty milliseconds a token whatever the model. A captured
step costs what its kernels cost. Each slot holds one text at its own length, so that there is no padding, and a slot
whose response has ended takes the next prompt while the others go on.

Legend: S slots, L places of the cache, P prompt tokens, R response tokens, V vocabulary.
"""

import inspect
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from rlhf_stages.args import RolloutArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.functional.masking import length_mask
from rlhf_stages.functional.tokens import gather_logprobs
from rlhf_stages.graphs import capture
from rlhf_stages.models.compiling import eager
from rlhf_stages.models.forward import without_adapters
from rlhf_stages.models.narrow import narrow_copy, refresh
from rlhf_stages.rollout.generation import Responses, Sampler
from rlhf_stages.rollout.slot_cache import ATTENTION, SlotLayer

STEPS = 16  # decode steps between two looks at which responses have ended
LIMITS = 4  # graphs at most: each attends to one more quarter of the cache
PROBE = 8  # tokens by which a model shows that it decodes here as it scores
# mean difference of log-probabilities, in nats, that rounding explains; a wrong mask or position is ten times that
PROBE_TOLERANCE = {torch.float64: 0.01, torch.float32: 0.01, torch.bfloat16: 0.1, torch.float16: 0.1}


class SlotGenerator:
    """Samples responses to any number of prompts in `slots` slots.

    Args:
        model: the causal model that learns. Where its weights are wider than `dtype` a copy in `dtype` samples, brought
            up to date at each call; LoRA adapters are merged into it.
        longest: in tokens, of all prompts to come with what is sampled.
        compiled: let torch.compile fuse the step before it is captured.
        copied: a copy, in host memory, of a model whose weights are in pieces; that is gathered whenever this samples.

    Raises:
        ValueError: the model does not decode as it scores, see `probe`; anything that a model raises that does not
            know of caches.
    """

    def __init__(
        self,
        model: Any,
        args: RolloutArgs,
        sampler: Sampler,
        pad_token_id: int,
        *,
        slots: int,
        longest: int,
        dtype: torch.dtype,
        compiled: bool = False,
        copied: Any = None,
    ) -> None:
        started = time.perf_counter()
        self.source, self.args, self.sampler, self.pad_token_id = model, args, sampler, pad_token_id
        self.device = next(model.parameters()).device
        self.own_copy = copied is not None or dtype != next(model.parameters()).dtype
        self.model = narrow_copy(copied or model, dtype).to(self.device) if self.own_copy else model
        parameters = inspect.signature(without_adapters(self.model).forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.forward = torch.compile(self.model, dynamic=False) if compiled else self.model
        size = -(-longest // 8) * 8  # masks of a multiple of 8 keep kernels fast
        self.limits = [size] if compiled else sorted({-(-size * i // LIMITS // 8) * 8 for i in range(1, LIMITS + 1)})
        self.limits[-1] = size
        self._make_state(slots, size)
        self.graphs: dict[int, Any] = {}
        devices = [self.device] if self.device.type == "cuda" else []
        with self._sampling(), torch.random.fork_rng(devices=devices):
            self.probe()
            if self.device.type == "cuda":
                self._capture()
        self.startup_seconds = time.perf_counter() - started

    def _make_state(self, slots: int, size: int) -> None:
        numbers = torch.zeros(3, slots, dtype=torch.int64, device=self.device)
        self.places, self.tokens, self.counts = (
            numbers  # of the token that the next step reads; it; the response so far
        )
        self.active = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self.logprobs = torch.zeros(slots, self.args.max_new_tokens, device=self.device)
        self.ids = torch.zeros_like(self.logprobs, dtype=torch.int64)
        self.stop_ids = torch.tensor(self.sampler.stop_ids, device=self.device)
        layers = without_adapters(self.model).config.get_text_config().num_hidden_layers
        self.cache = Cache(layers=[SlotLayer(self.places, size) for _ in range(layers)])

    def __str__(self) -> str:
        graphs = f"{len(self.graphs)} CUDA graphs" if self.graphs else "no CUDA graph"
        return f"{len(self.active)} slots of {self.limits[-1]} tokens, {graphs}, ready in {self.startup_seconds:.1f} s"

    def __call__(self, batches: Sequence[PromptBatch], logprobs: bool = True) -> list[Responses]:
        """Responses to each batch, with their log-probabilities; B is prompts x num_return_sequences."""
        prompts = [batch.repeat(self.args.num_return_sequences) for batch in batches]
        with self._sampling():
            if self.own_copy:
                refresh(self.model, self.source)
            texts = [row[mask] for batch in prompts for row, mask in zip(*_on_host(batch), strict=True)]
            results = self._run(texts)
        sizes = [len(batch.input_ids) for batch in prompts]
        of_batches = zip(*(torch.split(result, sizes) for result in results), strict=True)
        return [self._responses(*of_batch) for of_batch in of_batches]

    def _responses(self, ids: Tensor, logprobs: Tensor, counts: Tensor) -> Responses:
        size = max(int(counts.max()), 1)
        mask = length_mask(counts, size)
        ended = torch.isin(ids.gather(1, (counts - 1).clamp(min=0)[:, None]).squeeze(1), self.stop_ids)
        kept = torch.where(mask, ids[:, :size], self.pad_token_id)
        return Responses(kept, mask, ended, torch.where(mask, logprobs[:, :size], 0))

    def _run(self, texts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Response ids, log-probabilities (N, R) and lengths (N,) of N prompts."""
        results = [torch.zeros(len(texts), *t.shape[1:], dtype=t.dtype, device=self.device) for t in self._outputs]
        # long ones first: prompts of like length fill together, and the last to be filled reach least far
        queue = deque(sorted(range(len(texts)), key=lambda i: -len(texts[i])))
        owner: dict[int, int] = {}  # slot -> prompt
        ends: dict[int, tuple[int, int]] = {}  # slot -> the step at which it ends at the latest, and its place then
        self.active.fill_(False)
        slots, step, seen = len(self.active), 0, None
        while owner or queue:
            free = [slot for slot in range(slots) if slot not in owner]
            if queue and (len(free) >= max(slots // 4, 1) or not owner):
                taken = {slot: queue.popleft() for slot in free[: len(queue)]}
                self._fill(list(taken), [texts[i] for i in taken.values()])
                owner |= taken
                last = self.args.max_new_tokens
                ends |= {slot: (step + last, len(texts[i]) + last) for slot, i in taken.items()}
                seen = None  # what was seen of these slots is of their last owners
            steps = min(STEPS, max(ends[slot][0] for slot in owner) - step)
            furthest = max(ends[slot][1] - (ends[slot][0] - step) + steps for slot in owner)
            self._decode(steps, min(furthest, self.limits[-1]))
            step += steps
            # the look is one round old, so that the device never waits for it
            was, seen = seen, self._look()
            still = was.read() if was is not None else [True] * slots
            done = [slot for slot in owner if not still[slot] or ends[slot][0] <= step]
            if done:
                rows = torch.tensor([owner.pop(slot) for slot in done], device=self.device)
                places = torch.tensor(done, device=self.device)
                for result, output in zip(results, self._outputs, strict=True):
                    result[rows] = output[places]
                self.active[places] = False
        return results[0], results[1], results[2]

    @property
    def _outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.ids, self.logprobs, self.counts

    def _look(self) -> "_Look":
        return _Look(self.active)

    def _fill(self, slots: list[int], texts: Sequence[Tensor]) -> None:
        """Read prompts into slots; the next step predicts from their last tokens."""
        lengths = torch.tensor([len(text) for text in texts])
        ids = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True).to(self.device, non_blocking=True)
        where, lengths = torch.tensor(slots, device=self.device), lengths.to(self.device, non_blocking=True)
        cache = DynamicCache()
        # padding stands behind the prompts, where no token of theirs looks, and is written over
        with eager():
            without_adapters(self.model).base_model(input_ids=ids, use_cache=True, **{self.cache_name: cache})
        for layer, filled in zip(self.cache.layers, cache.layers, strict=True):
            layer.fill(where, filled.keys, filled.values)
        self.places[where] = lengths - 1
        self.tokens[where] = ids.gather(1, lengths[:, None] - 1).squeeze(1)
        self.counts[where] = 0
        self.active[where] = True

    def _decode(self, steps: int, furthest: int) -> None:
        limit = next(limit for limit in self.limits if limit >= furthest)
        for _ in range(steps):
            if limit in self.graphs:
                self.graphs[limit].replay()
            else:
                self._step(limit)

    def _step(self, limit: int) -> None:
        """Read one token in each slot, draw the next, and note it."""
        for layer in self.cache.layers:
            layer.limit = limit
        mask = torch.arange(limit, device=self.device) <= self.places[:, None]
        output = self.forward(
            input_ids=self.tokens[:, None],
            position_ids=self.places[:, None],
            attention_mask=mask[:, None, None],
            use_cache=True,
            **{self.cache_name: self.cache},
        )
        logits = self.sampler.next_logits(output.logits[:, -1], self.counts)  # (S, V)
        # argmax of log p + Gumbel noise is a draw from p; -log of an exponential variable is that noise
        drawn = (logits - torch.empty_like(logits).exponential_().log_()).argmax(1)
        logprobs = gather_logprobs(logits[:, None], drawn[:, None])
        place = self.counts.clamp(max=self.ids.shape[1] - 1)[:, None]
        for store, new in ((self.ids, drawn[:, None]), (self.logprobs, logprobs)):
            store.scatter_(1, place, torch.where(self.active[:, None], new, store.gather(1, place)))
        self.counts += self.active
        stops = (drawn[:, None] == self.stop_ids).any(1)  # isin sorts many of them, which no graph can record
        self.active &= ~stops & (self.counts < self.ids.shape[1])
        self.tokens.copy_(torch.where(self.active, drawn, self.tokens))
        self.places += self.active

    def _capture(self) -> None:
        """A CUDA graph of the step for each limit."""
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for limit in self.limits:
                for _ in range(3):  # libraries make their handles and workspaces, torch.compile its kernels
                    self._step(limit)
        torch.cuda.current_stream().wait_stream(stream)
        for limit in reversed(self.limits):
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            self.graphs[limit], _ = capture(partial(self._step, limit), pool)

    def probe(self) -> None:
        """Decode two prompts of different lengths, and score the result in one forward.

        Raises:
            ValueError: the log-probabilities are not the same up to rounding.
        """
        generator = torch.Generator().manual_seed(0)
        size = min(self.limits[-1] - self.args.max_new_tokens, 12)
        lengths = [size, max(size // 2, 1)][: len(self.active)]
        texts = [torch.randint(self.sampler.vocab_size, (n,), generator=generator) for n in lengths]
        self.active.fill_(False)
        self._fill(list(range(len(texts))), texts)
        steps = min(PROBE, self.args.max_new_tokens)
        self._decode(steps, size + steps)
        for slot, text in enumerate(texts):
            count = int(self.counts[slot])
            whole = torch.cat([text.to(self.device), self.ids[slot, :count]])
            with eager():
                logits = self.model(input_ids=whole[None], use_cache=False).logits[:, len(text) - 1 : -1]
            logits = self.sampler.logits(logits)
            expected = gather_logprobs(logits, self.ids[slot : slot + 1, :count])
            difference = float((expected - self.logprobs[slot : slot + 1, :count]).abs().mean())
            tolerance = PROBE_TOLERANCE[next(self.model.parameters()).dtype]
            if not difference <= tolerance:
                raise ValueError(f"it decodes otherwise than it scores, by {difference:.2g} nats a token")

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """The model in evaluation mode, with the attention of slots, and no autocast."""
        configs = {id(m.config): m.config for m in self.model.modules() if hasattr(m, "config")}.values()
        before = [
            (config, config._attn_implementation) for config in configs if hasattr(config, "_attn_implementation")
        ]
        training = self.model.training
        self.model.eval()
        for config, _ in before:
            config._attn_implementation = ATTENTION
        try:
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            for config, name in before:
                config._attn_implementation = name
            self.model.train(training)


class _Look:
    """Which slots are active, copied to the host while the device goes on."""

    def __init__(self, active: Tensor) -> None:
        self.cuda = active.is_cuda
        if self.cuda:
            self.values = torch.empty(active.shape, dtype=torch.bool, pin_memory=True)
            self.values.copy_(active, non_blocking=True)
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()
        else:
            self.values = active.clone()

    def read(self) -> list[bool]:
        if self.cuda:
            self.event.synchronize()
        seen: list[bool] = self.values.tolist()
        return seen


def _on_host(batch: PromptBatch) -> tuple[Tensor, Tensor]:
    return batch.input_ids.cpu(), batch.attention_mask.cpu()
