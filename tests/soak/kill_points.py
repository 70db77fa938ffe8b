#!/usr/bin/env python3
"""Kill runs at random moments, resume them, and compare the end with an undisturbed run, bit by bit.

Every point: a run of some kind in a fresh folder, SIGKILL in a phase chosen beforehand, the same command with
`--resume` until it ends with 0 (some are killed once more on the way), and all files compared but logs/ and timing.csv.
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
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path

import forks
import material
from forks import Hung
from phases import SAVING, Board, install, watch_files

# phases that points are aimed at, and how often; "file": right before some change to a file
AIMS = {
    "ppo": {"rollout": 4, "update": 4, "copy": 2, "write": 3, "settle": 1, "start": 1, "eval": 1, "log": 1, "end": 1,
            "file": 3},
    "": {"update": 3, "copy": 1, "write": 3, "settle": 1, "start": 1, "eval": 1, "log": 1, "end": 1, "file": 3},
}  # fmt: skip
SECOND_KILL = 0.35
# so many kills of one point miss their phase before any moment will do
TRIES = 4
# one in so many points is resumed by a Python of its own
FRESH = 20


@dataclass
class Undisturbed:
    """A run that nobody killed, and what another one of its kind showed: phases, and the changes it made to files."""

    folder: Path
    seconds: float
    entries: dict[str, int]
    lasts: dict[str, float]
    operations: list[str]


@dataclass
class Result:
    """What became of a point."""

    number: int
    kind: str
    aim: str
    died: str = ""
    kills: int = 0
    resumed: str = ""
    fresh: bool = False
    differences: list[str] = field(default_factory=list)
    problem: str = ""


def main():
    """Make the material, the undisturbed runs, and the points; 1 if anything differs."""
    args = parse()
    started = time.monotonic()
    forks.load()
    work = Path(tempfile.mkdtemp(prefix="kill-points-", dir=args.dir))
    material.make(work, args.device)
    points = plan(args.points, args.kinds, args.aims, args.seed)
    undisturbed = {kind: measure(work, kind, args.device) for kind in sorted({kind for kind, _ in points})}
    print(f"{len(undisturbed)} undisturbed runs, and a second of each that is the same", flush=True)
    results = share_out(work, args, points, undisturbed)
    bad = [r for r in results if r.differences or r.problem]
    report = {
        "device": args.device,
        "points": len(results),
        "kills": sum(r.kills for r in results),
        "differences": len(bad),
        "seconds": round(time.monotonic() - started, 1),
        "results": [asdict(r) for r in results],
    }
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=1) + "\n")
    print(table(results))
    for result in bad:
        print(f"point {result.number} ({result.kind}, {result.aim}): {result.problem} {result.differences}")
    print(f"points {len(results)}, kills {report['kills']}, {report['seconds']} s on {args.device}")
    print(f"differences {len(bad)}")
    if bad or args.keep:
        print(f"kept {work}")
    else:
        shutil.rmtree(work)
    return 1 if bad or len(results) != len(points) else 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="points at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=material.DEVICES, default="cpu")
    names = partial(str.split, sep=",")
    parser.add_argument("--kinds", type=names, default=list(material.KINDS), help="comma-separated")
    parser.add_argument("--aims", type=names, help="phases, comma-separated")
    parser.add_argument("--output", help="JSON file to write")
    parser.add_argument("--dir", help="where to make the working folder")
    parser.add_argument("--keep", action="store_true", help="do not remove it")
    return parser.parse_args()


def plan(points, kinds, only, seed):
    """Kind and aim of each point, each as often as it should be, in a random order."""
    chosen = list(islice(spread({kind: material.KINDS[kind][2] for kind in kinds}), points))
    rng = random.Random(seed)
    aims = {}
    for family, weights in AIMS.items():
        wanted = sum(family_of(kind) == family for kind in chosen)
        weights = {aim: weight for aim, weight in weights.items() if not only or aim in only}
        aims[family] = list(islice(spread(weights), wanted))
        rng.shuffle(aims[family])
    return [(kind, aims[family_of(kind)].pop()) for kind in chosen]


def family_of(kind):
    return "ppo" if material.KINDS[kind][0] == "ppo" else ""


def spread(weights):
    """The names again and again, each as often as its weight says, as evenly as can be."""
    for lap in count():
        yield from (
            name for _, name in sorted(((i + 0.5) / n + lap, name) for name, n in weights.items() for i in range(n))
        )


def measure(work, kind, device):
    """An undisturbed run, and one that is watched; they have to be the same."""
    folders = [work / f"{kind}-{name}" for name in ("undisturbed", "watched")]
    board, names, seconds = Board(), work / f"{kind}-operations", []
    watch = [(), (partial(install, board), partial(watch_files, board, folders[1], names=names))]
    for folder, before in zip(folders, watch, strict=True):
        folder.mkdir()
        started, log = time.monotonic(), work / f"{folder.name}.log"
        material.expect(material.stage_child(*material.arguments(kind, device), folder, log, before), log)
        seconds.append(time.monotonic() - started)
    found = material.differences(*map(experiment, folders, [kind] * 2))
    if found:
        raise RuntimeError(f"{kind}: two undisturbed runs differ in {found}")
    aims = {aim for family in AIMS.values() for aim in family} - {"file"}
    entries, lasts = ({aim: of(aim) for aim in aims} for of in (board.entries, board.seconds))
    return Undisturbed(folders[0], min(seconds), entries, lasts, names.read_text().splitlines())


def experiment(folder, kind):
    return folder / "toy" / "tiny" / material.KINDS[kind][0]


def share_out(work, args, points, undisturbed):
    """Results of all points, in so many processes at a time."""
    workers = []
    for job in range(args.jobs):
        output = work / f"results-{job}"

        def call(job=job, output=output):
            with output.open("w") as file:
                for number in range(job, len(points), args.jobs):
                    result = run_point(work, args, number, *points[number], undisturbed[points[number][0]])
                    file.write(json.dumps(asdict(result)) + "\n")
                    file.flush()

        workers.append((forks.Child(call, work, work / f"job-{job}.log"), output, work / f"job-{job}.log"))
    for worker, _, log in workers:
        if worker.wait(patience=1e6):
            print(log.read_text())
    lines = [line for _, output, _ in workers for line in output.read_text().splitlines()]
    return sorted((Result(**json.loads(line)) for line in lines), key=lambda result: result.number)


def run_point(work, args, number, kind, aim, undisturbed):
    """One point; its folder stays if something is wrong."""
    folder, log = work / f"point-{number:03d}", work / f"point-{number:03d}.log"
    folder.mkdir()
    result = Result(number, kind, aim, fresh=args.device == "cpu" and number % FRESH == FRESH - 1)
    rng = random.Random(f"{args.seed}/{number}")
    try:
        result.died = kill_somewhere(folder, log, args.device, kind, aim, undisturbed, rng)
        result.kills = 1
        go_on(folder, log, args.device, result, undisturbed, rng)
        result.differences = material.differences(experiment(undisturbed.folder, kind), experiment(folder, kind))
    except (Hung, RuntimeError) as error:
        result.problem = str(error)
    text = log.read_text()
    result.problem = result.problem or ("a traceback" if "Traceback" in text else "")
    if not (result.problem or result.differences or args.keep):
        shutil.rmtree(folder)
        log.unlink()
    return result


def kill_somewhere(folder, log, device, kind, aim, undisturbed, rng):
    """Start the run and kill it in the phase, if need be with several tries; returns the phase it died in."""
    for attempt in range(TRIES):
        for path in folder.iterdir():
            shutil.rmtree(path)
        board = Board()
        before = [partial(install, board)]
        if aim == "file":
            # of each sort of change the same number, and of those any
            sorts = {}
            for i, operation in enumerate(undisturbed.operations):
                sorts.setdefault("".join("#" if c.isdigit() else c for c in operation), []).append(i + 1)
            before.append(partial(watch_files, board, folder, rng.choice(sorts[rng.choice(sorted(sorts))])))
        child = material.stage_child(*material.arguments(kind, device), folder, log, before)
        if aim == "file":
            code = child.wait()
        else:
            code = strike(child, board, aim, rng.randint(1, undisturbed.entries[aim]), undisturbed.lasts[aim], rng)
        if code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"exit code {code} before the kill")
        main, writer = board.now()
        if code == -signal.SIGKILL and (aim in ("file", main, writer) or attempt == TRIES - 1):
            return aim if aim in ("file", main, writer) else writer if writer != "-" else main
    return "missed"


def strike(child, board, phase, times, lasts, rng):
    """Kill a child in a phase that it enters for the n-th time; returns its exit code."""
    while board.entries(phase) < times and not child.ended():
        time.sleep(0.0002)
    time.sleep(rng.uniform(0, lasts))
    child.send(signal.SIGKILL)
    return child.wait()


def go_on(folder, log, device, result, undisturbed, rng):
    """Resume until the end, with another kill on the way if chance will have it."""
    kind = result.kind
    if rng.random() < SECOND_KILL:
        board = Board()
        early = rng.random() < 0.5  # among what is put right at the start
        before = [partial(install, board)]
        if early:
            before.append(partial(watch_files, board, folder, rng.randint(1, 25)))
        child = material.stage_child(*material.arguments(kind, device, "--resume"), folder, log, before)
        if not early:
            wait = rng.uniform(0, undisturbed.seconds)
            end = time.monotonic() + wait
            while time.monotonic() < end and not child.ended():
                time.sleep(0.001)
            child.send(signal.SIGKILL)
        code = child.wait()
        if code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"exit code {code} on the way")
        result.kills += code == -signal.SIGKILL
    stage, flags = material.arguments(kind, device, "--resume")
    start = len(log.read_text())
    run = material.stage_process if result.fresh else material.stage_child
    material.expect(run(stage, flags, folder, log), log)
    text = log.read_text()[start:]
    found = {"resumed after step": "checkpoint", "is finished": "finished"}
    result.resumed = next((name for words, name in found.items() if words in text), "anew")


def table(results):
    """Stage and phase: points, how they went on, and how many ended differently."""
    rows = [("stage", "died in", "points", "from a checkpoint", "anew", "finished", "killed twice", "differences")]
    stages = {}
    for result in results:
        stages.setdefault(material.KINDS[result.kind][0], []).append(result)
    for stage, of_stage in stages.items():
        for phase in [*sorted({r.died for r in of_stage}), "all"]:
            some = [r for r in of_stage if phase in (r.died, "all")]
            how = Counter(r.resumed for r in some)
            wrong = sum(bool(r.differences or r.problem) for r in some)
            twice = sum(r.kills > 1 for r in some)
            rows.append((stage, phase, len(some), how["checkpoint"], how["anew"], how["finished"], twice, wrong))
        saving = sum(r.died in SAVING for r in of_stage)
        rows.append((stage, f"({' + '.join(SAVING)})", saving, "", "", "", "", ""))
    return "\n".join(
        "".join(f"{cell!s:<24}" if i < 2 else f"{cell!s:>18}" for i, cell in enumerate(row)) for row in rows
    )


if __name__ == "__main__":
    os.nice(0)
    sys.exit(main())
