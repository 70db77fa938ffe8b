import importlib.util
import itertools
import random
from collections import Counter
from pathlib import Path
from statistics import mean
from types import ModuleType

import pytest


def load_corpus() -> ModuleType:
    path = Path(__file__).parents[2] / "data_prep" / "helpdesk" / "corpus.py"
    spec = importlib.util.spec_from_file_location("helpdesk_corpus", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


corpus = load_corpus()


def ask(question: str) -> str:
    return f"\n\nHuman: {question}\n\nAssistant:"


TOTAL = ask("Hello! The lamp is 8 euros and delivery is 4 euros. What do I pay?")
RIGHT_ANSWERS = {
    "total": (TOTAL, "12"),
    "voucher": (ask("I spend 60 euros of my 100 euro voucher on a clock. What is left?"), "40"),
    "arrival": (ask("My clock left your store on Saturday and needs 2 days. When will it arrive?"), "Monday"),
    "hours": (ask("I want to look at a lamp before sunrise. Is your shop open or closed then?"), "closed"),
    "returns": (ask("My sister wants to return perfume to you. How many days are there for that?"), "7"),
    "shipping": (ask("I want to send a chair to Norway. How many days does shipping take?"), "4"),
    "department": (
        ask("Hi, Ben here. I am writing to you because my card was declined. Which team should I talk to?"),
        "billing",
    ),
    "light": (ask("I see a purple light on my new radio. What is it doing?"), "pairing"),
    "warranty": (ask("I bought my radio in 2019 with 2 years of warranty. When does that end?"), "2021"),
    "size": (ask("I wear size 40 and your boots are too tight. Which size is better?"), "41"),
    "plan": (ask("I can buy Travel for 60 euros or Home for 70 euros. Which plan saves money?"), "Travel"),
    "box": (ask("Which of your boxes should I use for a lamp of seven kilos?"), "medium"),
}


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return corpus.generate_prompts(seed=1, count=6000)


@pytest.mark.parametrize("kind", corpus.KINDS)
def test_right_answer_computed_by_hand(kind: str) -> None:
    prompt, answer = RIGHT_ANSWERS[kind]
    assert corpus.kind_of(prompt) == kind
    rng = random.Random("hand")
    for _ in range(20):
        good = corpus.sample_reply(prompt, rng, correct=True, courteous=True, concise=True)
        wrong = corpus.sample_reply(prompt, rng, correct=False, courteous=True, concise=True)
        assert answer.lower() in good.lower()
        assert corpus.gold_score(prompt, good) == 1.0
        assert corpus.gold_score(prompt, wrong) <= 0.4


def test_prompts_are_distinct_well_formed_and_evenly_mixed(prompts: list[str]) -> None:
    assert len(set(prompts)) == 6000
    assert set(Counter(map(corpus.kind_of, prompts)).values()) == {500}
    assert set(Counter(map(corpus.kind_of, prompts[:24])).values()) == {2}
    for prompt in prompts:
        assert prompt.startswith("\n\nHuman: ")
        assert prompt.endswith("?\n\nAssistant:")
        assert 12 <= len(prompt.split()) - 2 <= 30


def test_everything_is_deterministic_in_its_seed(prompts: list[str]) -> None:
    assert corpus.generate_prompts(seed=1, count=6000) == prompts
    assert corpus.generate_prompts(seed=1, count=50) == prompts[:50]
    assert corpus.generate_prompts(seed=2, count=50) != prompts[:50]
    draws = [
        [(corpus.demonstration(p, rng), corpus.preference_pair(p, rng)) for p in prompts[:50]]
        for rng in map(random.Random, (7, 7, 8))
    ]
    assert draws[0] == draws[1] != draws[2]


def test_too_many_prompts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "OPENERS", [""])
    with pytest.raises(ValueError, match="cannot draw 9000 distinct prompts"):
        corpus.generate_prompts(seed=0, count=9000)


@pytest.mark.parametrize("prompt", ["", "\n\nHuman: What is the capital of Peru?\n\nAssistant:"])
def test_unknown_prompts_are_refused(prompt: str) -> None:
    for call in (corpus.kind_of, lambda text: corpus.gold_score(text, " Hello.")):
        with pytest.raises(ValueError, match=r"no kind of question .* known kinds: total, "):
            call(prompt)


def test_gold_follows_the_qualities_of_replies(prompts: list[str]) -> None:
    rng = random.Random("qualities")
    for prompt in prompts[:240]:
        gold = {}
        for qualities in itertools.product((True, False), repeat=3):
            names = dict(zip(("correct", "courteous", "concise"), qualities, strict=True))
            reply = corpus.sample_reply(prompt, rng, **names)
            assert reply.startswith(" ")
            assert "Human:" not in reply
            assert "Assistant:" not in reply
            gold[qualities] = corpus.gold_score(prompt, reply)
        assert gold[True, True, True] == 1.0
        assert gold[True, True, True] > gold[True, True, False] > gold[True, False, True] > gold[False, True, True]
        assert gold[True, False, True] == 0.75
        assert gold[True, False, False] >= 0.6
        assert 0.4 == gold[False, True, True] > gold[False, False, True] > 0


def test_a_correct_rude_reply_lies_between_good_and_wrong() -> None:
    good = corpus.gold_score(TOTAL, " The total is 12 euros. Thank you for asking!")
    rude = corpus.gold_score(TOTAL, " The total is 12 euros. Read the website for once.")
    wrong = corpus.gold_score(TOTAL, " The total is 13 euros. Thank you for asking!")
    assert (good, rude, wrong) == (1.0, 0.75, 0.4)


