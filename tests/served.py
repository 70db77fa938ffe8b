"""A page of scripts/ in a process of its own, and a browser to look at it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx

from helpers import ROOT

CHROMIUM_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


class Server:
    """A script that serves a page on a port of its own; it may be killed and started again."""

    def __init__(self, script, folder, *flags):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self._command = [sys.executable, str(ROOT / script), *flags, f"--port={self.port}"]
        self._process = None
        self.client = httpx.Client(trust_env=False, timeout=60)

    def start(self):
        """Start it, and wait until it answers."""
        environment = os.environ | {"GRADIO_ANALYTICS_ENABLED": "False"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=ROOT, env=environment)
        for _ in range(1200):
            if self._process.poll() is not None:
                break
            try:
                if self.client.get(self.url).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        self.stop()
        raise AssertionError(f"no page: {self.log.read_text()[-2000:]}")

    def kill(self):
        """kill -9."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self):
        """End it, whatever it does."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def call(self, name, *inputs):
        """What the page does when a button is pressed: the values of its outputs; raises as `call`."""
        return call(self.client, self.url, name, *inputs)


def call(client, url, name, *inputs):
    """What a page does when a button is pressed: the values of its outputs.

    Raises:
        httpx.HTTPError: the server cannot be reached, or went away before it answered.
    """
    path = f"{url}/gradio_api/call/{name}"
    event = client.post(path, json={"data": list(inputs)}).raise_for_status().json()["event_id"]
    kind, answer = "", None
    with client.stream("GET", f"{path}/{event}") as stream:
        for line in stream.iter_lines():
            kind = line.removeprefix("event: ") if line.startswith("event: ") else kind
            if line.startswith("data: ") and kind in ("complete", "error"):
                answer = line.removeprefix("data: ")
                break
    if kind != "complete" or answer is None:
        raise httpx.RemoteProtocolError(f"{name}: {kind or 'no answer'} {answer}")
    return json.loads(answer)


@contextmanager
def open_pages(chromium):
    """A function that opens an address in a headless browser; what goes wrong in its scripts fails the test."""
    from playwright.sync_api import sync_playwright

    errors = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(CHROMIUM_FLAGS))

        def opened(url, **options):
            page = browser.new_page(**({"viewport": {"width": 1280, "height": 900}} | options))
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.set_default_timeout(120_000)
            page.goto(url)
            return page

        yield opened
        browser.close()
    assert not errors


def picture(page, name):
    """A screenshot of the whole page, where the environment asks for pictures."""
    folder = os.environ.get("RLHF_STAGES_SCREENSHOTS")
    if folder:
        path = ROOT / folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=path, full_page=True)
