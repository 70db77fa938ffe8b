import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf_stages.feedback.records import Opinion
from rlhf_stages.feedback.store import Store
from rlhf_stages.feedback.wording import Refusal

REPLIES = ("a\tb", "c\nd\r\n", "<script>alert(1)</script>", "好 \0 \u2028")
RANKED = Opinion("ranked", (2, 1, 3, 3))


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "deep" / "feedback.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def item(store):
    return store.add_item("why?\n\tbecause", REPLIES, "model", "abc", {"temperature": 0.5})


def again(store):
    """The same file in another connection, as another process has it."""
    return Store(store.path)


def test_what_is_saved_is_what_another_process_reads(store, item):
    saved = store.save(item.id, "ann", RANKED, 2.5, "t1")
    assert (saved.id, saved.revision, saved.deleted, saved.author) == (1, 1, False, "ann")
    other = again(store)
    assert other.judgements() == [(saved, item)]
    assert (item.prompt, item.replies) == ("why?\n\tbecause", REPLIES)
    assert (item.model, item.digest, item.settings) == ("model", "abc", {"temperature": 0.5})
    other.close()


def test_the_file_is_durable_and_private(store):
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    assert store.path.stat().st_mode & 0o077 == 0


def test_a_token_saves_once(store, item):
    first = store.save(item.id, "ann", RANKED, 1.0, "t")
    assert store.save(item.id, "ann", Opinion("all_bad"), 9.0, "t") == first
    assert len(store.judgements()) == 1
    changed = store.edit(1, 1, Opinion("all_bad"), "bob", "t2")
    assert store.edit(1, 1, Opinion("skipped"), "bob", "t2") == changed  # not stale: it is the same click
    assert store.delete(1, 2, "bob", "t3") == store.delete(1, 2, "bob", "t3")


def test_a_double_click_from_many_threads_saves_once(store, item):
    barrier = threading.Barrier(8)

    def click(_):
        barrier.wait()
        return store.save(item.id, "ann", RANKED, 1.0, "t")

    with ThreadPoolExecutor(8) as pool:
        results = set(pool.map(click, range(8)))
    assert len(results) == len(store.judgements()) == 1


def test_a_person_judges_an_item_once(store, item):
    store.save(item.id, "ann", RANKED, 1.0, "t1")
    with pytest.raises(Refusal, match="judged this item before, as number 1"):
        store.save(item.id, "ann", RANKED, 1.0, "t2")
    assert store.save(item.id, "bob", RANKED, 1.0, "t3").id == 2
    # a score is another matter, of one reply each
    for reply in range(2):
        store.save(item.id, "ann", Opinion("scored", reply=reply, score=0.5), 1.0, f"s{reply}")
    with pytest.raises(Refusal, match="judged this item before, as number 3"):
        store.save(item.id, "ann", Opinion("scored", reply=0, score=1.0), 1.0, "s9")
    # and once it is deleted, it may be judged anew
    store.delete(1, 1, "ann", "d")
    assert store.save(item.id, "ann", RANKED, 1.0, "t4").id == 5


def test_an_edit_keeps_history_and_refuses_a_stale_revision(store, item):
    store.save(item.id, "ann", RANKED, 1.5, "t1")
    store.edit(1, 1, Opinion("ranked", (1, 2, 3, 4)), "bob", "t2")
    for call in (
        lambda: store.edit(1, 1, Opinion("all_bad"), "ann", "t3"),
        lambda: store.delete(1, 1, "ann", "t4"),
    ):
        with pytest.raises(Refusal, match=r"bob has changed number 1 meanwhile \(revision 2\)"):
            call()
    ((current, _),) = store.judgements()
    assert (current.revision, current.annotator, current.author) == (2, "ann", "bob")
    assert current.opinion.ranks == (1, 2, 3, 4)
    store.delete(1, 2, "cleo", "t5")
    assert store.judgements() == []
    assert [(j.revision, j.opinion.ranks, j.author, j.deleted, j.seconds) for j in store.history(1)] == [
        (1, (2, 1, 3, 3), "ann", False, 1.5),
        (2, (1, 2, 3, 4), "bob", False, 1.5),
        (3, (1, 2, 3, 4), "cleo", True, 1.5),
    ]
    with pytest.raises(Refusal, match="number 1 is deleted"):
        store.edit(1, 3, RANKED, "ann", "t6")
    with pytest.raises(Refusal, match="number 7 is deleted, or never was"):
        store.delete(7, 1, "ann", "t7")


