"""Tables."""

from rlhf_stages.evaluation.table import accuracy_table, interval_table

SFT = {"value": 0.5, "low": 0.4, "high": 0.6}
PPO = {"value": 0.6, "low": 0.55, "high": 0.61, "change": 0.1, "change_low": 0.05, "change_high": 0.2}
SAME = {"value": -1.0, "low": -1.0, "high": -1.0, "change": 1.0, "change_low": -1.0, "change_high": 2.0}
COLUMNS = {"sft": {"METEOR": SFT, "x": {"value": -2.0, "low": -2.0, "high": -2.0}}, "ppo": {"METEOR": PPO, "x": SAME}}
WHOLE = {"sft": {"distinct-1": 0.25}, "human": {"distinct-1": 0.75}}


def test_a_table_of_values_intervals_and_changes():
    columns = COLUMNS | {"human": {}}
    table, legend = interval_table(columns, WHOLE, 1000, markdown=True)
    assert table.splitlines() == [
        "|  | sft | ppo | human |",
        "| --- | --- | --- | --- |",
        "| METEOR | 0.500 ±0.100 | 0.600 ±0.030 (+0.100, +0.050 to +0.200) | - |",
        "| x | -2.000 ±0.000 | -1.000 ±0.000 (+1.000, -1.000 to +2.000) | - |",
        "| distinct-1 | 0.250 | - | 0.750 |",
    ]
    assert legend == (
        "± is half of the 95 % interval of 1,000 resamples of the prompts, in brackets the change from sft and the"
        " interval of the change"
    )
    text, same = interval_table(columns, WHOLE, 1000, markdown=False)
    assert text.splitlines() == [
        "                      sft                                       ppo  human",
        "METEOR       0.500 ±0.100   0.600 ±0.030 (+0.100, +0.050 to +0.200)      -",
        "x           -2.000 ±0.000  -1.000 ±0.000 (+1.000, -1.000 to +2.000)      -",
        "distinct-1          0.250                                         -  0.750",
    ]
    assert same == legend


def test_where_there_is_no_room_a_mark_stands_for_the_change():
    columns = COLUMNS | {"dpo": COLUMNS["ppo"]}
    text, legend = interval_table(columns, {}, 1000, markdown=False)
    assert text.splitlines() == [
        "                  sft              ppo              dpo",
        "METEOR   0.500 ±0.100     0.600 ±0.030 *   0.600 ±0.030 *",
        "x       -2.000 ±0.000    -1.000 ±0.000    -1.000 ±0.000",
    ]
    assert "* marks a change from sft whose interval leaves out 0" in legend


def test_what_still_has_no_room_goes_below():
    columns = {"sft": COLUMNS["sft"]} | {f"a-policy-of-a-long-name-{i}": COLUMNS["ppo"] for i in range(5)}
    text, _ = interval_table(columns, {}, 1000, markdown=False)
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("METEOR") == 2
    assert text.count("a-policy-of-a-long-name-") == 5


def test_one_prompt_has_no_interval_and_nothing_to_explain():
    columns = {"a": {"x": {"value": -2.0}}, "b": {"x": {"value": -1.0, "change": 1.0}}}
    table, legend = interval_table(columns, {}, 1000, markdown=True)
    assert (table.splitlines()[2], legend) == ("| x | -2.000 | -1.000 (+1.000) |", "")


def test_a_name_cannot_break_a_markdown_table():
    table, _ = interval_table({"a|b<img>": {"x": {"value": 1.0}}}, {}, 1000, markdown=True)
    assert table.splitlines()[0] == "|  | a\\|b&#60;img&#62; |"


def test_a_table_of_accuracy():
    share = {"longer wins": {"value": 0.25, "low": 0.1, "high": 0.4}, "rm": {"value": 1.0, "low": 0.5, "high": 1.0}}
    groups = {"all pairs": {"n": 1234, "share": share}, "same length": {"n": 5, "share": share}}
    splits = {"train": groups, "test": groups}
    assert accuracy_table(splits, markdown=False).splitlines() == [
        "                      n          longer wins                   rm",
        "train: all pairs  1,234  0.250 (0.100-0.400)  1.000 (0.500-1.000)",
        "  same length         5  0.250 (0.100-0.400)  1.000 (0.500-1.000)",
        "test: all pairs   1,234  0.250 (0.100-0.400)  1.000 (0.500-1.000)",
        "  same length         5  0.250 (0.100-0.400)  1.000 (0.500-1.000)",
    ]
    assert accuracy_table(splits, markdown=True).splitlines()[3] == (
        "| train: same length | 5 | 0.250 (0.100-0.400) | 1.000 (0.500-1.000) |"
    )
