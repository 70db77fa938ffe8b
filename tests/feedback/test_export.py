import json
from collections import Counter

import pytest

from rlhf_stages.data.rank_lists import RankList, read_rank_lists
from rlhf_stages.data.shards import open_shard
from rlhf_stages.data.tokenizer import load_tokenizer
from rlhf_stages.feedback.export import export, split_of_prompts
from rlhf_stages.feedback.records import Item, Judgement, Opinion
from rlhf_stages.feedback.wording import Refusal

from helpers import make_tokenizer, run_stage, save_causal, toy_rows, write_toy_data

RANKED = Opinion("ranked", (1, 2, 3, 4))
PROMPT = "\n\nHuman: name the colour.\n\nAssistant:"
REPLIES = (" red", " blue", " green tea", " the\tbike\nis red")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_causal(tmp_path_factory.mktemp("export") / "model")


def judged(*rows):
    """(item, prompt, opinion) as the store gives them."""
    return [
        (
            Judgement(n, 1, item, "ann", opinion, 1.5, "ann", "now", False),
            Item(item, prompt, REPLIES, "m", "digest", {"top_k": 0}, "then"),
        )
        for n, (item, prompt, opinion) in enumerate(rows, start=1)
    ]


def lists_of(folder, model):
    """Every list of every split, as texts, with its prompt."""
    tokenizer = load_tokenizer(str(model))
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)  # noqa: E731
    return sorted(
        (decode(record.prompt), *map(decode, record.responses))
        for path in folder.glob("preference_*.pt")
        for record in open_shard(path, responses=2)
    )


def texts(*numbers):
    tokenizer = make_tokenizer()
    decode = lambda text: tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)  # noqa: E731
    return tuple(decode(REPLIES[n]) for n in numbers)


def rows(folder, name):
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def test_lists_arrive_in_the_shard_best_first_and_ties_as_strict_pairs(model, tmp_path):
    found = export(
        judged(
            (1, PROMPT, Opinion("ranked", (3, 1, 2, 4))), (2, PROMPT, Opinion("ranked", (1, 2, 2, 1))),
            (3, PROMPT, Opinion("ranked", (1, 1, 1, 1))), (4, PROMPT, Opinion("all_bad")),
            (5, PROMPT, Opinion("skipped")),
        ), tmp_path, str(model),
    )  # fmt: skip
    assert (found.rankings, found.lists, found.scores) == (2, 5, 0)
    wanted = [texts(*order) for order in ((1, 2, 0, 3), (0, 1), (0, 2), (3, 1), (3, 2))]
    assert sorted(responses for _, *rest in lists_of(tmp_path, model) for responses in [tuple(rest)]) == sorted(wanted)
    assert found.files == ("preference_train.pt", "rankings.jsonl", "rank_lists.tsv")
    assert [row["verdict"] for row in rows(tmp_path, "rankings.jsonl")] == ["ranked"] * 3 + ["all_bad", "skipped"]


def test_the_same_prompt_stays_on_one_side_of_the_splits(model, tmp_path):
    prompts = [prompt for prompt, _ in toy_rows(200)]
    assert len(set(prompts)) == 36
    export(judged(*((n, prompt, RANKED) for n, prompt in enumerate(prompts))), tmp_path, str(model))
    sides = [{tuple(r.prompt.tolist()) for r in open_shard(path)} for path in tmp_path.glob("preference_*.pt")]
    assert sorted(map(len, sides)) == sorted(Counter(split_of_prompts(prompts).values()).values())
    assert len(sides) == 3
    assert len(set.union(*sides)) == 36
    assert len(lists_of(tmp_path, model)) == 200  # a second opinion is no duplicate
    # what has its side keeps it when more is ranked
    few = prompts[:80]
    assert split_of_prompts(few).items() <= split_of_prompts(prompts).items()


def test_with_few_prompts_none_is_held_out(model, tmp_path):
    prompts = sorted({prompt for prompt, _ in toy_rows(200)})[:19]
    assert set(split_of_prompts(prompts).values()) == {"train"}
    export(judged((1, "a", RANKED)), tmp_path, str(model))
    export(judged(*((n, prompt, RANKED) for n, (prompt, _) in enumerate(toy_rows(200)))), tmp_path, str(model))
    export(judged((1, "a", RANKED)), tmp_path, str(model))
    assert not (tmp_path / "preference_validation.pt").exists()


