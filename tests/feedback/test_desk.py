import json
import re
import shlex

import pytest

from rlhf_stages.args import AnnotateArgs, GenerationArgs
from rlhf_stages.data.dialogue import ASSISTANT, HUMAN
from rlhf_stages.feedback.accounts import add_user, is_password, read_users
from rlhf_stages.feedback.desk import Desk, check_name
from rlhf_stages.feedback.records import Opinion
from rlhf_stages.feedback.sampling import MAX_PROMPT, Replier, check_prompt, read_prompts
from rlhf_stages.feedback.store import Store
from rlhf_stages.feedback.wording import Refusal

from helpers import save_causal, save_classifier, toy_rows, write_toy_data


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("desk")
    save_causal(folder / "model")
    (folder / "prompts.txt").write_text("name the colour\n\nname the price\nname the colour\n")
    return folder


@pytest.fixture
def desk(material, tmp_path):
    args = AnnotateArgs(
        models=[str(material / "model")], prompts=[str(material / "prompts.txt")], max_new_tokens=6, seed=1,
        export_dir=str(tmp_path / "feedback" / "people"), device="cpu", repeat_share=0.0,
    )  # fmt: skip
    store = Store(tmp_path / "f.sqlite")
    yield Desk(args, store)
    store.close()


def take(desk, count=3):
    return desk.next("ann", desk.args.models[0], desk.args.prompts[0], count, 1.0, 6)


# Prompts


def test_prompts_of_text_files_records_and_shards(material, tmp_path):
    assert read_prompts(str(material / "prompts.txt")) == ["name the colour", "name the price"]
    (tmp_path / "b.txt").write_text("name it\nname the price", encoding="utf-8-sig")  # a mark that editors put there
    assert read_prompts(str(tmp_path / "b.txt")) == ["name it", "name the price"]
    (tmp_path / "a.jsonl").write_text('{"prompt": "x\\ny"}\n{"question": "z"}\n{"other": 1}\n{"prompt": 3}\n')
    assert read_prompts(str(tmp_path / "a.jsonl")) == ["x\ny", "z"]
    data = write_toy_data(tmp_path / "toy")
    manifest = json.loads((data / "args.json").read_text())
    manifest["tokenizer"]["name"] = str(material / "model")
    (data / "args.json").write_text(json.dumps(manifest))
    assert set(read_prompts(str(data / "finetune_train.pt"))) == {prompt for prompt, _ in toy_rows(24)}
    manifest["tokenizer"]["name"] = str(tmp_path / "moved")  # then that of a model will do, if it is the same
    (data / "args.json").write_text(json.dumps(manifest))
    found = read_prompts(str(data / "finetune_train.pt"), ["no/such-model", str(material / "model")])
    assert set(found) == {prompt for prompt, _ in toy_rows(24)}
    with pytest.raises(ValueError, match="moved"):
        read_prompts(str(data / "finetune_train.pt"))


