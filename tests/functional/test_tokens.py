"""Expected values, and gradients, come from loops over rows without padding; whatever is padding is NaN or infinite."""

import math

import pytest
import torch

from rlhf_stages.functional import tokens
from rlhf_stages.functional.tokens import entropy, gather_logprobs, sft_loss, token_statistics

from helpers import plain_sampler
from ragged import close

# --- supervised fine-tuning ---


def sft_rows(dtype=torch.float32):
    """Logits (3, 5, 7) that are NaN where they predict nothing that counts, and targets (-1 is ignored)."""
    targets = torch.tensor([[3, 0, 6, 2, 1], [5, -1, -1, 4, -1], [-1, -1, -1, -1, -1]])
    logits = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=dtype) * 3
    logits[1, [0, 1, 3, 4]] = math.nan  # only the logits at 2 predict a target of row 1: the one at 3
    logits[0, 4], logits[2] = math.nan, math.nan
    return logits, targets


COUNTED = [(0, 0, 0), (0, 1, 6), (0, 2, 2), (0, 3, 1), (1, 2, 4)]  # Row, place of the logits, id they predict


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_sft_loss_is_the_cross_entropy_of_the_next_token(smoothing):
    logits, targets = sft_rows()
    loss, count = sft_loss(logits, targets, -1, smoothing)
    expected = 0.0
    for row, place, token in COUNTED:
        scores = logits[row, place].double().tolist()
        normalizer = math.log(sum(math.exp(score) for score in scores))
        logprobs = [score - normalizer for score in scores]
        expected -= (1 - smoothing) * logprobs[token] + smoothing * sum(logprobs) / len(logprobs)
    assert int(count) == 5
    assert float(loss) == pytest.approx(expected, rel=1e-6)


def test_sft_loss_of_equal_logits_is_the_log_of_the_vocabulary():
    loss, count = sft_loss(torch.zeros(2, 4, 8), torch.zeros(2, 4, dtype=torch.int64), -100)
    assert int(count) == 6  # the first token of each row is never predicted
    assert float(loss) == pytest.approx(6 * math.log(8), rel=1e-6)


def test_sft_loss_reads_any_ignore_index_and_id_0_counts():
    logits, targets = sft_rows()
    expected = sft_loss(logits, targets, -1)
    for actual, wanted in zip(sft_loss(logits, targets.where(targets != -1, -100), -100), expected, strict=True):
        close(actual, wanted)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sft_gradient_equals_autograd_per_token_and_is_0_elsewhere(smoothing):
    logits, targets = sft_rows()
    logits.requires_grad_()
    sft_loss(logits, targets, -1, smoothing)[0].backward()
    expected = torch.zeros_like(logits)
    for row, place, token in COUNTED:
        # derivative of the cross-entropy: probabilities minus target distribution
        expected[row, place] = torch.softmax(logits[row, place].detach(), -1) - smoothing / 7
        expected[row, place, token] -= 1 - smoothing
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-6)


def test_sft_loss_of_a_batch_without_a_target_is_0_with_a_gradient_of_0():
    logits = torch.full((2, 3, 4), math.nan, requires_grad=True)
    loss, count = sft_loss(logits, torch.full((2, 3), -1), -1)
    loss.backward()
    assert (loss.item(), count.item()) == (0.0, 0)
    assert float(logits.grad.abs().sum()) == 0.0


def test_sft_loss_of_half_precision_logits_is_taken_in_float32():
    logits, targets = sft_rows()
    loss, _ = sft_loss(logits.bfloat16(), targets, -1)
    assert loss.dtype == torch.float32
    close(loss, sft_loss(logits.bfloat16().float(), targets, -1)[0])


# --- log-probabilities ---


def test_logprobs_equal_a_loop():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)) * 4
    ids = torch.tensor([[4, 0, 2], [1, 1, 3]])
    logprobs = gather_logprobs(logits, ids)
    for b in range(2):
        for t in range(3):
            weights = [math.exp(score) for score in logits[b, t].tolist()]
            # float32: a log-probability is a difference of numbers of about 10
            expected = math.log(weights[ids[b, t]] / sum(weights))
            assert float(logprobs[b, t]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_logprobs_of_half_precision_logits_are_float32():
    logits = torch.tensor([[[10.0, 9.96, 0.0]]]).bfloat16()
    logprobs = gather_logprobs(logits, torch.tensor([[1]]))
    assert logprobs.dtype == torch.float32
    close(logprobs, gather_logprobs(logits.float(), torch.tensor([[1]])))


def test_gradient_of_the_logprob_is_one_hot_minus_probabilities():
    logits = torch.tensor([[[1.0, -2.0, 0.5]]], requires_grad=True)
    gather_logprobs(logits / 2, torch.tensor([[2]])).sum().backward()
    expected = (torch.tensor([0.0, 0.0, 1.0]) - torch.softmax(logits.detach() / 2, -1)) / 2
    torch.testing.assert_close(logits.grad, expected, rtol=1e-5, atol=1e-7)


# --- entropy ---


def test_entropy_equals_a_loop():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(3))
    found = entropy(logits)
    for b in range(2):
        for t in range(3):
            shares = [math.exp(x) for x in logits[b, t].double().tolist()]
            shares = [share / sum(shares) for share in shares]
            assert float(found[b, t]) == pytest.approx(-sum(p * math.log(p) for p in shares), rel=1e-5)


