import collections
import json

import pytest

from rlhf_stages.args import ZhSentimentArgs
from rlhf_stages.data.sources import read_source
from rlhf_stages.data.zh_sentiment import (
    PROMPTS,
    Lists,
    Reviews,
    draw_prompts,
    opening,
    place,
    plain,
    write_labelled,
)

REVIEWS = [
    ("1", "房间很干净，早餐也好吃"),
    ("0", "空调坏了没人修"),
    ("1", "房间很干净, 早餐也好吃！"),  # the first again, but for its marks
    ("0", "送餐太慢，饭都凉了"),
    ("1", "送餐太慢 饭都凉了"),  # and with the other label
    ("1", " "),
    ("2", "味道还行"),
    ("0", "这家店的服务态度很差"),
    ("1", "老板热情，下次再来"),
]
LISTS = "这家店的服务态度很差！\t一般般\n老板热情，下次再来\t还可以\t不好\n"


def args(**changes):
    return ZhSentimentArgs(destination_dir="d", tokenizer_name="t", source="s", rank_lists="r", **changes)


@pytest.fixture
def files(tmp_path):
    """A file of reviews, and one of ranked lists that hold two of them: one word for word, one but for its mark."""
    rows = "".join(f'{label},"{text}"\n' for label, text in REVIEWS)
    (tmp_path / "reviews.csv").write_text("label,review\n" + rows, encoding="utf-8")
    (tmp_path / "lists.tsv").write_text(LISTS, encoding="utf-8")
    return tmp_path


def read(files, **changes):
    settings = args(**{"test_percentage": 0.0, "validation_percentage": 0.0, **changes})
    return Reviews(read_source(str(files / "reviews.csv")), Lists(str(files / "lists.tsv"), settings).lists, settings)


def test_reviews_are_sifted_and_the_reasons_counted(files):
    found = read(files)
    assert [(review.text, review.label) for review in found.reviews] == [
        ("房间很干净，早餐也好吃", "positive"),
        ("空调坏了没人修", "negative"),
    ]
    reasons = {"repeated": 1, "two labels": 1, "no text": 1, "no label": 1, "also in a ranked list": 2}
    assert found.skipped["train"] == reasons
    assert found.in_lists == (1, 2)


def test_the_leak_may_stay(files):
    found = read(files, remove_leak=False)
    assert {"这家店的服务态度很差", "老板热情，下次再来"} < {review.text for review in found.reviews}
    assert "also in a ranked list" not in found.skipped["train"]
    assert found.in_lists == (1, 2)  # counted all the same


@pytest.mark.parametrize(
    ("text", "other"), [("很好，ABC 12！", "很好abc12"), ("好评～", "好评"), ("！！", "！！"), ("ａ", "ａ.")]
)
def test_texts_that_say_the_same(text, other):
    assert plain(text) == plain(other)


def test_marks_alone_are_not_all_the_same():
    assert plain("！！") != plain("？？")


def test_the_splits_are_a_matter_of_the_key_and_the_seed():
    settings = args(test_percentage=0.2, validation_percentage=0.1)
    places = [place(f"评论{number}", settings) for number in range(4000)]
    shares = collections.Counter(split for split, _ in places)
    # a tenth of what is left after the test; four standard deviations of 4,000 draws are 0.025
    for split, share in {"test": 0.2, "validation": 0.08, "train": 0.72}.items():
        assert shares[split] / 4000 == pytest.approx(share, abs=0.03)
    for split in shares:
        halves = collections.Counter(half for of_split, half in places if of_split == split)
        assert halves["a"] / shares[split] == pytest.approx(0.5, abs=0.12)
    assert places == [place(f"评论{number}", settings) for number in range(4000)]
    assert places != [
        place(f"评论{n}", args(test_percentage=0.2, validation_percentage=0.1, seed=1)) for n in range(4000)
    ]


def test_openings_are_the_beginning_and_half_of_a_review_at_most():
    texts = [f"第{number}次来这里，房间安静，服务周到" for number in range(300)]
    lengths = collections.Counter()
    for text in texts:
        prompt, rest = opening(text, args(opening_length=6))
        assert prompt + rest == text
        lengths[len(prompt)] += 1
    assert set(lengths) == {2, 3, 4, 5, 6}
    assert min(lengths.values()) > 300 / 5 / 2
    assert opening("好吃", args()) == ("好", "吃")
    assert opening("好", args()) == ("", "好")


def test_lists_of_any_length_keep_their_order(files):
    lists = Lists(str(files / "lists.tsv"), args(test_percentage=0.0, validation_percentage=0.0))
    assert [(split, record["prompt"], record["responses"]) for split, record in lists] == [
        ("train", "评论：", ("这家店的服务态度很差！", "一般般")),
        ("train", "评论：", ("老板热情，下次再来", "还可以", "不好")),
    ]


