"""What people said of replies, in one SQLite file.

    items        a prompt and its replies in full, where they came from, and when
    judgements   what a person said of an item; a row per revision, and no row is ever changed or removed
    rankings, scores   views: the newest revision of each judgement that is not deleted

The file is in WAL mode with `synchronous=FULL`: what `save`, `edit` and `delete` return for is on the disk, and a
process that is killed loses nothing of it. Each of them takes a token that the caller makes up once per intention:
called again with the same token (a double click, a request that is sent again after a crash) it returns what was stored
the first time. An edit names the revision that it was made from and is refused if there is a newer one, so nobody
overwrites what they have not seen.
"""

import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_stages.feedback.records import (
    COLUMNS,
    JUDGE,
    VERDICTS,
    Item,
    Judgement,
    Opinion,
    Row,
    check,
    dump,
    item_of,
    judgement_of,
)
from rlhf_stages.feedback.wording import Refusal

BUSY_SECONDS = 5.0  # How long a save waits for another program's lock
_APPLICATION_ID, _VERSION = 0x524C4846, 1  # "RLHF"
_CURRENT = "j.revision = (SELECT max(revision) FROM judgements WHERE id = j.id) AND NOT j.deleted"
_WITH = "FROM items WHERE json_extract(settings, ?) = ?"
_SCHEMA = f"""
CREATE TABLE items (
    id INTEGER PRIMARY KEY,
    prompt TEXT NOT NULL,
    replies TEXT NOT NULL,   -- a JSON list
    model TEXT NOT NULL,
    digest TEXT NOT NULL,    -- SHA-256 of its weights
    settings TEXT NOT NULL,  -- a JSON object: how the replies were sampled
    created TEXT NOT NULL
) STRICT;
CREATE TABLE judgements (
    id INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    item INTEGER NOT NULL REFERENCES items (id),
    annotator TEXT NOT NULL,
    verdict TEXT NOT NULL CHECK (verdict IN {VERDICTS}),
    ranks TEXT CHECK ((ranks IS NOT NULL) = (verdict = 'ranked')),  -- a JSON list, a rank per reply, 1 is the best
    reply INTEGER CHECK ((reply IS NOT NULL) = (verdict = 'scored')),
    score REAL CHECK ((score IS NOT NULL) = (verdict = 'scored')),
    seconds REAL NOT NULL,   -- from when the person saw the replies
    token TEXT NOT NULL UNIQUE,
    author TEXT NOT NULL,    -- of this revision
    created TEXT NOT NULL,
    deleted INTEGER NOT NULL CHECK (deleted IN (0, 1)),
    PRIMARY KEY (id, revision)
) STRICT;
CREATE INDEX judgements_of_items ON judgements (item, annotator);
CREATE VIEW rankings AS SELECT * FROM judgements AS j WHERE {_CURRENT} AND verdict != 'scored';
CREATE VIEW scores AS SELECT * FROM judgements AS j WHERE {_CURRENT} AND verdict = 'scored';
"""


