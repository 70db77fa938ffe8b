"""Rewards that models give: a reward model, and a text classifier.

Legend: B sequences, T tokens, L labels.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import FrozenArgs, ModelArgs
from rlhf_stages.data.collate import pad_right
from rlhf_stages.data.tokenizer import encode_prompt, encode_response, fingerprint, load_tokenizer
from rlhf_stages.experiment import resolve_checkpoint
from rlhf_stages.functional.masking import length_mask
from rlhf_stages.models.classifier import TextClassifier, label_index, max_tokens
from rlhf_stages.models.frozen import freeze
from rlhf_stages.models.loading import load_scalar
from rlhf_stages.models.scalar import end_scores
from rlhf_stages.models.sharing import Backbone
from rlhf_stages.plugins import register_reward
from rlhf_stages.rollout.collect import Texts
from rlhf_stages.rollout.texts import Samples


@dataclass(frozen=True)
class RewardContext:
    """What a reward that is a class may ask for.

    The actor's tokenizer, the device, what model flags were given, the trunk that reward models are to share, and what
    becomes of the weights of one that has its own.
    """

    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    model_args: ModelArgs
    backbone: Backbone | None = None
    frozen_args: FrozenArgs | None = None


@register_reward("reward_model")
class RewardModel:
    """The score of a reward model: one of an RM experiment, or any `AutoModelForSequenceClassification` of one label.

    Where its tokenizer is the actor's it reads the very ids; else prompt and response as text, encoded anew.

    Args:
        path: experiment, checkpoint, model folder or hub id.
        max_length: longest text in tokens where it is encoded anew; the beginning goes.
    """

    def __init__(self, context: RewardContext, path: str, max_length: int | None = None) -> None:
        self.checkpoint = local_folder(path)
        source = str(self.checkpoint or path)
        self._tokenizer = load_tokenizer(source, context.model_args.trust_remote_code)
        self.same_ids = fingerprint(self._tokenizer) == fingerprint(context.tokenizer)
        if context.backbone is None:
            model = load_scalar(source, self._tokenizer, context.model_args, trained_head=True)
        else:
            model = context.backbone.load_adapted(Path(source), self._tokenizer, context.model_args, trains=False)
        self.model: nn.Module = freeze(model, context.device, context.frozen_args if context.backbone is None else None)
        longest = max_tokens(self.model, self._tokenizer)
        self._max_length = longest if max_length is None else min(max_length, longest)

    def read(self, texts: Texts, samples: Samples) -> Tensor:
        """Scores (B,) fp32."""
        if self.same_ids:
            return end_scores(self.model, texts.ids, texts.mask)
        rows = [
            encode_prompt(self._tokenizer, prompt) + encode_response(self._tokenizer, response)
            for prompt, response in zip(samples.prompts, samples.responses, strict=True)
        ]
        cut = [torch.tensor(row[-self._max_length :], device=texts.ids.device) for row in rows]
        ids, lengths = pad_right(cut, int(self._tokenizer.pad_token_id))
        return end_scores(self.model, ids, length_mask(lengths.to(ids.device), ids.shape[1]))


@register_reward("classifier")
class Classifier:
    """What a text classifier says of a response: of one label, or of the one that the metadata of a record name.

    Args:
        model: experiment of train_classifier.py, checkpoint, model folder or hub id.
        label: the label whose probability is the score, or
        label_key: the metadata that name it; then the score is 1 where the classifier finds that label, else 0.
        score: `probability` or `match`, where it should be the other one.
        text: what it reads: the response, the whole text, or the last utterance of the prompt (`last_turn` of the
            metadata) and the response, joined by `separator`.
        labels: names, in order, for a model that calls its labels LABEL_0, LABEL_1 ...; a list, or text with | between.
    """

    def __init__(
        self,
        context: RewardContext,
        model: str,
        label: str | None = None,
        label_key: str | None = None,
        score: Literal["probability", "match"] | None = None,
        text: Literal["response", "turn", "whole"] = "response",
        separator: str = "\n",
        labels: Sequence[str] | str = (),
    ) -> None:
        if (label is None) == (label_key is None):
            raise ValueError("give it `label: a name`, or `label_key: the metadata that name it`")
        if score not in (None, "probability", "match") or text not in ("response", "turn", "whole"):
            raise ValueError("score is probability or match, and text is response, turn or whole")
        self.checkpoint = local_folder(model)
        self._classifier = TextClassifier.load(
            str(self.checkpoint or model), str(context.device), trust_remote_code=context.model_args.trust_remote_code
        )
        label = None if label is None else str(label)  # a label may be called 1
        self._labels = _named(self._classifier.labels, labels.split("|") if isinstance(labels, str) else list(labels))
        if label is not None and label not in self._labels:
            raise ValueError(f"{model} knows no label {label!r}, but {', '.join(self._labels)}")
        self._label, self._label_key, self._text, self._separator = label, label_key, text, separator
        self._matches = (label_key is not None) if score is None else score == "match"

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        """A probability, or 1 and 0, for each response. Raises ValueError for a label that it does not know."""
        probabilities = self._classifier.probabilities(self._texts(prompts, responses, metadata)).float().cpu()
        wanted = torch.tensor([self._index(facts) for facts in metadata])
        if self._matches:
            return (probabilities.argmax(1) == wanted).float().tolist()
        return probabilities.gather(1, wanted[:, None]).squeeze(1).tolist()

    def _index(self, facts: Mapping[str, Any]) -> int:
        if self._label_key is None:
            return self._labels.index(str(self._label))
        return label_index(self._labels, facts, self._label_key)

    def _texts(
        self, prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[str]:
        if self._text == "response":
            return list(responses)
        if self._text == "whole":
            return [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        last = [str(facts.get("last_turn", prompt)) for prompt, facts in zip(prompts, metadata, strict=True)]
        return [self._separator.join(pair) for pair in zip(last, responses, strict=True)]


def _named(own: list[str], given: list[str]) -> list[str]:
    """The names of a classifier's labels: its own, unless they are mere numbers."""
    if not all(re.fullmatch(r"LABEL_\d+", name) for name in own):
        if given and set(given) != set(own):
            raise ValueError(f"labels: {', '.join(given)}, but the classifier calls its own {', '.join(own)}")
        return own
    if given and len(given) != len(own):
        raise ValueError(f"labels: {len(given)} names for {len(own)} labels")
    return given or own


def local_folder(path: str) -> Path | None:
    """The checkpoint that an experiment, checkpoint or model folder stands for; None for a hub id."""
    return resolve_checkpoint(path) if Path(path).exists() else None
