"""The formats that are fuzzed: how a wrong input is made, and what reads it.

A reader gets the path that the input was written to. It may return, or raise an error of ours that names the path.
"""

import csv
import gzip
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import gguf
import pyarrow
import pyarrow.parquet
import torch
from hypothesis import strategies as st
from lightning.fabric import Fabric

from rlhf_stages import args
from rlhf_stages.cli import parse
from rlhf_stages.data import labelled, sources
from rlhf_stages.data.collate import collate_finetune, collate_preference
from rlhf_stages.data.daily_dialog import to_dialogue
from rlhf_stages.data.daily_dialog_files import read_dialogues
from rlhf_stages.data.info import read_data_info
from rlhf_stages.data.prepare import _Encoder
from rlhf_stages.data.rank_lists import read_rank_lists
from rlhf_stages.data.readers import BadLine
from rlhf_stages.data.shards import FORMAT_VERSION, ShardWriter, open_shard
from rlhf_stages.data.tokenizer import load_tokenizer
from rlhf_stages.evaluation.bootstrap import with_intervals
from rlhf_stages.evaluation.document import side_by_side
from rlhf_stages.evaluation.gold import load_score
from rlhf_stages.evaluation.policies import Reply, measures
from rlhf_stages.evaluation.table import interval_table
from rlhf_stages.experiment import parent_checkpoint, stage_name
from rlhf_stages.models.start import check_model_name
from rlhf_stages.rollout.samples import load_example_prompt

from fuzz.strategies import NUMBERS, changed_trees, damaged, json_files, one_of, scalars, trees
from helpers import load_script, make_tokenizer

OURS = (ValueError, FileNotFoundError, FloatingPointError)
TURNS = "\n\nHuman: name the price.\n\nAssistant: 12 EUR\n\nHuman: of the bike\n\nAssistant:"
RECORDS = [
    {"prompt": TURNS, "chosen": " the bike is good.", "rejected": " the lamp is bad."},
    {"chosen": TURNS + " so so", "rejected": TURNS + " 价廉物美"},
    {"prompt": 'name\tthe "colour"', "selected": "red, green\nblue", "rejected": "pink", "margin": 1.5, "label": 3},
]


@dataclass(frozen=True)
class Format:
    """`inputs(folder)` makes the strategy, `write(folder, input)` the file, and `read(path)` is what is tested."""

    inputs: Callable[[Path], st.SearchStrategy[Any]]
    write: Callable[[Path, Any], Path]
    read: Callable[[Path], object]


def as_file(name: str) -> Callable[[Path, bytes], Path]:
    """Writes the bytes of an input under a name; a folder in the name has to be there."""

    def write(folder: Path, content: bytes) -> Path:
        path = folder / name
        path.write_bytes(content)
        return path

    return write


# Records


@cache
def _preparation() -> tuple[list[Any], list[args.TextDataArgs], _Encoder]:
    scripts = [load_script(f"data_prep/{name}/prepare_data.py") for name in ("helpful_harmless", "summarization")]
    stages = [
        args.TextDataArgs(destination_dir="x", tokenizer_name="x", stage=stage, stage_split=split)
        for stage, split in {"finetune": "1,0,0", "preference": "0,1,0", "prompt": "0,0,1"}.items()
    ]
    return [script.to_example for script in scripts], stages, _Encoder(make_tokenizer(), 64, 96)


def read_records(path: Path) -> None:
    """All that is done to records before they are placed: read, judged for each stage, tokenized, listed."""
    to_examples, stages, encoder = _preparation()
    source = sources.read_source(str(path))
    for number, record in enumerate(source):
        for to_example in to_examples:
            stage = stages[number % len(stages)]
            for row, texts, raw in sources.judge([record], to_example, stage, set()):
                json.dumps({"raw": raw}, default=str)
                if texts and row.reason is None:
                    encoder([texts])
    assert all(count > 0 for reasons in source.skipped.values() for count in reasons.values())


