"""Programs that compare two replies: a score each, and the higher one wins."""

from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.fabric import Fabric

from rlhf_stages import loop
from rlhf_stages.args import CompareArgs, ModelArgs
from rlhf_stages.data.collate import pad_right
from rlhf_stages.data.tokenizer import encode_prompt, encode_response, load_tokenizer
from rlhf_stages.experiment import digest, parent_checkpoint, resolve_checkpoint
from rlhf_stages.feedback.contest import is_identical
from rlhf_stages.feedback.records import JUDGE, Item, Opinion
from rlhf_stages.feedback.store import Store
from rlhf_stages.functional.masking import length_mask
from rlhf_stages.models.classifier import TextClassifier
from rlhf_stages.models.forward import without_adapters
from rlhf_stages.models.loading import load_scalar
from rlhf_stages.models.scalar import end_scores


def vote(args: CompareArgs, items: Sequence[Item], store: Store, fabric: Fabric) -> None:
    """Let the judge of the command line vote on each pair that it has not voted on.

    Raises:
        ValueError, FileNotFoundError: the judge cannot be loaded.
    """
    asked = [item for item in items if not is_identical(item)]
    name, scores = _scores(args, asked, fabric)
    for item, (first, second) in zip(asked, scores, strict=True):
        ranks = (1, 1) if first == second else (1, 2) if first > second else (2, 1)
        # the token of an earlier vote finds that one
        store.save(item.id, name, Opinion("ranked", ranks), 0.0, f"{name} {item.id}")


def _scores(args: CompareArgs, items: Sequence[Item], fabric: Fabric) -> tuple[str, list[list[float]]]:
    """The name of the judge, and the scores of both replies of each item."""
    texts = [(item.prompt, reply) for item in items for reply in item.replies]
    if args.judge == "length":
        name, found = "length", [float(len(reply.strip())) for _, reply in texts]
    elif args.judge == "classifier":
        source = str(args.classifier)
        # trained again, it is another judge
        weights = f" {digest(resolve_checkpoint(source))[:8]}" if Path(source).is_dir() else ""
        name = f"{args.label} of {source}{weights}"
        found = _label_probabilities(args, [reply for _, reply in texts], fabric)
    else:
        name, found = _rewards(args, texts, fabric)
    return JUDGE + name, [found[i : i + 2] for i in range(0, len(found), 2)]


def _label_probabilities(args: CompareArgs, replies: Sequence[str], fabric: Fabric) -> list[float]:
    classifier = TextClassifier.load(str(args.classifier), fabric.device, args.trust_remote_code)
    if args.label not in classifier.labels:
        raise ValueError(f"--label={args.label}: {args.classifier} knows {', '.join(classifier.labels)}")
    probabilities = classifier.probabilities(replies) if replies else torch.zeros(0, len(classifier.labels))
    column: list[float] = probabilities[:, classifier.labels.index(str(args.label))].tolist()
    return column


@torch.no_grad()
def _rewards(args: CompareArgs, texts: Sequence[tuple[str, str]], fabric: Fabric) -> tuple[str, list[float]]:
    checkpoint, _ = parent_checkpoint(str(args.rm_experiment_dir), stage="rm", flag="--rm_experiment_dir")
    tokenizer = load_tokenizer(str(checkpoint), args.trust_remote_code)
    model_args = ModelArgs(disable_dropout=True, trust_remote_code=args.trust_remote_code)
    model = loop.freeze(fabric, load_scalar(checkpoint, tokenizer, model_args, trained_head=True))
    # of a text that is longer than the model has positions for the beginning goes
    window = getattr(without_adapters(model.hf).config.get_text_config(), "max_position_embeddings", None) or 2**20
    found: list[float] = []
    for start in range(0, len(texts), args.mini_batch_size):
        rows = [
            torch.tensor((encode_prompt(tokenizer, prompt) + encode_response(tokenizer, reply))[-window:])
            for prompt, reply in texts[start : start + args.mini_batch_size]
        ]
        ids, lengths = pad_right(rows, int(tokenizer.pad_token_id))
        ids, mask = ids.to(fabric.device), length_mask(lengths, ids.shape[1]).to(fabric.device)
        with fabric.autocast():
            found += end_scores(model, ids, mask).tolist()
    return f"reward_model {digest(checkpoint)[:8]}", found
