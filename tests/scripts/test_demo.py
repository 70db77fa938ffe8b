"""The demo pages in a browser. With RLHF_STAGES_SCREENSHOTS=folder the test writes its pictures there; those in
docs/images were taken the same way of what `make demo` makes."""

import json
import re
import shutil
import time
from types import SimpleNamespace

import httpx
import pytest

from rlhf_stages.checkpoint import Checkpoints
from rlhf_stages.data.dialogue import CHAT_TEMPLATE
from rlhf_stages.feedback import accounts

from helpers import load_script, make_tokenizer, save_causal, save_classifier
from served import Server, Thread, open_pages, picture

pytestmark = pytest.mark.slow
HOSTILE = "<img src=x onerror=\"document.title='owned'\"> **b** &amp;"


def experiment(folder, stage, steps, template=CHAT_TEMPLATE, **changes):
    """An experiment with a random model that can write long replies."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template

    def write(target, seed):
        save = save_classifier if stage == "rm" else save_causal
        save(target, "llama", seed=seed, tokenizer=tokenizer, **changes)
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))

    folder.mkdir(parents=True)
    content = {"stage": stage, "data_args": {"chat_template": template}, "gen_args": {"temperature": 0.5, "top_k": 7}}
    (folder / "args.json").write_text(json.dumps(content))
    (folder / "checkpoints").mkdir()
    for step in steps:
        Checkpoints(folder / "checkpoints").publish(step, [lambda target, step=step: write(target, step)])
    (folder / "latest").write_text(f"step-{steps[-1]:06d}\n")
    return folder


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    root = tmp_path_factory.mktemp("demo") / "experiments"
    named = lambda stage, *rest, **more: experiment(root / "toy" / "demo" / stage, stage, *rest, **more)  # noqa: E731
    ppo, sft, rm = named("ppo", [1, 2]), named("sft", [3]), named("rm", [4])
    broken = experiment(root / "toy" / "broken" / "sft", "sft", [5], vocab_size=20)
    other = experiment(root / "play" / "demo" / "sft", "sft", [6])
    return SimpleNamespace(root=root, ppo=ppo, sft=sft, rm=rm, broken=broken, other=other)


@pytest.fixture
def server(tmp_path):
    """Starts a script with these flags, in a thread or, with a folder for its log, a process; all are stopped."""
    started = []

    def start(script, *flags, process_in=None):
        flags = [*map(str, flags), "--device=cpu"]
        started.append(Server(script, process_in, *flags) if process_in else Thread(script, *flags))
        return started[-1].start().url

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def browse(browser):
    with open_pages(browser) as opened:

        def ready(url, box="message", is_empty=False, **options):
            page = opened(url, **options)
            page.wait_for_selector(f"#box-{box} textarea")
            for name in () if is_empty else ("experiment", "checkpoint"):
                page.wait_for_function(f"document.querySelector('#{name} input').value !== ''")
            return page

        yield ready


def choose(page, where, text):
    """Type into a dropdown and take that."""
    page.fill(f"{where} input", text)
    page.keyboard.press("Enter")


def choose_checkpoint(page, name):
    """Take one from the list."""
    page.click("#checkpoint input")
    page.get_by_role("option", name=name).click()
    assert page.input_value("#checkpoint input") == name


def set_length(page, tokens):
    """Open the settings and ask for replies of so many tokens."""
    page.click("#settings button")
    page.wait_for_selector("#most input[type=number]")
    page.wait_for_timeout(500)  # a number typed while the settings open is lost
    for slider in ("#least", "#most"):
        page.fill(f"{slider} input[type=number]", str(tokens))
        page.keyboard.press("Tab")


def write(page, text, box="message"):
    page.fill(f"#box-{box} textarea", text)
    page.click("#send")


def wait_done(page, turns, replies=1):
    """Until so many turns are there, and the last has all its replies, each with its facts."""
    page.wait_for_function(
        f"document.querySelectorAll('#talk .turn').length === {turns}"
        f" && document.querySelectorAll('#talk .turn:last-child .facts').length === {replies}"
        " && !document.querySelector('#talk .caret')"
    )
    page.wait_for_selector("#send", state="visible")


def assert_inside(page):
    """What is said is longer than its box, and scrolls in it: above it stands what belongs there."""
    talk = page.locator("#talk").bounding_box()
    assert page.locator("#talk .turn").first.bounding_box()["y"] < talk["y"]
    page.evaluate("document.querySelector('#talk').scrollIntoView({block: 'end'})")
    above = "document.elementFromPoint(box.left + box.width * 0.7, box.top - 8)?.closest('#talk')"
    assert page.evaluate(
        f"(() => {{ const box = document.querySelector('#talk').getBoundingClientRect(); return !{above} }})()"
    )


def last(page, k=0):
    return page.locator("#talk .turn").last.locator(".reply .text").nth(k).inner_text()


def test_load_send_stop_switch_compare_and_regenerate(server, browse, material, tmp_path):
    long = ["--max_new_tokens=2000", "--min_new_tokens=2000"]
    flags = [material.ppo, f"--log_dir={material.root}", f"--rm_experiment_dir={material.rm}", *long]
    url = server("scripts/demo.py", *flags, process_in=tmp_path)
    page = browse(url)
    assert page.input_value("#checkpoint input") == "step-000002 · latest"
    page.click("#load")
    page.wait_for_selector("#note >> text=million parameters on cpu")

    write(page, HOSTILE)
    lengths = set()
    page.wait_for_selector("#talk .reply .caret")
    for _ in range(20):
        lengths.add(len(last(page)))
        page.wait_for_timeout(50)
    assert len(lengths) > 3  # one after another
    page.click("#stop")
    wait_done(page, 1)
    stopped = page.inner_text("#talk .facts")
    assert "stopped" in stopped
    assert "reward" in stopped
    assert int(re.search(r"(\d+) tokens", stopped)[1]) < 2000
    assert page.inner_text("#talk .person") == HOSTILE
    assert page.locator("#talk img").count() == 0
    assert page.title() != "owned"

    set_length(page, 12)
    assert page.input_value("#seed textarea, #seed input") == ""
    page.fill("#seed textarea, #seed input", "-7")
    page.click("#again")
    page.wait_for_selector("#note >> text=the seed is a whole number from 0, or empty; got '-7'")
    page.fill("#seed textarea, #seed input", "7")
    choose_checkpoint(page, "step-000001")
    write(page, "name the tea")
    wait_done(page, 2)
    assert "step-000001" in page.locator("#talk .name").last.inner_text()
    assert re.search("1[12] tokens", page.locator("#talk .facts").last.inner_text())  # with EOS or without
    before = last(page)
    page.click("#again")
    page.wait_for_timeout(300)
    wait_done(page, 2)
    assert last(page) == before  # the seed is set

    page.click("#compare input")
    choose(page, "#experimentB", str(material.sft))
    page.wait_for_function("document.querySelector('#checkpointB input').value === 'step-000003 · latest'")
    write(page, "name the tea")
    wait_done(page, 3, replies=2)
    names = page.locator("#talk .turn").last.locator(".name").all_inner_texts()
    assert names == ["demo ppo step-000001", "demo sft step-000003"]
    assert last(page, 0) != last(page, 1)
    assert page.locator("#talk .turn").last.locator(".score.best").count() == 1
    picture(page, "demo-comparison")
    assert "different data" not in page.inner_text("#main")
    choose(page, "#experimentB", str(material.other))
    page.wait_for_function("document.querySelector('#checkpointB input').value === 'step-000006 · latest'")
    write(page, "name the tea")
    page.wait_for_selector("#note >> text=These are runs on different data (toy and play)")
    wait_done(page, 4, replies=2)

    page.click("#load-settings")
    page.wait_for_selector("#note >> text=The settings are those of the experiment")
    page.click("#clear")
    page.wait_for_selector("#talk .empty")
    page.click("#example")
    page.wait_for_function("document.querySelector('#box-message textarea').value.length > 10")
    page.click("#clear")
    page.wait_for_function("document.querySelector('#box-message textarea').value === ''")
    page.click("#send")
    page.wait_for_selector("#note >> text=Message is empty.")


def test_what_goes_wrong_stands_on_the_page_and_the_next_request_works(server, browse, material, tmp_path):
    root = tmp_path / "experiments"
    shutil.copytree(material.root, root)
    ppo = root / "toy" / "demo" / "ppo"
    page = browse(server("scripts/demo.py", ppo, f"--log_dir={root}", "--max_new_tokens=8"))
    choose(page, "#experiment", str(root / "toy" / "broken" / "sft"))
    page.wait_for_function("document.querySelector('#checkpoint input').value === 'step-000005 · latest'")
    started = time.monotonic()
    write(page, "name the tea")
    page.wait_for_selector("#talk .reply .bad >> text=but the model knows 20 tokens")
    assert time.monotonic() - started < 5
    page.wait_for_selector("#send", state="visible")

    choose(page, "#experiment", str(root / "toy" / "demo" / "rm"))
    page.wait_for_selector("#note >> text=is a reward model, which scores texts and cannot talk")
    choose(page, "#experiment", str(ppo))
    page.wait_for_function("document.querySelector('#checkpoint input').value === 'step-000002 · latest'")
    write(page, "name the tea")
    wait_done(page, 2)

    shutil.rmtree(ppo / "checkpoints" / "step-000002")
    write(page, "name the tea")
    page.wait_for_selector("#talk .reply .bad >> text=has no step-000002 (removed since?); it has step-000001")
    page.click("#load")
    page.wait_for_selector("#note >> text=has no step-000002")
    page.wait_for_selector("#send", state="visible")
    choose_checkpoint(page, "step-000001")
    write(page, "name the tea")
    wait_done(page, 4)


def test_who_leaves_in_the_middle_of_a_reply_is_in_nobodys_way(server, browse, material):
    long = ["--max_new_tokens=2000", "--min_new_tokens=2000"]
    url = server("scripts/demo.py", material.sft, f"--log_dir={material.root}", *long)
    page = browse(url)
    write(page, "name the tea")
    page.wait_for_selector("#talk .reply .caret")
    page.close()
    page = browse(url)
    started = time.monotonic()
    write(page, "name the tea")
    page.wait_for_function("document.querySelector('#talk .reply .text')?.innerText.trim().length > 0")
    assert time.monotonic() - started < 10


def test_a_folder_without_experiments_is_said_and_any_layout_fits(server, browse, material, tmp_path):
    page = browse(server("data_prep/helpful_harmless/demo.py", f"--log_dir={tmp_path / 'none'}"), is_empty=True)
    page.wait_for_selector(f"#note >> text=No experiment of sft, dpo, ppo in {tmp_path / 'none'}")
    write(page, "hello")
    page.wait_for_selector("#talk .reply .bad >> text=no experiment is chosen")
    url = server("scripts/demo.py", material.sft, f"--log_dir={material.root}", "--max_new_tokens=8")
    for width, scheme, name in ((390, "light", "demo-phone"), (1280, "dark", "demo-dark")):
        page = browse(url, viewport={"width": width, "height": 844}, color_scheme=scheme)
        write(page, "name the tea")
        wait_done(page, 1)
        picture(page, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("#talk").bounding_box()["width"] > (350 if width == 390 else 800)  # little is margin
        write(page, "name the tea " * 60)
        wait_done(page, 2)
        assert_inside(page)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == (scheme == "dark")


def test_only_users_of_the_file_come_in_and_load_what_the_page_offers(server, browser, material, tmp_path):
    users = tmp_path / "users"
    accounts.add_user(users, "ann", "correct horse")
    flags = [f"--log_dir={material.root}", "--max_new_tokens=8", f"--auth_file={users}"]
    url = server("scripts/demo.py", material.ppo, *flags)
    with httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/config").status_code == 401
        assert client.post("/gradio_api/queue/join", json={"data": [], "fn_index": 0}).status_code == 401
    with open_pages(browser) as opened:
        page = opened(url)
        for name, password in (("ann", "wrong horse"), ("bob", "correct horse")):
            log_in(page, name, password)
            page.wait_for_selector("text=Incorrect Credentials")
            assert page.locator("#talk").count() == 0
            page.reload()
        log_in(page, "ann", "correct horse")
        page.wait_for_selector("#box-message textarea")
        page.wait_for_function("document.querySelector('#checkpoint input').value !== ''")
        choose(page, "#experiment", str(tmp_path))
        page.wait_for_selector("#note >> text=is not among the experiments that this page offers")
        choose(page, "#experiment", str(material.ppo))
        page.wait_for_function("document.querySelector('#checkpoint input').value !== ''")
        write(page, "name the tea")
        wait_done(page, 1)
        stranger = opened(url)  # has no cookie
        stranger.wait_for_selector("input[type=password]")
        assert stranger.locator("#talk").count() == 0


def log_in(page, name, password):
    page.wait_for_selector("input[type=password]")
    page.fill("input:not([type=password])", name)
    page.fill("input[type=password]", password)
    page.get_by_role("button", name="Login").click()


def test_a_post_is_summed_up_in_the_format_of_the_data(server, browse, tmp_path):
    prepare = load_script("data_prep/summarization/prepare_data.py")
    experiment(tmp_path / "runs" / "demo" / "sft", "sft", [1], prepare.CHAT_TEMPLATE)
    page = browse(
        server("data_prep/summarization/demo.py", f"--log_dir={tmp_path / 'runs'}", "--max_new_tokens=8"), "post"
    )
    page.fill("#box-subreddit input, #box-subreddit textarea", "r/tea")
    page.fill("#box-title input, #box-title textarea", "Red or green?")
    write(page, "I like both.\nWhich one?", "post")
    wait_done(page, 1)
    wanted = "SUBREDDIT: r/tea\nTITLE: Red or green?\nPOST: I like both.\nWhich one?"
    assert page.inner_text("#talk .person") == wanted
    page.click("#example")
    page.wait_for_function("document.querySelector('#box-post textarea').value.startsWith('I have ridden')")
    page.click("#send")
    wait_done(page, 2)
    picture(page, "demo-summary")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    post = page.locator("#box-post textarea").bounding_box()
    assert post["width"] > 250  # as wide as the screen; the button is below
    assert page.locator("#send").bounding_box()["y"] > post["y"] + post["height"]
    assert_inside(page)


def test_the_form_and_the_data_agree_on_a_post(monkeypatch):
    monkeypatch.syspath_prepend("data_prep/summarization")
    prepare, demo = (load_script(f"data_prep/summarization/{name}.py") for name in ("prepare_data", "demo"))
    assert demo.compose(*demo.split(prepare.as_prompt(prepare.POST))) == prepare.POST
    assert demo.compose("r/a", " b ", "c\n") == "SUBREDDIT: r/a\nTITLE: b\nPOST: c"
    assert demo.split("just a text\nTL;DR:") == ("", "", "just a text")
