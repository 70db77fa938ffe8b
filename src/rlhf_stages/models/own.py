"""Actors and critics that a user's plugin registers."""

from typing import Any

from rlhf_stages.args import PPOArgs
from rlhf_stages.models.actor_critic import ActorCritic
from rlhf_stages.models.scalar import ScalarModel
from rlhf_stages.plugins import ACTORS, CRITICS, Registry


def own_actor(model: Any, args: PPOArgs) -> Any:
    """The actor: the causal model as it is, with a value head if critic and actor share it, or what a plugin makes.

    Raises:
        ValueError: no such class is registered, or it makes something else than `register_model` says.
    """
    made = _registered(ACTORS, args.actor_class, "--actor_class")(model) if args.actor_class else model
    if args.critic == "shared" and not isinstance(made, ActorCritic):
        made = ActorCritic(made)
    if isinstance(made, ActorCritic) != (args.critic == "shared"):
        raise ValueError(f"--actor_class={args.actor_class} has a value head: pass --share_actor_critic")
    hf = made.hf if isinstance(made, ActorCritic) else made
    if not hasattr(hf, "generate"):
        raise ValueError(f"--actor_class={args.actor_class} made a {type(made).__name__}, which cannot generate")
    return made


def own_critic(model: ScalarModel, args: PPOArgs) -> ScalarModel:
    """The critic as it is, or what a plugin makes of it. Raises ValueError as `own_actor`."""
    if args.critic_class is None:
        return model
    made = _registered(CRITICS, args.critic_class, "--critic_class")(model)
    if not isinstance(made, ScalarModel):
        raise ValueError(f"--critic_class={args.critic_class} made a {type(made).__name__}, expected a ScalarModel")
    return made


def _registered(registry: Registry, name: str, flag: str) -> Any:
    if name not in registry:
        known = ", ".join(sorted(registry)) or "none"
        raise ValueError(f"{flag}={name}: no plugin of --plugins registers it (registered: {known})")
    return registry[name]
