"""Builders that the tests share: tiny models with random weights, a tokenizer, data folders, scripts as modules."""

import csv
import importlib.util
import json
import sys
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from rlhf_stages.data.shards import ShardWriter, atomic_save
from rlhf_stages.data.tokenizer import describe_tokenizer, encode_prompt, encode_response
from rlhf_stages.models.scalar import end_scores
from rlhf_stages.rollout.collect import Scores
from rlhf_stages.rollout.generation import Sampler

ROOT = Path(__file__).resolve().parents[1]
COPIES = {}  # Of folders of the repository, by name, whose scripts load_script takes: run_mutants.py has faulty ones
KINDS = ("gpt2", "opt", "llama", "neox")
ENCODERS = ("bert", "roberta")
NOUNS = ("colour", "price", "size")
COLOURS = ("red", "blue", "green", "pink")
THINGS = ("bike", "tea", "lamp")
WORDS = ("good", "bad", "so so")
LABELS = ("praise", "blame", "neither")  # Of texts with these words
SENTENCES = [
    f"Human: name the {noun} of the {colour} {thing}. Assistant: the {thing} is {word} and {colour}."
    for noun in NOUNS
    for colour in COLOURS
    for thing in THINGS
    for word in WORDS
]


@cache
def _backend() -> str:
    """A BPE of about a hundred tokens that knows the letters of `SENTENCES`, as JSON."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=100, special_tokens=["<unk>", "<s>", "</s>", "<pad>"], show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    return backend.to_str()


def make_tokenizer(**changes):
    """Ids 0 to 3 are unknown, BOS, EOS and padding; `pad_token=None` leaves one out."""
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **changes}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_backend()), **special)


def make_config(kind, vocab_size=100, **changes):
    """Two layers of width 16; initial weights large enough for places and tokens to matter."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    common = {"vocab_size": vocab_size, "initializer_range": 0.4, "num_labels": 1, **ids, **changes}
    rope = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {name: common.pop(name, value) for name, value in rope.items()}
    match kind:
        case "gpt2":
            dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), common.pop("dropout", 0.0))
            return GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **dropout, **common)
        case "opt":  # like OPT-350m: the word embedding is narrower than the layers
            dropout = common.pop("dropout", 0.0)
            common["init_std"] = common.pop("initializer_range")
            return OPTConfig(
                hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=8,
                do_layer_norm_before=False, max_position_embeddings=64, dropout=dropout, attention_dropout=dropout,
                layerdrop=0.0, **common,
            )  # fmt: skip
        case "llama":
            dropout = common.pop("dropout", 0.0)
            common = {"tie_word_embeddings": True, "max_position_embeddings": 64, **common}
            return LlamaConfig(num_key_value_heads=1, attention_dropout=dropout, **rope, **common)
        case "neox":
            dropout = common.pop("dropout", 0.0)
            return GPTNeoXConfig(
                max_position_embeddings=64, attention_dropout=dropout, hidden_dropout=dropout, **rope, **common
            )
        case "bert" | "roberta":
            dropout = common.pop("dropout", 0.0)
            config = {"bert": BertConfig, "roberta": RobertaConfig}[kind]
            return config(
                hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                max_position_embeddings=64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **common,
            )  # fmt: skip
    raise ValueError(kind)


def save_causal(folder, kind="gpt2", seed=0, tokenizer=None, generation_config=None, **changes):
    """Write a model folder with a causal model; returns the folder."""
    return _save(AutoModelForCausalLM, folder, kind, seed, tokenizer, generation_config, changes)


def save_encoder(folder, kind="bert", seed=0, tokenizer=None, **changes):
    """Write a model folder with an encoder that fills in masked tokens, and was never taught to classify."""
    return _save(AutoModelForMaskedLM, folder, kind, seed, tokenizer, None, changes)


def save_classifier(folder, kind="gpt2", seed=0, tokenizer=None, **changes):
    """Write a model folder with a reward model; returns the folder."""
    return _save(AutoModelForSequenceClassification, folder, kind, seed, tokenizer, None, changes)


def _save(auto, folder, kind, seed, tokenizer, generation_config, changes):
    tokenizer = tokenizer or make_tokenizer()
    torch.manual_seed(seed)
    model = auto.from_config(make_config(kind, **{"vocab_size": len(tokenizer), **changes}))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


