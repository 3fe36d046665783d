"""Trainers with their callbacks on several ranks equal the plain loop."""

from pathlib import Path

import pytest
import torch
from helpers.optional import library
from helpers.ranks import results, torchrun


@pytest.mark.slow
def test_every_trainer_ends_as_the_loop_by_hand_in_every_process_with_a_memory_of_its_own(tmp_path):
    for name in ("accelerate", "lightning.pytorch", "transformers"):
        library(name)
    torchrun(str(Path(__file__).with_name("trainers.py")), str(tmp_path), processes=2)
    ends = [seen["trained"] for seen in results(tmp_path, 2)]
    for states in ends:
        by_hand = states.pop("by_hand")
        assert len(states) == 4
        for way, state in states.items():
            torch.testing.assert_close(state, by_hand, rtol=0, atol=0, msg=lambda m, way=way: f"{way}: {m}")
    memories = [states["in_lightning"]["color.1.memory_mean"] for states in ends]
    assert (memories[0] - memories[1]).abs().min() > 0
