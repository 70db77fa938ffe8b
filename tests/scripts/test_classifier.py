"""The classifier stage: what its checkpoints, its numbers and its refusals are."""

import json
import shutil
import warnings

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_stages.checkpoint import check_whole
from rlhf_stages.cli import run
from rlhf_stages.data.tokenizer import load_tokenizer
from rlhf_stages.experiment import resolve_checkpoint
from rlhf_stages.models.classifier import TextClassifier

from helpers import load_script, read_metrics, run_stage, save_causal, save_encoder, write_labelled

LABELS = ["blame", "neither", "praise"]
SHORT = ["--max_steps=3", "--log_interval=1", "--learning_rate=1e-2", "--micro_batch_size=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Short runs from a causal model and from an encoder."""
    folder = tmp_path_factory.mktemp("classifiers")
    data = write_labelled(folder / "toy" / "tiny")
    starts = {"gpt2": save_causal(folder / "gpt2", dropout=0.1), "bert": save_encoder(folder / "bert", dropout=0.1)}
    return data, {
        kind: run_stage("classifier", folder / f"{kind}_runs", data, f"--model_name={start}", *SHORT)
        for kind, start in starts.items()
    }


def lines_of(data, split):
    """What the stage keeps of a split: texts that are also in the test split are no validation."""
    lines = [json.loads(line) for line in (data / f"act_{split}.jsonl").read_text().splitlines()]
    if split == "test":
        return lines
    tested = {line["text"] for line in lines_of(data, "test")}
    return [line for line in lines if line["text"] not in tested]


def said(experiment, lines):
    """Probabilities (B, L) of a checkpoint, each text read alone, and the right labels (B,)."""
    classifier = TextClassifier.load(experiment, "cpu")
    assert classifier.labels == LABELS
    rows = torch.cat([classifier.probabilities([line["text"]]) for line in lines])
    return rows, torch.tensor([LABELS.index(line["label"]) for line in lines])


def macro_f1(found, right):
    scores = []
    for label in {*found.tolist(), *right.tolist()}:
        hits = ((found == label) & (right == label)).sum().item()
        scores.append(2 * hits / ((found == label).sum().item() + (right == label).sum().item()))
    return sum(scores) / len(scores)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_checkpoint_has_the_numbers_that_were_logged(runs, kind):
    data, experiments = runs
    experiment = experiments[kind]
    summary, metrics = json.loads((experiment / "summary.json").read_text()), read_metrics(experiment)
    for split, prefix in (("validation", "val"), ("test", "test")):
        rows, right = said(experiment, lines_of(data, split))
        found = rows.argmax(1)
        assert summary[f"{prefix}/acc"] == pytest.approx((found == right).float().mean().item())
        assert summary[f"{prefix}/loss"] == pytest.approx(-rows.log()[range(len(right)), right].mean().item(), abs=1e-5)
        assert summary[f"{prefix}/f1_macro"] == pytest.approx(macro_f1(found, right))
        if prefix == "val":
            assert {name: metrics[name][3] for name in ("val/acc", "val/loss", "val/f1_macro")} == {
                name: summary[name] for name in ("val/acc", "val/loss", "val/f1_macro")
            }
    assert not any(name.startswith("test") for name in metrics)
    for i, label in enumerate(LABELS):
        row, hits = summary["test/labels"][label], ((found == i) & (right == i)).sum().item()
        assert row["texts"] == (right == i).sum().item()
        assert row["recall"] == pytest.approx(hits / max(row["texts"], 1))
        assert row["precision"] == pytest.approx(hits / max((found == i).sum().item(), 1))
    kept = json.loads((experiment / "args.json").read_text())["data_args"]["counts"]["train"]["kept"]
    most = max(kept, key=kept.get)
    assert summary["test/majority_acc"] == pytest.approx(summary["test/labels"][most]["texts"] / len(right))


def test_first_step_of_a_causal_model_starts_at_equal_probabilities(runs):
    assert read_metrics(runs[1]["gpt2"])["train/loss"][1] == pytest.approx(1.0986123, abs=1e-6)  # log 3


def test_folder_of_the_experiment(runs):
    experiment = runs[1]["gpt2"]
    assert experiment.parts[-3:] == ("toy", "tiny", "classifier")
    files = {path.name for path in experiment.iterdir()} - {"logs"}
    assert files == {"args.json", "best", "checkpoints", "latest", "metrics.csv", "summary.json", "timing.csv"}
    content = json.loads((experiment / "args.json").read_text())
    assert (content["stage"], content["data_args"]["labels"]) == ("classifier", LABELS)
    assert set(content["shards"]) == {"train", "validation", "test"}
    check_whole(resolve_checkpoint(experiment), resumable=True)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_it_learns(tmp_path, kind):
    """One of the words good, bad and so so is in each text: the majority gets a third of them."""
    start = (save_encoder if kind == "bert" else save_causal)(tmp_path / "model", kind, initializer_range=0.1)
    data = write_labelled(tmp_path / "toy" / "tiny", train=150, held_out=30)
    flags = ["--epochs=10", "--learning_rate=3e-3", "--lr_warmup_steps=10", "--mini_batch_size=8"]
    flags += ["--micro_batch_size=8", f"--model_name={start}"]
    summary = json.loads((run_stage("classifier", tmp_path, data, *flags) / "summary.json").read_text())
    assert summary["test/majority_acc"] < 0.5
    assert summary["test/acc"] > 0.9
    assert summary["test/f1_macro"] > 0.9


def test_a_source_and_what_the_checkpoint_knows_of_its_length(tmp_path):
    rows = [f"{text}\t{i % 2}" for i, text in enumerate(f"the {w} tea is {w} {v}" for w in "abcdefgh" for v in "xyz")]
    (tmp_path / "reviews.tsv").write_text("\n".join(rows))
    argv = [f"--source={tmp_path / 'reviews.tsv'}", "--columns=text,label", "--labels=negative,positive"]
    argv += [f"--model_name={save_causal(tmp_path / 'model')}", f"--log_dir={tmp_path / 'runs'}", "--accelerator=cpu"]
    argv += ["--devices=1", "--max_steps=1", "--max_length=5", "--validation_percentage=0.3", "--test_percentage=0.3"]
    experiment = load_script("scripts/train_classifier.py").main(argv)
    assert experiment == tmp_path / "runs" / tmp_path.name.replace("[", "_").replace("]", "_") / "reviews/classifier"
    classifier = TextClassifier.load(experiment, "cpu")
    assert classifier.labels == ["negative", "positive"]
    folder, text = resolve_checkpoint(experiment), "bad is the colour of the red tea"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), load_tokenizer(str(folder))
    ids = tokenizer(text)["input_ids"]
    assert (tokenizer.model_max_length, len(ids) > 5) == (5, True)
    with torch.no_grad():
        torch.testing.assert_close(classifier.probabilities([text]), model(torch.tensor([ids[-5:]])).logits.softmax(1))


