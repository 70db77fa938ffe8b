"""Expected values come from plain loops over rows without padding; whatever is padding is NaN, infinite or junk."""

import math
import statistics

import pytest
import torch

from rlhf_stages.functional.masking import (
    first_difference,
    last_index,
    left_aligned,
    length_mask,
    masked_mean,
    masked_sum,
    mean_std,
    moments,
    packed_mask,
    whiten,
)

ROWS = [[2.0, -1.0, 4.5], [0.25], [], [-3.0, 7.0, 1.0, 0.5]]


def ragged(rows, junk=(math.nan, math.inf, -math.inf, 1e30)):
    """The rows with junk behind them, and the mask of what is real."""
    size = max(map(len, rows))
    values = [row + [junk[(i + j) % len(junk)] for j in range(size - len(row))] for i, row in enumerate(rows)]
    mask = [[True] * len(row) + [False] * (size - len(row)) for row in rows]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(mask)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_length_mask():
    assert length_mask(torch.tensor([0, 2, 3]), 3).tolist() == [
        [False, False, False],
        [True, True, False],
        [True, True, True],
    ]


def test_left_aligned_moves_padding_on_any_side_behind_and_cuts_to_the_longest():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 0]]).bool()
    ids = torch.arange(24).reshape(4, 6)
    aligned, kept = left_aligned(ids, mask)
    assert kept.tolist() == [[True] * 3, [True] * 3, [True] * 3, [True, False, False]]
    # read off the table of ids: 0..5, 6..11, 12..17, 18..23
    assert [row[m].tolist() for row, m in zip(aligned, kept, strict=True)] == [[2, 3, 4], [6, 7, 8], [13, 15, 17], [22]]


def test_last_index_for_padding_on_either_side():
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 0]]).bool()
    assert last_index(mask).tolist() == [1, 3, 1, -1, 3, 2]
    assert last_index(mask).dtype == torch.int64


def test_first_difference():
    a = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]])
    b = torch.tensor([[9, 6, 7], [5, 8, 9], [5, 6, 8], [5, 6, 7]])
    assert first_difference(a, b).tolist() == [0, 1, 2, 3]
    assert first_difference(b, a).tolist() == [0, 1, 2, 3]


def test_sum_and_mean_read_nothing_off_the_mask():
    values, mask = ragged(ROWS)
    flat = [v for row in ROWS for v in row]
    close(masked_sum(values, mask), sum(flat))
    close(masked_sum(values, mask, dim=1), [sum(row) for row in ROWS])
    close(masked_mean(values, mask), statistics.fmean(flat))
    close(masked_mean(values, mask, dim=1), [statistics.fmean(row) if row else 0.0 for row in ROWS])
    columns = [[row[t] for row in ROWS if t < len(row)] for t in range(4)]
    close(masked_sum(values, mask, dim=0), [sum(column) for column in columns])
    close(masked_mean(values, mask, dim=0), [statistics.fmean(column) for column in columns])


def test_mean_of_nothing_is_0():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    close(masked_mean(torch.full((2, 3), math.nan, dtype=torch.float64), nothing), 0.0)
    close(masked_mean(torch.full((2, 3), math.nan, dtype=torch.float64), nothing, dim=1), [0.0, 0.0])


def test_gradient_of_the_mean_is_one_over_the_count_and_0_under_the_padding():
    values, mask = ragged(ROWS)
    values.requires_grad_()
    masked_mean(values, mask).backward()
    close(values.grad, torch.where(mask, 1 / 8, 0.0).double())


def test_moments_and_mean_std():
    values, mask = ragged(ROWS)
    flat = [v for row in ROWS for v in row]
    close(moments(values, mask), [8.0, sum(flat), sum(v * v for v in flat)])
    mean, std = mean_std(moments(values, mask))
    close(mean, statistics.fmean(flat))
    close(std, statistics.pstdev(flat))


