"""A conversation as HTML: every character of a text is shown as it is."""

from collections.abc import Sequence
from html import escape

from rlhf_stages.demo.talk import Reply, Turn

from pages.serving import message


def transcript(turns: Sequence[Turn], empty: str) -> str:
    """All turns; `empty` where nothing was said yet."""
    if not turns:
        return f'<div class="empty">{escape(empty)}</div>'
    return f"<div>{''.join(map(_turn, turns))}</div>"


def _turn(turn: Turn) -> str:
    scores = [reply.score for reply in turn.replies if reply.score is not None]
    best = max(scores) if len(scores) > 1 else None
    replies = "".join(_reply(reply, best) for reply in turn.replies)
    alone = " alone" if len(turn.replies) == 1 else ""
    person = f'<div class="person">{escape(turn.text)}</div>'
    return f'<div class="turn">{person}<div class="replies{alone}">{replies}</div></div>'


def _reply(reply: Reply, best: float | None) -> str:
    caret = "" if reply.done else '<span class="caret"></span>'
    text = escape(reply.text) or ("(says nothing)" if reply.done and not reply.error and not reply.stopped else "")
    parts = [f'<div class="name">{escape(reply.name)}</div>', f'<div class="text">{text}{caret}</div>']
    if reply.error:
        parts.append(message(reply.error, "bad"))
    facts = []
    if reply.score is not None:
        kind = "score best" if reply.score == best else "score"
        facts.append(f'<span class="{kind}" title="Of the reward model">reward {reply.score:+.2f}</span>')
    if reply.done and reply.first is not None:
        facts.append(f"<span>{reply.tokens} tokens</span>")
        facts.append(
            f'<span title="Until the first word, and in all">{reply.first:.2f} s · {reply.seconds:.2f} s</span>'
        )
    if reply.stopped:
        facts.append("<span>stopped</span>")
    if facts:
        parts.append(f'<div class="facts">{"".join(facts)}</div>')
    if reply.unscored:
        parts.append(message(f"No score: {reply.unscored}", "bad"))
    return f'<div class="reply">{"".join(parts)}</div>'
