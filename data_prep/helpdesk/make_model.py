#!/usr/bin/env python3
"""Make the small model that the embedded default trains: a byte-level BPE tokenizer and a Llama with random weights."""

from dataclasses import dataclass

from rlhf_stages.cli import parse, run

import corpus


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model for a laptop."""

    destination_dir: str = "models/helpdesk-tiny"  # Model folder to write
    seed: int = 42  # Seed of the weights and of the corpus that the tokenizer learns from
    num_dialogues: int = 3000  # Dialogues that the tokenizer learns from
    vocab_size: int = 1024  # Tokens
    hidden_size: int = 128  # Width
    num_layers: int = 2  # Layers
    num_heads: int = 4  # Attention heads
    context: int = 256  # Longest text in tokens
    initializer_range: float = 0.07  # Standard deviation of the weights; so narrow a model learns faster above 0.02


def main() -> None:
    """Train the tokenizer, draw the weights, save both as one model folder."""
    (args,) = parse(ModelShape, description=__doc__)
    import random
    from pathlib import Path

    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    texts = []
    for number, prompt in enumerate(corpus.generate_prompts(args.seed, args.num_dialogues)):
        texts.append(prompt + corpus.demonstration(prompt, random.Random(f"{args.seed}/tokenizer/{number}")))
    bpe = ByteLevelBPETokenizer()
    special = ["<|bos|>", "<|eos|>", "<|pad|>"]
    bpe.train_from_iterator(texts, vocab_size=args.vocab_size, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=special[0],
        eos_token=special[1],
        pad_token=special[2],
        model_max_length=args.context,
    )

    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.hidden_size,
            intermediate_size=3 * args.hidden_size,
            num_hidden_layers=args.num_layers,
            num_attention_heads=args.num_heads,
            num_key_value_heads=args.num_heads,
            max_position_embeddings=args.context,
            tie_word_embeddings=True,
            initializer_range=args.initializer_range,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config = GenerationConfig.from_model_config(model.config)
    folder = Path(args.destination_dir)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    run(main)
