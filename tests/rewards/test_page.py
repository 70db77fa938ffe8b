"""What docs/rewards.md says is so."""

import inspect
import re

import pytest

from rlhf_stages import plugins
from rlhf_stages.plugins import REWARDS
from rlhf_stages.rewards import composite  # noqa: F401  # it registers what there is
from rlhf_stages.rewards.spec import read_specs
from rlhf_stages.rollout.texts import Samples

from helpers import ROOT

PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
TYPES = {m[1]: m[2] for m in re.finditer(r"^\| `(\w+)` \| .*? \|([^|]*)\|$", PAGE, re.MULTILINE)}


def block(language):
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[1]


def test_every_type_has_a_row_and_no_other():
    assert {name for name in TYPES if not name.startswith("--")} == set(REWARDS)


@pytest.mark.parametrize("name", REWARDS)
def test_a_row_lists_the_settings(name):
    written = [setting for setting in re.findall(r"`(\w+)`", TYPES[name]) if setting != "or"]
    parameters = inspect.signature(REWARDS[name]).parameters
    assert set(written) == set(parameters) - {*Samples.names, "context"}


def test_the_file_can_be_read(tmp_path):
    (tmp_path / "rewards.yaml").write_text(block("yaml"), encoding="utf-8")
    meteor, intent, polite = read_specs(str(tmp_path / "rewards.yaml"), [])
    assert (meteor.name, meteor.weight(0)) == ("meteor", 0.5)
    assert intent.options["text"] == "turn"
    assert polite.weight(50) == pytest.approx(0.15)


def test_the_function_can_be_used(monkeypatch):
    monkeypatch.setattr(plugins, "REWARDS", {})
    made = {}
    source = block("python").replace("from rlhf_stages.plugins import register_reward", "")
    exec(source, {"register_reward": lambda name: made.setdefault(name, lambda function: function)}, made)
    assert made["concise"](["word " * 32, "one"]) == [-1.0, 0]
