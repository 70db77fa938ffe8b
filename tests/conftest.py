import os
import random
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real data and a tiny real model: $RLHF_STAGES_DATA, or shared/data beside the checkout."""
    path = Path(os.environ.get("RLHF_STAGES_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"no real data at {path}: set RLHF_STAGES_DATA")
        pytest.skip(f"no real data at {path} (set RLHF_STAGES_DATA)")
    return path


@pytest.fixture(autouse=True)
def _seeded():
    random.seed(0)
    torch.manual_seed(0)
