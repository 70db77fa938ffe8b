"""Names for values in a `--config` file; what its flags mean is tested in test_args.py and test_openrl.py."""

import pytest

from rlhf_stages.args import SFTArgs
from rlhf_stages.cli import parse


def parsed(tmp_path, text):
    (tmp_path / "flags.yaml").write_text(text)
    return parse(SFTArgs, argv=[f"--config={tmp_path / 'flags.yaml'}"])[0]


@pytest.mark.parametrize("after", ["", "\n", "# a comment\n", "\n# a comment\n\n"])
def test_a_name_stands_for_its_value_wherever_the_block_is(tmp_path, after):
    block = f"globals:\n  base: runs\n\n  # a comment\n  rate: 0.001\n{after}"
    rest = 'log_dir: "{{ base }}/a"\nlearning_rate: {{ rate }}\nexperiment_name: "{{ base | upper }}"\n'
    for text in (block + rest, rest + block, rest + block.rstrip("\n")):
        args = parsed(tmp_path, text)
        assert (args.log_dir, args.learning_rate, args.experiment_name) == ("runs/a", 0.001, "RUNS")


def test_the_block_may_stand_on_one_line(tmp_path):
    assert parsed(tmp_path, "globals: {base: runs}\nlog_dir: '{{ base }}'\n").log_dir == "runs"


def test_without_the_block_braces_are_text(tmp_path):
    assert parsed(tmp_path, "log_dir: '{{ base }}'\n").log_dir == "{{ base }}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("globals: {base: runs}\nlog_dir: '{{ bass }}'\n", "'bass' is undefined"),
        ("globals: {base: runs}\nlog_dir: '{{ base.__class__.__mro__ }}'\n", "unsafe"),
        ("globals: {base: runs}\nlog_dir: '{{ base'\n", "unexpected"),
        ("globals: [runs]\nlog_dir: a\n", "globals is a block of `name: value` lines, got list"),
        ("globals: {base: [\nlog_dir: a\n", "while parsing"),
        ("globals: {base: runs}\nlog_dirr: a\n", "unknown flag 'log_dirr'; did you mean log_dir?"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, capsys, text, message):
    with pytest.raises(SystemExit) as stop:
        parsed(tmp_path, text)
    assert stop.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"error: --config {tmp_path / 'flags.yaml'}: " in line
    assert message in line
