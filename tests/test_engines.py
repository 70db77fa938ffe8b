"""FSDP2 on two gloo processes under torchrun, beside one process and beside DDP; DeepSpeed's files; flags."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from engine_runs import STEPS
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_stages import loop
from rlhf_stages.args import STRATEGIES, FabricArgs, ModelArgs, PPOArgs, SFTArgs
from rlhf_stages.engines import engine_of, make_fabric
from rlhf_stages.engines.deepspeed_file import check_batches, check_settings, read_deepspeed_file
from rlhf_stages.engines.fsdp import decoder_layers
from rlhf_stages.experiment import resolve_checkpoint
from rlhf_stages.models.loading import load_causal

from helpers import KINDS, ROOT, make_config, make_tokenizer, read_metrics, run_stage, save_causal, write_toy_data
from stage_losses import STAGES, three_steps

# one process makes the runs that all of these look at
pytestmark = pytest.mark.xdist_group("engines")
# clocks
TIMES = ("info/time", "info/elapsed_seconds", "info/tokens_per_seconds", "info/ppo_time", "info/rollout_time")
# the bias of attention keys, and the last one in a reward model: their gradient is rounding alone, of which Adam makes
# whole steps
ROUNDING = ("c_attn.bias", "ln_f.bias")
RUNS = ("tiny/sft", "tiny/rm", "tiny/ppo", "shared/ppo", "slots/ppo", "lora/dpo")


def torchrun(folder, *strategies, accelerator="cpu", timeout=500):
    """Let engine_runs.py do all stages and steps on two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "tests" / "engine_runs.py"), str(folder), accelerator, *strategies]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, check=False)
    assert result.returncode == 0, result.stderr[-4000:]


def write_parents(folder):
    """Data, a GPT-2 with dropout, and SFT and RM experiments that the runs start from."""
    data = write_toy_data(folder / "toy" / "tiny", held_out=7)
    model, short = save_causal(folder / "model", dropout=0.1), ["--max_steps=2", "--learning_rate=1e-3"]
    sft = run_stage("sft", folder / "parents", data, f"--model_name={model}", "--max_new_tokens=4", *short)
    run_stage("rm", folder / "parents", data, f"--sft_experiment_dir={sft}", *short)


def assert_same_runs(one, other, tolerance=1e-3):
    """Two experiments have the same metrics but for the clock, and the same weights."""
    metrics, others = read_metrics(one), read_metrics(other)
    assert metrics.keys() == others.keys()
    for name in metrics.keys() - set(TIMES):
        assert others[name] == pytest.approx(metrics[name], rel=tolerance, abs=2e-2 * tolerance), name
    weights, theirs = (load_file(resolve_checkpoint(folder) / "model.safetensors") for folder in (one, other))
    assert weights.keys() == theirs.keys()
    for name in weights:
        if not name.endswith(ROUNDING):
            torch.testing.assert_close(theirs[name], weights[name], rtol=1e-2 * tolerance, atol=2e-2 * tolerance)


# every weight is cut into pieces, however small; and comments as in the docs of OpenRL
ZERO_FILE = """
{"train_batch_size": 4, # 2 samples a device
 "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 5e7}}
"""
ENGINES = ("fsdp", "deepspeed_stage_2", "zero3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the runs start from, and every stage under DDP and FSDP."""
    folder = tmp_path_factory.mktemp("sharded")
    write_parents(folder)
    (folder / "zero3.json").write_text(ZERO_FILE)
    torchrun(folder, "ddp", "fsdp")
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, folder):
    """Every stage on two gloo processes that share weights or optimizers."""
    if request.param != "fsdp" and find_spec("deepspeed") is None:
        pytest.skip("needs the extra deepspeed")
    if request.param != "fsdp":
        torchrun(folder, str(folder / "zero3.json") if request.param == "zero3" else request.param)
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("stage", STEPS)
def test_a_sharded_step_is_that_of_one_process(folder, engine, tmp_path, stage):
    fabric = loop.start_fabric(FabricArgs(accelerator="cpu", devices="1"), seed=1)
    losses, norms, parameters = three_steps(fabric, STAGES[stage](tmp_path), [8])
    for rank in (0, 1):
        found = torch.load(folder / f"{engine}-steps-{rank}.pt", weights_only=True)[stage]
        torch.testing.assert_close(found[0], losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[1], norms, rtol=1e-5, atol=1e-6)
        for theirs, ours in zip(found[2], parameters, strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
def test_a_sharded_step_that_is_not_finite_changes_nothing(folder, engine):
    for rank in (0, 1):
        faults, changes = torch.load(folder / f"{engine}-steps-{rank}.pt", weights_only=True)["spoiled"]
        assert faults[0] == "the loss is nan"
        assert faults[1].startswith("the gradient norm is ")
        assert max(changes) == 0


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_a_sharded_run_is_that_of_ddp(folder, engine, run):
    assert_same_runs(folder / "ddp" / "toy" / run, folder / engine / "toy" / run)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["tiny/sft", "tiny/ppo"])