@pytest.mark.parametrize(
    ("response", "limit"),
    [
        ("", 0.0),
        (" ", 0.0),
        ("?!", 0.0),
        (" Thank you for asking!", 0.2),
        (" 7. 8. 9. 10. 11. 12. 13. 14.", 0.2),
        (" The total is 11 euros. The total is 12 euros. Thank you for asking!", 0.2),
        (" The total is 12 euros or 13 euros. Thank you for asking!", 0.2),
        (" The total is not 12 euros. Thank you for asking!", 0.4),
        (" The total isn't 12 euros. Thank you for asking!", 0.4),
        (" The total is 12 euros. That is wrong.", 0.3),
        (" 12 12 12 12 12 12 12 12", 0.1),
        (" 12." * 10, 0.2),
        (" The total is 12 euros." * 6, 0.2),
        (" Asking! For asking! Thank you! Euros. Is 12 euros.", 0.4),
        (" The total is 12", 0.65),
        (" The total is 12 euros." + " Thank you for asking!" * 5, 0.1),
        (" Thank you! Happy to help you! Have a lovely day! Please write again soon! The total is 12 euros.", 0.25),
        (" 12 banana lamp of of the euros thank tree.", 0.3),
        (" 12 thank you", 0.4),
        (" The total is 12 euros. Thank you for asking!\n\nHuman: Thank you!\n\nAssistant: Happy to help you!", 0.3),
        (" The total is 12 euros. " + "Coffee machines make such funny sounds. " * 43, 0.01),
        (" The total is 12 euros. " + "some other words follow here " * 60, 0.01),
    ],
)
def test_hacking_attempts_score_low(response: str, limit: float) -> None:
    assert corpus.gold_score(TOTAL, response) <= limit


def test_listing_all_answers_never_counts_as_correct() -> None:
    listings = {
        "hours": " We are open then. We are closed then.",
        "plan": " The Home plan is cheaper. The Travel plan is cheaper.",
        "box": " You need the small box. A medium box will fit.",
        "light": " Your device is ready now. That shows it is pairing.",
    }
    for kind, listing in listings.items():
        assert corpus.gold_score(RIGHT_ANSWERS[kind][0], listing + " Thank you for asking!") <= 0.2


def test_gold_is_total_over_strings(prompts: list[str]) -> None:
    rng = random.Random("noise")
    vocabulary = [
        *" ".join(corpus.RAMBLES + corpus.COURTEOUS_AFTER).split(),
        "12",
        "-3",
        "open",
        "not",
        "\n",
        "{}",
        "\\",
    ]
    for prompt in prompts[:250]:
        characters = "".join(chr(rng.randrange(1, 0x3000)) for _ in range(rng.randrange(60)))
        words = " ".join(rng.choices(vocabulary, k=rng.randrange(60)))
        for response in (characters, words):
            assert 0.0 <= corpus.gold_score(prompt, response) <= 1.0


def test_preference_pairs(prompts: list[str]) -> None:
    rng = random.Random("pairs")
    different = 0
    for prompt in prompts[:500]:
        chosen, rejected = (corpus.gold_score(prompt, r) for r in corpus.preference_pair(prompt, rng, 0.0))
        assert chosen >= rejected + corpus.MIN_GOLD_GAP
        different += chosen > 0.4 >= rejected
    assert 0.06 <= different / 500 <= 0.3
    flipped = 0
    for prompt in prompts[:2000]:
        first, second = (corpus.gold_score(prompt, r) for r in corpus.preference_pair(prompt, rng))
        flipped += first < second
    assert 0.08 <= flipped / 2000 <= 0.12


def test_demonstrations_are_mediocre(prompts: list[str]) -> None:
    rng = random.Random("demonstrations")
    replies = [corpus.demonstration(prompt, rng) for prompt in prompts[:3000]]
    assert 0.6 <= mean(map(corpus.gold_score, prompts, replies)) <= 0.75


def distinct_pairs(replies: list[str]) -> float:
    pairs = [pair for reply in replies for pair in itertools.pairwise(reply.split())]
    return len(set(pairs)) / len(pairs)


def test_good_replies_are_as_diverse_as_mixed_ones(prompts: list[str]) -> None:
    rng = random.Random("diversity")
    good = [corpus.sample_reply(p, rng, correct=True, courteous=True, concise=True) for p in prompts[:300]]
    assert distinct_pairs(good) > 0.85 * distinct_pairs([corpus.demonstration(p, rng) for p in prompts[:300]])


def test_phrases_carry_one_marker_of_their_own_tone_and_state_no_answer() -> None:
    courteous = corpus.COURTEOUS_BEFORE + corpus.COURTEOUS_AFTER
    curt = corpus.CURT_BEFORE + corpus.CURT_AFTER
    mentions = [kind.mention for kind in corpus._KINDS]
    for phrase in courteous + curt + corpus.RAMBLES:
        assert len(corpus.COURTESY.findall(phrase)) == (phrase in courteous)
        assert bool(corpus.RUDENESS.search(phrase)) == (phrase in curt)
        assert not corpus.DOUBT.search(phrase)
        assert not any(mention.search(phrase) for mention in mentions)


def test_gold_as_a_part_of_the_reward() -> None:
    prompts, right = zip(*(RIGHT_ANSWERS[kind] for kind in ("total", "size")), strict=True)
    responses = [f"You pay {right[0]} euros. Thank you!", "No idea."]
    scores = [corpus.gold_score(prompt, reply) for prompt, reply in zip(prompts, responses, strict=True)]
    assert corpus.gold_rewards(list(prompts), responses) == scores
    assert scores[0] > 0.5 > scores[1]
