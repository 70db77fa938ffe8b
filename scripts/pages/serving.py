"""A page on an address: what annotate.py, compare.py and the demos share."""

import socket
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from uvicorn import Config, Server

from rlhf_stages.feedback import accounts

STYLE = (Path(__file__).parent / "annotation.css").read_text(encoding="utf-8")
# fonts of this machine, not fetched; colours that differ enough from what they lie on to be read (4.5 : 1 and more)
THEME = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]).set(
    body_text_color_subdued="*neutral_500",
    input_placeholder_color="*neutral_500",
    input_placeholder_color_dark="*neutral_400",
    checkbox_border_color="*neutral_400",
    checkbox_border_color_dark="*neutral_500",
    button_primary_background_fill="*primary_700",
    button_primary_background_fill_dark="*primary_700",
    button_primary_background_fill_hover="*primary_800",
    button_primary_background_fill_hover_dark="*primary_800",
)
# no second margin on a narrow screen; a rule of its own, since Gradio keeps its `css` to what is within that margin
NARROW = "@media (max-width: 700px) { .gradio-container > .main { padding: 0 !important; } }"


def message(text: str, kind: str = "hint") -> str:
    """A line that says how something went, as HTML; the text is text."""
    return f'<div class="message {kind}" role="status">{escape(text)}</div>' if text else ""


def serve(page: gr.Blocks, script: str, args: Any, users: Any, *, style: str = STYLE, hint: str | None = None) -> None:
    """Serve a page until Ctrl-C.

    Args:
        script: JavaScript of the page.
        args: what says `host` and `port`, and without a `hint` the `database`.
        users: who may come in (see `accounts.read_users`); None: everybody.
        hint: what is said behind the address.
    """
    page.queue(default_concurrency_limit=16)
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    with socket.create_server((args.host, args.port), family=family) as listener:
        # mounted and not launched: Gradio's own start looks itself up through any proxy, and gives up when it is busy
        app = gr.mount_gradio_app(
            FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
            page,
            path="/",
            server_name=args.host,
            server_port=listener.getsockname()[1],
            auth=None if users is None else partial(accounts.is_password, users),
            footer_links=[],
            run_history=False,
            show_error=False,
            ssr_mode=False,
            theme=THEME,
            css=style,
            head=f"<style>{NARROW}</style><script>{script}</script>",
        )
        host = f"[{args.host}]" if ":" in args.host else args.host
        hint = f"all is in {args.database}" if hint is None else hint
        print(f"http://{host}:{listener.getsockname()[1]} (Ctrl-C ends; {hint})", flush=True)
        config = Config(app, log_level="warning", timeout_graceful_shutdown=1)
        Server(config).run(sockets=[listener])
