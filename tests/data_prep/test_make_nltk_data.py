"""WordNet for NLTK, fetched by programs that are scripted here."""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import load_script

PAGE = (
    "text\n00\tadj.all\tall adjective clusters\n01\tnoun.person  \tpeople\n02\tverb.body\tof grooming\n03\tadv.all\tx\n"
)


@pytest.fixture
def script(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["make_nltk_data.py"])
    script = load_script("data_prep/wordnet/make_nltk_data.py")
    monkeypatch.setattr(script, "SYSTEM", tmp_path / "share")
    return script


def packages(script, page=PAGE):
    """A stand-in for the programs, which leaves what they would."""
    called = []

    def call(command, folder):
        called.append(command[0])
        if command[0] == "apt-get" and "download" in command:
            (folder / "wordnet-base.deb").touch()
        if command[0] == "dpkg-deb":
            fill(script, Path(command[3]) / "usr/share", page)

    return call, called


def fill(script, share, page=PAGE):
    """The files of both packages."""
    for path in (share / "wordnet", share / "man/man5"):
        path.mkdir(parents=True, exist_ok=True)
    for name in script.FILES:
        if name != "lexnames":
            (share / "wordnet" / name).write_text(name)
    (share / "man/man5/lexnames.5WN.gz").write_bytes(gzip.compress(page.encode()))


def test_installed_packages_need_no_network(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "call", lambda command, folder: pytest.fail(command[0]))
    fill(script, tmp_path / "share")
    script.main()
    assert {path.name for path in (tmp_path / "nltk_data/corpora/wordnet").iterdir()} == set(script.FILES)


@pytest.mark.parametrize("lacks", ["wordnet/index.sense", "man/man5/lexnames.5WN.gz"])
def test_what_is_installed_in_part_is_fetched(script, monkeypatch, tmp_path, lacks):
    call, called = packages(script)
    monkeypatch.setattr(script, "call", call)
    fill(script, tmp_path / "share")
    (tmp_path / "share" / lacks).unlink()
    script.main()
    assert called == ["apt-get", "apt-get", "dpkg-deb"]
    assert {path.name for path in (tmp_path / "nltk_data/corpora/wordnet").iterdir()} == set(script.FILES)


def test_from_packages_with_the_file_that_they_lack(script, monkeypatch, tmp_path, capsys):
    call, called = packages(script)
    monkeypatch.setattr(script, "call", call)
    script.main()
    folder = tmp_path / "nltk_data/corpora/wordnet"
    assert (folder / "lexnames").read_text() == "00\tadj.all\t3\n01\tnoun.person\t1\n02\tverb.body\t2\n03\tadv.all\t4\n"
    assert (folder / "index.sense").read_text() == "index.sense"
    assert {path.name for path in folder.iterdir()} == set(script.FILES)
    assert called == ["apt-get", "apt-get", "dpkg-deb"]
    script.main()
    assert called == ["apt-get", "apt-get", "dpkg-deb"]
    assert "is there" in capsys.readouterr().out


def test_where_nothing_can_be_fetched_the_message_says_why(script, monkeypatch, tmp_path):
    def call(command, folder):
        if command[0] == "apt-get":
            raise FileNotFoundError("no apt-get")
        raise subprocess.CalledProcessError(1, command, stderr="first line\nno network\n")

    monkeypatch.setattr(script, "call", call)
    with pytest.raises(ValueError, match="from_debian: 'no apt-get'; from_nltk: 'no network'"):
        script.main()
    assert not (tmp_path / "nltk_data/corpora/wordnet").exists()


def test_a_manual_page_of_another_form(script):
    for page in ("", PAGE.replace("02", "05")):
        with pytest.raises(ValueError, match="lists no lexicographer files"):
            script.lexnames(page)
