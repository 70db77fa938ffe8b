"""evaluate.py --suite=dialogue on tiny models."""

import json
import math

import pytest

from rlhf_stages.data.shards import open_shard
from rlhf_stages.text_metrics import meteor

from helpers import load_script, make_tokenizer, save_classifier

NAMES = {"id2label": {0: "inform", 1: "question"}, "label2id": {"inform": 0, "question": 1}}


def evaluate(tiny_run, *flags):
    return load_script("scripts/evaluate.py").main(
        [
            f"--data_dir={tiny_run.data}", "--suite=dialogue", "--max_new_tokens=6", "--mini_batch_size=3",
            "--accelerator=cpu", "--bootstrap_samples=100", *flags, "--experiment_dirs", str(tiny_run.sft),
            str(tiny_run.model),
        ]
    )  # fmt: skip


def test_policies_are_compared_with_the_datas_responses(tiny_run, tmp_path, capsys, wordnet):
    results = evaluate(tiny_run, "--num_prompts=5", f"--markdown={tmp_path}/t.md", f"--output={tmp_path}/t.json")
    sft, base, human = results["summary"].values()
    shard, tokenizer = open_shard(tiny_run.data / "finetune_test.pt"), make_tokenizer()
    references = [tokenizer.decode(shard[i].responses[0][:-1]) for i in range(5)]
    replies = [[reply["text"] for reply in column] for column in results["replies"].values()]
    for column, texts in zip((sft, base), replies, strict=True):
        assert column["METEOR"]["value"] == pytest.approx(sum(meteor(texts, references)) / 5)
        assert column["METEOR"]["low"] <= column["METEOR"]["value"] <= column["METEOR"]["high"]
        assert math.isfinite(column["perplexity"]["value"])
    assert base["METEOR"]["change"] == pytest.approx(base["METEOR"]["value"] - sft["METEOR"]["value"])
    assert base["KL to the reference (nats)"]["value"] != 0
    assert list(human) == ["mean length (words)"]
    output, page = capsys.readouterr().out, (tmp_path / "t.md").read_text()
    settings = "5 held-out prompts (test split); temperature 1, top-k 50, top-p 1, 0 to 6 tokens, seed 42"
    assert settings in " ".join(output.split())
    assert settings in page
    assert f"| METEOR | {sft['METEOR']['value']:.3f} ±" in page
    assert json.loads((tmp_path / "t.json").read_text())["whole"] == results["whole"]


def test_one_prompt_is_a_table_without_intervals(tiny_run, wordnet, capsys):
    results = evaluate(tiny_run, "--num_prompts=1")
    first, second, _ = results["summary"].values()
    assert list(first["perplexity"]) == ["value"]
    assert second["perplexity"].keys() == {"value", "change"}
    output = capsys.readouterr().out
    assert "replies: one record of" in output
    assert "±" not in output
    assert "nan" not in output


def test_what_the_suite_cannot_do(tiny_run, tmp_path, capsys, wordnet):
    with pytest.raises(ValueError, match="one reply to each prompt"):
        evaluate(tiny_run, "--num_return_sequences=2")
    classifier = save_classifier(tmp_path / "c", num_labels=2, **NAMES)
    with pytest.raises(ValueError, match="'act' is None, which is not among the classifier's labels inform, question"):
        evaluate(tiny_run, f"--intent_classifier={classifier}", "--num_prompts=2")
    with pytest.raises(SystemExit):
        evaluate(tiny_run, "--suite=policies", "--intent_key=x")
    assert "only acts with --suite=dialogue" in capsys.readouterr().err