def test_a_sharded_run_resumes_to_the_bit(folder, engine, run):
    one, other = (folder / runs / "toy" / run for runs in (engine, f"{engine}-again"))
    names = [path.relative_to(one) for path in one.rglob("*") if path.is_file() and path.parent.name != "logs"]
    names = [name for name in names if name.name not in ("args.json", "timing.csv")]
    assert {"optimizer-0-of-2.pt", "optimizer-1-of-2.pt"} <= {name.name.removeprefix("actor_") for name in names}
    assert [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()] == []


@pytest.mark.slow
def test_a_sharded_checkpoint_is_a_plain_model_folder(folder, engine):
    runs = folder / engine / "toy"
    policy = AutoModelForCausalLM.from_pretrained(resolve_checkpoint(runs / "tiny" / "ppo"))
    assert type(policy).__name__ == "GPT2LMHeadModel"
    assert policy.config.architectures == ["GPT2LMHeadModel"]
    reward_model = AutoModelForSequenceClassification.from_pretrained(resolve_checkpoint(runs / "tiny" / "rm"))
    assert reward_model.config.reward_std > 0
    assert (resolve_checkpoint(runs / "shared" / "ppo") / "value_head.safetensors").is_file()
    assert (resolve_checkpoint(runs / "lora" / "dpo") / "adapter" / "adapter_model.safetensors").is_file()


# One process: what is divided, gathered and left out does not need a second one


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    """FSDP2 over one process."""
    before = dict(os.environ)
    fabric = loop.start_fabric(FabricArgs(accelerator="cpu", devices="1", strategy="fsdp"), seed=1)
    yield fabric
    torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def prepared(fabric, folder, kind="llama"):
    model = load_causal(save_causal(folder, kind), make_tokenizer(), ModelArgs())
    return engine_of(fabric).set_up(fabric, model, SFTArgs(), lambda module: torch.optim.Adam(module.parameters()))


def test_every_layer_is_divided_and_gathered_at_once(fsdp, tmp_path):
    from torch.distributed.tensor import DTensor

    model, _, _ = prepared(fsdp, tmp_path)
    policy = model.module
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with loop.gathered(fsdp, model), loop.gathered(fsdp, model):
            assert not any(isinstance(parameter, DTensor) for parameter in policy.parameters())
            inner = policy.model.layers[0].self_attn.q_proj.weight
            storage = inner.data_ptr()
            torch.testing.assert_close(policy(input_ids=ids).logits, expected)
            assert policy.model.layers[0].self_attn.q_proj.weight.data_ptr() == storage  # and not once a forward
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_no_slice(fsdp, tmp_path, bad):
    model, optimizer, _ = prepared(fsdp, tmp_path)
    engine, ids = engine_of(fsdp), torch.tensor([[5, 6, 7]])

    def step(factor, loss):
        fsdp.backward(model(input_ids=ids).logits.mean() * factor, model=model)
        return engine.step(fsdp, model, optimizer, loss, 1.0)

    before = engine.whole(fsdp, model)
    fine = torch.tensor(0.5)
    norm, fault = step(*((1.0, fine * torch.nan) if bad == "loss" else (torch.inf, fine)))
    assert fault is not None
    assert bad in fault
    assert [n for (n, a), b in zip(before.named_parameters(), engine.whole(fsdp, model).parameters(), strict=True)
            if not torch.equal(a, b)] == []  # fmt: skip
    norm, fault = step(1.0, fine)
    assert fault is None
    assert norm > 0
    assert not torch.equal(before.lm_head.weight, engine.whole(fsdp, model).lm_head.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_found_in_every_kind_of_model(kind):
    model = AutoModelForCausalLM.from_config(make_config(kind))
    layers = decoder_layers(model)
    assert len(layers) == 2
    of_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in of_layers]
    assert outside
    assert not any("attn" in name or "mlp" in name for name in outside)


def test_bf16_gathers_layers_in_bf16_and_heads_in_fp32(fsdp, tmp_path):
    strategy = make_fabric(FabricArgs(accelerator="cpu", devices="1", strategy="fsdp", precision="bf16-mixed")).strategy
    model = load_causal(save_causal(tmp_path, "llama"), make_tokenizer(), ModelArgs())
    strategy._shard(model, fsdp.strategy.device_mesh)
    for module in (model, *model.model.layers):
        module.unshard()
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    assert model.lm_head.weight.dtype == model.model.norm.weight.dtype == torch.float32


# Flags


def test_an_unknown_strategy_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"--strategy takes auto, ddp, fsdp, .*deepspeed_stage_3_offload or a \.json"):
        FabricArgs(strategy="dp")
    assert all(FabricArgs(strategy=name).strategy == name for name in STRATEGIES)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_2"])
