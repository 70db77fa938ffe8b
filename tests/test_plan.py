from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.strategies import ModelParallelStrategy

from rlhf_stages import loop
from rlhf_stages.args import FabricArgs, PPOArgs, TrainArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.data.packing import PackedShard
from rlhf_stages.data.shards import ShardWriter, open_shard
from rlhf_stages.plan import Budget, Plan, check_validation, epoch_windows, update_windows, validation_batches

from helpers import left_padded


@pytest.fixture
def fabric():
    return loop.start_fabric(FabricArgs(accelerator="cpu", devices="1"), seed=1)


def rank_of(rank, world_size):
    """As much of a Fabric as the order of the data needs."""
    return SimpleNamespace(global_rank=rank, world_size=world_size, device=torch.device("cpu"))


def prompt_shard(folder, count):
    """Prompt i is [i + 1] * (i + 1)."""
    writer = ShardWriter()
    for i in range(count):
        writer.add([i + 1] * (i + 1), [[50]])
    writer.save(folder / "shard.pt")
    return open_shard(folder / "shard.pt")


def collate_numbers(records):
    return PromptBatch(*left_padded([record.prompt.tolist() for record in records], 0))


def drawn(batch):
    return batch.input_ids[:, -1].tolist()


# Order of the data


windows = partial(epoch_windows, micro=2, seed=7, epoch=0)


def flat(steps):
    return [index for step in steps for micro in step for index in micro]


def test_nothing_is_dropped_and_the_last_step_is_smaller():
    steps = windows(10, mini=4)
    assert sorted(flat(steps)) == list(range(10))
    assert [[len(micro) for micro in step] for step in steps] == [[2, 2], [2, 2], [2]]


def test_a_micro_batch_does_not_reach_into_the_next_step():
    steps = epoch_windows(11, mini=6, micro=6, seed=0, epoch=0)
    assert [[len(micro) for micro in step] for step in steps] == [[6], [5]]
    steps = epoch_windows(7, mini=3, micro=2, seed=0, epoch=0)
    assert [[len(micro) for micro in step] for step in steps] == [[2, 1], [2, 1], [1]]
    assert sorted(flat(steps)) == list(range(7))


@pytest.mark.parametrize("count", [10, 11])
def test_two_ranks_share_the_samples(count):
    ranks = [windows(count, mini=2, rank=rank, world_size=2) for rank in (0, 1)]
    assert len(flat(ranks[0])) == len(flat(ranks[1])) == (count + 1) // 2
    assert [len(step) for step in ranks[0]] == [len(step) for step in ranks[1]]  # no rank waits for another
    together = flat(ranks[0]) + flat(ranks[1])
    assert set(together) == set(range(count))
    assert len(together) - len(set(together)) == count % 2  # one sample comes twice where the count is odd


def test_a_step_sees_the_same_samples_however_many_ranks_there_are():
    one = windows(12, mini=4)
    two = [windows(12, mini=2, rank=rank, world_size=2) for rank in (0, 1)]
    four = [windows(12, mini=1, rank=rank, world_size=4) for rank in range(4)]
    for ranks in (two, four):
        for step, expected in enumerate(one):
            assert sorted(flat([ranks_steps[step] for ranks_steps in ranks])) == sorted(flat([expected]))


def test_more_ranks_than_samples():
    ranks = [windows(2, mini=4, rank=rank, world_size=5) for rank in range(5)]
    assert [len(flat(steps)) for steps in ranks] == [1] * 5
    assert {index for steps in ranks for index in flat(steps)} == {0, 1}


def test_epochs_and_seeds_differ_and_repeat():
    order = partial(epoch_windows, 30, mini=4, micro=2)
    assert order(seed=1, epoch=0) == order(seed=1, epoch=0)
    seen = {tuple(flat(order(seed=seed, epoch=epoch))) for seed in range(3) for epoch in range(3)}
    assert len(seen) == 9


# Micro-batches by tokens


def of_lengths(*lengths, tokens):
    return Budget(tokens, [(1, length) for length in lengths])


def test_micro_batches_by_hand():
    budget = of_lengths(3, 9, 5, 5, 2, tokens=10)
    assert budget.cut(range(5)) == [[1], [2, 3], [0, 4]]  # 9, 2 x 5, 2 x 3 places
    assert budget.cut([4, 3, 0]) == [[3, 0], [4]]  # 2 x 5 places, padding included; 3 x 5 would be too many


