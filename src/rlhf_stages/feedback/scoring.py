"""A run of score_and_step.py: which reply is to be scored, what waits for a step, what can be taken back.

The database holds every score with the tokens that it is about, and the seed of a reply follows from its number. So a
run is a function of its start and its scores: a checkpoint only saves the time of learning them again, and a run that
was killed goes on with the bits that it would have had.
"""

import random
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlhf_stages.args import GenerationArgs, ScoreAndStepArgs
from rlhf_stages.experiment import Experiment
from rlhf_stages.feedback.desk import SCORE_RANGE, check_name
from rlhf_stages.feedback.learner import Learner, Reply
from rlhf_stages.feedback.records import Item, Judgement, Opinion
from rlhf_stages.feedback.sampling import check_prompt, read_prompts
from rlhf_stages.feedback.store import Store
from rlhf_stages.feedback.wording import Refusal
from rlhf_stages.plan import SEED_STRIDE
from rlhf_stages.state import read_state, write_state

_STATE = "session"


@dataclass(frozen=True)
class Shown:
    """A reply that waits for its score: its item, its number in the run (from 1), and when it was shown."""

    item: int
    number: int
    reply: Reply
    started: float


@dataclass(frozen=True)
class Scored:
    """A score of the database."""

    judgement: int
    shown: Shown
    score: float


