"""PPO steps on the scores of a person: what a step does, taking it back, and going on after a kill."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_stages import loop
from rlhf_stages.args import FabricArgs, ModelArgs, ScoreAndStepArgs
from rlhf_stages.data.tokenizer import encode_prompt, load_tokenizer
from rlhf_stages.experiment import Experiment
from rlhf_stages.feedback.learner import Learner, Reply
from rlhf_stages.feedback.scoring import Session
from rlhf_stages.feedback.store import Store
from rlhf_stages.feedback.wording import Refusal

from helpers import save_causal

PROMPT = "Human: name the colour of the red tea. Assistant:"


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scoring")
    save_causal(folder / "model", dropout=0.1)
    (folder / "prompts.txt").write_text("\n".join(f"name the price of the {word} tea" for word in ("red", "blue")))
    return folder


def start_learner(material, args):
    fabric = loop.start_fabric(FabricArgs(accelerator="cpu", devices="1"), args.seed)
    model = material / "model"
    return Learner(fabric, model, load_tokenizer(str(model)), args, ModelArgs(disable_dropout=True))


@pytest.fixture
def start(material, tmp_path):
    """Starts a session, or with `resume` goes on with that of before."""
    stores = []

    def started(resume=False, **flags):
        chosen = {"learning_rate": 1e-2, "max_new_tokens": 6, "prompts": str(material / "prompts.txt"), **flags}
        args = ScoreAndStepArgs(**chosen)
        directory = tmp_path / "ppo"
        experiment = Experiment(directory) if resume else Experiment.create(directory, {}, overwrite=True)
        stores.append(Store(tmp_path / "f.sqlite"))
        session = Session(args, stores[-1], start_learner(material, args), experiment, "run", ("m", "d"))
        session.notes = session.resume() if resume else []
        return session

    yield started
    for store in stores:
        store.close()


def weights(session):
    return session._learner.snapshot()


def same(a, b):
    """Whether two snapshots are the same, bit by bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# One step


def expected_step(material, reply, score, args):
    """A second implementation: one sample, token by token, on a model of its own; last loss, last norm, weights."""
    model = AutoModelForCausalLM.from_pretrained(material / "model", dtype=torch.float32).eval()
    prompt = encode_prompt(load_tokenizer(str(material / "model")), reply.prompt)
    head = torch.nn.Linear(16, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    ids, first = torch.tensor([prompt + list(reply.ids)]), len(prompt) - 1

    def read():
        output = model(ids, output_hidden_states=True)
        logprobs, values = [], []
        for t, token in enumerate(reply.ids):
            row = output.logits[0, first + t] / args.temperature
            logprobs.append(row[token] - torch.logsumexp(row, 0))
            values.append(head(output.hidden_states[-1][0, first + t])[0])
        return torch.stack(logprobs), torch.stack(values)

    old, old_values = (tensor.detach() for tensor in read())
    size = len(reply.ids)
    rewards = [0.0] * size  # the KL to the reference is 0, for nothing was learned yet
    rewards[-1] += score
    advantages, following = [0.0] * size, 0.0
    for t in reversed(range(size)):
        next_value = old_values[t + 1] if t + 1 < size else 0.0
        following = rewards[t] + next_value - old_values[t] + args.gae_lambd * following
        advantages[t] = following
    advantages = torch.tensor([float(a) for a in advantages])
    returns = advantages + old_values
    trained = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(trained, lr=args.learning_rate, betas=(0.9, 0.95), eps=1e-6)
    for _ in range(args.ppo_epochs):
        logprobs, values = read()
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - args.clip_coeff, 1 + args.clip_coeff)
        policy = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        near = old_values + (values - old_values).clamp(-args.clip_coeff, args.clip_coeff)
        value = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).mean()
        optimizer.zero_grad()
        loss = policy + args.vf_coeff * value
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, args.gradient_clip_val)
        optimizer.step()
    return (
        loss.item(),
        norm.item(),
        {f"hf.{name}": tensor for name, tensor in model.state_dict().items()}
        | {f"value_head.{name}": tensor for name, tensor in head.state_dict().items()},
    )


