"""The annotation page over HTTP and in a browser. The Chinese, narrow and dark pages are looked at by people: with
RLHF_STAGES_SCREENSHOTS=docs/images the browser test writes its pictures there."""

import json
import re
import sqlite3
import subprocess
import sys
import threading
import time

import httpx
import pytest

from rlhf_stages.feedback.records import Opinion
from rlhf_stages.feedback.store import Store

from helpers import ROOT, run_stage, save_causal, toy_rows
from served import Server, Thread, open_pages, picture

pytestmark = pytest.mark.slow
SCRIPT = "scripts/annotate.py"
HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\"> **b** &amp;"


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("annotate")
    save_causal(folder / "model")
    prompts = sorted({prompt.removeprefix("Human: ").removesuffix(" Assistant:") for prompt, _ in toy_rows(100)})
    (folder / "prompts.txt").write_text("\n".join(prompts))
    return folder


@pytest.fixture
def server(material, tmp_path):
    """Starts a server with these flags beside the usual ones, in a thread or a process; all are stopped in the end."""
    started = []

    def start(*flags, models=(), is_process=False):
        common = [
            "--models", str(material / "model"), *models, "--prompts", str(material / "prompts.txt"),
            "--max_new_tokens=8", f"--database={tmp_path / 'f.sqlite'}",
            f"--export_dir={tmp_path / 'feedback' / 'people'}", "--device=cpu",
        ]  # fmt: skip
        started.append(Server(SCRIPT, tmp_path, *common, *flags) if is_process else Thread(SCRIPT, *common, *flags))
        return started[-1].start()

    yield start
    for one in started:
        one.stop()


ANNOTATORS, RANKINGS, KILLS = 4, 200, 2


def annotate(server, model, source, name, acknowledged):
    """Rank RANKINGS items as the page does; a request that failed is sent again with what it said before."""

    def insist(call, *inputs):
        for _ in range(600):
            try:
                return server.call(call, *inputs)
            except (httpx.HTTPError, json.JSONDecodeError):
                time.sleep(0.2)
        raise AssertionError("the server did not come back")

    for number in range(RANKINGS):
        note, ticket, *_ = insist("next", "en", name, model, source, 3, 1.0, 6)
        assert ticket, note
        order = json.loads(ticket)["order"]
        shown = [1 + (number + i) % len(order) for i in range(len(order))]
        ranks = [str(rank) for rank in shown] + [None] * (9 - len(order))
        saved, problem, *_ = insist("save", "en", name, ticket, False, *ranks)
        found = re.search(r"Saved as number (\d+)\.", saved)
        assert found, problem
        acknowledged.append((int(found[1]), name, [rank for _, rank in sorted(zip(order, shown, strict=True))]))


@pytest.mark.timeout(1500)  # 800 rankings, which take two minutes on two idle cores
def test_four_people_rank_at_once_and_two_kills_lose_and_double_nothing(server, material, tmp_path):
    running = server("--repeat_share=0.2", "--seed=1", is_process=True)
    inputs = str(material / "model"), str(material / "prompts.txt")
    acknowledged = [[] for _ in range(ANNOTATORS)]
    failures = []

    def work(i):
        try:
            annotate(running, *inputs, f"person {i}", acknowledged[i])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(ANNOTATORS)]
    for thread in threads:
        thread.start()
    for kill in range(1, KILLS + 1):
        while sum(map(len, acknowledged)) < kill * ANNOTATORS * RANKINGS // (KILLS + 1) and not failures:
            time.sleep(0.02)
        running.kill()
        running.start()
    for thread in threads:
        thread.join(timeout=1400)
    assert not failures
    assert [len(own) for own in acknowledged] == [RANKINGS] * ANNOTATORS
    running.stop()
    with sqlite3.connect(tmp_path / "f.sqlite") as db:
        stored = db.execute("SELECT id, annotator, ranks, revision FROM judgements ORDER BY id").fetchall()
    wanted = sorted((number, name, ranks) for own in acknowledged for number, name, ranks in own)
    assert [(number, name, json.loads(ranks)) for number, name, ranks, _ in stored] == wanted
    assert {revision for *_, revision in stored} == {1}


