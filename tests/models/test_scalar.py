import pytest
import torch
from lightning.fabric import Fabric
from transformers import AutoModelForSequenceClassification

from rlhf_stages.args import ModelArgs
from rlhf_stages.models.loading import load_scalar, save_model
from rlhf_stages.models.scalar import end_scores

from helpers import KINDS, make_tokenizer, right_padded, save_causal, save_classifier

ROWS = [[1, 5, 6, 7, 2], [1, 8, 2], [1, 9, 10, 11, 12, 13, 14, 2]]
PAD = 3


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_score_at_the_last_token_is_the_classifiers(tmp_path, kind):
    tokenizer = make_tokenizer()
    model = load_scalar(save_causal(tmp_path / "sft", kind), tokenizer, ModelArgs(), trained_head=False).eval()
    save_model(model, tokenizer, tmp_path / "rm")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    singles = torch.cat([classifier(torch.tensor([row])).logits[:, 0] for row in ROWS])
    ids, mask = right_padded(ROWS, PAD)
    torch.testing.assert_close(end_scores(model, ids, mask), singles, rtol=0, atol=2e-5)
    assert singles.std() > 0.1  # the rows do differ


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_score_of_a_padded_row_is_that_of_the_row_alone(tmp_path, kind):
    model = load_scalar(save_classifier(tmp_path, kind), make_tokenizer(), ModelArgs(), trained_head=True).eval()
    ids, mask = right_padded(ROWS, PAD)
    scores = model(ids, mask)
    assert scores.shape == ids.shape
    for row, line, counts in zip(ROWS, scores, mask, strict=True):
        alone = model(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.bool))[0]
        torch.testing.assert_close(line[counts], alone, rtol=0, atol=2e-5)


@torch.no_grad()
def test_a_padding_id_inside_the_text_is_a_token_like_any_other(tmp_path):
    model = load_scalar(save_classifier(tmp_path, "gpt2"), make_tokenizer(), ModelArgs(), trained_head=True).eval()
    row = [1, PAD, 7, PAD]
    ids, mask = right_padded([row, [1, 5, 6, 7, 8, 9]], PAD)
    alone = model(torch.tensor([row]), torch.ones(1, 4, dtype=torch.bool))[0, 3]
    torch.testing.assert_close(end_scores(model, ids, mask)[0], alone, rtol=0, atol=2e-5)


@torch.no_grad()
def test_head_and_scores_stay_fp32_under_bf16_autocast(tmp_path):
    scalar = load_scalar(save_classifier(tmp_path, "llama"), make_tokenizer(), ModelArgs(), trained_head=True).eval()
    hidden = []
    scalar.hf.model.register_forward_hook(lambda module, args, output: hidden.append(output.last_hidden_state))
    seen = []
    scalar.hf.score.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = fabric.setup_module(scalar)
    ids, mask = right_padded(ROWS, PAD)
    scores = model(ids, mask)
    assert scores.dtype == scalar.hf.score.weight.dtype == torch.float32
    assert seen == [torch.float32]
    # exactly the fp32 product of the (bf16-computed) hidden states: no rounding of the score to bf16
    torch.testing.assert_close(scores, hidden[0].float() @ scalar.hf.score.weight[0], rtol=1e-6, atol=1e-6)
    assert not torch.equal(scores, scores.bfloat16().float())
