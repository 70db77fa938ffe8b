from rlhf_stages.args import EvaluateArgs, GenerationArgs
from rlhf_stages.evaluation.policies import Reply
from rlhf_stages.evaluation.table import comparison_table, interval_table, settings_line, side_by_side


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


def test_a_change_of_a_negative_number_keeps_its_sign_and_one_prompt_has_no_interval():
    columns = {"a": {"x": {"value": -2.0}}, "b": {"x": {"value": -1.0, "change": 1.0}}}
    assert interval_table(columns, {}, markdown=True).splitlines()[2] == "| x | -2.000 | -1.000 (+50.0 %) |"


def test_how_the_replies_were_drawn():
    args = EvaluateArgs(experiment_dirs=["a"], suite="dialogue")
    assert settings_line(GenerationArgs(max_new_tokens=20, min_new_tokens=2, top_k=20), args, 9).startswith(
        "temperature 1, top-k 20, top-p 1, 2 to 20 tokens, seed 42; ± is half of the 95 % interval of 1,000 resamples"
    )
    beams = settings_line(GenerationArgs(do_sample=False, num_beams=4), args, 1)
    assert beams.startswith("most probable token, 4 beams, 0 to 128 tokens, seed 42; one prompt")


def test_a_table_of_values_intervals_and_changes():
    entry = {"value": 0.5, "low": 0.4, "high": 0.6}
    columns = {
        "sft": {"METEOR": entry, "zero": {"value": 0.0, "low": 0.0, "high": 0.0}},
        "ppo": {
            "METEOR": {"value": 0.6, "low": 0.55, "high": 0.61, "change": 0.1, "change_low": 0.0, "change_high": 0.2},
            "zero": {"value": 1.0, "low": 1.0, "high": 1.0, "change": 1.0, "change_low": 1.0, "change_high": 1.0},
        },
        "human": {},
    }
    whole = {"sft": {"distinct-1": 0.25}, "human": {"distinct-1": 0.75}}
    assert interval_table(columns, whole, markdown=True).splitlines() == [
        "|  | sft | ppo | human |",
        "| --- | --- | --- | --- |",
        "| METEOR | 0.500 ±0.100 | 0.600 ±0.030 (+20.0 %, +0.0 to +40.0) | - |",
        "| zero | 0.000 ±0.000 | 1.000 ±0.000 | - |",
        "| distinct-1 | 0.250 | - | 0.750 |",
    ]
    lines = interval_table(columns, whole, markdown=False).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["METEOR", "0.500", "±0.100", "0.600", "±0.030", "(+20.0", "%,", "+0.0", "to", "+40.0)"]
