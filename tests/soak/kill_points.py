#!/usr/bin/env python3
"""Kill runs at random moments, let them go on, and compare each with an undisturbed one, bit by bit.

    python tests/soak/kill_points.py --points=200 --jobs=2

Stages on tiny models; a point is a stage, a phase in it (rollout, update, save) and a moment in that phase. Prints a
table and exits with 1 if a run differs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import differences, finish, start

from helpers import save_causal, write_toy_data

STEPS = ["--max_steps=7", "--save_interval=2", "--eval_interval=3", "--log_interval=3", "--lr_warmup_steps=2"]
LEARN = ["--learning_rate=1e-3", "--epochs=2"]
TOKENS = "--max_new_tokens=5"
LORA = ["--finetune_mode=lora", "--lora_rank=2", "--lora_alpha=8"]
PPO = [
    *STEPS[:4], "--rollout_size=8", "--rollout_mini_batch_size=5", "--mini_batch_size=6", "--micro_batch_size=3",
    "--epochs=3", "--eval_iters=1", "--ppo_epochs=2", "--adaptive_kl_coeff", "--actor_learning_rate=1e-3", TOKENS,
]  # fmt: skip
CRITIC = ["--critic_learning_rate=1e-3", "--normalize_values"]
# how often each is killed, out of 20, and in which phases
KINDS = {
    "sft": (3, ("update", "save"), [*STEPS, *LEARN, TOKENS]),
    "sft-lora": (1, ("update", "save"), [*STEPS, *LEARN, *LORA, "--lora_dropout=0.2", TOKENS]),
    "rm": (3, ("update", "save"), [*STEPS, *LEARN]),
    "dpo": (3, ("update", "save"), [*STEPS, *LEARN, TOKENS]),
    "ppo": (7, ("rollout", "update", "save"), [*PPO, *CRITIC]),
    "ppo-keep": (1, ("save",), [*PPO, *CRITIC, "--keep_last=1"]),
    "ppo-lora": (1, ("rollout", "update", "save"), [*PPO, *CRITIC, *LORA]),
    "ppo-shared": (1, ("rollout", "update", "save"), [*PPO, "--share_actor_critic"]),
}


@dataclass(frozen=True)
class World:
    """Data, models and undisturbed runs that all points share."""

    folder: Path
    device: tuple[str, ...]

    def argv(self, kind: str, runs: Path) -> list[str]:
        """The command line of a kind of run, without its script."""
        stage, parents = kind.partition("-")[0], self.folder / "parents" / "toy" / "tiny"
        start = {
            "sft": [f"--model_name={self.folder / 'model'}"],
            "rm": [f"--sft_experiment_dir={parents / 'sft'}"],
            "dpo": [f"--sft_experiment_dir={parents / 'sft'}"],
            "ppo": [f"--sft_experiment_dir={parents / 'sft'}", f"--rm_experiment_dir={parents / 'rm'}"],
        }[stage]
        common = [f"--data_dir={self.folder / 'toy' / 'tiny'}", f"--log_dir={runs}", *self.device]
        return [*common, *start, *KINDS[kind][2]]

    def undisturbed(self, kind: str) -> Path:
        """The run that the others are compared with."""
        return self.folder / "undisturbed" / kind / "toy" / "tiny" / kind.partition("-")[0]


def script_of(kind: str) -> str:
    """Path of its script."""
    return f"scripts/rlhf_{kind.partition('-')[0]}.py"


def make_world(folder: Path, device: tuple[str, ...], kinds: list[str]) -> tuple[World, dict[str, Counter[str]]]:
    """Make data, models, parents and undisturbed runs; also how often each phase comes in each kind."""
    world = World(folder, device)
    write_toy_data(folder / "toy" / "tiny")
    save_causal(folder / "model", dropout=0.1)
    for kind in ("sft", "rm"):
        finish(script_of(kind), world.argv(kind, folder / "parents"), folder / "parents.log")
    counts = {}
    for kind in kinds:
        child = start(script_of(kind), world.argv(kind, folder / "undisturbed" / kind), folder / f"{kind}.log")
        if child.wait():
            raise RuntimeError(f"{kind}: {child.log.read_text()[-3000:]}")
        counts[kind] = Counter({phase: child.phases.read(phase)[0] for phase in KINDS[kind][1]})
    return world, counts


def kill_point(world: World, kind: str, phase: str, nth: int, seed: int, runs: Path) -> dict[str, object]:
    """Kill a run in a phase when that comes for the n-th time, let it go on, and compare."""
    rng, script, argv = random.Random(seed), script_of(kind), world.argv(kind, runs)
    child = start(script, argv, runs / "log")
    child.wait_for(lambda: child.phases.read(phase)[0] >= nth)
    time.sleep(rng.choice([0, rng.uniform(0, 0.002), rng.uniform(0, 0.02)]))
    inside = child.phases.read(phase)[1] > 0
    child.send(signal.SIGKILL)
    killed = child.wait() == -signal.SIGKILL
    folder = runs / "toy" / "tiny" / kind.partition("-")[0]
    had = len(list((folder / "checkpoints").glob("step-*"))) if folder.is_dir() else 0
    kills = int(killed)
    while True:
        child = start(script, [*argv, "--resume"], runs / "log")
        if kills < 2 and rng.random() < 0.25:  # also the run that goes on may be killed
            time.sleep(rng.uniform(0, 1.0))
            child.send(signal.SIGKILL)
        code = child.wait()
        if code == 0:
            break
        if code != -signal.SIGKILL:
            end = (runs / "log").read_text(encoding="utf-8", errors="replace")[-1500:]
            return {"kind": kind, "phase": phase, "killed": killed, "different": [f"exit code {code}: {end}"]}
        kills += 1
    different = differences(world.undisturbed(kind), folder)
    return {"kind": kind, "phase": phase, "killed": killed, "inside": inside, "resumed": had > 0, "kills": kills,
            "different": different}  # fmt: skip


def points_of(count: int, counts: dict[str, Counter[str]], seed: int) -> list[tuple[str, str, int, int]]:
    """Kind, phase, how often that has to come, and a seed of each point; the phases of a kind in turn."""
    rng, kinds = random.Random(seed), [kind for kind in counts for _ in range(KINDS[kind][0])]
    turns: Counter[str] = Counter()
    points = []
    for i in range(count):
        kind = kinds[i * 7 % len(kinds)]
        phases = KINDS[kind][1]
        phase = phases[turns[kind] % len(phases)]
        turns[kind] += 1
        points.append((kind, phase, rng.randint(1, max(counts[kind][phase], 1)), rng.randrange(2**31)))
    return points


def work(world: World, points: list[tuple[str, str, int, int]], out: Path, name: int) -> None:
    """Take points one after the other; a line of JSON for each."""
    with out.open("w", encoding="utf-8") as file:
        for i, (kind, phase, nth, seed) in enumerate(points):
            runs = world.folder / "points" / f"{name}-{i}"
            result = kill_point(world, kind, phase, nth, seed, runs)
            file.write(json.dumps({**result, "nth": nth, "seed": seed}) + "\n")
            file.flush()
            if not result["different"]:
                shutil.rmtree(runs)


def table(results: list[dict[str, object]]) -> str:
    """A row per stage and phase."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for r in results:
        row = rows.setdefault((str(r["kind"]).partition("-")[0], str(r["phase"])), Counter())
        row.update(points=1, killed=int(bool(r["killed"])), inside=int(bool(r.get("inside"))))
        row.update(resumed=int(bool(r.get("resumed"))), different=int(bool(r["different"])))
    names = ("points", "killed", "inside", "resumed", "different")
    lines = [f"{'stage':6} {'phase':8} " + " ".join(f"{name:>9}" for name in names)]
    lines += [f"{s:6} {p:8} " + " ".join(f"{row[name]:9}" for name in names) for (s, p), row in sorted(rows.items())]
    total = Counter({name: sum(row[name] for row in rows.values()) for name in names})
    return "\n".join([*lines, f"{'all':15} " + " ".join(f"{total[name]:9}" for name in names)])