def test_a_sample_beyond_the_budget_stands_alone():
    assert of_lengths(3, 9, 5, 5, 2, tokens=4).cut(range(5)) == [[1], [2], [3], [0], [4]]


def test_every_text_of_a_ranked_list_takes_places():
    # 2 texts of 5; 3 of 4; 2 of 4: 2 x 5 = 10 and 5 x 5 = 25 do not fit in 20, (3 + 2) x 4 = 20 does
    assert Budget(20, [(2, 5), (3, 4), (2, 4)]).cut(range(3)) == [[0], [1, 2]]


def test_more_micro_batches_than_needed():
    budget = of_lengths(4, 4, 4, 4, 4, tokens=20)
    assert budget.cut(range(5)) == [[0, 1, 2, 3, 4]]
    assert budget.cut(range(5), at_least=2) == [[0, 1], [2, 3, 4]]
    assert budget.cut(range(5), at_least=3) == [[0, 1], [2], [3, 4]]
    assert budget.cut(range(5), at_least=5) == [[0], [1], [2], [3], [4]]


def random_lengths(count, seed=0):
    return torch.randint(1, 40, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_budget_moves_no_sample_to_another_step_or_device(world_size):
    lengths = random_lengths(101)
    budget = of_lengths(*lengths, tokens=100)
    ranks = [windows(101, mini=16, rank=rank, world_size=world_size, budget=budget) for rank in range(world_size)]
    uneven = 0
    for rank, steps in enumerate(ranks):
        plain = windows(101, mini=16, rank=rank, world_size=world_size)
        assert [sorted(flat([step])) for step in steps] == [sorted(flat([step])) for step in plain]
        for step in steps:
            assert all(len(micro) * max(lengths[i] for i in micro) <= 100 for micro in step)
            assert all(step)
        uneven += sum(len(budget.cut(flat([step]))) < len(step) for step in steps)
    assert [len(step) for step in ranks[0]] == [len(step) for step in ranks[-1]]  # sharded models go in step
    assert bool(uneven) == (world_size > 1)  # and some device had to cut finer for that


def test_a_budget_leaves_little_padding():
    lengths = random_lengths(256)

    def padding(steps):
        places = sum(len(micro) * max(lengths[i] for i in micro) for step in steps for micro in step)
        return 1 - sum(lengths) / places

    by_tokens = windows(256, mini=64, budget=of_lengths(*lengths, tokens=160))
    by_number = windows(256, mini=64, micro=8)
    assert len(flat(by_tokens)) == 256
    assert padding(by_tokens) < 0.15 < 0.4 < padding(by_number)


class AllGathers:
    """One of two devices: the lengths of the responses of both are known."""

    device, world_size = torch.device("cpu"), 2

    def __init__(self, rank, lengths):
        self.global_rank, self.lengths = rank, lengths

    def all_gather(self, value):
        assert value.tolist() == self.lengths[self.global_rank]
        return torch.tensor(self.lengths)


def test_updates_of_a_rollout_by_tokens():
    lengths = [random_lengths(24, seed=1), random_lengths(24, seed=2)]
    common = {"sft_experiment_dir": "", "rm_experiment_dir": "", "mini_batch_size": 12, "ppo_epochs": 2}
    by_number = update_windows(AllGathers(0, lengths), lengths[0], PPOArgs(**common), step=3)
    args = PPOArgs(**common, micro_batch_tokens=80)
    both = [update_windows(AllGathers(rank, lengths), lengths[rank], args, step=3) for rank in (0, 1)]
    assert len(by_number) == 4
    for rank, windows_of_rank in enumerate(both):
        assert [sorted(flat([window])) for window in windows_of_rank] == [sorted(flat([w])) for w in by_number]
        for micro in (micro for window in windows_of_rank for micro in window):
            assert len(micro) * max(lengths[rank][row] for row in micro) <= 80
    assert [len(window) for window in both[0]] == [len(window) for window in both[1]]
    assert both[0] != both[1]


def test_updates_that_are_recorded_take_texts_of_like_lengths_together():
    common = {"sft_experiment_dir": "", "rm_experiment_dir": "", "mini_batch_size": 8, "micro_batch_size": 4}
    lengths = [7, 30, 12, 12, 64, 3, 50, 9, 41, 22, 8, 5, 33, 60, 18, 2, 27, 11]
    plain, recorded = (
        update_windows(rank_of(0, 1), lengths, PPOArgs(**common, ppo_epochs=2, cuda_graphs=graphs), step=3)
        for graphs in (False, True)
    )
    assert len(recorded) == 6
    for before, after in zip(plain, recorded, strict=True):
        assert sorted(flat([after])) == sorted(flat([before]))
        assert [len(micro) for micro in after] == [len(micro) for micro in before]
        widths = [lengths[row] for row in flat([after])]
        assert widths == sorted(widths, reverse=True)


def plan_of(fabric, count, **changes):
    args = TrainArgs(**{"mini_batch_size": 4, "micro_batch_size": 2, **changes})
    sizes = [(1, i + 1) for i in range(count)]  # of prompt_shard
    return Plan(fabric, args, count, mini=args.mini_batch_size, micro=args.micro_batch_size, sizes=sizes)


def test_plan_cuts_by_tokens_and_longest_first(tmp_path, fabric):
    plan = plan_of(fabric, 10, mini_batch_size=5, micro_batch_size=4, micro_batch_tokens=12)
    steps = list(plan.steps(prompt_shard(tmp_path, 10), collate_numbers))
    assert plan.total_steps == len(steps) == 2
    for step in steps:
        assert [drawn(batch) for batch in step.batches] == [[i + 1 for i in micro] for micro in step.records]
        assert all(batch.input_ids.numel() <= 12 for batch in step.batches)
        numbers = [number for batch in step.batches for number in drawn(batch)]
        assert numbers == sorted(numbers, reverse=True)
    assert sorted(flat([step.records for step in steps])) == list(range(10))


def numbers_of_rows(rows):
    """The first token of each prompt of each row, as a batch."""
    return PromptBatch(*left_padded([[int(record.prompt[0]) for record in row] for row in rows], 0))


@pytest.mark.parametrize("done", range(5))
def test_plan_of_packed_rows(tmp_path, fabric, done):
    writer = ShardWriter()
    for i in range(10):
        writer.add([i + 1] * (i // 2 + 1), [[50]])  # two of each length from 2 to 6
    writer.save(tmp_path / "shard.pt")
    packed = PackedShard(open_shard(tmp_path / "shard.pt", responses=1), 9, seed=42)
    assert len(packed) == 5  # 40 tokens: 6 + 3, 6 + 3, 5 + 4, 5 + 4, 2 + 2
    args = TrainArgs(mini_batch_size=3, micro_batch_size=1, epochs=2)
    plan = Plan(fabric, args, len(packed), mini=3, micro=1, sizes=packed.sizes)
    steps = list(plan.steps(packed, numbers_of_rows))
    assert plan.total_steps == len(steps) == 4
    for step in steps:
        assert [[i - 1 for i in batch.input_ids.flatten().tolist()] for batch in step.batches] == step.records
    compositions = []
    for epoch, part in enumerate((steps[:2], steps[2:])):
        rows = sorted(micro for step in part for micro in step.records)
        assert sorted(i for row in rows for i in row) == list(range(10))
        assert rows == sorted(packed.at(epoch).rows)
        compositions.append(rows)
    assert compositions[0] != compositions[1]
    assert [step.records for step in plan.steps(packed, numbers_of_rows, done)] == [s.records for s in steps[done:]]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_plan_walks_every_record_once_per_epoch(tmp_path, fabric, workers):
    plan = plan_of(fabric, 10, epochs=2, num_workers=workers)
    steps = list(plan.steps(prompt_shard(tmp_path, 10), collate_numbers))
    assert plan.total_steps == len(steps) == 6
    assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6]
    epochs = [[n for step in part for batch in step.batches for n in drawn(batch)] for part in (steps[:3], steps[3:])]
    assert all(sorted(epoch) == list(range(1, 11)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [[len(batch.input_ids) for batch in step.batches] for step in steps[:3]] == [[2, 2], [2, 2], [2]]
    # record i holds the number i + 1
    assert all([drawn(batch) for batch in s.batches] == [[i + 1 for i in micro] for micro in s.records] for s in steps)


@pytest.mark.parametrize("max_steps", [1, 3, 4, 6, 99])
def test_plan_stops_at_max_steps_with_the_same_beginning(tmp_path, fabric, max_steps):
    shard = prompt_shard(tmp_path, 10)
    everything = [step.records for step in plan_of(fabric, 10, epochs=2).steps(shard, collate_numbers)]
    plan = plan_of(fabric, 10, epochs=2, max_steps=max_steps)
    assert [step.records for step in plan.steps(shard, collate_numbers)] == everything[:max_steps]
    assert plan.total_steps == min(max_steps, 6)


@pytest.mark.parametrize(("size", "limit"), [(3, None), (4, None), (3, 2), (1, 5), (100, None)])
def test_validation_sees_every_record_once_over_two_ranks(tmp_path, size, limit):
    shard = prompt_shard(tmp_path, 11)
    seen = [
        drawn(batch)
        for rank in (0, 1)
        for batch in validation_batches(shard, size, collate_numbers, rank_of(rank, 2), limit)
    ]
    numbers = [number for batch in seen for number in batch]
    assert sorted(numbers) == list(range(1, 12))[: None if limit is None else size * limit]
    assert max(map(len, seen)) <= size + 1  # the one that has no place in as many batches as the other rank has
    assert len(seen) % 2 == 0
    alone = validation_batches(shard, size, collate_numbers, rank_of(0, 1), limit)
    assert sorted(numbers) == [number for batch in alone for number in drawn(batch)]
    cut = list(validation_batches(shard, size, collate_numbers, rank_of(0, 1), limit, tokens=12))
    assert sorted(numbers) == sorted(number for batch in cut for number in drawn(batch))
    assert all(batch.input_ids.numel() <= 12 for batch in cut)


@pytest.mark.parametrize("tokens", [None, 3, 12, 40])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_validation_has_as_many_batches_on_every_rank(tmp_path, world, size, tokens):
    shard = prompt_shard(tmp_path, 11)
    ranks = [
        [drawn(batch) for batch in validation_batches(shard, size, collate_numbers, rank_of(r, world), None, tokens)]
        for r in range(world)
    ]
    assert len(set(map(len, ranks))) == 1
    assert all(all(rank) for rank in ranks)  # and none of them is empty
    assert sorted(number for rank in ranks for batch in rank for number in batch) == list(range(1, 12))


def test_fewer_records_than_devices_are_refused_where_weights_are_divided(tmp_path):
    shard, fabric = prompt_shard(tmp_path, 1), rank_of(0, 2)
    assert len(list(validation_batches(shard, 4, collate_numbers, fabric, None))) == 1
    fabric.strategy = ModelParallelStrategy(lambda model, mesh: model)
    message = "there are 1 records to validate on, and the weights are divided over 2"
    with pytest.raises(ValueError, match=message):
        list(validation_batches(shard, 4, collate_numbers, fabric, None))
    check_validation(prompt_shard(tmp_path, 2), 1, fabric, 2)
    with pytest.raises(ValueError, match=message):
        check_validation(prompt_shard(tmp_path, 2), 1, fabric, 1)


def test_without_a_shard_nothing_is_validated():
    assert list(validation_batches(None, 2, collate_numbers, rank_of(0, 1), None)) == []


@pytest.mark.parametrize("done", range(7))
@pytest.mark.parametrize("tokens", [None, 15])
def test_a_plan_goes_on_after_any_step_also_at_the_end_of_an_epoch(tmp_path, fabric, done, tokens):
    micro = 2 if tokens is None else 4
    shard, plan = (
        prompt_shard(tmp_path, 10),
        plan_of(fabric, 10, epochs=2, micro_batch_size=micro, micro_batch_tokens=tokens),
    )
    everything = [
        (step.number, step.records, list(map(drawn, step.batches))) for step in plan.steps(shard, collate_numbers)
    ]
    rest = [
        (step.number, step.records, list(map(drawn, step.batches))) for step in plan.steps(shard, collate_numbers, done)
    ]
    assert rest == everything[done:]
    assert len(rest) == 6 - done


def test_reading_the_data_takes_no_random_numbers(tmp_path, fabric):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(plan_of(fabric, 10, epochs=2).steps(prompt_shard(tmp_path, 10), collate_numbers))
    assert torch.equal(torch.get_rng_state(), before)
