"""The tabs of the annotation page on which people look at what was saved, change it, export it, and score replies."""

import uuid
from functools import partial
from html import escape
from typing import Any

import gradio as gr

from rlhf_stages.feedback.agreement import agreement_of, work_of
from rlhf_stages.feedback.desk import Shown
from rlhf_stages.feedback.ranks import LETTERS
from rlhf_stages.feedback.records import VERDICTS, Item, Judgement
from rlhf_stages.feedback.wording import say

from pages.annotation import Page, Sampling, plain
from pages.serving import message

SHOWN = 200  # Rows of the table
HEADERS = ("number", "who", "what", "prompt_short", "best", "seconds", "when")
WIDTHS = ["90px", "120px", "180px", "280px", "240px", "100px", "160px"]
CLOSED = (None, None, "", None, "")  # The editor when nothing is open: number, revision, token, verdict, text


def verdict_name(language: str, verdict: str) -> str:
    """A verdict in the page's language."""
    return say(language, "all_bad_verdict" if verdict == "all_bad" else verdict)


def said(judgement: Judgement) -> str:
    """Ranks or the score as a person edits them."""
    opinion = judgement.opinion
    return (
        ", ".join(map(str, opinion.ranks)) if opinion.ranks else "" if opinion.score is None else f"{opinion.score:g}"
    )


def table_row(language: str, judgement: Judgement, item: Item) -> list[Any]:
    """A row of the table; long texts are cut."""
    ranks = judgement.opinion.ranks
    best = item.replies[ranks.index(1)] if ranks else ""
    what = f"{verdict_name(language, judgement.opinion.verdict)} {said(judgement)}".strip()
    texts = [" ".join(text.split())[:80] for text in (item.prompt, best)]
    when = judgement.created[:16].replace("T", " ")
    return [judgement.id, judgement.annotator, what, *texts, round(judgement.seconds, 1), when]


def summary(language: str, judged: list[tuple[Judgement, Item]]) -> str:
    """Who did what, and how well people agree, as HTML."""
    names = ["who", *("all_bad_verdict" if verdict == "all_bad" else verdict for verdict in VERDICTS), "median_seconds"]
    head = "".join(f"<th>{escape(say(language, name))}</th>" for name in names)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td>{work.verdicts.get(verdict, 0)}</td>" for verdict in VERDICTS)
        + f"<td>{work.seconds:.1f}</td></tr>"
        for name, work in work_of(judged).items()
    )
    found = agreement_of(judged)
    values = {"items": found.items, "tau": f"{found.tau:.2f}", "alpha": f"{found.alpha:.2f}"}
    agreement = say(language, "agreement", **values) if found.items else say(language, "no_agreement")
    return f'<div class="work"><table><tr>{head}</tr>{rows}</table></div><p>{escape(agreement)}</p>'


