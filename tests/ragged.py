"""Rows of different lengths for tests of formulas, padded with what must not be read."""

import math
import random

import torch

LENGTHS = [4, 1, 0, 3, 5]
SIZE = 6
MASK = torch.tensor([[t < length for t in range(SIZE)] for length in LENGTHS])
JUNK = [math.nan, math.inf, -math.inf]


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def padded(rows, junk=math.nan, size=SIZE):
    return doubles([row + [junk] * (size - len(row)) for row in rows])


def random_rows(seed, low=-1.0, high=1.0, lengths=LENGTHS):
    draw = random.Random(seed)
    return [[draw.uniform(low, high) for _ in range(length)] for length in lengths]


def close(actual, expected, rtol=1e-9):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=rtol, atol=1e-12)
