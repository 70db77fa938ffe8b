#!/usr/bin/env python3
"""What a run needs per GPU, by a formula, and how its speed should grow with GPUs: predictions, nothing is measured.

docs/scaling.md explains the terms and holds the tables that this prints.
"""

from dataclasses import dataclass

GPU_BYTES = 80e9
USABLE = 0.9  # of it; the rest is CUDA's, NCCL's and fragments
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
TOKENS = 1024  # of a text, one text per micro-batch
RESPONSE = 512  # tokens of it that PPO samples
SAMPLED = 8  # texts that are sampled at a time
FLOPS = 989e12  # an H100's dense bf16
BUCKETS = 1.6e9  # bytes in which DeepSpeed sums gradients: two of 2e8 numbers
MFU = 0.4  # share of it that training reaches, assumed
LINKS = {"NVLink 4": 450e9, "InfiniBand NDR": 50e9}  # bytes per second, GPU and direction, as sold


@dataclass(frozen=True)
class Geometry:
    """Parameters of a model, those of its embeddings among them, and its sizes. kv: width of keys, all heads."""

    params: float
    embeddings: float
    layers: int
    hidden: int
    kv: int
    vocab: int

    @property
    def layer(self) -> float:
        """Parameters of one layer."""
        return (self.params - self.embeddings) / self.layers


GEOMETRIES = {
    "opt-350m": Geometry(331_196_416, 25_739_264, 24, 1024, 1024, 50_272),
    "opt-1.3b": Geometry(1_315_758_080, 102_957_056, 24, 2048, 2048, 50_272),
    "llama-7b": Geometry(6_738_415_616, 262_144_000, 32, 4096, 4096, 32_000),
    "llama-13b": Geometry(13_015_864_320, 327_680_000, 40, 5120, 5120, 32_000),
    "llama-70b": Geometry(68_976_648_192, 524_288_000, 80, 8192, 1024, 32_000),
}
ENGINES = ("ddp", "deepspeed_stage_2", "deepspeed_stage_2_offload", "fsdp", "deepspeed_stage_3")


def trained(g: Geometry, engine: str, n: int) -> float:
    """Bytes per GPU of a model in training: weights, gradients and two moments in fp32, divided by its engine."""
    whole, part = 4 * g.params, 4 * g.params / n
    return {
        "ddp": whole + whole + 2 * whole,
        # DeepSpeed's optimizer has its part of the weights once more
        "deepspeed_stage_2": whole + part + part + 2 * part,
        "deepspeed_stage_2_offload": whole + part,
        "fsdp": part + part + 2 * part,
        "deepspeed_stage_3": part + part + 2 * part,
    }[engine]


def frozen(g: Geometry, engine: str, n: int) -> float:
    """Bytes per GPU of a model that only reads, in fp32; FSDP alone divides it."""
    return 4 * g.params / (n if engine == "fsdp" else 1)


def at_work(g: Geometry, engine: str) -> float:
    """Bytes per GPU of what a forward or backward gathers: a layer and the one that is fetched ahead, their gradients
    before they are summed, and the embeddings."""
    buckets = BUCKETS if engine.startswith("deepspeed") else 0.0
    if engine not in ("fsdp", "deepspeed_stage_3"):
        return buckets
    width = 2 if engine == "fsdp" else 4  # bytes of a gathered weight; FSDP gathers layers in bf16
    return 2 * g.layer * (width + 4) + g.embeddings * (4 + 4) + buckets


def whole(g: Geometry, engine: str) -> float:
    """Bytes per GPU of a policy that is gathered to sample."""
    if engine == "fsdp":
        return 2 * (g.params - g.embeddings) + 4 * g.embeddings
    return 4 * g.params if engine == "deepspeed_stage_3" else 0.0


def activations(g: Geometry, tokens: int) -> float:
    """Bytes of one text of a micro-batch with checkpointing: fp32 inputs of all layers, and 34 bytes per token and
    hidden unit of the layer at work (Korthikanti et al. 2022, without attention matrices)."""
    return tokens * g.hidden * (4 * g.layers + 34)


def logits(g: Geometry, tokens: int) -> float:
    """Bytes of logits in bf16 and fp32, and their gradient."""
    return tokens * g.vocab * (2 + 4 + 4)


def cache(g: Geometry, texts: int, tokens: int) -> float:
    """Bytes of keys and values in bf16."""
    return 2 * 2 * g.layers * g.kv * texts * tokens


def peak(g: Geometry, stage: str, engine: str, n: int) -> float:
    """Bytes per GPU of a stage: rm, sft, or ppo with four models of one size."""
    update = at_work(g, engine) + activations(g, TOKENS)
    if stage == "rm":
        return trained(g, engine, n) + update
    if stage == "sft":
        return trained(g, engine, n) + max(update + logits(g, TOKENS), whole(g, engine) + cache(g, 1, TOKENS))
    states = 2 * trained(g, engine, n) + 2 * frozen(g, engine, n)
    sampling = whole(g, engine) + cache(g, SAMPLED, TOKENS) + logits(g, SAMPLED)
    return states + max(update + logits(g, RESPONSE), sampling)


def fewest(g: Geometry, stage: str, engine: str) -> str:
    """The smallest number of GPUs that a stage fits on, or a dash."""
    return next((str(n) for n in COUNTS if peak(g, stage, engine, n) <= USABLE * GPU_BYTES), "–")


def efficiency(g: Geometry, tokens: int, n: int, bytes_per_second: float) -> float:
    """Share of n times one GPU's training speed that DDP keeps if its all-reduce does not overlap with anything.

    Args:
        tokens: that each GPU trains on per optimizer step.
    """
    compute = 6 * g.params * tokens / (FLOPS * MFU)
    exchange = 2 * (n - 1) / n * 4 * g.params / bytes_per_second  # ring, fp32
    return compute / (compute + exchange)


def memory_table() -> str:
    """Fewest GPUs by model, stage and engine, in Markdown."""
    lines = ["| model | stage | " + " | ".join(ENGINES) + " |", "| --- | --- |" + " --- |" * len(ENGINES)]
    for name, g in GEOMETRIES.items():
        for stage in ("rm", "sft", "ppo"):
            lines.append(f"| {name} | {stage} | " + " | ".join(fewest(g, stage, engine) for engine in ENGINES) + " |")
    return "\n".join(lines)


def speed_table() -> str:
    """Efficiency of DDP by tokens and GPUs, in Markdown; it does not depend on the model."""
    lines = ["| link | tokens per GPU and step | 2 GPUs | 8 GPUs | 64 GPUs |", "| --- | --- | --- | --- | --- |"]
    for link, speed in LINKS.items():
        for tokens in (4096, 16_384, 65_536):
            shares = (f"{efficiency(GEOMETRIES['llama-7b'], tokens, n, speed):.0%}" for n in (2, 8, 64))
            lines.append(f"| {link} | {tokens:,} | " + " | ".join(shares) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(memory_table(), speed_table(), sep="\n\n")