def test_moments_are_float64_even_of_float32():
    # in float32 the sum of squares of 1000 and 1001 cannot tell a variance of 0.25
    values = torch.tensor([1000.0, 1001.0] * 500)
    mean, std = mean_std(moments(values, torch.ones_like(values, dtype=torch.bool)))
    close(mean, 1000.5)
    torch.testing.assert_close(std, torch.tensor(0.5, dtype=torch.float64), rtol=1e-6, atol=0)


def test_whiten_equals_a_loop():
    values, mask = ragged(ROWS)
    flat = [v for row in ROWS for v in row]
    mean, std = statistics.fmean(flat), statistics.pstdev(flat)
    shifted = [[(v - mean) / std for v in row] + [0.0] * (4 - len(row)) for row in ROWS]
    kept = [[(v - mean) / std + mean for v in row] + [0.0] * (4 - len(row)) for row in ROWS]
    close(whiten(values, mask, moments(values, mask), shift_mean=True), shifted)
    close(whiten(values, mask, moments(values, mask), shift_mean=False), kept)


@pytest.mark.parametrize(
    ("shift_mean", "expected_mean"), [(True, 0.0), (False, statistics.fmean(v for row in ROWS for v in row))]
)
def test_whitened_values_have_std_1_and_the_mean_that_was_asked_for(shift_mean, expected_mean):
    values, mask = ragged(ROWS)
    inside = whiten(values, mask, moments(values, mask), shift_mean)[mask].tolist()
    assert statistics.fmean(inside) == pytest.approx(expected_mean, abs=1e-12)
    assert statistics.pstdev(inside) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_two_halves_by_their_common_moments_equals_whitening_the_whole(shift_mean):
    values, mask = ragged(ROWS)
    total = moments(values[:1], mask[:1]) + moments(values[1:], mask[1:])
    halves = [whiten(values[part], mask[part], total, shift_mean) for part in (slice(0, 1), slice(1, None))]
    close(torch.cat(halves), whiten(values, mask, moments(values, mask), shift_mean))


def test_whiten_does_not_see_padding_columns():
    values, mask = ragged(ROWS)
    wide = torch.cat([values, torch.full((4, 5), math.nan, dtype=torch.float64)], dim=1)
    wide_mask = torch.cat([mask, torch.zeros(4, 5, dtype=torch.bool)], dim=1)
    result = whiten(wide, wide_mask, moments(wide, wide_mask), shift_mean=True)
    close(result[:, :4], whiten(values, mask, moments(values, mask), shift_mean=True))
    close(result[:, 4:], torch.zeros(4, 5))


def test_whitening_keeps_the_level_between_rows():
    # a good response (+1) and a bad one (-1): whitened row by row, both would be 0
    values = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    close(whiten(values, values.abs() > 0, moments(values, values.abs() > 0), shift_mean=True), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 0.1, -3.3, 5.0, 1000.1])
@pytest.mark.parametrize("count", [1, 7])
def test_values_that_are_all_equal_become_0_or_stay(dtype, value, count):
    values = torch.full((count,), value, dtype=dtype)
    mask = torch.ones(count, dtype=torch.bool)
    shifted = whiten(values, mask, moments(values, mask), shift_mean=True)
    kept = whiten(values, mask, moments(values, mask), shift_mean=False)
    torch.testing.assert_close(shifted, torch.zeros_like(values), rtol=0, atol=1e-6)
    torch.testing.assert_close(kept, values, rtol=1e-6, atol=0)
    assert shifted.dtype == kept.dtype == dtype


def test_whiten_of_an_empty_mask_is_0():
    values = torch.full((2, 2), math.nan)
    mask = torch.zeros(2, 2, dtype=torch.bool)
    assert whiten(values, mask, moments(values, mask), shift_mean=True).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_who_sees_whom_in_rows_of_several_texts():
    rows = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 0, 0]])
    mask = packed_mask(rows)
    assert (mask.shape, mask.dtype) == ((2, 1, 6, 6), torch.bool)
    for positions, row in zip(rows.tolist(), mask[:, 0].tolist(), strict=True):
        for query, position in enumerate(positions):
            # as many tokens as its position says stand before it in its text, and it sees itself
            assert [key for key in range(6) if row[query][key]] == list(range(query - position, query + 1))
