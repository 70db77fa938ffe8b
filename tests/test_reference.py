"""docs/reference/ says what --help says: `make docs` writes it anew."""

from helpers import ROOT, load_script

FOLDER = ROOT / "docs" / "reference"
reference = load_script("docs/make_reference.py")


def test_every_page_is_what_help_says():
    pages = reference.pages()
    assert {path.name for path in FOLDER.iterdir()} == set(pages), "`make docs` writes the pages"
    for name, text in pages.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"{name} is out of date: `make docs` writes it anew"
        assert " at 0x" not in text, f"{name}: argparse has filled in a % of a help comment"


def test_every_script_has_a_page():
    assert len(reference.scripts()) == len({reference.page_name(script) for script in reference.scripts()})
    assert {"rlhf_sft.md", "rlhf_rm.md", "rlhf_ppo.md", "prepare_data-helpdesk.md"} <= set(reference.pages())