def test_the_jsonl_has_everything(model, tmp_path):
    found = export(
        judged(
            (1, PROMPT, Opinion("ranked", (2, 1, 3, 3))), (2, PROMPT, Opinion("scored", reply=3, score=-1.5)),
        ), tmp_path, str(model),
    )  # fmt: skip
    assert found.scores == 1
    (ranking,), (score,) = rows(tmp_path, "rankings.jsonl"), rows(tmp_path, "scores.jsonl")
    assert ranking == {
        "prompt": PROMPT, "replies": list(REPLIES), "verdict": "ranked", "ranks": [2, 1, 3, 3], "id": 1, "revision": 1,
        "item": 1, "annotator": "ann", "author": "ann", "seconds": 1.5, "created": "now", "model": "m",
        "model_digest": "digest", "settings": {"top_k": 0},
    }  # fmt: skip
    assert (score["prompt"], score["response"], score["score"]) == (PROMPT, REPLIES[3], -1.5)


def test_the_tsv_is_read_back(model, tmp_path):
    ranked = [(1, PROMPT, Opinion("ranked", (3, 1, 2, 4))), (2, PROMPT, Opinion("ranked", (1, 1, 1, 2)))]
    export(judged(*ranked), tmp_path, str(model))
    flat = "Human: name the colour. Assistant:"
    blue, green, red, bike = " blue", " green tea", " red", " the bike is red"
    lists = list(read_rank_lists(tmp_path / "rank_lists.tsv", prompt=flat))
    assert lists == [
        RankList(1, flat, (blue, green, red, bike)), RankList(2, flat, (red, bike)), RankList(3, flat, (blue, bike)),
        RankList(4, flat, (green, bike)),
    ]  # fmt: skip


def test_an_export_again_replaces_what_is_there(model, tmp_path):
    export(judged((1, PROMPT, Opinion("ranked", (1, 2, 3, 4))), (2, "p", Opinion("scored", reply=0, score=1))),
           tmp_path, str(model))  # fmt: skip
    found = export(judged((1, PROMPT, Opinion("ranked", (4, 3, 2, 1)))), tmp_path, str(model))
    assert not (tmp_path / "scores.jsonl").exists()
    assert "scores.jsonl" not in found.files
    ((_, *responses),) = lists_of(tmp_path, model)
    assert tuple(responses) == texts(3, 2, 1, 0)


def test_without_a_ranking_that_is_left_the_shards_of_the_export_before_go(model, tmp_path):
    score = (2, "p", Opinion("scored", reply=0, score=1.0))
    export(judged((1, PROMPT, RANKED), score), tmp_path / "own", str(model))
    assert len(list((tmp_path / "own").glob("*.pt"))) == 2
    data = write_toy_data(tmp_path / "toy")
    theirs = {path.name for path in data.iterdir()}
    for folder in (tmp_path / "own", data):
        export(judged(score), folder, str(model))
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["scores.jsonl"]
    assert {path.name for path in data.iterdir()} == theirs | {"scores.jsonl"}


def test_scores_alone_need_no_shard(model, tmp_path):
    found = export(judged((1, PROMPT, Opinion("scored", reply=0, score=1.0))), tmp_path, str(model))
    assert found.files == ("scores.jsonl",)


@pytest.mark.parametrize("opinions", [[], [Opinion("all_bad"), Opinion("skipped"), Opinion("ranked", (1, 1, 1, 1))]])
def test_nothing_to_export_is_a_sentence(model, tmp_path, opinions):
    with pytest.raises(Refusal, match="Nothing to export yet"):
        export(judged(*((n, PROMPT, opinion) for n, opinion in enumerate(opinions))), tmp_path / "new", str(model))
    assert not (tmp_path / "new").exists()


def test_a_reward_model_trains_on_the_export(model, tmp_path):
    data = tmp_path / "feedback" / "people"
    export(judged(*((n, f"name {n}", Opinion("ranked", (2, 1, 2, 3))) for n in range(12))), data, str(model))
    run_stage("rm", tmp_path / "runs", data, f"--model_name={model}", "--max_steps=2")
    assert (tmp_path / "runs" / "feedback" / "people" / "rm" / "summary.json").is_file()
