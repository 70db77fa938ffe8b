"""The reward-model stage: ranked lists, margins, centering, encoders, and what its checkpoints say."""

import json
import math
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from rlhf_stages.data.shards import ShardWriter, open_shard
from rlhf_stages.data.tokenizer import encode_prompt, encode_response, fingerprint, load_tokenizer
from rlhf_stages.experiment import resolve_checkpoint

from helpers import (
    load_script,
    make_tokenizer,
    read_metrics,
    run_stage,
    save_causal,
    save_encoder,
    toy_rows,
    write_toy_data,
)

SHORT = ["--max_steps=2", "--log_interval=1", "--learning_rate=1e-2"]
RATINGS = (3.5, 3.0, 1.0, 0.0)


def write_lists(folder, train=24, held_out=7):
    """Toy data whose preferences are rated lists of 2, 3 or 4 replies in turn: good, so so, bad, none at all."""
    data, tokenizer = write_toy_data(folder), make_tokenizer()
    for seed, (split, count) in enumerate({"train": train, "validation": held_out, "test": held_out}.items()):
        writer = ShardWriter()
        for number, (prompt, (good, bad, fair)) in enumerate(toy_rows(count, seed)):
            k = 2 + number % 3
            replies = [encode_response(tokenizer, text) for text in (good, fair, bad, "")[:k]]
            writer.add(encode_prompt(tokenizer, prompt), replies, ratings=RATINGS[:k])
        writer.save(data / f"preference_{split}.pt")
    return data


FLAGS = ["--loss_type=last_token", "--use_margin", "--center_rewards_coeff=0.2", "--micro_batch_size=2"]


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """Reward models of a causal model and of an encoder, trained on ranked lists with all that the loss can have."""
    folder = tmp_path_factory.mktemp("lists")
    data = write_lists(folder / "toy" / "lists")
    starts = {"gpt2": save_causal(folder / "gpt2", dropout=0.1), "bert": save_encoder(folder / "bert", dropout=0.1)}
    runs = {
        kind: run_stage("rm", folder / f"{kind}_runs", data, f"--model_name={start}", *SHORT, *FLAGS)
        for kind, start in starts.items()
    }
    return SimpleNamespace(data=data, starts=starts, runs=runs)


def scores_of(experiment, shard):
    """Scores of every list of a shard, text by text, from the classifier as transformers gives it."""
    model = AutoModelForSequenceClassification.from_pretrained(resolve_checkpoint(experiment)).eval()
    with torch.no_grad():
        return [
            [model(record.sequence(i)[None]).logits.item() for i in range(len(record.responses))] for record in shard
        ]


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_checkpoint_has_the_numbers_that_were_logged_for_ragged_lists(lists, kind):
    """Batches of 2 lists, 7 lists, 1 to 6 pairs each: means over batches would be other numbers."""
    rm = lists.runs[kind]
    rows = scores_of(rm, open_shard(lists.data / "preference_validation.pt"))
    assert sorted(map(len, rows)) == [2, 2, 2, 3, 3, 4, 4]
    losses, wins, in_order = [], [], []
    for row in rows:
        pairs = [(i, j) for i in range(len(row)) for j in range(i + 1, len(row))]
        for i, j in pairs:
            margin = RATINGS[i] - RATINGS[j]
            pull = -F.logsigmoid(torch.tensor(row[i] - row[j] - margin)).item()
            losses.append(pull + 0.2 * (row[i] + row[j]) ** 2)
            wins.append(row[i] > row[j])
        in_order.append(row == sorted(row, reverse=True) and len(set(row)) == len(row))
    metrics = {name: column[2] for name, column in read_metrics(rm).items()}
    assert metrics["val/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert metrics["val/acc"] == pytest.approx(sum(wins) / len(wins))
    assert metrics["val/order_acc"] == pytest.approx(sum(in_order) / len(in_order))
    assert {"train/loss", "train/acc", "train/order_acc"} <= metrics.keys()
    flat = torch.tensor([score for row in rows for score in row], dtype=torch.float64)
    config = json.loads((resolve_checkpoint(rm) / "config.json").read_text())
    assert config["reward_mean"] == pytest.approx(flat.mean().item(), rel=1e-4, abs=1e-5)
    assert config["reward_std"] == pytest.approx(flat.std(correction=0).item(), rel=1e-4, abs=1e-5)
    assert (config["reward_mean"], config["reward_std"]) == (metrics["val/reward_mean"], metrics["val/reward_std"])
    assert fingerprint(load_tokenizer(str(resolve_checkpoint(rm)))) == fingerprint(make_tokenizer())


def test_exact_files_of_a_finished_encoder(lists):
    checkpoint = resolve_checkpoint(lists.runs["bert"])
    found = {path.name for path in checkpoint.iterdir()}
    assert found == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "manifest.json",
        "resume",
    }
    assert json.loads((checkpoint / "config.json").read_text())["architectures"] == ["BertForSequenceClassification"]


def test_evaluate_reads_an_encoder_and_ranked_lists(lists, tiny_run, tmp_path):
    rm = lists.runs["bert"]
    results = load_script("scripts/evaluate.py").main(
        [
            f"--data_dir={lists.data}", f"--rm_experiment_dir={rm}", "--num_prompts=3", "--num_samples=1",
            "--max_new_tokens=4", "--mini_batch_size=2", "--accelerator=cpu", "--experiment_dirs", str(tiny_run.sft),
        ]
    )  # fmt: skip
    rows = scores_of(rm, open_shard(lists.data / "preference_test.pt"))
    pairs = [(row[i], row[j]) for row in rows for i in range(len(row)) for j in range(i + 1, len(row))]
    found = results["reward_accuracy"]["test"]
    every, order = found["all pairs"], found["whole lists in order"]
    assert (every["n"], order["n"]) == (len(pairs), 7)
    assert every["share"]["rm"]["value"] == pytest.approx(sum(a > b for a, b in pairs) / len(pairs))
    in_order = sum(all(a > b for a, b in pairwise(row)) for row in rows)
    assert order["share"]["rm"]["value"] == pytest.approx(in_order / 7)
    model = AutoModelForSequenceClassification.from_pretrained(resolve_checkpoint(rm)).eval()
    assert all(isinstance(reply["reward"], float) for reply in results["replies"]["sft"])
    assert model.config.num_labels == 1