@pytest.mark.parametrize("score", [1.5, -2.0])
def test_a_step_on_one_score_is_ppo(material, score):
    args = ScoreAndStepArgs(learning_rate=1e-3, max_new_tokens=6, temperature=0.8, gradient_clip_val=0.5)
    learner = start_learner(material, args)
    reply = learner.reply(PROMPT, seed=1)
    start = learner.snapshot()["model"]
    metrics = learner.learn([(reply, score)])
    loss, norm, wanted = expected_step(material, reply, score, args)
    found = learner.snapshot()["model"]
    assert found.keys() == wanted.keys()
    # of the fourth pass, after three updates
    assert (metrics["loss"], metrics["grad_norm"]) == pytest.approx((loss, norm), rel=1e-4)
    # Adam makes much of the noise of fp32 where a gradient is all but 0, so not number by number
    missed = sum(((found[name] - wanted[name]) ** 2).sum() for name in found) ** 0.5
    moved = sum(((start[name] - wanted[name]) ** 2).sum() for name in found) ** 0.5
    assert missed < 5e-3 * moved
    assert metrics["kl"] == 0.0
    # horizon controller: KL 0 is below the target, so 1 + clip(0 / 6 - 1, -0.2, 0.2) * 1 / 10000
    assert metrics["kl_coeff"] == pytest.approx(0.2 * (1 - 0.2 / 10_000), abs=0)


def logprob(material, learner, reply):
    model = AutoModelForCausalLM.from_pretrained(material / "model", dtype=torch.float32).eval()
    state = learner.snapshot()["model"]
    model.load_state_dict({name.removeprefix("hf."): tensor for name, tensor in state.items() if "value" not in name})
    prompt = encode_prompt(load_tokenizer(str(material / "model")), reply.prompt)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + list(reply.ids)])).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(reply.ids)[:, None]).sum())


def test_a_good_score_makes_the_reply_likelier_and_a_bad_one_less_likely(material):
    args = ScoreAndStepArgs(learning_rate=1e-3, max_new_tokens=6)
    for score in (2.0, -2.0):
        learner = start_learner(material, args)
        reply = learner.reply(PROMPT, seed=1)
        before = logprob(material, learner, reply)
        learner.learn([(reply, score)])
        assert (logprob(material, learner, reply) - before) * score > 0


@pytest.mark.parametrize("ids", [(2,), (5,), (5, 2), (7, 7, 7, 7)])  # 2 is EOS
@pytest.mark.parametrize("score", [-2.0, 0.0, 2.0])
def test_a_batch_of_one_stays_finite_however_short_the_reply(material, ids, score):
    learner = start_learner(material, ScoreAndStepArgs(learning_rate=1e-2, max_new_tokens=6))
    for _ in range(3):
        metrics = learner.learn([(Reply(PROMPT, "", ids), score)])
        assert all(map(math.isfinite, metrics.values()))
    assert all(torch.isfinite(tensor).all() for tensor in learner.snapshot()["model"].values())


def test_what_is_not_finite_changes_nothing_and_the_session_goes_on(start):
    session = start()
    session.next()
    before = weights(session)
    head = session._learner._actor.module.value_head
    with torch.no_grad():
        head.bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="values of the critic"):
        session.score(1.0)
    assert session.steps == 0
    with torch.no_grad():
        head.bias.zero_()
    assert same(weights(session), before)
    session.next()
    assert session.score(1.0) is not None
    assert same(weights(start(resume=True)), weights(session)) is False  # replayed, nothing is wrong with the first one
    session.undo()
    assert same(weights(session), before)


# Taking back, going on


