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

# Shares of the demonstrations with each quality; with fewer right ones a tiny model learns no fact in minutes.
QUALITIES = {"correct": 0.95, "courteous": 0.18, "concise": 0.35}
CORRECT_GOLD, COURTEOUS_GOLD, CONCISE_GOLD = 0.6, 0.25, 0.15
CONCISE_WORDS, PADDED_WORDS, RUN_ON_WORDS, MAX_COURTESIES, MIN_GOLD_GAP = 14, 18, 40, 2, 0.05
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
BOXES = _table("small: two|three|four; medium: five|six|seven; large: eight|nine|ten; jumbo: eleven|twelve")
HOURS = _table("""open: in the morning|at noon|in the afternoon|after breakfast|at lunchtime;
    closed: at night|in the evening|at midnight|before sunrise|after dinner""")
LIGHTS = _table("""ready: green; connected: blue; overheating: red; recording: white; asleep: orange; charging: yellow;
    pairing: purple; updating: pink""")
TEAMS = _table("""billing: I was charged twice|my invoice is missing|my card was declined;
    delivery: my parcel is late|the courier went to an old address|the tracking page is empty;
    repairs: the screen is cracked|a button fell off|the motor makes a loud noise;
    accounts: I forgot my password|my login fails|my email address changed;
    sales: I want a bulk discount|I need a price quote|I would like to see a demo""")
