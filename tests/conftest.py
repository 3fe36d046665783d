import gc
import os
import signal

import pytest
import torch

os.environ["PYTHONSAFEPATH"] = "1"  # child processes import the installed package, as we do, not the folder they run in

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script, and so in child processes,
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests interrupt

torch.set_num_threads(1)  # tiny tensors, and one process per core


def pytest_collection_finish():
    """Exclude the objects of pytest from garbage collection and from searches for optimizers: they slow both down."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded():
    """Tests draw from local generators. This seeds what a model under test draws by itself."""
    torch.manual_seed(0)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
