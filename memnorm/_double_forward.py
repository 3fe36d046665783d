"""Double-Forward: after each optimizer step, the batch that made it goes forward once more, and only then enters the
memory.

    training forward   normalises with the memory and its own batch, records nothing
    backward, step     as ever
    second forward     the same batch with the new weights: its moments are recorded

`double_forward` attaches this to a training loop from outside. A hook before the model's forward copies its inputs and
mutes the layers for that call; a hook after the optimizer's step replays the copies. What is replayed is every batch
whose gradient went into that step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memnorm.capture import Backward, Batch, Hook, drop_inert_hooks
from memnorm.errors import (
    DTypeError,
    MemnormError,
    NothingToRecord,
    OptionError,
    check_module,
    is_number,
    is_whole,
    warn,
)
from memnorm.layers import Recording
from memnorm.modules import has_skipped, modules_of, trains
from memnorm.recompute import inside_backward, inside_function
from memnorm.replay import (
    Census,
    Surroundings,
    batches_recorded,
    named_recorders,
    never_called,
    nothing_records,
    recorders,
    replay,
    switch,
)
from memnorm.stripped import check_kept
from memnorm.updates import count_step_early


def double_forward(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    every: int = 1,
    fraction: float = 1.0,
    scaler: Any = None,
    max_pending: int = 256,
) -> DoubleForward:
    """Send each training batch forward a second time after `optimizer.step()`; the training loop stays as it is.

        memnorm.double_forward(model, optimizer)

    Args:
        model: the module that the loop calls: the compiled or DDP-wrapped one, if there is one.
        optimizer: what steps the model; several optimizers as a list, and the second forward follows when all of them
            have stepped.
        every: do this on every n-th step only; on the others the training forward records its own moments.
        fraction: replay a random part of each batch: of every tensor with the batch's length in its first dimension.
        scaler: the `GradScaler`, if there is one: batches of a step it skipped are then forgotten however gradients
            are cleared.
        max_pending: training forwards without a step after which something must be wrong.

    Returns:
        A handle with `remove()`, also usable in a `with` statement. Copies and pickles of the model do not carry it.
    """
    return DoubleForward(model, optimizer, every=every, fraction=fraction, scaler=scaler, max_pending=max_pending)


class DoubleForward:
    """The handle of `double_forward`."""

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
        self._own = {id(parameter) for parameter in model.parameters()}
        self._backwards: dict[int, Backward] = {}  # by autograd's number of the running task
        self._forwards = self._forwards_at_last_step = self._forwards_since_step = self._forwards_counted = 0
        self._blind_steps = 0
        self._proven, self._fruitless = False, 0
        self._draws = False  # whether the model was seen to use the generators of Python or numpy
        self._looks = 0  # training forwards of this and resumed runs
        self._recorded_at_start = batches_recorded(model)
        self._names = list(named_recorders(model))
        self._take_charge(model)
        self._handles = [
            model.register_forward_pre_hook(Hook(self, "_before_forward"), prepend=True, with_kwargs=True),
            model.register_forward_hook(Hook(self, "_after_forward"), with_kwargs=True),
            model.register_forward_hook(Hook(self, "_forget_running"), with_kwargs=True, always_call=True),
        ]
        for one in optimizers:
            self._handles += [
                one.register_step_pre_hook(self._before_step),
                one.register_step_post_hook(self._after_step),
            ]

    @property
    def _optimizers(self) -> list[Optimizer]:
        """Those that still exist."""
        return [one for reference in self._references if (one := reference()) is not None]

    def _take_charge(self, model: nn.Module) -> None:
        drop_inert_hooks(model)
        for name, layer in named_recorders(model).items():
            other = layer._watched_by and layer._watched_by()
            if other is not None and other._optimizers and other._handles:
                raise MemnormError(
                    f"double_forward: layer {name!r} already has a Double-Forward. Call remove() on its handle first, "
                    "or pass all optimizers of the model to one call: double_forward(model, [optimizer, other])."
                )
            layer._watched_by = weakref.ref(self)

    def remove(self) -> None:
        """Detach from model and optimizer: from now on training forwards record as they do without Double-Forward."""
        self._unmute()
        for handle in self._handles:
            handle.remove()
        self._handles, self._pending = [], []

    def __enter__(self) -> DoubleForward:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs to go on alike when `every` or `fraction` is used, or the model draws from the
        generators of Python or numpy.
        """
        return {"steps": self.steps, "looks": self._looks, "draws": int(self._draws)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on where `state_dict` was taken."""
        self.steps = state_dict["steps"]
        self._looks, self._draws = state_dict.get("looks", 0), bool(state_dict.get("draws", False))

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forget_running()  # a forward that was interrupted
        if not self._optimizers:
            return self.remove()
        if inside_backward() or not (torch.is_grad_enabled() or inside_function()):
            return None
        self._forwards += 1
        self._looks += 1
        modules = modules_of(module)
        census = Census.of(modules)
        layers = [one for one in census.recorders if one.training and one.recording]
        if not layers or (self.steps + 1) % self.every:
            return None
        self._drop_skipped_batches()
        self._check_bound(module)
        surroundings = Surroundings.now(modules, self._draws or self._is_watching())
        self._running = Batch(args, kwargs, layers, census, surroundings)
        self._muted = layers
        switch(layers, False)
        return None

    def _after_forward(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        batch = self._running
        if batch is None:
            return
        self._pending.append(batch)
        if self._is_watching() and not self._draws:
            self._draws = batch.surroundings.drawn_from()
        for leaf in [output] if type(output) is Tensor else tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(lambda _grad: self._on_backward(batch))
                batch.observed = True

    def _is_watching(self) -> bool:
        """Whether to see if this forward draws from the generators of Python or numpy, which few models do and which
        takes long: now and then.
        """
        return self._looks <= 8 or self._looks % 64 == 0

    def _forget_running(self, *_forward: Any) -> None:
        """The forward is over, also if it raised: its layers record again when called by someone else."""
        self._running = None
        self._unmute()

    def _unmute(self) -> None:
        switch(self._muted, True)
        self._muted = []

    def _on_backward(self, batch: Batch) -> None:
        """Backward reaches the output of `batch`. If every gradient is cleared by now, earlier ones are lost."""
        task = torch._C._current_graph_task_id()
        if task not in self._backwards:
            gradients = list(self._gradients())
            if all(gradient is None for gradient in gradients):
                self._drop_cleared()
            self._backwards[task] = Backward(gradients)
            Variable._execution_engine.queue_callback(lambda: self._after_backward(task))
        batch.reached = True
        batch.differentiated |= torch.is_grad_enabled()  # create_graph: a later backward may go through its gradient
        self._backwards[task].batches.append(batch)

    def _after_backward(self, task: int) -> None:
        """Which batches have their gradient in the parameters now. An `autograd.grad` for an attack leaves none."""
        backward = self._backwards.pop(task, None)
        if backward is not None and backward.changed(self._gradients()):
            penalties = [batch for batch in self._pending if batch.differentiated]
            for batch in (*backward.batches, *penalties):
                batch.accumulated = True

    def _are_cleared(self) -> bool:
        """Whether there is no gradient at all."""
        return all(gradient is None for gradient in self._gradients())

    def _drop_cleared(self) -> None:
        """Forget batches whose gradients were cleared before any step."""
        self._pending = [batch for batch in self._pending if batch.used or not batch.accumulated]

    def _gradients(self) -> Iterator[Tensor | None]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in self._own:
                        yield parameter.grad

    def _drop_skipped_batches(self) -> None:
        """A `GradScaler` makes its per-optimizer states anew in every update(): an update without a step means that the
        step was skipped.
        """
        states = getattr(self.scaler, "_per_optimizer_states", None)
        if states is not self._scaler_round:
            self._pending, self._scaler_round = [], states

    def _before_step(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let each evaluation of a closure start from the batches seen before the step, so that only the last one's
        remain.
        """
        if self._are_cleared():
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
        count_step_early(optimizer)  # the second forward sees the new weights
        if inside_backward():  # a step as gradients arrive: the callback would come too late
            for task in list(self._backwards):
                self._after_backward(task)
        self._backwards.clear()  # of a backward that raised, the callback never comes
        self._check_sight()
        for batch in self._pending:
            batch.used |= batch.accumulated
        again = id(optimizer) in self._stepped
        self._stepped.add(id(optimizer))
        if again or self._stepped >= {id(one) for one in self._optimizers}:
            self._stepped = {id(optimizer)} if again else set()
            self.steps += self._forwards > self._forwards_counted  # of several optimizers, a later one adds no step
            self._forwards_counted = self._forwards
            self._replay_pending()

    def _replay_pending(self) -> None:
        """Replay what went into the step. A backward that was seen shows which batches did; else it must be all."""
        pending, self._pending = self._pending, []
        if any(batch.reached for batch in pending):
            pending = [batch for batch in pending if batch.accumulated or not batch.observed]
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
        before = None if self._proven else batches_recorded(model)
        try:
            replay(model, args, kwargs, batch.surroundings, batch.layers, batch.census)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"memnorm: in the second forward, after step {self.steps}, which itself is done")
            raise
        if before is not None:
            self._prove(model, before)

    def _prove(self, model: nn.Module, before: dict[str, int]) -> None:
        """See once that the second forward reaches layers; reads the device until it has."""
        self._proven = batches_recorded(model) != before
        self._fruitless += not self._proven
        if self._fruitless == 3:
            warn(
                f"double_forward: {self._fruitless} second forwards of {type(model).__name__} have recorded nothing. "
                "Its memorized layers are not the ones that run (kept elsewhere than among its modules?), or every "
                "batch is not finite."
            )

    def _check_bound(self, module: nn.Module) -> None:
        self._forwards_since_step += 1
        if self._forwards_since_step > self.max_pending:
            self._pending, self._forwards_since_step = [], 0
            raise MemnormError(
                f"double_forward: {self.max_pending} training forwards of {type(module).__name__} without a step of "
                "its optimizer. If the loop accumulates more batches than that, raise max_pending; if another "
                "optimizer trains the model, pass that one; if training is over, call remove() on the handle."
            )

    def _check_sight(self) -> None:
        """Complain about steps of which no forward was seen: nothing would be recorded."""
        model = self._model()
        if model is not None:
            census = self._pending[-1].census if self._pending else Census.of(modules_of(model))
            check_kept(model, self._names, "double_forward", census.without_record(model))
            if not census.recorders:
                raise NothingToRecord(f"double_forward: {nothing_records(model)}")
        if model is not None and self._forwards == 0 and any(gradient is not None for gradient in self._gradients()):
            raise NothingToRecord(never_called(model, self._recorded_at_start))
        self._blind_steps = self._blind_steps + 1 if self._forwards == self._forwards_at_last_step else 0
        self._forwards_at_last_step = self._forwards
        if self._blind_steps == 10 * len(self._optimizers):
            warn(
                f"double_forward: {self._blind_steps} optimizer steps without a training forward of "
                f"{type(model).__name__}; nothing is being recorded. Call the module that was given to "
                "double_forward, or remove() the handle."
            )


def detach(model: nn.Module) -> None:
    """Remove every Double-Forward from `model`: its layers are about to be replaced."""
    for module in model.modules():
        for hook in [*module._forward_pre_hooks.values()]:
            if isinstance(hook, Hook):
                hook.handle.remove()
        drop_inert_hooks(module)


def _check_arguments(model: nn.Module, optimizers: list[Any], every: int, fraction: float, max_pending: int) -> None:
    for optimizer in optimizers or [None]:
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            raise DTypeError(
                "double_forward: expected a torch.optim.Optimizer, or several in a list; "
                f"got {type(optimizer).__name__}. Of a wrapper, pass the optimizer inside."
            )
    check_module(model, "double_forward")
    if not any(getattr(layer, "running_mean", True) is not None for layer in recorders(model)):
        raise NothingToRecord(f"double_forward: {nothing_records(model)}")
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