def main(argv: list[str] | None = None) -> int:
    """Kill, resume, compare; 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="points at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda runs with --deterministic")
    parser.add_argument("--output", type=Path, help="also write all points to this JSON file")
    args = parser.parse_args(argv)
    device = (f"--accelerator={args.device}", "--devices=1", *(["--deterministic"] if args.device == "cuda" else []))
    with tempfile.TemporaryDirectory() as name:
        folder, started = Path(name), time.monotonic()
        world, counts = make_world(folder, device, args.kinds)
        points = points_of(args.points, counts, args.seed)
        workers = []
        for job in range(args.jobs):  # processes, since threads and fork do not mix
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    work(world, points[job :: args.jobs], folder / f"job{job}.jsonl", job)
                    code = 0
                finally:
                    os._exit(code)
            workers.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers]
        results = [
            json.loads(line)
            for job in range(args.jobs)
            for line in (folder / f"job{job}.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        if args.output:
            args.output.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results))
    for result in results:
        if result["different"]:
            print(f"DIFFERENT: {result}")
    kills = sum(int(result.get("kills", 0)) for result in results)
    print(f"{len(results)} points, {kills} kills, {sum(bool(r['different']) for r in results)} runs that differ,"
          f" {time.monotonic() - started:.0f} s")  # fmt: skip
    return int(any(codes) or len(results) != args.points or any(result["different"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
