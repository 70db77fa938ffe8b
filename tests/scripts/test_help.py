import re
import subprocess
import sys
import time

import pytest

from helpers import ROOT

SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in (
        "scripts/*.py",
        "data_prep/*/prepare_data.py",
        "data_prep/*/make_model.py",
        "data_prep/*/demo.py",
        "examples/**/*.py",
    )
    for path in ROOT.glob(pattern)
    if path.read_text(encoding="utf-8").startswith("#!")
)
SECONDS = 3.0

TRAINING = {
    "experiment_name": "None", "log_dir": "experiments", "data_dir": "data", "seed": "42", "epochs": "1",
    "save_interval": "500", "eval_interval": "100", "log_interval": "5", "num_workers": "0",
    "mini_batch_size": "4", "micro_batch_size": "4", "gradient_clip_val": "1.0", "weight_decay": "0.0",
    "optimizer": "AdamW", "optimizer_eps": "1e-06", "optimizer_beta1": "0.9", "optimizer_beta2": "0.95",
}  # fmt: skip
MODEL = {
    "model_name": "None", "trust_remote_code": "False", "load_in_8bit": "False", "disable_dropout": "False",
    "finetune_mode": "all", "lora_targets": "None", "lora_rank": "8", "lora_alpha": "1.0", "lora_dropout": "0.0",
}  # fmt: skip
GENERATION = {
    "max_new_tokens": "128", "num_beams": "1", "do_sample": "True", "top_k": "50", "top_p": "1.0", "temperature": "1.0",
    "num_return_sequences": "1",
}  # fmt: skip
LEARNING = {"learning_rate": "0.0001", "lr_warmup_steps": "100"}
FABRIC = {
    "accelerator": "auto", "devices": "auto", "num_nodes": "1", "strategy": "auto", "precision": "32-true"
}  # fmt: skip
PREPARE = {
    "destination_dir": "required", "tokenizer_name": "required", "stage": "finetune", "max_length": "512",
    "max_prompt_length": "256", "num_samples": "None", "mask_prompt": "True", "ignore_index": "-1",
    "remove_same_responses": "True", "remove_same_inputs": "True", "minimum_response_length": "2",
    "save_skipped_examples": "False", "shuffle": "True", "seed": "42", "validation_percentage": "0.1",
}  # fmt: skip
FLAGS = {
    "scripts/rlhf_sft.py": {
        **TRAINING, **MODEL, **GENERATION, **FABRIC, **LEARNING,
        "eval_iters": "None", "label_smoothing": "0.0", "use_targets": "False",
    },
    "scripts/rlhf_rm.py": {
        **TRAINING, **MODEL, **FABRIC, **LEARNING,
        "eval_iters": "None", "loss_type": "per_sample", "sft_experiment_dir": "None",
    },
    "scripts/rlhf_ppo.py": {
        **TRAINING, **MODEL, **GENERATION, **FABRIC, "eval_iters": "4", "top_k": "0",
        "rollout_size": "128", "rollout_mini_batch_size": "32", "ppo_epochs": "1", "normalize_rewards": "True",
        "normalize_advantages": "True", "adaptive_kl_coeff": "False", "clip_rewards": "True",
        "reward_clip_value": "5.0", "init_kl_coeff": "0.1", "target_kl_coeff": "0.1", "clip_coeff": "0.2",
        "vf_coeff": "0.1", "gae_gamma": "1.0", "gae_lambd": "0.95", "sft_experiment_dir": "required",
        "rm_experiment_dir": "None", "actor_learning_rate": "1e-06", "critic_learning_rate": "1e-06",
    },
    "scripts/rlhf_dpo.py": {
        **TRAINING, **MODEL, **GENERATION, **FABRIC, "eval_iters": "None", "sft_experiment_dir": "None",
        "learning_rate": "1e-06", "lr_warmup_steps": "150", "beta": "0.1", "reference_free": "False",
        "label_smoothing": "0.0", "use_masked_targets": "True",
    },
    "scripts/train_classifier.py": {
        **TRAINING, **MODEL, **FABRIC, "source": "None", "label_kind": "act", "text_column": "text",
        "label_column": "label", "labels": "None", "columns": "None", "split_column": "None", "max_length": "256",
        "balance": "False", "validation_percentage": "0.1", "test_percentage": "0.1", "learning_rate": "3e-05",
        "lr_warmup_steps": "100",
    },
    "data_prep/helpful_harmless/prepare_data.py": PREPARE,
    "data_prep/summarization/prepare_data.py": PREPARE,
}  # fmt: skip
LEFT_OUT = {
    "embedding_dim_name", "transformer_name", "casual", "use_cache", "freeze_transformer", "low_cpu_mem_usage"
}  # fmt: skip


def help_of(script):
    """The help text, and the seconds it took."""
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True, check=False, timeout=60
    )
    seconds = time.perf_counter() - start
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout, seconds


def entries(text):
    """{flag: (meaning, default)} of an argparse help text."""
    blocks = re.split(r"\n  (?=--\w)", text)[1:]
    found = {}
    for block in blocks:
        block = " ".join(block.split("\n\n")[0].split()).replace(" (required)", " (default: required)")
        names, _, rest = block.partition(" (default: ")
        flags = re.match(r"(?:--\w+(?: \[?\w+\]?| \{[^}]*\}| \[\w+ \.\.\.\]| \w+ \[\w+ \.\.\.\])?(?:, )?)+", names)
        for flag in re.findall(r"--(\w+)", flags[0]):
            found[flag] = (names[flags.end() :].strip(), rest.removesuffix(")"))
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_answers_at_once(script):
    text, seconds = help_of(script)
    if seconds >= SECONDS:  # the machine may have been busy
        seconds = min(seconds, help_of(script)[1])
    assert seconds < SECONDS
    found = entries(text)
    assert len(found) >= 3
    assert not [flag for flag, (meaning, _) in found.items() if len(meaning) < 5 and not flag.startswith("no_")]
    assert not LEFT_OUT & set(found)
    for flag, default in FLAGS.get(script, {}).items():
        assert flag in found, f"{script} has no --{flag}"
        assert found[flag][1] == default, f"--{flag}"


def test_every_script_was_found():
    stages = {f"scripts/rlhf_{stage}.py" for stage in ("sft", "rm", "ppo", "dpo")}
    assert stages | {"scripts/chat.py", "scripts/train_classifier.py"} <= set(SCRIPTS)
    assert set(FLAGS) <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_can_be_executed(script):
    path = ROOT / script
    assert path.read_text().startswith("#!/usr/bin/env python3\n")
    assert path.stat().st_mode & 0o111
