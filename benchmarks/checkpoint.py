#!/usr/bin/env python3
"""How long a checkpoint of PPO takes, and how long the training waits for it.

    python benchmarks/checkpoint.py --geometry smollm2-360m --saves 3

Actor and critic with random weights of that geometry and an AdamW with filled moments each are saved as the PPO script
saves them: files, fsync, SHA-256, rename. Prints one JSON line: bytes, seconds until training goes on (the copy to host
memory), seconds until the checkpoint is whole, and seconds to check and load it again, medians over the saves.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GEOMETRIES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152,
    },
    "smollm2-360m": {
        "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15,
        "num_key_value_heads": 5, "vocab_size": 49152,
    },
}  # fmt: skip


def make_models(geometry: str, device: Any) -> dict[str, Any]:
    """A causal model and a reward model with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

    from rlhf_stages.models.scalar import ScalarModel

    config = LlamaConfig(tie_word_embeddings=True, num_labels=1, pad_token_id=0, **GEOMETRIES[geometry])
    with torch.device(device):
        actor = AutoModelForCausalLM.from_config(config)
        critic = ScalarModel(AutoModelForSequenceClassification.from_config(config))
    return {"": actor, "critic": critic}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Save, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), default="smollm2-360m")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    args = parser.parse_args(argv)

    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from rlhf_stages import loop
    from rlhf_stages.args import FabricArgs, SFTArgs
    from rlhf_stages.checkpoint import check_whole
    from rlhf_stages.experiment import Experiment, describe
    from rlhf_stages.keeper import Keeper
    from rlhf_stages.optim import set_up
    from rlhf_stages.tracking import Averages, Tracker

    fabric = loop.start_fabric(FabricArgs(devices="1"), seed=1)
    train_args, parts, prepared = SFTArgs(save_interval=1), {}, {}
    for name, model in make_models(args.geometry, fabric.device).items():
        prepared[name], optimizer, schedule = set_up(fabric, model, train_args, train_args.rate, 1000)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        parts |= {f"{name or 'actor'}_optimizer": optimizer, f"{name or 'actor'}_schedule": schedule}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="</s>", pad_token="<pad>")

    seconds: dict[str, list[float]] = {"blocked": [], "whole": [], "checked": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        experiment = Experiment.create(Path(folder) / "run", describe("ppo", {}, {}, {}), overwrite=False)
        tracker = Tracker(experiment, fabric, args.saves, {})
        keeper = Keeper(
            fabric, train_args, experiment, tracker, tokenizer, args.saves + 1, prepared, parts, Averages(fabric)
        )
        for step in range(1, args.saves + 1):
            started = time.perf_counter()
            keeper.end_step(step)
            seconds["blocked"].append(time.perf_counter() - started)
            keeper.wait()
            seconds["whole"].append(time.perf_counter() - started)
            started = time.perf_counter()
            check_whole(experiment.checkpoints.path(step), resumable=True)
            seconds["checked"].append(time.perf_counter() - started)
            if step > 1:
                experiment.checkpoints.remove(step - 1)
        size = sum(path.stat().st_size for path in experiment.checkpoints.path(args.saves).rglob("*") if path.is_file())
        keeper.finish({"saves": args.saves}, "-")
    device = torch.cuda.get_device_name() if fabric.device.type == "cuda" else "cpu"
    result = {"geometry": args.geometry, "device": device, "bytes": size, "saves": args.saves}
    result |= {f"seconds_{name}": round(statistics.median(values), 3) for name, values in seconds.items()}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
    main()
