"""Lightning's Trainer with the callback equals the plain loop."""

import copy
import os
import pickle
from unittest import mock

import pytest
import torch
from helpers.common import assert_same_state
from helpers.optional import library
from helpers.trainers import STEPS, assert_two_way_loop, plain_loop, scenes, segmenter, sgd, two_way_segmenter

from memnorm.errors import NothingToRecord, OptionError

lightning = library("lightning.pytorch")
integration = library("memnorm.integrations.lightning")
MemnormCallback, MonitorCallback = integration.MemnormCallback, integration.MonitorCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),  # this Lightning with this torch
]


class Task(lightning.LightningModule):
    """`training_step` calls the inner network, as most LightningModules do."""

    def __init__(self, *, dropout=0.25, fail_at=None):
        super().__init__()
        self.net = segmenter()
        self.net.depth[2].p = dropout
        self.fail_at = fail_at

    def forward(self, **batch):
        return self.net(**batch)

    def training_step(self, batch, index):
        if index == self.fail_at:
            raise ZeroDivisionError
        return self.net(**batch)["loss"]

    def configure_optimizers(self):
        return sgd(self.net)


class CallsItself(Task):
    def training_step(self, batch, index):
        return self(**batch)["loss"]


def fit(task, *callbacks, steps=STEPS, accumulate=1, resume=None, **options):
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "logger": False, **options},
    )
    torch.manual_seed(7)
    trainer.fit(task, scenes(accumulate), ckpt_path=resume)
    return task.net


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_lightning_training_is_the_plain_loop_bit_for_bit(accumulate, precision):
    net = fit(Task(), MemnormCallback("net"), accumulate=accumulate, precision=precision)
    dtype = torch.bfloat16 if precision == "bf16-mixed" else None
    assert_same_state(net, plain_loop(accumulate=accumulate, dtype=dtype))
    assert int(net.color[1].num_batches_tracked) == STEPS * accumulate
    assert float(net.color[1].strength) == 0.9


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_way_memory_needs_no_callback(accumulate):
    """Lightning runs the last micro-batch of a window in a closure of the optimizer's step."""
    task = Task()
    task.net = two_way_segmenter()
    assert_two_way_loop(fit(task, accumulate=accumulate), accumulate)


def test_a_module_that_calls_itself_needs_no_name():
    assert_same_state(fit(CallsItself(), MemnormCallback()), plain_loop())


def test_a_module_that_is_never_called_is_an_error_that_names_the_one_that_is():
    with pytest.raises(NothingToRecord, match="Task itself was never called; layers inside its 'net' were"):
        fit(Task(), MemnormCallback())


def test_options_reach_double_forward_and_the_schedule():
    schedule = {"milestones": (0.5,), "values": (0.2, 0.7)}
    net = fit(Task(), MemnormCallback("net", double_forward={"every": 2, "fraction": 0.5}, schedule=schedule))
    assert_same_state(net, plain_loop(every=2, fraction=0.5, schedule=schedule))


def test_none_leaves_out_the_second_forward_and_the_schedule():
    net = fit(Task(), MemnormCallback("net", double_forward=None, schedule=None))
    twin = segmenter()
    torch.manual_seed(7)
    optimizer = sgd(twin)
    for batch in scenes():
        optimizer.zero_grad()
        twin(**batch)["loss"].backward()
        optimizer.step()
    assert_same_state(net, twin)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty")
def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path):
    """Two epochs of three steps. Without dropout: its random numbers are no part of Lightning's checkpoints."""

    def run(epochs, **options):
        callback = MemnormCallback("net", double_forward={"every": 2, "fraction": 0.5}, total_steps=STEPS)
        saver = lightning.callbacks.ModelCheckpoint(tmp_path, "half", save_on_train_epoch_end=True)
        options = {"limit_train_batches": 3, "enable_checkpointing": True, **options}
        return fit(Task(dropout=0.0), callback, saver, steps=-1, max_epochs=epochs, **options)

    straight = run(2)
    (tmp_path / "half.ckpt").unlink()
    run(1)
    resumed = run(2, resume=tmp_path / "half.ckpt")
    assert_same_state(resumed, straight)
    assert float(resumed.color[1].strength) == 0.9


@pytest.mark.parametrize("fail_at", [None, 2])
def test_nothing_stays_attached_after_training_and_after_an_exception(fail_at):
    task, callback = Task(fail_at=fail_at), MemnormCallback("net")
    if fail_at is None:
        fit(task, callback)
    else:
        with pytest.raises(ZeroDivisionError):
            fit(task, callback)
    assert callback.attached is None
    assert not task.net._forward_pre_hooks
    assert callback.state_dict()["schedule"]["last_step"] == (STEPS if fail_at is None else 2)


