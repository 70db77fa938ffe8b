"""The demo page in Gradio: what is on it. What it does is in `rlhf_stages.demo`."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from transformers.utils import logging as transformers_logging

from rlhf_stages.args import DemoArgs, GenerationArgs
from rlhf_stages.demo.choices import (
    POLICIES,
    checkpoints_of,
    different_data,
    examples_of,
    find_experiments,
    settings_of,
    source_of,
)
from rlhf_stages.demo.talk import Models, Request, Turn, answer, reason_of
from rlhf_stages.feedback.accounts import read_users

from pages.controls import CHAT, Form, Picker, Settings
from pages.serving import message, serve
from pages.transcript import transcript

STYLE = (Path(__file__).parent / "demo.css").read_text(encoding="utf-8")
ONE = {"concurrency_limit": 1, "concurrency_id": "models", "api_visibility": "private"}  # One user at a time
QUIET = {"show_progress": "hidden", "api_visibility": "private"}


def open_demo(args: DemoArgs, form: Form = CHAT) -> None:
    """Serve the page until Ctrl-C."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    users = None if args.auth_file is None else read_users(Path(args.auth_file))
    with gr.Blocks(title=form.title, analytics_enabled=False, fill_width=True) as blocks:
        DemoPage(args, form)
    serve(blocks, "", args, users, style=STYLE, hint=f"experiments of {args.log_dir}")


