"""Rewards of models: what they read, and with which tokenizer."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_stages.args import ModelArgs
from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.data.tokenizer import load_tokenizer
from rlhf_stages.models.classifier import TextClassifier
from rlhf_stages.rewards import composite
from rlhf_stages.rewards.composite import Part, Rewards, make_rewards
from rlhf_stages.rewards.learned import Classifier, RewardContext, RewardModel
from rlhf_stages.rewards.spec import RewardSpec
from rlhf_stages.rollout.collect import join
from rlhf_stages.rollout.generation import Responses
from rlhf_stages.rollout.texts import Samples, samples_of

from helpers import left_padded, make_tokenizer, right_padded, save_classifier

PROMPTS = ["Human: name the colour of the tea. Assistant:", "Human: name the price. Assistant:"]
RESPONSES = [" the tea is good and red.", " bad"]
LABELS = {"inform": 0, "question": 1, "directive": 2}


@pytest.fixture
def context():
    tokenizer = make_tokenizer()
    return RewardContext(tokenizer=tokenizer, device=torch.device("cpu"), model_args=ModelArgs(disable_dropout=True))


def batch(tokenizer):
    """The two prompts and responses, left- and right-padded; the second was cut off before EOS."""
    prompts = PromptBatch(*left_padded([[1, *tokenizer(text)["input_ids"]] for text in PROMPTS], 3))
    rows = [tokenizer(text)["input_ids"] for text in RESPONSES]
    responses = Responses(*right_padded([[*rows[0], 2], rows[1]], 3), torch.tensor([True, False]))
    return prompts, responses, samples_of(tokenizer, prompts, responses.ids, responses.mask)


def alone(folder, ids):
    """The score of one text without padding, as transformers gives it."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, 0].item()


def test_a_reward_model_with_the_actors_tokenizer_reads_the_ids(context, tmp_path):
    prompts, responses, samples = batch(context.tokenizer)
    reward = RewardModel(context, str(save_classifier(tmp_path)))
    assert reward.same_ids
    assert not any(p.requires_grad for p in reward.model.parameters())
    assert not reward.model.training
    found = reward.read(join(prompts, responses), samples)
    encode = context.tokenizer
    texts = zip(PROMPTS, RESPONSES, strict=True)
    rows = [[1, *encode(prompt)["input_ids"], *encode(response)["input_ids"]] for prompt, response in texts]
    assert found.tolist() == pytest.approx([alone(tmp_path, [*rows[0], 2]), alone(tmp_path, rows[1])], abs=1e-5)


@pytest.mark.parametrize("has_metrics", [False, True])
def test_texts_are_decoded_where_somebody_reads_them(context, tmp_path, monkeypatch, has_metrics):
    monkeypatch.setattr(composite, "METRICS", {"mine": len} if has_metrics else {})
    prompts, responses, samples = batch(context.tokenizer)
    rewards = make_rewards(
        [RewardSpec("rm", "reward_model", options={"path": str(save_classifier(tmp_path))})], context
    )
    alone = rewards.scorer(context.tokenizer, 1)(prompts, responses, join(prompts, responses))
    assert list(alone.samples.responses) == (RESPONSES if has_metrics else [])
    both = Rewards([*rewards.parts, Part(RewardSpec("n", "n"), lambda responses: [len(r) for r in responses])])
    found = both.scorer(context.tokenizer, 1)(prompts, responses, join(prompts, responses))
    assert found.samples.prompts == samples.prompts
    assert torch.equal(found.parts[:, 0], alone.parts[:, 0])


def test_a_reward_model_with_another_tokenizer_reads_the_text(context, tmp_path):
    other = make_tokenizer()
    other.add_tokens(["tea", "price"])
    folder = save_classifier(tmp_path / "rm", "llama", tokenizer=other)
    reward = RewardModel(context, str(folder))
    assert not reward.same_ids
    prompts, responses, samples = batch(context.tokenizer)
    found = reward.read(join(prompts, responses), samples)
    tokenizer = load_tokenizer(str(folder))
    rows = [
        [1, *tokenizer(prompt)["input_ids"], *tokenizer(response)["input_ids"], 2]
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    ]
    assert found.tolist() == pytest.approx([alone(folder, row) for row in rows], abs=1e-5)
    # RoBERTa's positions are counted from the place after its padding id
    roberta = save_classifier(tmp_path / "roberta", "roberta", tokenizer=other)
    long = Samples(["name the tea. " * 40], [" good"], [None], [{}])
    one = join(*(part for part in batch(context.tokenizer)[:2]))
    assert RewardModel(context, str(roberta)).read(one, long).isfinite().all()
    short = RewardModel(context, str(folder), max_length=4).read(join(prompts, responses), samples)
    assert short.tolist() == pytest.approx([alone(folder, row[-4:]) for row in rows], abs=1e-5)


