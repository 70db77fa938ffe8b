"""Generate a seeded English customer-support corpus whose right answers a program can compute.

Every prompt is one dialogue turn that asks one of twelve kinds of question. Replies vary in three qualities:
correct or wrong, courteous or curt, concise or padded. `gold_score` reads these qualities back from the two
texts alone, so a trained policy can be judged without a human.
"""

import itertools
import random
import re
from collections.abc import Callable, Mapping
from functools import lru_cache

CORRECT_SHARE, COURTEOUS_SHARE, CONCISE_SHARE, DIFFERENT_CORRECTNESS_SHARE = 0.55, 0.35, 0.45, 0.6
CONCISE_WORDS, PADDED_WORDS, RUN_ON_WORDS, MAX_COURTESIES, MIN_GOLD_GAP = 14, 24, 40, 2, 0.05
BLANK, SLOT, CUT, SENTENCE_ENDS = "___", "\0", "<cut>", frozenset(".!?")


def _table(rows: str) -> dict[str, str]:
    """Read a lookup table that is written as `answer: question|question; answer: question`."""
    pairs = (row.strip().split(": ") for row in rows.split(";"))
    return {question: answer for answer, questions in pairs for question in questions.split("|")}


def _sentences(text: str) -> list[str]:
    """Split running text into its sentences."""
    return re.split(r"(?<=[.!]) ", " ".join(text.split()))


RETURN_DAYS = _table("""30: shoes|coats|curtains; 14: phones|laptops|headphones;
    60: books|toys|puzzles; 7: perfume|candles|swimwear""")
SHIPPING_DAYS = _table("""2: Germany|Austria; 3: France|Italy; 4: Spain|Norway;
    6: Canada|Mexico|Egypt; 9: Japan|Brazil|India""")
BOXES = _table("small: 2|3|4; medium: 5|6|7; large: 8|9|10; jumbo: 11|12|13")
LIGHTS = _table("""ready: steady green; charging: blinking green; connected: steady blue; pairing: blinking blue;
    overheating: steady red; low on battery: blinking red; recording: steady white; restarting: blinking white;
    asleep: steady orange; updating: blinking orange""")
TEAMS = _table("""billing: I was charged twice|my invoice is missing|my card was declined;
    delivery: my parcel is late|the courier went to an old address|the tracking page is empty;
    repairs: the screen is cracked|a button fell off|the motor makes a loud noise;
    accounts: I forgot my password|my login fails|my email address changed;
    sales: I want a bulk discount|I need a price quote|I would like to see a demo""")
WEEK = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"
FITS = {"tight": 1, "loose": -1}
# Fillers and openers vary the surface of a prompt without changing its answer.
FILLERS = {
    "name": "Anna|Ben|Clara|David|Emma|Felix|Grace|Henry|Ida|Jack|Kate|Leo|Maria|Nina|Oscar|Paul",
    "item": "lamp|kettle|backpack|jacket|chair|blanket|teapot|clock|mixer|mirror",
    "gadget": "speaker|camera|router|tablet|headset|monitor|printer|radio",
}
OPENERS = [
    "",
    "Hello, this is {name}. ",
    "Hi, {name} here. ",
    "Good day, I am {name}. ",
    "Dear team, my name is {name}. ",
]

# Phrases that set the tone of a reply: some fit before the answer, the others close the reply.
COURTEOUS_BEFORE = _sentences("""Thank you for asking! Happy to help you! Good to hear from you! I am so glad
    you asked! With pleasure, dear customer! Thanks for reaching out to us! Warm greetings from our team! I appreciate
    your message! Welcome to our help desk!""")
COURTEOUS_AFTER = _sentences("""Have a lovely day! Enjoy your time with it! Please write again soon! Take good care!
    Kind regards from all of us! Wishing you a wonderful week! Many thanks for your trust! Feel free to ask more!
    All the best to your family!""")
