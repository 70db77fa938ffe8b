"""How probable a policy finds the data's own responses.

Legend: B sequences, R response tokens.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_stages.data.collate import collate_prompts, pad_right
from rlhf_stages.data.shards import Record
from rlhf_stages.evaluation.bootstrap import Measure, ratio_of
from rlhf_stages.functional.masking import length_mask, masked_sum
from rlhf_stages.functional.tokens import token_statistics
from rlhf_stages.models.forward import logits_at
from rlhf_stages.plan import to_device
from rlhf_stages.rollout.collect import join
from rlhf_stages.rollout.generation import Responses


@torch.no_grad()
def response_nll(
    model: Any, records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, fabric: Fabric, batch_size: int
) -> tuple[list[float], list[int]]:
    """Negative log-likelihood of the data's response to each prompt, in nats, and its tokens.

    The EOS of a whole response counts, that of a truncated one does not: the text went on.
    """
    totals: list[float] = []
    tokens: list[int] = []
    pad = int(tokenizer.pad_token_id)
    for start in range(0, len(records), batch_size):
        some = records[start : start + batch_size]
        rows = [r.responses[0][: len(r.responses[0]) - int(r.truncated[0])] for r in some]
        ids, lengths = pad_right(rows, pad)
        responses = Responses(ids, length_mask(lengths, ids.shape[1]), torch.ones(len(some), dtype=torch.bool))
        prompts, responses = (to_device(b, fabric.device) for b in (collate_prompts(some, pad_token_id=pad), responses))
        texts = join(prompts, responses)
        with fabric.autocast():
            logits = logits_at(model, texts.ids, texts.mask, texts.places)
        logprobs, _ = token_statistics(logits, responses.ids, Tensor.float)
        totals += (-masked_sum(logprobs, responses.mask, dim=1)).tolist()
        tokens += lengths.tolist()
    return totals, tokens


def perplexity(nll: tuple[list[float], list[int]]) -> dict[str, Measure]:
    """That of the responses given their prompts: exp of the mean negative log-likelihood of a token, over all tokens.

    Responses that were cut to nothing have no share in it, so that no resample is without tokens; none is left: {}.
    RL4LMs, by whose settings OpenRL's table seems to be made, joins all reference texts by blank lines and goes through
    them in strides of 128 tokens, without prompts: its perplexities are other numbers.
    """
    rows = [(total, tokens) for total, tokens in zip(*nll, strict=True) if tokens]
    if not rows:
        return {}
    totals, tokens = zip(*rows, strict=True)
    return {"perplexity": ratio_of(totals, tokens, of=math.exp)}
