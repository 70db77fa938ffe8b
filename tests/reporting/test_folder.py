"""Folders as they are found: whole, being written, cut off, damaged, gone."""

import csv
import json
import shutil
from functools import partial

import pytest

from rlhf_stages.experiment import digest
from rlhf_stages.reporting.folder import experiments_in, read_run
from rlhf_stages.reporting.lineage import base_models, parents_of, titles, with_ancestors
from rlhf_stages.reporting.numbers import Numbers, read_numbers, thinned

from report_folders import SFT_DIGEST, write_checkpoint, write_ppo, write_run, write_sft


def numbers_of(tmp_path, text):
    (tmp_path / "metrics.csv").write_text(text)
    return read_numbers(tmp_path / "metrics.csv")


def test_rows_of_a_step_are_one_and_empty_cells_are_none(tmp_path):
    found, problems = numbers_of(tmp_path, "step,a,b\n0,,5\n5,1,\n5,,2\n10,-3e-1,\n")
    assert found.rows == [(0, {"b": 5.0}), (5, {"a": 1.0, "b": 2.0}), (10, {"a": -0.3})]
    assert found.series("a") == [(5, 1.0), (10, -0.3)]
    assert (found.names, found.last_step, problems) == (["a", "b"], 10, [])


def test_a_file_cut_in_the_middle_of_a_line(tmp_path):
    found, (problem,) = numbers_of(tmp_path, "step,a\n1,10\n2,2")  # of 20, say: not the number 2
    assert found.rows == [(1, {"a": 10.0})]
    assert "ends in the middle of a line" in problem


@pytest.mark.parametrize(
    ("text", "rows", "said"),
    [
        ("step,a\n1,10\nx,20\n3,30\n", [(1, {"a": 10.0}), (3, {"a": 30.0})], "1 damaged line left out"),
        ("step,a\n1,10,11\n-2,20\n3,30\n", [(3, {"a": 30.0})], "2 damaged lines left out"),
        ("step,a,b\n1,nan,1\n2,inf,2\n", [(1, {"b": 1.0}), (2, {"b": 2.0})], "2 values that are not finite numbers"),
        ("a,b\n1,2\n", [], "no header with a column `step`"),
        ("", [], "no header"),
        ("step,a\n1,\x00\n", [(1, {})], "not finite numbers"),
    ],
)
def test_damaged_lines_are_counted_and_the_rest_is_read(tmp_path, text, rows, said):
    found, problems = numbers_of(tmp_path, text)
    assert found.rows == rows
    assert said in " ".join(problems)


def test_a_cell_longer_than_csv_takes(tmp_path, request):
    request.addfinalizer(partial(csv.field_size_limit, csv.field_size_limit(100)))
    found, (problem,) = numbers_of(tmp_path, "step,a\n1," + "9" * 101 + "\n2,5\n")
    assert found.rows == [(2, {"a": 5.0})]
    assert "1 damaged line" in problem


def test_no_file_of_numbers(tmp_path):
    found, (problem,) = read_numbers(tmp_path / "timing.csv")
    assert found == Numbers()
    assert "no timing.csv" in problem


def test_thinning_keeps_the_peaks_and_the_ends():
    series = [(step, 0.0) for step in range(1000)]
    series[321] = (321, 7.0)
    series[700] = (700, -7.0)
    kept = thinned(series, 50)
    assert len(kept) <= 52
    assert {series[0], series[-1], (321, 7.0), (700, -7.0)} <= set(kept)
    assert kept == sorted(kept)
    assert thinned(series[:50], 50) == series[:50]


def test_a_finished_run(tmp_path):
    run = read_run(write_sft(tmp_path / "toy" / "tiny" / "sft"))
    assert (run.stage, run.dataset, run.name, run.step) == ("sft", "toy", "tiny", 100)
    assert (run.problems, run.state()) == ([], "finished after 100 steps")
    (saved,) = run.checkpoints
    assert (saved.name, saved.problem, run.best) == ("step-000100", None, "step-000100")
    # the manifest gives the digest that a stage notes of its parents, without a look at the weights
    assert saved.sha256 == digest(run.dir / "checkpoints" / "step-000100") == SFT_DIGEST


