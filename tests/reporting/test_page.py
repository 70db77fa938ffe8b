"""The page: what stands on it, that nothing on it comes from elsewhere, and that no text is taken for markup."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from rlhf_stages.reporting.chart import Dots, curves, scatter, spread, ticks
from rlhf_stages.reporting.curves import Line, Panel
from rlhf_stages.reporting.evaluation import read_evaluation
from rlhf_stages.reporting.lineage import with_ancestors
from rlhf_stages.reporting.markup import Markup, escape, short, tag
from rlhf_stages.reporting.page import Report, build_page

from report_folders import write_evaluation, write_ppo, write_run, write_sft

EVIL = "<script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>&amp;\"'\x1b[2J\x00\ud800"


class Page(HTMLParser):
    """Elements, attributes and texts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.attributes += [(name, *attribute) for attribute in attributes]
        if name not in ("meta", "br"):
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.tags.append(name)
        self.attributes += [(name, *attribute) for attribute in attributes]

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


def page_of(*folders, **settings):
    return Page(build_page(Report(with_ancestors(folders), folders, **settings)))


def assert_self_contained(page):
    allowed = {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "section",
        "footer",
        "h1",
        "h2",
        "h3",
        "p",
        "div",
    }
    allowed |= {"span", "b", "a", "ul", "li", "i", "code", "table", "thead", "tbody", "tr", "th", "td"}
    allowed |= {"figure", "figcaption", "svg", "path", "circle", "line", "text"}
    assert set(page.tags) <= allowed
    for name, key, value in page.attributes:
        assert not key.startswith("on")
        assert key not in ("src", "srcset", "xlink:href", "action", "formaction")
        assert key != "href" or (name == "a" and value.startswith("#"))
    assert not re.search(
        r"url\(|@import|https?:", page.texts[page.texts.index(next(t for t in page.texts if "{" in t))]
    )
    assert page.open == []
    targets = {value for _, key, value in page.attributes if key == "id"}
    assert {value[1:] for _, key, value in page.attributes if key == "href"} <= targets


@pytest.fixture
def pipeline(tmp_path):
    sft = write_sft(tmp_path / "toy" / "tiny" / "sft")
    return write_ppo(tmp_path / "toy" / "tiny" / "ppo", 100, sft)


def test_a_pipeline(pipeline, tmp_path):
    evaluation = read_evaluation(write_evaluation(tmp_path / "e.json"))
    page = page_of(pipeline, evaluation=evaluation, made="2020-01-01")
    assert_self_contained(page)
    for text in (
        *("toy / tiny / ppo", "Supervised fine-tuning", "finished after 100 steps", "over-optimised", "gold score"),
        *(
            "--init_kl_coeff",
            "the same weights still",
            "sampling",
            "new 4",
            "test: all pairs",
            "1,200",
            "longer wins",
            "Explained variance",
            "step-000100",
            "√nats",
        ),
    ):
        assert text in page.text, text
    assert page.text.index("new 4") < page.text.index("test: all pairs")  # texts come before the longest table
    assert "What this page does not show" not in page.text
    assert page.attributes.count(("li", "class", "from")) == 1  # an arrow from SFT to PPO
    assert page.text.count("from sft") == 1
    assert not any("refresh" in str(value) for _, _, value in page.attributes)


def test_every_text_from_elsewhere_is_shown_as_text(tmp_path):
    sft = write_sft(tmp_path / "toy" / "tiny" / "sft")
    ppo = write_ppo(tmp_path / "toy" / "tiny" / "ppo", 20, sft, prompt=EVIL[:-1], response=EVIL[:-1])
    args = json.loads((ppo / "args.json").read_text())
    args["train_args"][EVIL] = EVIL
    args["shards"] = {EVIL: EVIL}
    args["versions"] = {EVIL: EVIL}
    args["parents"][EVIL] = {"path": EVIL[:40], "sha256": EVIL}
    args["rewards"] |= {EVIL: {"kind": EVIL, "weights": [[0, EVIL]]}}
    args["data_args"] = {"dataset": EVIL}
    (ppo / "args.json").write_text(json.dumps(args))
    metrics = (ppo / "metrics.csv").read_text().replace("reward/rm_mean", "reward/<img src=x>_mean")
    (ppo / "metrics.csv").write_text(metrics)
    (ppo / "skipped.jsonl").write_text(json.dumps({"step": 3, "reason": EVIL}) + "\n")
    content = json.loads(write_evaluation(tmp_path / "e.json", EVIL).read_text())
    content["replies"][EVIL] = [{**reply, "text": EVIL} for reply in content["replies"].pop("ppo")]
    content["summary"][EVIL] = content["summary"].pop("ppo")
    (tmp_path / "e.json").write_text(json.dumps(content))
    page = page_of(ppo, evaluation=read_evaluation(tmp_path / "e.json"))
    assert_self_contained(page)
    assert page.text.count("<script>alert(1)</script>") >= 20
    assert "\\x1b[2J\\x00" in page.text