def read_labels(path: Path) -> None:
    """As the classifier stage does; the file is a source, and the split is a column of it where one is so called."""
    columns = {"text_column": "prompt", "label_column": "label"}
    for more in ({}, {"split_column": "chosen"}):
        try:
            labelled.read_labelled(args.ClassifierArgs(source=str(path), **columns, **more))
        except ValueError as error:
            if type(error) is not ValueError:  # its children are nobody's message
                raise


def _jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


JSONL = [_jsonl(RECORDS), "".join(json.dumps(r, ensure_ascii=False) + "\r\n" for r in RECORDS).encode("utf-8-sig")]


def jsonl_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """Lines with wrong fields, wrong bytes, brackets without end."""
    lines = st.lists(changed_trees(RECORDS), min_size=1, max_size=3).map(_jsonl)
    deep = [b"[" * 100_000, b'{"chosen":' * 900 + b"1" + b"}" * 900, b'{"prompt": ' + b"1" * 5000 + b"}"]
    return st.one_of(lines, lines, damaged(JSONL), one_of(deep))


def gzip_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """Packed wrong lines, and packed files with wrong bytes."""
    packed = jsonl_inputs(folder).map(partial(gzip.compress, compresslevel=1, mtime=0))
    return st.one_of(packed, damaged([gzip.compress(content, mtime=0) for content in JSONL]))


def _csv(rows: list[dict[str, Any]]) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ["prompt", "chosen", "selected", "rejected", "margin", "label"])
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def csv_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """Wrong bytes, and tables of wrong cells."""
    cells = st.lists(st.lists(st.text(max_size=6), max_size=4), max_size=4)
    tables = cells.map(lambda rows: "\n".join(",".join(row) for row in rows).encode("utf-8", "surrogatepass"))
    large = [b"prompt,chosen\n" + b"x" * 200_000 + b',"' + b"y" * 200_000, b"prompt\n\0", b'"', b"prompt\n" + b'"' * 9]
    return st.one_of(damaged([_csv(RECORDS)]), tables, one_of(large))


ARROW_VALUES = {
    pyarrow.string(): ["a", None, TURNS],
    pyarrow.binary(): [b"\xff", None],
    pyarrow.int64(): [2**63 - 1, -5, None],
    pyarrow.float64(): [float("nan"), 1e300],
    pyarrow.timestamp("ns"): [2**62 + 1, -(2**62) - 1],
    pyarrow.timestamp("s", tz="Nowhere/At_All"): [2**40, 0],
    pyarrow.date64(): [86_400_000 * 2**30, 0],
    pyarrow.duration("ns"): [2**62 + 1, 0],
    pyarrow.decimal128(38, 2): [10, None],
    pyarrow.list_(pyarrow.string()): [["a", None], None, []],
    pyarrow.map_(pyarrow.string(), pyarrow.int32()): [[("a", 1), ("a", 2)], None],
    pyarrow.struct([("role", pyarrow.string())]): [{"role": "user"}, None],
    pyarrow.dictionary(pyarrow.int32(), pyarrow.string()): ["a", "b"],
}


@st.composite
def tables(draw):
    """Tables whose columns have any type."""
    names = draw(st.lists(one_of(["prompt", "chosen", "rejected", "x"]), min_size=1, max_size=3, unique=True))
    rows = draw(st.integers(0, 3))
    columns = {}
    for name in names:
        kind = draw(one_of([pyarrow.string(), pyarrow.string(), *ARROW_VALUES]))
        values = draw(st.lists(one_of(ARROW_VALUES[kind]), min_size=rows, max_size=rows))
        columns[name] = pyarrow.array(values, kind)
    return pyarrow.table(columns)


def _parquet(table: pyarrow.Table) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue()


def parquet_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """Wrong bytes, and columns of wrong types."""
    valid = [_parquet(pyarrow.Table.from_pylist(RECORDS)), _parquet(pyarrow.table({"prompt": ["a"] * 500}))]
    return st.one_of(damaged(valid), tables().map(_parquet))