def test_adapters_are_merged_into_what_is_saved(tmp_path, runs):
    data, _ = runs
    flags = ["--finetune_mode=lora", "--lora_rank=2", "--lora_alpha=8", f"--model_name={save_causal(tmp_path / 'm')}"]
    experiment = run_stage("classifier", tmp_path, data, *SHORT, *flags)
    summary = json.loads((experiment / "summary.json").read_text())
    rows, right = said(experiment, lines_of(data, "validation"))
    assert summary["val/loss"] == pytest.approx(-rows.log()[range(len(right)), right].mean().item(), abs=1e-5)
    assert (resolve_checkpoint(experiment) / "adapter").is_dir()


def test_balanced_labels_change_the_first_gradient(tmp_path, runs):
    data = write_labelled(tmp_path / "toy" / "tiny")
    lines = (data / "act_train.jsonl").read_text().splitlines()
    (data / "act_train.jsonl").write_text("\n".join(x for i, x in enumerate(lines) if i % 3 == 0 or i < 6) + "\n")
    norms = []
    for flag in ("--balance=False", "--balance=True"):
        flags = [f"--model_name={save_causal(tmp_path / 'm')}", "--experiment_name", flag.replace("=", "")[2:], flag]
        experiment = run_stage("classifier", tmp_path, data, "--max_steps=1", "--log_interval=1", *flags)
        norms.append(read_metrics(experiment)["info/grad_norm"][1])
    assert norms[0] != pytest.approx(norms[1], rel=1e-3)


# Refusals: one line, and no folder


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # run() sets another

    def running(data, *flags):
        argv = [f"--data_dir={data}", f"--log_dir={tmp_path / 'runs'}", "--accelerator=cpu", "--devices=1", *flags]
        with pytest.raises(SystemExit) as caught:
            run(lambda: load_script("scripts/train_classifier.py").main(argv))
        assert caught.value.code == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert not (tmp_path / "runs").exists()
        return line.partition("error: ")[2]

    return running


def test_no_model(refused, runs):
    assert refused(runs[0]).startswith("--model_name is required: the causal model or encoder to make a classifier of")


def test_no_texts(refused, tmp_path):
    message = refused(tmp_path, f"--model_name={save_causal(tmp_path / 'm')}")
    assert message.startswith(f"no {tmp_path / 'act_train.jsonl'}; prepare the texts")


def test_a_label_of_the_test_split_that_training_has_not(refused, runs, tmp_path):
    data = shutil.copytree(runs[0], tmp_path / "data")
    with (data / "act_test.jsonl").open("a") as file:
        file.write('{"text": "what?", "label": "question"}\n')
    message = refused(data, f"--model_name={save_causal(tmp_path / 'm')}")
    assert message.startswith("the test texts have the label 'question', which no training text has (blame, neither")


def test_one_label_only(refused, runs, tmp_path):
    data = shutil.copytree(runs[0], tmp_path / "data")
    lines = [line for line in (data / "act_train.jsonl").read_text().splitlines(keepends=True) if "praise" in line]
    (data / "act_train.jsonl").write_text("".join(lines))
    message = refused(data, f"--model_name={save_causal(tmp_path / 'm')}")
    assert message.startswith("the training texts have 1 label (praise)")


def test_a_model_without_a_head_that_is_known(refused, runs, tmp_path):
    from transformers import BartConfig, BartForSequenceClassification

    config = BartConfig(
        vocab_size=100, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
        eos_token_id=2, num_labels=3,
    )  # fmt: skip
    save_causal(tmp_path / "m")
    BartForSequenceClassification(config).save_pretrained(tmp_path / "m")
    message = refused(runs[0], f"--model_name={tmp_path / 'm'}")
    assert "BartForSequenceClassification has no linear `score` head (causal models) and no `classifier`" in message


def test_a_run_without_texts_to_validate_or_test(tmp_path, runs):
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(runs[0] / "act_train.jsonl", data)
    flags = [f"--model_name={save_causal(tmp_path / 'm')}", "--validation_percentage=0", "--test_percentage=0"]
    with pytest.warns(UserWarning, match="no text for validation: nothing is validated"):
        experiment = run_stage("classifier", tmp_path, data, *SHORT, *flags)
    assert json.loads((experiment / "summary.json").read_text()) == {"steps": 3}
    assert (experiment / "best").read_text() == (experiment / "latest").read_text()
