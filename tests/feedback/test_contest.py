"""Two models compared: same prompts, blind, votes that stay, and a result that says no more than it may."""

import json
import re

import pytest

from rlhf_stages import loop
from rlhf_stages.args import CompareArgs, FabricArgs
from rlhf_stages.experiment import digest
from rlhf_stages.feedback import contest
from rlhf_stages.feedback.agreement import agreement_of
from rlhf_stages.feedback.contest import (
    Contestant,
    ContestDesk,
    contestants_of,
    is_identical,
    open_contest,
    warnings_of,
)
from rlhf_stages.feedback.desk import check_name
from rlhf_stages.feedback.export import export
from rlhf_stages.feedback.judges import vote
from rlhf_stages.feedback.records import Item, Opinion
from rlhf_stages.feedback.store import Store
from rlhf_stages.feedback.verdict import Tally, conclusion, report, tallies_of
from rlhf_stages.feedback.wording import Refusal

from helpers import save_causal, save_classifier, write_toy_data

A, B = Contestant("sft", "runs/sft", "a" * 64, "toy"), Contestant("ppo", "runs/ppo", "b" * 64, "toy")


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contest")
    save_causal(folder / "one", seed=0)
    save_causal(folder / "two", seed=1)
    things = ("red tea", "blue bike", "green lamp", "pink tea", "red lamp")
    (folder / "prompts.txt").write_text("\n".join(f"name the price of the {thing}" for thing in things))
    return folder


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "f.sqlite")
    yield opened
    opened.close()


def arguments(material, **flags):
    models = [str(material / name) for name in ("one", "two")]
    given = {"prompts": str(material / "prompts.txt"), "max_new_tokens": 6, "mini_batch_size": 2, **flags}
    return CompareArgs(models=models, **given)


@pytest.fixture(scope="module")
def fabric():
    return loop.start_fabric(FabricArgs(accelerator="cpu", devices="1"), 42)


def items_of(store, *pairs):
    return [store.add_item(f"p{i}", pair, "m", "d", {}) for i, pair in enumerate(pairs)]


# Contestants


def test_who_is_compared(material, tmp_path):
    first, second = contestants_of([str(material / "one"), str(material / "two")])
    assert (first.name, second.name, first.dataset) == ("one", "two", None)
    assert re.fullmatch("[0-9a-f]{64}", first.digest)
    assert first.digest != second.digest
    assert contestants_of(["some/hub-model", str(material / "one")])[0] == Contestant(
        "some/hub-model", "some/hub-model", "", None
    )
    with pytest.raises(ValueError, match="are the same model"):
        contestants_of([str(material / "one"), str(material / "one")])
    with pytest.raises(FileNotFoundError, match="no folder"):
        contestants_of([str(material / "one"), str(material / "three")])


def test_runs_on_different_data_and_prompts_of_the_training_are_named(tmp_path):
    data = write_toy_data(tmp_path / "toy")
    other = Contestant("ppo", "runs/other", "c" * 64, "helpdesk")
    assert warnings_of((A, B), "prompts.txt") == []
    assert warnings_of((A, B), str(data / "finetune_validation.pt")) == []
    (different,) = warnings_of((A, other), "prompts.txt")
    assert "different datasets: sft from toy, ppo from helpdesk" in different
    found = warnings_of((A, other), str(data / "finetune_train.pt"))
    assert "The prompts are those of toy, which ppo did not train on." in found
    assert any("is a training split" in text for text in found)


def test_both_answer_the_same_prompts_once_and_a_kill_in_between_is_made_good(material, store, fabric):
    args = arguments(material, num_prompts=4)
    contestants = contestants_of(args.models)
    items = open_contest(args, contestants, store, fabric)
    assert [item.prompt for item in items] == [
        f"\n\nHuman: name the price of the {thing}\n\nAssistant:"
        for thing in ("red tea", "blue bike", "green lamp", "pink tea")
    ]
    assert all(len(item.replies) == 2 for item in items)
    assert open_contest(args, contestants, store, fabric) == items
    others = open_contest(arguments(material, num_prompts=4, seed=1), contestants, store, fabric)
    assert not {item.id for item in others} & {item.id for item in items}
    with store._transaction() as db:  # as if it had been killed after two of them
        db.execute("DELETE FROM items WHERE id IN (?, ?)", (items[2].id, items[3].id))
    again = open_contest(args, contestants, store, fabric)
    assert [(item.prompt, item.replies) for item in again] == [(item.prompt, item.replies) for item in items]
    with pytest.raises(ValueError, match="positions for 64"):
        open_contest(arguments(material, max_new_tokens=60), contestants, store, fabric)


