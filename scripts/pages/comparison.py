"""The page of a comparison in Gradio: what is on it. What it does is in `rlhf_stages.feedback.contest`."""

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from rlhf_stages.feedback.contest import ContestDesk
from rlhf_stages.feedback.verdict import HEADERS, conclusion, report, tallies_of
from rlhf_stages.feedback.wording import Refusal, say
from rlhf_stages.files import write_text

from pages.annotation import Page, plain
from pages.serving import message

SCRIPT = (Path(__file__).parent / "comparison.js").read_text(encoding="utf-8")
CHOICES = {"left": "left", "equal": "equal", "right": "right", "both_bad": "both-bad", "skip": "skip"}


def build(desk: ContestDesk, has_accounts: bool) -> gr.Blocks:
    """The whole page."""
    with gr.Blocks(title=say(desk.args.language, "compare_title"), analytics_enabled=False, fill_width=True) as blocks:
        page = Page(desk, has_accounts, title="compare_title")
        gr.HTML("".join(message(text) for text in desk.warnings), visible=bool(desk.warnings), elem_id="warnings")
        with gr.Tabs():
            with page.worded(gr.Tab(elem_id="vote-tab"), label="compare_tab"):
                VoteTab(page)
            with page.worded(gr.Tab(elem_id="result-tab"), label="result_tab"):
                ResultTab(page)
        page.connect_language()
    return blocks


class VoteTab:
    """Two replies, and which of them is better."""

    def __init__(self, page: Page) -> None:
        self.page, self.desk = page, page.desk
        start = page.worded(gr.Button(elem_id="start", variant="primary"), value="start_voting")
        self.note, self.ticket = gr.HTML(elem_id="vote-note"), gr.Textbox(visible=False)
        self.prompt = gr.HTML(elem_id="vote-prompt")
        with gr.Row(elem_id="cards"):
            self.texts = []
            for side in "12":
                with gr.Column(elem_classes=["card"], min_width=0):
                    self.texts.append(gr.HTML(elem_id=f"reply-{side}"))
        self.saved = gr.HTML(elem_id="vote-saved")
        with gr.Row(elem_id="actions"):
            buttons = {
                choice: page.worded(
                    gr.Button(elem_id=name, variant="primary" if choice in ("left", "right") else "secondary"),
                    value="skip" if choice == "skip" else choice,
                )
                for choice, name in CHOICES.items()
            }
        page.worded(gr.Markdown(elem_classes=["keys"]), value="vote_keys")
        who = [page.language, page.annotator]
        self.view = [self.note, self.ticket, self.prompt, *self.texts]
        start.click(self.take, who, self.view, api_name="next", show_progress="hidden")
        for choice, button in buttons.items():
            # one event saves and shows the next: there is no moment in which a second click meets an empty page
            button.click(
                self.keeper(choice), [*who, self.ticket], [self.saved, *self.view], api_name=choice,
                show_progress="hidden",
            )  # fmt: skip

    def take(self, request: gr.Request, language: str, name: str) -> list[Any]:
        """The next pair of a person."""
        found, problem = self.page.attempt(language, lambda: self.desk.next(self.page.person(name, request)))
        if found is None:
            return [message(problem, "bad"), "", "", "", ""]
        shown, done = found
        if shown is None:
            return [message(say(language, "votes_done", count=self.desk.count), "good"), "", "", "", ""]
        note = message(say(language, "votes_left", done=done, count=self.desk.count))
        prompt = f'<div class="prompt">{escape(shown.prompt.strip())}</div>'
        # not A and B, which are models in the result
        cards = [plain(text, side) for text, side in zip(shown.replies, "12", strict=True)]
        return [note, shown.ticket.text(), prompt, *cards]

    def keeper(self, choice: str) -> Callable[..., list[Any]]:
        """What saves this vote and shows the next pair, also where this person has judged the one that is shown.

        Otherwise the page stays, with the reason why nothing was saved.

        A function of its own: Gradio gives the request to who names it in a signature, and a partial has none.
        """

        def keep(request: gr.Request, language: str, name: str, held: str) -> list[Any]:
            person = self.page.person(name, request)

            def vote() -> str:
                try:
                    return message(say(language, "saved", number=self.desk.vote(person, held, choice).id), "good")
                except Refusal as refusal:
                    if refusal.key != "judged_before":
                        raise
                    return message(say(language, "voted_before", **refusal.values), "bad")  # say, in another tab

            line, problem = self.page.attempt(language, vote)
            if line is None:
                return [message(problem, "bad"), *[gr.skip()] * len(self.view)]
            return [line, *self.take(request, language, name)]

        return keep


class ResultTab:
    """Counts so far, and the report."""

    def __init__(self, page: Page) -> None:
        self.page, self.desk = page, page.desk
        write = page.worded(gr.Button(elem_id="write", variant="primary"), value="write_report")
        note, table = gr.HTML(elem_id="result-note"), gr.HTML(elem_id="result")
        write.click(self.write, page.language, [note, table], api_name="report", show_progress="hidden")

    def write(self, language: str) -> list[Any]:
        """Write the report; its numbers, with the names of the models, as HTML."""
        desk = self.desk

        def made() -> str:
            whole = (desk.contestants, desk.items, desk.store, desk.warnings)
            write_text(Path(desk.args.report), [report(desk.args, *whole)])
            tallies = tallies_of(desk.items, desk.store)
            head = "".join(f"<th>{escape(name)}</th>" for name in HEADERS)
            rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in t.cells())}</tr>" for t in tallies)
            models = " · ".join(f"{x} = {one.name}" for x, one in zip("AB", desk.contestants, strict=True))
            lines = "".join(f"<p>{escape(conclusion(t, desk.contestants))}</p>" for t in tallies)
            return f'<div class="work"><p>{escape(models)}</p><table><tr>{head}</tr>{rows}</table>{lines}</div>'

        html, problem = self.page.attempt(language, made)
        if html is None:
            return [message(problem, "bad"), ""]
        return [message(say(language, "reported", path=desk.args.report), "good"), html]
