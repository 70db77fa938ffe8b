"""HTML and SVG in which every text is escaped unless it is markup made here."""

import html
from typing import Any

from rlhf_stages.terminal import printable

_EMPTY = {"meta", "br", "line", "path", "circle", "rect", "polyline"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """Any text as HTML that shows it; control characters are spelled out."""
    return Markup(html.escape(printable(str(text)), quote=True))


def join(parts: Any, between: str = "") -> Markup:
    """Children in a row; what is not markup is escaped, None is nothing."""
    return Markup(
        between.join(part if isinstance(part, Markup) else escape(part) for part in parts if part is not None)
    )


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. `class_` is class, other underscores are hyphens; an attribute that is None is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY and not children:
        return Markup(f"<{name}{written}/>" if name not in ("meta", "br") else f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def short(value: float) -> str:
    """A number in a few characters: three digits, thousands as k, millions as M."""
    if value != value:
        return "–"
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.3g}{unit}".replace("-", "−")
    if size and size < 1e-3:
        mantissa, _, exponent = f"{value:.2g}".partition("e")
        return (f"{mantissa}e{int(exponent)}" if exponent else mantissa).replace("-", "−")
    return (f"{value:.3g}" if size < 100 else f"{value:,.0f}").replace("-", "−")
