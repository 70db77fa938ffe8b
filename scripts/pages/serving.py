"""Serving a Gradio page from a server of our own: from this machine alone, with nothing fetched and nobody told."""

import socket
from functools import partial
from pathlib import Path

import gradio as gr
from fastapi import FastAPI
from uvicorn import Config, Server

from rlhf_stages.feedback import accounts

THEME = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])  # Of this machine, not fetched

Users = dict[str, tuple[bytes, bytes]]  # Salt and hash of each


def users_of(auth_file: str | None) -> Users | None:
    """Who may come in; None: everybody."""
    return None if auth_file is None else accounts.read_users(Path(auth_file))


def serve(page: gr.Blocks, host: str, port: int, users: Users | None, *, css: str, head: str, hint: str) -> None:
    """Serve until Ctrl-C; the address is printed with a `hint` behind it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        # mounted and not launched: Gradio's own start looks itself up through any proxy, and gives up when it is busy
        app = gr.mount_gradio_app(
            FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
            page,
            path="/",
            server_name=host,
            server_port=listener.getsockname()[1],
            auth=None if users is None else partial(accounts.is_password, users),
            footer_links=[],
            run_history=False,
            show_error=False,
            ssr_mode=False,
            theme=THEME,
            css=css,
            head=head,
        )
        shown = f"[{host}]" if ":" in host else host
        print(f"http://{shown}:{listener.getsockname()[1]} (Ctrl-C ends{hint})", flush=True)
        Server(Config(app, log_level="warning", timeout_graceful_shutdown=1)).run(sockets=[listener])