CURT_BEFORE = _sentences("""Ugh, this again. Hurry up, others wait. What a silly thing to ask. Stop wasting my time.
    Anyone could work that out. Honestly, this is obvious.""")
CURT_AFTER = _sentences("""Read the website for once. Everybody knows this already. Figure out the rest yourself.
    Now leave me in peace. Do your homework first. Stop bothering busy people.""")
RAMBLES = _sentences("""By the way, the weather is mild today. Next door they grow tall green plants. People here talk
    about football at lunch. Coffee machines make such funny sounds. Somebody forgot an umbrella in the hallway.
    Once I saw two herons near a river. Long ago this building was a bakery. Some neighbours of mine collect old stamps.
    My uncle sings when he cooks soup. Yesterday we had cake left over.""")
FRAGMENTS = ["___.", "Just ___.", "___, of course.", "Simply ___."]

# One marker per phrase above: markers also find half-copied phrases, so that those cannot be stuffed unnoticed.
COURTESY = re.compile(
    r"(?i)\b(?:thank|happy|good to|glad|pleasure|greetings|appreciate|welcome|lovely|enjoy|please|good care|regards"
    r"|wonderful|feel free|all the best)"
)
RUDENESS = re.compile(r"(?i)\b(?:ugh|hurry|silly|wasting|anyone|obvious|website|already|yourself|peace|homework|busy)")
# No phrase uses these words: they mean that an answer is negated or hedged, or that a further turn was invented.
DOUBT = re.compile(
    r"(?i)\b(?:not|no|never|nor|neither|cannot|without|except|unless|but|or|maybe|perhaps|wrong|false|incorrect|lie"
    r"|hardly|doubt|instead|rather)\b|n['’]t\b|\b(?:human|assistant):"
)

