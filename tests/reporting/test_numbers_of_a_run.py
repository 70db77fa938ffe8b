"""What is computed of a run: changed flags, times, reward against KL, warnings."""

import dataclasses
import math
import random

import pytest

from rlhf_stages.reporting.changes import changed_arguments
from rlhf_stages.reporting.curves import panels_of
from rlhf_stages.reporting.evaluation import own_samples, read_evaluation
from rlhf_stages.reporting.findings import findings
from rlhf_stages.reporting.folder import Run, read_run
from rlhf_stages.reporting.numbers import Numbers
from rlhf_stages.reporting.throughput import throughput_of
from rlhf_stages.reporting.tradeoff import Point, frontier, gold_part, over_optimised, smoothed, tradeoff_of

from report_folders import write_evaluation, write_ppo, write_sft


@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    return read_run(write_ppo(tmp_path_factory.mktemp("runs") / "toy" / "tiny" / "ppo", 100))


def of(stage, rows=(), timing=(), args=None, **other):
    """A run of numbers alone."""
    return Run(
        dir=None,
        args={"stage": stage, **(args or {})},
        metrics=Numbers(list(rows)),
        timing=Numbers(list(timing)),
        **other,
    )


def test_flags_that_differ_from_their_defaults():
    groups = {
        "train_args": {"init_kl_coeff": 0.05, "ppo_epochs": 1, "loggers": ["csv"], "data_dir": "d", "of_old": [1, 2]},
        "gen_args": {"top_k": 0, "stop_token": "\n"},  # 0 is the default of rollouts, not of generation
        "fabric_args": {"strategy": "ddp"},
    }
    changes = {c.flag: (c.value, c.default) for c in changed_arguments(of("ppo", args=groups))}
    assert changes == {
        "--init_kl_coeff": ("0.05", "0.1"),
        "--loggers": ('["csv"]', '["tensorboard"]'),
        "--of_old": ("[1, 2]", "no such flag in this version"),
        "--stop_token": ("\n", "none"),
        "--strategy": ("ddp", "auto"),
    }
    meanings = {c.flag: c.meaning for c in changed_arguments(of("ppo", args=groups))}
    assert meanings["--init_kl_coeff"].startswith("KL coefficient in the reward")
    assert "docs/scaling.md" in meanings["--strategy"]  # a comment above its field
    assert "--top_k" in {c.flag for c in changed_arguments(of("sft", args={"gen_args": {"top_k": 0}}))}


def test_panels_leave_out_what_was_not_logged(ppo):
    titles = {panel.title: panel for panel in panels_of(ppo)}
    assert "Memory of the GPU" not in titles
    assert [(line.label, len(line.points)) for line in titles["Reward"].lines] == [("train", 100), ("validation", 2)]
    assert [line.label for line in titles["Reward parts"].lines] == ["rm", "gold"]
    assert [line.label for line in titles["Time of a step"].lines] == ["sampling", "rollout", "updates"]
    assert panels_of(of("sft")) == []


def test_phases_of_ppo(ppo):
    found = throughput_of(ppo)
    sampling, scoring, updates = found.phases
    assert (sampling.seconds, scoring.seconds, updates.seconds) == (1.0, 0.5, 2.0)
    # the length goes from 20 to 25 along a line, 22.525 on average over the steps 1 to 100; 64 responses; 2 epochs
    assert sampling.rate == f"{64 * 22.525:,.0f} tokens/s"
    assert updates.rate == f"{64 * 22.525 * 2 / 2:,.0f} tokens/s"
    assert (found.step_seconds, found.elapsed) == (4.0, 400.0)


def test_a_resumed_run_starts_its_clock_anew():
    clock = [(10, 20.0), (20, 40.0), (30, 25.0), (40, 45.0)]  # 2 s a step; killed, and 25 s for 10 steps with loading
    found = throughput_of(of("ppo", timing=[(step, {"info/elapsed_seconds": value}) for step, value in clock]))
    assert found.elapsed == 20 + 20 + 25 + 20
    assert found.step_seconds == pytest.approx((20 + 25 + 20) / 30)
    assert found.phases == []


