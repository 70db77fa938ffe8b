"""The documented commands, with the script's path changed, on local data and a tiny model."""

import shlex
import sys

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from rlhf_stages.data.shards import open_shard
from rlhf_stages.experiment import resolve_checkpoint

from helpers import load_script, read_metrics

pytestmark = pytest.mark.slow

HELPFUL_HARMLESS = """
data_prep/helpful_harmless/prepare_data.py
    --destination_dir=data/rlhf-helpful_harmless/mini-opt
    --tokenizer_name=facebook/opt-350m
    --max_length=256
    --max_prompt_length=128
    --remove_same_inputs=True
    --remove_same_responses=True
    --shuffle=True
    --validation_percentage=0.1
    --stage={stage}
"""
SUMMARIZATION = """
data_prep/summarization/prepare_data.py
    --destination_dir=data/rlhf-summarization/mini-opt
    --tokenizer_name=facebook/opt-350m
    --max_length=384
    --max_prompt_length=256
    --remove_same_inputs=False
    --remove_same_responses=True
    --shuffle=True
    --validation_percentage=0.1
    --stage={stage}
"""
SFT = """
scripts/rlhf_sft.py
    --data_dir=data/rlhf-helpful_harmless/mini-opt
    --model_name=facebook/opt-350m
    --learning_rate=1e-5
    --epochs=1
    --lr_warmup_steps=200
    --micro_batch_size=8
    --mini_batch_size=8
    --save_interval=1000
    --eval_iters=100
    --disable_dropout=False
    --finetune_mode=all
    --use_targets=False
"""
RM = """
scripts/rlhf_rm.py
    --data_dir=data/rlhf-helpful_harmless/mini-opt
    --model_name=facebook/opt-350m
    --learning_rate=1e-5
    --loss_type=per_sample
    --epochs=1
    --lr_warmup_steps=200
    --micro_batch_size=8
    --mini_batch_size=8
    --save_interval=1000
    --eval_iters=100
    --disable_dropout=False
    --finetune_mode=all
"""
PPO = """
scripts/rlhf_ppo.py
    --data_dir=data/rlhf-helpful_harmless/mini-opt
    --model_name=facebook/opt-350m
    --epochs=1
    --micro_batch_size=4
    --mini_batch_size=8
    --rollout_size=16
    --rollout_mini_batch_size=4
    --save_interval=500
    --eval_interval=50
    --eval_iters=100
    --disable_dropout=True
    --finetune_mode=all
    --sft_experiment_dir=<sft-dir>
    --rm_experiment_dir=<rm-dir>
    --actor_learning_rate=1e-6
    --critic_learning_rate=1e-6
    --ppo_epochs=1
    --init_kl_coeff=0.02
"""
FAST = "--max_steps=2 --log_interval=1 --accelerator=cpu --devices=1"


@pytest.fixture
def run(shared_data, tmp_path, monkeypatch):
    """Runs a block of flags as typed in an empty folder, with the model's name replaced."""
    monkeypatch.chdir(tmp_path)

    def running(block, more, model=shared_data / "models" / "stories260K", **parents):
        block = block.replace("facebook/opt-350m", str(model))
        for name, folder in parents.items():
            block = block.replace(f"<{name}-dir>", str(folder))
        script, *argv = shlex.split(f"{block} {more}")
        monkeypatch.setattr(sys, "argv", [script, *argv])
        return load_script(script).main()

    return running


def prepare(run, block, source, **changes):
    for stage in ("finetune", "preference"):
        run(block.format(stage=stage), f"--source={source} --num_samples=40 --num_workers=1", **changes)


def test_helpful_harmless_from_raw_data_to_ppo(run, shared_data, tmp_path):
    prepare(run, HELPFUL_HARMLESS, shared_data / "hh-rlhf" / "helpful-base" / "test.jsonl.gz")
    data = tmp_path / "data" / "rlhf-helpful_harmless" / "mini-opt"
    shards = {path.stem: open_shard(path) for path in data.glob("*_*.pt") if path.stem != "example_prompt"}
    assert set(shards) == {
        f"{stage}_{split}" for stage in ("finetune", "preference") for split in ("train", "validation", "test")
    }
    assert all(0 < len(shard) <= 40 for shard in shards.values())

    sft = run(SFT, f"{FAST} --max_new_tokens=8")
    assert sft.resolve() == tmp_path / "experiments" / "helpful_harmless" / "mini-opt" / "sft"
    rm = run(RM, FAST)
    ppo = run(PPO, f"{FAST} --max_new_tokens=8 --eval_iters=1", sft=sft, rm=rm)
    for folder in (sft, rm, ppo):
        assert resolve_checkpoint(folder).name == "step-000002"
    assert set(read_metrics(ppo)["info/kl_coeff"].values()) == {0.02}
    assert abs(read_metrics(ppo)["val/kl_sequence"][0]) < 1e-6


def test_summarization_is_prepared(run, shared_data, tmp_path):
    source = shared_data / "tldr_comparisons" / "comparisons.jsonl"
    # a tokenizer with words for these posts: spelled in the tiny model's 512 tokens they are longer than 256
    backend = ByteLevelBPETokenizer()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    texts = source.read_text(encoding="utf-8").splitlines()
    backend.train_from_iterator(texts, vocab_size=8000, min_frequency=1, special_tokens=[*special.values()])
    PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer, **special).save_pretrained(tmp_path / "words")
    prepare(run, SUMMARIZATION, source, model=tmp_path / "words")
    data = tmp_path / "data" / "rlhf-summarization" / "mini-opt"
    assert len(open_shard(data / "finetune_train.pt", responses=1)) > 0
    assert len(open_shard(data / "preference_train.pt", responses=2)) > 0
