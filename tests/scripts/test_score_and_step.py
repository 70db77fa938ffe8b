"""scripts/score_and_step.py as a person uses it: lines typed into a process, which may be killed."""

import json
import os
import signal
import subprocess
import sys

import pytest

from rlhf_stages.feedback.store import Store

from helpers import ROOT, load_script, save_causal

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-u", str(ROOT / "scripts" / "score_and_step.py")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_causal(tmp_path_factory.mktemp("terminal") / "model", dropout=0.1)


@pytest.fixture
def flags(model, tmp_path):
    (tmp_path / "prompts.txt").write_text("name the price of the red tea\nname the size of the blue bike\n")
    return [
        f"--model_name={model}", f"--prompts={tmp_path / 'prompts.txt'}", f"--log_dir={tmp_path / 'runs'}",
        f"--database={tmp_path / 'f.sqlite'}", "--accelerator=cpu", "--learning_rate=1e-2", "--annotator=ann",
    ]  # fmt: skip


def type_in(flags, *lines, code=0):
    """What the process prints when a person types these lines and then closes the terminal."""
    done = subprocess.run([*COMMAND, *flags], input="".join(f"{line}\n" for line in lines), text=True, cwd=ROOT,
                          capture_output=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def scores(tmp_path):
    store = Store(tmp_path / "f.sqlite")
    found = [judgement.opinion.score for judgement, _ in store.judgements()[::-1]]
    store.close()
    return found


def weights(tmp_path):
    (checkpoint,) = (tmp_path / "runs" / "people" / "scored" / "ppo" / "checkpoints").iterdir()
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}


def test_a_session_in_a_terminal(flags, tmp_path):
    assert "no-such-file" in type_in([*flags, "--prompts=no-such-file.txt"], code=2)  # and no folder is left behind
    said = type_in(flags, "5", "good", "1.5", "-1", "undo", "0,5", "skip", "?", "-2.0", "save", "quit")
    assert "Give a score from -2 to 2." in said
    assert "'good' is no score: a number from -2.0 to 2.0; skip, undo" in said
    assert [said.count(f"step {n}: loss") for n in (1, 2, 3)] == [1, 2, 1]
    assert "the last score is taken back" in said
    assert scores(tmp_path) == [1.5, 0.5, None, -2.0]
    folder = tmp_path / "runs" / "people" / "scored" / "ppo"
    assert (folder / "scores.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "latest").read_text().strip() == "step-000003"
    again = type_in(flags, code=2)
    assert "holds a run already; continue it with --resume" in again
    said = type_in([*flags, "--resume"], "2")  # the end of the input is `quit`
    assert "3 scores learned in 3 steps, 0 wait" in said
    assert "step 4: loss" in said
    reply = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "chat.py"), str(folder), "--device=cpu", "--max_new_tokens=4"],
        input="name it\n", text=True, capture_output=True, cwd=ROOT, timeout=300, check=False,
    )  # fmt: skip
    assert reply.returncode == 0, reply.stderr
    assert "is another run" in type_in([*flags, "--resume", "--gae_lambd=0.5"], code=2)


def test_prompts_that_are_typed_and_two_scores_a_step(flags, tmp_path):
    flags = [flag for flag in flags if not flag.startswith("--prompts")]
    lines = ("name the tea", "1", "name " * 80, "name the bike", "-1", "/undo", "u", "1", "/quit")
    said = type_in([*flags, "--scores_per_step=2"], *lines)
    assert said.count("kept; 1 of 2 scores for the next step") == 2
    assert "the model has positions for 64" in said
    assert "step 1: loss" in said


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_costs_nothing_and_ends_with_the_same_bits(flags, tmp_path, how):
    given = ["1", "-1", "skip", "0.5", "2", "-2"]
    process = subprocess.Popen([*COMMAND, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    for line in given[:4]:
        read_to(process, "Reward (-2.0 ~ 2.0): ")
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    shown = read_to(process, "Reward (-2.0 ~ 2.0): ")  # the fourth score is acknowledged, and a reply waits
    process.send_signal(how)
    rest = process.communicate(timeout=120)[0]
    assert (process.returncode, "model       " in rest) == ((-9, False) if how == signal.SIGKILL else (0, True))
    said = type_in([*flags, "--resume"], *given[4:])
    reply = shown[shown.index("result>>>") :]
    assert reply in said  # the same one again
    assert scores(tmp_path) == [1.0, -1.0, None, 0.5, 2.0, -2.0]
    killed = weights(tmp_path)
    os.rename(tmp_path / "f.sqlite", tmp_path / "killed.sqlite")
    type_in([*flags, "--overwrite"], *given)
    assert weights(tmp_path) == killed


def read_to(process, mark):
    """What a process prints up to a question, which ends no line."""
    said = ""
    while not said.endswith(mark):
        character = process.stdout.read(1)
        assert character, said
        said += character
    return said


def test_words_and_numbers(monkeypatch):
    script = load_script("scripts/score_and_step.py")
    assert [script.number(text) for text in ("1", "-0.5", "−1", "0,5", "x", "")] == [1.0, -0.5, -1.0, 0.5, None, None]
    for typed, wanted in (("q", "quit"), ("/undo", "undo"), ("SKIP", "skip"), ("", "help"), ("1.5", "1.5")):
        monkeypatch.setattr("builtins.input", lambda _, typed=typed: typed)
        assert script.ask("?") == wanted
    for typed, wanted in (("quit", "quit "), ("/quit", "quit"), ("why?", "why?"), ("s", "s")):
        monkeypatch.setattr("builtins.input", lambda _, typed=typed: typed)
        assert script.ask("?", slash=True) == wanted