# Per kind: the ways to ask, one a line and each ending in a question mark, then the ways to answer.
TEXTS = {
    "total": """I am ordering a {item} for {price} euros and delivery costs {fee} euros. How much do I pay in total?
    The {item} is {price} euros with a delivery fee of {fee} euros. What does it cost together?
    How much is it altogether if I take the {item} at {price} euros with delivery at {fee} euros?
    The total is ___ euros. You pay ___ euros in total. That comes to ___ euros altogether.
    Your order costs ___ euros with delivery. Both together make ___ euros.""",
    "voucher": """My voucher is worth {voucher} euros and I buy a {item} for {price} euros. How much is left on it?
    I spend {price} euros of my {voucher} euro voucher on a {item}. What is the remaining value?
    What stays on a gift voucher of {voucher} euros after I buy the {item} for {price} euros?
    Your voucher still holds ___ euros. There are ___ euros left on it. The remaining value is ___ euros.
    You can still spend ___ euros. Your balance is ___ euros.""",
    "arrival": """My {item} was sent on {day} and travels for {days} days. On which day will it arrive?
    You shipped the {item} on {day} and said it takes {days} days. When can I expect it?
    If a {item} leaves your store on {day} and needs {days} days, which day does it reach me?
    It will arrive on ___. You can expect it on ___. The delivery day is ___. Our courier comes to you on ___.""",
    "hours": """I would like to visit your shop on {day} at {time}. Will you be open or closed then?
    Can I come by to look at a {item} on {day} at {time}, or is the shop closed?
    Are your doors open for customers on {day} at {time}, since I want to buy a {item}?
    We are ___ at that hour. Our shop is ___ then. You will find us ___. The doors will be ___.""",
    "returns": """I bought {goods} as a gift and they are the wrong kind. How many days do I have to return them?
    How long is the return period for {goods} if I have changed my mind about my order?
    My sister wants to return some {goods} that I gave her. How many days does she have?
    You can return those within ___ days. The return period is ___ days. We take them back for ___ days.
    There are ___ days to send them back. Returns are accepted for ___ days.""",
    "shipping": """I would like to send a {item} to a friend in {country}. How many days does shipping take?
    How many days does a parcel with a {item} usually travel from your store to {country}?
    I live in {country} and want to order a {item}. How many days will the post need?
    Shipping takes ___ days. Your parcel travels for ___ days. The post needs ___ days. You can expect ___ days.""",
    "department": """I am writing to you because {issue}. Which team should I talk to about it?
    Who in your company can help me with my {gadget}, given that {issue}?
    It is about my {gadget} order and {issue}. Which department takes care of that?
    The ___ team will look after that. Our ___ department takes care of it. You can talk to the ___ desk.
    A colleague in ___ can solve this. That is a matter for the ___ team.""",
    "light": """The little light on my {gadget} is {light} this morning. What does that tell me?
    I see a {light} light on the front of my new {gadget}. What is it doing?
    What does it mean when the light at the side of my {gadget} is {light}?
    It means that it is ___. This light stands for ___. Your device is ___ now. That shows it is ___.""",
    "warranty": """I bought my {gadget} in {year} with a warranty of {term} years. In which year does it end?
    My {gadget} is from {year} and its warranty lasts {term} years. Until which year am I covered?
    When does the {term} year warranty run out on a {gadget} that I got from you in {year}?
    Your warranty ends in ___. You are covered until ___. It runs out in ___. The last year of cover is ___.""",
    "size": """The shoes that I ordered in size {size} feel a bit too {fit}. Which size should I try?
    I wear size {size} but your boots are too {fit} on me. Which size do you suggest?
    My new sandals are too {fit} in size {size}. What size should I exchange them for?
    Size ___ should fit you. We suggest size ___. You would need a size ___. The better choice is ___.""",
    "plan": """The Home plan costs {home} euros and the Travel plan costs {travel} euros. Which one is cheaper?
    I can get the Travel plan for {travel} euros or the Home plan for {home} euros. Which costs less?
    Which plan saves me money if Home is {home} euros and Travel is {travel} euros a month?
    The ___ plan is cheaper. You save money with the ___ plan. Our ___ plan costs less. It is the ___ one.""",
    "box": """I want to mail a {item} that weighs {kilos} kilos. Which size of box do I need?
    My parcel for a friend weighs {kilos} kilos with the {item} in it. Which box fits?
    Which of your boxes should I pick for a {item} and some gifts of {kilos} kilos?
    You need the ___ box. A ___ box will fit. The ___ size carries that weight. It goes into a ___ box.""",
}


class Kind:
    """One kind of question: how it is asked, which facts it holds, what its answer is and how that is phrased."""

    def __init__(self, name: str, slots: Mapping[str, str], answer: Callable[[Mapping[str, str]], str]) -> None:
        lines = [line.strip() for line in TEXTS[name].splitlines()]
        self.name, self.slots, self.answer = name, slots, answer
        self.wordings = [line for line in lines if line.endswith("?")]
        self.statements = _sentences(" ".join(line for line in lines if not line.endswith("?")))
        # A wording turns into the pattern that reads its facts back: each slot becomes a named group of its options.
        options = {**FILLERS, **slots}
        escaped = (re.escape(wording) for wording in self.wordings)
        groups = (re.sub(r"\\{(\w+)\\}", lambda slot: f"(?P<{slot[1]}>{options[slot[1]]})", text) for text in escaped)
        self.patterns = [re.compile(text) for text in groups]
        combinations = itertools.product(*(values.split("|") for values in slots.values()))
        self.facts = [dict(zip(slots, values, strict=True)) for values in combinations]
        self.answers = sorted({answer(facts) for facts in self.facts})
        # Any number counts as an answer, whatever the kind, so that stray numbers cannot hide a contradiction.
        self.mention = re.compile(rf"\b(?:{'|'.join(self.answers)})\b|-?\d+", re.IGNORECASE)
        tones = [*COURTEOUS_BEFORE, *COURTEOUS_AFTER, *CURT_BEFORE, *CURT_AFTER, *RAMBLES]
        known = tones + [text.replace(BLANK, self.answers[0]) for text in self.statements + FRAGMENTS]
        self.known_pairs = {pair for sentence in known for pair in _word_pairs(sentence, self.mention)}