class BrowseTab:
    """What was saved: filter, table, who did what, an editor, export."""

    def __init__(self, page: Page, tab: gr.Tab) -> None:
        self.page, self.desk, self.store = page, page.desk, page.desk.store
        self._make_table()
        self._make_editor()
        self.filters = filters = [page.language, self.who, self.verdict, self.text]
        self.rows = rows = [self.count, self.table, self.work, self.who]
        quiet = {"show_progress": "hidden"}
        self.show.click(self.list_rows, filters, rows, api_name="list", **quiet)
        for event in (tab.select, self.text.submit, self.who.input, self.verdict.input):
            event(self.list_rows, filters, rows, api_visibility="private", **quiet)
        self.export.click(self.write, page.language, self.note, api_name="export", show_progress_on=self.table)
        opened = [self.item, self.opened, self.revision, self.token, self.new_verdict, self.new_text]
        self.table.select(
            self.open_row, page.language, [self.number, *opened], api_visibility="private", **quiet
        )  # fmt: skip
        self.fetch.click(self.open_judgement, [page.language, self.number], opened, api_name="open", **quiet)
        inputs = [page.language, page.annotator, *opened[1:]]
        for button, action, name in ((self.save, self.change, "edit"), (self.delete, self.remove, "delete")):
            done = button.click(action, inputs, [self.edited, *opened], api_name=name, **quiet)
            done.then(self.list_rows, filters, rows, api_visibility="private", **quiet)

    def _make_table(self) -> None:
        page = self.page
        with gr.Row():
            people, kinds = partial(_choices, "everybody", []), partial(_choices, "everything", VERDICTS)
            who, verdict = (
                gr.Dropdown([""], allow_custom_value=True, elem_id="by-annotator"),
                gr.Dropdown([""], elem_id="by-verdict"),
            )
            self.who = page.worded(who, label="annotator_filter", choices=people)
            self.verdict = page.worded(verdict, label="verdict", choices=kinds)
            self.text = page.worded(gr.Textbox(elem_id="by-text"), label="search")
        with gr.Row():
            self.show = page.worded(gr.Button(elem_id="show", variant="primary"), value="refresh")
            self.export = page.worded(gr.Button(elem_id="export"), value="export")
        # two places: the list is also read after a change, and may answer after an export that was asked for later
        self.note, self.count = gr.HTML(elem_id="browse-note"), gr.HTML(elem_id="browse-count")
        table = gr.Dataframe(
            elem_id="judgements",
            interactive=False,
            datatype="str",
            type="array",
            column_count=len(HEADERS),
            wrap=True,
            column_widths=WIDTHS,
        )
        self.table = page.worded(table, headers=lambda language: [say(language, name) for name in HEADERS])
        self.work = gr.HTML(elem_id="work")

    def _make_editor(self) -> None:
        page = self.page
        with gr.Row(elem_id="open-row"):
            self.number = page.worded(gr.Number(precision=0, elem_id="number"), label="open")
            self.fetch = page.worded(gr.Button(elem_id="fetch"), value="open_button")
        self.item = gr.HTML(elem_id="item")
        # of what is shown, whatever number the box above has by now
        self.opened, self.revision = (gr.Number(visible=False, precision=0) for _ in range(2))
        self.token = gr.Textbox(visible=False)
        with gr.Row():
            kinds = partial(_choices, None, VERDICTS)
            self.new_verdict = page.worded(gr.Dropdown(elem_id="new-verdict"), label="verdict", choices=kinds)
            self.new_text = page.worded(gr.Textbox(elem_id="new-text"), label="ranks")
        with gr.Row():
            self.save = page.worded(gr.Button(elem_id="save-edit"), value="save_edit")
            self.delete = page.worded(gr.Button(elem_id="delete", variant="stop"), value="delete")
        self.edited = gr.HTML(elem_id="edited")

    def list_rows(self, language: str, name: str, kind: str, wanted: str) -> list[Any]:
        """The table, and who did what."""

        def read() -> tuple[list[Any], list[Any]]:
            return self.store.judgements(), self.store.judgements(name or None, kind or None, wanted)

        found, problem = self.page.attempt(language, read)
        if found is None:
            return [message(problem, "bad"), gr.skip(), gr.skip(), gr.skip()]
        every, fitting = found
        rows = [table_row(language, *pair) for pair in fitting[:SHOWN]]
        people = sorted({judgement.annotator for judgement, _ in every})
        line = message(say(language, "shown", count=len(rows), total=len(fitting)))
        return [line, rows, summary(language, every), gr.update(choices=_choices("everybody", people, language))]

    def open_judgement(self, language: str, wanted: float | None) -> list[Any]:
        """A judgement with its item, ready to be edited."""
        number = int(wanted or 0)
        found, problem = self.page.attempt(
            language, lambda: (self.desk.item_of(number), self.store.history(number)[-1])
        )
        if found is None:
            return [message(problem, "bad"), *CLOSED]
        item, judgement = found
        if judgement.deleted:
            return [message(say(language, "gone", number=number), "bad"), *CLOSED]
        replies = "".join(plain(reply, LETTERS[i]) for i, reply in enumerate(item.replies))
        prompt = f'<div class="prompt">{escape(item.prompt.strip())}</div>'
        opinion = judgement.opinion
        return [prompt + replies, number, judgement.revision, uuid.uuid4().hex, opinion.verdict, said(judgement)]

    def open_row(self, event: gr.SelectData, language: str) -> list[Any]:
        """The judgement of a row that was clicked."""
        number = int(event.row_value[0])
        return [number, *self.open_judgement(language, number)]

    def change(self, request: gr.Request, language: str, name: str, *inputs: Any) -> list[Any]:
        """Save what the editor says."""
        number, revision, token, verdict, text = inputs
        person = self.page.person(name, request)
        return self._finish(
            language, number, "changed",
            lambda: self.desk.edit(person, int(number or 0), int(revision or 0), str(verdict), str(text), token),
        )  # fmt: skip

    def remove(self, request: gr.Request, language: str, name: str, *inputs: Any) -> list[Any]:
        """Delete what is open."""
        number, revision, token, *_ = inputs
        person = self.page.person(name, request)
        return self._finish(
            language, number, "deleted",
            lambda: self.desk.remove(person, int(number or 0), int(revision or 0), token),
        )  # fmt: skip

    def _finish(self, language: str, number: float | None, key: str, action: Any) -> list[Any]:
        """Do it; what is open is then the new revision, or what it was, beside the reason why nothing was done."""
        done, problem = self.page.attempt(language, action)
        if done is None:
            return [message(problem, "bad"), *[gr.skip()] * 6]
        line = message(say(language, key, number=done.id), "good")
        return [line, *(["", *CLOSED] if done.deleted else self.open_judgement(language, number))]

    def write(self, language: str) -> str:
        """Export, and say what and where."""
        done, problem = self.page.attempt(language, self.desk.export)
        if done is None:
            return message(problem, "bad")
        counts = {"rankings": done.rankings, "lists": done.lists, "scores": done.scores}
        line = say(language, "exported", **counts, folder=self.page.args.export_dir, files=", ".join(done.files))
        if done.lists:  # scores alone are nothing that a reward model trains on
            line += say(language, "next_step", command=self.desk.training_command())
        return message(line, "good")


