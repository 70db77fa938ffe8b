"""scripts/report.py: the page and its pictures in one piece, in time, small, and again while a run goes on."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from helpers import ROOT, load_script
from report_folders import write_evaluation, write_ppo, write_run, write_sft

PNG = b"\x89PNG\r\n\x1a\n"


def report(*argv):
    return load_script("scripts/report.py").main([str(word) for word in argv])


def refused(capsys, *argv):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        report(*argv)
    return str(error.value)


def test_a_pipeline_by_its_last_stage(tmp_path, capsys):
    sft = write_sft(tmp_path / "toy" / "tiny" / "sft")
    ppo = write_ppo(tmp_path / "toy" / "tiny" / "ppo", 20, sft)
    assert report(ppo, f"--evaluation={write_evaluation(tmp_path / 'e.json')}") == ppo / "report.html"
    assert capsys.readouterr().out.splitlines() == [
        f"report       {ppo}/report.html",
        f"curves       {ppo}/report-sft.png",
        f"curves       {ppo}/report-ppo.png",
    ]
    assert (ppo / "report.html").read_text().startswith("<!doctype html>")
    assert all((ppo / f"report-{stage}.png").read_bytes().startswith(PNG) for stage in ("sft", "ppo"))
    assert not list(ppo.glob(".*"))


def test_a_report_of_two_thousand_steps_is_quick_and_small(tmp_path):
    sft = write_sft(tmp_path / "toy" / "tiny" / "sft")
    ppo = write_ppo(tmp_path / "toy" / "tiny" / "ppo", 2000, sft)
    command = [sys.executable, str(ROOT / "scripts" / "report.py"), str(ppo)]
    before = os.times()
    subprocess.run(command, check=True, capture_output=True)
    after = os.times()
    # seconds of the processor, for the machine may be busy
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert seconds < 10
    assert sum(path.stat().st_size for path in ppo.glob("report*")) < 5e6
    assert (ppo / "report.html").stat().st_size < 1e6


def test_the_gold_score_of_samples(tmp_path):
    ppo = write_ppo(tmp_path / "toy" / "tiny" / "ppo", 20)
    args = json.loads((ppo / "args.json").read_text())
    del args["rewards"]["gold"]
    (ppo / "args.json").write_text(json.dumps(args))
    (tmp_path / "gold.py").write_text("def score(prompt, response):\n    return float(len(response))\n")
    path = report(ppo, f"--gold_score={tmp_path}/gold.py:score", "--no_png", f"--output={tmp_path}/here/r.html")
    assert "Gold score" in path.read_text()
    assert "samples.jsonl, 3 samples a point" in path.read_text()
    assert [found.name for found in path.parent.iterdir()] == ["r.html"]


def test_what_is_not_there_is_named(tmp_path, capsys):
    sft = write_sft(tmp_path / "toy" / "tiny" / "sft")
    assert "no experiment in" in refused(capsys, tmp_path)
    assert "no folder" in refused(capsys, tmp_path / "none")
    assert "evaluate.py --output" in refused(capsys, sft, f"--evaluation={tmp_path}/none.json")
    assert "no file" in refused(capsys, sft, f"--gold_score={tmp_path}/none.py:score")


def test_a_folder_without_an_experiment_is_said_and_the_rest_is_shown(tmp_path):
    sft = write_sft(tmp_path / "toy" / "tiny" / "sft")
    text = report(tmp_path / "none", sft, "--no_png").read_text()
    assert f"no folder {tmp_path}/none" in text
    assert "finished after 100 steps" in text


def test_names_from_files_are_no_formulas_and_no_paths(tmp_path):
    one, other = (write_ppo(tmp_path / data / "tiny" / "ppo", 20) for data in ("toy", "play"))
    args = json.loads((one / "args.json").read_text())
    args["data_args"]["dataset"] = "../../\x00$\\bad{"
    (one / "args.json").write_text(json.dumps(args))
    (one / "metrics.csv").write_text((one / "metrics.csv").read_text().replace("reward/rm_mean", "reward/$\\bad{_mean"))
    report(one, other, f"--output={tmp_path}/out/r.html")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["r-..-..-bad-tiny-ppo.png", "r-play-tiny-ppo.png", "r.html"]


def test_nothing_to_draw_yet_leaves_a_page_and_no_picture(tmp_path):
    begun = write_run(tmp_path / "toy" / "tiny" / "rm", "rm", finished=False)
    assert "Nothing was logged yet." in report(begun).read_text()
    assert not list(begun.glob("*.png"))


def test_watching_draws_anew_until_the_run_is_finished(tmp_path):
    ppo = write_ppo(tmp_path / "toy" / "tiny" / "ppo", 20, finished=False)
    page, states = ppo / "report.html", set()
    watcher = threading.Thread(target=report, args=(ppo, "--watch=1", "--no_png"))
    watcher.start()
    until = time.monotonic() + 60
    while watcher.is_alive() and time.monotonic() < until:
        if page.is_file():
            text = page.read_text()
            assert text.endswith("</html>\n")  # never half a page
            states.add("drawn anew every 1 s" in text)
            if not (ppo / "summary.json").is_file():
                (ppo / "summary.json").write_text("{}")
    watcher.join(timeout=10)
    assert not watcher.is_alive()
    assert True in states
    assert "drawn anew" not in page.read_text()


FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path, chromium):
    """No sideways scrolling on a phone, readable letters, colours that follow the system, no request, no error."""
    from playwright.sync_api import sync_playwright

    sft = write_sft(tmp_path / "toy" / "tiny" / "sft")
    evil = "<script>document.title='hurt'</script><img src=http://127.0.0.1:9/x>" + "word" * 100
    ppo = write_ppo(tmp_path / "toy" / "tiny" / "ppo", 200, sft, prompt=evil, response=evil)
    page_path = report(ppo, f"--evaluation={write_evaluation(tmp_path / 'e.json', evil)}")
    colours = set()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(chromium), args=FLAGS)
        for width in (390, 1280):
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                requests, errors = [], []
                page.on("request", lambda request, seen=requests: seen.append(request.url))
                page.on("console", lambda message, seen=errors: seen.append(message.text))
                page.on("pageerror", lambda error, seen=errors: seen.append(str(error)))
                page.goto(page_path.as_uri())
                assert page.title() == "toy / tiny / ppo · report"
                assert page.evaluate("document.documentElement.scrollWidth") == width
                smallest = (
                    "Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height))"
                )
                assert page.evaluate(smallest) >= 11
                assert page.locator("figure").count() > 15
                colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
                picture = page.screenshot(path=str(tmp_path / f"{width}-{scheme}.png"), full_page=True)
                assert picture.startswith(PNG)
                assert requests == [page_path.as_uri()]
                assert errors == []
                page.close()
        page = browser.new_page(color_scheme="dark")
        page.goto(page_path.as_uri())
        page.emulate_media(media="print", color_scheme="dark")  # paper is white
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        browser.close()
    assert len(colours) == 2
