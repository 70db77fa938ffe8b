"""The work that ours and the peers do: models with random weights of a known geometry, and random texts.

Legend: N texts, P prompt tokens, R response tokens.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from rlhf_stages.data.shards import ShardWriter, atomic_save
from rlhf_stages.data.tokenizer import describe_tokenizer

CUDA = torch.cuda.is_available()
GEOMETRIES = ("opt-350m", "opt-1.3b", "smollm2-360m", "llama-7b", "tiny")


def make_config(geometry: str) -> Any:
    """The architecture of a model that everybody knows."""
    opt = {"vocab_size": 50272, "max_position_embeddings": 2048, "dropout": 0.0}
    if geometry == "opt-350m":
        narrow = {"word_embed_proj_dim": 512, "do_layer_norm_before": False}
        sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096}
        return OPTConfig(**opt, **sizes, **narrow)
    if geometry == "opt-1.3b":
        sizes = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192}
        return OPTConfig(**opt, **sizes, word_embed_proj_dim=2048)
    hidden, middle, layers, heads, groups, vocabulary, tied = {
        "smollm2-360m": (960, 2560, 32, 15, 5, 49152, True),
        "llama-7b": (4096, 11008, 32, 32, 32, 32000, False),
        "tiny": (64, 128, 2, 4, 2, 512, True),
    }[geometry]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=middle,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
    )


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Words w4, w5, ... and four special tokens."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, vocab_size)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)


def write_models(folder: Path, geometry: str, *kinds: str, device: str = "cpu") -> None:
    """Experiment folders `sft` and `rm` as parents of a run, each with a model of random weights."""
    config = make_config(geometry)
    tokenizer = word_tokenizer(config.vocab_size)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    for kind in kinds:
        torch.manual_seed(0)
        auto = AutoModelForCausalLM if kind == "sft" else AutoModelForSequenceClassification
        config.num_labels = 1 if kind == "rm" else 2
        with torch.device(device):
            model = auto.from_config(config)
        checkpoint = folder / kind / "checkpoints" / "step-000001"
        model.save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
        (folder / kind / "latest").write_text("step-000001\n")
        (folder / kind / "args.json").write_text(json.dumps({"stage": kind}))


def write_data(folder: Path, vocab_size: int, stage: str, count: int, prompt: int, response: int) -> None:
    """A data folder with a training shard of N random texts of P + R tokens (pairs of them for `preference`)."""
    tokenizer, generator = word_tokenizer(vocab_size), torch.Generator().manual_seed(1)
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter()
    for _ in range(count):
        ids = torch.randint(5, vocab_size, (prompt + 2 * response,), generator=generator).tolist()
        rest = [ids[prompt : prompt + response], ids[prompt + response :]]
        writer.add(ids[:prompt], rest if stage == "preference" else rest[:1] if stage == "finetune" else [])
    writer.save(folder / f"{stage}_train.pt")
    if stage != "finetune":  # which the other stages look for too
        writer = ShardWriter()
        writer.add([5, 6], [[7, 2]])
        writer.save(folder / "finetune_train.pt")
    ids = torch.tensor([[1, 5, 6, 7]])
    example = {"prompt": "", "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    atomic_save(example, folder / "example_prompt.pt")
    content = {"dataset": "random", "tokenizer": describe_tokenizer(tokenizer, "words"), "chat_template": None}
    (folder / "args.json").write_text(json.dumps({"mask_prompt": True, "ignore_index": -1, **content}))


class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes when each step has ended on the device."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def now(self) -> None:
        """Note the time."""
        if CUDA:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """A step is over."""
        self.now()
