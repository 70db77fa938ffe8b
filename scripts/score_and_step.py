#!/usr/bin/env python3
"""Score replies in a terminal, and let the model learn from each score at once: one PPO step per score.

    python scripts/score_and_step.py --sft_experiment_dir=experiments/helpdesk/helpdesk-tiny/sft \\
        --prompts=data/helpdesk/helpdesk-tiny/prompt_train.pt

Scores go to the database of annotate.py, the model to an experiment folder. The same command with --resume goes on.
"""

from pathlib import Path
from typing import Any

from rlhf_stages.args import FabricArgs, ModelArgs, ScoreAndStepArgs
from rlhf_stages.cli import parse, run
from rlhf_stages.terminal import printable

HELP = "a number from -2.0 to 2.0; skip, undo (the last score and its step), save, quit; s is skip, u undo, q quit"
WORDS = ("skip", "undo", "save", "quit", "help")


def main(argv: list[str] | None = None) -> Path:
    """Ask, learn, and ask again; returns the experiment folder."""
    args, model_args, fabric_args = parse(ScoreAndStepArgs, ModelArgs, FabricArgs, argv=argv, description=__doc__)

    import signal
    import uuid
    from dataclasses import replace

    from transformers.utils import logging

    from rlhf_stages import loop
    from rlhf_stages.data.tokenizer import load_tokenizer
    from rlhf_stages.experiment import Experiment, describe, digest, resolve_checkpoint
    from rlhf_stages.feedback.learner import Learner
    from rlhf_stages.feedback.scoring import Session
    from rlhf_stages.feedback.store import Store
    from rlhf_stages.feedback.wording import Refusal
    from rlhf_stages.files import read_json
    from rlhf_stages.models.start import starting_point

    # 1. The model, its reference, and the run; all that may be wrong with the input is found before the folder is made
    logging.disable_progress_bar()
    if fabric_args.devices not in ("auto", "1"):
        raise ValueError(f"--devices={fabric_args.devices}: one person teaches one model on one device")
    fabric = loop.start_fabric(replace(fabric_args, devices="1"), args.seed)
    start, parents = starting_point(model_args.model_name, sft=args.sft_experiment_dir)
    if Path(start).is_dir():
        start = resolve_checkpoint(start)
        parents = parents or {"model": start}
    tokenizer = load_tokenizer(str(start), model_args.trust_remote_code)
    model_args = replace(model_args, disable_dropout=True)
    learner = Learner(fabric, start, tokenizer, args, model_args)
    groups = {"train_args": args.ppo, "model_args": model_args, "data_args": {"prompts": args.prompts}}
    content: dict[str, Any] = describe("ppo", groups, {}, parents) | {"run": {"id": uuid.uuid4().hex}}
    directory = Path(args.log_dir) / "people" / args.experiment_name / "ppo"
    going_on = args.resume and (directory / "args.json").is_file()
    if going_on:
        content["run"] = read_json(directory / "args.json").get("run", {})
        Experiment(directory).check_same_run(content)
    store = Store(args.database)
    model = str(start), digest(Path(start)) if Path(start).is_dir() else ""
    session = Session(args, store, learner, Experiment(directory), content["run"]["id"], model)
    if not going_on:
        Experiment.create(directory, content, overwrite=args.overwrite)
    for note in session.resume() if going_on else []:
        print(note)

    # 2. Prompt, reply, score, step
    def say_step(metrics: dict[str, float] | None) -> None:
        if metrics is None:
            print(f"kept; {session.waiting} of {args.scores_per_step} scores for the next step")
        else:
            print(f"step {session.steps}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
            draw(directory / "scores.png", *session.history())

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    answer = ""
    while answer != "quit":
        try:
            if session.shown is None:
                prompt = None
                if session.types_prompts:
                    prompt = ask(f"\n[Step {session.steps + 1}]\nprompt>>> ", slash=True)
                    if prompt in WORDS:
                        answer = prompt
                        act(answer, session)
                        continue
                session.next(prompt)
                show(session, with_prompt=not session.types_prompts)
            answer = ask("Reward (-2.0 ~ 2.0): ")
            if answer in WORDS:
                act(answer, session)
            elif (score := number(answer)) is None:
                print(f"{printable(answer[:40])!r} is no score: {HELP}")
            else:
                say_step(session.score(score))
        except FloatingPointError as error:
            print(f"the step is left out, for {error}; the weights are as before")
        except Refusal as refusal:
            print(refusal)
        except ValueError as error:
            if not session.types_prompts:
                raise
            print(f"error: {printable(str(error))}")

    # 3. Done
    checkpoint = session.save()
    draw(directory / "scores.png", *session.history())
    store.close()
    print(f"scores      {args.database}\nmodel       {checkpoint}\nnext        python scripts/chat.py {directory}")
    return directory


def ask(question: str, slash: bool = False) -> str:
    """A line of the person, or one of WORDS; the end of the input and Ctrl-C are `quit`.

    Args:
        slash: a word needs a slash before it, for everything else is a prompt.
    """
    try:
        line = input(question).strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return "quit"
    word = line.removeprefix("/").lower()
    if slash and not line.startswith("/"):
        return line if line not in WORDS else f"{line} "  # a prompt that is such a word
    return next((name for name in WORDS if word in (name, name[0])), "help" if line in ("?", "") else line)


def number(text: str) -> float | None:
    """The score that a person typed, or None; the range is the session's to check."""
    try:
        return float(text.replace("−", "-").replace(",", "."))
    except ValueError:
        return None


def act(word: str, session: Any) -> None:
    """Do what a word says; the loop sees to `quit`."""
    if word == "help":
        print(HELP)
    elif word == "skip":
        session.skip()
    elif word == "save":
        print(f"saved {session.save()}")
    elif word == "undo":
        session.undo()
        print("the last score is taken back")
        show(session, with_prompt=True)


def show(session: Any, with_prompt: bool) -> None:
    """The reply that waits for its score; what a model writes cannot steer the terminal."""
    shown = session.shown
    if with_prompt:
        print(f"\n[Step {session.steps + 1}]\nprompt>>> {printable(shown.reply.prompt.strip())}")
    print(f"result>>> {printable(shown.reply.text.strip())}", flush=True)


def draw(path: Path, scores: list[float], seconds: list[float]) -> None:
    """Reward and time of each label, and the mean of the last ten, as a PNG file that is there whole or as it was."""
    if not scores:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, values, (low, high), title, unit in (
        (left, scores, (-2.2, 2.2), "Reward", "score"),
        (right, seconds, (0.0, 1.1 * max(*seconds, 1e-3)), "Time used", "seconds per label"),
    ):
        places = range(1, len(values) + 1)
        means = [sum(values[max(i - 10, 0) : i]) / min(i, 10) for i in places]
        axes.plot(places, values, "o", color="#2864b4", markersize=4, alpha=0.5, label="label")
        axes.plot(places, means, color="#c4571b", label="mean of the last 10")
        axes.set(title=title, xlabel="label", ylabel=unit, ylim=(low, high))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


if __name__ == "__main__":
    run(main)
