"""Whatever is in a file, reading it ends in success or in one of our errors, soon, and in little memory."""

import contextlib
import io
import resource
import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fuzz.formats import FORMATS, OURS

SECONDS = 5  # for one input; it takes a thousandth of that
MEGABYTES = 400  # that all inputs of a format together may add to the process

quick = pytest.mark.parametrize("name", FORMATS)


def fuzz(name, folder, examples):
    """Read `examples` inputs of a format; the same ones every time."""
    form, seen, memory = FORMATS[name], 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=[*HealthCheck], report_multiple_bugs=False,
    )
    @given(form.inputs(folder))
    def one(content):
        nonlocal seen
        seen += 1
        path, start = form.write(folder, content), time.process_time()
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                form.read(path)
        except OURS as error:
            assert type(error) in OURS, f"a {type(error).__name__} is not one of ours: {error}"
            assert str(folder) in str(error), f"no path in: {error}"
        assert time.process_time() - start < SECONDS

    one()
    assert seen >= examples
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MEGABYTES * 1000


@quick
def test_a_few_hundred_wrong_inputs(tmp_path, name):
    fuzz(name, tmp_path, 200)


@pytest.mark.slow
@quick
def test_ten_thousand_wrong_inputs(tmp_path, name):
    fuzz(name, tmp_path, 10_000)