def test_what_the_replies_depend_on_makes_another_comparison(material, store, fabric):
    prompts = material / "turns.jsonl"  # the same prompts in both formats
    prompts.write_text(json.dumps({"prompt": "\n\nHuman: name the price\n\nAssistant:"}))
    contestants = contestants_of(arguments(material).models)
    bf16 = loop.start_fabric(FabricArgs(accelerator="cpu", devices="1", precision="bf16-mixed"), 42)
    other = [({"seed": 1}, fabric), ({"prompt_format": "text"}, fabric), ({"mini_batch_size": 1}, fabric), ({}, bf16)]
    found = [
        open_contest(arguments(material, prompts=str(prompts), **flags), contestants, store, used)
        for flags, used in [({}, fabric), *other]
    ]
    assert len({item.settings["comparison"] for items in found for item in items}) == len(found)


def test_the_same_command_twice_at_once_asks_about_each_pair_once(material, store, fabric, monkeypatch):
    args = arguments(material, num_prompts=3)
    contestants = contestants_of(args.models)
    sampled = contest._replies
    faster = []

    def overtaken(*inputs):
        """Samples, while another process with the same command does and stores all."""
        if not faster:
            faster.append(None)
            other = Store(store.path)
            faster[:] = open_contest(args, contestants, other, fabric)
            other.close()
        return sampled(*inputs)

    monkeypatch.setattr(contest, "_replies", overtaken)
    items = open_contest(args, contestants, store, fabric)
    assert len(items) == 3
    assert items == faster == open_contest(args, contestants, store, fabric)


# Votes of people


def test_votes_reach_the_models_whatever_side_they_stood_on(store):
    items = items_of(store, *[(f"of a {i}", f"of b {i}") for i in range(12)], ("same", " same\n"))
    desk = ContestDesk(None, (A, B), items, store, [])
    sides, stored = set(), []
    for i in range(12):
        shown, done = desk.next("ann")
        assert done == i
        left_is_a = shown.replies[0].startswith("of a")
        sides.add(left_is_a)
        judgement = desk.vote("ann", shown.ticket.text(), "left")
        assert judgement.opinion.ranks == ((1, 2) if left_is_a else (2, 1))
        assert desk.vote("ann", shown.ticket.text(), "left") == judgement  # a double click
        stored.append(judgement.opinion.ranks)
    assert sides == {True, False}
    assert desk.next("ann") == (None, 12)  # nobody is asked about identical replies
    assert desk.next("bob")[1] == 0
    (tally,) = tallies_of(items, store)
    wins = stored.count((1, 2))
    assert (tally.wins_a, tally.wins_b, tally.ties, tally.identical, tally.open) == (wins, 12 - wins, 1, 1, 0)


def test_choices(store):
    items = items_of(store, *[("a", "b")] * 5)
    desk = ContestDesk(None, (A, B), items, store, [])
    found = []
    for choice in ("left", "right", "equal", "both_bad", "skip"):
        shown, _ = desk.next("ann")
        found.append((shown.replies, desk.vote("ann", shown.ticket.text(), choice).opinion))
    assert found[0][1].ranks == ((1, 2) if found[0][0] == ("a", "b") else (2, 1))
    assert found[1][1].ranks == ((2, 1) if found[1][0] == ("a", "b") else (1, 2))
    assert [opinion for _, opinion in found[2:]] == [Opinion("ranked", (1, 1)), Opinion("all_bad"), Opinion("skipped")]
    with pytest.raises(Refusal, match="nothing on the page"):
        desk.vote("ann", "", "left")
    forged = json.dumps(json.loads(desk.next("bob")[0].ticket.text()) | {"order": [1, 1]})
    with pytest.raises(Refusal, match="nothing on the page"):
        desk.vote("bob", forged, "left")


# Votes of programs


def judged(args, items, store, fabric):
    vote(args, items, store, fabric)
    return [judgement.opinion.ranks for judgement, _ in store.judgements()[::-1]]


def test_the_longer_reply_wins_and_a_second_run_adds_nothing(material, store, fabric):
    items = items_of(store, ("aaa", "bb"), ("a", "bb"), ("aa", "bb"), ("same", "same"))
    args = arguments(material, judge="length")
    assert judged(args, items, store, fabric) == [(1, 2), (2, 1), (1, 1)]
    assert len(judged(args, items, store, fabric)) == 3
    (tally,) = tallies_of(items, store)
    assert tally == Tally("judge:length", 1, 1, 2, 1, 0, 0, 0)