def test_a_list_to_train_on_shares_no_text_with_one_that_is_held_out(tmp_path):
    rows = [(f"好评{number}号", f"差评{number}号", f"中评{number % 50}号") for number in range(100)]
    path = tmp_path / "lists.tsv"
    path.write_text("".join("\t".join(row) + "\n" for row in rows) + "一个\n", encoding="utf-8")
    lists = Lists(str(path), args(test_percentage=0.3, validation_percentage=0.0))
    texts = {"train": set(), "test": set()}
    kept = collections.Counter()
    for split, record in lists:
        texts[split] |= set(record["responses"])
        kept[split] += 1
    assert not texts["train"] & texts["test"]
    # each of the 50 texts in the middle stands in two lists
    placed = [place("\n".join(row), args(test_percentage=0.3))[0] == "test" for row in rows]
    parted = [placed[number] != placed[(number + 50) % 100] for number in range(100)]
    dropped = sum(apart and not is_test for apart, is_test in zip(parted, placed, strict=True))
    assert dropped > 5
    assert kept == {"train": 100 - sum(placed) - dropped, "test": sum(placed)}
    assert lists.skipped["train"] == {"a text also in test": dropped, "a list of one": 1}
    assert lists.first_skipped.endswith("line 101: a list of one")
    assert len(list(lists)) == sum(kept.values())
    assert lists.skipped["train"]["a list of one"] == 1  # the second pass counts nothing twice


def test_prompts_are_drawn_uniformly():
    draws = list(draw_prompts(args(stage="prompt", num_prompts=2000)))
    assert collections.Counter(split for split, _ in draws) == {"train": 2000, "validation": 200, "test": 200}
    counts = collections.Counter(record["prompt"] for split, record in draws if split == "train")
    assert set(counts) == set(PROMPTS)
    assert all(abs(count - 500) < 80 for count in counts.values())  # four standard deviations
    assert len({record["key"] for _, record in draws}) == 2400


def test_prompts_of_a_file(tmp_path):
    (tmp_path / "prompts.txt").write_text("\ufeff菜\n\n 酒店 \n", encoding="utf-8")
    settings = args(stage="prompt", num_prompts=50, prompts=str(tmp_path / "prompts.txt"))
    assert {record["prompt"] for _, record in draw_prompts(settings)} == {"菜", "酒店"}
    (tmp_path / "prompts.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no prompt; expected one a line"):
        list(draw_prompts(settings))


def test_the_halves_share_nothing_to_train_on_and_all_to_test_on(tmp_path):
    (tmp_path / "reviews.csv").write_text(
        "label,review\n" + "".join(f"{number % 2},第{number}条评论\n" for number in range(200)), encoding="utf-8"
    )
    settings = args(test_percentage=0.2, validation_percentage=0.1, remove_leak=False)
    reviews = Reviews(read_source(str(tmp_path / "reviews.csv")), (), settings)
    counts = write_labelled(reviews.reviews, tmp_path / "out", settings)
    rows = {
        path.stem.removeprefix("sentiment_"): [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for path in (tmp_path / "out").iterdir()
    }
    assert {name.replace("_", " "): len(of) for name, of in rows.items()} == counts
    texts = {name: {row["text"] for row in of} for name, of in rows.items()}
    assert texts["a_test"] == texts["b_test"]
    assert texts["a_validation"] == texts["b_validation"]
    assert not texts["a_train"] & texts["b_train"]
    assert set.union(*texts.values()) == {f"第{number}条评论" for number in range(200)}
    assert sum(map(len, (texts["a_train"], texts["b_train"], texts["a_test"], texts["a_validation"]))) == 200
    for row in rows["b_train"]:
        assert row["label"] == ("negative", "positive")[int(row["text"].strip("第条评论")) % 2]


def test_the_real_reviews_and_lists(shared_data):
    """What the source's own notes say: 867 hotel reviews stand in the lists, one review is empty."""
    settings = args()
    lists = Lists(str(shared_data / "zh_sentiment_rank" / "dev.tsv"), settings)
    assert len(lists.lists) == 3082
    hotel = Reviews(read_source(str(shared_data / "zh_sentiment" / "ChnSentiCorp_htl_all.csv")), lists.lists, settings)
    assert hotel.in_lists[0] == 867
    assert hotel.in_lists[1] > 1300
    listed = {plain(text) for ranks in lists.lists for text in ranks.responses}
    assert not listed & {plain(review.text) for review in hotel.reviews}
    assert sum(reasons["no text"] for reasons in hotel.skipped.values()) == 1
    assert len(hotel.reviews) + sum(sum(reasons.values()) for reasons in hotel.skipped.values()) == 7766
