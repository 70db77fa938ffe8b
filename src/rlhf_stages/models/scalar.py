"""Scores: of every token (reward model and critic), or of a whole text (a reward model that is an encoder).

Legend: B sequences, T tokens, H hidden size, L labels.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rlhf_stages.functional.masking import last_index
from rlhf_stages.models.attention import without_mask
from rlhf_stages.models.forward import unwrap, without_adapters


class ScalarModel(nn.Module):
    """A Hugging Face sequence classifier with one label, read out at every token.

    `hf` is the classifier itself, so that what is saved loads with `AutoModelForSequenceClassification`; its score for
    a text is ours at the text's last token. The head and its output are fp32 whatever the precision of the trunk: in
    bf16 10.01 and 10.02 are the same reward.
    """

    head_name = "score"

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scores (B, T) fp32 of right-padded texts; what stands at padding means nothing."""
        classifier = without_adapters(self.hf)
        # no mask: causal attention never looks at padding on the right, see `text_logits`
        with without_mask(classifier):
            hidden = classifier.base_model(input_ids=input_ids, use_cache=False).last_hidden_state  # (B, T, H)
        with torch.autocast(hidden.device.type, enabled=False):
            scores: Tensor = classifier.score(hidden.float()).squeeze(-1)
        return scores


class EncoderScalarModel(ScalarModel):
    """The same around an encoder such as BERT, which reads a text as a whole and gives it one score.

    A text is a single segment. The score is the classifier's logit, whatever the encoder pools before its `classifier`.
    """

    head_name = "classifier"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scores (B, T) fp32: the score of a text stands at each of its places."""
        return encoder_logits(self.hf, input_ids, attention_mask).expand(input_ids.shape)  # (B, 1) -> (B, T)


def encoder_logits(hf: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Logits (B, L) fp32 of an encoder with L labels, for right-padded texts."""
    classifier = without_adapters(hf)
    pooled: list[Tensor] = []

    def note(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        pooled.append(inputs[0].float())  # the head is fp32 even where the trunk is not
        return (pooled[0],)

    hook = classifier.classifier.register_forward_pre_hook(note)
    try:
        classifier(input_ids=input_ids, attention_mask=attention_mask)
    finally:
        hook.remove()
    with torch.autocast(input_ids.device.type, enabled=False):  # the head once more, as this one is fp32
        logits: Tensor = classifier.classifier(pooled[0])
    return logits


def end_scores(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Score of each text: the one at its last token, (B, T) -> (B,)."""
    scores: Tensor = model(input_ids, attention_mask)
    return scores.gather(1, last_index(attention_mask)[:, None]).squeeze(1)


def store_reward_scale(model: nn.Module, mean: float | None, std: float | None) -> None:
    """Note in the model's config, which is saved with it, how its scores are spread over the validation set.

    None where nothing was validated, which also clears what an earlier training left.
    """
    config = without_adapters(unwrap(model).hf).config
    config.reward_mean, config.reward_std = mean, std


def reward_scale(model: nn.Module) -> tuple[float, float]:
    """Mean and standard deviation of a reward model's scores over the validation set that it was saved with.

    Raises:
        ValueError: the model has none.
    """
    config = without_adapters(unwrap(model).hf).config
    mean, std = getattr(config, "reward_mean", None), getattr(config, "reward_std", None)
    if mean is None or not std:
        raise ValueError(
            f"the reward model's config.json has reward_mean {mean} and reward_std {std}, so its scores cannot be"
            " standardized; rlhf_rm.py writes both where the data have a validation shard"
        )
    return float(mean), float(std)
