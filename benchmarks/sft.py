#!/usr/bin/env python3
"""Fine-tuning on rows of 1,024 tokens, ours and TRL 1.16's SFTTrainer, on the same work and the same card.

    python benchmarks/sft.py --geometry opt-350m --peer trl -- --compile

What comes after -- are flags of our script. Prints a table and one JSON line; medians without the first third of steps.
"""

from typing import Any

from supervised import run


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run both, print the comparison."""
    return run("sft", str(__doc__), 1024, argv)


if __name__ == "__main__":
    main()
