#!/usr/bin/env python3
"""How many pairs per second the preparation of data takes, and how much memory.

    python benchmarks/prepare.py --source path/to/hh-rlhf --tokenizer_name models/smollm2-135m-instruct

The records of the source (jsonl or jsonl.gz) are repeated until there are --pairs of them, and prepare_data.py makes a
preference shard of all, repeated ones too. Its time is from the start of Python to its end. Beside it stands what the
tokenizer alone makes of some of the same pairs, both whole texts each, on as many threads. Memory is that of all
processes together, shared pages once. Prints one JSON line and a sentence.
"""

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]


def read_lines(source: Path) -> list[bytes]:
    """The lines of all jsonl files."""
    files = [source] if source.is_file() else sorted(f for f in source.rglob("*.jsonl*") if f.is_file())
    lines: list[bytes] = []
    for path in files:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines += (line.strip() + b"\n" for line in file if line.strip())
    if not lines:
        raise SystemExit(f"--source {source}: no jsonl or jsonl.gz with a record in it")
    return lines


def tokenizer_alone(name: str, lines: list[bytes], threads: int) -> float:
    """Pairs per second of the tokenizer by itself: both whole texts, 256 pairs at a time."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(threads)}
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(name, trust_remote_code=False).backend_tokenizer
    texts = [record[name] for record in map(json.loads, lines) for name in ("chosen", "rejected")]
    started = time.perf_counter()
    for start in range(0, len(texts), 512):
        backend.encode_batch(texts[start : start + 512], add_special_tokens=False)
    return len(lines) / (time.perf_counter() - started)


def memory(process: psutil.Process) -> int:
    """Bytes of a process and its children, pages that several share once."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().pss
        except psutil.Error:  # it has just ended
            continue
    return total


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Repeat, prepare, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="file or folder of jsonl or jsonl.gz")
    parser.add_argument("--tokenizer_name", required=True)
    parser.add_argument("--pairs", type=int, default=160_000)
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--sample", type=int, default=2000, help="pairs for the tokenizer alone")
    parser.add_argument("--script", default="data_prep/helpful_harmless/prepare_data.py", help="of this repository")
    args = parser.parse_args(argv)

    lines = read_lines(args.source)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "train.jsonl"
        with data.open("wb") as file:
            file.writelines(islice(cycle(lines), args.pairs))
        command = [sys.executable, ROOT / args.script, "--stage=preference", "--stage_split=0,1,0", f"--source={data}"]
        command += [f"--destination_dir={folder}/shards", f"--tokenizer_name={args.tokenizer_name}"]
        command += ["--remove_same_inputs=False", f"--num_workers={args.num_workers}"]
        environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
        peak, before, started = 0, resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        with (Path(folder) / "log").open("w+") as log:
            running = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            while running.poll() is None:
                peak = max(peak, memory(psutil.Process(running.pid)))
                time.sleep(0.1)
            seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
            log.seek(0)
            if running.returncode:
                raise SystemExit(log.read())
        content = json.loads((Path(folder) / "shards" / "args.json").read_text())
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    counts = content["stages"]["preference"]["counts"].values()
    alone = tokenizer_alone(args.tokenizer_name, lines[: args.sample], args.num_workers)
    result = {
        "pairs": args.pairs,
        "different": min(args.pairs, len(lines)),
        "kept": sum(count["kept"] for count in counts),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "pairs_per_second": round(args.pairs / seconds),
        "tokenizer_alone_pairs_per_second": round(alone),
        "ratio": round(args.pairs / seconds / alone, 2),
        "peak_gib": round(peak / 2**30, 2),
        "num_workers": args.num_workers,
    }
    print(json.dumps(result))
    print(
        f"{result['pairs']:,} pairs ({result['different']:,} different ones) in {seconds:.0f} s with"
        f" {args.num_workers} workers: {result['pairs_per_second']:,} pairs/s, {result['ratio']} of what the tokenizer"
        f" alone does with both whole texts ({result['tokenizer_alone_pairs_per_second']:,}); {cpu:.0f} s of CPU, at"
        f" most {result['peak_gib']} GiB"
    )
    return result


if __name__ == "__main__":
    main()
