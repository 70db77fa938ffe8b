"""What the flags about memory save, measured on a GPU."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from lightning.fabric import Fabric

from rlhf_stages import loop
from rlhf_stages.args import FrozenArgs, ModelArgs, PPOArgs, TrainArgs
from rlhf_stages.experiment import resolve_checkpoint
from rlhf_stages.models.forward import text_logits
from rlhf_stages.models.frozen import freeze, load_reference
from rlhf_stages.models.loading import load_causal, load_scalar, prepare_training
from rlhf_stages.models.sharing import Backbone
from rlhf_stages.models.start import start_actor, start_critic
from rlhf_stages.optim import set_up

from helpers import make_tokenizer, read_metrics, run_stage, save_causal

pytestmark = pytest.mark.gpu

# 16 MiB per layer and 0.1 MiB of embeddings: enough for the granularity of the allocator not to matter
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
MIB = 2**20


@pytest.fixture(autouse=True)
def _empty():
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def cuda():
    return torch.device("cuda")


def model_folder(tmp_path):
    return save_causal(tmp_path / "model", "llama", initializer_range=0.02, **SIZES)


def weight_bytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def on_device(model):
    return {p.device.type for p in model.parameters()}


def texts(device, batch=4, length=48):
    ids = torch.randint(4, 100, (batch, length), device=device)
    return ids, torch.ones_like(ids, dtype=torch.bool)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@torch.no_grad()
def test_offloaded_weights_are_on_the_device_only_while_they_read(tmp_path, cuda, dtype):
    before = torch.cuda.memory_allocated()
    folder, batch = model_folder(tmp_path), texts(cuda)
    args = FrozenArgs(frozen_dtype=dtype)
    resident = freeze(load_causal(folder, make_tokenizer(), ModelArgs()), cuda, args)
    expected, size = text_logits(resident, *batch).clone(), weight_bytes(resident)
    assert size / (4 if dtype == "fp32" else 2) == sum(p.numel() for p in resident.parameters())
    assert torch.cuda.memory_allocated() - before > size
    del resident

    base = torch.cuda.memory_allocated()
    model = freeze(load_causal(folder, make_tokenizer(), ModelArgs()), cuda, replace(args, offload_frozen=True))
    assert all(p.data.is_pinned() for p in model.parameters())
    assert torch.cuda.memory_allocated() - base < MIB  # buffers
    inside = []
    hook = model.lm_head.register_forward_hook(lambda *_: inside.append(torch.cuda.memory_allocated() - base))
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        found = text_logits(model, *batch)
        assert torch.equal(found, expected)
        assert inside.pop() > size
        assert on_device(model) == {"cpu"}
        del found
        assert torch.cuda.memory_allocated() - base < MIB
    hook.remove()


def test_offloaded_weights_leave_after_an_error(tmp_path, cuda):
    folder, batch = model_folder(tmp_path), texts(cuda)
    base = torch.cuda.memory_allocated()
    model = freeze(load_causal(folder, make_tokenizer(), ModelArgs()), cuda, FrozenArgs(offload_frozen=True))

    def fail(*_):
        assert on_device(model) == {"cuda"}
        raise RuntimeError("no more memory")

    model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no more memory"), torch.no_grad():
        text_logits(model, *batch)
    assert torch.cuda.memory_allocated() - base < MIB


@pytest.mark.parametrize("mode", ["all", "lora"])
def test_gradient_checkpointing_keeps_less_for_the_backward_pass(tmp_path, cuda, mode):
    folder, batch = model_folder(tmp_path), texts(cuda, batch=32)
    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    held, gradients = [], []
    for checkpointing in (False, True):
        args = ModelArgs(finetune_mode=mode, gradient_checkpointing=checkpointing)
        torch.manual_seed(0)
        model = fabric.setup_module(prepare_training(load_causal(folder, make_tokenizer(), args), args)).train()
        before = torch.cuda.memory_allocated()
        loss = text_logits(model, *batch).float().square().mean()
        held.append(torch.cuda.memory_allocated() - before)
        fabric.backward(loss)
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        del model, loss
    assert held[1] < held[0] / 3
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-5)


@torch.no_grad()
def test_on_one_backbone_a_critic_and_a_reference_cost_adapters_alone(tmp_path, cuda):
    args, start = ModelArgs(finetune_mode="lora", disable_dropout=True), model_folder(tmp_path)
    ppo = PPOArgs(sft_experiment_dir="sft", reward=["length"], share_backbone="critic")
    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    before = torch.cuda.memory_allocated()
    actor = fabric.setup_module(start_actor(start, make_tokenizer(), ppo, args, longest=8))
    one = torch.cuda.memory_allocated() - before
    reference = load_reference(actor, start, make_tokenizer(), ppo, args, None)
    critic = start_critic(start, None, make_tokenizer(), ppo, args, 8, Backbone(actor.module, start))
    critic = fabric.setup_module(critic)
    assert torch.cuda.memory_allocated() - before - one < 2 * MIB
    batch = texts(cuda)
    assert text_logits(reference, *batch).isfinite().all()
    assert critic(*batch).isfinite().all()
    separate = load_scalar(start, make_tokenizer(), args, trained_head=False).to(cuda)
    assert torch.cuda.memory_allocated() - before - one > weight_bytes(separate) / 2


needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the extra memory")


def trained(folder, precision, optimizer="AdamW", steps=3):
    """A model after some steps with its gradient clipped, and its optimizer."""
    fabric = Fabric(accelerator="cuda", devices=1, precision=precision)
    model = load_causal(folder, make_tokenizer(), ModelArgs())
    args = TrainArgs(optimizer=optimizer)
    model, optimizer, _ = set_up(fabric, model, args, (1e-3, "constant", 0), steps)
    torch.manual_seed(0)
    batches = [texts(fabric.device) for _ in range(steps)]

    def loss_sum(batch):
        return text_logits(model, *batch).float().logsumexp(-1).sum()

    for batch in batches:
        done = loop.update(fabric, model, optimizer, [batch], loss_sum, lambda b: b[1].sum(), clip=0.1)
        assert done.fault is None
        assert done.norm > 0.1
    return model, optimizer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_adamw_is_fused_where_the_gradient_can_be_clipped(tmp_path, monkeypatch, precision):
    folder = model_folder(tmp_path)
    model, optimizer = trained(folder, precision)
    assert {group["fused"] for group in optimizer.param_groups} == {None if precision == "16-mixed" else True}
    monkeypatch.setattr("rlhf_stages.optim.can_fuse", lambda fabric: False)
    plain, _ = trained(folder, precision)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 if precision == "bf16-mixed" else 1e-4)


@needs_bitsandbytes
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_eight_bit_moments_take_a_quarter(tmp_path, precision):
    folder = model_folder(tmp_path)
    model, optimizer = trained(folder, precision, "AdamW8bit")
    sizes = sum(
        v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)
    )
    # 2 bytes a weight and 2 x 4 bytes per block of 256, against 8; norms stay fp32
    assert sizes / sum(p.numel() for p in model.parameters()) < 2.2
    plain, _ = trained(folder, precision)
    moved = load_causal(folder, make_tokenizer(), ModelArgs()).to("cuda")
    for found, expected, start in zip(model.parameters(), plain.parameters(), moved.parameters(), strict=True):
        if found.dim() == 2:
            assert (found - expected).norm() < 0.2 * (expected - start).norm()


@needs_bitsandbytes
@pytest.mark.parametrize("bits", [4, 8])
def test_stages_with_quantized_weights(tiny_run, tmp_path, bits):
    flags = [
        "--accelerator=cuda", "--precision=bf16-mixed", "--finetune_mode=lora", f"--load_in_{bits}bit",
        "--max_new_tokens=4", "--log_interval=1", "--max_steps=2",
    ]  # fmt: skip
    learning = ["--learning_rate=1e-2", "--lr_warmup_steps=0"]
    sft = run_stage("sft", tmp_path, tiny_run.data, f"--model_name={tiny_run.model}", *flags, *learning)
    assert read_metrics(sft)["val/loss"][2] < read_metrics(sft)["val/loss"][0]
    # what was saved is what was validated, up to the rounding of bf16, and needs no bitsandbytes
    plain = [*flags[:2], "--max_new_tokens=4", "--max_steps=1", "--learning_rate=0", "--lr_warmup_steps=0"]
    again = run_stage("sft", tmp_path / "again", tiny_run.data, f"--model_name={resolve_checkpoint(sft)}", *plain)
    assert read_metrics(again)["val/loss"][0] == pytest.approx(read_metrics(sft)["val/loss"][2], rel=0.02)
    parents = [f"--sft_experiment_dir={sft}", f"--rm_experiment_dir={tiny_run.rm}"]
    sizes = ["--rollout_size=8", "--rollout_mini_batch_size=8", "--mini_batch_size=8", "--save_interval=1"]
    ppo = [*parents, *flags, *sizes, "--actor_learning_rate=1e-2", "--gradient_checkpointing"]
    experiment = run_stage("ppo", tmp_path, tiny_run.data, *ppo)
    assert abs(read_metrics(experiment)["train/kl_div_mean"][2]) > 0
    assert load_causal(resolve_checkpoint(experiment), make_tokenizer(), ModelArgs()).dtype == torch.float32
    (experiment / "summary.json").unlink()
    run_stage("ppo", tmp_path, tiny_run.data, *ppo, "--resume=1")
