import pytest
import torch

from rlhf_stages.evaluation.classification import LabelMetrics, class_table, majority_accuracy


def test_numbers_by_hand():
    """Said: a a b b b c; right: a b b b a a. Nobody says d, and no text is one.

    a: 1 of 2 said, 1 of 3 texts, F1 = 2/5; b: 2 of 3, 2 of 3, F1 = 2/3; c: 0 of 1 said, no text, F1 = 0.
    The macro-F1 is the mean over a, b and c.
    """
    metrics = LabelMetrics(["a", "b", "c", "d"], torch.device("cpu"))
    said, right = [0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 0, 0]
    logits = 5 * torch.nn.functional.one_hot(torch.tensor(said), 4).float() - 7
    for rows in (slice(0, 2), slice(2, 6)):
        metrics.update(logits[rows], torch.tensor(right)[rows])
    numbers, classes = metrics.compute("val")
    assert numbers == pytest.approx({"val/acc": 3 / 6, "val/f1_macro": (2 / 5 + 2 / 3 + 0) / 3})
    assert classes["a"] == pytest.approx({"precision": 1 / 2, "recall": 1 / 3, "f1": 2 / 5, "texts": 3})
    assert classes["b"] == pytest.approx({"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3, "texts": 3})
    assert classes["c"] == classes["d"] == {"precision": 0, "recall": 0, "f1": 0, "texts": 0}
    assert class_table(classes).splitlines()[1].split() == ["a", "0.500", "0.333", "0.400", "3"]


def test_majority_is_that_of_training():
    assert majority_accuracy(torch.tensor([2, 5, 1]), torch.tensor([6, 3, 1])) == pytest.approx(0.3)


def test_names_from_a_file_cannot_reach_the_terminal():
    row = {"precision": 1.0, "recall": 1.0, "f1": 1.0, "texts": 1}
    assert "\x1b" not in class_table({"\x1b[2J": row})
