"""Ranks that compile their model."""

from pathlib import Path

import pytest
import torch
from helpers.ranks import results, torchrun


@pytest.mark.slow
def test_compiling_changes_nothing_in_sync_and_exchange(tmp_path):
    torchrun(str(Path(__file__).with_name("compiled.py")), str(tmp_path), processes=2)
    for seen in results(tmp_path, 2):
        torch.testing.assert_close(seen["compiled"]["compiled"], seen["compiled"]["eager"], rtol=0, atol=1e-10)