def write_data(folder, tokenizer, *, finetune=None, preference=None, prompt=None, dataset="toy", **info):
    """Write a data folder as `prepare` does.

    `finetune` maps splits to (prompt, response) texts, `preference` to (prompt, chosen, rejected), `prompt` to prompts.
    """
    for stage, splits in {"finetune": finetune, "preference": preference, "prompt": prompt}.items():
        for split, rows in (splits or {}).items():
            writer = ShardWriter()
            for row in rows:
                first, *responses = (row,) if isinstance(row, str) else row
                writer.add(encode_prompt(tokenizer, first), [encode_response(tokenizer, text) for text in responses])
            writer.save(folder / f"{stage}_{split}.pt")
    ids = torch.tensor([encode_prompt(tokenizer, "Human: name the price of the red tea. Assistant:")])
    example = {"prompt": "", "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    atomic_save(example, folder / "example_prompt.pt")
    content = {"dataset": dataset, "tokenizer": describe_tokenizer(tokenizer, "toy"), "chat_template": None, **info}
    (folder / "args.json").write_text(json.dumps({"mask_prompt": True, "ignore_index": -1, **content}))
    return folder


def load_script(path):
    """A script of the repository, by its path from the root, as a module."""
    folder, *rest = Path(path).parts
    path = COPIES.get(folder, ROOT / folder).joinpath(*rest)
    spec = importlib.util.spec_from_file_location(f"script_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as Python does for a script
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def read_metrics(experiment_dir, name="metrics.csv"):
    """metrics.csv as {name: {step: value}}, empty cells left out."""
    columns = {}
    with (Path(experiment_dir) / name).open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if name != "step" and value:
                    columns.setdefault(name, {})[int(row["step"])] = float(value)
    return columns


def plain_sampler(temperature=1.0, min_new_tokens=0, stop_ids=(2,), vocab_size=100):
    """The distribution of a model over the ids of `make_tokenizer`."""
    return Sampler(temperature, min_new_tokens, tuple(stop_ids), vocab_size)


def left_padded(rows, pad):
    """Rows of ids as one left-padded (B, P) tensor and its mask."""
    size = max(map(len, rows))
    ids = torch.tensor([[pad] * (size - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (size - len(row)) + [True] * len(row) for row in rows])
    return ids, mask


def right_padded(rows, pad):
    """Rows of ids as one right-padded (B, R) tensor and its mask."""
    size = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (size - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (size - len(row)) for row in rows])
    return ids, mask


def shake_adapters(model, seed=0):
    """Give LoRA adapters weights as if they had been trained: fresh ones change nothing."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3, generator=generator)
    return model


def toy_rows(count, seed=0):
    """Prompts with a good, a bad and an indifferent reply: (prompt, replies)."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        noun, colour, thing = (
            words[int(torch.randint(len(words), (), generator=generator))] for words in (NOUNS, COLOURS, THINGS)
        )
        replies = [f" the {thing} is {word} and {colour}." for word in WORDS]
        rows.append((f"Human: name the {noun} of the {colour} {thing}. Assistant:", replies))
    return rows


def write_labelled(folder, name="act", train=24, held_out=8):
    """Files of labelled texts: what is said of a thing is praise, blame or neither; sorted, the labels are b, n, p."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate({"train": train, "validation": held_out, "test": held_out}.items()):
        lines = [
            {"text": prompt.removesuffix(" Assistant:") + "\n" + replies[i % 3].strip(), "label": LABELS[i % 3]}
            for i, (prompt, replies) in enumerate(toy_rows(count, seed=seed + 10))
        ]
        (folder / f"{name}_{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def write_toy_data(folder, tokenizer=None, train=24, held_out=8, **info):
    """A data folder whose fine-tuning replies are of every kind, and whose preferences are good before bad.

    It has labelled texts as well.
    """
    write_labelled(folder)
    splits = {"train": toy_rows(train), "validation": toy_rows(held_out, seed=1), "test": toy_rows(held_out, seed=2)}
    finetune = {
        split: [(prompt, replies[i % len(WORDS)]) for i, (prompt, replies) in enumerate(rows)]
        for split, rows in splits.items()
    }
    preference = {
        split: [(prompt, replies[0], replies[1]) for prompt, replies in rows] for split, rows in splits.items()
    }
    return write_data(folder, tokenizer or make_tokenizer(), finetune=finetune, preference=preference, **info)


def run_stage(stage, folder, data, *flags):
    """Run a stage's script in this process, on one CPU device unless told otherwise; returns the experiment folder."""
    common = [f"--data_dir={data}", f"--log_dir={folder}", "--accelerator=cpu", "--devices=1"]
    name = "train_classifier" if stage == "classifier" else f"rlhf_{stage}"
    return load_script(f"scripts/{name}.py").main([*common, *flags])


def model_scorer(reward_model):
    """The scorer of a reward model alone, without its texts."""

    def score(prompts, responses, texts):
        scores = end_scores(reward_model, texts.ids, texts.mask)
        return Scores(scores[:, None], torch.zeros(responses.mask.shape))

    return score