def test_a_reward_model_and_a_classifier_judge_by_what_they_score(material, tmp_path, store, fabric):
    rm = tmp_path / "runs" / "toy" / "rm"
    save_classifier(rm / "checkpoints" / "step-000001")
    (rm / "args.json").write_text('{"stage": "rm"}')
    (rm / "latest").write_text("step-000001\n")
    items = items_of(store, ("the tea is good", "bad"), ("bad", "the tea is good"), ("red " * 70, "blue"))
    args = arguments(material, judge="reward_model", rm_experiment_dir=str(rm))
    first, second, _ = judged(args, items, store, fabric)
    assert {first, second} <= {(1, 2), (2, 1)}
    save_classifier(tmp_path / "c", num_labels=2, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})
    for label in ("yes", "no"):
        args = arguments(material, judge="classifier", classifier=str(tmp_path / "c"), label=label)
        vote(args, items, store, fabric)
    name = f"{tmp_path / 'c'} {digest(tmp_path / 'c')[:8]}"
    yes, no = (store.judgements(annotator=f"judge:{label} of {name}") for label in ("yes", "no"))
    assert len(yes) == len(no) == 3
    # what is likelier to be the one is less likely to be the other; and it does not matter which model said it
    assert [j.opinion.ranks[::-1] for j, _ in yes] == [j.opinion.ranks for j, _ in no]
    assert yes[2][0].opinion.ranks == yes[1][0].opinion.ranks[::-1]
    save_classifier(tmp_path / "c", seed=1, num_labels=2, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})
    vote(args, items, store, fabric)  # trained again, it votes anew
    assert len(store.judgements(annotator=f"judge:no of {tmp_path / 'c'} {digest(tmp_path / 'c')[:8]}")) == 3
    assert len(store.judgements()) == 12
    args = arguments(material, judge="classifier", classifier=str(tmp_path / "c"), label="maybe")
    with pytest.raises(ValueError, match="knows no, yes"):
        vote(args, items, store, fabric)


def test_votes_of_programs_are_no_data_and_no_agreement(material, store, fabric, tmp_path):
    items = items_of(store, ("aaa", "bb"))
    vote(arguments(material, judge="length"), items, store, fabric)
    with pytest.raises(Refusal, match="Nothing to export"):
        export(store.judgements(), tmp_path / "out", str(material / "one"))
    assert store.repeat_for("ann") is None
    store.save(items[0].id, "ann", Opinion("ranked", (1, 2)), 1.0, "t")
    assert agreement_of(store.judgements()).items == 0
    assert store.repeat_for("bob") == items[0]
    with pytest.raises(Refusal):
        check_name("judge:length")


# The result


def test_of_several_people_most_decide_and_each_pair_counts_once(store):
    items = items_of(store, *[("a", "b")] * 5)
    said = {
        "ann": [(2, 1), (2, 1), (1, 2), "all_bad", None], "bob": [(2, 1), (1, 2), (1, 1), "all_bad", None],
        "eve": [(1, 2), None, (1, 2), (2, 1), "skipped"],
    }  # fmt: skip
    for name, opinions in said.items():
        for item, opinion in zip(items, opinions, strict=True):
            if opinion is not None:
                opinion = Opinion(opinion) if isinstance(opinion, str) else Opinion("ranked", opinion)
                store.save(item.id, name, opinion, 1.0, f"{name} {item.id}")
    together, *each = tallies_of(items, store)
    # B two to one; even; A two to none; B by the only vote that ranks; skipped
    assert together == Tally("3 people together", 1, 2, 1, 0, 0, 1, 0)
    assert each[0] == Tally("ann", 1, 2, 0, 0, 1, 0, 1)


def test_what_is_concluded(store):
    tally = Tally("ann", wins_a=2, wins_b=8, ties=3, identical=1, both_bad=0, skipped=0, open=0)
    # 2 (1 + 10 + 45) / 1024, and Wilson's ends
    assert tally.cells()[8:] == ["0.800 (0.490 to 0.943)", "0.1094"]
    assert conclusion(tally, (A, B)) == "ann: no difference can be told from 10 decided pairs (p = 0.1094)."
    won = Tally("ann", 9, 0, 0, 0, 0, 0, 0)
    assert conclusion(won, (A, B)) == "ann: sft is preferred, in 9 of 9 decided pairs (p = 0.0039)."  # 2 / 512
    lost = Tally("ann", 0, 9, 0, 0, 0, 0, 0)
    assert "ppo is preferred" in conclusion(lost, (A, B))
    assert "in 40 of 40 decided pairs (p < 0.0001)" in conclusion(Tally("ann", 40, 0, 0, 0, 0, 0, 0), (A, B))
    assert "no pair has been won" in conclusion(Tally("ann", 0, 0, 4, 4, 0, 0, 0), (A, B))


def test_the_report_names_everything_and_texts_stay_texts(material, store):
    hostile = "<img src=x> | [x](http://e.org)\n```\n# no heading"
    items = items_of(store, (hostile, "fine"), ("same", "same"))
    store.save(items[0].id, "<b>ann</b>", Opinion("ranked", (2, 1)), 1.0, "t")
    args = arguments(material, num_prompts=2)
    text = report(args, (A, B), items, store, ["The models come from runs on different datasets: x."])
    assert "> **Note.** The models come from runs on different datasets" in text
    assert "| B | ppo | runs/ppo | toy | bbbbbbbbbbbbbbbb |" in text
    assert r"| \<b\>ann\</b\> | 0 | 1 | 1 | 1 | 0 | 0 | 0 | 1.000 (0.207 to 1.000) | 1.0000 |" in text
    assert "\n````text\n" + hostile + "\n````\n" in text  # a longer fence than any in the text
    assert "2 prompts of" in text
    assert is_identical(items[1])
    assert not is_identical(Item(1, "p", ("a", "b"), "m", "d", {}, ""))
