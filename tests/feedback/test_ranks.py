import pytest

from rlhf_stages.feedback.ranks import complete_ranks, find_conflict, groups, order_text, ordered_lists, read_ranks
from rlhf_stages.feedback.wording import LANGUAGES, TEXTS, Refusal, say


def test_a_conflict_names_the_reply_that_holds_the_rank():
    assert find_conflict([2, None, 2, 1], changed=2) == 0
    assert find_conflict([2, None, 2, 1], changed=0) == 2
    assert find_conflict([2, None, 3, 1], changed=2) is None
    assert find_conflict([None, None], changed=0) is None


def test_ranks_lose_their_gaps():
    assert complete_ranks([3, 1, 1, 4], ties=True) == (2, 1, 1, 3)
    assert complete_ranks([2, 3, 1], ties=False) == (2, 3, 1)
    assert complete_ranks([1, 1], ties=True) == (1, 1)


@pytest.mark.parametrize(
    ("ranks", "ties", "message"),
    [
        ([1, None, 2, None], True, "Not saved: B, D still without a rank."),
        ([2, 1, 2], False, "Rank 2 is held by reply A already; change that one first, or allow ties."),
        ([1, 4, 2], True, "Not saved: ranks go from 1 to 3."),
        ([0, 1], True, "Not saved: ranks go from 1 to 2."),
        ([], True, "Not saved: ranks go from 1 to 0."),
    ],
)
def test_ranks_that_cannot_be_saved(ranks, ties, message):
    with pytest.raises(Refusal) as refusal:
        complete_ranks(ranks, ties)
    assert str(refusal.value) == message
    assert refusal.value.in_language("zh") != message


def test_ranks_as_text():
    assert read_ranks(" 2, 1，3 3", 4) == (2, 1, 3, 3)
    for text in ("1 2", "1 2 3 x", "", "1.0 2 3 4", "-1 2 3 4"):
        with pytest.raises(Refusal, match="Give 4 ranks"):
            read_ranks(text, 4)
    with pytest.raises(Refusal, match="from 1 to 2"):
        read_ranks(f"1 {'9' * 5000}", 2)  # int() itself refuses so many digits


def test_the_order_in_letters():
    assert groups([2, 1, None, 2]) == [[1], [0, 3]]
    assert order_text([2, 1, None, 2]) == "B > A = D"
    assert order_text([None, None]) == ""


def test_lists_to_learn_from_have_every_strict_pair_once_and_no_tied_one():
    assert ordered_lists([3, 1, 2]) == [[1, 2, 0]]
    # B = C before A = D: four pairs, neither B with C nor A with D
    assert ordered_lists([2, 1, 1, 2]) == [[1, 0], [1, 3], [2, 0], [2, 3]]
    assert ordered_lists([1, 2, 2]) == [[0, 1], [0, 2]]
    assert ordered_lists([1, 1, 1]) == []
    assert ordered_lists([1]) == []


def test_both_languages_say_the_same_things():
    fields = {
        key: [{part.split("}")[0] for part in text.split("{")[1:]} for text in texts] for key, texts in TEXTS.items()
    }
    assert not [key for key, (en, zh) in fields.items() if en != zh]
    assert all(len(texts) == len(LANGUAGES) and all(texts) for texts in TEXTS.values())
    assert say("zh", "saved", number=3) == "已保存，编号 3。"
    assert say("fr", "saved", number=3) == "Saved as number 3."  # a page can ask for anything
