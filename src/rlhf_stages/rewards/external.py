"""Rewards that another program gives: a process that answers a line of JSON with a line, or an HTTP endpoint.

Both are asked `{"prompts": [...], "responses": [...], "references": [...], "metadata": [...]}` and answer
`{"scores": [...]}`, a number per response, or `{"error": "why"}`.
"""

import http.client
import json
import os
import queue
import shlex
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rlhf_stages.plugins import register_reward

_LARGEST_ANSWER = 2**26  # bytes


class _Lost(Exception):
    """No answer this time; another attempt may bring one."""


def _scores(answer: bytes, who: str) -> list[Any]:
    try:
        content = json.loads(answer)
    except ValueError:
        raise ValueError(f"{who} answered {answer!r:.200}, expected a line of JSON") from None
    if isinstance(content, dict) and "error" in content:
        raise ValueError(f"{who} answered with an error: {content['error']!s:.300}")
    if not isinstance(content, dict) or not isinstance(content.get("scores"), list):
        raise ValueError(f'{who} answered {answer!r:.200}, expected {{"scores": [...]}}')
    scores: list[Any] = content["scores"]
    return scores


class Asked:
    """A reward that is asked elsewhere.

    Args:
        who: what is asked, for messages.
        retries: how often a question is asked again where no answer came.
        wait: seconds before the second attempt, twice as many before each later one.
    """

    def __init__(self, who: str, retries: int, wait: float) -> None:
        self._who, self._retries, self._wait = who, retries, wait

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        references: Sequence[str | None],
        metadata: Sequence[Mapping[str, Any]],
    ) -> list[Any]:
        """What it answers. Raises ValueError where it does not, or says what is wrong."""
        texts = {"prompts": prompts, "responses": responses, "references": references, "metadata": metadata}
        question = json.dumps(texts).encode() + b"\n"
        for attempt in range(self._retries + 1):
            try:
                return _scores(self._ask(question), self._who)
            except _Lost as lost:
                if attempt == self._retries:
                    raise ValueError(f"{lost}, {attempt + 1} times") from None
                time.sleep(self._wait * 2**attempt)
        raise AssertionError("unreachable")

    def _ask(self, question: bytes) -> bytes:
        """The answer; raises _Lost where none came, and ValueError where none will."""
        raise NotImplementedError


@register_reward("process")
class Process(Asked):
    """A program that reads a question a line and writes an answer a line; started once, and again if it dies.

    Args:
        command: the program with its arguments, as a list or as one text.
        timeout: seconds that it has to answer.
        retries: how often a question is asked again, of a new process, after silence or death.
    """

    def __init__(self, command: str | Sequence[str], timeout: float = 60.0, retries: int = 1) -> None:
        self._command = shlex.split(command) if isinstance(command, str) else [str(part) for part in command]
        if not self._command:
            raise ValueError("command names no program")
        super().__init__(f"the process {self._command[0]!r}", retries, wait=0.0)
        self._timeout = timeout
        self._running: _Running | None = None

    def _ask(self, question: bytes) -> bytes:
        if self._running is None:
            self._running = _Running(self._command)
        try:
            return self._running.ask(question, self._timeout)
        except _Lost as lost:
            self._running.end()
            self._running = None
            raise _Lost(f"{self._who} {lost}") from None


class _Running:
    """The process, and a thread that reads its answers."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True
        )
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True).start()
        self._end = weakref.finalize(self, _stop, self._process)

    def ask(self, question: bytes, timeout: float) -> bytes:
        # written in a thread of its own: a program that does not read would block this one for ever
        threading.Thread(target=_write, args=(self._process.stdin, question), daemon=True).start()
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise _Lost(f"did not answer within {timeout:g} s") from None
        if not answer:
            self._errors.seek(0)
            said = self._errors.read()[-300:].decode(errors="replace").strip()
            raise _Lost(f"ended with exit code {self._process.wait()}" + (f" ({said})" if said else ""))
        return answer

    def end(self) -> None:
        self._end()


def _read(stream: Any, answers: "queue.SimpleQueue[bytes]") -> None:
    while line := stream.readline(_LARGEST_ANSWER):
        answers.put(line)
    answers.put(b"")


def _write(stream: Any, question: bytes) -> None:
    try:
        stream.write(question)
        stream.flush()
    except (OSError, ValueError):  # it has died: whoever waits for the answer hears of it
        pass


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


@register_reward("http")
class Http(Asked):
    """An endpoint that is sent a question by POST.

    Args:
        url: http or https.
        timeout: seconds for each attempt.
        retries: further attempts after a time-out, a lost connection, or status 408, 429 or 5xx.
        wait: seconds before the second attempt, twice as many before each later one.
        headers: sent along; `$NAME` in them is taken from the environment, so that no token gets into args.json.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 30.0,
        retries: int = 3,
        wait: float = 1.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url starts with http:// or https://, got {url!r}")
        super().__init__(url, retries, wait)
        self._timeout = timeout
        own = {name: os.path.expandvars(value) for name, value in (headers or {}).items()}
        self._headers = {"Content-Type": "application/json", **own}

    def _ask(self, question: bytes) -> bytes:
        request = urllib.request.Request(self._who, data=question, headers=self._headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                content: bytes = answer.read(_LARGEST_ANSWER)
                return content
        except urllib.error.HTTPError as error:
            said = f"status {error.code} ({error.read(300).decode(errors='replace').strip()})"
            if error.code in (408, 429) or error.code >= 500:
                raise _Lost(f"{self._who}: {said}") from None
            raise ValueError(f"{self._who}: {said}") from None
        except (OSError, http.client.HTTPException) as error:  # URLError and time-outs are OSErrors
            why = str(getattr(error, "reason", error)) or type(error).__name__
            raise _Lost(f"{self._who}: {why}") from None
