"""Sampling responses.

Legend: B sequences, P prompt tokens, R response tokens.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase

from rlhf_stages.args import GenerationArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.functional.masking import length_mask
from rlhf_stages.functional.tokens import gather_logprobs
from rlhf_stages.models.compiling import eager

# logit of a token that must not be drawn: its probability is 0, and 0 * log 0 in the entropy stays 0. Not the lowest
# fp32: kernels that count in powers of two multiply it by log2(e)
FORBIDDEN = -1e30


@dataclass(frozen=True)
class Responses:
    """Sampled responses: ids (B, R) int64 right-padded, mask (B, R) bool with the stop token inside, ended (B,) bool.

    `ended` is False for a response that was cut off at the token limit before a stop token came. `logprobs` (B, R) fp32
    are those that the tokens were drawn with, where the sampler was asked for them.
    """

    ids: Tensor
    mask: Tensor
    ended: Tensor
    logprobs: Tensor | None = None


@dataclass(frozen=True)
class Sampler:
    """The distribution that responses come from, given a model's logits; the same for who samples and who scores.

    Args:
        stop_ids: tokens that end a response; not among the first `min_new_tokens - 1`.
        vocab_size: tokens of the tokenizer; a model may have spare rows behind them, which are never sampled.
        fused: log-probabilities are computed in one kernel that torch.compile makes.
    """

    temperature: float
    min_new_tokens: int
    stop_ids: tuple[int, ...]
    vocab_size: int
    fused: bool = False

    def logits(self, logits: Tensor) -> Tensor:
        """Logits of the model at each response token to those of the distribution, (B, R, V) -> (B, R, V) fp32."""
        scaled = logits.float() / self.temperature
        if self.vocab_size >= logits.shape[2] and self.min_new_tokens <= 1:
            return scaled
        allowed = self._allowed(0, logits.shape[1], logits.shape[2], logits.device)
        # as good as -inf
        return scaled.masked_fill(~allowed, FORBIDDEN)

    def processor(self, prompt_size: int) -> LogitsProcessorList:
        """The same restriction for transformers, which divides by the temperature itself."""

        def process(input_ids: Tensor, scores: Tensor) -> Tensor:
            allowed = self._allowed(input_ids.shape[1] - prompt_size, 1, scores.shape[1], scores.device)
            return scores.masked_fill(~allowed, -torch.inf)

        return LogitsProcessorList([process])

    def next_logits(self, logits: Tensor, counts: Tensor) -> Tensor:
        """The same for texts that each have `counts` (B,) response tokens already, (B, V) -> (B, V) fp32."""
        scaled = logits.float() / self.temperature
        lowest = FORBIDDEN
        scaled[:, self.vocab_size :] = lowest
        if self.min_new_tokens > 1:
            early = counts < self.min_new_tokens - 1
            for stop in self.stop_ids:
                scaled[:, stop] = torch.where(early, lowest, scaled[:, stop])
        return scaled

    def _allowed(self, start: int, count: int, size: int, device: torch.device) -> Tensor:
        """Which of `size` ids may be response token `start`, `start + 1`, ..., (count, V)."""
        allowed = torch.ones(count, size, dtype=torch.bool, device=device)
        allowed[:, self.vocab_size :] = False
        for stop in self.stop_ids:  # one by one: a list of them would have to be copied to the device
            allowed[: max(self.min_new_tokens - 1 - start, 0), stop] = False
        return allowed


def make_sampler(args: GenerationArgs, tokenizer: PreTrainedTokenizerBase, fused: bool = False) -> Sampler:
    """The sampler that the flags describe.

    Raises:
        ValueError: `--stop_token` is not one token of the tokenizer.
    """
    stop_ids = [tokenizer.eos_token_id]
    if args.stop_token is not None:
        ids = tokenizer(args.stop_token, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ValueError(f"--stop_token={args.stop_token!r} is {len(ids)} tokens of this tokenizer, not one")
        stop_ids += ids
    temperature = args.temperature if args.do_sample else 1.0
    return Sampler(temperature, args.min_new_tokens, tuple(stop_ids), len(tokenizer), fused)


@torch.no_grad()
def generate(
    model: Any,
    prompts: PromptBatch,
    args: GenerationArgs,
    sampler: Sampler,
    pad_token_id: int,
    logprobs: bool = False,
) -> Responses:
    """Continue each prompt until a stop token or `max_new_tokens`; B is prompts x num_return_sequences.

    Args:
        model: a causal model as `load_causal` gives it (transformers fills what is not set here from the generation
            config of the model, which that function has cleared), in evaluation mode, not wrapped for distribution.
        logprobs: note the log-probabilities; costs memory for (B, R, V) logits.
    """
    config = GenerationConfig(
        max_new_tokens=args.max_new_tokens,
        do_sample=args.do_sample,
        num_beams=args.num_beams,
        num_return_sequences=args.num_return_sequences,
        eos_token_id=list(sampler.stop_ids),
        pad_token_id=pad_token_id,
        return_dict_in_generate=True,
        output_scores=logprobs,
        **({"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p} if args.do_sample else {}),
    )
    size = prompts.input_ids.shape[1]
    with eager():
        output = model.generate(
            input_ids=prompts.input_ids,
            attention_mask=prompts.attention_mask,
            generation_config=config,
            logits_processor=sampler.processor(size),
            synced_gpus=False,  # a model in pieces is gathered meanwhile, and no device waits for another
        )
    responses = cut_at_stop(output.sequences[:, size:], sampler.stop_ids, pad_token_id)
    if not logprobs:
        return responses
    drawn = gather_logprobs(torch.stack(output.scores, dim=1), responses.ids)
    return dataclasses.replace(responses, logprobs=torch.where(responses.mask, drawn, 0))


def cut_at_stop(ids: Tensor, stop_ids: Sequence[int], pad_token_id: int) -> Responses:
    """Keep each response (B, R) up to and with its first stop token, and pad the rest.

    A stop token in the very last place ends the response like any other.
    """
    is_stop = torch.isin(ids, torch.tensor(list(stop_ids), device=ids.device))
    ended = is_stop.any(1)
    lengths = torch.where(ended, is_stop.long().argmax(1) + 1, ids.shape[1])
    mask = length_mask(lengths, ids.shape[1])
    return Responses(torch.where(mask, ids, pad_token_id), mask, ended)
