import pytest

from rlhf_stages.evaluation.gold import load_function


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


@pytest.mark.parametrize("reference", ["score.py", "score:gold", "gold", "score.py:", ""])
def test_another_form(reference):
    with pytest.raises(ValueError, match=r"expected path\.py:function, got"):
        load_function(reference)


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*gone\.py"):
        load_function(f"{tmp_path}/gone.py:gold")


def test_no_such_function(tmp_path):
    (tmp_path / "score.py").write_text("gold = 1.0\n")
    for name in ("gold", "other"):
        with pytest.raises(ValueError, match=f"score.py has no function '{name}'"):
            load_function(f"{tmp_path}/score.py:{name}")