def test_a_second_fit_with_the_same_callback_starts_the_schedule_anew():
    callback = MemnormCallback("net")
    fit(Task(), callback)
    assert_same_state(fit(Task(), callback), plain_loop())


class TwoNetworks(lightning.LightningModule):
    """An optimizer each, as in a GAN."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.nets = torch.nn.ModuleDict({"one": segmenter(), "other": segmenter()})
        for net in self.nets.values():
            net.depth[2].p = 0.0

    @property
    def net(self):
        return self.nets["other"]

    def training_step(self, batch, index):
        for net, optimizer in zip(self.nets.values(), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(net(**batch)["loss"])
            optimizer.step()

    def configure_optimizers(self):
        return [sgd(net) for net in self.nets.values()]


def test_of_several_networks_each_has_its_callback_and_follows_its_optimizer():
    task, callbacks = TwoNetworks(), [MemnormCallback("nets.one"), MemnormCallback("nets.other")]
    fit(task, *callbacks, steps=-1, max_epochs=1)
    for net in task.nets.values():
        assert_same_state(net, plain_loop(dropout=0.0))


def test_one_of_several_networks_may_be_converted():
    task = TwoNetworks()
    assert_same_state(
        fit(task, MemnormCallback("nets.other"), steps=-1, max_epochs=1),
        plain_loop(dropout=0.0),
    )
    assert float(task.nets["one"].color[1].strength) == 0.5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_a_callback_can_be_copied(copied):
    """As launchers of processes and searches over options do."""
    assert_same_state(fit(Task(), copied(MemnormCallback("net"))), plain_loop())


class Wrapped(Task):
    """Remembers which buffers DistributedDataParallel copies between processes."""

    def on_train_batch_start(self, batch, index):
        self.copied = list(self.trainer.model.named_module_buffers)


@pytest.fixture
def _own_process_group():
    """Clean up the process group and the environment variables that Lightning leaves."""
    with mock.patch.dict(os.environ):
        yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_own_process_group")
def test_lightnings_ddp_does_not_broadcast_the_memory():
    task = Wrapped()
    net = fit(task, MemnormCallback("net"), strategy="ddp", use_distributed_sampler=False)
    assert_same_state(net, plain_loop())
    assert task.copied == []


class Overflowing(Task):
    """Gradients that overflow on one batch, zeroed rather than dropped: only the scaler tells that it skipped. A fused
    optimizer skips inside its step.
    """

    fused = False

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05, fused=self.fused)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def training_step(self, batch, index):
        return super().training_step(batch, index) * (float("inf") if index == 2 else 1)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skipped_is_neither_remembered_nor_counted(fused, monkeypatch):
    monkeypatch.setattr(Overflowing, "fused", fused)
    plugin = lightning.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    callback = MemnormCallback("net")
    net = fit(Overflowing(), callback, plugins=[plugin])
    assert int(net.color[1].num_batches_tracked) == STEPS - 1
    assert callback.state_dict()["schedule"]["last_step"] == STEPS - 1


class Log(lightning.loggers.Logger):
    """Keeps what is logged."""

    name, version = "log", 0

    def __init__(self):
        super().__init__()
        self.logged = []

    def log_metrics(self, metrics, step=None):
        self.logged.append((step, metrics))

    def log_hyperparams(self, *_args, **_kwargs):
        pass


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_monitor_logs_every_so_many_steps_and_changes_nothing(accumulate):
    log, task = Log(), Task()
    callbacks = (MemnormCallback("net"), MonitorCallback(every=2))
    net = fit(task, *callbacks, accumulate=accumulate, logger=log, log_every_n_steps=1)
    assert [step for step, _ in log.logged] == [2, 4, 6]
    assert {"memnorm/noise", "memnorm/drift", "memnorm/age", "memnorm/weight"} <= log.logged[-1][1].keys()
    assert "memnorm/noise/net.color.1" in log.logged[-1][1]
    assert_same_state(net, plain_loop(accumulate=accumulate))
    assert not net.color[1]._forward_pre_hooks


def test_the_monitor_lets_go_when_a_training_raises():
    task = Task(fail_at=3)
    with pytest.raises(ZeroDivisionError):
        fit(task, MonitorCallback(every=3))
    assert not task.net.color[1]._forward_pre_hooks


def test_the_interval_of_the_monitor_is_checked():
    with pytest.raises(OptionError, match="positive number of steps"):
        MonitorCallback(every=0)