class Store:
    """The file, opened by one process for all its threads; other processes may have it open too.

    Raises:
        ValueError: the file is something else, or of another version. OSError: it cannot be made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            os.close(os.open(self.path, os.O_CREAT | os.O_WRONLY, 0o600))  # names of people, and what they said
        self._lock = threading.Lock()
        self._db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.create_function("lower", 1, str.lower, deterministic=True)  # SQLite's own knows ASCII alone
            self._create()
        except sqlite3.Error as error:
            self._db.close()
            raise ValueError(f"{self.path} cannot be used as a feedback database ({error})") from None

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def add_item(
        self, prompt: str, replies: Sequence[str], model: str, digest: str, settings: Mapping[str, Any]
    ) -> Item:
        """Store a prompt with its replies.

        Raises:
            Refusal: it cannot be stored.
        """
        with self._transaction() as db:
            number = _insert_item(db, prompt, replies, model, digest, settings)
        return self.item(number)

    def add_missing(
        self, name: str, rows: Sequence[tuple[str, Sequence[str]]], model: str, digest: str, settings: Mapping[str, Any]
    ) -> list[Item]:
        """Store those rows (prompt, replies) that come after as many as share the setting `name`; all that share it.

        Raises:
            Refusal: they cannot be stored; then none of them is.
        """
        with self._transaction() as db:
            (count,) = db.execute(f"SELECT count(*) {_WITH}", (f"$.{name}", settings[name])).fetchone()
            for prompt, replies in rows[count:]:
                _insert_item(db, prompt, replies, model, digest, settings)
        return self.items_with(name, settings[name])

    def item(self, number: int) -> Item:
        """The item of a number. Raises Refusal if there is none."""
        rows = self._select("SELECT * FROM items WHERE id = ?", number)
        if not rows:
            raise Refusal("no_item", number=number)
        return item_of(rows[0])

    def items_with(self, name: str, value: str) -> list[Item]:
        """The items among whose settings is this one, the first first."""
        rows = self._select(f"SELECT * {_WITH} ORDER BY id", f"$.{name}", value)
        return [item_of(row) for row in rows]

    def save(self, item: int, annotator: str, opinion: Opinion, seconds: float, token: str) -> Judgement:
        """Store what a person says of an item; it is on the disk when this returns.

        Raises:
            Refusal: this person has judged the item before, the opinion does not fit the item, or it cannot be stored.
        """
        check(opinion, self.item(item))
        with self._transaction() as db:
            if earlier := _of_token(db, token):
                return earlier
            sql = (
                f"SELECT id FROM judgements AS j WHERE {_CURRENT} AND item = ? AND annotator = ?"
                " AND (verdict = 'scored') = ? AND reply IS ?"
            )
            found = db.execute(sql, (item, annotator, opinion.verdict == "scored", opinion.reply)).fetchone()
            if found:
                raise Refusal("judged_before", number=found[0])
            (number,) = db.execute("SELECT coalesce(max(id), 0) + 1 FROM judgements").fetchone()
            judgement = Judgement(number, 1, item, annotator, opinion, max(seconds, 0.0), annotator, _now(), False)
            return _insert(db, judgement, token)

    def edit(self, number: int, revision: int, opinion: Opinion, author: str, token: str) -> Judgement:
        """Store another opinion in place of one; the old one stays as history.

        Raises:
            Refusal: it was changed or deleted since `revision`, the opinion does not fit, or it cannot be stored.
        """
        return self._revise(number, revision, opinion, author, token)

    def delete(self, number: int, revision: int, author: str, token: str) -> Judgement:
        """Mark an opinion as deleted; it stays as history. Raises as `edit` does."""
        return self._revise(number, revision, None, author, token)

    def _revise(self, number: int, revision: int, opinion: Opinion | None, author: str, token: str) -> Judgement:
        with self._transaction() as db:
            if earlier := _of_token(db, token):
                return earlier
            sql = f"SELECT {COLUMNS} FROM judgements WHERE id = ? ORDER BY revision DESC LIMIT 1"
            row = db.execute(sql, (number,)).fetchone()
            newest = None if row is None else judgement_of(row)
            if newest is None or newest.deleted:
                raise Refusal("gone", number=number)
            if newest.revision != revision:
                raise Refusal("stale", number=number, author=newest.author, revision=newest.revision)
            if opinion is not None:
                check(opinion, item_of(db.execute("SELECT * FROM items WHERE id = ?", (newest.item,)).fetchone()))
                if (opinion.verdict, opinion.reply) != (newest.opinion.verdict, newest.opinion.reply) and (
                    "scored" in (opinion.verdict, newest.opinion.verdict)
                ):
                    raise Refusal("other_kind")
            changed = Judgement(
                number, revision + 1, newest.item, newest.annotator, opinion or newest.opinion, newest.seconds,
                author, _now(), opinion is None,
            )  # fmt: skip
            return _insert(db, changed, token)

    def judgements(
        self, annotator: str | None = None, verdict: str | None = None, text: str = "", limit: int = -1
    ) -> list[tuple[Judgement, Item]]:
        """What is stored and not deleted, newest first, with its items; `text` is looked for in prompt and replies."""
        names = ", ".join(f"j.{name}" for name in COLUMNS.split(", "))
        found = "instr(lower(i.prompt), ?) OR instr(lower(i.replies), ?)"
        sql = (
            f"SELECT {names}, i.* FROM judgements AS j JOIN items AS i ON i.id = j.item WHERE {_CURRENT}"
            f" AND (? IS NULL OR annotator = ?) AND (? IS NULL OR verdict = ?) AND (? = '' OR {found})"
            " ORDER BY j.id DESC LIMIT ?"
        )
        text = text.lower()
        rows = self._select(
            sql, annotator, annotator, verdict, verdict, text, text, json.dumps(text, ensure_ascii=False)[1:-1], limit
        )
        size = len(COLUMNS.split(", "))
        return [(judgement_of(row[:size]), item_of(row[size:])) for row in rows]

    def history(self, number: int) -> list[Judgement]:
        """Every revision of a judgement, the first one first."""
        sql = f"SELECT {COLUMNS} FROM judgements WHERE id = ? ORDER BY revision"
        return [judgement_of(row) for row in self._select(sql, number)]

    def repeat_for(self, annotator: str) -> Item | None:
        """An item that others ranked and this person has not seen; of those, one with the fewest rankings."""
        sql = (
            "SELECT i.* FROM items AS i JOIN rankings AS r ON r.item = i.id WHERE r.verdict = 'ranked'"
            f" AND r.annotator NOT LIKE '{JUDGE}%' AND i.id NOT IN (SELECT item FROM judgements WHERE annotator = ?)"
            " GROUP BY i.id ORDER BY count(*), random() LIMIT 1"
        )
        rows = self._select(sql, annotator)
        return item_of(rows[0]) if rows else None

    def _create(self) -> None:
        with self._transaction() as db:
            marks = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
            if marks == [0, 0] and not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in _SCHEMA.split(";\n"):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {_VERSION}")
            elif marks != [_APPLICATION_ID, _VERSION]:
                raise sqlite3.DatabaseError(f"it is another program's, or of another version: {marks}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """One writer at a time; committed, and on the disk, or nothing of it."""
        with self._lock, _translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _select(self, sql: str, *values: Any) -> list[Row]:
        with self._lock, _translated():
            return self._db.execute(sql, values).fetchall()


@contextmanager
def _translated() -> Iterator[None]:
    """A lock that others hold, a full disk: what a person can do something about, as a sentence."""
    try:
        yield
    except UnicodeEncodeError:
        raise Refusal("not_text") from None
    except sqlite3.OperationalError as error:
        busy = (error.sqlite_errorcode or 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        raise Refusal("busy" if busy else "not_stored", reason=str(error)) from error


def _insert_item(
    db: sqlite3.Connection, prompt: str, replies: Sequence[str], model: str, digest: str, settings: Mapping[str, Any]
) -> int:
    values = (prompt, dump(list(replies)), model, digest, dump(dict(settings)), _now())
    sql = "INSERT INTO items (prompt, replies, model, digest, settings, created) VALUES (?, ?, ?, ?, ?, ?)"
    number = db.execute(sql, values).lastrowid
    assert number is not None  # for the type checker: an INSERT has one
    return number


def _insert(db: sqlite3.Connection, judgement: Judgement, token: str) -> Judgement:
    o = judgement.opinion
    values = (
        judgement.id, judgement.revision, judgement.item, judgement.annotator, o.verdict,
        None if o.ranks is None else dump(list(o.ranks)), o.reply, o.score, judgement.seconds, judgement.author,
        judgement.created, int(judgement.deleted), token,
    )  # fmt: skip
    db.execute(f"INSERT INTO judgements ({COLUMNS}, token) VALUES ({', '.join('?' * len(values))})", values)
    return judgement


def _of_token(db: sqlite3.Connection, token: str) -> Judgement | None:
    row = db.execute(f"SELECT {COLUMNS} FROM judgements WHERE token = ?", (token,)).fetchone()
    return None if row is None else judgement_of(row)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
