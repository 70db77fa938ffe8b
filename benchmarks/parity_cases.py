"""What the peers are recorded on: two tiny models, a few texts, and how a golden file is written."""

import json
import platform
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "parity"
KINDS = ("gpt2", "llama")
VOCABULARY = 32
UNKNOWN, BOS, EOS, PAD = range(4)
AUTO = {
    "causal": AutoModelForCausalLM,
    "reference": AutoModelForCausalLM,
    "reward": AutoModelForSequenceClassification,
    "critic": AutoModelForSequenceClassification,
}
# one optimizer for every trajectory; the rate falls along a cosine, without warm-up
STEPS = 5
OPTIMIZER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.0}
FLOOR = 1e-6
CLIP = 1.0


def make_config(kind: str) -> Any:
    """Two layers of width 16, no dropout; weights large enough for every part to matter."""
    common = {"vocab_size": VOCABULARY, "initializer_range": 0.25 if kind == "gpt2" else 0.4, "num_labels": 1}
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    if kind == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **dropout, **common, **ids)
    return LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32, tie_word_embeddings=False, **common, **ids,
    )  # fmt: skip


def write_models(kind: str, folder: Path) -> None:
    """Four models of one geometry in one file, in bf16, which is exact when they are read back as fp32."""
    config = make_config(kind)
    tensors: dict[str, Tensor] = {}
    for seed, (name, auto) in enumerate(AUTO.items()):
        torch.manual_seed(0 if name == "reference" else seed)
        model = auto.from_config(config)
        if name == "reference":  # near the causal model, as it is in the middle of PPO
            for parameter in model.parameters():
                parameter.data += 0.05 * torch.randn_like(parameter)
        for key, value in model.state_dict().items():
            if not (config.tie_word_embeddings and key == "lm_head.weight"):
                tensors[f"{name}.{key}"] = value.bfloat16().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / f"{kind}.safetensors", metadata={"config": config.to_json_string(use_diff=True)})


def load(kind: str, name: str, folder: Path = GOLDEN) -> Any:
    """One of the stored models, fp32."""
    with safe_open(folder / f"{kind}.safetensors", framework="pt") as file:
        config = json.loads(file.metadata()["config"])
        weights = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118
    model = AUTO[name].from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    mine = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
    missing, unexpected = model.load_state_dict(mine, strict=False)
    assert set(missing) <= {"lm_head.weight"}  # tied
    assert not unexpected
    model.tie_weights()
    return model


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word for every id."""
    vocabulary = {"<unk>": UNKNOWN, "<s>": BOS, "</s>": EOS, "<pad>": PAD}
    vocabulary |= {f"w{i}": i for i in range(len(vocabulary), VOCABULARY)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)


def random_ids(lengths: Iterable[int], seed: int, *, end: bool) -> list[list[int]]:
    """A text of each length, of ordinary tokens, the last one EOS with `end`."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(PAD + 1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [[*text[:-1], EOS] if end else text for text in texts]


def finetune_data() -> list[dict[str, Any]]:
    """Prompts with one response, of different lengths."""
    prompts, responses = random_ids((3, 5, 1, 4), 1, end=False), random_ids((6, 2, 9, 1), 2, end=True)
    return [{"prompt": prompt, "response": response} for prompt, response in zip(prompts, responses, strict=True)]


def preference_data() -> list[dict[str, Any]]:
    """Prompts with a better and a worse response of different lengths, and by how much it is better."""
    prompts = random_ids((3, 5, 1, 4), 3, end=False)
    chosen, rejected = random_ids((6, 2, 5, 4), 4, end=True), random_ids((3, 7, 5, 1), 5, end=True)
    margins = (0.5, 0.0, 1.5, 0.25)
    return [
        {"prompt": p, "chosen": c, "rejected": r, "margin": m}
        for p, c, r, m in zip(prompts, chosen, rejected, margins, strict=True)
    ]


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """Norm of the gradient of each parameter."""
    return {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}


def optimizer_and_schedule(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW, and transformers' cosine, which reaches its floor at the last of STEPS steps."""
    from transformers import get_cosine_with_min_lr_schedule_with_warmup

    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    return optimizer, get_cosine_with_min_lr_schedule_with_warmup(optimizer, 0, STEPS - 1, min_lr=FLOOR)


def steps(model: nn.Module, loss_of: Callable[[], Tensor]) -> Iterator[dict[str, float]]:
    """Train on one batch; the loss, gradient norm and learning rate of each step."""
    optimizer, schedule = optimizer_and_schedule(model)
    for _ in range(STEPS):
        loss = loss_of()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        yield {"loss": loss.item(), "grad_norm": norm.item(), "lr": schedule.get_last_lr()[0]}
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def versions(*packages: str) -> dict[str, str]:
    """Of Python, torch, transformers and the peers."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "?"
    return found


def write_golden(path: Path, content: dict[str, Any]) -> None:
    """JSON with a line for each entry, floats to nine digits, which is all of fp32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(_plain(value))}" for key, value in content.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{path.name}: {path.stat().st_size / 1000:.1f} kB")


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value