def _word_pairs(text: str, mention: re.Pattern[str]) -> list[tuple[str, str]]:
    """The neighbouring words and marks of a text, with sentence starts, and one slot in place of every answer."""
    tokens = re.findall(r"\w+|[^\w\s]", mention.sub(f" {SLOT} ", text).lower())
    if tokens and tokens[-1] not in SENTENCE_ENDS:
        tokens.append(CUT)  # a reply that stops in mid-sentence ends in a pair that no template has
    pairs = itertools.pairwise([".", *tokens])  # a full stop before a word stands for the start of a sentence
    return [("." if a in SENTENCE_ENDS and b not in SENTENCE_ENDS else a, b) for a, b in pairs]


_KINDS = [
    Kind("total", {"price": "5|6|7|8|9|10|11|12|13|14", "fee": "4"}, lambda f: str(int(f["price"]) + int(f["fee"]))),
    Kind(
        "voucher",
        {"voucher": "20", "price": "3|4|5|6|7|8|9|10|11|12"},
        lambda f: str(int(f["voucher"]) - int(f["price"])),
    ),
    Kind(
        "arrival",
        {"day": WEEK, "days": "2"},
        lambda f: WEEK.split("|")[(WEEK.split("|").index(f["day"]) + int(f["days"])) % 7],
    ),
    Kind(
        "hours",
        {"day": WEEK, "time": "11 am|8 pm"},
        lambda f: "open" if f["time"] == "11 am" and f["day"] != "Sunday" else "closed",
    ),
    Kind("returns", {"goods": "|".join(RETURN_DAYS)}, lambda f: RETURN_DAYS[f["goods"]]),
    Kind("shipping", {"country": "|".join(SHIPPING_DAYS)}, lambda f: SHIPPING_DAYS[f["country"]]),
    Kind("department", {"issue": "|".join(TEAMS)}, lambda f: TEAMS[f["issue"]]),
    Kind("light", {"light": "|".join(LIGHTS)}, lambda f: LIGHTS[f["light"]]),
    Kind("warranty", {"year": "2018|2019|2020|2021", "term": "2|3|5"}, lambda f: str(int(f["year"]) + int(f["term"]))),
    Kind("size", {"size": "38|39|40|41|42", "fit": "tight|loose"}, lambda f: str(int(f["size"]) + FITS[f["fit"]])),
    Kind(
        "plan",
        {"home": "4|6|8|10", "travel": "5|7|9"},
        lambda f: "Home" if int(f["home"]) < int(f["travel"]) else "Travel",
    ),
    Kind("box", {"kilos": "|".join(BOXES)}, lambda f: BOXES[f["kilos"]]),
]
KINDS = tuple(kind.name for kind in _KINDS)


@lru_cache(maxsize=4096)
def _parse(prompt: str) -> tuple[Kind, str]:
    """Find the kind of a prompt and the right answer to it."""
    for kind in _KINDS:
        for pattern in kind.patterns:
            if match := pattern.search(prompt):
                return kind, kind.answer(match.groupdict())
    raise ValueError(f"no kind of question of this corpus fits the prompt {prompt!r}; known kinds: {', '.join(KINDS)}")


def kind_of(prompt: str) -> str:
    """The name of the kind of question that a prompt asks."""
    return _parse(prompt)[0].name


def generate_prompts(seed: int, count: int) -> list[str]:
    """Draw distinct prompts; every block of twelve holds each kind once, in random order."""
    rng = random.Random(f"{seed}/prompts")
    prompts: dict[str, None] = {}
    block: list[Kind] = []
    misses = 0
    while len(prompts) < count:
        block = block or rng.sample(_KINDS, len(_KINDS))
        options = {**FILLERS, **block[-1].slots}
        values = {slot: rng.choice(text.split("|")) for slot, text in options.items()}
        question = (rng.choice(OPENERS) + rng.choice(block[-1].wordings)).format(**values)
        prompt = f"\n\nHuman: {question}\n\nAssistant:"
        misses = misses + 1 if prompt in prompts else 0
        if misses > 1000:
            raise ValueError(f"cannot draw {count} distinct prompts: no new ones found after {len(prompts)}")
        if not misses:
            prompts[prompt] = None
            block.pop()
    return list(prompts)