def test_bad_input_is_a_sentence_and_the_rest_goes_on(server, material, tmp_path):
    missing = str(tmp_path / "no-model")
    running = server(models=[missing])
    model, source = str(material / "model"), str(material / "prompts.txt")
    ask = lambda *inputs: running.call("sample", "en", "ann", *inputs)[:2]  # noqa: E731
    note, ticket = ask(model, "x" * 10_000, 4, 1.0, 8)
    assert "The prompt has 10000 characters; at most 8000 are taken." in note
    assert ticket == ""

    assert "tokens; with 8 for a reply, the model takes 64" in ask(model, "name " * 100, 4, 1.0, 8)[0]
    assert "The model cannot be loaded: no folder" in ask(missing, "name", 4, 1.0, 8)[0]
    with pytest.raises(httpx.RemoteProtocolError, match="not in the list of choices"):
        ask("/etc", "name", 4, 1.0, 8)  # only what the command line names
    assert "There is no prompt" in ask(model, " ", 4, 1.0, 8)[0]
    assert "your name is empty" in running.call("next", "en", " ", model, source, 4, 1.0, 8)[0]
    assert "你的名字" in running.call("next", "zh", " ", model, source, 4, 1.0, 8)[0]
    assert "Nothing to export yet" in running.call("export", "en")[0]
    assert "there is nothing on the page yet" in running.call("save", "en", "ann", "", False, *[None] * 9)[1]
    assert (
        "there is nothing on the page yet" in running.call("skip", "en", "ann", '{"item": []}', False, *[None] * 9)[1]
    )
    note, ticket = ask(model, "name the colour", 4, 1.0, 8)
    assert "Read the replies" in note
    size = len(json.loads(ticket)["order"])
    ranks = [str(i + 1) for i in range(size)] + [None] * (9 - size)
    with sqlite3.connect(tmp_path / "f.sqlite", isolation_level=None) as db:
        db.execute("BEGIN IMMEDIATE")
        saved, problem, *rest = running.call("save", "en", "ann", ticket, False, *ranks)
        assert saved == ""
        assert "Not saved: another program holds the database" in problem
        assert rest[0] == {"__type__": "update"}  # the page keeps its ticket
        db.execute("ROLLBACK")
    assert "Saved as number 1." in running.call("save", "en", "ann", ticket, False, *ranks)[0]
    assert "Saved as number 1." in running.call("save", "en", "ann", ticket, False, *ranks)[0]  # a double click
    with sqlite3.connect(tmp_path / "f.sqlite") as db:
        assert db.execute("SELECT count(*) FROM judgements").fetchone() == (1,)


def test_only_users_of_the_file_come_in_and_their_name_is_theirs(server, material, tmp_path):
    users = tmp_path / "users"
    command = [sys.executable, str(ROOT / SCRIPT), f"--auth_file={users}", "--add_user=ann"]
    subprocess.run(command, input="correct horse\n", text=True, check=True, cwd=ROOT)
    assert "correct horse" not in users.read_text()
    running = server(f"--auth_file={users}")
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        running.call("list", "en", "", "", "")
    with httpx.Client(base_url=running.url, trust_env=False, timeout=30) as client:
        assert client.post("/login", data={"username": "ann", "password": "wrong horse"}).status_code == 400
        assert client.post("/login", data={"username": "ann", "password": "correct horse"}).status_code == 200
        inputs = ["en", "somebody else", str(material / "model"), str(material / "prompts.txt"), 2, 1.0, 8]
        event = client.post("/gradio_api/call/next", json={"data": inputs}).json()["event_id"]
        answer = client.get(f"/gradio_api/call/next/{event}").text
        ticket = json.loads(re.search(r"event: complete\ndata: (.*)", answer)[1])[1]
        data = ["en", "somebody else", ticket, False, *[None] * 9]
        event = client.post("/gradio_api/call/skip", json={"data": data}).json()["event_id"]
        assert "Saved as number 1." in client.get(f"/gradio_api/call/skip/{event}").text
    with sqlite3.connect(tmp_path / "f.sqlite") as db:
        assert db.execute("SELECT annotator FROM judgements").fetchone() == ("ann",)


