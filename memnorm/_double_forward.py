"""Double-Forward: after each optimizer step, the batch of that step goes forward a second time and is recorded then.

    training forward   normalizes with the memory and its own batch, records nothing
    backward, step     unchanged
    second forward     the same batch with the new weights: its moments are recorded

`double_forward` adds this to a training loop through hooks. A hook before the model's forward copies its inputs and
turns recording off for that call. A hook after the optimizer's step replays the copies of every batch whose gradient
went into that step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memnorm._torch import current_graph_task_id, queue_callback, tree_leaves
from memnorm.capture import Backward, Batch, Hook, Status, drop_inert_hooks
from memnorm.errors import (
    MemnormError,
    NothingToRecord,
    OptionError,
    check_module,
    is_number,
    is_whole,
    warn,
)
from memnorm.layers import MemorizedBatchNorm, Recording
from memnorm.modules import check_optimizer, has_skipped, layers_of, modules_of, trains
from memnorm.recompute import inside_backward, inside_function
from memnorm.replay import (
    ForwardContext,
    ModuleLists,
    batches_recorded,
    explain_no_forward,
    explain_no_recorder,
    recorders,
    replay,
    switch,
)
from memnorm.stripped import check_kept
from memnorm.updates import _counted_early, count_step_early


def double_forward(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    every: int = 1,
    fraction: float = 1.0,
    scaler: Any = None,
    max_pending: int = 256,
) -> DoubleForward:
    """Send each training batch forward a second time after `optimizer.step()`. The training loop does not change.

        memnorm.double_forward(model, optimizer)
        schedule = memnorm.StrengthSchedule(model, total_steps)  # the rest of the paper's method

    Args:
        model: the module that the loop calls; if it is compiled or wrapped in DDP, the wrapper.
        optimizer: the optimizer of the model, or a list of several. The second forward follows when all have stepped.
        every: replay on every n-th step only; on the other steps the training forward records its own moments.
        fraction: replay a random part of each batch: of every tensor whose first dimension is the batch size.
        scaler: the `GradScaler`, if there is one. Batches of a step that it skips are then discarded even if the loop
            does not clear the gradients.
        max_pending: raise an error after this many training forwards without an optimizer step.

    Returns:
        A handle with `remove()`, which is also a context manager. Copies and pickles of the model have no
        Double-Forward.
    """
    return DoubleForward(model, optimizer, every=every, fraction=fraction, scaler=scaler, max_pending=max_pending)


class DoubleForward:
    """The handle of `double_forward`.

    handle = memnorm.double_forward(model, optimizer)
    ...
    handle.remove()  # training continues with a single forward
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        every: int,
        fraction: float,
        scaler: Any,
        max_pending: int,
    ) -> None:
        if queue_callback is None:
            raise MemnormError(
                f"double_forward: torch {torch.__version__} does not say when a backward ends (queue_callback). Use "
                'memnorm.convert(model, "two_way"), which needs no second forward, or another version of torch.'
            )
        optimizers: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        _check_arguments(model, optimizers, every, fraction, max_pending)
        self.every, self.fraction, self.max_pending, self.scaler = every, fraction, max_pending, scaler
        self.steps = 0
        self._model = weakref.ref(model)
        self._references = [weakref.ref(one) for one in optimizers]
        self._stepped: set[int] = set()
        self._scaler_round: Any = None
        self._pending: list[Batch] = []
        self._running: Batch | None = None
        self._muted: list[Recording] = []
        self._parameter_ids = {id(parameter) for parameter in model.parameters()}
        self._backwards: dict[int, Backward] = {}  # by autograd's id of the graph task
        self._forwards = self._forwards_at_last_step = self._forwards_since_step = self._forwards_counted = 0
        self._steps_without_forward = 0
        self._has_recorded, self._empty_replays = False, 0
        self._recorded_at_start = batches_recorded(model)
        self._names = list(layers_of(model, Recording))
        self._claim_layers(model)
        for layer in model.modules():
            if isinstance(layer, MemorizedBatchNorm):  # a copied one is not known yet
                layer._notice_strength()
        self._handles = [
            model.register_forward_pre_hook(Hook(self, "_before_forward"), prepend=True, with_kwargs=True),
            model.register_forward_hook(Hook(self, "_after_forward"), with_kwargs=True),
            model.register_forward_hook(Hook(self, "_end_forward"), with_kwargs=True, always_call=True),
        ]
        for one in optimizers:
            self._handles += [
                one.register_step_pre_hook(self._before_step),
                one.register_step_post_hook(self._after_step),
            ]

    @property
    def _optimizers(self) -> list[Optimizer]:
        """The optimizers that still exist."""
        return [one for reference in self._references if (one := reference()) is not None]

    def _claim_layers(self, model: nn.Module) -> None:
        drop_inert_hooks(model)
        for name, layer in layers_of(model, Recording).items():
            other = layer._watched_by and layer._watched_by()
            if other is not None and other._optimizers and other._handles:
                raise MemnormError(
                    f"double_forward: layer {name!r} already has a Double-Forward. Call remove() on its handle first, "
                    "or pass all optimizers of the model to one call: double_forward(model, [optimizer, other])."
                )
            layer._watched_by = weakref.ref(self)

    def __repr__(self) -> str:
        model = self._model()
        attached = f"attached to {type(model).__name__}" if model is not None and self._handles else "removed"
        return (
            f"DoubleForward({attached}, layers={len(self._names)}, optimizers={len(self._optimizers)}, "
            f"every={self.every}, fraction={self.fraction:g}, steps={self.steps})"
        )

    def remove(self) -> None:
        """Remove all hooks. From now on, training forwards record their own moments."""
        self._unmute()
        for handle in self._handles:
            handle.remove()
        self._handles, self._pending = [], []

    def __enter__(self) -> DoubleForward:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def state_dict(self) -> dict[str, int]:
        """The state that a resumed run needs if `every` or `fraction` is used."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Resume from a `state_dict`."""
        steps = state_dict.get("steps") if isinstance(state_dict, Mapping) else None
        if steps is None or not is_whole(steps) or steps < 0:
            raise OptionError(
                "double_forward: expected the state_dict() of a handle, with the whole number steps; "
                f"got {state_dict!r}"
            )
        self.steps = int(steps)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._end_forward()  # of a forward that was interrupted
        if not self._optimizers:
            return self.remove()
        if inside_backward() or not (torch.is_grad_enabled() or inside_function()):
            return None
        self._forwards += 1
        modules = modules_of(module)
        lists = ModuleLists.of(modules)
        layers = [one for one in lists.recorders if one.training and one.recording]
        if not layers or (self.steps + 1) % self.every:
            return None
        self._drop_skipped_batches()
        self._check_pending(module)
        self._running = Batch(args, kwargs, layers, lists, ForwardContext.capture(modules))
        self._muted = layers
        switch(layers, False)
        return None

    def _after_forward(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        batch = self._running
        if batch is None:
            return
        self._pending.append(batch)
        for leaf in [output] if type(output) is Tensor else tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(lambda _grad: self._on_backward(batch))
                batch.advance(Status.OBSERVED)

    def _end_forward(self, *_forward: Any) -> None:
        """Turn recording on again after a forward, also after one that raised."""
        self._running = None
        self._unmute()

    def _unmute(self) -> None:
        switch(self._muted, True)
        self._muted = []

    def _on_backward(self, batch: Batch) -> None:
        """Note that backward has reached the output of `batch`. If there is no gradient at this moment, the gradients
        of earlier batches were cleared.
        """
        task = current_graph_task_id()
        if task not in self._backwards:
            self._drop_cleared()
            self._backwards[task] = Backward(list(self._gradients()))
            assert queue_callback is not None
            queue_callback(lambda: self._after_backward(task))
        batch.advance(Status.DIFFERENTIABLE if torch.is_grad_enabled() else Status.REACHED)
        self._backwards[task].batches.append(batch)

    def _after_backward(self, task: int) -> None:
        """Mark the batches whose gradient is in the parameters now. `autograd.grad`, as in an attack, leaves none."""
        backward = self._backwards.pop(task, None)
        if backward is not None and backward.has_changed(self._gradients()):
            penalties = [batch for batch in self._pending if batch.status == Status.DIFFERENTIABLE]
            for batch in (*backward.batches, *penalties):
                batch.advance(Status.ACCUMULATED)

    def _drop_cleared(self) -> None:
        """Discard batches whose gradients were cleared before any step."""
        if all(gradient is None for gradient in self._gradients()):
            self._pending = [batch for batch in self._pending if batch.status != Status.ACCUMULATED]

    def _gradients(self) -> Iterator[Tensor | None]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in self._parameter_ids:
                        yield parameter.grad

    def _drop_skipped_batches(self) -> None:
        """Discard the batches of a step that the `GradScaler` skipped. It creates new per-optimizer states in every
        update(), so an update without a step means a skipped step.
        """
        states = getattr(self.scaler, "_per_optimizer_states", None)
        if states is not self._scaler_round:
            self._pending, self._scaler_round = [], states

    def _before_step(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let each evaluation of a closure start from the batches seen before the step, so that only those of the last
        evaluation remain.
        """
        self._drop_cleared()
        outside = list(self._pending)

        def restarting(closure: Callable[[], Any]) -> Callable[[], Any]:
            def evaluate() -> Any:
                self._pending = list(outside)
                return closure()

            return evaluate

        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": restarting(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], restarting(args[1]), *args[2:]), kwargs
        return None

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._forwards_since_step = 0
        if has_skipped(optimizer):
            self._pending = []
            return
        try:
            count_step_early(optimizer)  # before the second forward, which sees the new weights
            self._finish_step(optimizer)
        except BaseException:
            _counted_early.discard(optimizer)  # torch runs no further hook of this step
            raise

    def _finish_step(self, optimizer: Optimizer) -> None:
        if inside_backward():  # the optimizer steps as gradients arrive; the callback would come too late
            for task in list(self._backwards):
                self._after_backward(task)
        self._backwards.clear()  # the callback of a backward that raised never comes
        self._check_forwards()
        for batch in self._pending:
            if batch.status == Status.ACCUMULATED:
                batch.advance(Status.STEPPED)
        again = id(optimizer) in self._stepped
        self._stepped.add(id(optimizer))
        if again or self._stepped >= {id(one) for one in self._optimizers}:
            self._stepped = {id(optimizer)} if again else set()
            self.steps += self._forwards > self._forwards_counted  # two optimizers in turn make one step
            self._forwards_counted = self._forwards
            self._replay_pending()

    def _replay_pending(self) -> None:
        """Replay the batches that went into the step. If no backward was observed, these are all batches."""
        pending, self._pending = self._pending, []
        if any(batch.status >= Status.REACHED for batch in pending):
            wanted = (Status.UNOBSERVED, Status.ACCUMULATED, Status.STEPPED)
            pending = [batch for batch in pending if batch.status in wanted]
        model = self._model()
        if model is None:
            return
        generator = torch.Generator().manual_seed(self.steps) if self.fraction < 1 else None
        for batch in pending:
            batch.layers = [layer for layer in batch.layers if layer.training]
            if batch.layers:
                args, kwargs = (batch.args, batch.kwargs) if generator is None else batch.part(self.fraction, generator)
                self._replay(model, batch, args, kwargs)

    def _replay(self, model: nn.Module, batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before = None if self._has_recorded else batches_recorded(model)
        try:
            replay(model, args, kwargs, batch.context, batch.layers, batch.modules)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(
                    f"memnorm: raised in the second forward after optimizer step {self.steps}, which is complete"
                )
            raise
        if before is not None:
            self._check_recorded(model, before)

    def _check_recorded(self, model: nn.Module, before: dict[str, int]) -> None:
        """Warn if the second forward records nothing. This reads from the device until something was recorded once."""
        self._has_recorded = batches_recorded(model) != before
        self._empty_replays += not self._has_recorded
        if self._empty_replays == 3:
            warn(
                f"double_forward: {self._empty_replays} second forwards of {type(model).__name__} recorded nothing. "
                "Either its forward calls layers that are not registered as its modules, or no batch is finite."
            )

    def _check_pending(self, module: nn.Module) -> None:
        self._forwards_since_step += 1
        if self._forwards_since_step > self.max_pending:
            self._pending, self._forwards_since_step = [], 0
            raise MemnormError(
                f"double_forward: {self.max_pending} training forwards of {type(module).__name__} without a step of "
                "its optimizer. If the loop accumulates more batches than that, raise max_pending; if another "
                "optimizer trains the model, pass that one; if training is over, call remove() on the handle."
            )

    def _check_forwards(self) -> None:
        """Raise or warn if the optimizer steps without forwards of the model: nothing would be recorded."""
        model = self._model()
        if model is not None:
            modules = self._pending[-1].modules if self._pending else ModuleLists.of(modules_of(model))
            check_kept(model, self._names, "double_forward", modules.not_recording(model))
            if not modules.recorders:
                raise NothingToRecord(f"double_forward: {explain_no_recorder(model)}")
        if model is not None and self._forwards == 0 and any(gradient is not None for gradient in self._gradients()):
            raise NothingToRecord(explain_no_forward(model, self._recorded_at_start))
        without = self._forwards == self._forwards_at_last_step
        self._steps_without_forward = self._steps_without_forward + 1 if without else 0
        self._forwards_at_last_step = self._forwards
        if self._steps_without_forward == 10 * len(self._optimizers):
            warn(
                f"double_forward: {self._steps_without_forward} optimizer steps without a training forward of "
                f"{type(model).__name__}; nothing is recorded. Call the module that was passed to "
                "double_forward, or call remove() on the handle."
            )


def detach(model: nn.Module) -> None:
    """Remove every Double-Forward from `model`, whose layers are about to be replaced."""
    for module in model.modules():
        for hook in [*module._forward_pre_hooks.values()]:
            if isinstance(hook, Hook):
                hook.handle.remove()
        drop_inert_hooks(module)


def _check_arguments(model: nn.Module, optimizers: list[Any], every: int, fraction: float, max_pending: int) -> None:
    for optimizer in optimizers or [None]:
        check_optimizer(optimizer, "double_forward: expected a torch.optim.Optimizer, or several in a list")
    check_module(model, "double_forward")
    if not any(getattr(layer, "running_mean", True) is not None for layer in recorders(model)):
        raise NothingToRecord(f"double_forward: {explain_no_recorder(model)}")
    for optimizer in optimizers:
        if not trains(optimizer, model):
            raise OptionError(
                f"double_forward: the {type(optimizer).__name__} holds no parameter of {type(model).__name__}; pass "
                "the optimizer that trains it"
            )
    if not is_whole(every) or every < 1:
        raise OptionError(f"double_forward: every must be a positive number of steps; got {every!r}")
    if not is_number(fraction) or not 0 < fraction <= 1:
        raise OptionError(f"double_forward: fraction must lie in (0, 1]; got {fraction!r}")
    if not is_whole(max_pending) or max_pending < 1:
        raise OptionError(f"double_forward: max_pending must be positive; got {max_pending!r}")
