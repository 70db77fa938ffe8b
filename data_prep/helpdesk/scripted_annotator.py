#!/usr/bin/env python3
"""A person played by a program: it opens the annotation page in a browser, reads the replies, ranks them by what the
corpus thinks of them (`gold_score`), saves, and exports. `make human-loop-demo` trains on what comes out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_stages.cli import parse, run

import corpus


@dataclass(frozen=True, kw_only=True)
class AnnotatorArgs:
    """Someone who ranks replies of a helpdesk model."""

    model: str  # SFT experiment whose replies are ranked
    prompts: str  # Shard of prompts
    num_replies: int = 300  # Replies to rank, four to a prompt
    database: str = "feedback/helpdesk.sqlite"  # SQLite file of what was said; a new one for each run
    export_dir: str = "data/feedback/helpdesk"  # Folder of the exported shards
    chromium: str = "/usr/bin/chromium"  # Browser
    seed: int = 42  # Of the replies


REPLIES = 4
SHOWN = "old => (document.querySelector('#cards .card-0 .text')?.innerText ?? old) !== old"


def main() -> None:
    """Serve the page, rank, export, end the server."""
    (args,) = parse(AnnotatorArgs, description=__doc__)
    import os
    import subprocess
    import sys

    from playwright.sync_api import sync_playwright

    if Path(args.database).exists():
        raise ValueError(f"{args.database} exists; what people have said is not overwritten")
    flags = ["--models", args.model, "--prompts", args.prompts, f"--database={args.database}", "--repeat_share=0"]
    flags += [f"--export_dir={args.export_dir}", f"--seed={args.seed}", f"--num_replies={REPLIES}", "--port=0"]
    command = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "annotate.py"), *flags, "--device=cpu"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split(" ", 1)[0]
            if not url.startswith("http"):
                raise ValueError("the annotation page did not start")
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=args.chromium, args=["--no-sandbox"])
                annotate(browser.new_page(), url, args.num_replies // REPLIES)
        finally:
            server.terminate()


def annotate(page: Any, url: str, count: int) -> None:
    """Rank the replies to so many prompts, and press the export button."""
    page.set_default_timeout(60_000)
    page.goto(url)
    page.locator("#annotator").locator("input, textarea").first.fill("gold")
    page.locator("#ties input").check()
    page.click("#rank-random")
    before = ""
    for number in range(1, count + 1):
        page.wait_for_function(SHOWN, arg=before)
        page.wait_for_selector("#rank-note >> text=Read the replies")
        cards = page.locator("#cards .card >> visible=true")  # fewer where the model says the same again and again
        replies = cards.locator(".text").all_inner_texts()
        before, prompt = replies[0], page.input_value("#rank-prompt textarea")
        scores = [corpus.gold_score(prompt, reply) for reply in replies]
        for i, score in enumerate(scores):
            better = sum(other > score for other in scores)  # 1 is the best; replies as good as each other share a rank
            cards.nth(i).locator("input[type=radio]").nth(better).check()
        page.locator("#title").click()
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#saved >> text=Saved as number {number}.")
        if number % 10 == 0 or number == count:
            print(f"{number} of {count} prompts ranked", flush=True)
    page.get_by_role("tab", name="Browse").click()
    page.click("#export")
    page.wait_for_selector("#browse-note >> text=Exported")
    print(page.inner_text("#browse-note"))


if __name__ == "__main__":
    run(main)
