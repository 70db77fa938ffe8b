"""The reward of a response: a weighted sum of parts.

Legend: B sequences, R response tokens, K parts.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_stages.data.collate import PromptBatch
from rlhf_stages.functional.masking import mean_std, moments
from rlhf_stages.plugins import METRICS, REWARDS, call, load_function, where
from rlhf_stages.rewards import external, text  # noqa: F401  # they register what they have
from rlhf_stages.rewards.learned import RewardContext, RewardModel
from rlhf_stages.rewards.spec import RewardSpec
from rlhf_stages.rollout.collect import Rollout, Scorer, Scores, Texts
from rlhf_stages.rollout.generation import Responses
from rlhf_stages.rollout.texts import Samples, samples_of


@dataclass(frozen=True)
class Part:
    """A part of the reward: its settings, and what gives the scores."""

    spec: RewardSpec
    reward: Any


class Rewards:
    """Scores responses by all parts, and adds the parts up.

    Scores of a part are clipped, then normalized by running statistics of all rollouts if its settings say so, then
    weighted. A part that scores single tokens stays out of the sum: its scores stand in `token_scores`. Validation adds
    up without normalization and with the weights that the schedules end in: one yardstick for the whole run.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._summed = [k for k, part in enumerate(parts) if not part.spec.per_token]
        # moments of each part, all devices
        self._seen = {part.spec.name: torch.zeros(3, dtype=torch.float64) for part in parts}

    @property
    def parents(self) -> dict[str, Path]:
        """Local model folders that parts come from, by the name of the part."""
        found = {part.spec.name: getattr(part.reward, "checkpoint", None) for part in self.parts}
        return {name: Path(path) for name, path in found.items() if path is not None}

    @property
    def settings(self) -> dict[str, Any]:
        """What `args.json` keeps beside the parents: a model counts by its weights, wherever it lies."""
        kept = {part.spec.name: asdict(part.spec) for part in self.parts}
        for name in self.parents:
            kept[name]["options"] = {k: v for k, v in kept[name]["options"].items() if k not in ("path", "model")}
        return kept

    def scorer(self, tokenizer: PreTrainedTokenizerBase, step: float) -> Scorer:
        """What `score_responses` calls. Texts are decoded where a part or a plugin's metrics read them."""
        by_ids = all(isinstance(part.reward, RewardModel) and part.reward.same_ids for part in self.parts)

        def read(prompts: PromptBatch, responses: Responses, texts: Texts) -> Scores:
            unread = by_ids and not METRICS
            samples = Samples() if unread else samples_of(tokenizer, prompts, responses.ids, responses.mask)
            return self.score(texts, samples, responses.mask, step)

        return read

    def score(self, texts: Texts, samples: Samples, response_mask: Tensor, step: float) -> Scores:
        """What each part gives each response, (B, K), and the weighted scores of single tokens, (B, R).

        A part that scores tokens stands in its column with their sum.

        Raises:
            ValueError: a part fails, or returns anything but finite numbers; it names the part and the first response.
        """
        columns, tokens = [], torch.zeros(response_mask.shape, device=response_mask.device)
        for part in self.parts:
            if isinstance(part.reward, RewardModel):  # what is not finite in a model skips the step, see `not_finite`
                columns.append(part.reward.read(texts, samples))
            elif part.spec.per_token:
                own = token_scores(part, samples, response_mask)
                columns.append(own.sum(1))
                tokens += part.spec.weight(step) * own
            else:
                columns.append(response_scores(part, samples).to(response_mask.device))
        return Scores(torch.stack(columns, dim=1), tokens, samples)

    def observe(self, rollout: Rollout, global_sum: Callable[[Tensor], Tensor]) -> None:
        """Take the scores of a rollout into the running statistics."""
        seen = torch.stack([moments(self._clipped(rollout, k)) for k in range(len(self.parts))])
        for part, row in zip(self.parts, global_sum(seen).cpu(), strict=True):
            self._seen[part.spec.name] = self._seen[part.spec.name] + row

    def combine(self, rollout: Rollout, step: int) -> Rollout:
        """The rollout with `scores` as training wants them at a step."""
        scores = torch.zeros_like(rollout.scores)
        for k in self._summed:
            spec, column = self.parts[k].spec, self._clipped(rollout, k)
            if spec.normalize:
                mean, std = (float(statistic) for statistic in mean_std(self._seen[spec.name]))
                column = (column - mean) / (std if std > 1e-8 else 1.0)
            scores = scores + spec.weight(step) * column
        return replace(rollout, scores=scores)

    def yardstick(self, rollout: Rollout) -> Rollout:
        """The rollout with `scores` that mean the same at every step; its token scores are those of `step` infinity."""
        weighted = [self.parts[k].spec.weight(math.inf) * self._clipped(rollout, k) for k in self._summed]
        return replace(rollout, scores=sum(weighted, start=torch.zeros_like(rollout.scores)))

    def metrics(self, rollout: Rollout, fabric: Fabric, step: int) -> dict[str, float]:
        """Mean and deviation over all devices of what each part gave, and its weight."""
        found: dict[str, float] = {}
        for k, part in enumerate(self.parts):
            column, name = rollout.part_scores[:, k], f"reward/{part.spec.name}"
            total: Any = fabric.all_reduce(moments(column), reduce_op="sum")
            mean, std = mean_std(total)
            found |= {f"{name}_mean": float(mean), f"{name}_std": float(std)}
            found[f"{name}_weight"] = part.spec.weight(step)
        return found

    def means(self, rollout: Rollout) -> dict[str, Tensor]:
        """Mean of each part, for validation."""
        return {f"val/reward_{part.spec.name}": rollout.part_scores[:, k].mean() for k, part in enumerate(self.parts)}

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run needs."""
        return dict(self._seen)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with the statistics of a run that is resumed, of the parts that it had."""
        self._seen |= {name: seen for name, seen in state.items() if name in self._seen}

    def _clipped(self, rollout: Rollout, k: int) -> Tensor:
        column, spec = rollout.part_scores[:, k], self.parts[k].spec
        return column if spec.clip is None or spec.per_token else column.clamp(*spec.clip)


