import pytest

from rlhf_stages.data import readers
from rlhf_stages.data.rank_lists import RankList, read_rank_lists
from rlhf_stages.data.readers import BadLine


def read(tmp_path, content, **options):
    path = tmp_path / "dev.tsv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_rank_lists(path, **options))


def test_lists_of_any_length_best_first(tmp_path):
    content = '\ufeff好吃\t一般\t差\r\n\n"a" b\tc\rd\nlast\tline'
    assert read(tmp_path, content) == [
        RankList(1, "", ("好吃", "一般", "差")),
        RankList(3, "", ('"a" b', "c\rd")),  # nothing is quoted, and only \n ends a line
        RankList(4, "", ("last", "line")),
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"alone", "a list of one"),
        (b"a\t\tb", "an empty text"),
        (b"a\tb\t ", "an empty text"),
        (b"a\tb\ta ", "the same text twice"),
        (b"a\t\xff", "not UTF-8"),
    ],
)
def test_a_line_that_is_no_list_is_named_with_its_reason(tmp_path, line, why):
    assert read(tmp_path, b"x\ty\n" + line + b"\nz\tw\n") == [
        RankList(1, "", ("x", "y")),
        BadLine(2, why),
        RankList(3, "", ("z", "w")),
    ]


def test_a_prompt_is_taken_off_where_each_text_has_it(tmp_path):
    found = read(tmp_path, "刚收到货，好\t刚收到货，差\n刚收到货，好\t差\n", prompt="刚收到货，")
    assert found == [RankList(1, "刚收到货，", ("好", "差")), RankList(2, "刚收到货，", ("刚收到货，好", "差"))]


def test_a_line_longer_than_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_LINE", 8)
    assert read(tmp_path, "a\tb\n" + "x" * 100 + "\nc\td\n")[1:] == [
        BadLine(2, readers.TOO_LONG),
        RankList(3, "", ("c", "d")),
    ]


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*gone.tsv; expected ranked lists"):
        list(read_rank_lists(tmp_path / "gone.tsv"))


def test_the_real_lists(shared_data):
    found = list(read_rank_lists(shared_data / "zh_sentiment_rank" / "dev.tsv"))
    assert all(isinstance(row, RankList) for row in found)
    assert (len(found), {len(row.responses) for row in found}) == (3082, {4})