def _arrow(table: pyarrow.Table) -> bytes:
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def saved_inputs(folder: Path) -> st.SearchStrategy[dict[str, bytes]]:
    """One of the files of a folder of `save_to_disk` at a time."""
    saved = folder / "valid"
    datasets.Dataset.from_list(RECORDS).save_to_disk(saved)
    files = {file.name: file.read_bytes() for file in saved.iterdir()}
    (arrow,) = (name for name in files if name.endswith(".arrow"))
    names = ["../outside.arrow", "/outside.arrow", "..", ".", "", "\0", "x" * 300, 3, None]
    states = json_files([json.loads(files["state.json"])])
    named = one_of(names).map(lambda name: json.dumps({"_data_files": [{"filename": name}]}).encode())
    changes = st.one_of(
        st.fixed_dictionaries({arrow: damaged([files[arrow]])}),
        st.fixed_dictionaries({arrow: damaged([files[arrow]])}),
        st.fixed_dictionaries({arrow: tables().map(_arrow)}),
        st.fixed_dictionaries({"state.json": st.one_of(states, named)}),
        st.fixed_dictionaries({"dataset_info.json": json_files([json.loads(files["dataset_info.json"])])}),
        st.fixed_dictionaries({"dataset_dict.json": json_files([{"splits": ["train"]}])}),
    )
    return changes.map(lambda changed: files | changed)


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    """The folder, without what the input before left."""
    target = folder / "folder"
    target.mkdir(exist_ok=True)
    for file in target.iterdir():
        if file.name not in files:
            file.unlink()
    for name, content in files.items():
        if not (target / name).is_file() or (target / name).read_bytes() != content:
            (target / name).write_bytes(content)
    return target


DIALOGUES = {
    f"dialogues_{kind}{split}.txt": {"": "Hi , Bob . __eou__ I don ’ t . __eou__\n"}.get(kind, "1 4\n")
    for split in ("train", "validation", "test")
    for kind in ("", "act_", "emotion_")
}


def dialogue_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """Zip files of DailyDialog, also nested, with wrong bytes, and with texts of wrong bytes."""

    def packed(files: dict[str, Any]) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return file.getvalue()

    whole = [packed(DIALOGUES), packed({"a/train.zip": packed(DIALOGUES)})]
    texts = [content.encode() for content in DIALOGUES.values()]
    changed = st.tuples(one_of(sorted(DIALOGUES)), damaged(texts)).map(lambda p: packed(DIALOGUES | {p[0]: p[1]}))
    inner = damaged(whole[:1]).map(lambda content: packed({"a/train.zip": content}))
    return st.one_of(damaged(whole), damaged(whole), changed, changed, inner)


def read_dialogue_zip(path: Path) -> None:
    """As the preparation does, dialogue by dialogue."""
    for _, record in read_dialogues(str(path)):
        try:
            dialogue = to_dialogue(record, "\n", keep_tokenization=False)
        except sources.SkipRecord as skip:
            assert str(skip)  # noqa: PT017  # a reason to count, whatever the input
        else:
            assert len(dialogue.utterances) == len(dialogue.acts) == len(dialogue.emotions)


# Tensors on disk


def read_shard(path: Path) -> None:
    """Open as the stages do, and read and collate every record."""
    for responses, rated in ((0, False), (2, True)):
        shard = open_shard(path, responses=responses, vocab_size=100, rated=rated)
        records = [shard[i] for i in range(min(len(shard), 1000))]
        assert shard.longest_prompt >= 0
        if responses:
            collate_preference(records, pad_token_id=3, use_margin=True)
        elif all(record.responses for record in records):
            collate_finetune(records, pad_token_id=3, ignore_index=-1, use_targets=True, mask_prompt=True)