@pytest.fixture
def browse(browser):
    """Opens the page in a browser."""
    with open_pages(browser) as opened:

        def ready(url, **options):
            page = opened(url, **options)
            page.wait_for_selector("#rank-random")
            return page

        yield ready


def name_yourself(page, name):
    page.locator("#annotator").locator("input, textarea").first.fill(name)


def test_rank_conflict_save_browse_edit_export_train(server, browse, material, tmp_path):
    running = server("--repeat_share=0", "--seed=3")
    page = browse(running.url)
    name_yourself(page, "ann")
    page.click("#rank-random")
    page.wait_for_selector("#cards .card-3 .reply")
    replies = [page.inner_text(f"#cards .card-{i} .text") for i in range(4)]
    assert len(set(replies)) == 4
    page.locator("#title").click()
    for key in ("2", "1", "1"):  # C wants what B holds
        page.keyboard.press(key)
        page.wait_for_timeout(200)
    page.wait_for_selector("#rank-note >> text=Rank 1 is held by reply B already")
    page.wait_for_function("document.querySelectorAll('#cards .card-2 input:checked').length === 0")
    picture(page, "annotate-conflict")
    page.keyboard.press("Enter")
    page.wait_for_selector("#rank-note >> text=Not saved: C, D still without a rank.")
    page.keyboard.press("4")
    page.keyboard.press("3")
    page.wait_for_selector("#order >> text=B > A > D > C")
    page.wait_for_timeout(500)
    assert "B > A > D > C" in page.inner_text("#order")  # no late answer to an earlier key took its place
    picture(page, "annotate-rank")
    page.keyboard.press("Enter")
    page.wait_for_selector("#saved >> text=Saved as number 1.")
    page.wait_for_selector("#rank-note >> text=Read the replies")  # it went on to the next
    page.keyboard.press("b")
    page.wait_for_selector("#saved >> text=Saved as number 2.")
    page.wait_for_selector("#rank-note >> text=Read the replies")

    page.get_by_role("tab", name="Browse").click()
    page.wait_for_selector("#browse-count >> text=2 shown of 2")
    page.wait_for_selector("#judgements >> text=all bad >> visible=true")
    page.wait_for_selector("#work >> text=ann")
    page.locator("#number input").fill("1")
    page.click("#fetch")
    page.wait_for_selector("#item .reply")
    picture(page, "annotate-browse")
    page.locator("#new-text").locator("input, textarea").first.fill("4, 3, 2, 1")
    page.click("#save-edit")
    page.wait_for_selector("#edited >> text=Number 1 is changed")
    page.wait_for_selector("#judgements >> text=4, 3, 2, 1 >> visible=true")  # the list has been read again
    page.click("#export")
    page.wait_for_selector("#browse-note >> text=Exported 1 rankings (1 lists)")
    assert f"Next: python scripts/rlhf_rm.py --data_dir={tmp_path}" in page.inner_text("#browse-note")
    searched = page.locator("#by-text").locator("input, textarea").first
    searched.fill("not to be found")
    searched.press("Enter")
    page.wait_for_selector("#browse-count >> text=0 shown of 0")
    assert "Exported" in page.inner_text("#browse-note")  # a list that is read later leaves it there
    searched.fill("")

    page.get_by_role("tab", name="Score").click()
    page.locator("#title").click()
    page.keyboard.press("n")
    page.wait_for_selector("#score-reply .reply")
    for key in ("4", "ArrowRight", "ArrowRight", "ArrowLeft"):  # 1, and a tenth three times
        page.keyboard.press(key)
    page.wait_for_function("document.querySelector('#score input[type=number]').value === '1.1'")
    picture(page, "annotate-score")
    page.keyboard.press("Enter")
    page.wait_for_selector("#score-saved >> text=Saved as number 3.")
    page.wait_for_selector("#score-note >> text=Read the reply")  # it went on to the next

    page.get_by_role("tab", name="Browse").click()
    page.wait_for_selector("#browse-count >> text=3 shown of 3")
    page.locator("#number input").fill("2")
    page.click("#fetch")
    page.wait_for_function("document.querySelector('#new-verdict input').value === 'all bad'")
    page.locator("#number input").fill("1")  # what is open counts, not what stands in the box
    page.click("#delete")
    page.wait_for_selector("#edited >> text=Number 2 is deleted")
    page.wait_for_selector("#browse-count >> text=2 shown of 2")
    page.get_by_text("中文").click()
    page.wait_for_selector("#browse-count >> text=共 2 条，显示 2 条")
    page.wait_for_selector("#judgements th >> text=标注人 >> visible=true")
    page.locator("#by-annotator input").click()
    page.get_by_role("option", name="ann").wait_for()

    opened = Store(tmp_path / "f.sqlite")
    first, second = (opened.history(number) for number in (1, 2))
    item = opened.item(first[0].item)
    ranks = dict(zip(replies, (2, 1, 4, 3), strict=True))
    assert [ranks[reply.strip()] for reply in item.replies] == list(first[0].opinion.ranks)
    assert (first[1].opinion.ranks, second[0].opinion.verdict) == ((4, 3, 2, 1), "all_bad")
    assert [second[-1].deleted, opened.history(3)[0].opinion.score] == [True, 1.1]
    opened.close()
    data = tmp_path / "feedback" / "people"
    rm = run_stage("rm", tmp_path / "runs", data, f"--model_name={material / 'model'}", "--max_steps=2")
    assert (rm / "summary.json").is_file()


