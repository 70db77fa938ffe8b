r"""Dialogues as one text: turns opened by "\n\nHuman:" and "\n\nAssistant:", a prompt ending in the latter."""

import re
from itertools import pairwise

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_MARKER = re.compile(r"\n\n(?:Human|Assistant):")

# Renders messages to the very text of the data, so that chat meets the ids that training saw.
CHAT_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '\\n\\nHuman: ' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '\\n\\nAssistant: ' + message['content'] }}"
    "{% else %}{{ raise_exception('roles are user, assistant and system, got ' + message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)


def split_dialogue(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two dialogues into their prompt, the chosen response and the rejected response.

    The prompt is the longest run of whole turns that both share and that both continue with the assistant, up to and
    including that "Assistant:". Equal dialogues are split at their last turn. Where the two part ways before the last
    turn, the responses hold all that follows, which is more than one turn: see `is_one_turn`.

    Raises:
        ValueError: they share no turn before an assistant's.
    """
    left, right = turns(chosen), turns(rejected)
    shared = min(len(left), len(right)) - 1
    shared = next((i for i in range(shared) if left[i] != right[i]), shared)
    while shared > 0 and not (left[shared].startswith(ASSISTANT) and right[shared].startswith(ASSISTANT)):
        shared -= 1
    if shared <= 0:
        raise ValueError("the two dialogues share no turn before one of the assistant")
    prompt = "".join(left[:shared]) + ASSISTANT
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def turns(text: str) -> list[str]:
    """The turns of a dialogue with their markers; text before the first marker counts as one."""
    starts = [marker.start() for marker in _MARKER.finditer(text)]
    return [text[start:end] for start, end in pairwise([0, *starts, len(text)]) if start < end]


def is_one_turn(response: str) -> bool:
    """Whether a response goes on to no further turn."""
    return _MARKER.search(response) is None


def first_human_turn(prompt: str) -> str:
    """What the human says first, without its marker; the whole prompt if no human speaks in it."""
    start = prompt.find(HUMAN)
    if start < 0:
        return prompt.strip()
    start += len(HUMAN)
    end = _MARKER.search(prompt, start)
    return prompt[start : end.start() if end else None].strip()


def as_prompt(text: str) -> str:
    """The text as a prompt: unchanged if it is one (or empty), else as a human turn, closed with "Assistant:"."""
    text = text.rstrip()
    if not text or text.endswith(ASSISTANT):
        return text
    return (text if HUMAN in text else f"{HUMAN} {text.strip()}") + ASSISTANT
