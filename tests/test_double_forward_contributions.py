"""Double-Forward replays the batches whose gradient is in the step, and says so when it cannot record anything."""

import pytest
import torch
from helpers.common import images, small_net
from helpers.double_forward import assert_remembers, batch, transparent_net
from torch import nn

import memnorm
from memnorm.errors import MemnormError, MemnormWarning, OptionError


def attached(**options):
    model = transparent_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, memnorm.double_forward(model, optimizer, **options)


def train(model, optimizer, data):
    for x in data:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()


def entries(model):
    return [int((layer.memory_count > 0).sum()) for layer in model.modules() if hasattr(layer, "memory_count")]


@pytest.mark.parametrize("clear", ["before the attack", "after the attack"])
def test_the_forwards_of_an_adversarial_attack_are_not_recorded(clear):
    model, optimizer, _ = attached()
    for step in range(2):
        if clear == "before the attack":
            optimizer.zero_grad()
        x = batch(step).requires_grad_()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(model(x).pow(2).sum(), x)
            x = (x + 0.1 * gradient.sign()).detach().requires_grad_()
        if clear == "after the attack":
            optimizer.zero_grad()
        model(x.detach()).pow(2).sum().backward()
        optimizer.step()
    assert set(entries(model)) == {2}


def test_an_attack_between_accumulated_batches_is_not_recorded():
    model, optimizer, _ = attached()
    model(batch(1)).mean().backward()
    x = batch(2).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    model(batch(3)).mean().backward()
    optimizer.step()
    assert_remembers(model, batch(3), batch(1))


def test_a_forward_through_frozen_parameters_is_not_recorded():
    """The generator's phase of a GAN that freezes its discriminator."""
    model, optimizer, _ = attached()
    model.requires_grad_(False)
    model(batch(1).requires_grad_()).mean().backward()
    model.requires_grad_(True)
    model(batch(2)).mean().backward()
    optimizer.step()
    assert_remembers(model, batch(2))


def test_gradients_cleared_just_before_the_step_are_not_in_it():
    model, optimizer, _ = attached()
    model(batch(1)).mean().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert_remembers(model)


def test_a_batch_whose_backward_raised_is_not_recorded():
    model, optimizer, _ = attached()
    raising = model[1].weight.register_hook(lambda _gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch(1)).mean().backward()
    raising.remove()
    train(model, optimizer, [batch(2)])
    assert_remembers(model, batch(2))


def test_an_optimizer_that_steps_inside_backward_is_followed_by_a_second_forward():
    model, optimizer, _ = attached()
    last = next(iter(model.parameters()))  # the first layer's gradient arrives last
    last.register_post_accumulate_grad_hook(lambda _parameter: optimizer.step())
    for seed in (1, 2):
        model(batch(seed)).mean().backward()
    assert_remembers(model, batch(2), batch(1))


def test_an_optimizer_that_steps_every_other_time_loses_no_batch():
    model = transparent_net()
    parameters = list(model.parameters())
    often, seldom = (torch.optim.SGD(part, lr=0.1) for part in (parameters[:2], parameters[2:]))
    handle = memnorm.double_forward(model, [often, seldom])
    for step in range(6):
        often.zero_grad(), seldom.zero_grad()
        model(batch(step)).mean().backward()
        often.step()
        if step % 2:
            seldom.step()
    assert_remembers(model, *(batch(step) for step in (5, 4, 3, 2, 1, 0)))
    assert handle.steps <= 6


def test_a_new_optimizer_that_nobody_told_about_is_an_error():
    model, old, _ = attached(max_pending=20)
    new = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MemnormError, match="20 training forwards of Sequential without a step of its optimizer"):
        train(model, new, [batch(1)] * 40)
    assert old.param_groups


def test_two_models_may_share_an_optimizer_and_not_run_at_first():
    used, unused = transparent_net(), transparent_net()
    optimizer = torch.optim.SGD([*used.parameters(), *unused.parameters()], lr=0.1)
    memnorm.double_forward(used, optimizer)
    memnorm.double_forward(unused, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        used(batch(step)).mean().backward()
        if step == 2:
            unused(batch(9)).mean().backward()
        optimizer.step()
    assert_remembers(used, batch(2), batch(1), batch(0))
    assert_remembers(unused, batch(9))


class Elsewhere(nn.Module):
    """Runs a norm that it does not register."""

    def __init__(self, registered):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.running = [self.norm] if registered else ({"norm": nn.BatchNorm2d(3)},)

    def forward(self, x):
        norm = self.running[0]
        return (norm["norm"] if isinstance(norm, dict) else norm)(self.conv(x))


def test_a_norm_that_is_also_kept_in_a_list_is_converted_there():
    model = memnorm.convert(Elsewhere(registered=True))
    assert model.running[0] is model.norm
    assert isinstance(model.norm, memnorm.MemorizedBatchNorm2d)


def test_second_forwards_that_record_nothing_give_a_warning():
    model = memnorm.convert(Elsewhere(registered=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memnorm.double_forward(model, optimizer)
    with pytest.warns(MemnormWarning, match="second forwards of Elsewhere have recorded nothing"):
        train(model, optimizer, [images(4, seed=seed) for seed in range(5)])


def test_fraction_of_a_list_of_images_is_refused_in_words():
    class OfList(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = memnorm.convert(small_net())

        def forward(self, pictures):
            return self.net(torch.stack(pictures))

    model = OfList()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memnorm.double_forward(model, optimizer, fraction=0.5)
    model(list(images(4, seed=1))).mean().backward()
    with pytest.raises(OptionError, match="fraction needs a tensor with a batch dimension"):
        optimizer.step()


def test_an_error_in_the_second_forward_says_where_it_happened():
    model, optimizer, _ = attached()
    output = model(batch(1)).mean()

    def refuse(*_):
        raise ValueError("no")

    output.backward()
    model.register_forward_pre_hook(refuse)
    with pytest.raises(ValueError, match="no") as caught:
        optimizer.step()
    assert "second forward" in caught.value.__notes__[0]


def test_eval_mode_between_backward_and_step_records_nothing():
    model, optimizer, _ = attached()
    model(batch(1)).mean().backward()
    model.eval()
    optimizer.step()
    assert set(entries(model)) == {0}
