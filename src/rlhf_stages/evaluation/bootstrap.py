"""Measures of a set of responses with confidence intervals.

Legend: N prompts, S resamples, K columns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Measure:
    """A number that is a function of sums over the prompts: a mean, a ratio, BLEU.

    counts: (N, K) float64, what is summed. value: the number, from the sums (K,).
    """

    counts: Tensor
    value: Callable[[Tensor], float]


def mean_of(values: Sequence[float], scale: float = 1.0, each: int = 1) -> Measure:
    """The mean of `each` values for each prompt, those of a prompt one after the other."""
    column = torch.tensor(values, dtype=torch.float64).view(-1, each)
    counts = torch.stack([column.sum(1), torch.ones_like(column).sum(1)], dim=1)
    return Measure(counts, lambda sums: scale * float(sums[0] / sums[1]))


def ratio_of(numerators: Sequence[float], denominators: Sequence[float], of: Callable[[float], float]) -> Measure:
    """A function of the ratio of two sums."""
    counts = torch.tensor([numerators, denominators], dtype=torch.float64).T
    return Measure(counts, lambda sums: of(float(sums[0] / sums[1])))


def resample(prompts: int, samples: int, seed: int) -> Tensor:
    """How often each prompt is drawn in each resample, (S, N) float64; every column of a table shares it."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(prompts, (samples, prompts), generator=generator)
    return torch.zeros(samples, prompts, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones_like(drawn, dtype=torch.float64)
    )


def with_intervals(
    columns: Mapping[str, Mapping[str, Measure]], samples: int, seed: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Each measure of each column with the percentile interval of its resamples (Efron 1979), and how far it is from
    that of the first column, on the same resamples. All measures are of the same prompts.

    Returns:
        {column: {measure: {"value", "low", "high", "change", "change_low", "change_high"}}}; the change is missing in
        the first column, and where that one lacks the measure. One prompt has values, and no intervals.
    """
    prompts = next((len(m.counts) for measures in columns.values() for m in measures.values()), 1)
    weights = resample(prompts, samples, seed)
    first: dict[str, tuple[float, Tensor]] = {}
    table: dict[str, dict[str, dict[str, float]]] = {}
    for number, (column, measures) in enumerate(columns.items()):
        table[column] = {}
        for name, measure in measures.items():
            value = measure.value(measure.counts.sum(0))
            draws = torch.tensor([measure.value(sums) for sums in weights @ measure.counts], dtype=torch.float64)
            entry = {"value": value}
            if number == 0:
                first[name] = value, draws
            elif name in first:
                entry["change"] = value - first[name][0]
            if prompts > 1:
                entry["low"], entry["high"] = interval(draws)
                if "change" in entry:
                    entry["change_low"], entry["change_high"] = interval(draws - first[name][1])
            table[column][name] = entry
    return table


def interval(draws: Tensor) -> tuple[float, float]:
    """The middle 95 % of resampled values."""
    tail = (1 - CONFIDENCE) / 2
    low, high = draws.quantile(torch.tensor([tail, 1 - tail], dtype=draws.dtype)).tolist()
    return low, high
