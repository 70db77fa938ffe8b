import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.formats import GUIDED

RUNS = int(os.environ.get("FUZZ_EXAMPLES", "1000"))


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDED)
def test_a_fuzzer_that_sees_the_branches_finds_nothing(tmp_path, name):
    if importlib.util.find_spec("atheris") is None:
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up("atheris is not installed; it has wheels for Linux only")
    command = [sys.executable, str(Path(__file__).with_name("guided.py")), name, str(RUNS), str(tmp_path)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"Done {RUNS} runs" in result.stderr