def saved(content: Any) -> bytes:
    """What `torch.save` writes."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _columns() -> dict[str, Any]:
    writer = ShardWriter()
    writer.add([1, 2], [[3, 4, 2]], ratings=[2.0])
    writer.add([1], [[6, 2], [7, 8, 2]], [False, True], [1.0, 0.5], {"act": "inform", "turns": [1, None]})
    writer.add([1, 4], [])
    return {"format_version": FORMAT_VERSION, **writer.columns()}


def _dictionaries() -> list[dict[str, Any]]:
    ids = torch.tensor([1, 5, 6, 7, 2])
    return [
        {"prompt_len": 2, "input_ids": ids, "targets": torch.tensor([-1, -1, 6, 7, 2]), "metadata": {"a": 1}},
        {"prompt_len": 2, "chosen_input_ids": ids, "rejected_input_ids": ids[:3], "margin": 1.0},
        {"prompt_len": 0, "input_ids": [1, 5, 2]},
    ]


DTYPES = [torch.int32, torch.int64, torch.bool, torch.float32, torch.uint8, torch.complex64, torch.float16]


@st.composite
def tensors(draw):
    """Small tensors of any type and shape, also of the sizes that only a view can have."""
    kind = draw(st.integers(0, 9))
    dtype = draw(one_of(DTYPES))
    if kind == 0:
        return torch.zeros(1, dtype=dtype).expand(draw(one_of([2, 1000, 2**33, 2**45])))
    if kind == 1:
        return torch.empty(3, dtype=dtype, device="meta")
    if kind == 2:
        return torch.tensor([0, 1, 0], dtype=torch.float32).to_sparse()
    if kind == 3:
        return torch.arange(12, dtype=torch.int64)[:: draw(st.integers(1, 4))].to(dtype)
    shape = draw(one_of([(), (0,), (1,), (3,), (5,), (2, 2), (1, 0)]))
    tensor = torch.zeros(shape, dtype=dtype).flatten()
    for place in range(len(tensor)):
        number = draw(st.integers(-2, 7)) if draw(st.integers(0, 4)) else draw(one_of(NUMBERS))
        try:
            tensor[place] = number
        except (RuntimeError, OverflowError, ValueError):
            tensor[place] = 1
    return tensor.reshape(shape)


@st.composite
def changed_offsets(draw):
    """Columns of the right types with a few wrong numbers."""
    content = _columns()
    for _ in range(draw(st.integers(1, 2))):
        column = content[draw(one_of([name for name in content if name != "format_version"]))]
        number = draw(st.integers(-2, 9)) if draw(st.integers(0, 2)) else draw(one_of(NUMBERS))
        is_integer = column.dtype in (torch.int32, torch.int64, torch.uint8)
        limit = torch.iinfo(column.dtype).max if is_integer else 2**62
        column[draw(st.integers(0, len(column) - 1))] = min(number, limit)
    return content


def shard_inputs(content: Any) -> st.SearchStrategy[bytes]:
    """Wrong bytes, wrong values, wrong types."""
    values = st.one_of(tensors(), tensors(), trees)
    changed = changed_trees([content], values).map(_saved_or_nothing)
    return st.one_of(damaged([saved(content)]), damaged([saved(content)]), changed)


def _saved_or_nothing(content: Any) -> bytes:
    try:
        return saved(content)
    except (RuntimeError, UnicodeEncodeError):  # what torch cannot save it need not read
        return b""


def column_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """Shards in columns."""
    return st.one_of(shard_inputs(_columns()), changed_offsets().map(saved))


def dictionary_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """Shards as lists of dictionaries."""
    return shard_inputs(_dictionaries())


def example_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """example_prompt.pt."""
    ids = torch.tensor([[1, 5, 6]])
    return shard_inputs({"prompt": "a", "input_ids": ids, "attention_mask": torch.ones_like(ids)})


@cache
def _fabric() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def read_example(path: Path) -> None:
    """What is read is one row of ids that the model has."""
    prompt = load_example_prompt(path.parent, _fabric(), vocab_size=100)
    assert prompt.input_ids.shape == prompt.attention_mask.shape
    assert len(prompt.input_ids) == 1
    assert 0 <= int(prompt.input_ids.min()) <= int(prompt.input_ids.max()) < 100


# JSON and YAML

DATA_INFO = [
    {"dataset": "toy", "tokenizer": {"name": "x", "fingerprint": "ab"}, "chat_template": None, "mask_prompt": True},
    {"tokenizer_name": "x", "ignore_index": -100, "mask_prompt": False},
    {"dataset": "toy", "tokenizer": {"name": "x"}, "chat_template": "{{ messages }}", "ignore_index": -1},
]


def read_info(path: Path) -> None:
    """What is used as a path, a number or a text is one."""
    info = read_data_info(path.parent)
    log_dir = path.parent / "runs"
    assert (log_dir / info.dataset).resolve().parent == log_dir.resolve()
    torch.empty(1, dtype=torch.int64)[0] = info.ignore_index
    assert isinstance(info.chat_template, str | None)


EXPERIMENT = [{"stage": "sft", "model_args": {"model_name": "x"}, "parents": {}, "data_args": {"dataset": "toy"}}]


def experiment_inputs(folder: Path) -> st.SearchStrategy[dict[str, bytes]]:
    """args.json and `latest`."""
    names = [b"step-000001\n", b"", b"..", b"../..", b"\xff", b"\0", b"x" * 300, b"/etc"]
    latest = st.one_of(one_of(names), st.binary(max_size=12))
    return st.one_of(
        st.fixed_dictionaries({"args.json": json_files(EXPERIMENT), "latest": st.just(b"step-000001\n")}),
        st.fixed_dictionaries({"args.json": st.just(json.dumps(EXPERIMENT[0]).encode()), "latest": latest}),
    )


def write_experiment(folder: Path, files: dict[str, bytes]) -> Path:
    """An experiment with one checkpoint."""
    checkpoint = folder / "run" / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.json").write_text("{}")
    for name, content in files.items():
        (folder / "run" / name).write_bytes(content)
    return folder / "run"


def read_experiment(path: Path) -> None:
    """As a later stage does."""
    checkpoint, content = parent_checkpoint(path, stage="sft", flag="--sft_experiment_dir")
    assert checkpoint.resolve().is_relative_to(path.resolve())
    stage_name(checkpoint)
    check_model_name("x", content, f"--sft_experiment_dir={path}")


STAGES = {"sft": args.SFTArgs, "rm": args.RMArgs, "ppo": args.PPOArgs, "dpo": args.DPOArgs}
CONFIG = {
    "epochs": 2, "learning_rate": 1e-4, "data_dir": "data", "model_name": "x", "lora_targets": "q_proj,v_proj",
    "finetune_mode": "lora", "use_targets": True, "max_steps": 3, "sft_experiment_dir": "s", "rm_experiment_dir": "r",
    "stage_split": "1,1,0", "experiment_dirs": ["a", "b"], "temperature": 0.7, "precision": "32-true",
}  # fmt: skip
YAML = [
    "epochs: 2\nlearning_rate: 1e-4\ndata_dir: data\nmodel_name: x\n",
    "# a comment\nexperiment_dirs: [a, 'b']\nlora_targets: |\n  q_proj\n",
    "seed: 0x2A\nmax_steps: 1_000\nlog_dir: ~\nbase: &b {a: 1}\nmore: *b\n",
]
TAGS = ["!!timestamp x", "!!int ''", "!!bool x", "!!float x", "!!binary x", "!!python/object:os.system x", "!!set x"]
HOSTILE = [
    "[" * 1_000,
    "a: " + "{a: " * 2_000,
    "epochs: 2024-13-45",
    "epochs: " + "1" * 5_000,
    "epochs: 0x" + "f" * 5_000,
    "? [a]\n: b",
    "lora_targets: (1)",
    "lora_targets: " + "(" * 300,
    "lora_targets: '([{[]: 1}])'",
    "stage_split: nan,1,1",
    "\0",
    "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(
        f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    + "epochs: *i\n",
    "epochs: &a [*a]",
]


def yaml_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """Flags with wrong values, wrong bytes, and what YAML can do beside."""
    flags = st.dictionaries(one_of(sorted(CONFIG)), st.one_of(scalars, trees), min_size=1, max_size=3)
    written = flags.map(lambda wrong: json.dumps({**wrong}).encode())  # JSON is YAML
    tagged = st.tuples(one_of(sorted(CONFIG)), one_of(TAGS)).map(lambda p: f"{p[0]}: {p[1]}".encode())
    hostile = one_of([text.encode() for text in HOSTILE])
    return st.one_of(written, damaged([text.encode() for text in YAML]), tagged, hostile)


def read_config(path: Path) -> None:
    """Each stage either takes the flags or ends in one line that says what is wrong."""
    group = STAGES[sorted(STAGES)[path.stat().st_size % len(STAGES)]]
    code = 2
    try:
        parse(group, args.ModelArgs, args.FabricArgs, argv=[f"--config={path}"])
    except SystemExit as stop:
        code = stop.code
    assert code == 2


# Ranked lists, GGUF, functions, tokenizers

RANKS = ['好吃\t不错\t一般\t差\n很好\t"差"\n'.encode(), b"a\tb\r\nc\td\te\r\n\r\nf\tg"]


def rank_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """Wrong bytes, and lists of any texts."""
    texts = st.lists(st.lists(st.text(max_size=4), max_size=4), max_size=4)
    lists = texts.map(lambda rows: "\n".join(map("\t".join, rows)).encode("utf-8", "surrogatepass"))
    return st.one_of(damaged(RANKS), lists)


def read_ranks(path: Path) -> None:
    """Every line that is not empty is a list of at least two different texts, or has a reason."""
    for row in read_rank_lists(path, prompt="a"):
        assert row.line > 0
        if isinstance(row, BadLine):
            assert row.why
        else:
            assert len(set(row.responses)) == len(row.responses) >= 2
            assert all(text.strip() and text.encode() for text in row.responses)


def gguf_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """Headers with wrong bytes, and values of wrong types under the names that are read."""
    writer = gguf.GGUFWriter(folder / "valid.gguf", "llama")
    writer.add_name("tiny")
    writer.add_license("cc0-1.0")
    writer.add_token_list(["<s>", "a", "b"])
    writer.add_bos_token_id(0)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("w", torch.zeros(2, 2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    names = ["general.name", "general.license", "tokenizer.chat_template", "tokenizer.ggml.bos_token_id"]
    # a key, then its type: 4 uint32, 6 float32, 7 bool, 8 string, 9 array
    values = [b"\4\0\0\0\1\0\0\0", b"\6\0\0\0\0\0\xc0\x7f", b"\7\0\0\0\2", b"\x08\0\0\0" + b"\xff" * 8]
    values += [b"\x09\0\0\0" + (b"\x09\0\0\0" + (1).to_bytes(8, "little")) * n + b"\0" * 12 for n in (1, 2000)]
    values += [b"\x09\0\0\0\0\0\0\0" + (2**40).to_bytes(8, "little") + b"\1" * 4000]

    def with_value(pair: tuple[str, bytes]) -> bytes:
        name, value = pair
        size = len(name).to_bytes(8, "little")
        return b"GGUF\3\0\0\0" + (0).to_bytes(8, "little") + (1).to_bytes(8, "little") + size + name.encode() + value

    crafted = st.tuples(one_of(names), one_of(values)).map(with_value)
    wrong = damaged([(folder / "valid.gguf").read_bytes()])
    return st.one_of(wrong, wrong, wrong, wrong, crafted, zip_inputs((folder / "valid.gguf").read_bytes()))


def zip_inputs(content: bytes) -> st.SearchStrategy[bytes]:
    """Wheels whose bytes or names are wrong."""
    packed = []
    for name in ("a/model.gguf", "../../outside.gguf", "/outside.gguf", "model.txt"):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, content)
        packed.append(file.getvalue())
    return st.one_of(one_of(packed), damaged(packed))


@cache
def _importer() -> Any:
    return load_script("scripts/import_gguf.py")


def read_gguf(path: Path) -> None:
    """As import_gguf.py does before it converts."""
    unpacked = path.parent / "unpacked"
    unpacked.mkdir(exist_ok=True)
    found = _importer().find_gguf(path, unpacked)
    assert found == path or found.parent == unpacked
    _importer().read_metadata(found)
    assert not (path.parent / "outside.gguf").exists()


class _Odd:
    def __float__(self) -> float:
        raise KeyError("no number")


RETURNED = [
    _Odd(),
    _Odd,
    object(),
    b"1",
    {"a": 1},
    [1.0],
    (1,),
    1j,
    torch.zeros(2),
    torch.tensor(1.5),
    torch.nan,
    "nan",
]
RAISED = [
    ValueError("x"),
    KeyError("x"),
    TypeError,
    AssertionError,
    RecursionError,
    MemoryError,
    StopIteration,
    OSError,
]


def gold_inputs(folder: Path) -> st.SearchStrategy[Any]:
    """What a user's function returns, or raises."""
    return st.one_of(scalars, trees, one_of(RETURNED), one_of(RAISED))


