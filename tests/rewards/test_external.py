"""Rewards of other programs, all of them on this machine."""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlhf_stages.rewards.composite import Part, response_scores
from rlhf_stages.rewards.external import Http, Process
from rlhf_stages.rewards.spec import RewardSpec
from rlhf_stages.rollout.texts import Samples

BATCH = {
    "prompts": ["ask\n", "请"],
    "responses": ["one two", "three"],
    "references": [None, "ref"],
    "metadata": [{"act": "inform"}, {}],
}
ECHO = """
import json, sys
for line in sys.stdin:
    question = json.loads(line)
    print(json.dumps({"scores": [len(text.split()) for text in question["responses"]]}), flush=True)
"""


@pytest.fixture
def program(tmp_path):
    def make(text):
        (tmp_path / "scorer.py").write_text(text, encoding="utf-8")
        return [sys.executable, str(tmp_path / "scorer.py")]

    return make


def test_a_process_is_started_once_and_gets_everything(program):
    reward = Process(program(ECHO))
    assert reward(**BATCH) == [2, 1]
    first = reward._running
    assert reward(**BATCH) == [2, 1]
    assert reward._running is first
    echoed = Process(program("import sys, json\nprint(json.dumps({'scores': [json.loads(input())]}), flush=True)"))
    assert echoed(**BATCH) == [BATCH]


def test_a_process_that_dies_is_asked_again_once(program, tmp_path):
    again = f"""
import os, sys
marker = {str(tmp_path / "marker")!r}
if not os.path.exists(marker):
    open(marker, "w").close()
    input()
    sys.exit("out of luck")
"""
    assert Process(program(again + ECHO))(**BATCH) == [2, 1]
    with pytest.raises(ValueError, match=r"ended with exit code 1 \(out of luck\), 2 times"):
        Process(program("import sys\ninput()\nsys.exit('out of luck')"))(**BATCH)


def test_a_silent_process_ends_in_time(program):
    reward = Process(program("import time\nwhile True: time.sleep(1)"), timeout=0.3, retries=0)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"did not answer within 0\.3 s, 1 times"):
        reward(**{**BATCH, "prompts": ["x" * 10_000_000, ""]})  # more than a pipe holds
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("line", "message"),
    [("'{}'", "expected"), ("'no'", "expected a line of JSON"), ('\'{"error": "no GPU"}\'', "no GPU")],
)
def test_a_wrong_answer_of_a_process(program, line, message):
    with pytest.raises(ValueError, match=message):
        Process(program(f"input()\nprint({line}, flush=True)"))(**BATCH)


def test_a_program_that_is_not_there():
    with pytest.raises(FileNotFoundError):
        Process("no-such-program-anywhere --x")(**BATCH)
    with pytest.raises(ValueError, match="names no program"):
        Process("")


@pytest.fixture
def server():
    """A server on the loopback that answers with what the list says, status and body, and then with scores."""
    answers, seen = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append((json.loads(self.rfile.read(int(self.headers["Content-Length"]))), dict(self.headers)))
            status, body = answers.pop(0) if answers else (200, '{"scores": [0.5, 1]}')
            if status == "silent":
                time.sleep(body)
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}/score", answers, seen
    httpd.shutdown()
    httpd.server_close()


def test_an_endpoint_gets_everything_and_headers_from_the_environment(server, monkeypatch):
    url, _, seen = server
    monkeypatch.setenv("SCORER_TOKEN", "abc")
    assert Http(url, headers={"Authorization": "Bearer $SCORER_TOKEN"})(**BATCH) == [0.5, 1]
    question, headers = seen[0]
    assert question == BATCH
    assert headers["Authorization"] == "Bearer abc"


def test_an_endpoint_is_asked_again_after_what_may_pass(server):
    url, answers, seen = server
    answers += [(503, "busy"), ("silent", 0.6), (429, "slow down")]
    assert Http(url, timeout=0.3, wait=0.01)(**BATCH) == [0.5, 1]
    assert len(seen) == 4
    answers += [(500, "broken")] * 4
    with pytest.raises(ValueError, match=r"status 500 \(broken\), 4 times"):
        Http(url, wait=0.01)(**BATCH)


def test_an_endpoint_is_not_asked_again_after_what_will_not_pass(server):
    url, answers, seen = server
    answers.append((404, "nothing here"))
    with pytest.raises(ValueError, match="status 404"):
        Http(url, wait=0.01)(**BATCH)
    assert len(seen) == 1
    with pytest.raises(ValueError, match="http:// or https://"):
        Http("file:///etc/passwd")


def test_the_endpoint_of_a_part_is_not_asked_for_single_responses(server):
    url, answers, seen = server
    answers.append((404, "nothing here"))
    part = Part(RewardSpec("far", "http"), Http(url, wait=0.01))
    with pytest.raises(ValueError, match=r"reward 'far' failed: .* status 404 .*; response 0 was 'one two'"):
        response_scores(part, Samples(**BATCH, pieces=[None, None]))
    assert len(seen) == 1


def test_an_endpoint_that_nobody_serves():
    with pytest.raises(ValueError, match="2 times"):
        Http("http://127.0.0.1:9/", timeout=1, retries=1, wait=0.01)(**BATCH)
