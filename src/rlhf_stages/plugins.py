"""What users add to a run from files of their own: rewards, metrics, actors and critics.

    from rlhf_stages.plugins import register_reward

    @register_reward("polite")
    def polite(responses):
        return [float("please" in response.lower()) for response in responses]

`--plugins path.py` imports such a file; `--reward polite=0.5` then uses it. The files are code and run: name only files
that you trust.
"""

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

Registered = TypeVar("Registered", bound=Callable[..., Any])
Registry = dict[str, Callable[..., Any]]

REWARDS: Registry = {}  # by the name that --reward and reward configs use
METRICS: Registry = {}  # of a rollout
ACTORS: Registry = {}
CRITICS: Registry = {}
_NAME = re.compile(r"[A-Za-z_]\w*")


def register_reward(name: str) -> Callable[[Registered], Registered]:
    """Make a reward known as `name`.

    A function is the reward itself: it is called with those of the keywords `prompts`, `responses`, `references`,
    `metadata` and `tokens` that it declares, and with the options of the reward's config. Of a class, an instance is
    made with the options (and with `context`, a `RewardContext`, if it declares it), which is then called.
    """
    return _register(REWARDS, name)


def register_metrics(name: str) -> Callable[[Registered], Registered]:
    """Make known a function of a rollout that returns numbers by name; they are logged in every step under those names.

    It is called with those of the keywords `rollout` (a `Rollout`), `prompts`, `responses`, `references` and
    `metadata` that it declares.
    """
    return _register(METRICS, name)


def register_model(name: str, role: str) -> Callable[[Registered], Registered]:
    """Make known how to build an own actor or critic of PPO: `--actor_class=name`, `--critic_class=name`.

    Args:
        role: `actor`, called with a causal language model, returns the actor: that model, changed as you like, or an
            `ActorCritic` around it, which then shares its trunk with the critic. `critic`, called with a
            `ScalarModel`, returns the critic, a `ScalarModel` too.
    """
    if role not in ("actor", "critic"):
        raise ValueError(f"register_model({name!r}): role is actor or critic, got {role!r}")
    return _register(ACTORS if role == "actor" else CRITICS, name)


def load_plugins(paths: Sequence[str]) -> None:
    """Import files that register what they add. Raises as `import_file` does."""
    for path in paths:
        import_file(path)


def load_function(reference: str) -> Callable[..., Any]:
    """Import `path.py:function` or `module:function`. It is code and runs: name only what you trust.

    Raises:
        ValueError: not of that form, no such function in it, or the file fails. FileNotFoundError: no such file.
    """
    path, _, name = reference.rpartition(":")
    if not path or not name:
        raise ValueError(f"expected path.py:function or module:function, got {reference!r}")
    module = import_file(path) if path.endswith(".py") else _import_module(path)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    return function  # type: ignore[no-any-return]  # callable() narrows Any to Any


def import_file(path: str) -> ModuleType:
    """Import a Python file by its path, afresh each time.

    Raises:
        ValueError: the file fails. FileNotFoundError: no such file.
    """
    if not path.endswith(".py"):
        raise ValueError(f"expected a Python file (path.py), got {path!r}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")
    # a name of its own, or a file called json.py would be found in place of the library
    spec = importlib.util.spec_from_file_location(f"function_of_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # it is anybody's code
        raise ValueError(f"{path} cannot be imported: {where(error)}") from error
    return module


def call(function: Callable[..., Any], available: Any, **options: Any) -> Any:
    """Call a function with the attributes of `available` that its parameters name, and the options."""
    parameters = inspect.signature(function).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)} - options.keys()
    given = {name: getattr(available, name) for name in names if hasattr(available, name)}
    if any(p.kind == p.VAR_KEYWORD for p in parameters):  # `**rest`: whatever there is
        given |= {name: getattr(available, name) for name in available.names if name not in options}
    return function(**given, **options)


def where(error: Exception) -> str:
    """What was raised, and in which line of which file."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # it is anybody's code
        raise ValueError(f"the module {name!r} cannot be imported: {where(error)}") from error


def _register(registry: Registry, name: str) -> Callable[[Registered], Registered]:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name to register; use letters, digits and _")

    def add(what: Registered) -> Registered:
        known = registry.get(name)
        if known is not None and inspect.getsourcefile(known) != inspect.getsourcefile(what):
            raise ValueError(f"{name!r} is registered already, by {inspect.getsourcefile(known)}")
        registry[name] = what
        return what

    return add
