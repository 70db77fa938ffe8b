"""The weighted sum of rewards, and what is said when a part fails."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from rlhf_stages import plugins
from rlhf_stages.args import ModelArgs
from rlhf_stages.rewards.composite import Part, Rewards, make_rewards
from rlhf_stages.rewards.learned import RewardContext
from rlhf_stages.rewards.spec import RewardSpec
from rlhf_stages.rollout.collect import Rollout
from rlhf_stages.rollout.texts import Samples

MASK = torch.tensor([[True, True, False], [True, True, True]])
PIECES = [SimpleNamespace(texts=lambda: ["a", " b"]), SimpleNamespace(texts=lambda: ["c", "", ""])]
SAMPLES = Samples(["p0", "p1"], ["a b", "c"], ["r0", None], [{"n": 1}, {"n": 2}], PIECES)


def part(function, **settings):
    return Part(RewardSpec(settings.pop("name", "mine"), "mine", **settings), function)


def scores_of(*parts, step=1):
    return Rewards(parts).score(None, SAMPLES, MASK, step)


def rollout_of(columns):
    size = len(columns[0])
    fields = {f.name: torch.zeros(size, 3) for f in dataclasses.fields(Rollout)} | {"samples": Samples()}
    return Rollout(**{**fields, "part_scores": torch.tensor(columns).T, "scores": torch.zeros(size)})


def test_a_function_gets_what_it_asks_for():
    seen = {}

    def everything(prompts, responses, references, metadata):
        seen.update(prompts=prompts, responses=responses, references=references, metadata=metadata)
        return [m["n"] for m in metadata]

    assert scores_of(part(everything)).parts.tolist() == [[1.0], [2.0]]
    assert seen == {
        "prompts": ["p0", "p1"],
        "responses": ["a b", "c"],
        "references": ["r0", None],
        "metadata": [{"n": 1}, {"n": 2}],
    }
    assert scores_of(part(lambda responses: torch.tensor([0.5, 2]))).parts.tolist() == [[0.5], [2.0]]
    assert scores_of(part(lambda **rest: [len(rest), 0])).parts[0, 0] == 5


def test_parts_are_clipped_weighted_and_added_up():
    rewards = Rewards([part(None, weights=((0, 2.0),), clip=(-1.0, 1.0)), part(None, weights=((0, 0.0), (10, 1.0)))])
    rollout = rollout_of([[0.5, 3.0], [10.0, -10.0]])
    # 2 * 0.5 + 0.4 * 10; 2 * 1 (clipped) - 0.4 * 10
    assert rewards.combine(rollout, step=4).scores.tolist() == pytest.approx([5.0, -2.0])
    # the last weights: 2 * 0.5 + 10; 2 * 1 - 10
    assert rewards.yardstick(rollout).scores.tolist() == pytest.approx([11.0, -8.0])
    assert rewards.combine(rollout, step=4).part_scores.tolist() == rollout.part_scores.tolist()


def test_a_normalized_part_is_scaled_by_all_that_was_seen_on_all_devices():
    rewards = Rewards([part(None, normalize=True, clip=(-8.0, 8.0))])
    rewards.observe(rollout_of([[1.0, 99.0]]), global_sum=lambda seen: seen + torch.tensor([[2.0, 6.0, 20.0]]))
    # 1 and 8 (clipped) here, 2 and 4 there: mean 15 / 4, squares 85 / 4
    std = (85 / 4 - (15 / 4) ** 2) ** 0.5
    assert rewards.combine(rollout_of([[4.0, 99.0]]), 1).scores.tolist() == pytest.approx(
        [(4 - 3.75) / std, (8 - 3.75) / std]
    )
    assert rewards.yardstick(rollout_of([[4.0, 1.0]])).scores.tolist() == [4.0, 1.0]
    again = Rewards(rewards.parts)
    again.load_state_dict(rewards.state_dict())
    assert torch.equal(
        again.combine(rollout_of([[4.0, 2.0]]), 1).scores, rewards.combine(rollout_of([[4.0, 2.0]]), 1).scores
    )
    same = Rewards([part(None, normalize=True)])
    same.observe(rollout_of([[3.0, 3.0]]), global_sum=lambda seen: seen)
    assert same.combine(rollout_of([[3.0, 3.0]]), 1).scores.tolist() == [0.0, 0.0]


def test_statistics_of_a_resumed_run_are_those_of_the_parts_by_name():
    spec = {"normalize": True}
    rewards = Rewards([part(None, name="a", **spec), part(None, name="b", **spec)])
    rewards.observe(rollout_of([[1.0, 3.0], [50.0, 70.0]]), global_sum=lambda seen: seen)
    again = Rewards([part(None, name="new", **spec), part(None, name="b", **spec)])
    again.load_state_dict(rewards.state_dict())
    again.observe(rollout_of([[2.0, 4.0], [60.0, 60.0]]), global_sum=lambda seen: seen)
    # (4 - 3) / 1; (70 - 60) / sqrt((10^2 + 10^2) / 4)
    assert again.combine(rollout_of([[4.0], [70.0]]), 1).scores.tolist() == pytest.approx([1 + 10 / 50**0.5])


def test_scores_of_tokens_stand_beside_the_sum():
    by_token = part(lambda: [[1.0, 5.0], [1, 2, 3]], per_token=True, weights=((0, 0.5),), clip=(0.0, 2.0))
    rewards = Rewards([by_token, part(lambda: [1, 2])])
    found = rewards.score(None, SAMPLES, MASK, 1)
    assert found.tokens.tolist() == [[0.5, 1.0, 0.0], [0.5, 1.0, 1.0]]  # half of 1, 2 (clipped); 1, 2, 2 (clipped)
    assert found.parts.tolist() == [[3.0, 1.0], [5.0, 2.0]]
    rollout = dataclasses.replace(rollout_of([[3.0, 5.0], [1.0, 2.0]]), token_scores=found.tokens)
    assert rewards.combine(rollout, 1).scores.tolist() == [1.0, 2.0]
    assert rewards.yardstick(rollout).scores.tolist() == [1.0, 2.0]


def fails_on_c(responses):
    if "c" in responses:
        raise KeyError("c")
    return [0.0] * len(responses)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: [1.0], "returned 1 scores for 2 responses"),
        (lambda: 3.0, "returned 3.0 for 2 responses"),
        (lambda: [1.0, math.nan], "returned nan, expected a finite number; response 1 was 'c'"),
        (lambda: [math.inf, math.nan], "returned inf, expected a finite number; response 0 was 'a b'"),
        (lambda: [1.0, None], "returned None, expected a finite number; response 1 was 'c'"),
        (lambda: ["1", "2"], "returned '1', expected a finite number; response 0"),
        (lambda: [[1, 2], [1]], r"returned \[1, 2\], expected a finite number"),
        (lambda: [10**400, 0], r"returned 10+, expected a finite number; response 0"),
        (fails_on_c, r"failed: KeyError: 'c' \(.*, line \d+\); response 1 was 'c'"),
    ],
)
def test_a_part_that_fails_is_named_with_the_first_response(function, message):
    with pytest.raises(ValueError, match=f"reward 'mine' {message}"):
        scores_of(part(lambda: [0, 0], name="other"), part(function))


@pytest.mark.parametrize("values", [[[1.0], [1, 2, 3]], [1.0, 2.0], [[1, 2], [1, 2, math.nan]]])
def test_a_part_that_gives_tokens_the_wrong_number_of_scores(values):
    with pytest.raises(ValueError, match=r"reward 'mine' returned .* response [01] was"):
        scores_of(part(lambda: values, per_token=True))


@pytest.fixture
def context():
    return RewardContext(tokenizer=None, device=torch.device("cpu"), model_args=ModelArgs())


def test_parts_are_built_from_their_settings(context, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def twice(responses, times=2):\n    return [times * len(r) for r in responses]\n"
    )
    specs = [
        RewardSpec("twice", f"{tmp_path}/mine.py:twice"),
        RewardSpec("four", f"{tmp_path}/mine.py:twice", options={"times": 4}),
        RewardSpec("regex", "regex", options={"pattern": "B", "ignore_case": True}),
        RewardSpec("words", "length"),
        RewardSpec("near", "length", options={"target": 4}),
        RewardSpec("root", "math:sqrt"),
    ]
    rewards = make_rewards(specs[:5], context)
    found = rewards.score(None, SAMPLES, MASK, 1).parts
    assert found.tolist() == [[6, 12, 1, 2, -0.5], [2, 4, 0, 1, -0.75]]
    assert rewards.settings["four"]["options"] == {"times": 4}
    with pytest.raises(ValueError, match="reward 'root' failed"):
        make_rewards([specs[5]], context).score(None, SAMPLES, MASK, 1)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("lenght", {}, "did you mean length"),
        ("length", {"goal": 3}, "its options are target, unit"),
        ("meteor", {"alpha": 3}, "its options are none"),
        ("regex", {"pattern": "("}, "reward 'x': pattern"),
        ("regex", {}, "pattern"),
        ("http", {"url": "ftp://x"}, "http://"),
        ("gone.py:f", {}, "gone.py"),
    ],
)
def test_settings_that_do_not_fit(context, kind, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        make_rewards([RewardSpec("x", kind, options=options)], context)


def test_what_a_plugin_registers(context, tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "REWARDS", plugins.REWARDS)  # taken back at the end
    file = tmp_path / "mine.py"
    file.write_text(
        "from rlhf_stages.plugins import register_reward\n"
        "@register_reward('test_shout')\n"
        "def shout(responses, factor=1):\n    return [factor * r.isupper() for r in responses]\n"
        "@register_reward('test_made')\n"
        "class Made:\n"
        "    def __init__(self, context, plus=0):\n        self.device, self.plus = context.device.type, plus\n"
        "    def __call__(self, prompts):\n        return [len(self.device) + self.plus for _ in prompts]\n"
    )
    plugins.load_plugins([str(file)])
    try:
        specs = [
            RewardSpec("a", "test_shout", options={"factor": 2}),
            RewardSpec("b", "test_made", options={"plus": 1}),
        ]
        assert make_rewards(specs, context).score(None, SAMPLES, MASK, 1).parts.tolist() == [[0, 4], [0, 4]]
        plugins.load_plugins([str(file)])  # once more is no conflict
        with pytest.raises(ValueError, match="registered already"):
            plugins.register_reward("test_shout")(len and fails_on_c)
    finally:
        for name in ("test_shout", "test_made"):
            plugins.REWARDS.pop(name, None)
