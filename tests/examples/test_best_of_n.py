"""examples/best_of_n.py: what it learns, what it writes, and what goes on from it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_stages.data.shards import ShardWriter
from rlhf_stages.experiment import digest, parent_checkpoint, resolve_checkpoint
from rlhf_stages.models import scalar
from rlhf_stages.rollout import samples

from helpers import load_script, read_metrics, run_stage


def run(tiny_run, folder, *flags, rm=None):
    return load_script("examples/best_of_n.py").main([
        f"--data_dir={tiny_run.data}", f"--log_dir={folder}", "--accelerator=cpu", "--devices=1",
        f"--sft_experiment_dir={tiny_run.sft}", f"--rm_experiment_dir={rm or tiny_run.rm}", "--learning_rate=1e-3",
        "--num_return_sequences=3", "--num_prompts=10", "--max_new_tokens=6", "--log_interval=1", *flags,
    ])  # fmt: skip


def test_the_reply_with_the_highest_score_is_learned_for_each_prompt(tiny_run, tmp_path, monkeypatch):
    sampled, added = [], []
    sample, add = samples.sample, ShardWriter.add

    def sampling(*args):
        sampled.append(sample(*args))
        return sampled[-1]

    def adding(writer, prompt, responses, truncated):
        added.append((responses[0], truncated[0]))
        add(writer, prompt, responses, truncated)

    monkeypatch.setattr(samples, "sample", sampling)
    monkeypatch.setattr(ShardWriter, "add", adding)
    # scores that are known: sums of ids; the prompt is the same for all replies to it
    monkeypatch.setattr(scalar, "end_scores", lambda model, ids, mask: torch.where(mask, ids, 0).sum(1).float())
    folder = run(tiny_run, tmp_path)
    rows = [(ids[mask].tolist(), bool(ended)) for batch in sampled for ids, mask, ended in
            zip(batch.ids, batch.mask, batch.ended, strict=True)]  # fmt: skip
    assert (len(rows), len(added)) == (30, 10)
    for k, (learned, cut) in enumerate(added):
        offered = rows[3 * k : 3 * k + 3]
        best, ended = max(offered, key=lambda reply: sum(reply[0]))
        assert (learned[: len(learned) - cut], not cut) == (best, ended)
        assert not cut or learned[-1] == 2  # EOS ends what was cut, and does not count
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["score_best"] > summary["score_mean"]


def test_the_loss_is_that_of_the_tokens_of_the_replies(tiny_run, tmp_path, monkeypatch):
    learned, add = [], ShardWriter.add

    def adding(writer, prompt, responses, truncated):
        learned.append((prompt, responses[0][: len(responses[0]) - truncated[0]]))
        add(writer, prompt, responses, truncated)

    monkeypatch.setattr(ShardWriter, "add", adding)
    folder = run(tiny_run, tmp_path, "--mini_batch_size=10", "--micro_batch_size=5", "--disable_dropout")
    model = AutoModelForCausalLM.from_pretrained(resolve_checkpoint(tiny_run.sft)).eval()
    nll = []
    for prompt, reply in learned:
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + reply])).logits[0].log_softmax(-1)
        nll += [-logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(reply)]
    assert read_metrics(folder)["train/loss"] == {1: pytest.approx(sum(nll) / len(nll), rel=1e-4)}


def test_it_writes_an_experiment_from_which_other_stages_go_on(tiny_run, tmp_path):
    folder = run(tiny_run, tmp_path / "runs", "--epochs=4", "--experiment_name=best")
    assert folder == tmp_path / "runs" / "toy" / "best" / "sft"
    args = json.loads((folder / "args.json").read_text())
    assert args["gen_args"]["num_return_sequences"] == 3
    parents = {role: parent["sha256"] for role, parent in args["parents"].items()}
    assert parents == {role: digest(resolve_checkpoint(getattr(tiny_run, role))) for role in ("sft", "rm")}
    losses = read_metrics(folder)["train/loss"]
    assert len(losses) == 12  # ten replies in threes of four, four times
    assert min(losses[10], losses[11]) < losses[1]
    checkpoint, _ = parent_checkpoint(folder, stage="sft", flag="--sft_experiment_dir")
    assert digest(checkpoint) != parents["sft"]
    run_stage(
        "dpo", tmp_path / "runs", tiny_run.data, f"--sft_experiment_dir={folder}", "--max_steps=1", "--max_new_tokens=4"
    )


def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(tiny_run, tmp_path):
    folder = run(tiny_run, tmp_path, "--save_interval=1")
    before = digest(resolve_checkpoint(folder))
    assert run(tiny_run, tmp_path, "--save_interval=1", "--resume=1") == folder
    assert read_metrics(folder)["train/loss"].keys() == {1, 2, 3}
    assert digest(resolve_checkpoint(folder)) == before


def test_flags_of_a_validation_that_it_does_not_have_are_not_offered(capsys):
    example = load_script("examples/best_of_n.py")
    with pytest.raises(SystemExit):
        example.main(["--help"])
    assert "--learning_rate" in (offered := capsys.readouterr().out)
    assert "--eval_" not in offered
    with pytest.raises(SystemExit) as stop:
        example.main(["--sft_experiment_dir=a", "--rm_experiment_dir=b", "--eval_interval=5"])
    assert stop.value.code == 2
    assert "--eval_interval=5" in capsys.readouterr().err


def test_what_it_cannot_do_is_said(tiny_run, tmp_path):
    with pytest.raises(ValueError, match="--num_return_sequences of 2 or more"):
        run(tiny_run, tmp_path, "--num_return_sequences=1")
    with pytest.raises(ValueError, match=r"--rm_experiment_dir=.* is an experiment of stage 'sft', expected 'rm'"):
        run(tiny_run, tmp_path, rm=tiny_run.sft)
    assert not list(tmp_path.iterdir())