@pytest.mark.parametrize(
    ("seconds", "said"), [(12, "12 seconds"), (61, "1 minute"), (7300, "2 hours"), (90_000, "1 day")]
)
def test_a_run_that_is_still_going(tmp_path, seconds, said):
    folder = write_ppo(tmp_path / "toy" / "tiny" / "ppo", 30, finished=False)
    run = read_run(folder)
    assert run.state(run.changed + seconds) == f"not finished: step 30 of 100, last written {said} ago"


def test_a_run_that_has_only_begun(tmp_path):
    run = read_run(write_run(tmp_path / "toy" / "tiny" / "rm", "rm", finished=False))
    assert (run.step, run.metrics.rows, run.checkpoints) == (0, [], [])
    assert run.problems == [
        "There is no metrics.csv: nothing was logged yet, or it was removed.",
        "There is no timing.csv: nothing was logged yet, or it was removed.",
    ]


def test_what_is_damaged_is_named_and_the_rest_is_there(tmp_path):
    folder = write_sft(tmp_path / "toy" / "tiny" / "sft")
    for step in (10, 20, 30):
        write_checkpoint(folder, step)
    (folder / "checkpoints" / "step-000010" / "manifest.json").unlink()
    (folder / "checkpoints" / "step-000020" / "manifest.json").write_text('{"files": {"a": 3}}')
    (folder / "checkpoints" / "step-000030" / "model.safetensors").write_bytes(b"cut")
    (folder / "best").write_text("step-000050\n")
    (folder / "args.json").write_text("{")
    (folder / "summary.json").write_text("[]")
    (folder / "samples.jsonl").write_text('{"step": 1}\n{"step": "1"}\n{"st')
    (folder / "skipped.jsonl").write_text("[" * 100_000 + "\n")
    run = read_run(folder)
    assert (run.stage, run.step, run.finished, run.samples, run.skipped) == ("sft", 100, False, [{"step": 1}], [])
    assert run.problems == [
        "args.json is damaged (no valid JSON); it is left out.",
        "Checkpoint step-000010: has no manifest.json: not a whole one.",
        "Checkpoint step-000020: its manifest.json is damaged.",
        "Checkpoint step-000030: model.safetensors is missing, or not as long as it was written.",
        "`best` names step-000050, which is not there (removed by hand, or just now).",
        "samples.jsonl: 2 damaged lines left out.",
        "skipped.jsonl: 1 damaged line left out.",
        "summary.json is damaged (no valid JSON); it is left out.",
    ]


def test_what_a_path_means(tmp_path):
    sft = write_sft(tmp_path / "toy" / "tiny" / "sft")
    ppo = write_ppo(tmp_path / "toy" / "tiny" / "ppo", 10)
    assert experiments_in(sft) == [sft]
    assert experiments_in(sft / "checkpoints" / "step-000100") == [sft]
    assert experiments_in(tmp_path / "toy" / "tiny") == [sft, ppo]
    with pytest.raises(FileNotFoundError, match=r"no experiment in .*toy"):
        experiments_in(tmp_path / "toy")
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        experiments_in(tmp_path / "nowhere")


def test_a_pipeline_is_found_from_its_last_stage_also_after_a_move(tmp_path):
    sft = write_sft(tmp_path / "here" / "toy" / "tiny" / "sft")
    ppo = write_ppo(tmp_path / "here" / "toy" / "tiny" / "ppo", 10, sft)
    assert [run.stage for run in with_ancestors([ppo])] == ["sft", "ppo"]
    assert [run.stage for run in with_ancestors([ppo, sft, ppo])] == ["sft", "ppo"]
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = with_ancestors([tmp_path / "there" / "toy" / "tiny" / "ppo"])
    assert [run.stage for run in moved] == ["sft", "ppo"]
    (parent,) = parents_of(moved[1])
    assert (parent.role, parent.recorded, parent.state) == ("sft", SFT_DIGEST, "the same weights still")


def test_a_parent_beside_the_run_goes_before_another_in_its_old_place(tmp_path):
    sft = write_sft(tmp_path / "here" / "toy" / "tiny" / "sft")
    write_ppo(tmp_path / "here" / "toy" / "tiny" / "ppo", 10, sft)
    shutil.move(tmp_path / "here", tmp_path / "there")
    write_checkpoint(write_run(sft, "sft"), 100, b"weights of another try")
    (parent,) = parents_of(read_run(tmp_path / "there" / "toy" / "tiny" / "ppo"))
    assert (parent.experiment, parent.state) == (tmp_path / "there/toy/tiny/sft", "the same weights still")