def test_fp16_is_refused(strategy):
    with pytest.raises(ValueError, match="take --precision=bf16-mixed"):
        make_fabric(FabricArgs(accelerator="cpu", devices="1", strategy=strategy, precision="16-mixed"))


def test_without_deepspeed_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr("rlhf_stages.engines.deepspeed.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs DeepSpeed: pip install 'rlhf_stages\[deepspeed\]'"):
        make_fabric(FabricArgs(accelerator="cpu", devices="1", strategy="deepspeed_stage_2"))


def test_torchrun_says_how_many_processes_there_are(monkeypatch):
    started = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "6", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in {**started, "GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    strategy = make_fabric(FabricArgs(accelerator="cpu", strategy="fsdp")).strategy
    assert (strategy.num_nodes, strategy.num_processes, strategy._data_parallel_size) == (3, 2, 6)


SEED_FILE = """
{
  "train_batch_size": 32, # train_batch_size = episode_length * env_num / num_mini_batch
  "train_micro_batch_size_per_gpu": 16, # train_micro_batch_size_per_gpu = train_batch_size / num_gpu
  "steps_per_print": 10,
  "zero_optimization": {
      "stage": 2, # default to use Zero2
      "reduce_bucket_size": 5e7,
      "allgather_bucket_size": 5e7
  },
  "fp16": {"enabled": false, "loss_scale_window": 100} # whether to use fp16
}
"""


def test_a_file_as_the_docs_of_openrl_print_it_is_read(tmp_path):
    (tmp_path / "ds.json").write_text(SEED_FILE)
    config = read_deepspeed_file(str(tmp_path / "ds.json"))
    check_settings(config, "32-true", "ds.json")
    assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 5e7, "allgather_bucket_size": 5e7}
    # 32 samples of a step over 2 devices, 16 of them at a time: no accumulation
    args = PPOArgs(sft_experiment_dir="", rm_experiment_dir="", mini_batch_size=16, micro_batch_size=16)
    check_batches(config, args, devices=2)
    with pytest.raises(ValueError, match=r"train_batch_size 32, but --mini_batch_size x 4 devices is 64; change one"):
        check_batches(config, args, devices=4)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("train_micro_batch_size_per_gpu", 4, r"say train_micro_batch_size_per_gpu 4, but --micro_batch_size is 2"),
        ("gradient_accumulation_steps", 2, "but --mini_batch_size / --micro_batch_size is 4"),
        ("gradient_clipping", 0.5, r"but --gradient_clip_val is 1\.0"),
    ],
)
def test_batches_that_contradict_the_flags_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        check_batches({name: value}, SFTArgs(mini_batch_size=8, micro_batch_size=2), devices=2)
    # 8 a device, 2 at a time: 4 accumulated, 16 over both
    right = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "train_batch_size": 16}
    check_batches(right, SFTArgs(mini_batch_size=8, micro_batch_size=2), devices=2)


ZERO2 = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("settings", "precision", "message"),
    [
        ({**ZERO2, "optimizer": {"type": "Adam"}}, "32-true", "take 'optimizer' out; it is set by --optimizer"),
        ({**ZERO2, "scheduler": {}}, "32-true", "take 'scheduler' out; it is set by --lr_warmup_steps"),
        (
            {**ZERO2, "fp16": {"enabled": True}},
            "32-true",
            "switches fp16 on, but --precision=32-true; pass",
        ),
        ({**ZERO2, "bf16": {"enabled": True}}, "32-true", "switches bf16 on, .* pass --precision=bf16-mixed"),
        ({"zero_optimization": {"stage": 0}}, "32-true", "stage is 0, expected 1, 2 or 3; .*--strategy=ddp"),
        ({}, "32-true", "stage is 0, expected"),
    ],
)
def test_settings_that_flags_decide_are_refused(settings, precision, message):
    with pytest.raises(ValueError, match=message):
        check_settings(settings, precision, "ds.json")
    check_settings({**ZERO2, "bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bf16-mixed", "ds.json")


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": nope}'])
def test_a_file_that_is_no_object_of_settings_is_named(tmp_path, text):
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ValueError, match=r"--strategy=.*ds\.json"):
        read_deepspeed_file(str(tmp_path / "ds.json"))


def test_auto_and_a_hash_within_a_text(tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": "auto", "x": "a # b" # c\n}')
    assert read_deepspeed_file(str(tmp_path / "ds.json")) == {"x": "a # b"}


def test_one_device_divides_nothing():
    fabric = loop.start_fabric(FabricArgs(accelerator="cpu", devices="1"), seed=1)
    layer = fabric.setup_module(nn.Linear(2, 1))
    assert not engine_of(fabric).divides_optimizer
    with loop.gathered(fabric, layer):
        assert layer(torch.ones(2)).shape == (1,)
