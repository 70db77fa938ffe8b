import pytest
import torch
from lightning.fabric import Fabric

from rlhf_stages.args import ModelArgs
from rlhf_stages.models.actor_critic import ActorCritic, policy_of
from rlhf_stages.models.forward import check_context, logits_at
from rlhf_stages.models.loading import load_causal, load_critic, prepare_training

from helpers import KINDS, make_tokenizer, right_padded, save_causal, save_classifier, shake_adapters

IDS, MASK = right_padded([[1, 5, 6, 7, 8, 2], [1, 9, 2]], 3)
PLACES = torch.tensor([[2, 3, 4], [0, 1, 1]])


def shared(folder, kind="gpt2", lora=False):
    args = ModelArgs(finetune_mode="lora") if lora else ModelArgs()
    hf = prepare_training(load_causal(save_causal(folder, kind), make_tokenizer(), args), args)
    return ActorCritic(shake_adapters(hf) if lora else hf).eval()


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_one_pass_gives_the_logits_of_the_policy_and_a_value_of_the_same_state(tmp_path, kind, lora):
    model = shared(tmp_path, kind, lora)
    logits, values = model(IDS, MASK, PLACES)
    torch.testing.assert_close(logits, logits_at(model.hf, IDS, MASK, PLACES))
    assert not values.any()  # the head starts at 0
    model.value_head.weight.normal_()
    hidden = []
    head = model.hf.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    model.hf(input_ids=IDS, attention_mask=MASK)
    head.remove()
    _, values = model(IDS, MASK, PLACES)
    for row in range(2):
        for place in range(3):
            expected = hidden[0][row, PLACES[row, place]] @ model.value_head.weight[0]
            assert values[row, place].item() == pytest.approx(expected.item(), abs=1e-5)


def test_the_value_trains_head_and_trunk_and_leaves_no_hook(tmp_path):
    model = shared(tmp_path)
    torch.nn.init.normal_(model.value_head.weight)
    _, values = model(IDS, MASK, PLACES)
    values.sum().backward()
    assert model.value_head.weight.grad.abs().sum() > 0
    assert model.hf.transformer.h[0].mlp.c_fc.weight.grad.abs().sum() > 0
    output = model.hf.get_output_embeddings()
    assert not output._forward_hooks
    assert not output._forward_pre_hooks


def test_values_are_fp32_under_autocast(tmp_path):
    model = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed").setup_module(shared(tmp_path))
    assert model(IDS, MASK, PLACES)[1].dtype == torch.float32


def test_the_policy_inside(tmp_path):
    model = shared(tmp_path)
    wrapped = Fabric(accelerator="cpu", devices=1).setup_module(model)
    assert policy_of(wrapped) is policy_of(model) is model.hf
    assert policy_of(model.hf) is model.hf


@torch.no_grad()
def test_a_critic_from_the_actor_says_nothing_at_first(tmp_path):
    critic = load_critic(save_causal(tmp_path / "sft"), make_tokenizer(), ModelArgs(), trained_head=False)
    assert not critic(IDS, MASK).any()
    critic = load_critic(save_classifier(tmp_path / "rm"), make_tokenizer(), ModelArgs(), trained_head=True)
    assert critic(IDS, MASK).abs().max() > 0.1


def test_texts_longer_than_the_positions_are_refused(tmp_path):
    model = shared(tmp_path).hf  # 64 positions
    check_context(model, 64)
    with pytest.raises(ValueError, match="take up to 65 tokens, and the model has positions for 64; lower --max_new"):
        check_context(model, 65)