def test_of_two_who_edit_at_once_one_is_refused(store, item):
    store.save(item.id, "ann", RANKED, 1.0, "t")
    other = again(store)
    barrier = threading.Barrier(2)

    def edit(opened, name):
        barrier.wait()
        try:
            return opened.edit(1, 1, Opinion("all_bad"), name, name).revision
        except Refusal as refusal:
            return refusal.key

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(edit, (store, other), ("x", "y")))
    assert sorted(map(str, results)) == ["2", "stale"]
    other.close()


@pytest.mark.parametrize(
    "opinion",
    [
        Opinion("ranked", (1, 2, 3)), Opinion("ranked", (1, 1, 3, 3)), Opinion("ranked", (0, 1, 2, 3)),
        Opinion("ranked"), Opinion("scored", reply=4, score=1.0), Opinion("scored", reply=0, score=float("nan")),
        Opinion("scored", reply=0), Opinion("other"),
    ],
)  # fmt: skip
def test_opinions_that_do_not_fit(store, item, opinion):
    with pytest.raises(Refusal, match="does not fit the replies of item 1"):
        store.save(item.id, "ann", opinion, 1.0, "t")
    with pytest.raises(Refusal, match="no item 5"):
        store.save(5, "ann", RANKED, 1.0, "t")
    store.save(item.id, "ann", RANKED, 1.0, "t")
    with pytest.raises(Refusal):
        store.edit(1, 1, opinion, "ann", "t2")
    assert store.judgements()[0][0].opinion == RANKED


def test_a_ranking_does_not_become_a_score(store, item):
    store.save(item.id, "ann", RANKED, 1.0, "t")
    with pytest.raises(Refusal, match="a score stays a score"):
        store.edit(1, 1, Opinion("scored", reply=0, score=1.0), "ann", "t2")


def test_what_is_no_text_is_refused_and_nothing_is_left_open(store, item):
    with pytest.raises(Refusal, match="no text"):
        store.add_item("\ud800", ["a", "b"], "m", "d", {})
    with pytest.raises(Refusal, match="no text"):
        store.save(item.id, "\udfff", RANKED, 1.0, "t")
    store.save(item.id, "ann", RANKED, 1.0, "t")


def test_filters(store, item):
    other = store.add_item('Say "hi"', ["one", "two"], "m", "d", {})
    store.save(item.id, "ann", RANKED, 1.0, "t1")
    store.save(other.id, "bob", Opinion("skipped"), 1.0, "t2")
    store.save(other.id, "ann", Opinion("scored", reply=1, score=-1.5), 1.0, "t3")
    numbers = lambda **wanted: [j.id for j, _ in store.judgements(**wanted)]  # noqa: E731
    assert numbers() == [3, 2, 1]
    assert numbers(limit=2) == [3, 2]
    assert numbers(annotator="ann") == [3, 1]
    assert numbers(verdict="skipped") == [2]
    assert numbers(text='say "HI"') == [3, 2]
    assert numbers(text="c\nd") == numbers(text="好") == [1]  # in a reply, where JSON escapes it
    assert numbers(text="%") == []
    third = store.add_item("Äpfel?", ["Привет", "x"], "m", "d", {})
    store.save(third.id, "ann", Opinion("skipped"), 1.0, "t4")
    assert numbers(text="äPFEL") == numbers(text="Привет") == [4]  # capitals that are not ASCII