def test_time_of_a_step_of_sft(tmp_path):
    (phase,) = throughput_of(read_run(write_sft(tmp_path / "toy" / "tiny" / "sft"))).phases
    assert (phase.seconds, phase.rate) == (0.5, "4,000 tokens/s")
    assert math.isnan(throughput_of(of("sft")).step_seconds)


def test_time_of_a_step_where_the_last_line_holds_fewer():
    lines = [(10, 50.0), (20, 20.0), (23, 6.0)]  # 2 s a step, after a first validation
    (phase,) = throughput_of(of("rm", timing=[(step, {"info/time": value}) for step, value in lines])).phases
    assert phase.seconds == 2.0


def test_the_frontier_by_hand():
    places = [(0, 0), (1, 2), (2, 1), (2, 3), (2, 3), (3, 3), (4, 9)]
    points = [Point(step, kl, reward) for step, (kl, reward) in enumerate(places)]
    # (1, 2) beats (2, 1); (3, 3) pays more KL for the same as (2, 3), which is there twice
    assert [p.step for p in frontier(points)] == [0, 1, 3, 4, 6]
    assert frontier([]) == []


def brute_frontier(points):
    def beats(a, b):
        return a.kl <= b.kl and a.reward >= b.reward and (a.kl < b.kl or a.reward > b.reward)

    return {p.step for p in points if not any(beats(q, p) for q in points)}