def write_gold(folder: Path, value: Any) -> Path:
    """A file with a function, which finds its value here."""
    VALUES["value"] = value
    path = folder / "score.py"
    if not path.is_file():
        path.write_text("import fuzz.formats\n\ndef score(prompt, response):\n    return fuzz.formats.returned()\n")
    return path


VALUES: dict[str, Any] = {}


def returned() -> Any:
    """The value of this input."""
    value = VALUES["value"]
    if isinstance(value, BaseException) or (isinstance(value, type) and issubclass(value, BaseException)):
        raise value
    return value


@cache
def _score(reference: str) -> Callable[[str, str], float]:
    return load_score(reference)


def read_gold(path: Path) -> None:
    """The score of a reply in the summary and the table, as evaluate.py uses it."""
    gold = _score(f"{path}:score")("a", "b")
    assert type(gold) is float
    reply = Reply(prompt="a", text="b", tokens=1, ended=True, kl=0.0, reward=None, gold=gold)
    found, whole = measures([reply, reply])
    interval_table(with_intervals({"ppo": found}, 10, seed=0), {"ppo": whole}, 10, markdown=False)
    side_by_side({"ppo": [reply]}, 1)


def tokenizer_inputs(folder: Path) -> st.SearchStrategy[dict[str, bytes]]:
    """One of the files of a tokenizer at a time."""
    make_tokenizer().save_pretrained(folder / "valid")
    files = {file.name: file.read_bytes() for file in (folder / "valid").iterdir()}
    changes = [st.fixed_dictionaries({name: json_files([json.loads(files[name])])}) for name in files]
    return st.one_of(changes).map(lambda changed: files | changed)


