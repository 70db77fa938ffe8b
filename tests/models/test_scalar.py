import pytest
import torch
from lightning.fabric import Fabric
from transformers import AutoModelForSequenceClassification

from rlhf_stages.args import ModelArgs
from rlhf_stages.models.loading import load_scalar, save_model
from rlhf_stages.models.scalar import end_scores, reward_scale, store_reward_scale

from helpers import ENCODERS, KINDS, make_tokenizer, right_padded, save_causal, save_classifier, save_encoder

ROWS = [[1, 5, 6, 7, 2], [1, 8, 2], [1, 9, 10, 11, 12, 13, 14, 2]]
PAD = 3


@pytest.mark.parametrize("kind", [*KINDS, *ENCODERS])
@torch.no_grad()
def test_score_of_a_text_is_the_classifiers(tmp_path, kind):
    tokenizer = make_tokenizer()
    start = (save_encoder if kind in ENCODERS else save_causal)(tmp_path / "sft", kind)
    model = load_scalar(start, tokenizer, ModelArgs(), trained_head=False).eval()
    save_model(model, tokenizer, tmp_path / "rm")
    classifier, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", output_loading_info=True)
    assert not any(info.values())
    classifier.eval()
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


@pytest.mark.parametrize("kind", ENCODERS)
@torch.no_grad()
def test_an_encoder_reads_the_whole_text_and_gives_it_one_score(tmp_path, kind):
    model = load_scalar(save_classifier(tmp_path, kind), make_tokenizer(), ModelArgs(), trained_head=True).eval()
    ids, mask = right_padded([*ROWS, [1, 99, 6, 7, 2], [1, 5, 6, 7, 98]], PAD)  # the first row with another token
    scores = model(ids, mask)
    assert scores.shape == ids.shape
    assert torch.equal(scores, end_scores(model, ids, mask)[:, None].expand(-1, ids.shape[1]))
    assert ((scores[3:, 0] - scores[0, 0]).abs() > 0.01).all()


@pytest.mark.parametrize("row", [[1, PAD, 7, PAD], [1, 2, 7, 2], [1, 1, 2, 1]])
@torch.no_grad()
def test_padding_bos_and_eos_inside_the_text_are_tokens_like_any_other(tmp_path, row):
    model = load_scalar(save_classifier(tmp_path, "gpt2"), make_tokenizer(), ModelArgs(), trained_head=True).eval()
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


@pytest.mark.parametrize("kind", ENCODERS)
def test_head_and_scores_of_an_encoder_stay_fp32_under_bf16_autocast(tmp_path, kind):
    scalar = load_scalar(save_classifier(tmp_path, kind), make_tokenizer(), ModelArgs(), trained_head=True).eval()
    head, pooled = scalar.hf.classifier, []
    head.register_forward_pre_hook(lambda module, args: pooled.append(args[0].detach()))
    ids, mask = right_padded(ROWS, PAD)
    with torch.autocast("cpu", torch.bfloat16):
        scores = end_scores(scalar, ids, mask)
        own = scalar.hf(ids, attention_mask=mask).logits[:, 0]
    assert (own.dtype, scores.dtype) == (torch.bfloat16, torch.float32)
    assert [row.dtype for row in pooled[:2]] == [torch.bfloat16 if kind == "bert" else torch.float32, torch.float32]
    with torch.no_grad():  # exactly the fp32 head of what the trunk computed in bf16
        torch.testing.assert_close(scores, head(pooled[0].float())[:, 0], rtol=0, atol=0)
    assert not torch.equal(scores, scores.bfloat16().float())
    scores.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in scalar.parameters() if p.requires_grad)


@pytest.mark.parametrize(("save", "kind"), [(save_classifier, "gpt2"), (save_classifier, "bert")])
def test_the_reward_scale_travels_with_the_model(tmp_path, save, kind):
    tokenizer = make_tokenizer()
    model = load_scalar(save(tmp_path / "a", kind), tokenizer, ModelArgs(), trained_head=True)
    with pytest.raises(ValueError, match="reward_mean None and reward_std None, so its scores cannot be standardized"):
        reward_scale(model)
    for scale in ((-1.5, 0.25), (0.0, 2.0)):  # a mean of 0 is a mean
        store_reward_scale(model, *scale)
        save_model(model, tokenizer, tmp_path / "b")
        again = load_scalar(tmp_path / "b", tokenizer, ModelArgs(), trained_head=True)
        assert reward_scale(again) == scale
    for mean, std in ((None, None), (1.0, 0.0)):  # nothing was validated; every text had the same score
        store_reward_scale(again, mean, std)
        save_model(again, tokenizer, tmp_path / "c")
        with pytest.raises(ValueError, match=rf"reward_mean {mean} and reward_std {std}"):
            reward_scale(load_scalar(tmp_path / "c", tokenizer, ModelArgs(), trained_head=True))