def test_prompts_that_cannot_be_read(desk, tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(ValueError, match=r"empty.txt holds no prompt"):
        read_prompts(str(tmp_path / "empty.txt"))
    with pytest.raises(Refusal, match="No file of prompts"):
        desk.random_prompt("/etc/passwd")  # only those of the command line
    desk.args.prompts.append(str(tmp_path / "gone.txt"))
    with pytest.raises(Refusal, match="The prompts cannot be read"):
        desk.random_prompt(str(tmp_path / "gone.txt"))


def test_a_written_prompt_becomes_a_human_turn_unless_it_is_one_or_is_to_be_continued():
    wanted = f"{HUMAN} why?{ASSISTANT}"
    assert check_prompt("why?", "dialogue") == wanted
    assert check_prompt(wanted, "dialogue") == wanted
    assert check_prompt(wanted.strip(), "dialogue") == wanted  # as a text box shows it
    assert check_prompt("why?", "text") == "why?"
    with pytest.raises(Refusal, match="has 8001 characters; at most 8000"):
        check_prompt("x" * (MAX_PROMPT + 1), "text")
    with pytest.raises(Refusal, match="no prompt"):
        check_prompt(" \n", "text")


# Replies


def test_replies_differ_and_a_dialogue_ends_where_the_human_would_speak(material, monkeypatch):
    args = AnnotateArgs(models=[str(material / "model")], device="cpu")
    replier = Replier(args)
    settings = GenerationArgs(max_new_tokens=4)
    replies, digest = replier.replies(args.models[0], "name", 9, settings)
    assert len(replies) == len({reply.strip() for reply in replies}) == 9
    assert re.fullmatch("[0-9a-f]{64}", digest)
    session = replier._loaded[args.models[0]][0]
    texts = iter([f"one {HUMAN} two", " ", "one", "three"] * 3)
    monkeypatch.setattr(session.tokenizer, "decode", lambda *_, **__: next(texts))
    assert replier.replies(args.models[0], "name", 2, settings)[0] == ["one", "three"]


def test_a_model_that_says_one_thing_only_is_asked_for_more_temperature(material):
    args = AnnotateArgs(models=[str(material / "model")], device="cpu")
    with pytest.raises(Refusal, match="gave 1 different replies, and 2 are needed"):
        Replier(args).replies(args.models[0], "name", 4, GenerationArgs(max_new_tokens=4, temperature=1e-6))


def test_models_that_cannot_reply(material, tmp_path):
    scorer = save_classifier(tmp_path / "rm")
    args = AnnotateArgs(models=[str(material / "model"), str(scorer), str(tmp_path / "gone")], device="cpu")
    replier, settings = Replier(args), GenerationArgs(max_new_tokens=4)
    for model, text in (
        (str(tmp_path / "gone"), "cannot be loaded: no folder"),
        (str(scorer), "cannot be loaded: .* is a reward model"),
        ("/etc", "No model was given"),
    ):  # fmt: skip
        with pytest.raises(Refusal, match=text):
            replier.replies(model, "name", 2, settings)
    with pytest.raises(Refusal, match=r"tokens; with 4 for a reply, the model takes 64"):
        replier.replies(args.models[0], "name " * 80, 2, settings)
    assert replier.replies(args.models[0], "name", 2, settings)  # the rest goes on


# The desk


def test_ranks_reach_the_replies_that_the_person_saw(desk):
    shown = take(desk, 4)
    judgement = desk.rank("ann", shown.ticket.text(), [3, 1, 4, 2, *[None] * 5], ties=False)
    item = desk.store.item(shown.ticket.item)
    assert sorted(shown.ticket.order) == [0, 1, 2, 3]
    by_text = dict(zip(shown.replies, (3, 1, 4, 2), strict=True))
    assert judgement.opinion.ranks == tuple(by_text[reply] for reply in item.replies)
    assert desk.seen(shown.ticket.text()) == shown.replies
    assert (item.model, item.settings["temperature"], item.settings["max_new_tokens"]) == (desk.args.models[0], 1.0, 6)
    assert 0 <= judgement.seconds < 60


def test_orders_differ_from_one_person_to_the_next(desk):
    item = desk.store.add_item("p", [str(n) for n in range(9)], "m", "d", {})
    assert len({desk.show(item).replies for _ in range(20)}) > 15
    assert len({desk.show(item).ticket.token for _ in range(20)}) == 20


def test_a_repeat_is_an_item_that_somebody_else_ranked(desk):
    object.__setattr__(desk.args, "repeat_share", 1.0)
    first = take(desk)
    desk.rank("bob", first.ticket.text(), [1, 2, 3], ties=False)
    again = take(desk)
    assert (again.ticket.item, sorted(again.replies)) == (first.ticket.item, sorted(first.replies))
    object.__setattr__(desk.args, "repeat_share", 0.0)
    assert take(desk).ticket.item != first.ticket.item


@pytest.mark.parametrize("ticket", ["", "[]", "{}", '{"item": 1}', "null", '{"item": 1e999}', "[" * 10_000])
def test_a_ticket_of_nothing(desk, ticket):
    for call in (lambda: desk.rank("ann", ticket, [1, 2], True), lambda: desk.say("ann", ticket, "all_bad"),
                 lambda: desk.seen(ticket), lambda: desk.score("ann", ticket, 1.0)):  # fmt: skip
        with pytest.raises(Refusal, match="nothing on the page yet"):
            call()


def test_a_ticket_that_somebody_made_up_changes_no_order_of_replies(desk):
    shown = take(desk, 3)
    forged = json.dumps(json.loads(shown.ticket.text()) | {"order": [0, 0, 2]})
    with pytest.raises(Refusal):
        desk.rank("ann", forged, [1, 2, 3], False)
    with pytest.raises(Refusal):
        desk.seen(forged)


def test_scores_and_edits(desk):
    shown = take(desk, 1)
    saved = desk.score("ann", shown.ticket.text(), -1.5)
    assert (saved.opinion.reply, saved.opinion.score) == (0, -1.5)
    for score in (2.1, -3, float("nan")):
        with pytest.raises(Refusal, match="score from -2 to 2"):
            desk.score("ann", shown.ticket.text(), score)
    changed = desk.edit("bob", saved.id, 1, "scored", "0.5", "t1")
    assert (changed.opinion, changed.author) == (Opinion("scored", reply=0, score=0.5), "bob")
    for text in ("7", "nan", "x"):
        with pytest.raises(Refusal, match="score from -2 to 2"):
            desk.edit("bob", saved.id, 2, "scored", text, "t2")
    three = take(desk, 3)
    ranked = desk.say("ann", three.ticket.text(), "all_bad")
    assert desk.edit("bob", ranked.id, 1, "ranked", "2 1 1", "t3").opinion.ranks == (2, 1, 1)
    assert desk.remove("bob", ranked.id, 2, "t4").deleted
    with pytest.raises(Refusal, match="number 99"):
        desk.edit("bob", 99, 1, "ranked", "1 2", "t5")


def test_names():
    assert check_name(" 安 ") == "安"
    for name in ("", "  ", "a\nb", "x" * 61, "a\x1b[2J"):
        with pytest.raises(Refusal):
            check_name(name)


def test_two_buttons_on_one_ticket_are_no_double_click(desk):
    ticket = take(desk).ticket.text()
    assert desk.say("ann", ticket, "skipped") == desk.say("ann", ticket, "skipped")
    with pytest.raises(Refusal, match="judged this item before, as number 1"):
        desk.rank("ann", ticket, [1, 2, 3], ties=False)
    assert [judgement.opinion.verdict for judgement, _ in desk.store.judgements()] == ["skipped"]


def test_the_export_of_a_desk(desk):
    with pytest.raises(Refusal, match="Nothing to export yet"):
        desk.export()
    desk.rank("ann", take(desk, 3).ticket.text(), [3, 1, 2], ties=False)
    found = desk.export()
    assert (found.rankings, found.files) == (1, ("preference_train.pt", "rankings.jsonl", "rank_lists.tsv"))
    object.__setattr__(desk.args, "tokenizer_name", "no/such/tokenizer")
    with pytest.raises(Refusal, match="The export failed"):
        desk.export()


def test_the_command_that_trains_on_the_export(desk, material, tmp_path):
    for stage in ("sft", "ppo"):
        run = tmp_path / "my runs" / stage
        save_causal(run / "checkpoints" / "step-000001")
        (run / "args.json").write_text(json.dumps({"stage": stage}))
        (run / "latest").write_text("step-000001\n")
    runs, model = tmp_path / "my runs", material / "model"
    for given, start in (
        ([runs / "sft"], f"--sft_experiment_dir={runs / 'sft'}"),
        ([runs / "ppo"], f"--model_name={runs / 'ppo' / 'checkpoints' / 'step-000001'}"),
        ([model], f"--model_name={model}"), (["some/hub-model"], "--model_name=some/hub-model"),
        ([], "--model_name=..."), ([tmp_path], "--model_name=..."),
    ):  # fmt: skip
        desk.args.models[:] = map(str, given)
        wanted = ["python", "scripts/rlhf_rm.py", f"--data_dir={desk.args.export_dir}", start]
        assert shlex.split(desk.training_command()) == wanted


# Users


def test_users_are_who_they_say(tmp_path):
    path = tmp_path / "deep" / "users"
    add_user(path, "ann", "correct horse")
    add_user(path, "bob", "correct horse")
    assert path.stat().st_mode & 0o077 == 0
    text = path.read_text()
    assert "horse" not in text
    assert len({line.split(":")[2] for line in text.splitlines()}) == 2  # the same password, another salt
    users = read_users(path)
    assert is_password(users, "ann", "correct horse")
    assert not is_password(users, "ann", "correct horsE")
    assert not is_password(users, "ann", "")
    assert not is_password(users, "eve", "correct horse")
    assert not is_password(users, "eve", "")
    add_user(path, "ann", "another horse")
    users = read_users(path)
    assert [is_password(users, "ann", word) for word in ("correct horse", "another horse")] == [False, True]
    assert is_password(users, "bob", "correct horse")


@pytest.mark.parametrize("name", ["", "a b", "a:b", "x" * 61, "a\n"])
def test_names_of_users(tmp_path, name):
    with pytest.raises(ValueError, match="--add_user"):
        add_user(tmp_path / "users", name, "correct horse")


def test_short_passwords_and_other_files(tmp_path):
    with pytest.raises(ValueError, match="at least 8 characters, this one 5"):
        add_user(tmp_path / "users", "ann", "horse")
    with pytest.raises(FileNotFoundError, match="make it with --add_user"):
        read_users(tmp_path / "users")
    for text, message in (("", "names nobody"), ("ann:secret\n", "line 1"), ("ann:!!:!!\n", "line 1")):
        (tmp_path / "users").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_users(tmp_path / "users")