def make_rewards(specs: Sequence[RewardSpec], context: RewardContext) -> Rewards:
    """Build every part.

    Raises:
        ValueError: an unknown kind, options that it does not take, a model that does not load.
    """
    return Rewards([Part(spec, _build(spec, context)) for spec in specs])


def response_scores(part: Part, samples: Samples) -> Tensor:
    """Score of each response, (B,) fp32. Raises ValueError as `Rewards.score`."""
    values = _call(part, samples)
    return torch.tensor([_number(part, samples, row, value) for row, value in enumerate(values)])


def token_scores(part: Part, samples: Samples, response_mask: Tensor) -> Tensor:
    """Score of each token of each response, (B, R) fp32, clipped, 0 off the mask. Raises as `Rewards.score`."""
    scores = torch.zeros(response_mask.shape)
    for row, values in enumerate(_call(part, samples)):
        count = int(response_mask[row].sum())
        if not isinstance(values, Sequence) or len(values) != count:
            raise _wrong(part, samples, row, f"returned {values!r:.100}, expected {count} numbers, one per token")
        own = torch.tensor([_number(part, samples, row, value) for value in values])
        scores[row, :count] = own if part.spec.clip is None else own.clamp(*part.spec.clip)
    return scores.to(response_mask.device)


def _build(spec: RewardSpec, context: RewardContext) -> Any:
    """The callable of a part: a class is made with its options, a function keeps them for its calls."""
    is_file = ":" in spec.kind
    if not is_file and spec.kind not in REWARDS:
        near = difflib.get_close_matches(spec.kind, REWARDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        known = ", ".join(sorted(REWARDS))
        raise ValueError(f"no reward is called {spec.kind!r}{hint} (known: {known}; or path.py:function)")
    made = load_function(spec.kind) if is_file else REWARDS[spec.kind]
    signature = inspect.signature(made)
    own = {"context": context} if inspect.isclass(made) and "context" in signature.parameters else {}
    try:
        if inspect.isclass(made):
            signature.bind(**own, **spec.options)
            return made(**own, **spec.options)
        signature.bind_partial(**spec.options)
        return partial(made, **spec.options)
    except TypeError as error:
        raise ValueError(f"reward {spec.name!r}: {error}; its options are {_options(signature)}") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"reward {spec.name!r}: {error}") from None


def _options(signature: inspect.Signature) -> str:
    names = [name for name in signature.parameters if name not in (*Samples.names, "context")]
    return ", ".join(names) or "none"


def _call(part: Part, samples: Samples) -> list[Any]:
    """What a part returns, as a list with an entry per response."""
    try:
        values = call(part.reward, samples)
    except Exception as error:  # it may be anybody's code
        row = 0 if isinstance(part.reward, external.Asked) else _culprit(part, samples)  # nobody is asked in vain
        why = str(error) if isinstance(error, (ValueError, OSError)) else where(error)
        raise _wrong(part, samples, row, f"failed: {why}") from error
    values = values.tolist() if hasattr(values, "tolist") else values  # tensors and arrays
    if not isinstance(values, (list, tuple)) or len(values) != len(samples):
        found = f"{len(values)} scores" if isinstance(values, (list, tuple)) else f"{values!r:.100}"
        raise _wrong(part, samples, 0, f"returned {found} for {len(samples)} responses, expected one each")
    return list(values)


def _culprit(part: Part, samples: Samples) -> int:
    """The first response that a part fails on alone too; the first of all if it only fails on them together."""
    for row in range(len(samples)):
        try:
            call(part.reward, samples.row(row))
        except Exception:
            return row
    return 0


def _number(part: Part, samples: Samples, row: int, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except Exception:  # what is not a number, a list, an integer beyond all floats
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(part, samples, row, f"returned {value!r:.100}, expected a finite number")
    return number


def _wrong(part: Part, samples: Samples, row: int, what: str) -> ValueError:
    return ValueError(f"reward {part.spec.name!r} {what}; response {row} was {samples.responses[row]!r:.200}")
