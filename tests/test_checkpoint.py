import hashlib
import json
import threading

import pytest

from rlhf_stages.checkpoint import Checkpoints, check_whole


def writer(name, text="weights"):
    def write(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return write


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints")


WHOLE = [writer("config.json"), writer("critic/config.json"), writer("resume/state.pt")]


def test_a_checkpoint_lists_its_files_with_size_and_sum(checkpoints):
    folder = checkpoints.publish(12, WHOLE)
    assert folder == checkpoints.dir / "step-000012"
    content = json.loads((folder / "manifest.json").read_text())["files"]
    entry = {"size": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    assert content == dict.fromkeys(("config.json", "critic/config.json", "resume/state.pt"), entry)
    check_whole(folder)
    check_whole(folder, resumable=True)


def test_writers_work_side_by_side(checkpoints):
    barrier = threading.Barrier(2, timeout=20)  # each waits for the other

    def meeting(name):
        def write(folder):
            barrier.wait()
            (folder / name).touch()

        return write

    checkpoints.publish(1, [meeting("a"), meeting("b")])


def test_steps_are_in_order_also_beyond_six_digits(checkpoints):
    for step in (1_000_000, 5, 20):
        checkpoints.publish(step, WHOLE)
    (checkpoints.dir / "step-000007.txt").touch()
    (checkpoints.dir / "step-best").mkdir()
    assert checkpoints.steps() == [5, 20, 1_000_000]


def test_a_later_one_takes_the_place_of_its_namesake(checkpoints):
    checkpoints.publish(1, [writer("a", "old"), writer("resume/b")])
    folder = checkpoints.publish(1, [writer("a", "new")])
    assert (folder / "a").read_text() == "new"
    assert not (folder / "resume").exists()
    assert [path.name for path in checkpoints.dir.iterdir()] == ["step-000001"]


def test_the_one_before_stays_when_writing_fails(checkpoints):
    checkpoints.publish(1, [writer("a", "old")])

    def broken(folder):
        (folder / "half").touch()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoints.publish(1, [writer("a", "new"), broken])
    check_whole(checkpoints.path(1))
    assert (checkpoints.path(1) / "a").read_text() == "old"
    assert [path.name for path in checkpoints.dir.iterdir()] == ["step-000001"]


def test_what_a_kill_left_is_no_checkpoint_and_goes(checkpoints):
    checkpoints.publish(1, WHOLE)
    for name in (".step-000002", ".step-000001.old"):
        (checkpoints.dir / name).mkdir()
        (checkpoints.dir / name / "config.json").touch()
    assert checkpoints.steps() == [1]
    checkpoints.tidy()
    assert [path.name for path in checkpoints.dir.iterdir()] == ["step-000001"]


def test_a_removed_one_is_gone(checkpoints):
    for step in (1, 2):
        checkpoints.publish(step, WHOLE)
    checkpoints.remove(1)
    assert [path.name for path in checkpoints.dir.iterdir()] == ["step-000002"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").write_text("weight"), r"config\.json has 6 bytes instead of 7"),
        (lambda f: (f / "config.json").write_text("Weights"), r"config\.json is not what was written \(its SHA-256"),
        (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
        (lambda f: (f / "manifest.json").write_text("{}"), r"does not list files"),
        (lambda f: (f / "manifest.json").write_text("{"), r"is not valid JSON"),
        (lambda f: (f / "manifest.json").write_text('{"files": {"a": 1}}'), r"does not list files"),
        (
            lambda f: (f / "manifest.json").write_text('{"files": {"../../secret": {}, "resume/state.pt": {}}}'),
            r"names '\.\./\.\./secret', which lies outside",
        ),
    ],
)
def test_damage_is_found_and_named(checkpoints, change, message):
    folder = checkpoints.publish(1, WHOLE)
    change(folder)
    with pytest.raises(ValueError, match=message):
        check_whole(folder, resumable=True)


def test_others_need_not_care_about_what_only_a_resumed_run_reads(checkpoints):
    folder = checkpoints.publish(1, WHOLE)
    (folder / "resume" / "state.pt").write_text("cut")
    check_whole(folder)
    with pytest.raises(ValueError, match=r"resume/state\.pt has 3 bytes"):
        check_whole(folder, resumable=True)


def test_a_model_from_elsewhere_can_be_read_but_not_resumed(checkpoints, tmp_path):
    (tmp_path / "config.json").touch()
    check_whole(tmp_path)
    with pytest.raises(ValueError, match=r"has no manifest\.json: it is not a whole checkpoint"):
        check_whole(tmp_path, resumable=True)
    with pytest.raises(ValueError, match="holds weights only, nothing to resume from"):
        check_whole(checkpoints.publish(1, [writer("config.json")]), resumable=True)
