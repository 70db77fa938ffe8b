from rlhf_stages.evaluation.policies import Reply
from rlhf_stages.evaluation.table import comparison_table, side_by_side


def reply(prompt, text, gold=None):
    return Reply(prompt=prompt, text=text, tokens=1, ended=True, kl=0.0, reward=None, gold=gold)


def test_a_row_per_number_and_a_column_per_policy():
    table = comparison_table(
        {"sft": {"gold score": 0.5, "KL": 0.0}, "my-long-policy": {"gold score": 0.75, "KL": 12.34567}}
    )
    assert table.splitlines() == [
        "                  sft  my-long-policy",
        "gold score      0.500           0.750",
        "KL              0.000          12.346",
    ]


def test_replies_side_by_side():
    replies = {
        "sft": [reply("\n\nHuman: one?", " no \n idea ", gold=0.25), reply("two?", "b")],
        "ppo": [reply("one?", "yes", gold=1.0), reply("two?", "")],
    }
    assert side_by_side(replies, count=2) == (
        "Human: one?\nsft  no idea  [gold 0.25]\nppo  yes  [gold 1.00]\n\ntwo?\nsft  b\nppo  "
    )
    assert side_by_side(replies, count=1).count("sft") == 1
    assert side_by_side(replies, count=9).count("sft") == 2


def test_long_replies_are_wrapped_under_their_name():
    lines = side_by_side({"sft": [reply("?", "word " * 30)]}, count=1, width=40).splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert [line[:5] for line in lines[1:]] == ["sft  "] + ["     "] * (len(lines) - 2)
    assert " ".join(line[5:] for line in lines[1:]).split() == ["word"] * 30
