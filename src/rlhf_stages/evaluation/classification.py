"""How right a classifier is.

Legend: B texts, L labels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
    MulticlassStatScores,
)

from rlhf_stages.terminal import printable


class LabelMetrics:
    """Collects what a classifier said, over every device.

    Args:
        labels: their names, in order.
    """

    def __init__(self, labels: Sequence[str], device: torch.device) -> None:
        self._labels = list(labels)
        count = len(self._labels)
        each: Any = {"num_classes": count, "average": "none"}
        self._metrics = MetricCollection(
            {
                "acc": MulticlassAccuracy(count, average="micro"),
                "f1_macro": MulticlassF1Score(count, average="macro"),
                "precision": MulticlassPrecision(**each),
                "recall": MulticlassRecall(**each),
                "f1": MulticlassF1Score(**each),
                "counts": MulticlassStatScores(**each),
            }
        ).to(device)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add texts: logits (B, L), and the right labels (B,)."""
        self._metrics.update(logits.argmax(1), labels)

    def compute(self, prefix: str) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Accuracy and macro-F1 under the prefix's names; and precision, recall, F1 and texts of each label.

        The macro-F1 is the mean over the labels that occur, in the texts or in what was said about them.
        """
        found = self._metrics.compute()
        texts = found["counts"][:, -1]
        classes = {
            label: {name: float(found[name][i]) for name in ("precision", "recall", "f1")} | {"texts": int(texts[i])}
            for i, label in enumerate(self._labels)
        }
        return {f"{prefix}/{name}": float(found[name]) for name in ("acc", "f1_macro")}, classes


def majority_accuracy(training: Tensor, tested: Tensor) -> float:
    """Accuracy of saying the most frequent label of the training texts every time; counts of each label, (L,) x 2."""
    return float(tested[training.argmax()] / tested.sum())


def class_table(classes: Mapping[str, Mapping[str, float]]) -> str:
    """A row per label: precision, recall, F1, texts."""
    names = {label: printable(label[:40]) for label in classes}
    width = max(map(len, names.values()), default=0)
    lines = [f"{'':{width}}  precision  recall     f1   texts"]
    for label, row in classes.items():
        numbers = f"{row['precision']:9.3f}  {row['recall']:6.3f}  {row['f1']:5.3f}  {row['texts']:6,}"
        lines.append(f"{names[label]:{width}}  {numbers}")
    return "\n".join(lines)
