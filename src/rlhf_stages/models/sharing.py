"""One frozen trunk under several models: with LoRA, critic and reward model on the weights of the actor.

Each model keeps modules, adapters and head of its own; only the frozen weights are the very same tensors. So nothing
is switched on and off, an optimizer sees its own model's adapters, and a model is saved and restored like any other.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from rlhf_stages.args import FabricArgs, ModelArgs, PPOArgs
from rlhf_stages.experiment import digest
from rlhf_stages.files import read_json
from rlhf_stages.models.checkpointing import checkpoint_layers
from rlhf_stages.models.dropout import disable_dropout
from rlhf_stages.models.forward import without_adapters
from rlhf_stages.models.loading import ADAPTER_DIR, load_scalar
from rlhf_stages.models.scalar import ScalarModel


@dataclass(frozen=True)
class Backbone:
    """A policy with LoRA adapters, and the checkpoint that it was loaded from."""

    policy: Any
    start: Path

    def carry(self, model: ScalarModel) -> ScalarModel:
        """A scalar model without adapters whose trunk becomes the policy's; its own copy of the weights goes.

        Raises:
            ValueError: the two are not equal to the last bit.
        """
        theirs = {
            name.replace(".base_layer.", "."): parameter
            for name, parameter in without_adapters(self.policy).base_model.named_parameters()
        }
        trunk: nn.Module = model.hf.base_model
        for name, own in list(trunk.named_parameters()):
            shared = theirs.get(name)
            if shared is None or not torch.equal(own, shared.to(own.device)):
                raise ValueError(f"--share_backbone: {name} is not the same in {self.start} and in what is to share it")
            owner, _, leaf = name.rpartition(".")
            setattr(trunk.get_submodule(owner), leaf, shared)
        return model

    def load_adapted(
        self, checkpoint: Path, tokenizer: PreTrainedTokenizerBase, args: ModelArgs, *, trains: bool
    ) -> ScalarModel:
        """A reward model on this trunk: its adapters and its head, to be trained further or for reading.

        Raises:
            ValueError: it was not trained by LoRA from the checkpoint that the policy comes from.
        """
        parents = _experiment(checkpoint).get("parents", {})
        adapter = checkpoint / ADAPTER_DIR
        if not adapter.is_dir() or parents.get("sft", {}).get("sha256") != digest(self.start):
            raise ValueError(
                f"--share_backbone: {checkpoint} was not trained with --finetune_mode=lora from {self.start}, so it has"
                " no adapters for those weights; train such a reward model with rlhf_rm.py, or share the critic alone"
                " (--share_backbone=critic --critic_init=sft)"
            )
        with torch.random.fork_rng(devices=[]):  # new weights, all of which are replaced, take no random numbers
            model = self.carry(load_scalar(self.start, tokenizer, args, trained_head=False, token_scores=True))
            _adapt(model, adapter, args, trains=trains)
        stored = AutoConfig.from_pretrained(checkpoint, trust_remote_code=args.trust_remote_code)
        for name in ("reward_mean", "reward_std"):
            setattr(without_adapters(model.hf).config, name, getattr(stored, name, None))
        return model


def shared_backbone(
    args: PPOArgs, model_args: ModelArgs, fabric_args: FabricArgs, policy: Any, start: Path
) -> Backbone | None:
    """What `--share_backbone` asks for, None if for nothing.

    Raises:
        ValueError: it does not go with the other flags.
    """
    if args.share_backbone == "none":
        return None
    if model_args.finetune_mode != "lora" or model_args.load_in_8bit:
        raise ValueError(
            "--share_backbone needs --finetune_mode=lora, and no --load_in_8bit: only frozen weights can be shared"
        )
    if fabric_args.strategy not in ("auto", "ddp"):
        raise ValueError(
            f"--share_backbone does not go with --strategy={fabric_args.strategy}, which splits every model on its own"
        )
    return Backbone(policy, start)


def _adapt(model: ScalarModel, adapter: Path, args: ModelArgs, *, trains: bool) -> None:
    """Put stored adapters and their head into a model."""
    if trains and args.gradient_checkpointing:
        checkpoint_layers(model.hf, dropout=not args.disable_dropout)
    model.hf.requires_grad_(False)
    model.hf = PeftModel.from_pretrained(model.hf, str(adapter), is_trainable=trains, torch_device="cpu")
    if args.disable_dropout:
        disable_dropout(model)


def _experiment(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint.parent.parent / "args.json"
    return dict(read_json(file)) if file.is_file() else {}
