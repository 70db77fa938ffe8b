"""One preparation of a tokenizer, so that data, training, scoring and chat agree on every id."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_stages.terminal import first_line

PAD_TOKEN_NAMES = ("<|padding|>", "<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>")
NEW_PAD_TOKEN = "<|pad|>"
SEPARATORS = ("\n", "\n\n", " |", "\t", " /", "|")  # What may part turns, the first choice first
_PROBE = "\n\nHuman: How much is 12 + 30? \n\nAssistant: It's 42, naïve 答案."


def load_tokenizer(name_or_path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer and give it a padding token of its own.

    A padding id that is also EOS hides the real EOS from everything that finds the end of a text by looking for padding
    (Hugging Face's sequence classifiers do), so the padding token is, in this order: the tokenizer's own if it is not
    EOS, an unused padding token of the vocabulary, the unknown token, or a new token `<|pad|>` (the model's embedding
    grows by a row when it is loaded).

    The tokenizer of an encoder, which has [CLS] and [SEP] instead of BOS and EOS, uses those.

    Raises:
        ValueError: no such folder, nothing loads from `name_or_path`, or the tokenizer has no EOS token.
    """
    path = Path(name_or_path)
    if not path.exists() and path.parent != Path() and path.parent.is_dir():
        raise ValueError(f"no folder {name_or_path!r}, though {str(path.parent)!r} is one; a hub id is owner/name")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged folder raises half a dozen types
        reason = first_line(error)
        raise ValueError(f"no tokenizer could be loaded from {name_or_path!r} (hub id or folder?): {reason}") from None
    if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
        names = {"bos_token": tokenizer.cls_token, "eos_token": tokenizer.sep_token}
        tokenizer.add_special_tokens({role: token for role, token in names.items() if token is not None})
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {name_or_path!r} has no EOS token, so no response could end;"
            ' name one in its tokenizer_config.json ("eos_token")'
        )
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        vocabulary = tokenizer.get_vocab()
        spare = next((name for name in PAD_TOKEN_NAMES if name in vocabulary and name != tokenizer.eos_token), None)
        if spare is None and tokenizer.unk_token_id not in (None, tokenizer.eos_token_id, tokenizer.bos_token_id):
            spare = tokenizer.unk_token
        tokenizer.add_special_tokens({"pad_token": spare or NEW_PAD_TOKEN})
    return tokenizer


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a piece of text: nothing added, and special tokens spelled out in the text stay plain text."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return ids


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, separator: str | None = None) -> list[int]:
    """Ids of a prompt: BOS, if the tokenizer has one, and the text.

    With a `separator` the text is turns that each end with it, and each is encoded on its own, so that its ids do not
    depend on what was said before (some tokenizers mark the start of a text, but not that of a line). Raises as
    `separator_id` does.
    """
    bos = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    if separator is None:
        return bos + encode_text(tokenizer, text)
    end = separator_id(tokenizer, separator)
    turns = text.removesuffix(separator).split(separator)
    return bos + [token for turn in turns for token in (*encode_text(tokenizer, turn), end)]


def separator_id(tokenizer: PreTrainedTokenizerBase, separator: str) -> int:
    """The token that a separator of turns is, after a word as well as after punctuation.

    Raises:
        ValueError: it is not one token; the message names some that are.
    """
    found = _separator_id(tokenizer, separator)
    if found is None:
        usable = [repr(text) for text in SEPARATORS if _separator_id(tokenizer, text) is not None]
        advice = f"pass {' or '.join(usable)}" if usable else "add a token to the tokenizer, and pass that"
        raise ValueError(
            f"--turn_separator {separator!r} is not one token of {tokenizer.name_or_path!r} between a word or a full"
            f" stop and the next word, so that no model could learn it as one; {advice}"
        )
    return found


def _separator_id(tokenizer: PreTrainedTokenizerBase, separator: str) -> int | None:
    if not separator:
        return None
    ends = set()
    for before in ("word", "Word.", "word?", "word!"):
        first, whole = encode_text(tokenizer, before), encode_text(tokenizer, before + separator + "Word")
        end = whole[len(first)] if len(whole) > len(first) + 1 else None
        rest = tokenizer.decode(whole[len(first) + 1 :], clean_up_tokenization_spaces=False)
        is_alone = end is not None and tokenizer.decode([end], clean_up_tokenization_spaces=False) == separator
        ends.add(end if is_alone and whole[: len(first)] == first and rest.strip() == "Word" else None)
    return ends.pop() if len(ends) == 1 else None


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a response: the text, encoded on its own so that the prompt's ids never depend on it, and EOS."""
    return [*encode_text(tokenizer, text), int(tokenizer.eos_token_id)]


def encode_whole(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """Ids of whole texts as a classifier reads them: with the tokenizer's own special tokens around, if it adds any.

    What is longer than `max_length` loses its beginning, and a text without a token becomes an EOS, so that there is
    something to read. Special tokens spelled out in a text stay plain text.
    """
    if not texts:
        return []
    side, tokenizer.truncation_side = tokenizer.truncation_side, "left"
    options = {"split_special_tokens": True, "return_attention_mask": False, "verbose": False}
    rows = tokenizer(list(texts), truncation=True, max_length=max_length, **options)["input_ids"]
    tokenizer.truncation_side = side
    tokenizer.backend_tokenizer.no_truncation()  # it would be saved with the tokenizer
    return [row or [int(tokenizer.eos_token_id)] for row in rows]


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> dict[str, Any]:
    """What `args.json` keeps of a tokenizer: its name, size, special ids and fingerprint."""
    return {
        "name": name,
        "fingerprint": fingerprint(tokenizer),
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of what decides the ids: the vocabulary, the special ids and how a probe text is cut."""
    content = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "probe": encode_text(tokenizer, _PROBE),
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
