"""The dialogue suite: how close responses are to the data's own, whether they do what those did, and perplexity.

Legend: B sequences, R response tokens, N prompts.
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
from rlhf_stages.evaluation.bootstrap import Measure, mean_of, ratio_of
from rlhf_stages.evaluation.policies import Reply
from rlhf_stages.functional.masking import length_mask, masked_sum
from rlhf_stages.functional.tokens import gather_logprobs
from rlhf_stages.models.classifier import TextClassifier, label_index
from rlhf_stages.models.forward import logits_at
from rlhf_stages.plan import to_device
from rlhf_stages.rollout.collect import join
from rlhf_stages.rollout.generation import Responses
from rlhf_stages.text_metrics import ROUGE_KINDS, all_rouge, bleu_counts, bleu_of_counts, distinct_n, meteor


def references_of(records: Sequence[Record], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of the first response of each record, special tokens left out.

    Raises:
        ValueError: a record has none.
    """
    if not all(record.responses for record in records):
        raise ValueError("these prompts come without responses to compare with")
    ids = [record.responses[0].tolist() for record in records]
    return [str(t) for t in tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)]


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
        totals += (-masked_sum(gather_logprobs(logits.float(), responses.ids), responses.mask, dim=1)).tolist()
        tokens += lengths.tolist()
    return totals, tokens


def measures(
    replies: Sequence[Reply],
    nll: tuple[list[float], list[int]],
    references: Sequence[str],
    records: Sequence[Record],
    classifier: TextClassifier | None,
    label_key: str,
) -> tuple[dict[str, Measure], dict[str, float]]:
    """What the suite says of a policy: measures that can be resampled by prompt, and numbers of the whole set.

    `replies` are one to each record. ROUGE, METEOR, BLEU and intent lie between 0 and 1. Perplexity is that of the
    references under the policy: exp of the mean negative log-likelihood of a token given its prompt and what of the
    reference stands before it. RL4LMs, by whose settings OpenRL's table seems to be made, joins all reference texts by
    blank lines and goes through them in strides of 128 tokens, without prompts: its perplexities are other numbers.
    """
    texts = [reply.text for reply in replies]
    found = {kind: mean_of(values) for kind, values in all_rouge(texts, references).items() if kind in ROUGE_KINDS}
    found["METEOR"] = mean_of(meteor(texts, references))
    counts = torch.tensor(bleu_counts(texts, references), dtype=torch.float64)
    found["SacreBLEU"] = Measure(counts, lambda sums: bleu_of_counts(sums.tolist()))
    if classifier is not None:
        found["intent accuracy"] = mean_of(intent_matches(texts, records, classifier, label_key))
    if sum(nll[1]):  # responses may be cut to nothing
        found["perplexity"] = ratio_of(*nll, of=math.exp)
    found["mean length (words)"] = mean_of([len(text.split()) for text in texts])
    found["mean length (tokens)"] = mean_of([reply.tokens for reply in replies])
    found["KL to the first (nats)"] = mean_of([reply.kl for reply in replies])
    found["empty replies (%)"] = mean_of([not text.strip() for text in texts], scale=100)
    found["cut-off replies (%)"] = mean_of([not reply.ended for reply in replies], scale=100)
    return found, {f"distinct-{n}": distinct_n(texts, n) for n in (1, 2)}


def human_measures(
    references: Sequence[str], records: Sequence[Record], classifier: TextClassifier | None, label_key: str
) -> tuple[dict[str, Measure], dict[str, float]]:
    """Those of the measures that need no reference, of the data's own responses."""
    found = {"mean length (words)": mean_of([len(text.split()) for text in references])}
    if classifier is not None:
        found["intent accuracy"] = mean_of(intent_matches(references, records, classifier, label_key))
    return found, {f"distinct-{n}": distinct_n(references, n) for n in (1, 2)}


def intent_matches(
    texts: Sequence[str], records: Sequence[Record], classifier: TextClassifier, label_key: str
) -> list[float]:
    """1 where the classifier, given the last utterance of the prompt and the response, finds the label of the metadata.

    Raises:
        ValueError: a record names no label that the classifier knows.
    """
    wanted = [label_index(classifier.labels, record.metadata, label_key) for record in records]
    lines = [f"{record.metadata.get('last_turn', '')}\n{text}" for record, text in zip(records, texts, strict=True)]
    best: Tensor = classifier.probabilities(lines).argmax(1)
    return [float(found == index) for found, index in zip(best.tolist(), wanted, strict=True)]
