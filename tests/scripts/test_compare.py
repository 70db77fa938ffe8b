"""scripts/compare.py: the page in a browser, and judges that need none. With RLHF_STAGES_SCREENSHOTS=docs/images the
browser test writes its pictures there."""

import json

import pytest

from rlhf_stages.feedback.store import Store

from helpers import load_script, run_stage, save_causal, write_toy_data
from served import Server, open_pages, picture

pytestmark = pytest.mark.slow
SCRIPT = "scripts/compare.py"


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """Two SFT runs on data of different names, and a reward model."""
    folder = tmp_path_factory.mktemp("compare")
    model = save_causal(folder / "model")
    short = ["--max_steps=1", "--learning_rate=1e-2", "--max_new_tokens=4"]
    for dataset, seed in (("helpdesk", 1), ("summaries", 2)):
        data = write_toy_data(folder / dataset)
        content = json.loads((data / "args.json").read_text()) | {"dataset": dataset}
        (data / "args.json").write_text(json.dumps(content))
        run_stage("sft", folder / "runs", data, f"--model_name={model}", f"--seed={seed}", *short)
    run_stage("rm", folder / "runs", data, f"--model_name={model}", "--max_steps=1")
    words = [f"name the price of the {colour} {thing}" for colour in ("red", "blue") for thing in ("tea", "lamp")]
    (folder / "prompts.txt").write_text("\n".join(words))
    return folder


@pytest.fixture
def flags(material, tmp_path):
    runs = material / "runs"
    models = [str(found) for found in sorted(runs.glob("*/*/sft"))]
    assert len(models) == 2
    return [
        "--models", *models, f"--prompts={material / 'prompts.txt'}", "--max_new_tokens=8", "--accelerator=cpu",
        f"--database={tmp_path / 'f.sqlite'}", f"--report={tmp_path / 'out' / 'comparison.md'}",
    ]  # fmt: skip


def test_people_vote_blind_and_the_report_says_what_came_of_it(flags, browser, tmp_path):
    server = Server(SCRIPT, tmp_path, *flags).start()
    try:
        with open_pages(browser) as opened:
            page = opened(server.url)
            page.wait_for_selector(
                "#warnings >> text=runs on different datasets: sft from helpdesk, sft-2 from summaries"
            )
            page.locator("#title").click()
            page.keyboard.press("n")
            page.wait_for_selector("#vote-note >> text=your name is empty")
            page.locator("#annotator").locator("input, textarea").first.fill("ann")
            page.click("#start")
            page.wait_for_selector("#vote-note >> text=0 of 4 judged")
            picture(page, "compare-vote")
            assert "sft" not in page.inner_text("#cards")
            shown = []
            for number, key in enumerate(("1", "2", "0", "b"), start=1):
                shown.append([page.inner_text(f"#reply-{side} .text") for side in "12"])
                page.keyboard.press(key)
                page.wait_for_selector(f"#vote-saved >> text=Saved as number {number}.")
            page.wait_for_selector("#vote-note >> text=All 4 pairs are judged")
            page.get_by_role("tab", name="Result").click()
            page.click("#write")
            page.wait_for_selector("#result-note >> text=Written to")
            page.wait_for_selector("#result >> text=no difference can be told from 2 decided pairs")
            page.evaluate("document.querySelector('#result-note').style.display = 'none'")  # a path of this test
            picture(page, "compare-result")
            page.set_viewport_size({"width": 390, "height": 844})
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            page.get_by_text("中文").click()
            page.get_by_role("tab", name="结果").wait_for()
        server.kill()  # what was said is safe; the same command finds it again
        server.start()
        assert "All 4 pairs are judged" in server.call("next", "en", "ann")[0]
        tabs = [server.call("next", "en", "bob") for _ in range(2)]  # of one person, on the same pair
        assert all("0 of 4 judged" in note for note, *_ in tabs)
        assert "Saved as number 5." in server.call("left", "en", "bob", tabs[0][1])[0]
        said, note, ticket, *_ = server.call("left", "en", "bob", tabs[1][1])
        assert "Not saved: you judged that pair before, as number 5" in said
        assert "1 of 4 judged" in note
        assert json.loads(ticket)["item"] != json.loads(tabs[1][1])["item"]
    finally:
        server.stop()
    store = Store(tmp_path / "f.sqlite")
    votes = store.judgements(annotator="ann")[::-1]
    store.close()
    for (judgement, item), (left, right), best in zip(votes[:2], shown[:2], (0, 1), strict=True):
        assert sorted((left, right)) == sorted(reply.strip() for reply in item.replies)
        assert item.replies[judgement.opinion.ranks.index(1)].strip() == (left, right)[best]
    assert [judgement.opinion.ranks for judgement, _ in votes[2:]] == [(1, 1), None]
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert "> **Note.** The models come from runs on different datasets" in text
    assert "| ann |" in text


def test_judges_without_a_page(flags, material, tmp_path, capsys):
    (rm,) = (material / "runs").glob("*/*/rm")
    for judge in (["--judge=length"], ["--judge=reward_model", f"--rm_experiment_dir={rm}"]):
        load_script(SCRIPT).main([*flags, *judge])
        said = capsys.readouterr().out
        assert "note: The models come from runs on different datasets" in said
        assert "decided pairs (p = " in said
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert "| judge:length |" in text
    assert r"| judge:reward\_model" in text
    store = Store(tmp_path / "f.sqlite")
    found = store.judgements()
    store.close()
    assert len(found) == 8
    assert len({item.id for _, item in found}) == 4  # the second judge read the replies of the first