class DemoPage:
    """Components, then what their events do."""

    def __init__(self, args: DemoArgs, form: Form) -> None:
        self.args, self.form, self.models = args, form, Models(args)
        self._stops: set[str] = set()
        gr.Markdown(f"## {form.title}\n{form.subtitle}", elem_id="title")
        with gr.Row(elem_id="main"):
            with gr.Column(scale=1, min_width=300):
                self.first = Picker("")
                self.compares = gr.Checkbox(False, label="Compare with a second one", elem_id="compare")
                with gr.Group(visible=False) as self.second_group:
                    self.second = Picker("B")
                self.reward_model = gr.Dropdown(
                    [], label="Reward model", allow_custom_value=True, elem_id="reward-model", info="scores each reply"
                )
                with gr.Row(elem_id="load-row"):
                    self.load = gr.Button("Load", variant="primary", elem_id="load", min_width=100)
                    self.refresh = gr.Button("Refresh", elem_id="refresh", min_width=100)
                self.note = gr.HTML(elem_id="note")
                self.settings = Settings(args)
            with gr.Column(scale=3, min_width=320):
                self.talk = gr.HTML(transcript([], form.empty), elem_id="talk")
                self.boxes = self._boxes()
                with gr.Row(elem_id="actions"):
                    self.again = gr.Button("Regenerate", elem_id="again")
                    self.example = gr.Button("Load example", elem_id="example")
                    self.clear = gr.Button("Clear", elem_id="clear")
        self.turns = gr.State([])
        self._connect()

    def _boxes(self) -> list[gr.Textbox]:
        *small, large = self.form.fields
        boxes = []
        if small:
            with gr.Row():
                boxes = [gr.Textbox(label=label, elem_id=f"box-{label.lower()}", min_width=200) for label in small]
        with gr.Row(elem_id="composer"):
            lines = 4 if small else 1
            hint = "Shift+Enter sends" if small else f"{large}; Enter sends"
            boxes.append(
                gr.Textbox(
                    label=large,
                    lines=lines,
                    max_lines=10,
                    placeholder=hint,
                    scale=5,
                    elem_id=f"box-{large.lower()}",
                    container=bool(small),
                )
            )
            self.send = gr.Button("Send", variant="primary", scale=1, min_width=100, elem_id="send")
            self.stop = gr.Button("Stop", variant="stop", scale=1, min_width=100, elem_id="stop", visible=False)
        return boxes

    def _connect(self) -> None:
        pickers = [self.first, self.second]
        lists = [self.first.experiment, self.second.experiment, self.reward_model, self.note]
        for picker in pickers:
            outputs = [picker.checkpoint, self.note]
            picker.experiment.change(self.offer_checkpoints, picker.experiment, outputs, **QUIET)
        gr.on([self.refresh.click], self.offer, lists[:3], lists, **QUIET)
        gr.context.Context.root_block.load(self.begin, None, lists, **QUIET)
        self.compares.change(lambda on: gr.update(visible=on), self.compares, self.second_group, **QUIET)
        chosen = [*self.first.both, self.compares, *self.second.both, self.reward_model]
        self.load.click(self.load_models, chosen, self.note, show_progress="minimal", **ONE)
        self.settings.load.click(
            self.load_settings, self.first.experiment, [*self.settings.of_experiment, self.note], **QUIET
        )
        self.example.click(self.load_example, self.first.experiment, self.boxes, **QUIET)
        inputs = [self.turns, *self.boxes, *chosen, *self.settings.all]
        outputs = [self.talk, self.turns, self.send, self.stop, self.boxes[-1], self.note]
        gr.on([self.send.click, self.boxes[-1].submit], self.say, inputs, outputs, show_progress="hidden", **ONE)
        self.again.click(self.say_again, inputs, outputs, show_progress="hidden", **ONE)
        self.stop.click(self.end_reply, None, None, queue=False, **QUIET)
        self.clear.click(self.forget, None, [self.talk, self.turns, *self.boxes, self.note], **QUIET)

    def begin(self) -> list[Any]:
        """What the page shows when it is opened."""
        return self.offer(self.args.path or "", "", self.args.rm_experiment_dir or "")

    def offer(self, first: str | None, second: str | None, judge: str | None) -> list[Any]:
        """The experiments that there are now; what was chosen stays."""
        policies, judges = (find_experiments(self.args.log_dir, stages) for stages in (POLICIES, ("rm",)))
        choices = [(self._label(path), str(path)) for path in policies]
        newest = str(policies[0]) if policies else ""
        other = next((str(path) for path in policies[1:]), newest)
        note = "" if policies else (
            f"No experiment of {', '.join(POLICIES)} in {self.args.log_dir}: train one, start the page with another"
            " --log_dir, or type the path of a model folder."
        )  # fmt: skip
        return [
            gr.update(choices=choices, value=first or newest),
            gr.update(choices=choices, value=second or other),
            gr.update(choices=[("none", ""), *((self._label(path), str(path)) for path in judges)], value=judge or ""),
            message(note, "bad"),
        ]

    def _label(self, path: Path) -> str:
        inside = path.relative_to(self.args.log_dir)
        return str(inside) if inside.parts else str(path)

    def offer_checkpoints(self, experiment: str | None) -> list[Any]:
        """The checkpoints of an experiment, or why there are none."""
        try:
            self._may_load(experiment or "", POLICIES)
            choices = checkpoints_of(experiment) if experiment else []
        except (ValueError, OSError) as error:
            return [gr.update(choices=[], value=None), message(reason_of(error), "bad")]
        return [gr.update(choices=choices, value=choices[0][1] if choices else None), gr.skip() if not choices else ""]

    def load_models(self, *chosen: Any) -> str:
        """Load what is chosen, anew, and say what came."""
        try:
            pairs, judge = self._chosen(chosen)
            sessions = [self.models.session(source_of(*pair), fresh=True) for pair in pairs]
            if judge:
                self.models.scorer(judge, sessions[0].model.device, fresh=True)
        except Exception as error:  # also out of memory; the page goes on
            return message(reason_of(error), "bad")
        lines = [
            f"{session.model.num_parameters() / 1e6:,.1f} million parameters on {session.model.device}"
            for session in sessions
        ]
        notes = [note for session in sessions for note in session.notes]
        notes.append(different_data([experiment for experiment, _ in pairs]))
        return message(f"Loaded: {'; '.join(lines)}. {' '.join(notes)}".strip(), "good")

    def load_settings(self, experiment: str | None) -> list[Any]:
        """How the experiment sampled its own texts."""
        try:
            self._may_load(experiment or "", POLICIES)
            found = settings_of(experiment or "")
        except (ValueError, OSError) as error:
            return [*[gr.skip()] * 6, message(reason_of(error), "bad")]
        names = ("do_sample", "temperature", "top_k", "top_p", "max_new_tokens", "min_new_tokens")
        note = message("The settings are those of the experiment.", "good") if found else message("It says none.")
        return [*(found.get(name, gr.skip()) for name in names), note]

    def load_example(self, experiment: str | None) -> list[str]:
        """A prompt that the run has logged, or the example of the form."""
        try:
            self._may_load(experiment or "", POLICIES)
            found = examples_of(experiment or "")
        except (ValueError, OSError):
            found = []
        return [*self.form.split(random.choice(found))] if found else [*self.form.example]

    def say(self, request: gr.Request, turns: list[Turn], *inputs: Any) -> Iterator[list[Any]]:
        """Ask, and show the replies as they come."""
        size = len(self.boxes)
        fields, rest = [str(field or "").strip() for field in inputs[:size]], inputs[size:]
        if not fields[-1]:
            yield [*[gr.skip()] * 5, message(f"{self.form.fields[-1]} is empty.", "bad")]
            return
        kept = "" if self.form.remembers else gr.skip()
        yield from self._reply(request, turns, self.form.compose(*fields), rest, kept)

    def say_again(self, request: gr.Request, turns: list[Turn], *inputs: Any) -> Iterator[list[Any]]:
        """Ask the last question again, in place of its replies."""
        if not turns:
            yield [*[gr.skip()] * 5, message("There is nothing to answer again yet.", "bad")]
            return
        yield from self._reply(request, turns[:-1], turns[-1].text, inputs[len(self.boxes) :], gr.skip())

    def _reply(
        self, request: gr.Request, turns: list[Turn], text: str, rest: Sequence[Any], box: Any
    ) -> Iterator[list[Any]]:
        who, turns = str(request.session_hash), [*turns]
        self._stops.discard(who)
        try:
            asked = self._request(rest)
            note = message(different_data([experiment for experiment, _ in asked.models]))
        except (ValueError, OSError) as error:
            yield [*[gr.skip()] * 5, message(reason_of(error), "bad")]
            return
        start, end = ([gr.update(visible=not runs), gr.update(visible=runs)] for runs in (True, False))
        for number, _ in enumerate(answer(self.models, turns, text, asked, lambda: who in self._stops)):
            buttons = start if number == 0 else [gr.skip(), gr.skip()]
            yield [
                transcript(turns, ""),
                turns,
                *buttons,
                box if number == 0 else gr.skip(),
                note if number == 0 else gr.skip(),
            ]
        yield [transcript(turns, ""), turns, *end, gr.skip(), gr.skip()]

    def end_reply(self, request: gr.Request) -> None:
        """Stop after the piece in work."""
        self._stops.add(str(request.session_hash))

    def forget(self) -> list[Any]:
        """Start over."""
        return [transcript([], self.form.empty), [], *[""] * len(self.boxes), ""]

    def _request(self, rest: Sequence[Any]) -> Request:
        """What the controls say."""
        pairs, judge = self._chosen(rest[:6])
        do_sample, temperature, top_k, top_p, most, least, penalty, seed = rest[6:]
        how = {"temperature": float(temperature), "top_k": int(top_k), "top_p": float(top_p)} if do_sample else {}
        sampling = GenerationArgs(
            do_sample=bool(do_sample), max_new_tokens=int(most), min_new_tokens=int(least), **how
        )  # fmt: skip
        seed = str(seed or "").strip()
        if seed and not (seed.isdecimal() and int(seed) < 2**63):
            raise ValueError(f"the seed is a whole number from 0, or empty; got {seed[:40]!r}")
        return Request(pairs, judge, sampling, float(penalty), int(seed) if seed else None, self.form.remembers)

    def _chosen(self, chosen: Sequence[Any]) -> tuple[list[tuple[str, str]], str]:
        """Experiment and checkpoint of each model, and the reward model."""
        first, checkpoint, compares, second, other, judge = chosen
        pairs = [(first or "", checkpoint or ""), *([(second or "", other or "")] if compares else [])]
        for experiment, _ in pairs:
            self._may_load(experiment, POLICIES)
        self._may_load(judge or "", ("rm",))
        return pairs, judge or ""

    def _may_load(self, path: str, stages: Sequence[str]) -> None:
        """Who logs in from elsewhere may load what the page offers, not whatever lies on this machine."""
        given = {self.args.path, self.args.rm_experiment_dir, ""}
        if self.args.auth_file is None or path in given:
            return
        if path not in map(str, find_experiments(self.args.log_dir, stages)):
            raise ValueError(f"{path} is not among the experiments that this page offers")
