import pytest
import torch

torch.set_num_threads(1)  # tiny tensors, and one process per core


@pytest.fixture(autouse=True)
def _seeded():
    """Tests draw from local generators; what a model under test draws by itself is at least the same every time."""
    torch.manual_seed(0)