def test_what_has_become_of_a_parent(tmp_path):
    sft = write_sft(tmp_path / "toy" / "tiny" / "sft")
    ppo = write_ppo(tmp_path / "toy" / "tiny" / "ppo", 10, sft)
    states = []
    shutil.rmtree(sft / "checkpoints" / "step-000100")
    write_checkpoint(sft, 100, b"other weights")
    states.append(parents_of(read_run(ppo))[0].state)
    shutil.rmtree(sft / "checkpoints" / "step-000100")
    states.append(parents_of(read_run(ppo))[0].state)
    shutil.rmtree(sft)
    states.append(parents_of(read_run(ppo))[0].state)
    assert states == [
        "other weights now: it was trained again after this run started",
        "the checkpoint was removed since",
        "not there any more",
    ]
    assert [run.stage for run in with_ancestors([ppo])] == ["ppo"]


def test_a_run_that_claims_to_be_its_own_parent_ends(tmp_path):
    ppo = write_ppo(tmp_path / "toy" / "tiny" / "ppo", 10)
    args = json.loads((ppo / "args.json").read_text())
    args["parents"] = {"sft": {"path": str(ppo / "checkpoints" / "step-000010")}, "rm": "nonsense"}
    (ppo / "args.json").write_text(json.dumps(args))
    assert len(with_ancestors([ppo])) == 1


def test_the_base_model_is_that_of_the_first_sft(tmp_path):
    sft = write_sft(tmp_path / "here" / "toy" / "tiny" / "sft")
    args = json.loads((sft / "args.json").read_text())
    args["model_args"]["model_name"] = "hub/base"
    (sft / "args.json").write_text(json.dumps(args))
    write_ppo(tmp_path / "here" / "toy" / "tiny" / "ppo", 10, sft)
    shutil.move(tmp_path / "here", tmp_path / "there")
    folder = tmp_path / "there" / "toy" / "tiny"
    checkpoints = [folder / "ppo" / "checkpoints" / "step-000010", folder / "sft" / "checkpoints" / "step-000100"]
    elsewhere = tmp_path / "model"
    assert base_models([*checkpoints, elsewhere]) == ["hub/base"]
    assert base_models([elsewhere]) == []
    # what is compared anyway is not added
    args["model_args"]["model_name"] = str(tmp_path / "there" / ".." / "model")
    (folder / "sft" / "args.json").write_text(json.dumps(args))
    assert base_models([*checkpoints, elsewhere]) == []
    shutil.rmtree(folder / "sft")
    with pytest.raises(ValueError, match=r"ppo was made from .*step-000100: not there any more"):
        base_models(checkpoints[:1])


def test_a_base_model_that_nobody_knows(tmp_path):
    ppo = write_ppo(tmp_path / "toy" / "tiny" / "ppo", 10)
    args = json.loads((ppo / "args.json").read_text())
    args["model_args"]["model_name"] = None
    (ppo / "args.json").write_text(json.dumps(args))
    with pytest.raises(ValueError, match=r"does not say which model it began with \(model_name: None\)"):
        base_models([ppo / "checkpoints" / "step-000010"])
    args["parents"] = {"sft": {"path": str(ppo / "checkpoints" / "step-000010")}}  # its own parent
    (ppo / "args.json").write_text(json.dumps(args))
    with pytest.raises(ValueError, match="what that began with is unknown"):
        base_models([ppo / "checkpoints" / "step-000010"])


def test_titles_say_as_much_as_is_needed(tmp_path):
    def names(*folders):
        runs = [read_run(write_run(tmp_path / folder, folder.rpartition("/")[2])) for folder in folders]
        return list(titles(runs).values())

    assert names("a/x/sft", "a/x/ppo") == ["sft", "ppo"]
    assert names("b/x/ppo", "b/y/ppo") == ["x/ppo", "y/ppo"]
    assert names("c/x/ppo", "d/x/ppo") == ["c/x/ppo", "d/x/ppo"]
    assert names("here/e/x/ppo", "there/e/x/ppo") == ["ppo", "ppo (2)"]
