import html

import pytest
from tensorboard.plugin_util import markdown_to_safe_html

from rlhf_stages.terminal import first_line, folded, folded_command, printable, without_links


def test_control_characters_are_spelled_out():
    text = "a\x1b[31mred\x07\r\n\tb\x7f\x9b2J\x00"
    assert printable(text) == "a\\x1b[31mred\\x07\\x0d\n\tb\\x7f\\x9b2J\\x00"


@pytest.mark.parametrize(
    ("said", "line"),
    [("no such file\nat all", "no such file"), ("\n out of memory\n", "out of memory"), (" ", "OSError")],
)
def test_what_an_error_says_in_a_line(said, line):
    assert first_line(OSError(said)) == line


def test_every_other_text_stays_as_it_is():
    text = "tab\tline\n naïve 答案 𝛑 \xa0 \u200d 👩‍💻"
    assert printable(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "![x](http://a.example/x.png)",
        "[x](http://a.example)",
        "![x][1]\n\n[1]: http://a.example/x.png",
        "<http://a.example>",
        "<img src=http://a.example/x.png>",
        "<script>alert(1)</script>",
        "\\![x](http://a.example/x.png)",
        "&#33;&#91;x&#93;(http://a.example/x.png)",
        "&lt;img src=http://a.example/x.png&gt;",
        "`` ![x](http://a.example/x.png)",
    ],
)
def test_no_text_becomes_a_link_or_an_image_in_tensorboard(text):
    shown = markdown_to_safe_html(without_links(text))
    assert not any(tag in shown for tag in ("<img", "<a", "<script", "href"))
    if "\n" not in text and "`" not in text:
        assert html.unescape(shown) == f"<p>{text}</p>"  # and the reader sees what was said


def test_tensorboard_would_have_shown_the_image():
    assert "<img" in markdown_to_safe_html("![x](http://a.example/x.png)")


def test_lines_are_folded_between_words_and_paths_stay_whole():
    path = "/long-" * 30  # 180 characters, with hyphens at which a line must not break
    text = f"  indented\n{'word ' * 30}{path}\n\nend"
    lines = folded(text).split("\n")
    # 20 words of 4 and 19 spaces are 99 columns; the second line starts with 2 spaces
    assert lines == ["  indented", "word " * 19 + "word", "  " + "word " * 9 + "word", f"  {path}", "", "end"]


def test_a_command_is_folded_so_that_a_shell_takes_it_as_it_was():
    words = [f"--flag_{i}=<value>-{i}" for i in range(20)]
    lines = folded_command(" ".join(["python", *words])).split("\n")
    assert max(map(len, lines)) in range(80, 101)
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert " ".join(line.removesuffix("\\").strip() for line in lines) == " ".join(["python", *words])
    assert folded_command("python a.py") == "  python a.py"
