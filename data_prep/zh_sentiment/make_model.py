#!/usr/bin/env python3
"""Make a small model with random weights that reads Chinese character by character; its characters are those of texts.

The causal kinds learn to write reviews and may become reward models and classifiers, the encoders only the latter. All
that are made from the same files have the same tokenizer.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_stages.cli import parse, run


@dataclass(frozen=True, kw_only=True)
class CharacterModel:
    """A model for a laptop."""

    destination_dir: str  # Model folder to write
    source: str  # Reviews: a csv file (label,review), or a folder of them
    rank_lists: str | None = None  # File of ranked lists whose characters count as well
    kind: Literal["llama", "gpt2", "bert", "roberta"] = "llama"  # Architecture: two causal ones, two encoders
    seed: int = 42  # Seed of the weights
    min_count: int = 3  # A character that the texts hold less often is unknown
    hidden_size: int = 128  # Width
    num_layers: int = 2  # Layers
    num_heads: int = 4  # Attention heads
    context: int = 256  # Longest text in tokens
    initializer_range: float = 0.07  # Standard deviation of the weights; so narrow a model learns faster above 0.02


def count_characters(args: CharacterModel) -> Counter[str]:
    """How often the texts hold each character; no label is looked at."""
    from pathlib import Path

    from rlhf_stages.data.rank_lists import RankList, read_rank_lists
    from rlhf_stages.data.sources import read_source

    texts = [record.get("review", record.get("text")) for _, record in read_source(args.source)]
    if args.rank_lists:
        found = read_rank_lists(Path(args.rank_lists))
        texts += [text for ranks in found if isinstance(ranks, RankList) for text in ranks.responses]
    return Counter(character for text in texts if isinstance(text, str) for character in " ".join(text.split()))


def make_tokenizer(counts: Counter[str], args: CharacterModel) -> Any:
    """A token for each character, and four of their own for what is unknown, start, end and padding."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    from rlhf_stages.data.zh_sentiment import LIST_PROMPT, PROMPTS

    special = ["<unk>", "<s>", "</s>", "<pad>"]
    frequent = {character for character, count in counts.items() if count >= args.min_count}
    tokens = special + sorted(frequent.union(*PROMPTS, LIST_PROMPT))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=special[0]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(token, vocabulary[token]) for token in special[1:3]]
    )
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), special, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=args.context, clean_up_tokenization_spaces=False, **names
    )


def make_model(tokenizer: Any, args: CharacterModel) -> Any:
    """Random weights of the kind that is asked for."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        BertConfig,
        GenerationConfig,
        GPT2Config,
        LlamaConfig,
        RobertaConfig,
    )

    width, layers, heads = args.hidden_size, args.num_layers, args.num_heads
    common = {"vocab_size": len(tokenizer), "initializer_range": args.initializer_range, "tie_word_embeddings": True}
    common |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    # RoBERTa counts its places from the one after its padding id
    places = args.context + (tokenizer.pad_token_id + 1 if args.kind == "roberta" else 0)
    shape |= {"intermediate_size": (3 if args.kind == "llama" else 4) * width, "max_position_embeddings": places}
    config: Any
    if args.kind == "gpt2":
        config = GPT2Config(n_embd=width, n_layer=layers, n_head=heads, n_positions=args.context, **common)
    else:
        classes = {"llama": LlamaConfig, "bert": BertConfig, "roberta": RobertaConfig}
        config = classes[args.kind](**shape, **common)
    torch.manual_seed(args.seed)
    if args.kind in ("bert", "roberta"):
        return AutoModelForMaskedLM.from_config(config)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model


def main() -> None:
    """Collect the characters, draw the weights, save both as one model folder."""
    (args,) = parse(CharacterModel, description=__doc__)
    tokenizer = make_tokenizer(count_characters(args), args)
    model = make_model(tokenizer, args)
    model.save_pretrained(args.destination_dir)
    tokenizer.save_pretrained(args.destination_dir)
    print(f"{args.destination_dir}: {args.kind}, {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    run(main)