def test_ppo_is_rewarded_by_an_encoder(lists, tiny_run, tmp_path):
    """The critic starts from the SFT model, since an encoder has no value for a single token."""
    parents = [f"--sft_experiment_dir={tiny_run.sft}", f"--rm_experiment_dir={lists.runs['bert']}", "--critic_init=sft"]
    sizes = ["--rollout_size=8", "--rollout_mini_batch_size=8", "--max_new_tokens=4", "--max_steps=1", "--eval_iters=1"]
    ppo = run_stage("ppo", tmp_path, lists.data, *parents, *sizes, "--log_interval=1", "--standardize_rewards")
    metrics = read_metrics(ppo)
    config = json.loads((resolve_checkpoint(lists.runs["bert"]) / "config.json").read_text())
    # the tiny encoder gives every text a score near those of the validation set
    assert abs(metrics["train/reward_mean"][1] - config["reward_mean"]) < 20 * config["reward_std"]
    assert all(math.isfinite(value) for column in metrics.values() for value in column.values())


def test_without_validation_no_scale_is_stored_and_an_older_one_is_cleared(lists, tmp_path):
    data = write_lists(tmp_path / "toy" / "lists", train=4)
    (data / "preference_validation.pt").unlink()
    start = f"--model_name={resolve_checkpoint(lists.runs['gpt2'])}"
    with pytest.warns(UserWarning, match="nothing is validated"):
        rm = run_stage("rm", tmp_path, data, start, "--max_steps=1")
    config = json.loads((resolve_checkpoint(rm) / "config.json").read_text())
    assert (config["reward_mean"], config["reward_std"]) == (None, None)


def test_centering_pulls_on_the_weights(lists, tmp_path):
    start = [f"--model_name={lists.starts['gpt2']}", *SHORT, "--max_steps=1"]
    runs = [run_stage("rm", tmp_path / c, lists.data, *start, f"--center_rewards_coeff={c}") for c in ("0", "5")]
    plain, centered = (load_file(resolve_checkpoint(run) / "model.safetensors") for run in runs)
    assert not torch.equal(plain["score.weight"], centered["score.weight"])


def test_dropout_is_on_from_the_first_step_also_after_validation_and_off_while_validating(lists, tmp_path):
    start = save_causal(tmp_path / "model", dropout=0.5)
    flags = [f"--model_name={start}", "--max_steps=2", "--learning_rate=0", "--log_interval=1", "--eval_interval=1"]
    runs = [
        read_metrics(run_stage("rm", tmp_path / name, lists.data, *flags, *more))
        for name, more in (("a", []), ("b", ["--disable_dropout"]))
    ]
    for step in (1, 2):
        assert abs(runs[0]["train/loss"][step] - runs[1]["train/loss"][step]) > 1e-3
        assert runs[0]["val/loss"][step] == runs[1]["val/loss"][step]


def test_what_trains_is_what_this_stages_flags_say(tiny_run, tmp_path):
    """The SFT experiment trained everything; its arguments are not this stage's."""
    flags = [f"--sft_experiment_dir={tiny_run.sft}", "--finetune_mode=last_layer", "--max_steps=1"]
    rm = run_stage("rm", tmp_path, tiny_run.data, *flags)
    sft, trained = (load_file(resolve_checkpoint(run) / "model.safetensors") for run in (tiny_run.sft, rm))
    assert all(torch.equal(trained[name], sft[name]) for name in trained.keys() - {"score.weight"})
    assert json.loads((rm / "args.json").read_text())["model_args"]["finetune_mode"] == "last_layer"


def test_the_same_seed_gives_bit_equal_losses_and_another_seed_others(lists, tmp_path):
    start = [f"--model_name={lists.starts['bert']}", *SHORT, *FLAGS]
    again, other = (run_stage("rm", tmp_path / str(seed), lists.data, *start, f"--seed={seed}") for seed in (42, 7))
    first = lists.runs["bert"]
    columns = [{name: read_metrics(run)[name] for name in ("train/loss", "val/loss")} for run in (first, again, other)]
    assert columns[0] == columns[1]
    assert set(columns[0]["train/loss"].values()).isdisjoint(columns[2]["train/loss"].values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "kind", "changes"), [(save_causal, "llama", {"hidden_size": 32}), (save_encoder, "bert", {})]
)
def test_separable_preferences_are_learned_within_a_minute(tmp_path, save, kind, changes):
    data = write_toy_data(tmp_path / "toy" / "words", train=64, held_out=24)
    model = save(tmp_path / "model", kind, initializer_range=0.1, **changes)
    started = time.process_time()
    rm = run_stage(
        "rm", tmp_path, data, f"--model_name={model}", "--epochs=6", "--learning_rate=5e-3", "--loss_type=last_token",
        "--mini_batch_size=8", "--micro_batch_size=8", "--lr_warmup_steps=4", "--eval_interval=1000",
    )  # fmt: skip
    assert time.process_time() - started < 60
    assert max(read_metrics(rm)["val/acc"].values()) > 0.95
