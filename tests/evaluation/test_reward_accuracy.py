"""Accuracy of reward models."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_stages.args import FabricArgs, ModelArgs
from rlhf_stages.data.shards import Record
from rlhf_stages.evaluation.reward_accuracy import LONGER_WINS, Pairs, accuracy_rows, judged_pairs
from rlhf_stages.loop import freeze, start_fabric
from rlhf_stages.models.loading import load_scalar

from helpers import make_tokenizer, save_classifier


def record(prompt, *responses):
    return Record(torch.tensor(prompt), tuple(map(torch.tensor, responses)), (False,) * len(responses))


# the first list has three pairs, and in it alone a better text is the longer one: than the second, by one token
LISTS = [
    record([1, 5, 6], [20, 21, 2], [22, 2], [4, 5, 2]),
    record([1, 7], [23, 2], [24, 25, 26, 2]),
    record([1, 8, 9, 10, 11], [27, 2], [28, 2]),
]


@pytest.fixture
def fabric():
    return start_fabric(FabricArgs(accelerator="cpu", devices="1"), seed=1)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("batch_size", [1, 2, 50])
@torch.no_grad()
def test_pairs_against_single_texts(tmp_path, fabric, kind, batch_size):
    folder = save_classifier(tmp_path, kind)
    model = freeze(fabric, load_scalar(folder, make_tokenizer(), ModelArgs(), trained_head=True))
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    right = []
    for some in LISTS:
        scores = [plain(some.sequence(k)[None]).logits.item() for k in range(len(some.responses))]
        right += [scores[i] > scores[j] for i in range(len(scores)) for j in range(i + 1, len(scores))]
    found = judged_pairs(model, LISTS, make_tokenizer(), fabric, batch_size)
    assert found.right.tolist() == right
    assert found.records.tolist() == [0, 0, 0, 1, 2]
    assert found.differences.tolist() == [1, 0, -1, -2, 0]


def test_a_tie_is_wrong(fabric):
    found = judged_pairs(lambda ids, mask: torch.zeros(ids.shape), LISTS, make_tokenizer(), fabric, 2)
    assert not found.right.any()


def pairs(records, differences, right):
    return Pairs(torch.tensor(records), torch.tensor(differences), torch.tensor(right, dtype=torch.bool))


def values(row):
    return {name: share["value"] for name, share in row["share"].items()}


def test_rows_by_hand():
    differences = [1, 4, -4, 5, -16, 17, 64, -65, 0, 900]
    good = pairs(range(10), differences, [1, 1, 1, 1, 0, 1, 0, 1, 1, 1])
    bad = pairs(range(10), differences, [0] * 10)
    rows = accuracy_rows({"good": good, "bad": bad})
    assert {name: (row["n"], values(row)[LONGER_WINS], values(row)["good"]) for name, row in rows.items()} == {
        "all pairs": (10, 0.6, 0.8),
        "better text longer": (6, 1.0, 5 / 6),
        "better text shorter": (3, 0.0, pytest.approx(2 / 3)),
        "same length": (1, 0.0, 1.0),
        "1 to 4 tokens apart": (3, pytest.approx(2 / 3), 1.0),
        "5 to 16 tokens apart": (2, 0.5, 0.5),
        "17 to 64 tokens apart": (2, 1.0, 0.5),
        "over 64 tokens apart": (2, 0.5, 1.0),
    }
    assert {values(row)["bad"] for row in rows.values()} == {0.0}
    # Wilson: 8 of 10
    assert rows["all pairs"]["share"]["good"] == pytest.approx(
        {"value": 0.8, "low": 0.49016, "high": 0.94331}, abs=1e-5
    )
    # one of one says little, and is no point
    low = rows["same length"]["share"]["good"]["low"]
    assert low == pytest.approx(1 / (1 + 1.959964**2), abs=1e-6)


def test_rows_without_pairs_are_left_out():
    assert set(accuracy_rows({"rm": pairs([0], [3], [1])})) == {
        "all pairs",
        "better text longer",
        "1 to 4 tokens apart",
    }


def test_lists_in_order_and_their_intervals():
    # lists of 3, 3 and 2 texts: the first wholly in order, one pair of the second wrong, the third wrong
    found = pairs([0, 0, 0, 1, 1, 1, 2], [1, 1, 1, 1, 1, -1, 1], [1, 1, 1, 1, 0, 1, 0])
    rows = accuracy_rows({"rm": found})
    assert rows["whole lists in order"]["n"] == 3
    assert values(rows["whole lists in order"]) == pytest.approx({LONGER_WINS: 2 / 3, "rm": 1 / 3})
    assert values(rows["all pairs"]) == pytest.approx({LONGER_WINS: 6 / 7, "rm": 5 / 7})
    # three lists count for the interval, not seven pairs: z = 1.959964, p = 5/7, n = 3
    z, p, n = 1.959964, 5 / 7, 3
    half = z * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5 / (1 + z**2 / n)
    assert rows["all pairs"]["share"]["rm"]["low"] == pytest.approx(
        (p + z**2 / (2 * n)) / (1 + z**2 / n) - half, abs=1e-6
    )
