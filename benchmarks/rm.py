#!/usr/bin/env python3
"""Reward modelling on pairs of texts of 512 tokens, ours and TRL 1.16's RewardTrainer, on the same work and card.

    python benchmarks/rm.py --geometry opt-350m --peer trl -- --compile

What comes after -- are flags of our script. Prints a table and one JSON line; medians without the first third of steps.
"""

from typing import Any

from supervised import run


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run both, print the comparison."""
    return run("rm", str(__doc__), 512, argv)


if __name__ == "__main__":
    main()