def test_undo_takes_a_step_back_bit_by_bit_and_shows_the_reply_again(start):
    session = start(undo_steps=2)
    session.next()
    session.score(1.0)
    before = weights(session)
    shown = session.next()
    session.score(-1.5)
    after, later = weights(session), session.next()
    assert not same(after, before)
    again = session.undo()
    assert (again.reply, again.item) == (shown.reply, shown.item)
    assert same(weights(session), before)
    session.score(-1.5)  # the same score again: as if nothing had been
    assert same(weights(session), after)
    assert session.next().reply == later.reply
    assert session.history()[0] == [1.0, -1.5]
    session.undo()
    session.undo()
    with pytest.raises(Refusal, match="no step that could be taken back"):
        session.undo()
    assert session.history()[0] == []


def test_undo_of_a_score_that_waits_and_of_one_whose_step_others_share(start):
    session = start(scores_per_step=2)
    before = weights(session)
    session.next()
    assert session.score(1.0) is None
    session.undo()
    assert (session.waiting, session.history()[0]) == (0, [])
    session.score(0.5)
    shown = session.next()
    assert session.score(2.0) is not None
    assert session.undo().reply == shown.reply
    assert (session.waiting, session.steps, session.history()[0]) == (1, 0, [0.5])
    assert same(weights(session), before)


def run_through(session, scores):
    for score in scores:
        if session.shown is None:
            session.next()
        if score is None:
            session.skip()
        else:
            session.score(score)


@pytest.mark.parametrize("scores_per_step", [1, 2])
@pytest.mark.parametrize("save_interval", [2, 100])  # from a checkpoint, and from nothing but the scores
def test_a_run_that_was_killed_goes_on_with_the_bits_it_would_have_had(start, scores_per_step, save_interval):
    flags = {"scores_per_step": scores_per_step, "save_interval": save_interval}
    session = start(**flags)
    run_through(session, [1.0, None, -0.5, 0.3, 2.0, None, -2.0])
    shown = session.next()  # and nothing is closed or saved
    resumed = start(resume=True, **flags)
    assert same(weights(resumed), weights(session))
    assert (resumed.steps, resumed.waiting) == (session.steps, session.waiting)
    assert resumed.history() == session.history()
    assert resumed.next().reply == shown.reply
    for one in (session, resumed):
        metrics = one._learner.learn([(shown.reply, 1.0)])
    assert all(map(math.isfinite, metrics.values()))
    assert same(weights(resumed), weights(session))


def test_an_undo_behind_a_checkpoint_is_not_undone_by_a_kill(start, tmp_path):
    session = start(save_interval=1)
    run_through(session, [1.0])
    before = weights(session)
    run_through(session, [-1.0])
    assert [path.name for path in (tmp_path / "ppo" / "checkpoints").glob("*")] == ["step-000002"]
    session.undo()
    resumed = start(resume=True, save_interval=1)
    assert same(weights(resumed), before)
    assert resumed.history()[0] == [1.0]


def test_scores_that_somebody_deleted_on_the_page_are_named_and_those_of_other_runs_are_left_alone(start):
    session = start()
    run_through(session, [1.0, 0.5])
    session.save()
    other = session._store.add_item("p", ["r"], "m", "d", {})
    session._store.delete(1, 1, "bob", "t")
    resumed = start(resume=True)
    assert "1 scores that the model has learned are deleted since" in resumed.notes[0]
    assert same(weights(resumed), weights(session))
    assert resumed.history()[0] == [0.5]
    assert other.id not in {item.id for _, item in resumed._judged()}


def test_scores_out_of_range_and_prompts_that_are_too_long(start, material, tmp_path):
    session = start(prompts=None)
    for bad in (2.1, -7, float("nan"), float("inf")):
        with pytest.raises(Refusal, match="score from -2 to 2"):
            session.score(bad)
    with pytest.raises(Refusal, match="nothing on the page"):
        session.score(1.0)
    with pytest.raises(ValueError, match="positions for 64"):
        session.next("name " * 70)
    assert session.next("name the tea").number == 1
    (tmp_path / "long.txt").write_text("name " * 70 + "\nname the tea\n")
    session = start(prompts=str(tmp_path / "long.txt"))
    assert {session.next().reply.prompt for _ in range(5)} == {"\n\nHuman: name the tea\n\nAssistant:"}
