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
        ({"tokenizer_name": "x", "ignore_index": None}, "ignore_index is None, expected an integer of 64 bits"),
        ({"tokenizer_name": "x", "ignore_index": "a"}, "ignore_index is 'a', expected an integer of 64 bits"),
        ({"tokenizer_name": "x", "ignore_index": True}, "ignore_index is True, expected an integer of 64 bits"),
        ({"tokenizer_name": "x", "ignore_index": 2**63}, "ignore_index is 9223372036854775808, expected an integer"),
        ({"tokenizer_name": "x", "mask_prompt": "False"}, "mask_prompt is 'False', expected true or false"),
        ({"tokenizer_name": "x", "chat_template": [1]}, r"chat_template is \[1\], expected a text or null"),
        ("[" * 100_000, r"args\.json is not valid JSON"),
    ],
)
def test_bad_content_is_one_sentence(tmp_path, content, message):
    with pytest.raises(ValueError, match=message) as error:
        read_data_info(write(tmp_path, content))
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("name", ["../../elsewhere", "/tmp", "..", ".", "a/b", "a\\b", "a\nb", "\0", "x" * 101, ["a"]])
def test_a_name_that_would_put_experiments_elsewhere(tmp_path, name):
    with pytest.raises(ValueError, match=r"dataset is .*, expected a name of letters"):
        read_data_info(write(tmp_path, {"tokenizer_name": "x", "dataset": name}))


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
