"""A fuzzer that sees which branches of the parsers an input reaches: `python guided.py FORMAT RUNS FOLDER`.

It ends with 0 if every input was read or refused as the tests of `test_fuzz.py` ask, else with a traceback.
"""

import contextlib
import io
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["rlhf_stages", "json", "csv", "yaml", "gguf"]):
    pass

from fuzz.formats import FORMATS, OURS


def main(name: str, runs: int, folder: Path) -> None:
    """Fuzz one format, from the seed 1 and without a corpus."""
    form = FORMATS[name]

    def one(content: bytes) -> None:
        path = form.write(folder, content)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                form.read(path)
        except OURS as error:
            if type(error) not in OURS or str(folder) not in str(error):
                raise

    atheris.Setup([sys.argv[0], "-seed=1", f"-runs={runs}", "-max_len=512", "-timeout=5", "-rss_limit_mb=2000"], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
