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

from helpers import ROOT, load_script, make_tokenizer, save_causal, save_classifier, toy_rows, write_toy_data

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


TINY = ["--geometry=tiny", "--precision=32-true", "--", "--accelerator=cpu"]


@pytest.mark.slow
def test_an_iteration_of_ppo_is_measured_and_held_against_the_hardware(capsys):
    sizes = ["--prompt=8", "--response=6", "--rollout=8", "--micro=4", "--steps=3"]
    result = load_script("benchmarks/ppo.py").main([*sizes, *TINY, "--generator=slots"])
    ours = result["ours"]
    assert sum(ours["phases"].values()) == pytest.approx(ours["seconds"])
    assert ours["samples_per_s"] == pytest.approx(8 / ours["seconds"])
    assert ours["generator"].startswith("rollouts: 8 slots of 16 tokens")
    # two layers of width 64 with grouped queries, 512 words: by hand 106,816 parameters
    parameters, cache = 106_816, 8 * (8 + 3) * 2 * 2 * 2 * 16 * 2
    assert result["limit"]["decode"] == pytest.approx(6 * (2 * parameters + cache) / 3.0e12)
    assert result["limit"]["train"] == pytest.approx(2 * 6 * parameters * 8 * 14 / 4.0e14)
    assert result["of_limit"]["train"] == pytest.approx(result["limit"]["train"] / ours["phases"]["train"])
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1]) == result


@pytest.mark.slow
@pytest.mark.parametrize(("script", "texts"), [("sft", 1), ("rm", 2)])
def test_supervised_training_is_measured(script, texts, capsys):
    result = load_script(f"benchmarks/{script}.py").main(["--tokens=24", "--batch=4", "--steps=15", *TINY])
    ours = result["ours"]
    assert ours["items_per_s"] == pytest.approx(4 / ours["seconds"])
    assert ours["tokens_per_s"] == pytest.approx(24 * texts * ours["items_per_s"])
    assert ours["mfu"] == pytest.approx(6 * 106_816 * ours["tokens_per_s"] / 9.89e14)
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1]) == result


@pytest.mark.slow
def test_the_preparation_is_timed(tmp_path, capsys):
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    records = [
        {name: f"\n\nHuman: {prompt}?\n\nAssistant:{replies[i]}" for i, name in enumerate(("chosen", "rejected"))}
        for prompt, replies in toy_rows(40)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = [f"--source={tmp_path}", f"--tokenizer_name={tmp_path / 'tokenizer'}", "--pairs=100", "--num_workers=1"]
    result = load_script("benchmarks/prepare.py").main(flags)
    assert (result["pairs"], result["different"], result["kept"]) == (100, 40, 100)
    assert result["pairs_per_second"] == pytest.approx(100 / result["seconds"], rel=0.1)
    assert 0.1 < result["peak_gib"] < 2
    line, sentence = capsys.readouterr().out.strip().splitlines()
    assert json.loads(line) == result
    assert sentence.startswith("100 pairs (40 different ones) in ")