def test_what_a_model_says_is_shown_as_text_in_every_place(server, browse, tmp_path):
    store = Store(tmp_path / "f.sqlite")
    item = store.add_item(HOSTILE, [HOSTILE, f"{HOSTILE} 2"], "m", "d", {})
    store.save(item.id, HOSTILE[:55], Opinion("ranked", (1, 2)), 1.0, "t")
    store.close()
    page = browse(server("--repeat_share=1").url)
    name_yourself(page, "bob")
    page.click("#rank-random")
    page.wait_for_selector("#cards .card-1 .reply")
    assert {page.inner_text(f"#cards .card-{i} .text") for i in range(2)} == {HOSTILE, f"{HOSTILE} 2"}
    page.locator("#title").click()
    page.keyboard.press("1")
    page.wait_for_selector("#order .text")
    assert page.inner_text("#order .text") in (HOSTILE, f"{HOSTILE} 2")
    page.keyboard.press("2")
    page.keyboard.press("Enter")
    page.wait_for_selector("#saved >> text=Saved as number 2.")
    page.get_by_role("tab", name="Browse").click()
    page.wait_for_selector("#work >> text=1 items ranked by more than one person")
    page.wait_for_selector("#judgements >> text=<script> >> visible=true")
    page.locator("#number input").fill("1")
    page.click("#fetch")
    page.wait_for_selector("#item .reply")
    assert HOSTILE in page.inner_text("#item")
    page.wait_for_timeout(500)
    assert page.title() != "owned"
    assert page.locator("#cards img, #cards script, #item img, #item script, #judgements img, #work img").count() == 0


def test_the_page_fits_a_narrow_screen_is_dark_where_that_is_wanted_and_speaks_chinese(server, browse):
    running = server("--repeat_share=0", "--seed=3")
    for width, scheme, name in ((390, "light", "annotate-narrow"), (1280, "dark", "annotate-dark-zh")):
        page = browse(running.url, viewport={"width": width, "height": 844}, color_scheme=scheme)
        if scheme == "dark":
            page.get_by_text("中文").click()
            page.wait_for_selector("text=哪个回答更好？")
            page.get_by_role("tab", name="排序").wait_for()
        name_yourself(page, "安")
        page.click("#rank-random")
        page.wait_for_selector("#cards .card-3 .reply")
        picture(page, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("#cards").bounding_box()["width"] > (350 if width == 390 else 1100)  # little is margin
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == (scheme == "dark")