class Session:
    """A person, a learner, and the scores between them."""

    def __init__(
        self, args: ScoreAndStepArgs, store: Store, learner: Learner, experiment: Experiment, run: str,
        model: tuple[str, str],
    ) -> None:  # fmt: skip
        """`run` tells this run's scores from others; `model` is the name of the start and the digest of its weights."""
        self._args, self._store, self._learner, self._experiment, self._run = args, store, learner, experiment, run
        self._model, self._name = model, check_name(args.annotator)
        self._prompts = None if args.prompts is None else read_prompts(args.prompts, [model[0]])
        self._number = 0  # of the newest reply
        self._waiting: list[Scored] = []
        self._learned: list[int] = []  # judgements
        self._undo: deque[tuple[dict[str, Any], list[Scored]]] = deque(maxlen=args.undo_steps)
        self.shown: Shown | None = None
        self._saved = -1

    @property
    def steps(self) -> int:
        """PPO steps done."""
        return self._learner.steps

    @property
    def waiting(self) -> int:
        """Scores that wait for the next step."""
        return len(self._waiting)

    @property
    def types_prompts(self) -> bool:
        """Whether prompts come from the person."""
        return self._prompts is None

    def next(self, prompt: str | None = None) -> Shown:
        """A reply to a prompt, or to a random one of the file.

        Raises:
            Refusal, ValueError: the prompt will not do.
        """
        number = self._number + 1
        seed = self._args.seed * SEED_STRIDE + number
        asked = self._draw(seed) if prompt is None else check_prompt(prompt, self._args.prompt_format)
        reply = self._learner.reply(asked, seed)
        settings = {f.name: getattr(self._args, f.name) for f in fields(GenerationArgs)}
        settings |= {"run": self._run, "number": number, "step": self.steps, "response_ids": list(reply.ids)}
        item = self._store.add_item(asked, [reply.text], *self._model, settings)
        self._number = number
        self.shown = Shown(item.id, number, reply, time.time())
        return self.shown

    def score(self, score: float) -> dict[str, float] | None:
        """Store the score of the reply that is shown, and step if enough are there: then what came of it.

        Raises:
            Refusal: it is out of range, or could not be stored; the reply waits on.
            FloatingPointError: see `Learner.learn`; the step is as if it had not been, and the scores are left out.
        """
        if not SCORE_RANGE[0] <= score <= SCORE_RANGE[1]:
            raise Refusal("score_text")
        shown = self._take()
        saved = self._keep(shown, Opinion("scored", reply=0, score=score))
        self.shown = None
        return self._add(Scored(saved.id, shown, score))

    def skip(self) -> None:
        """Store that the reply that is shown was skipped. Raises Refusal if that could not be stored."""
        self._keep(self._take(), Opinion("skipped"))
        self.shown = None

    def undo(self) -> Shown:
        """Take back the last score; if there was a step on it, that too: weights, optimizer and KL coefficient are as
        before, bit by bit, and the other scores of the step wait again. Its reply is shown again.

        Raises:
            Refusal: there is none, its step is too long ago, or the database cannot be written.
        """
        if not self._waiting and not self._undo:
            raise Refusal("no_undo")
        last = (self._waiting or self._undo[-1][1])[-1]
        if not self._waiting:
            self._forget_checkpoints(self.steps - 1)
        revision = self._store.history(last.judgement)[-1]
        if not revision.deleted:
            self._store.delete(last.judgement, revision.revision, self._name, uuid.uuid4().hex)
        if self._waiting:
            self._waiting.pop()
        else:
            snapshot, batch = self._undo.pop()
            self._learner.restore(snapshot)
            del self._learned[-len(batch) :]
            self._waiting = batch[:-1]
        self._number = last.shown.number
        self.shown = Shown(last.shown.item, self._number, last.shown.reply, time.time())
        return self.shown

    def save(self) -> Path:
        """Write a checkpoint of the last step, if there is none; scores are safe without it."""
        checkpoints = self._experiment.checkpoints
        if self._saved != self.steps:
            learned = {"learned": list(self._learned)}
            writers = [*self._learner.writers(), lambda folder: write_state(learned, _STATE, folder)]
            folder = checkpoints.publish(self.steps, writers)
            self._experiment.point_to("latest", self.steps)
            for step in checkpoints.steps():
                if step != self.steps:
                    checkpoints.remove(step)
            self._saved = self.steps
            return folder
        return checkpoints.path(self.steps)

    def resume(self) -> list[str]:
        """Load the newest whole checkpoint, and learn the scores that came after it; returns what should be known.

        Raises:
            ValueError: the checkpoint does not fit.
        """
        step, notes = self._experiment.checkpoint_to_resume()
        if step:
            folder = self._experiment.checkpoints.path(step)
            self._learner.load(folder)
            self._learned, self._saved = list(read_state(folder, _STATE)["learned"]), step
        judged = self._judged()
        scored = [pair for pair in judged if pair[0].opinion.score is not None]
        if lost := set(self._learned) - {judgement.id for judgement, _ in scored}:
            notes.append(f"{len(lost)} scores that the model has learned are deleted since, and it keeps them")
        fresh = [pair for pair in scored if pair[0].id not in self._learned]
        for judgement, item in fresh:
            try:
                self._add(Scored(judgement.id, _shown(item), judgement.opinion.score or 0.0), saving=False)
            except FloatingPointError as error:
                notes.append(f"a step was left out: {error}")
        self._number = max((int(item.settings["number"]) for _, item in judged), default=0)
        return [*notes, f"{len(self._learned)} scores learned in {self.steps} steps, {self.waiting} wait"]

    def history(self) -> tuple[list[float], list[float]]:
        """Scores of this run so far, and the seconds that each took."""
        said = [judgement for judgement, _ in self._judged() if judgement.opinion.score is not None]
        return [judgement.opinion.score or 0.0 for judgement in said], [judgement.seconds for judgement in said]

    def _draw(self, seed: int) -> str:
        """A prompt of the file, not too long for the model if some hundred draws find one."""
        chance = random.Random(seed)
        for _ in range(100):
            asked = check_prompt(chance.choice(self._prompts or [""]), self._args.prompt_format)
            try:
                self._learner.check(asked)
            except ValueError:
                continue
            break
        return asked

    def _judged(self) -> list[tuple[Judgement, Item]]:
        """What was said in this run, the first first."""
        return [pair for pair in self._store.judgements()[::-1] if pair[1].settings.get("run") == self._run]

    def _take(self) -> Shown:
        if self.shown is None:
            raise Refusal("nothing_to_judge")
        return self.shown

    def _keep(self, shown: Shown, opinion: Opinion) -> Judgement:
        return self._store.save(shown.item, self._name, opinion, time.time() - shown.started, uuid.uuid4().hex)

    def _add(self, scored: Scored, saving: bool = True) -> dict[str, float] | None:
        self._waiting.append(scored)
        if len(self._waiting) < self._args.scores_per_step:
            return None
        batch, self._waiting = self._waiting, []
        before = self._learner.snapshot()
        self._undo.append((before, batch))
        self._learned += [one.judgement for one in batch]
        try:
            metrics = self._learner.learn([(one.shown.reply, one.score) for one in batch])
        except FloatingPointError:
            self._learner.restore(before)
            raise
        if saving and self.steps % self._args.save_interval == 0:
            self.save()
        return metrics

    def _forget_checkpoints(self, step: int) -> None:
        """Take away those after a step; the run can do without."""
        checkpoints = self._experiment.checkpoints
        for later in [found for found in checkpoints.steps() if found > step]:
            (self._experiment.dir / "latest").unlink(missing_ok=True)
            checkpoints.remove(later)
        self._saved = -1


def _shown(item: Item) -> Shown:
    """A reply as it was shown once."""
    settings: Mapping[str, Any] = item.settings
    ids: Sequence[int] = settings["response_ids"]
    return Shown(item.id, int(settings["number"]), Reply(item.prompt, item.replies[0], tuple(ids)), 0.0)