def test_entropy_at_its_landmarks():
    assert float(entropy(torch.zeros(1, 1, 8))) == pytest.approx(math.log(8), rel=1e-6)
    assert float(entropy(torch.tensor([[[50.0, 0.0, 0.0]]]))) == pytest.approx(0.0, abs=1e-6)


def test_entropy_of_half_precision_logits_is_float32():
    logits = torch.tensor([[[10.0, 9.96, 0.0]]]).bfloat16()
    assert entropy(logits).dtype == torch.float32
    close(entropy(logits), entropy(logits.float()))


def test_forbidden_tokens_leave_the_entropy_of_the_others_and_finite_gradients():
    lowest = torch.finfo(torch.float32).min
    logits = torch.tensor([[[1.0, 2.0, lowest, lowest]]], requires_grad=True)
    found = entropy(logits)
    close(found, entropy(torch.tensor([[[1.0, 2.0]]])), rtol=1e-6)
    found.sum().backward()
    assert bool(logits.grad.isfinite().all())
    alone = gather_logprobs(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[1]]))
    close(gather_logprobs(logits, torch.tensor([[1]])), alone)


# --- a few rows at a time ---


def whole(logits, ids, temperature):
    """Log-probabilities and entropies, all at once."""
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(-1, ids[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)


def batch_of(rows=5):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, 3, 7, generator=generator, dtype=torch.float64) * 3
    return logits.requires_grad_(), torch.randint(7, (rows, 3), generator=generator)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_statistics_and_gradients_do_not_depend_on_the_rows_at_a_time(rows, monkeypatch):
    monkeypatch.setattr(tokens, "CHUNK", rows * 3 * 7)
    logits, ids = batch_of()
    seen = []

    def transform(some):
        seen.append(len(some))
        return some / 0.7

    # both functions are of float64 here: their .float() of the product code is what the next test is about
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)
    logprobs, entropies = token_statistics(logits, ids, transform, entropies=True)
    assert max(seen) == rows
    assert sum(seen) == 5
    expected = whole(logits, ids, 0.7)
    close(logprobs, expected[0])
    close(entropies, expected[1])
    weights = torch.arange(1.0, 16.0, dtype=torch.float64).reshape(5, 3)
    (found,) = torch.autograd.grad((weights * logprobs + weights.flip(0) * entropies).sum(), logits)
    (wanted,) = torch.autograd.grad((weights * expected[0] + weights.flip(0) * expected[1]).sum(), logits)
    close(found, wanted)


def test_entropies_only_on_request():
    logits, ids = batch_of()
    assert token_statistics(logits, ids, lambda some: some)[1] is None


@pytest.mark.parametrize("function", ["statistics", "sft"])
def test_never_more_than_a_chunk_of_logits_is_widened(function, monkeypatch):
    """Neither forward nor backward; the logits themselves stay in half precision, and so does their gradient."""
    monkeypatch.setattr(tokens, "CHUNK", 2 * 3 * 7)
    logits, ids = batch_of(rows=6)
    logits = logits.detach().bfloat16().requires_grad_()
    largest = 0
    of_torch = torch.Tensor.float

    def watched(self):
        nonlocal largest
        largest = max(largest, self.numel())
        return of_torch(self)

    monkeypatch.setattr(torch.Tensor, "float", watched)
    if function == "sft":
        total = sft_loss(logits, ids, -1)[0]
    else:
        total = token_statistics(logits, ids, lambda some: some.float())[0].sum()
    total.backward()
    assert largest == 2 * 3 * 7
    assert logits.grad.dtype == torch.bfloat16
    assert bool((logits.grad != 0).any())


@pytest.mark.parametrize("rows", [1, 2])
def test_the_sft_loss_does_not_depend_on_the_rows_at_a_time(rows, monkeypatch):
    logits, targets = sft_rows()
    expected = sft_loss(logits, targets, -1, 0.1)
    monkeypatch.setattr(tokens, "CHUNK", rows * 5 * 7)
    leaf = logits.clone().requires_grad_()
    loss, count = sft_loss(leaf, targets, -1, 0.1)
    torch.testing.assert_close(loss, expected[0])
    assert count == expected[1]
    whole_leaf = logits.clone().requires_grad_()
    monkeypatch.setattr(tokens, "CHUNK", 2**26)
    torch.testing.assert_close(
        *(torch.autograd.grad(sft_loss(x, targets, -1, 0.1)[0], x)[0] for x in (leaf, whole_leaf)), equal_nan=False
    )


@pytest.mark.slow
def test_fused_functions_say_the_same():
    """Values and gradients of what torch.compile makes, for a batch of another size as well, with what is forbidden."""
    sampler = plain_sampler(0.7, min_new_tokens=2, vocab_size=5)
    for rows in (4, 5):
        logits, ids = batch_of(rows)
        ids[:, 0], ids[:, 1:] = 1, ids[:, 1:].clamp(max=4)
        found, wanted = [], []
        for fused, into in ((True, found), (False, wanted)):
            leaf = logits.detach().float().requires_grad_()
            logprobs, entropies = token_statistics(leaf, ids, sampler.logits, entropies=True, fused=fused)
            loss, count = sft_loss(leaf, ids, 3, 0.1, fused=fused)
            total = (logprobs * torch.arange(3)).sum() + (entropies**2).sum() + loss / count
            into += [logprobs, entropies, loss, *torch.autograd.grad(total, leaf)]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
