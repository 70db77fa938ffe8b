"""What checkpoints are compared on."""

from pathlib import Path

from rlhf_stages.data.shards import EmptyShardError, Record, open_shard


def first_records(
    path: Path, count: int, purpose: str, *, responses: int, vocab_size: int, is_required: bool = False
) -> tuple[list[Record], list[str]]:
    """The first records of a shard, and sentences about what is too little to measure anything on.

    Raises:
        FileNotFoundError: the shard is not there, and is required. ValueError: it is damaged, or of another kind.
    """
    if not is_required and not path.is_file():
        return [], [f"no {purpose}: there is no {path}"]
    try:
        shard = open_shard(path, responses=responses, vocab_size=vocab_size)
    except EmptyShardError:
        return [], [f"no {purpose}: {path} holds no records"]
    records = [shard[i] for i in range(min(count, len(shard)))]
    return records, [f"{purpose}: one record of {path} says next to nothing of others"] if len(records) == 1 else []
