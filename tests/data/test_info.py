import json

import pytest

from rlhf_stages.data import info
from rlhf_stages.data.info import read_data_info


def write(folder, content):
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "args.json").write_text(text, encoding="latin-1")
    return folder


def test_reads_what_prepare_writes(tmp_path):
    content = {
        "dataset": "helpdesk",
        "tokenizer": {"name": "tiny", "fingerprint": "abc", "vocab_size": 7},
        "chat_template": "{{ x }}",
        "mask_prompt": False,
        "ignore_index": -100,
        "stages": {"finetune": {}},
    }
    found = read_data_info(str(write(tmp_path, content)))
    assert (found.path, found.dataset, found.tokenizer_name, found.fingerprint) == (tmp_path, "helpdesk", "tiny", "abc")
    assert (found.chat_template, found.mask_prompt, found.ignore_index) == ("{{ x }}", False, -100)
    assert found.raw == content


@pytest.mark.parametrize("tokenizer", [{}, {"tokenizer": None}, {"tokenizer": {}}])
def test_reads_the_flat_form_of_data_brought_along(tmp_path, tokenizer):
    folder = tmp_path / "summaries" / "opt"
    folder.mkdir(parents=True)
    found = read_data_info(write(folder, {"tokenizer_name": "facebook/opt-350m", **tokenizer}))
    assert (found.dataset, found.tokenizer_name, found.fingerprint) == ("summaries", "facebook/opt-350m", None)
    assert (found.chat_template, found.mask_prompt, found.ignore_index) == (None, True, -1)


def test_a_missing_file_names_what_writes_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no .*args\.json; --data_dir must be a folder written by data_prep"):
        read_data_info(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"args\.json is not valid JSON"),
        ('{"tokenizer_name": "\xff"}', r"args\.json is not valid JSON"),
        ([], r"args\.json holds a list, expected a JSON object"),
        ({}, r"args\.json names no tokenizer"),
        ({"tokenizer": "gpt2"}, r"args\.json names no tokenizer \(expected"),
        ({"tokenizer_name": "x", "ignore_index": None}, "ignore_index is None, expected a value of type int"),
        ({"tokenizer_name": "x", "ignore_index": "a"}, "ignore_index is 'a', expected a value of type int"),
        ({"tokenizer_name": "x", "mask_prompt": "False"}, "mask_prompt is 'False', expected a value of type bool"),
    ],
)
def test_bad_content_is_one_sentence(tmp_path, content, message):
    with pytest.raises(ValueError, match=message) as error:
        read_data_info(write(tmp_path, content))
    assert str(tmp_path) in str(error.value)


def test_check_tokenizer_compares_fingerprints(tmp_path, monkeypatch):
    monkeypatch.setattr(info, "fingerprint", lambda tokenizer: "f:" + tokenizer)
    found = read_data_info(write(tmp_path, {"tokenizer": {"name": "made-with", "fingerprint": "f:a"}}))
    found.check_tokenizer("a", "some/model")
    with pytest.raises(
        ValueError, match=r"'made-with' \(f:a\), but 'some/model' has another \(f:b\); prepare the data"
    ):
        found.check_tokenizer("b", "some/model")
    brought = read_data_info(write(tmp_path, {"tokenizer_name": "x"}))
    brought.check_tokenizer("b", "some/model")  # nothing to compare with
