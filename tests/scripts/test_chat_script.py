import importlib.util
import io
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from transformers.utils import logging

from rlhf_stages.args import ChatArgs, GenerationArgs
from rlhf_stages.chat import ChatSession
from rlhf_stages.terminal import printable

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "chat.py"
GREEDY = ["--do_sample=False", "--max_new_tokens=12", "--device=cpu"]


def save_tiny(folder, model_class=LlamaForCausalLM):
    """A random model that knows bytes."""
    vocabulary = ["<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256, initializer_range=1.0, num_labels=1,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model_class(config).save_pretrained(folder)
    return folder


@pytest.fixture
def script(monkeypatch):
    """The script as a module, and the library's verbosity put back afterwards."""
    spec = importlib.util.spec_from_file_location("chat_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    verbosity = logging.get_verbosity()
    yield module
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


def lines(monkeypatch, *given):
    """Make input() return the lines, then end; an exception among them is raised."""
    waiting = iter([*given, EOFError()])

    def read(prompt=""):
        line = next(waiting)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))


class Parrot:
    """Stands for a session: repeats what it hears, in two pieces."""

    def __init__(self):
        self.heard, self.resets = [], 0

    def stream(self, text, settings):
        self.heard.append(text)
        yield text[:2]
        if text == "interrupt me":
            raise KeyboardInterrupt
        yield text[2:]

    def reset(self):
        self.resets += 1


def test_commands(script, monkeypatch, capsys):
    parrot = Parrot()
    lines(monkeypatch, "hello", "", "   ", " reset ", "again", "quit", "never read")
    script.talk(parrot, ChatArgs(path="x"))
    assert parrot.heard == ["hello", "again"]
    assert parrot.resets == 1
    assert capsys.readouterr().out == "Model: hello\n(starting over)\nModel: again\n"


@pytest.mark.parametrize("word", ["quit", "exit", "q"])
def test_words_that_leave(script, monkeypatch, word):
    parrot = Parrot()
    lines(monkeypatch, word, "never read")
    script.talk(parrot, ChatArgs(path="x"))
    assert parrot.heard == []


def test_ctrl_c_stops_a_reply_and_then_leaves(script, monkeypatch, capsys):
    parrot = Parrot()
    lines(monkeypatch, "interrupt me", "go on", KeyboardInterrupt(), "never read")
    script.talk(parrot, ChatArgs(path="x"))
    assert parrot.heard == ["interrupt me", "go on"]
    assert capsys.readouterr().out == "Model: in (stopped)\nModel: go on\n\n"


def run_main(script, monkeypatch, capsys, *argv, typed=b""):
    monkeypatch.setattr("sys.argv", ["chat.py", *map(str, argv)])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
    script.main()
    return capsys.readouterr().out


def test_a_piped_conversation(script, monkeypatch, capsys, tmp_path):
    folder = save_tiny(tmp_path / "model")
    session = ChatSession.load(folder)
    settings = GenerationArgs(do_sample=False, max_new_tokens=12)
    first, second = (printable(session.reply(text, settings)) for text in ("hi", "and you?"))
    typed = b"hi\n\nand you?\nreset\nhi\nquit\nnever read\n"
    out = run_main(script, monkeypatch, capsys, "--model", folder, *GREEDY, typed=typed)
    start, _, talk = out.partition("You: ")
    assert f"{folder}: 0.0 million parameters, cpu, float32" in start
    assert "brings no chat template" in start
    assert talk == (
        f"hi\nModel: {first}\n\nYou: \n\nYou: and you?\nModel: {second}\n\n"
        f"You: reset\n(starting over)\n\nYou: hi\nModel: {first}\n\nYou: quit\n"
    )


def test_the_end_of_the_input_ends_it_and_bytes_that_are_no_text_do_not(script, monkeypatch, capsys, tmp_path):
    out = run_main(script, monkeypatch, capsys, save_tiny(tmp_path / "model"), *GREEDY, typed=b"caf\xe9")
    assert out.endswith("\n\nYou: \n")
    assert out.count("Model: ") == 1


def test_a_seed_repeats_a_sampled_conversation(script, monkeypatch, capsys, tmp_path):
    folder = save_tiny(tmp_path / "model")
    argv = [folder, "--device=cpu", "--max_new_tokens=12", "--temperature=2"]
    one, same, other = (
        run_main(script, monkeypatch, capsys, *argv, f"--seed={seed}", typed=b"hi\n") for seed in (1, 1, 2)
    )
    assert one == same != other


def test_help_answers_at_once():
    start = time.perf_counter()
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 3
    assert "Experiment, one of its checkpoints" in done.stdout
    for flag in ("PATH", "--model", "--temperature", "--top_k", "--top_p", "--max_new_tokens", "--do_sample", "--seed",
                 "--device", "--precision"):  # fmt: skip
        assert flag in done.stdout
    assert "num_beams" not in done.stdout


@pytest.mark.parametrize("argv", [[], ["a", "--model=b"], ["a", "--temperature=0"], ["a", "--num_beams=2"]])
def test_wrong_flags_are_said_in_one_line(script, monkeypatch, capsys, argv):
    monkeypatch.setattr("sys.argv", ["chat.py", *argv])
    with pytest.raises(SystemExit) as error:
        script.main()
    assert error.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def run_program(*command, typed=""):
    return subprocess.run([sys.executable, *command], input=typed, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_as_a_program(tmp_path):
    done = run_program(SCRIPT, save_tiny(tmp_path / "model"), *GREEDY, typed="hi\nreset\nhi\nquit\n")
    assert done.returncode == 0
    assert done.stderr == ""
    first, second = (part.split("\n")[0] for part in done.stdout.split("Model: ")[1:])
    assert first == second != ""


@pytest.mark.slow
def test_a_reward_model_is_one_line_on_stderr(tmp_path):
    scorer = save_tiny(tmp_path / "rm", LlamaForSequenceClassification)
    done = run_program(SCRIPT, scorer, typed="hi\n")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {scorer} is a reward model")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_chat_starts_without_lightning():
    modules = run_program("-c", "import sys, rlhf_stages.chat; print(*sys.modules)").stdout.split()
    assert "rlhf_stages.chat" in modules
    assert "lightning" not in modules
