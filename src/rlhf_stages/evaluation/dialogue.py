"""The dialogue suite: how close responses are to the data's own, and whether they do what those did."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_stages.data.shards import Record
from rlhf_stages.evaluation import policies
from rlhf_stages.evaluation.bootstrap import Measure, mean_of
from rlhf_stages.evaluation.policies import Judge, Reply
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


def measures(
    replies: Sequence[Reply], references: Sequence[str], records: Sequence[Record], intent: Judge | None
) -> tuple[dict[str, Measure], dict[str, float]]:
    """What the suite says of a policy, one reply to each record: ROUGE, METEOR, BLEU and intent, which lie between 0
    and 1, and what `policies.measures` says.

    Args:
        intent: 1 where a response does what the metadata of its record name, else 0.
    """
    texts = [reply.text for reply in replies]
    found = {kind: mean_of(values) for kind, values in all_rouge(texts, references).items() if kind in ROUGE_KINDS}
    found["METEOR"] = mean_of(meteor(texts, references))
    counts = torch.tensor(bleu_counts(texts, references), dtype=torch.float64)
    found["SacreBLEU"] = Measure(counts, lambda sums: bleu_of_counts(sums.tolist()))
    of_texts, _ = text_measures([reply.prompt for reply in replies], texts, records, intent)
    of_replies, whole = policies.measures(replies)
    return found | of_texts | of_replies, whole


def text_measures(
    prompts: Sequence[str], texts: Sequence[str], records: Sequence[Record], intent: Judge | None
) -> tuple[dict[str, Measure], dict[str, float]]:
    """Those of the measures that need no reference and no policy: the data's own responses have them, too."""
    found = {}
    if intent is not None:
        found["intent accuracy"] = mean_of(intent(prompts, texts, [record.metadata for record in records]))
    found["mean length (words)"] = mean_of([len(text.split()) for text in texts])
    return found, {f"distinct-{n}": distinct_n(texts, n) for n in (1, 2)}