def test_the_frontier_against_its_definition():
    state = 1
    points = []
    for step in range(200):
        state = state * 1103515245 % 2**31
        points.append(Point(step, state // 7 % 23, state // 1000 % 19))
    assert {p.step for p in frontier(points)} == brute_frontier(points)


def test_gold_is_the_part_that_is_not_paid(ppo):
    assert gold_part(ppo) == "gold"
    weights = {"a": [[0, 1.0]], "b": [[0, 0.0], [100, 0.5]], "c": [[0, 0.0]]}
    rewards = {name: {"weights": points} for name, points in weights.items()}
    assert gold_part(of("ppo", args={"rewards": rewards})) == "c"
    assert gold_part(of("ppo", args={"rewards": {"a": rewards["a"], "x": 3}})) is None
    assert gold_part(of("ppo")) is None


def test_points_of_rollouts_and_of_enough_validations(ppo):
    found = tradeoff_of(ppo)
    assert (found.source, found.gold, len(found.points)) == ("the rollouts of the logged steps", "gold", 100)
    assert found.points[49].kl == 16 * 0.25
    assert found.points[49].distance == 2.0
    val = [(s, {"val/kl_sequence": -0.1, "val/reward_mean": s, "val/reward_gold": 2.0 * s}) for s in range(4)]
    gold = {"rewards": {"gold": {"weights": [[0, 1.0]]}}}
    validated = tradeoff_of(of("ppo", rows=val, args=gold))
    assert (validated.source, validated.points[3]) == ("the validations", Point(3, -0.1, 3, 6.0))
    assert validated.points[3].distance == 0.0


def test_samples_are_scored_where_the_run_has_no_gold():
    samples = [{"step": s, "prompt": "p", "response": "r" * s, "score": s, "kl": 2.0 * s} for s in range(1, 17)]
    samples += [
        {"step": 17, "prompt": "p", "response": "r"},
        {"step": 18, "prompt": 3, "response": "", "score": 1, "kl": 1},
    ]
    found = tradeoff_of(of("ppo", samples=samples), gold_score=lambda prompt, response: float(len(response)))
    assert len(found.points) == 8  # 16 samples, two a point
    assert found.points[0] == Point(2, 3.0, 1.5, 1.5)
    assert "2 samples a point" in found.source


def test_neighbouring_points_are_smoothed():
    points = [Point(step, kl, 2.0 * kl, 3.0 * kl) for step, kl in enumerate((0.0, 3.0, 6.0, 0.0))]
    # (0 + 3 + 6) / 3 and (3 + 6 + 0) / 3
    assert smoothed(points, 3) == [Point(1, 3.0, 6.0, 9.0), Point(2, 3.0, 6.0, 9.0)]
    assert smoothed(points, 1) == points
    assert smoothed(points, 5) == []


def test_over_optimisation_is_said_where_gold_falls_while_reward_rises(ppo):
    points = tradeoff_of(ppo).points
    peak, last = over_optimised(points)
    assert 40 <= peak.step <= 60  # gold is highest in the middle
    assert last.step == 99
    assert over_optimised(points[:50]) is None
    falling = [dataclasses.replace(p, reward=-p.reward) for p in points]
    assert over_optimised(falling) is None  # both fall: that is another illness
    for seed in range(50):  # noise alone is none
        rng = random.Random(seed)
        assert over_optimised([dataclasses.replace(p, gold=rng.gauss(0.5, 0.02)) for p in points]) is None
    assert over_optimised([dataclasses.replace(p, gold=None) for p in points]) is None
    (warning,) = [text for text in findings(ppo, points) if "over-optimised" in text]
    assert "raise --init_kl_coeff" in warning


def test_warnings_of_the_monitor_are_said_once_with_their_steps(ppo):
    rows = [(step, {**row, "train/kl_sequence": 30.0 + step} if step > 40 else row) for step, row in ppo.metrics.rows]
    (warning,) = findings(dataclasses.replace(ppo, metrics=Numbers(rows)))
    assert warning.startswith("steps 41 to 81: the actor is 111 nats per response from the reference")
    assert findings(ppo) == []


def test_skipped_steps_are_said():
    skipped = [{"step": 4, "reason": "the loss is not finite"}, {"step": 4, "reason": "b"}, {"step": 9, "reason": "c"}]
    (warning,) = findings(of("rm", skipped=skipped))
    assert warning.startswith("2 steps skipped (4, 9), the last because c: lower the learning rate")


def test_overfitting_is_said():
    losses = [(0, 3.0), (10, 1.0), (20, 1.05)]
    (warning,) = findings(of("sft", rows=[(step, {"val/loss": value}) for step, value in losses]))
    assert "lowest at step 10 (1) and has risen to 1.05" in warning
    assert findings(of("sft", rows=[(step, {"val/loss": value}) for step, value in [*losses[:2], (20, 1.01)]])) == []


def test_dpo_that_makes_the_better_responses_less_likely():
    rows = [(0, {"val/choosen_logprobs": -20.0}), (10, {"val/choosen_logprobs": -30.0})]
    (warning,) = findings(of("dpo", rows=rows))
    assert "less likely (-20 to -30 nats)" in warning
    assert findings(of("dpo", rows=rows[::-1])) == []


def test_an_evaluation_shows_the_first_texts_and_the_largest_losses(tmp_path):
    found = read_evaluation(write_evaluation(tmp_path / "e.json"))
    assert found.policies["ppo"] == {"gold score": 0.5, "KL to the reference (nats)": 2.0, "distinct-2": 0.25}
    assert found.reward_accuracy == {"test": {"all pairs": {"n": 1200.0, "longer wins": 0.4, "rm": 0.9}}}
    assert found.settings == "test split, temperature 0.7, seed 42"
    # gold of the new ones is 0.1 * i against 0.5: beyond the first five none is worse
    assert [row.texts[1].text for row in found.comparisons] == ["new 0", "new 1", "new 2", "new 3", "new 4"]
    assert found.comparisons[2].texts[1].numbers == {"gold": 0.2, "reward": 0.9, "KL": 2.0}


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"summary": 3}'])
def test_what_is_no_evaluation_is_refused(tmp_path, text):
    (tmp_path / "e.json").write_text(text)
    with pytest.raises(ValueError, match=r"e\.json"):
        read_evaluation(tmp_path / "e.json")
    with pytest.raises(FileNotFoundError, match=r"evaluate\.py --output"):
        read_evaluation(tmp_path / "none.json")


def test_texts_of_a_run_are_the_first_and_the_last(ppo):
    found = own_samples(ppo)
    assert [(row.note, [text.who for text in row.texts]) for row in found] == [
        ("the example prompt", ["step 0", "step 100"]),
        *[("first rollouts", [f"step {s}"]) for s in (1, 2, 3)],
        *[("last rollouts", [f"step {s}"]) for s in (98, 99, 100)],
    ]
    assert found[1].texts[0].numbers == {"reward": 0.1, "KL": 0.2}
    assert len(own_samples(of("ppo", samples=ppo.samples[:2]))) == 2  # none is shown twice