def test_repeats_are_what_others_ranked_the_least_ranked_first(store):
    items = [store.add_item(f"p{n}", ["x", "y"], "m", "d", {}) for n in range(4)]
    ranked = Opinion("ranked", (1, 2))
    assert store.repeat_for("dan") is None
    for who, n in (("ann", 0), ("bob", 0), ("ann", 1)):
        store.save(items[n].id, who, ranked, 1.0, f"{who}{n}")
    store.save(items[2].id, "ann", Opinion("skipped"), 1.0, "skip")
    assert store.repeat_for("dan") == items[1]
    assert store.repeat_for("bob") == items[1]
    assert store.repeat_for("ann") is None
    store.save(items[1].id, "bob", Opinion("skipped"), 1.0, "seen")
    assert store.repeat_for("bob") is None


def test_a_database_that_another_program_holds(store, item):
    store._db.execute("PRAGMA busy_timeout = 50")
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Refusal, match="another program holds the database") as refusal:
        store.save(item.id, "ann", RANKED, 1.0, "t")
    assert refusal.value.in_language("zh").startswith("未保存")
    assert store.judgements() == []  # reading goes on
    other.execute("ROLLBACK")
    other.close()
    assert store.save(item.id, "ann", RANKED, 1.0, "t").id == 1


def test_a_full_disk(store, item):
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(Refusal, match="the database cannot be written"):
        store.add_item("p" * 100_000, ["a", "b"], "m", "d", {})
    store._db.execute("PRAGMA max_page_count = 100000")
    assert store.add_item("p" * 100_000, ["a", "b"], "m", "d", {}).id == item.id + 1  # nothing of the first is there


def test_files_that_are_something_else(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to be looked at " * 100)
    with pytest.raises(ValueError, match=r"notes.txt cannot be used as a feedback database"):
        Store(text)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (x)")
    with pytest.raises(ValueError, match="another program's, or of another version"):
        Store(other)
    newer = Store(tmp_path / "newer.sqlite")
    newer._db.execute("PRAGMA user_version = 2")
    newer.close()
    with pytest.raises(ValueError, match="another version"):
        Store(newer.path)


KILLED = """
import os, sys
from rlhf_stages.feedback.records import Opinion
from rlhf_stages.feedback.store import Store
store = Store(sys.argv[1])
item = store.add_item("p", ["a", "b"], "m", "d", {})
store.save(item.id, "ann", Opinion("ranked", (1, 2)), 1.0, "kept")
with store._transaction() as db:
    db.execute("DELETE FROM judgements")
    print("saved", flush=True)
    os.kill(os.getpid(), 9)
"""


def test_a_killed_process_loses_what_was_not_acknowledged_and_nothing_else(tmp_path):
    path = tmp_path / "f.sqlite"
    run = subprocess.run([sys.executable, "-c", KILLED, str(path)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (-9, "saved\n"), run.stderr
    opened = Store(path)
    assert [j.opinion.ranks for j, _ in opened.judgements()] == [(1, 2)]
    assert opened.save(1, "ann", Opinion("ranked", (2, 1)), 1.0, "kept").opinion.ranks == (1, 2)  # sent again
    opened.close()


def test_views_for_whoever_reads_the_file_with_another_tool(store, item):
    store.save(item.id, "ann", RANKED, 1.0, "t1")
    store.save(item.id, "bob", RANKED, 1.0, "t2")
    store.edit(1, 1, Opinion("all_bad"), "ann", "t3")
    store.delete(2, 1, "bob", "t4")
    store.save(item.id, "bob", Opinion("scored", reply=2, score=2.0), 1.0, "t5")
    with sqlite3.connect(store.path) as db:
        assert db.execute("SELECT id, verdict FROM rankings").fetchall() == [(1, "all_bad")]
        assert db.execute("SELECT id, reply, score FROM scores").fetchall() == [(3, 2, 2.0)]
