import json
import math

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_stages.args import ModelArgs
from rlhf_stages.data.tokenizer import load_tokenizer
from rlhf_stages.models import classifier as module
from rlhf_stages.models.classifier import TextClassifier, max_tokens, new_classifier
from rlhf_stages.models.loading import save_model

from helpers import ENCODERS, KINDS, make_tokenizer, right_padded, save_causal, save_classifier, save_encoder

LABELS = ["inform", "question", "directive"]
NAMES = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
TEXTS = ["the bike is good.", "so so", "name the colour of the tea. the tea is bad and pink.", "?", "bad"]


def bracketed():
    """A tokenizer that puts BOS and EOS around a text, as an encoder's puts [CLS] and [SEP]."""
    tokenizer = make_tokenizer()
    special = [("<s>", 1), ("</s>", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    return tokenizer


def saved(folder, kind, **changes):
    tokenizer = bracketed() if kind in ENCODERS else make_tokenizer()
    return save_classifier(folder, kind, tokenizer=tokenizer, **{**NAMES, "num_labels": 3, **changes})


def read_alone(folder, text):
    """Probabilities of one text without padding, as transformers gives them."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model.eval()(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits.softmax(1)[0]


@pytest.mark.parametrize("kind", [*KINDS, *ENCODERS])
def test_probabilities_are_those_of_each_text_alone_in_transformers(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(module, "BATCH_SIZE", 2)  # five texts: three batches, one of a single text
    classifier = TextClassifier.load(saved(tmp_path, kind), "cpu")
    assert classifier.labels == LABELS
    found = classifier.probabilities(TEXTS)
    assert (found.shape, found.dtype) == ((5, 3), torch.float32)
    torch.testing.assert_close(found, torch.stack([read_alone(tmp_path, t) for t in TEXTS]), rtol=0, atol=1e-5)
    assert found.std(0).max() > 0.05  # the rows do differ
    assert classifier.probabilities([]).shape == (0, 3)


@pytest.mark.parametrize("kind", [*KINDS, *ENCODERS])
@torch.no_grad()
def test_neither_padding_nor_what_stands_in_it_changes_a_row(tmp_path, kind):
    """The last two rows end in the padding id and in EOS: tokens like any other."""
    model = new_classifier(saved(tmp_path, kind), load_tokenizer(str(tmp_path)), ModelArgs(), LABELS).eval()
    rows = [[1, 5, 6, 7, 2], [1, 8, 2], [1, 9, 10, 11, 12, 13, 14, 2], [1, 7, 2, 2]]
    rows += [[1, 7, 3]] if kind in KINDS else []  # RoBERTa has no position for its padding id
    ids, mask = right_padded(rows, 3)
    logits = model(ids, mask)
    for row, line in zip(rows, logits, strict=True):
        alone = model(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.bool))[0]
        torch.testing.assert_close(line, alone, rtol=0, atol=2e-5)
    if kind in KINDS:  # of a causal model no weight ever touches what comes later
        assert torch.equal(model(torch.where(mask, ids, 50), mask), logits)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "roberta"])
def test_a_long_text_loses_its_beginning(tmp_path, kind):
    """64 positions: GPT-2 reads 64 tokens; BERT 62 and its two own; RoBERTa counts from 4, and reads 60 in all."""
    classifier = TextClassifier.load(saved(tmp_path, kind), "cpu")
    long = " ".join(["the bike is good and red."] * 30)
    ids = load_tokenizer(str(tmp_path))(long, add_special_tokens=False)["input_ids"]
    kept = {"gpt2": ids[-64:], "bert": [1, *ids[-62:], 2], "roberta": [1, *ids[-58:], 2]}[kind]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = model(torch.tensor([kept])).logits.softmax(1)
    torch.testing.assert_close(classifier.probabilities([long]), expected, rtol=0, atol=1e-5)


def test_the_tokenizers_own_limit_counts(tmp_path):
    tokenizer = make_tokenizer(model_max_length=7)
    model = new_classifier(saved(tmp_path, "llama"), tokenizer, ModelArgs(), LABELS)
    assert max_tokens(model, tokenizer) == 7


def test_special_tokens_in_a_text_and_empty_texts(tmp_path):
    classifier = TextClassifier.load(saved(tmp_path, "gpt2"), "cpu")
    spelled, end, empty = classifier.probabilities(["bad</s>", "bad", ""])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(empty, model(torch.tensor([[2]])).logits.softmax(1)[0], rtol=0, atol=1e-6)
    assert not torch.allclose(spelled, read_alone(tmp_path, "bad</s>"))  # which reads an EOS there
    torch.testing.assert_close(end, read_alone(tmp_path, "bad"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_tokenizer_without_padding_gets_a_row_for_it(tmp_path, kind):
    """As GPT-2's, where padding would be EOS; the embedding has 100 rows for 100 tokens."""
    folder = saved(tmp_path, kind)
    make_tokenizer(pad_token=None, unk_token=None).save_pretrained(folder)
    found = TextClassifier.load(folder, "cpu").probabilities(TEXTS)
    torch.testing.assert_close(found, torch.stack([read_alone(folder, t) for t in TEXTS]), rtol=0, atol=1e-5)


def test_labels_without_names(tmp_path):
    save_classifier(tmp_path, "bert", num_labels=4)
    assert TextClassifier.load(tmp_path, "cpu").labels == ["LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3"]


def test_an_experiment_means_its_latest_checkpoint(tmp_path):
    step = tmp_path / "checkpoints" / "step-000004"
    saved(step, "gpt2")
    (tmp_path / "args.json").write_text('{"stage": "classifier"}')
    with pytest.raises(FileNotFoundError, match="no finished checkpoint yet"):
        TextClassifier.load(tmp_path, "cpu")
    (tmp_path / "latest").write_text("step-000004\n")
    one, other = (TextClassifier.load(path, "cpu").probabilities(TEXTS) for path in (tmp_path, step))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("save", "changes", "reason"),
    [
        (save_causal, {}, r"has no trained head \(score.weight\), so it is no classifier"),
        (save_encoder, {}, r"has no trained head \(.*\), so it is no classifier"),
        (save_classifier, {}, r"gives each text a number and no label \(num_labels 1"),
        (save_classifier, {"num_labels": 3, "problem_type": "regression"}, "a number and no label"),
        (
            save_classifier,
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            "any number of labels .* expected exactly one",
        ),
    ],
)
def test_what_is_no_classifier(tmp_path, save, changes, reason):
    save(tmp_path, "bert" if save is save_encoder else "gpt2", **changes)
    with pytest.raises(ValueError, match=reason):
        TextClassifier.load(tmp_path, "cpu")


@pytest.mark.parametrize("kind", [*KINDS, *ENCODERS])
def test_a_new_classifier_knows_its_labels_and_nothing_else(tmp_path, kind):
    tokenizer = make_tokenizer()
    start = (save_encoder if kind in ENCODERS else save_causal)(tmp_path / "start", kind, tokenizer=tokenizer)
    model = new_classifier(start, tokenizer, ModelArgs(), LABELS)
    logits = model(*right_padded([[5, 6, 7], [8]], 3))
    assert logits.shape == (2, 3)
    if kind in KINDS:
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 2]))
        assert loss.item() == pytest.approx(math.log(3), abs=1e-6)
    save_model(model, tokenizer, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["id2label"] == {"0": "inform", "1": "question", "2": "directive"}
    assert config["label2id"] == {"inform": 0, "question": 1, "directive": 2}
    assert TextClassifier.load(tmp_path / "saved", "cpu").labels == LABELS


def test_a_classifier_of_as_many_labels_goes_on_with_its_head(tmp_path):
    tokenizer = make_tokenizer()
    saved(tmp_path, "llama")
    model = new_classifier(tmp_path, tokenizer, ModelArgs(), ["a", "b", "c"])
    assert model.hf.score.weight.abs().max() > 0.1
    with pytest.raises(ValueError, match=r"weights .* have another shape .* 'score.weight'"):
        new_classifier(tmp_path, tokenizer, ModelArgs(), ["a", "b"])


@torch.no_grad()
def test_logits_stay_fp32_under_bf16_autocast(tmp_path):
    model = new_classifier(saved(tmp_path, "llama"), make_tokenizer(), ModelArgs(), LABELS).eval()
    hidden = []
    model.hf.model.register_forward_hook(lambda module, args, output: hidden.append(output.last_hidden_state))
    ids, mask = right_padded([[5, 6, 7], [8]], 3)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, mask)
    ends = torch.stack([hidden[0][0, 2], hidden[0][1, 0]])
    torch.testing.assert_close(logits, ends.float() @ model.hf.score.weight.T, rtol=1e-6, atol=1e-6)
    assert not torch.equal(logits, logits.bfloat16().float())