@pytest.fixture
def intent(tmp_path):
    names = {"id2label": {i: name for name, i in LABELS.items()}, "label2id": LABELS}
    return str(save_classifier(tmp_path / "intent", "llama", num_labels=3, **names))


SAMPLES = Samples(
    prompts=["a\nname the price.\n", "so\n"],
    responses=["good", "the lamp is bad"],
    references=[None, None],
    metadata=[{"act": "question", "last_turn": "name the price."}, {"act": "inform"}],
)


GIVEN = {"prompts": SAMPLES.prompts, "responses": SAMPLES.responses, "metadata": SAMPLES.metadata}


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("response", ["good", "the lamp is bad"]),
        ("whole", ["a\nname the price.\ngood", "so\nthe lamp is bad"]),
        ("turn", ["name the price.\ngood", "so\n\nthe lamp is bad"]),  # without last_turn: the prompt
    ],
)
def test_a_classifier_gives_the_probability_of_a_label_or_whether_it_is_found(context, intent, text, read):
    probabilities = TextClassifier.load(intent, "cpu").probabilities(read)
    given = {"prompts": SAMPLES.prompts, "responses": SAMPLES.responses, "metadata": SAMPLES.metadata}
    fixed = Classifier(context, intent, label="directive", text=text)(**given)
    assert fixed == pytest.approx(probabilities[:, 2].tolist())
    named = Classifier(context, intent, label_key="act", text=text)(**given)
    assert named == [float(probabilities[0].argmax() == 1), float(probabilities[1].argmax() == 0)]
    soft = Classifier(context, intent, label_key="act", score="probability", text=text)(**given)
    assert soft == pytest.approx([probabilities[0, 1].item(), probabilities[1, 0].item()])
    hard = Classifier(context, intent, label="inform", score="match", text=text)(**given)
    assert hard == (probabilities.argmax(1) == 0).float().tolist()


def test_a_classifier_whose_labels_are_mere_numbers(context, tmp_path):
    """As many on the hub are."""
    numbered = str(save_classifier(tmp_path / "numbered", "llama", num_labels=3))
    given = {"prompts": SAMPLES.prompts, "responses": SAMPLES.responses, "metadata": SAMPLES.metadata}
    probabilities = TextClassifier.load(numbered, "cpu").probabilities(SAMPLES.responses)
    for labels in ("inform|question|directive", ["inform", "question", "directive"]):
        reward = Classifier(context, numbered, label_key="act", score="probability", labels=labels)
        assert reward(**given) == pytest.approx([probabilities[0, 1].item(), probabilities[1, 0].item()])
    assert Classifier(context, numbered, label="LABEL_2")(**given) == pytest.approx(probabilities[:, 2].tolist())
    with pytest.raises(ValueError, match="2 names for 3 labels"):
        Classifier(context, numbered, label="a", labels="a|b")


def test_labels_that_are_called_by_numbers(context, tmp_path):
    names = {"id2label": {0: "0", 1: "1"}, "label2id": {"0": 0, "1": 1}}
    folder = str(save_classifier(tmp_path / "numbers", "llama", num_labels=2, **names))
    (first, second) = Classifier(context, folder, label=1)(**GIVEN)
    found = Classifier(context, folder, label_key="n", score="probability")(
        **GIVEN | {"metadata": [{"n": 1}, {"n": "0"}]}
    )
    assert found == pytest.approx([first, 1 - second])


def test_names_do_not_change_those_of_the_classifier(context, intent):
    kept = Classifier(context, intent, label="inform", labels="directive|question|inform")
    given = {"prompts": SAMPLES.prompts, "responses": SAMPLES.responses, "metadata": SAMPLES.metadata}
    assert kept(**given) == Classifier(context, intent, label="inform")(**given)
    with pytest.raises(ValueError, match="calls its own inform, question, directive"):
        Classifier(context, intent, label="inform", labels="a|b|c")


def test_labels_that_a_classifier_does_not_know(context, intent):
    with pytest.raises(ValueError, match="knows no label 'shout', but inform, question, directive"):
        Classifier(context, intent, label="shout")
    for options in ({}, {"label": "inform", "label_key": "act"}):
        with pytest.raises(ValueError, match="label: a name"):
            Classifier(context, intent, **options)
    with pytest.raises(ValueError, match="score is probability or match"):
        Classifier(context, intent, label="inform", score="logit")
    rewards = make_rewards([RewardSpec("act", "classifier", options={"model": intent, "label_key": "mood"})], context)
    with pytest.raises(ValueError, match="reward 'act' failed: the metadata's 'mood' is None"):
        rewards.score(None, SAMPLES, torch.ones(2, 1, dtype=torch.bool), 1)
    assert list(rewards.parents) == ["act"]
    assert rewards.settings["act"]["options"] == {"label_key": "mood"}
