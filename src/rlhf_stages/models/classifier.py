"""Classifiers of texts: intent, sentiment, and whatever else `AutoModelForSequenceClassification` holds.

Legend: B texts, T tokens, H hidden size, L labels.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_stages.args import ModelArgs
from rlhf_stages.data.collate import pad_right
from rlhf_stages.data.tokenizer import encode_whole, load_tokenizer
from rlhf_stages.experiment import resolve_checkpoint
from rlhf_stages.functional.masking import last_index, length_mask
from rlhf_stages.models.forward import context_size, without_adapters
from rlhf_stages.models.loading import load_classifying
from rlhf_stages.models.scalar import EncoderScalarModel, ScalarModel, encoder_logits

BATCH_SIZE = 128


class CausalClassifier(ScalarModel):
    """A causal model that names the kind of a text from the hidden state of its last token; the head is fp32."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (B, L) fp32 of right-padded texts."""
        classifier = without_adapters(self.hf)
        output = classifier.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        rows = torch.arange(len(input_ids), device=input_ids.device)
        # by the mask: transformers looks for the last id that is not padding, which a text may hold as well
        hidden = output.last_hidden_state[rows, last_index(attention_mask)]  # (B, H)
        with torch.autocast(hidden.device.type, enabled=False):
            logits: Tensor = classifier.score(hidden.float())
        return logits


class EncoderClassifier(EncoderScalarModel):
    """An encoder such as BERT, which pools the text in its own way; its head is fp32."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (B, L) fp32 of right-padded texts."""
        return encoder_logits(self.hf, input_ids, attention_mask)


def new_classifier(
    name_or_path: str | Path, tokenizer: PreTrainedTokenizerBase, args: ModelArgs, labels: Sequence[str]
) -> ScalarModel:
    """A classifier to train, from a language model or from a classifier of as many labels.

    The new head of a causal model is 0, so that at first all labels are equally probable; that of an encoder, which may
    have more than one layer, is the one that transformers gives it.

    Raises:
        ValueError: nothing loads from there, weights are missing, or the architecture has another kind of head.
    """
    names = dict(enumerate(labels))
    ids = {name: number for number, name in names.items()}
    hf, missing = load_classifying(
        name_or_path, tokenizer, args, id2label=names, label2id=ids, problem_type="single_label_classification"
    )
    if missing and hasattr(hf, "score"):
        nn.init.zeros_(hf.score.weight)
    return _wrapped(hf)


def _wrapped(hf: Any) -> ScalarModel:
    return CausalClassifier(hf) if hasattr(hf, "score") else EncoderClassifier(hf)


def max_tokens(model: ScalarModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the longest text that a classifier can read: it has positions for them, and its tokenizer agrees."""
    return int(min(context_size(model), tokenizer.model_max_length))


class TextClassifier:
    """A trained classifier with its tokenizer, for reading only.

    `labels` are the names of its L classes, in the order of the probabilities.
    """

    def __init__(self, model: ScalarModel, tokenizer: PreTrainedTokenizerBase, device: torch.device | str) -> None:
        self._model = model.eval().requires_grad_(False).to(device)
        self._tokenizer = tokenizer
        self._device = torch.device(device)
        self._max_tokens = max_tokens(model, tokenizer)
        names = model.hf.config.id2label
        self.labels: list[str] = [str(names[i]) for i in range(len(names))]

    @classmethod
    def load(
        cls, path_or_hub_id: str | Path, device: torch.device | str, trust_remote_code: bool = False
    ) -> "TextClassifier":
        """Load an experiment of `train_classifier.py`, one of its checkpoints, a model folder, or a hub id.

        Raises:
            FileNotFoundError: an experiment without a finished checkpoint.
            ValueError: nothing loads from there; it is no classifier, has no trained head or fewer than two labels, or
                its labels do not exclude each other.
        """
        name = str(path_or_hub_id)
        path = resolve_checkpoint(name) if Path(name).is_dir() else name
        tokenizer = load_tokenizer(str(path), trust_remote_code)
        hf, missing = load_classifying(path, tokenizer, ModelArgs(trust_remote_code=trust_remote_code))
        if missing:
            raise ValueError(
                f"{name} has no trained head ({min(missing)}), so it is no classifier; train_classifier.py makes one"
                " of it"
            )
        kind = hf.config.problem_type
        if hf.config.num_labels == 1 or kind == "regression":
            raise ValueError(f"{name} gives each text a number and no label (num_labels 1, as a reward model has it)")
        if kind == "multi_label_classification":
            raise ValueError(f"{name} gives a text any number of labels (problem_type {kind!r}), expected exactly one")
        return cls(_wrapped(hf), tokenizer, device)

    @torch.no_grad()
    def probabilities(self, texts: Sequence[str]) -> Tensor:
        """Probability of each label for each text, (B, L) fp32 on the device; a text that is too long loses its start.

        Texts are read `BATCH_SIZE` at a time, those of like length together.
        """
        rows = encode_whole(self._tokenizer, texts, self._max_tokens)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        result = torch.empty(len(rows), len(self.labels), device=self._device)
        for start in range(0, len(order), BATCH_SIZE):
            places = order[start : start + BATCH_SIZE]
            ids, lengths = pad_right([torch.tensor(rows[i]) for i in places], self._pad_id)
            mask = length_mask(lengths, ids.shape[1])
            with self._autocast():
                logits = self._model(ids.to(self._device), mask.to(self._device))
            result[places] = logits.float().softmax(1)
        return result

    @property
    def _pad_id(self) -> int:
        return int(self._tokenizer.pad_token_id)

    def _autocast(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self._device.type == "cuda" else nullcontext()


def label_index(labels: Sequence[str], metadata: Mapping[str, Any], key: str) -> int:
    """Which of the labels the metadata of a record name.

    Raises:
        ValueError: none of them.
    """
    label = metadata.get(key)
    label = str(label) if isinstance(label, int) else label
    if label not in labels:
        known = ", ".join(labels)
        raise ValueError(f"the metadata's {key!r} is {label!r}, which is not among the classifier's labels {known}")
    return list(labels).index(str(label))
