"""Files of DeepSpeed's settings: read, and compared with the flags that decide the same things."""

import json
import re
from pathlib import Path
from typing import Any

from rlhf_stages.args import TrainArgs

# what a `#` starts, outside of the quotes of a text: DeepSpeed's files have no comments, printed ones often do
_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|#[^\n]*')


def read_deepspeed_file(path: str) -> dict[str, Any]:
    """The settings in a JSON file; comments after `#` are passed over, and what is "auto" is left out.

    Raises:
        ValueError: it cannot be read or is not a JSON object.
    """
    try:
        text = _COMMENT.sub(lambda found: found[1] or "", Path(path).read_text(encoding="utf-8"))
        config = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--strategy={path} cannot be read as a JSON file of DeepSpeed's settings: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--strategy={path} holds a {type(config).__name__}, expected an object of settings")
    return {name: value for name, value in config.items() if value != "auto"}


def check_settings(config: dict[str, Any], precision: str, source: str) -> None:
    """Refuse what flags decide, or what would do nothing.

    Raises:
        ValueError: it says so.
    """
    flags = {
        "optimizer": "--optimizer, --weight_decay, --optimizer_eps and the learning rates",
        "scheduler": "--lr_warmup_steps and the flags about schedules",
        "data_efficiency": "--mini_batch_size and --seed",
    }
    for name, instead in flags.items():
        if name in config:
            raise ValueError(f"{source}: take {name!r} out; it is set by {instead}")
    for name, flag in {"fp16": "16-mixed", "bf16": "bf16-mixed"}.items():
        section = config.get(name)
        enabled = isinstance(section, dict) and section.get("enabled", False) is True
        if enabled and precision != flag:
            other = "bf16-mixed (16-mixed does not go with DeepSpeed here)" if name == "fp16" else flag
            raise ValueError(f"{source} switches {name} on, but --precision={precision}; pass --precision={other}")
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (1, 2, 3):
        raise ValueError(
            f"{source}: zero_optimization.stage is {stage!r}, expected 1, 2 or 3; without ZeRO there is --strategy=ddp"
        )


def check_batches(config: dict[str, Any], args: TrainArgs, devices: int) -> None:
    """Compare batch sizes and clipping with the flags.

    Raises:
        ValueError: they differ, or do not fit together.
    """
    expected = {
        "train_micro_batch_size_per_gpu": (args.micro_batch_size, "--micro_batch_size"),
        "gradient_accumulation_steps": (
            args.mini_batch_size // args.micro_batch_size,
            "--mini_batch_size / --micro_batch_size",
        ),
        "train_batch_size": (args.mini_batch_size * devices, f"--mini_batch_size x {devices} devices"),
        "gradient_clipping": (args.gradient_clip_val, "--gradient_clip_val"),
    }
    if args.micro_batch_tokens is not None:
        cut = [name for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps") if name in config]
        if cut:
            raise ValueError(f"DeepSpeed's settings say {cut[0]}, which --micro_batch_tokens leaves open; take it out")
    for name, (value, flags) in expected.items():
        if name in config and config[name] != value:
            raise ValueError(
                f"DeepSpeed's settings say {name} {config[name]!r}, but {flags} is {value}; change one of the two"
                " (train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x devices)"
            )
