"""benchmarks/: what can be checked of the comparisons without the peers."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_stages.data.collate import pad_right
from rlhf_stages.data.shards import open_shard

from helpers import ROOT, load_script, make_tokenizer, save_causal, save_classifier, write_toy_data

SCRIPT = "benchmarks/reward_model_vs_trl.py"


def test_both_reward_models_are_read_as_transformers_reads_them(tmp_path):
    """The score at the last token is the logit of the sequence classifier that TRL trains."""
    data, folder = write_toy_data(tmp_path / "data", held_out=12), save_classifier(tmp_path / "model", "llama")
    found = load_script(SCRIPT).held_out(SimpleNamespace(data_dir=str(data), split="test"), folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    shard, pad = open_shard(data / "preference_test.pt"), make_tokenizer().pad_token_id
    texts = [record.sequence(i) for record in (shard[i] for i in range(12)) for i in (0, 1)]
    ids, lengths = pad_right(texts, pad)
    with torch.no_grad():
        logits = model(ids, torch.arange(ids.shape[1]) < lengths[:, None]).logits.double().squeeze(-1)
    lead = logits[0::2] - logits[1::2]
    assert found["pairs"] == 12
    assert found["accuracy"] == (lead > 0).double().mean() != 0.5
    assert found["loss"] == pytest.approx((1 + (-lead).exp()).log().mean().item(), rel=1e-5)


@pytest.mark.slow
def test_our_side_of_the_comparison_runs_and_is_not_run_twice(tmp_path):
    data, model, out = (
        write_toy_data(tmp_path / "toy" / "tiny"),
        save_causal(tmp_path / "model"),
        tmp_path / "out.jsonl",
    )
    command = [sys.executable, ROOT / SCRIPT, f"--data_dir={data}", f"--model_name={model}", "--peers", "ours"]
    command += ["--seeds", "5", "--max_steps=1", f"--out={out}"]
    for _ in range(2):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        (line,) = map(json.loads, out.read_text().splitlines())
        assert (line["peer"], line["seed"], line["steps"], line["pairs"]) == ("ours", 5, 1, 8)
    assert json.loads(result.stdout)["mean_accuracy"] == line["accuracy"]


@pytest.mark.slow
def test_a_checkpoint_is_timed(capsys):
    result = load_script("benchmarks/checkpoint.py").main(["--geometry=tiny", "--saves=2"])
    # embedding (32,000 words), layers and head of two models, each with two moments, in fp32
    assert result["bytes"] > 3 * 2 * 4 * 32_000 * 64
    assert 0 < result["seconds_blocked"] < result["seconds_whole"]
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1]) == result