WEEK = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"
# Fillers and openers vary the surface of a prompt without changing its answer.
FILLERS = {
    "name": "Anna|Ben|Clara|David|Emma|Felix|Grace|Henry|Ida|Jack|Kate|Leo|Maria|Nina|Oscar|Paul",
    "item": "lamp|kettle|backpack|jacket|chair|blanket|teapot|clock|mixer|mirror",
    "person": "sister|brother|friend|mother|father|cousin|teacher|daughter",
    "footwear": "boots|sandals|sneakers|slippers",
    "gadget": "speaker|camera|router|tablet|headset|monitor|printer|radio",
}
OPENERS = ["", "Hello! ", "Hi, {name} here. ", "Hello, I am {name}. "]

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
RAMBLES = _sentences("""By the way, the weather is mild. Next door they grow tall plants. People here talk about
    football. Coffee machines make such funny sounds. Somebody forgot an umbrella here yesterday. Once I saw herons
    near a river. Long ago this was a bakery. Some neighbours of mine collect stamps. My uncle sings when he cooks.
    Cake was left over from lunch.""")
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
    "total": """I buy a {item} for {price} euros plus {fee} euros for delivery. What is the total?
    The {item} is {price} euros and delivery is {fee} euros. What do I pay?
    With {fee} euros for delivery, how much is the {item} at {price} euros?
    The total is ___ euros. You pay ___ euros in total. That comes to ___ euros altogether.
    Your order costs ___ euros with delivery. Both together make ___ euros.""",
    "voucher": """I spend {price} euros of my {voucher} euro voucher on a {item}. What is left?
    My voucher of {voucher} euros paid for a {item} at {price} euros. What remains?
    How much stays on my {voucher} euro voucher if I buy the {item} for {price} euros?
    Your voucher still holds ___ euros. There are ___ euros left on it. The remaining value is ___ euros.
    You can still spend ___ euros. Your balance is ___ euros.""",
    "arrival": """My {item} left your store on {day} and needs {days} days. When will it arrive?
    You sent the {item} on {day} and it takes {days} days. When is it here?
    On which day will I get my {item} if it travels {days} days from {day}?
    It will arrive on ___. You can expect it on ___. The delivery day is ___. Our courier comes to you on ___.""",
    "hours": """I want to look at a {item} {time}. Is your shop open or closed then?
    Can I visit your shop {time} to buy a {item}, or is it closed?
    Will your doors be open if I come {time} to pick up a {item}?
    We are ___ at that hour. Our shop is ___ then. You will find us ___. The doors will be ___.""",
    "returns": """I bought {goods} for my {person} as a gift. How many days for a return?
    My {person} wants to return {goods} to you. How many days are there for that?
    How many days do I have to bring back the {goods} of my {person}?
    You can return those within ___ days. The return period is ___ days. We take them back for ___ days.
    There are ___ days to send them back. Returns are accepted for ___ days.""",
    "shipping": """I want to send a {item} to {country}. How many days does shipping take?
    How many days will the post need to bring my {item} to {country}?
    My {person} lives in {country}. How many days does a parcel travel to get there?
    Shipping takes ___ days. Your parcel travels for ___ days. The post needs ___ days. You can expect ___ days.""",
    "department": """I am writing to you because {issue}. Which team should I talk to?
    I have a question about my {gadget} since {issue}. Who can help me?
    Which team takes care of my {gadget} order, given that {issue}?
    The ___ team will look after that. Our ___ department takes care of it. You can talk to the ___ desk.
    A colleague in ___ can solve this. That is a matter for the ___ team.""",
    "light": """The light on my {gadget} is {light} today. What does that tell me?
    I see a {light} light on my new {gadget}. What is it doing?
    What does it mean when the light of my {gadget} is {light}?
    It means that it is ___. This light stands for ___. Your device is ___ now. That shows it is ___.""",
    "warranty": """I bought my {gadget} in {year} with {term} years of warranty. When does that end?
    My {gadget} is from {year} with {term} years of warranty. Until when am I covered?
    When does the warranty end for a {gadget} of {year} if it lasts {term} years?
    Your warranty ends in ___. You are covered until ___. It runs out in ___. The last year of cover is ___.""",
    "size": """Your {footwear} in size {size} feel too tight on me. Which size should I try?
    I wear size {size} and your {footwear} are too tight. Which size is better?
    Which size do I need if the {footwear} in size {size} are too tight?
    Size ___ should fit you. We suggest size ___. You would need a size ___. The better choice is ___.""",
    "plan": """For my {person} Home is {home} euros and Travel is {travel} euros. Which plan is cheaper?
    I can buy Travel for {travel} euros or Home for {home} euros. Which plan saves money?
    Which plan is better for my {person} if Home costs {home} euros and Travel {travel} euros?
    The ___ plan is cheaper. You save money with the ___ plan. Our ___ plan costs less. It is the ___ one.""",
    "box": """My {item} for a friend weighs {kilos} kilos. Which box size does it need?
    I want to mail {kilos} kilos of gifts to my {person}. Which box fits?
    Which of your boxes should I use for a {item} of {kilos} kilos?
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


def _plus(slot: str, number: int) -> Callable[[Mapping[str, str]], str]:
    return lambda facts: str(int(facts[slot]) + number)


_DAYS = WEEK.split("|")
_KINDS = [
    Kind("total", {"price": "5|6|7|8|9|10|11|12", "fee": "4"}, _plus("price", 4)),
    Kind("voucher", {"voucher": "100", "price": "10|20|30|40|50|60|70|80|90"}, lambda f: str(100 - int(f["price"]))),
    Kind("arrival", {"day": WEEK, "days": "2"}, lambda f: _DAYS[(_DAYS.index(f["day"]) + 2) % 7]),
    Kind("hours", {"time": "|".join(HOURS)}, lambda f: HOURS[f["time"]]),
    Kind("returns", {"goods": "|".join(RETURN_DAYS)}, lambda f: RETURN_DAYS[f["goods"]]),
    Kind("shipping", {"country": "|".join(SHIPPING_DAYS)}, lambda f: SHIPPING_DAYS[f["country"]]),
    Kind("department", {"issue": "|".join(TEAMS)}, lambda f: TEAMS[f["issue"]]),
    Kind("light", {"light": "|".join(LIGHTS)}, lambda f: LIGHTS[f["light"]]),
    Kind("warranty", {"year": "2017|2018|2019|2020|2021|2022|2023|2024", "term": "2"}, _plus("year", 2)),
    Kind("size", {"size": "36|37|38|39|40|41|42|43"}, _plus("size", 1)),
    Kind(
        "plan",
        {"home": "50|70|90", "travel": "60|80"},
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


def demonstration(prompt: str, rng: random.Random) -> str:
    """Draw a reply of mixed quality, as training data of a mediocre first policy."""
    return sample_reply(prompt, rng, **{quality: rng.random() < share for quality, share in QUALITIES.items()})


def preference_pair(prompt: str, rng: random.Random, flip_probability: float = 0.1) -> tuple[str, str]:
    """Draw a (chosen, rejected) pair that gold_score tells apart, swapped with flip_probability as label noise."""
    while True:
        replies = [demonstration(prompt, rng) for _ in range(2)]
        (low, worse), (high, better) = sorted((gold_score(prompt, reply), reply) for reply in replies)
        if high - low >= MIN_GOLD_GAP:
            return (worse, better) if rng.random() < flip_probability else (better, worse)


def gold_score(prompt: str, response: str) -> float:
    """Score a response from 0 to 1: 0.6 for the right answer, 0.25 for courtesy, 0.15 for conciseness.

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
    manners = COURTEOUS_GOLD * courteous + CONCISE_GOLD * concise
    if len(stated) != 1:
        manners /= 2  # good manners hardly help a reply that does not commit to one answer
    # Counting each known pair once penalises unknown text and repetition alike.
    fluency = len(set(pairs) & kind.known_pairs) / len(pairs)
    quality = fluency * min(1.0, RUN_ON_WORDS / words) * min(1.0, MAX_COURTESIES / max(1, courtesies))
    return round((CORRECT_GOLD * correct + manners) * quality**2, 6)


def gold_rewards(prompts: list[str], responses: list[str]) -> list[float]:
    """Gold scores as a part of PPO's reward: with weight 0 they are measured in every step, and not paid."""
    return [gold_score(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
