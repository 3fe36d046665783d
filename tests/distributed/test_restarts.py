"""A rank dies, torchrun restarts all ranks, and the result equals that of an uninterrupted run."""

from pathlib import Path

import pytest
import torch
from helpers.ranks import results, torchrun

PROGRAM = Path(__file__).with_name("restarted.py")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["local", "sync", "exchange"])
def test_a_job_with_a_killed_process_resumes_from_torchs_checkpoint_and_equals_an_uninterrupted_one(mode, tmp_path):
    ends = {}
    for name, dies_after in (("undisturbed", -1), ("killed", 4)):
        folder = tmp_path / name
        folder.mkdir()
        torchrun(str(PROGRAM), str(folder), mode, str(dies_after), processes=2, flags=("--max-restarts=1",))
        ends[name] = results(folder, 2)
    for killed, undisturbed in zip(ends["killed"], ends["undisturbed"], strict=True):
        assert (killed["resumed at"], undisturbed["resumed at"]) == (4, 0)
        torch.testing.assert_close(killed["state"], undisturbed["state"], rtol=0, atol=0)
        torch.testing.assert_close(killed["saved"], ends["killed"][0]["state"], rtol=0, atol=0)  # rank 0's memory
    memories = [end["state"]["1.memory_mean"] for end in ends["killed"]]
    assert torch.equal(*memories) == (mode != "local")
