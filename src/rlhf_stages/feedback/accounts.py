"""Who may use the annotation page: a file of names and salted scrypt hashes of their passwords, a line each."""

import base64
import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from rlhf_stages.files import write_text

MIN_PASSWORD = 8  # Characters
_COST = {"n": 2**14, "r": 8, "p": 1}  # 16 MiB and some 50 ms for each guess (RFC 7914, section 2)
_NAME = re.compile(r"[\w.@+-]{1,60}")


def add_user(path: Path, name: str, password: str) -> None:
    """Put a user into the file, in place of one of the same name; only its owner can read the file.

    Raises:
        ValueError: the name or the password will not do, or the file is none of users.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"--add_user {name!r}: a name has 1 to 60 letters, digits or any of . _ @ + -")
    if len(password) < MIN_PASSWORD:
        raise ValueError(f"a password has at least {MIN_PASSWORD} characters, this one {len(password)}")
    users = read_users(path) if path.exists() else {}
    salt = secrets.token_bytes(16)
    users[name] = (salt, _hash(password, salt))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
    mask = os.umask(0o077)
    try:
        write_text(path, (":".join((who, *map(_text, pair))) + "\n" for who, pair in sorted(users.items())))
    finally:
        os.umask(mask)


def read_users(path: Path) -> dict[str, tuple[bytes, bytes]]:
    """Salt and hash of each user.

    Raises:
        FileNotFoundError: no such file. ValueError: it holds something else, or nobody.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}; make it with --add_user NAME --auth_file {path} of annotate.py")
    users = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        name, *parts = line.split(":")
        try:
            salt, digest = (base64.b64decode(part, validate=True) for part in parts)
        except ValueError:
            salt = digest = b""
        if not _NAME.fullmatch(name) or len(salt) != 16 or len(digest) != 32:
            raise ValueError(f"{path}, line {number}: expected name:salt:hash, as --add_user writes it")
        users[name] = (salt, digest)
    if not users:
        raise ValueError(f"{path} names nobody; add somebody with --add_user")
    return users


def is_password(users: dict[str, tuple[bytes, bytes]], name: str, password: str) -> bool:
    """Whether this is the password of this user; an unknown name takes as long as a wrong password."""
    salt, digest = users.get(name, (b"\0" * 16, b""))
    return hmac.compare_digest(_hash(password, salt), digest)


def _hash(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode("utf-8", "replace"), salt=salt, dklen=32, maxmem=2**26, **_COST)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