def test_a_folder_that_has_only_begun_and_a_damaged_one(tmp_path):
    begun = write_run(tmp_path / "toy" / "new" / "ppo", "ppo", finished=False)
    damaged = write_ppo(tmp_path / "toy" / "old" / "ppo", 20)
    for name in ("metrics.csv", "timing.csv", "args.json", "samples.jsonl"):
        path = damaged / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] + b"\xff\xfe")
    shutil.rmtree(damaged / "checkpoints" / "step-000020")
    page = page_of(begun, damaged, refresh=5)
    assert_self_contained(page)
    for text in (
        *(
            "Nothing was logged yet.",
            "No checkpoint is there (yet).",
            "ends in the middle of a line",
            "args.json is damaged",
        ),
        *("`latest` names step-000020, which is not there", "not finished: step 0 of 100", "drawn anew every 5 s"),
    ):
        assert text in page.text, text
    assert ("meta", "http-equiv", "refresh") in page.attributes


def test_runs_of_different_datasets_are_not_compared(tmp_path):
    one, other = (write_ppo(tmp_path / data / "tiny" / "ppo", 20, seed=1) for data in ("toy", "play"))
    page = page_of(one, other)
    assert "These runs are of different datasets (play, toy)" in page.text
    assert "Runs compared" not in page.text


def test_runs_of_one_dataset_are_compared(tmp_path):
    page = page_of(*(write_ppo(tmp_path / "toy" / f"tiny-kl{c}" / "ppo", 20) for c in ("0.1", "1")))
    assert "Runs compared" in page.text
    labels = [text for text in page.texts if text in ("kl0.1", "kl1")]  # without what all names start with
    assert labels == ["kl0.1", "kl1"] * 2  # of reward, and of gold
    assert ("li", "class", "from") not in page.attributes  # no arrow from one to the other
    assert_self_contained(page)


def test_markup_escapes_all_but_itself():
    assert tag("p", "<b>", Markup("<i>x</i>"), None, class_="a\"b", data_x=None) == (
        '<p class="a&quot;b">&lt;b&gt;<i>x</i></p>'
    )  # fmt: skip
    assert escape("a\x07&") == "a\\x07&amp;"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0, "0"), (1, "1"), (-1.25, "−1.25"), (0.12345, "0.123"), (123.4, "123"), (1234, "1,234"), (12345, "12.3k")],
        *[(2.5e6, "2.5M"), (3e-6, "3e−6"), (-4.2e-4, "−0.00042"), (float("nan"), "–"), (5e9, "5G")],
    ],
)
def test_numbers_are_short(value, text):
    assert short(value) == text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        *[(0, 10, [0, 2.5, 5, 7.5, 10]), (0.03, 0.98, [0.25, 0.5, 0.75]), (-3, 5, [-2, 0, 2, 4]), (7, 7, [7])],
        *[(0, 2000, [0, 500, 1000, 1500, 2000]), (1e-7, 4e-7, [1e-7, 2e-7, 3e-7, 4e-7])],
    ],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_labels_are_moved_apart_and_stay_in_the_picture():
    assert spread([50, 10, 52], gap=13, low=18, high=176) == [50, 18, 63]
    assert spread([170, 172, 174], gap=13, low=18, high=176) == [150, 163, 176]
    assert spread([5], gap=13, low=18, high=176) == [18]


@pytest.mark.parametrize(
    "points", [[(0, 0.0)], [(5, 1e-300), (6, 1e300)], [(1, -2.0), (2, -2.0)], [(s, float(s % 7)) for s in range(5000)]]
)
def test_curves_of_any_kind_lie_in_the_picture(points):
    drawn = curves(Panel("t", "u", [Line("train", points), Line("validation", points, "val")]))
    numbers = [float(n) for d in re.findall(r' d="M([^"]+)"', drawn) for n in re.split(r"[L ]", d)]
    assert all(0 <= n <= 360 for n in numbers)
    assert len(drawn) < 30_000
    assert "nan" not in drawn


def test_points_have_their_numbers_as_titles():
    drawn = scatter([Dots("end", [(0, 1), (1, 2)], ["first", "second"], edge=[(0, 1), (1, 2)])], "√nats", "what it is")
    page = Page(drawn)
    assert [t for t in page.texts if t in ("first", "second", "end")] == ["first", "second", "end"]
    assert page.tags.count("circle") == 2