def read_tokenizer(path: Path) -> None:
    """A tokenizer that loads can be used."""
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.eos_token_id is not None


FORMATS: dict[str, Format] = {
    "jsonl": Format(jsonl_inputs, as_file("train.jsonl"), read_records),
    "jsonl.gz": Format(gzip_inputs, as_file("train.jsonl.gz"), read_records),
    "csv": Format(csv_inputs, as_file("train.csv"), read_records),
    "labels in jsonl": Format(jsonl_inputs, as_file("train.jsonl"), read_labels),
    "labels in csv": Format(csv_inputs, as_file("train.csv"), read_labels),
    "parquet": Format(parquet_inputs, as_file("train.parquet"), read_records),
    "save_to_disk": Format(saved_inputs, write_folder, read_records),
    "daily_dialog zip": Format(dialogue_inputs, as_file("dialogues.zip"), read_dialogue_zip),
    "rank lists": Format(rank_inputs, as_file("dev.tsv"), read_ranks),
    "shard of columns": Format(column_inputs, as_file("shard.pt"), read_shard),
    "shard of dictionaries": Format(dictionary_inputs, as_file("shard.pt"), read_shard),
    "example_prompt.pt": Format(example_inputs, as_file("example_prompt.pt"), read_example),
    "args.json of data": Format(lambda folder: json_files(DATA_INFO), as_file("args.json"), read_info),
    "experiment": Format(experiment_inputs, write_experiment, read_experiment),
    "yaml": Format(yaml_inputs, as_file("config.yaml"), read_config),
    "gguf": Format(gguf_inputs, as_file("model.gguf"), read_gguf),
    "gold score": Format(gold_inputs, write_gold, read_gold),
    "tokenizer": Format(tokenizer_inputs, write_folder, read_tokenizer),
}
# loading one takes a hundred times as long
SLOW = {"tokenizer"}
# parsers in Python, whose branches a fuzzer can see
GUIDED = ["jsonl", "csv", "rank lists", "args.json of data", "yaml", "gguf"]
