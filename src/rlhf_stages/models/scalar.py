"""A score for every token: reward model and critic.

Legend: B sequences, T tokens, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rlhf_stages.functional.masking import last_index
from rlhf_stages.models.forward import without_adapters


class ScalarModel(nn.Module):
    """A Hugging Face sequence classifier with one label, read out at every token.

    `hf` is the classifier itself, so that what is saved loads with `AutoModelForSequenceClassification`; its score for
    a text is ours at the text's last token. The head and its output are fp32 whatever the precision of the trunk: in
    bf16 10.01 and 10.02 are the same reward.
    """

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scores (B, T) fp32 of right-padded texts; what stands at padding means nothing."""
        classifier = without_adapters(self.hf)
        output = classifier.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        hidden = output.last_hidden_state  # (B, T, H)
        with torch.autocast(hidden.device.type, enabled=False):
            scores: Tensor = classifier.score(hidden.float()).squeeze(-1)
        return scores


def end_scores(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Score of each text: the one at its last token, (B, T) -> (B,)."""
    scores: Tensor = model(input_ids, attention_mask)
    return scores.gather(1, last_index(attention_mask)[:, None]).squeeze(1)
