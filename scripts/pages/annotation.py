"""The annotation page in Gradio: what is on it. What it does is in `rlhf_stages.feedback.desk`."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from rlhf_stages.feedback.desk import Desk, Shown
from rlhf_stages.feedback.ranks import LETTERS, find_conflict, groups, order_text
from rlhf_stages.feedback.wording import LANGUAGES, Refusal, say

from pages.serving import message

SCRIPT = (Path(__file__).parent / "annotation.js").read_text(encoding="utf-8")
MOST = len(LETTERS)


def plain(text: str, name: str = "") -> str:
    """A reply as HTML that shows every character of it as it is."""
    title = f'<span class="letter">{escape(name)}</span>' if name else ""
    return f'<div class="reply">{title}<div class="text">{escape(text.strip())}</div></div>'


class Page:
    """What the tabs share: the language, who is there, and texts that change with the language."""

    def __init__(self, desk: Any, has_accounts: bool, title: str = "title") -> None:
        self.desk, self.args, self.has_accounts = desk, desk.args, has_accounts
        self._texts: list[tuple[Any, dict[str, Callable[[str], Any]]]] = []
        first = self.args.language
        with gr.Row(elem_id="top"):
            with gr.Column(scale=3, min_width=280):
                self.title = self.worded(gr.Markdown(elem_id="title"), value=lambda lang: f"## {say(lang, title)}")
            with gr.Column(scale=1, min_width=200):
                self.annotator = self.worded(
                    gr.Textbox(elem_id="annotator", visible=not has_accounts), label="annotator"
                )
            with gr.Column(scale=1, min_width=200):
                names = [("English", "en"), ("中文", "zh")]
                self.language = self.worded(gr.Radio(names, value=first, elem_id="language"), label="language")

    def worded(self, component: Any, **texts: str | Callable[[str], Any]) -> Any:
        """A component whose properties are texts: keys of the wording, or functions of the language."""
        made = {name: partial(_say, key) if isinstance(key, str) else key for name, key in texts.items()}
        self._texts.append((component, made))
        for name, text in made.items():
            setattr(component, name, text(self.args.language))
        return component

    def connect_language(self) -> Any:
        """Let the switch change all texts; called when all are made. Returns the event, for what follows it."""

        def change(language: str) -> list[Any]:
            language = language if language in LANGUAGES else self.args.language
            return [gr.update(**{name: text(language) for name, text in made.items()}) for _, made in self._texts]

        components = [component for component, _ in self._texts]
        return self.language.input(
            change, self.language, components, show_progress="hidden", api_visibility="private"
        )  # fmt: skip

    def person(self, typed: str, request: gr.Request) -> str:
        """Who sends a request: who logged in, or the name in the box where nobody has to."""
        return str(request.username) if self.has_accounts and request.username else typed

    def attempt(self, language: str, action: Callable[[], Any]) -> tuple[Any, str]:
        """Result and "", or None and the sentence that says why there is none."""
        try:
            return action(), ""
        except Refusal as refusal:
            return None, refusal.in_language(language)
        except Exception as error:  # the page goes on, and whoever runs it sees the rest
            logging.getLogger(__name__).exception("a request failed")
            return None, say(language, "unexpected", reason=type(error).__name__)


def _say(key: str, language: str) -> str:
    return say(language, key)


def build(desk: Desk, has_accounts: bool) -> gr.Blocks:
    """The whole page."""
    from pages.browsing import BrowseTab, ScoreTab

    with gr.Blocks(title=say(desk.args.language, "title"), analytics_enabled=False, fill_width=True) as blocks:
        page = Page(desk, has_accounts)
        with gr.Tabs():
            with page.worded(gr.Tab(elem_id="rank-tab"), label="label_tab"):
                RankTab(page)
            with page.worded(gr.Tab(elem_id="browse-tab"), label="browse_tab") as tab:
                browse = BrowseTab(page, tab)
            with page.worded(gr.Tab(elem_id="score-tab"), label="score_tab"):
                ScoreTab(page)
        # the texts of the table and the names of its filter come from what was read
        options = {"show_progress": "hidden", "api_visibility": "private"}
        page.connect_language().then(browse.list_rows, browse.filters, browse.rows, **options)
    return blocks


class Sampling:
    """The controls that say what is sampled, and from what."""

    def __init__(self, page: Page, prefix: str, ranked: bool) -> None:
        args = page.args
        self.prompt = page.worded(
            gr.Textbox(lines=3, max_lines=12, elem_id=f"{prefix}-prompt", interactive=True), label="prompt"
        )
        with gr.Row():
            self.random = page.worded(
                gr.Button(elem_id=f"{prefix}-random", variant="primary"), value="random" if ranked else "random_plain"
            )
            self.sample = page.worded(gr.Button(elem_id=f"{prefix}-sample"), value="sample")
        with page.worded(gr.Accordion(open=False), label="settings"), gr.Row():
            models, prompts = ([*map(str, names)] for names in (args.models, args.prompts))
            self.model = page.worded(gr.Dropdown(models, value=next(iter(models), None)), label="model")
            self.source = page.worded(gr.Dropdown(prompts, value=next(iter(prompts), None)), label="source")
            self.count = page.worded(
                gr.Slider(2, MOST, value=args.num_replies, step=1, visible=ranked), label="num_replies"
            )
            self.temperature = page.worded(
                gr.Slider(0.1, max(2.0, args.temperature), value=args.temperature, step=0.05), label="temperature"
            )
            most = max(512, args.max_new_tokens)
            self.tokens = page.worded(gr.Slider(1, most, value=args.max_new_tokens, step=1), label="max_new_tokens")

    @property
    def next_inputs(self) -> list[Any]:
        """Those of `Desk.next`, without who asks."""
        return [self.model, self.source, self.count, self.temperature, self.tokens]

    @property
    def sample_inputs(self) -> list[Any]:
        """Those of `Desk.sample`, without who asks."""
        return [self.model, self.prompt, self.count, self.temperature, self.tokens]


class RankTab:
    """Rank the replies to a prompt: components, then what their events do."""

    def __init__(self, page: Page) -> None:
        self.page, self.desk = page, page.desk
        self.sampling = Sampling(page, "rank", ranked=True)
        self.note = gr.HTML(elem_id="rank-note")
        self.ticket = gr.Textbox(visible=False)
        self.cards, self.texts, self.radios = [], [], []
        with gr.Row(elem_id="cards"):
            for i, letter in enumerate(LETTERS):
                with gr.Column(visible=False, elem_classes=["card", f"card-{i}"], min_width=0) as card:
                    self.texts.append(gr.HTML())
                    # all ranks that there can be: a server that was restarted has to take what a page offered before
                    radio = gr.Radio([str(rank + 1) for rank in range(MOST)], elem_classes=["rank"], interactive=True)
                    self.radios.append(page.worded(radio, label=partial(_rank_label, letter)))
                self.cards.append(card)
        self.order = gr.HTML(elem_id="order")
        with gr.Row(elem_id="actions"):
            self.save = page.worded(gr.Button(elem_id="save", variant="primary"), value="save")
            self.skip = page.worded(gr.Button(elem_id="skip"), value="skip")
            self.bad = page.worded(gr.Button(elem_id="all-bad"), value="all_bad")
        self.saved = gr.HTML(elem_id="saved")
        with gr.Row():
            self.ties = page.worded(gr.Checkbox(value=False, elem_id="ties"), label="ties")
            self.advance = page.worded(gr.Checkbox(value=True, elem_id="advance"), label="advance")
        page.worded(gr.Markdown(elem_id="keys"), value="keys")
        self.view = [self.note, self.ticket, self.sampling.prompt, *self.texts, *self.radios, *self.cards, self.order]
        self._connect()

    def _connect(self) -> None:
        who = [self.page.language, self.page.annotator]
        sampling, options = self.sampling, {"show_progress": "minimal", "show_progress_on": self.order}
        sampling.random.click(self.take_next, who + sampling.next_inputs, self.view, api_name="next", **options)
        sampling.sample.click(self.take_sample, who + sampling.sample_inputs, self.view, api_name="sample", **options)
        quiet: dict[str, Any] = {"show_progress": "hidden"}
        for button, name in ((self.save, "save"), (self.skip, "skip"), (self.bad, "all_bad")):
            inputs = [*who, self.ticket, self.ties, *self.radios]
            action = getattr(self, f"keep_{name}")
            event = button.click(action, inputs, [self.saved, *self.view], api_name=name, **quiet)
            inputs = [*who, self.advance, self.ticket, *sampling.next_inputs]
            event.then(self.go_on, inputs, self.view, api_visibility="private", **options)
        inputs = [self.page.language, self.ticket, self.ties, *self.radios]
        for i, radio in enumerate(self.radios):
            radio.input(
                partial(self.give_rank, i), inputs, [self.note, radio], queue=False, api_visibility="private",
                trigger_mode="multiple", **quiet,
            )  # fmt: skip
        # one event for all, so that no answer to an earlier rank can come after that to a later one
        gr.on(
            [radio.change for radio in self.radios], self.preview, inputs, self.order, queue=False,
            api_visibility="private", trigger_mode="always_last", **quiet,
        )  # fmt: skip

    def take_next(self, request: gr.Request, language: str, name: str, *inputs: Any) -> list[Any]:
        """A random prompt, or an item of somebody else's again."""
        person = self.page.person(name, request)
        return self._fill(language, *self.page.attempt(language, lambda: self.desk.next(person, *inputs)))

    def take_sample(self, request: gr.Request, language: str, name: str, *inputs: Any) -> list[Any]:
        """Replies to the prompt in the box."""
        person = self.page.person(name, request)
        return self._fill(language, *self.page.attempt(language, lambda: self.desk.sample(person, *inputs)))

    def go_on(self, request: gr.Request, language: str, name: str, goes_on: bool, held: str, *inputs: Any) -> list[Any]:
        """After something was saved: the next item, if that is wanted."""
        if held or not goes_on:
            return [gr.skip()] * len(self.view)
        return self.take_next(request, language, name, *inputs)

    def keep_save(self, request: gr.Request, language: str, name: str, held: str, tied: bool, *ranks: Any) -> list[Any]:
        """Save the ranks."""
        person, given = self.page.person(name, request), [_rank(rank) for rank in ranks]
        return self._kept(language, lambda: self.desk.rank(person, held, given, tied))

    def keep_skip(self, request: gr.Request, language: str, name: str, held: str, *_: Any) -> list[Any]:
        """Save that this person skipped the item."""
        person = self.page.person(name, request)
        return self._kept(language, lambda: self.desk.say(person, held, "skipped"))

    def keep_all_bad(self, request: gr.Request, language: str, name: str, held: str, *_: Any) -> list[Any]:
        """Save that all replies are bad."""
        person = self.page.person(name, request)
        return self._kept(language, lambda: self.desk.say(person, held, "all_bad"))

    def give_rank(self, i: int, language: str, _: str, tied: bool, *inputs: Any) -> list[Any]:
        """Look at a rank that was just given; one that is held already is taken back."""
        ranks = [_rank(rank) for rank in inputs]
        other = None if tied else find_conflict(ranks, i)
        if other is None:
            return ["", gr.skip()]
        return [message(say(language, "rank_held", rank=ranks[i], reply=LETTERS[other]), "bad"), None]

    def preview(self, language: str, held: str, tied: bool, *inputs: Any) -> str:
        """The order so far; a rank that is about to be taken back does not count."""
        ranks = [_rank(rank) for rank in inputs]
        if not any(ranks) or (not tied and any(find_conflict(ranks, i) is not None for i in range(len(ranks)))):
            return gr.skip() if any(ranks) else ""
        replies, _ = self.page.attempt(language, lambda: self.desk.seen(held))
        return "" if replies is None else preview(language, ranks[: len(replies)], replies)

    def _kept(self, language: str, action: Callable[[], Any]) -> list[Any]:
        """Save; then the page is empty, or as it was with the reason why nothing was saved."""
        done, problem = self.page.attempt(language, action)
        if done is None:
            return ["", message(problem, "bad"), *[gr.skip()] * (len(self.view) - 1)]
        return [message(say(language, "saved", number=done.id), "good"), "", "", gr.skip(), *self._cards(())]

    def _fill(self, language: str, shown: Shown | None, problem: str) -> list[Any]:
        """The values of `view`: an item, or none and why; a prompt that gave nothing stays to be mended."""
        if shown is None:
            return [message(problem, "bad"), "", gr.skip(), *self._cards(())]
        note = message(say(language, "read"))
        return [note, shown.ticket.text(), shown.prompt, *self._cards(shown.replies)]

    def _cards(self, replies: Sequence[str]) -> list[Any]:
        """Texts, radios, cards and the order of a page that shows these replies."""
        size = len(replies)
        texts = [plain(replies[i], LETTERS[i]) if i < size else "" for i in range(MOST)]
        choices = [str(rank) for rank in range(1, size + 1)]
        radios = [gr.update(choices=choices, value=None) if i < size else None for i in range(MOST)]
        return [*texts, *radios, *(gr.update(visible=i < size) for i in range(MOST)), ""]


def preview(language: str, ranks: Sequence[int | None], replies: Sequence[str]) -> str:
    """The order so far as HTML: letters, then the replies."""
    lines = "".join(f"<li>{''.join(plain(replies[i], LETTERS[i]) for i in group)}</li>" for group in groups(ranks))
    head = f"{escape(say(language, 'order'))}: <b>{escape(order_text(ranks))}</b>"
    return f'<div class="order">{head}<ol>{lines}</ol></div>'


def _rank_label(letter: str, language: str) -> str:
    return say(language, "rank_of", reply=letter)


def _rank(value: Any) -> int | None:
    """The rank that a radio holds; whatever else somebody sends to the server is none."""
    return int(value) if isinstance(value, str) and value in "123456789" and value else None
