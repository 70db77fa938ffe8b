"""An actor and a critic of your own: `--plugins examples/custom_model.py --critic_class deep_critic`.

With `--share_actor_critic --actor_class deep_heads` both stand on one trunk.
"""

from typing import Any

from torch import nn

from rlhf_stages.models.actor_critic import ActorCritic
from rlhf_stages.models.scalar import ScalarModel
from rlhf_stages.plugins import register_model


def deep_head(size: int) -> nn.Sequential:
    """A hidden layer before the value, which starts at 0."""
    last = nn.Linear(size, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(size, size), nn.Tanh(), last)


@register_model("deep_critic", role="critic")
def deep_critic(model: ScalarModel) -> ScalarModel:
    """The critic with a deeper head; the trunk is the one that --critic_init names."""
    model.hf.score = deep_head(model.hf.score.in_features)
    return model


@register_model("deep_heads", role="actor")
def deep_heads(model: Any) -> ActorCritic:
    """Actor and critic on one trunk, the critic with a deeper head."""
    both = ActorCritic(model)
    both.value_head = deep_head(both.value_head.in_features)
    return both
