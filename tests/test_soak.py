"""Short forms of `make kill-points` and `make soak`."""

import re
import subprocess
import sys

import pytest

from helpers import ROOT

pytestmark = pytest.mark.slow


def output_of(script, *flags):
    command = [sys.executable, str(ROOT / "tests" / "soak" / script), *flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def test_runs_killed_anywhere_end_with_the_bits_of_undisturbed_ones(tmp_path):
    output = output_of("kill_points.py", "--points=12", "--kinds=sft,rm,dpo,ppo-newest", f"--dir={tmp_path}")
    assert output.endswith("differences 0\n")
    points, kills = map(int, re.search(r"points (\d+), kills (\d+)", output).groups())
    assert points == 12
    assert kills >= 12


def test_a_round_of_faults_ends_as_an_undisturbed_one(tmp_path):
    output = output_of("soak.py", "--rounds=1", f"--dir={tmp_path}")
    assert output.endswith("differences 0\n")
    assert int(re.search(r"faults injected (\d+)", output)[1]) >= 4
    assert int(re.search(r"runs compared (\d+)", output)[1]) == 4
