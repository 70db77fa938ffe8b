import json

import pytest

from rlhf_stages.evaluation.gold import load_function, load_score


def test_a_function_of_a_file(tmp_path):
    (tmp_path / "score.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Weight:\n    value: float = 2.0\n\n"
        "def gold(prompt, response):\n    return Weight().value * len(response)\n"
    )
    assert load_function(f"{tmp_path}/score.py:gold")("", "abc") == 6.0


def test_a_path_with_a_colon(tmp_path):
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "score.py").write_text("def gold(prompt, response):\n    return 1.0\n")
    assert load_function(f"{folder}/score.py:gold")("", "") == 1.0


@pytest.mark.parametrize("reference", ["score.py", "gold", "score.py:", ""])
def test_another_form(reference):
    with pytest.raises(ValueError, match=r"expected path\.py:function or module:function, got"):
        load_function(reference)


def test_a_module():
    assert load_function("math:sqrt")(4) == 2
    with pytest.raises(ValueError, match="the module 'no_such_module' cannot be imported"):
        load_function("no_such_module:gold")


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*gone\.py"):
        load_function(f"{tmp_path}/gone.py:gold")


def test_no_such_function(tmp_path):
    (tmp_path / "score.py").write_text("gold = 1.0\n")
    for name in ("gold", "other"):
        with pytest.raises(ValueError, match=f"score.py has no function '{name}'"):
            load_function(f"{tmp_path}/score.py:{name}")


def test_a_file_that_fails_names_its_line(tmp_path):
    (tmp_path / "score.py").write_text("x = 1\nx.y\n")
    with pytest.raises(ValueError, match=r"score.py cannot be imported: AttributeError: .*score.py, line 2\)"):
        load_function(f"{tmp_path}/score.py:gold")


def test_a_file_called_like_a_library(tmp_path):
    (tmp_path / "json.py").write_text("def gold(prompt, response):\n    return 1\n")
    assert load_score(f"{tmp_path}/json.py:gold")("", "") == 1.0
    assert "json" in __import__("sys").modules
    assert __import__("sys").modules["json"] is json


@pytest.fixture
def score(tmp_path):
    """The score of a function that returns the value of an expression."""

    def returning(expression):
        path = tmp_path / "score.py"
        path.write_text(f"import torch\n\ndef gold(prompt, response):\n    return {expression}\n")
        return load_score(f"{path}:gold")

    return returning


@pytest.mark.parametrize(
    "expression", ["2", "2.0", "torch.tensor(2.0)", "torch.tensor([2])", "__import__('numpy').float32(2)"]
)
def test_any_number_is_a_score(score, expression):
    value = score(expression)("", "")
    assert (value, type(value)) == (2.0, float)


@pytest.mark.parametrize(
    "expression",
    ["None", "'1'", "b'1'", "[1.0]", "float('nan')", "float('inf')", "10**400", "torch.zeros(2)", "1j", "object()"],
)
def test_what_is_not_a_finite_number(score, expression):
    with pytest.raises(ValueError, match=r"score.py:gold returned .*, expected a finite number; the response was 'hm'"):
        score(expression)("", "hm")


def test_a_function_that_fails(score):
    with pytest.raises(
        ValueError, match=r"score.py:gold failed: IndexError: .*score.py, line 4\); the response was 'hm'"
    ):
        score("prompt[5]")("", "hm")
