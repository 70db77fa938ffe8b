"""Whatever is in a file, reading it ends in success or in one of our errors, soon, and in little memory."""

import contextlib
import io
import os
import resource
import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from fuzz.formats import FORMATS, OURS, SLOW

SECONDS = 5  # for one input; it takes a thousandth of that
MEGABYTES = 400  # that all inputs of a format together may add to the process

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))  # of each format; `make fuzz` takes 10,000


def fuzz(name, folder, examples):
    """Read `examples` inputs of a format; the same ones every time."""
    form, seen, memory = FORMATS[name], 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
        report_multiple_bugs=False,
    )
    @given(form.inputs(folder))
    def one(content):
        nonlocal seen
        seen += 1
        error, path, start = None, form.write(folder, content), time.process_time()
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                form.read(path)
        except OURS as raised:
            error = raised
        # a UnicodeDecodeError is a ValueError too, but nobody wrote it for a reader
        assert error is None or (type(error) in OURS and str(folder) in str(error)), repr(error)
        assert time.process_time() - start < SECONDS

    one()
    assert seen >= examples
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MEGABYTES * 1000


@pytest.mark.parametrize("name", FORMATS)
def test_no_wrong_input_ends_in_an_error_of_somebody_else(tmp_path, name):
    fuzz(name, tmp_path, EXAMPLES // 10 if name in SLOW else EXAMPLES)
