"""examples/faq: a dataset of one's own."""

import json
import sys

import pytest

from rlhf_stages.data.shards import open_shard
from rlhf_stages.data.sources import SkipRecord
from rlhf_stages.data.tokenizer import load_tokenizer

from helpers import ROOT, load_script, save_causal

faq = load_script("examples/faq/prepare_data.py")


def test_records():
    example = faq.to_example({"question": "Open on  Sunday?", "answer": " No.", "worse": "Who knows "})
    assert example.prompt == "\n\nHuman: Open on  Sunday?\n\nAssistant:"
    assert (example.responses, example.key) == ((" No.", " Who knows"), "open on sunday?")
    assert faq.to_example({"question": "Open?", "answer": "Yes."}).responses == (" Yes.",)
    for record in ({"question": "Open?"}, {"answer": "Yes.", "worse": "No."}):
        with pytest.raises(SkipRecord, match="no question or no answer"):
            faq.to_example(record)


def test_every_question_of_the_file_becomes_a_preference(tmp_path, monkeypatch):
    model = save_causal(tmp_path / "model")
    argv = [f"--source={ROOT}/examples/faq/questions.jsonl", "--stage=preference", f"--destination_dir={tmp_path}/out"]
    flags = [f"--tokenizer_name={model}", "--stage_split=all", "--num_workers=1"]
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *argv, *flags])
    faq.main()
    lines = (ROOT / "examples" / "faq" / "questions.jsonl").read_text().splitlines()
    shards = [open_shard(path, responses=2) for path in sorted((tmp_path / "out").glob("preference_*.pt"))]
    assert sum(map(len, shards)) == len(lines) == len({json.loads(line)["question"] for line in lines})
    assert load_tokenizer(str(model)).decode(shards[0][0].prompt).endswith("Assistant:")


def test_a_source_has_to_be_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", f"--destination_dir={tmp_path}", "--tokenizer_name=none"])
    with pytest.raises(ValueError, match="--source: name the file"):
        faq.main()