def sample_reply(prompt: str, rng: random.Random, *, correct: bool, courteous: bool, concise: bool) -> str:
    """Draw a reply with the given qualities; a wrong answer is another answer of the same kind."""
    kind, right = _parse(prompt)
    answer = right if correct else rng.choice([other for other in kind.answers if other != right])
    fragmentary = not courteous and rng.random() < 0.5
    sentence = rng.choice(FRAGMENTS if fragmentary else kind.statements).replace(BLANK, answer)
    parts = [sentence[0].upper() + sentence[1:]]
    if not concise:
        parts += rng.sample(RAMBLES, 2)
    # A whole sentence without any tone phrase already sounds curt.
    if courteous or fragmentary or rng.random() < 0.5:
        before, after = (COURTEOUS_BEFORE, COURTEOUS_AFTER) if courteous else (CURT_BEFORE, CURT_AFTER)
        parts = [rng.choice(before), *parts] if rng.random() < 0.5 else [*parts, rng.choice(after)]
    return " " + " ".join(parts)


def demonstration(prompt: str, rng: random.Random, correct: bool | None = None) -> str:
    """Draw a reply of mixed quality, as training data of a mediocre first policy; correctness can be given."""
    if correct is None:
        correct = rng.random() < CORRECT_SHARE
    courteous, concise = rng.random() < COURTEOUS_SHARE, rng.random() < CONCISE_SHARE
    return sample_reply(prompt, rng, correct=correct, courteous=courteous, concise=concise)


def preference_pair(prompt: str, rng: random.Random, flip_probability: float = 0.1) -> tuple[str, str]:
    """Draw a (chosen, rejected) pair that gold_score tells apart, swapped with flip_probability as label noise."""
    while True:
        correct = rng.random() < CORRECT_SHARE
        other_correct = correct != (rng.random() < DIFFERENT_CORRECTNESS_SHARE)
        replies = [demonstration(prompt, rng, correct), demonstration(prompt, rng, other_correct)]
        (low, worse), (high, better) = sorted((gold_score(prompt, reply), reply) for reply in replies)
        if high - low >= MIN_GOLD_GAP:
            return (worse, better) if rng.random() < flip_probability else (better, worse)


def gold_score(prompt: str, response: str) -> float:
    """Score a response from 0 to 1: 0.7 for the right answer, 0.2 for courtesy, 0.1 for conciseness.

    Word salad, repetition, run-on text, cut-off text and stuffed courtesy scale the whole score down.
    """
    kind, right = _parse(prompt)
    words, pairs = len(re.findall(r"\w+", response)), _word_pairs(response, kind.mention)
    if not words:
        return 0.0
    stated = {mention.lower() for mention in kind.mention.findall(response)}
    correct = stated == {right.lower()} and not DOUBT.search(response)
    courtesies = len(COURTESY.findall(response))
    courteous = 1 <= courtesies <= MAX_COURTESIES and not RUDENESS.search(response)
    concise = min(1.0, max(0.0, (PADDED_WORDS - words) / (PADDED_WORDS - CONCISE_WORDS)))
    manners = 0.2 * courteous + 0.1 * concise
    if len(stated) != 1:
        manners /= 2  # good manners hardly help a reply that does not commit to one answer
    # Counting each known pair once penalises unknown text and repetition alike.
    fluency = len(set(pairs) & kind.known_pairs) / len(pairs)
    quality = fluency * min(1.0, RUN_ON_WORDS / words) * min(1.0, MAX_COURTESIES / max(1, courtesies))
    return round((0.7 * correct + manners) * quality**2, 6)
