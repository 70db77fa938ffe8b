"""The person played by a program ranks, shares ranks and exports on the real page."""

import json

import pytest

from helpers import ROOT, load_script, save_causal, toy_rows
from served import Thread, open_pages

pytestmark = pytest.mark.slow


def test_replies_are_ranked_by_their_score_and_exported(browser, tmp_path, monkeypatch):
    save_causal(tmp_path / "model")
    prompts = sorted({prompt.removeprefix("Human: ").removesuffix(" Assistant:") for prompt, _ in toy_rows(100)})
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    monkeypatch.syspath_prepend(ROOT / "data_prep" / "helpdesk")
    script = load_script("data_prep/helpdesk/scripted_annotator.py")

    def score(prompt, reply):
        return sum(reply.count(vowel) for vowel in "aeiou") % 3  # of four, two at least are equal

    monkeypatch.setattr(script.corpus, "gold_score", score)
    offered = ["--models", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.txt")]
    server = Thread(
        "scripts/annotate.py", *offered,
        "--max_new_tokens=8", f"--database={tmp_path / 'f.sqlite'}", f"--export_dir={tmp_path / 'out'}", "--device=cpu",
        "--repeat_share=0", "--seed=1",
    )  # fmt: skip
    try:
        server.start()
        with open_pages(browser) as opened:
            script.annotate(opened("about:blank"), server.url, 3)
    finally:
        server.stop()
    lines = [json.loads(line) for line in (tmp_path / "out" / "rankings.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    for line in lines:
        scores = [score(line["prompt"], reply) for reply in line["replies"]]
        assert line["ranks"] == [
            1 + len({other for other in scores if other > own}) for own in scores
        ]  # as they are kept
        assert line["annotator"] == "gold"
