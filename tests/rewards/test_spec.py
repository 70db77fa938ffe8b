import math

import pytest

from rlhf_stages.rewards.spec import RewardSpec, read_specs


def test_a_file_and_tokens_give_one_list(tmp_path):
    file = tmp_path / "rewards.yaml"
    file.write_text(
        "meteor: 0.5\n"
        "intent: {type: classifier, weight: 0.25, model: some/where, label_key: act}\n"
        "polite: {type: 'my.py:polite', weight: {10: 1.0, 0: 0.0}, clip: 2, normalize: true}\n"
        "steps: {type: process, command: [a, b], per_token: true, clip: [-1, 3]}\n",
        encoding="utf-8",
    )
    specs = read_specs(str(file), ["length=-0.1,target=20", "other.py:score=2,scale=1.5", "repetition"])
    assert specs == [
        RewardSpec("meteor", "meteor", ((0, 0.5),)),
        RewardSpec("intent", "classifier", ((0, 0.25),), options={"model": "some/where", "label_key": "act"}),
        RewardSpec("polite", "my.py:polite", ((0, 0.0), (10, 1.0)), clip=(-2.0, 2.0), normalize=True),
        RewardSpec("steps", "process", clip=(-1.0, 3.0), per_token=True, options={"command": ["a", "b"]}),
        RewardSpec("length", "length", ((0, -0.1),), options={"target": 20}),
        RewardSpec("score", "other.py:score", ((0, 2.0),), options={"scale": 1.5}),
        RewardSpec("repetition", "repetition"),
    ]


def test_a_weight_follows_lines_between_its_points():
    spec = RewardSpec("x", "x", weights=((10, 1.0), (20, 0.0), (30, 4.0)))
    assert [spec.weight(step) for step in (0, 10, 13, 20, 25, 30, 99)] == pytest.approx([1, 1, 0.7, 0, 2, 4, 4])
    assert RewardSpec("x", "x", weights=((0, 0.3),)).weight(7) == 0.3
    assert spec.weight(math.inf) == 4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("-2", -2), (".5", 0.5), ("3.", 3.0), ("true", True), ("False", False), ("no", "no"),
        ("[0-9]+", "[0-9]+"), ("@x", "@x"), ("!", "!"), ("'1'", "1"), ('"a b"', "a b"), ("nan", "nan"), ("", ""),
    ],
)  # fmt: skip
def test_a_setting_of_a_token_is_a_number_true_or_false_or_the_text_itself(text, value):
    (spec,) = read_specs(None, [f"x=1,setting={text}"])
    assert spec.options == {"setting": value}
    assert type(spec.options["setting"]) is type(value)


def test_numbers_with_an_exponent(tmp_path):
    (tmp_path / "r.yaml").write_text("a: 1e-3\nb: {weight: {0: 1e2}, clip: [-1e1, 2]}\nc: {clip: 1e2}\n")
    a, b, c = read_specs(str(tmp_path / "r.yaml"), [])
    assert (a.weights, b.weights, b.clip, c.clip) == (((0, 0.001),), ((0, 100.0),), (-10.0, 2.0), (-100.0, 100.0))
    (token,) = read_specs(None, ["length=1e-3,clip=1e2"])
    assert (token.weights, token.clip) == (((0, 0.001),), (-100.0, 100.0))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- meteor", "expected `name:"),
        ("", "expected `name:"),
        ("a: [1, 2]", "expected a weight, or settings"),
        ("a: {weight: much}", "weight is a number"),
        ("a: {weight: {-1: 2.0}}", "weight is a number"),
        ("a: {weight: .nan}", "weight is a number"),
        ("a: {clip: [2, 1]}", "clip is a number above 0"),
        ("a: {clip: 0}", "clip is a number above 0"),
        ("a: {normalize: 3}", "normalize and per_token"),
        ("a: {normalize: true, per_token: true}", "not both"),
        ("a: {b", "reward_config"),
        ("a: !!python/name:os.system {}", "reward_config"),
    ],
)
def test_a_wrong_file_is_said(tmp_path, content, message):
    (tmp_path / "r.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_specs(str(tmp_path / "r.yaml"), [])


def test_what_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no reward may be called 'sft', as the parent of --sft_experiment_dir is"):
        read_specs(None, ["sft=1,type=length"], taken=("sft",))
    with pytest.raises(FileNotFoundError, match=r"gone\.yaml"):
        read_specs(str(tmp_path / "gone.yaml"), [])
    with pytest.raises(ValueError, match="two rewards are called 'meteor'"):
        read_specs(None, ["meteor=1", "meteor=2"])
    for token in ("=3", "meteor=1,target", "meteor=1,=3"):
        with pytest.raises(ValueError, match="--reward"):
            read_specs(None, [token])
