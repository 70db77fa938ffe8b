#!/usr/bin/env python3
"""Fetch WordNet, which METEOR needs, into a folder that NLTK reads.

From Debian's packages wordnet-base and wordnet-sense-index, as they are installed or else fetched and unpacked in a
temporary folder; where there is no apt-get, from NLTK's own downloader.
"""

import gzip
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlhf_stages.args import NltkDataArgs
from rlhf_stages.cli import parse, run

PACKAGES = ("wordnet-base", "wordnet-sense-index")
SYSTEM = Path("/usr/share")
WANTED = ("*.exc", "data.*", "index.*", "cntlist.rev")
# what NLTK opens
FILES = [f"{kind}.{part}" for kind in ("data", "index") for part in ("noun", "verb", "adj", "adv")]
FILES += ["index.sense", "cntlist.rev", "lexnames", *(f"{part}.exc" for part in ("noun", "verb", "adj", "adv"))]
CATEGORIES = {"noun": 1, "verb": 2, "adj": 3, "adv": 4}


def main() -> None:
    """Fetch, unless all of it is there."""
    (args,) = parse(NltkDataArgs, description=__doc__)
    folder = Path(args.destination_dir) / "corpora" / "wordnet"
    if is_whole(folder):
        print(f"{folder} is there")
        return
    problems = []
    for fetch in (from_installed, from_debian, from_nltk):
        try:
            fetch(folder)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            said = getattr(error, "stderr", None) or str(error)
            problems.append(f"{fetch.__name__}: {said.strip().splitlines()[-1] if said.strip() else error!r}")
        if is_whole(folder):
            print(f"wrote {folder}")
            return
    raise ValueError(f"WordNet could not be fetched ({'; '.join(problems)}); put its files into {folder} by hand")


def is_whole(folder: Path) -> bool:
    """Whether every file that NLTK opens is there."""
    return all((folder / name).is_file() for name in FILES)


def from_installed(folder: Path) -> None:
    """Copy what is installed."""
    copy_files(SYSTEM, folder)


def from_debian(folder: Path) -> None:
    """Download and unpack the packages in a temporary folder, and copy what NLTK reads."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / "lists" / "partial").mkdir(parents=True)  # lists of our own: root may never have fetched any
        apt = ["apt-get", "-qq", f"-oDir::State::Lists={scratch / 'lists'}", "-oAPT::Sandbox::User="]
        call([*apt, "update"], scratch)
        call([*apt, "download", *PACKAGES], scratch)
        for package in scratch.glob("*.deb"):
            call(["dpkg-deb", "-x", str(package), str(scratch / "files")], scratch)
        copy_files(scratch / "files" / "usr" / "share", folder)


def copy_files(share: Path, folder: Path) -> None:
    """Copy what NLTK reads of the packages' files; nothing where the manual page is missing."""
    names = lexnames(gzip.decompress((share / "man" / "man5" / "lexnames.5WN.gz").read_bytes()).decode())
    temporary = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for pattern in WANTED:
        for file in (share / "wordnet").glob(pattern):
            shutil.copy(file, temporary)
    (temporary / "lexnames").write_text(names, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def lexnames(page: str) -> str:
    """The file `lexnames`, which the packages lack, from its manual page: number, name and word class by line."""
    rows = re.findall(r"^(\d\d)\t((noun|verb|adj|adv)\.\w+) *\t", page, re.MULTILINE)
    if [int(number) for number, *_ in rows] != list(range(len(rows))) or not rows:
        raise ValueError("the manual page lexnames(5WN) lists no lexicographer files")
    return "".join(f"{number}\t{name}\t{CATEGORIES[kind]}\n" for number, name, kind in rows)


def from_nltk(folder: Path) -> None:
    """NLTK's own downloader, in a process of its own, as it prints what goes wrong."""
    code = f"import nltk, sys; sys.exit(not nltk.download('wordnet', download_dir={str(folder.parents[1])!r}))"
    call([sys.executable, "-c", code], Path())
    archive = folder.with_suffix(".zip")
    if archive.is_file() and not folder.is_dir():
        shutil.unpack_archive(archive, folder.parent)


def call(command: Sequence[str], folder: Path) -> None:
    """Run a program; raises CalledProcessError with what it said, TimeoutExpired, or OSError if it is not there."""
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=300)


if __name__ == "__main__":
    run(main)
