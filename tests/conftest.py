import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers import run_stage, save_causal, write_toy_data
from served import open_browser

ROOT = Path(__file__).resolve().parents[1]
# tiny models lose more to threads that wait for each other than they win; the programs that tests start inherit it
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


# what may be missing where the tests run; a test that is skipped for another reason fails
ALLOWED_SKIPS = (
    "needs a CUDA device", "no real data at ", "needs the extra ", "set RLHF_STAGES_SMOLLM2_WHEEL ",
    "atheris is not installed", "no WordNet at ", "no chromium",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Tests of a GPU are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """No skip that is not on the list."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(ALLOWED_SKIPS):
            report.outcome, report.longrepr = "failed", f"skipped for a reason not in ALLOWED_SKIPS: {reason}"
    return report


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real data and a tiny real model: $RLHF_STAGES_DATA, or shared/data beside the checkout."""
    path = Path(os.environ.get("RLHF_STAGES_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"no real data at {path}: set RLHF_STAGES_DATA")
        pytest.skip(f"no real data at {path} (set RLHF_STAGES_DATA)")
    return path


@pytest.fixture(scope="session")
def wordnet() -> Path:
    """NLTK's data with WordNet: $NLTK_DATA, or what `make nltk-data` made; also for the programs that tests start."""
    path = Path(os.environ.setdefault("NLTK_DATA", str(ROOT / "nltk_data")))
    if not (path / "corpora" / "wordnet").is_dir():
        reason = f"no WordNet at {path} (make nltk-data)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return path


@pytest.fixture(scope="session")
def chromium() -> Path:
    """A browser for playwright: $CHROMIUM, or Debian's; playwright's own cannot be fetched everywhere."""
    path = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))
    if not path.is_file():
        reason = f"no chromium at {path} (apt-get install chromium, or set CHROMIUM)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return path


@pytest.fixture(scope="module")
def browser(chromium):
    """One browser for the tests of a file; each page of it has cookies and storage of its own."""
    with open_browser(chromium) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _seeded():
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """Toy data, a GPT-2 with dropout, and short SFT and RM experiments made from them: to be read only."""
    folder = tmp_path_factory.mktemp("tiny_run")
    data, model = write_toy_data(folder / "toy" / "tiny"), save_causal(folder / "model", dropout=0.1)
    short = ["--max_steps=2", "--learning_rate=1e-3"]
    sft = run_stage("sft", folder / "runs", data, f"--model_name={model}", "--max_new_tokens=4", *short)
    rm = run_stage("rm", folder / "runs", data, f"--sft_experiment_dir={sft}", *short)
    return SimpleNamespace(data=data, model=model, sft=sft, rm=rm)
