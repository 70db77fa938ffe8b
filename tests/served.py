"""A page of scripts/, in a process of its own or in a thread of this one, and a browser to look at it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx

from helpers import ROOT, load_script

CHROMIUM_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


class Page:
    """What a script serves on a port of its own."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(trust_env=False, timeout=60)

    def call(self, name, *inputs):
        """What the page does when a button is pressed: the values of its outputs; raises as `call`."""
        return call(self.client, self.url, name, *inputs)


class Thread(Page):
    """A script in a thread of this process, which has imported all that a process would have to import first."""

    def __init__(self, script, *flags):
        super().__init__()
        self._script, self._argv = script, [*flags, f"--port={self.port}"]
        self._server = self._thread = self._error = None

    def start(self):
        """Start it, and wait until it answers."""
        folders = [str(ROOT / "scripts"), str((ROOT / self._script).parent)]
        sys.path[:0] = folders
        from pages import serving

        server_class = serving.Server

        def make_server(config):
            self._server = server_class(config)
            return self._server

        serving.Server = make_server
        try:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()
            while self._thread.is_alive() and not (self._server and self._server.started):
                time.sleep(0.01)
        finally:
            serving.Server = server_class
            for folder in folders:
                sys.path.remove(folder)
        if self._error is not None:
            raise self._error
        return self

    def _serve(self):
        try:
            load_script(self._script).main(self._argv)
        except BaseException as error:
            self._error = error

    def stop(self):
        """End it as Ctrl-C does."""
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join(timeout=60)
            assert not self._thread.is_alive()


class Server(Page):
    """A script in a process of its own; it may be killed and started again."""

    def __init__(self, script, folder, *flags):
        super().__init__()
        self.log = folder / "server.log"
        self._command = [sys.executable, str(ROOT / script), *flags, f"--port={self.port}"]
        self._process = None

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
def open_browser(chromium):
    """A headless browser, for as many tests as like to share it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(CHROMIUM_FLAGS))
        yield browser
        browser.close()


@contextmanager
def open_pages(browser):
    """A function that opens an address in a browser; what goes wrong in its scripts fails the test."""
    errors, pages = [], []

    def opened(url, **options):
        page = browser.new_page(**({"viewport": {"width": 1280, "height": 900}} | options))
        pages.append(page)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.set_default_timeout(120_000)
        page.goto(url)
        return page

    yield opened
    for page in pages:
        page.close()
    assert not errors


def picture(page, name):
    """A screenshot of the whole page, where the environment asks for pictures."""
    folder = os.environ.get("RLHF_STAGES_SCREENSHOTS")
    if folder:
        path = ROOT / folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=path, full_page=True)