class ScoreTab:
    """Score one reply on a slider."""

    def __init__(self, page: Page) -> None:
        self.page, self.desk = page, page.desk
        sampling = Sampling(page, "score", ranked=False)
        note, ticket = gr.HTML(elem_id="score-note"), gr.Textbox(visible=False)
        reply = gr.HTML(elem_id="score-reply")
        score = page.worded(gr.Slider(-2, 2, value=0, step=0.1, elem_id="score"), label="score")
        save = page.worded(gr.Button(elem_id="save-score", variant="primary"), value="save_score")
        saved = gr.HTML(elem_id="score-saved")
        advance = page.worded(gr.Checkbox(value=True), label="advance")
        page.worded(gr.Markdown(elem_classes=["keys"]), value="score_keys")
        who, view = [page.language, page.annotator], [note, ticket, sampling.prompt, reply, score]
        chosen = [sampling.model, sampling.source, sampling.prompt, sampling.temperature, sampling.tokens]
        options = {"show_progress": "minimal", "show_progress_on": reply}
        sampling.random.click(self.take_random, who + chosen, view, api_name="score_next", **options)
        sampling.sample.click(self.take_written, who + chosen, view, api_name="score_sample", **options)
        inputs, kept = [*who, ticket, score], [saved, ticket, reply]
        event = save.click(self.keep, inputs, kept, api_name="score", show_progress="hidden")
        event.then(self.go_on, [*who, advance, ticket, *chosen], view, api_visibility="private", **options)

    def take_random(self, request: gr.Request, language: str, name: str, *inputs: Any) -> list[Any]:
        """A reply to a random prompt."""
        return self._take(language, self.page.person(name, request), True, *inputs)

    def take_written(self, request: gr.Request, language: str, name: str, *inputs: Any) -> list[Any]:
        """A reply to the prompt in the box."""
        return self._take(language, self.page.person(name, request), False, *inputs)

    def go_on(self, request: gr.Request, language: str, name: str, goes_on: bool, held: str, *inputs: Any) -> list[Any]:
        """After a score was saved: the next reply, if that is wanted."""
        return [gr.skip()] * 5 if held or not goes_on else self.take_random(request, language, name, *inputs)

    def keep(self, request: gr.Request, language: str, name: str, held: str, given: float) -> list[Any]:
        """Save the score."""
        person = self.page.person(name, request)
        done, problem = self.page.attempt(language, lambda: self.desk.score(person, held, float(given)))
        if done is None:
            return [message(problem, "bad"), gr.skip(), gr.skip()]
        return [message(say(language, "saved", number=done.id), "good"), "", ""]

    def _take(self, language: str, person: str, is_random: bool, *inputs: Any) -> list[Any]:
        model, source, prompt, temperature, tokens = inputs

        def draw() -> Shown:
            asked = self.desk.random_prompt(source) if is_random else prompt
            return self.desk.sample(person, model, asked, 1, temperature, tokens)

        shown, problem = self.page.attempt(language, draw)
        if shown is None:
            return [message(problem, "bad"), "", gr.skip(), "", gr.skip()]
        return [message(say(language, "read_one")), shown.ticket.text(), shown.prompt, plain(shown.replies[0]), 0]


def _choices(every: str | None, names: Any, language: str) -> list[tuple[str, str]]:
    """Choices of a list: all of them (where `every` names that), then one by one."""
    named = [(verdict_name(language, name) if name in VERDICTS else name, name) for name in names]
    return [(say(language, every), ""), *named] if every else named
