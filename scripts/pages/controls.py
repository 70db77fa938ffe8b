"""What a person chooses and fills in on a demo page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gradio as gr

from rlhf_stages.args import DemoArgs


@dataclass(frozen=True)
class Form:
    """What a person fills in.

    fields: labels of the boxes, the last one is the large one. compose, split: boxes to what the model is asked, and
    back. example: filled in where an experiment has none.
    """

    title: str
    subtitle: str
    empty: str
    fields: Sequence[str]
    compose: Callable[..., str]
    split: Callable[[str], Sequence[str]]
    example: Sequence[str]
    remembers: bool = True


CHAT = Form(
    title="Talk to a checkpoint",
    subtitle="Choose an experiment, or two, and write to them.",
    empty="Choose a checkpoint and say something.",
    fields=("Message",),
    compose=str,
    split=lambda prompt: (prompt,),
    example=("Why does bread dough rise when it rests in a warm place?",),
)


class Picker:
    """Experiment and checkpoint of one model."""

    def __init__(self, letter: str) -> None:
        self.experiment = gr.Dropdown(
            [], label=f"Experiment {letter}".strip(), allow_custom_value=True, elem_id=f"experiment{letter}",
            info="of the list, or the path of any experiment or model folder",
        )  # fmt: skip
        self.checkpoint = gr.Dropdown([], label=f"Checkpoint {letter}".strip(), elem_id=f"checkpoint{letter}")
        self.both = [self.experiment, self.checkpoint]


class Settings:
    """How replies are sampled."""

    def __init__(self, args: DemoArgs) -> None:
        with gr.Accordion("Settings", open=False, elem_id="settings"):
            self.do_sample = gr.Checkbox(args.do_sample, label="Sample (off: the most probable token each time)")
            self.temperature = gr.Slider(
                0.05, max(2.0, args.temperature), args.temperature, step=0.05, label="Temperature"
            )
            self.top_k = gr.Slider(0, max(1000, args.top_k), args.top_k, step=1, label="Top-k (0: off)")
            self.top_p = gr.Slider(0.01, 1, args.top_p, step=0.01, label="Top-p (1: off)")
            most = max(512, args.max_new_tokens)
            self.most = gr.Slider(1, most, args.max_new_tokens, step=1, label="Max new tokens", elem_id="most")
            self.least = gr.Slider(0, most, args.min_new_tokens, step=1, label="Min new tokens", elem_id="least")
            self.penalty = gr.Slider(
                0.5,
                max(2.0, args.repetition_penalty),
                args.repetition_penalty,
                step=0.05,
                label="Repetition penalty (1: off)",
            )
            seed = "" if args.seed is None else str(args.seed)
            self.seed = gr.Textbox(seed, label="Seed (empty: each reply differs)", max_lines=1, elem_id="seed")
            self.load = gr.Button("Settings of the experiment", size="sm", elem_id="load-settings")
        self.of_experiment = [self.do_sample, self.temperature, self.top_k, self.top_p, self.most, self.least]
        self.all = [*self.of_experiment, self.penalty, self.seed]
