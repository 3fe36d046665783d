"""How two-way layers learn of updates: every kind of training loop, without a line for it in the loop."""

import copy
import gc
import pickle

import pytest
import torch
from helpers.common import assert_same_state, images, labels, small_net
from torch import nn

import memnorm
from memnorm.norms.two_way import PATIENCE

DECAY, COUNT, VALUES = 0.7, 4, (4 * 36, 4 * 16)  # images a batch; values per channel behind the first and second norm


def two_way(**options):
    return memnorm.convert(small_net(dtype=torch.float64), "two_way", **{"warmup": 0, "decay": DECAY, **options})


def loss_of(net, seed, count=COUNT):
    return nn.functional.cross_entropy(net(images(count, seed=seed, dtype=torch.float64)), labels(count, seed=seed))


def weights(net):
    return [[float(layer.running_weight), float(layer.backward_weight)] for layer in (net[1], net[4])]


def closed_form(updates_since):
    """W and W_b of both norms after batches each of which is so many updates old."""
    total = sum(DECAY**age for age in updates_since)
    return [[values * total] * 2 for values in VALUES]


def assert_weights(net, updates_since):
    torch.testing.assert_close(weights(net), closed_form(updates_since), rtol=1e-12, atol=0)


@pytest.mark.parametrize("windows", [[1] * 50, [4] * 12 + [2], [16, 16, 16, 2], [3, 1, 7, 2, 5, 1, 1, 30]], ids=str)
def test_batches_fade_with_each_step_and_not_within_a_window(windows):
    net = two_way()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    ages = []
    for number, window in enumerate(windows):
        for part in range(window):
            loss_of(net, 100 * number + part).backward()
            ages.append(0)
            assert_weights(net, ages)
        optimizer.step()
        optimizer.zero_grad()
        ages = [age + 1 for age in ages]
        assert_weights(net, ages)
    assert len(ages) == 50


def test_without_an_optimizer_each_forward_with_a_backward_is_an_update():
    net, ages = two_way(), []
    for step in range(50):
        gradients = torch.autograd.grad(loss_of(net, step), list(net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.sub_(0.01 * gradient)
        ages = [age + 1 for age in (*ages, 0)]
        assert_weights(net, ages)


def test_an_optimizer_that_trains_something_else_does_not_count():
    net, other = two_way(), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (net, other)]
    loss_of(net, 0).backward()
    other(torch.ones(1, 2)).sum().backward()
    optimizers[1].step()
    assert_weights(net, [0])
    optimizers[0].step()
    assert_weights(net, [1])


def test_of_two_optimizers_each_counts_for_the_layers_that_it_trains():
    net = two_way()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.01) for part in (net[:3], net[3:]))
    for step in range(4):
        loss_of(net, step).backward()
        second.step()
        if step % 2:
            first.step()
    ages_of_first, ages_of_second = [2, 2, 1, 1], [4, 3, 2, 1]
    expected = [closed_form(ages_of_first)[0], closed_form(ages_of_second)[1]]
    torch.testing.assert_close(weights(net), expected, rtol=1e-12, atol=0)


def test_optimizers_that_share_the_parameters_of_a_layer_count_once():
    net = two_way()
    matrices = torch.optim.SGD([p for p in net.parameters() if p.dim() > 1], lr=0.01)
    vectors = torch.optim.Adam([p for p in net.parameters() if p.dim() == 1], lr=0.01)
    for step in range(3):
        loss_of(net, step).backward()
        matrices.step()
        vectors.step()
    assert_weights(net, [3, 2, 1])


def without_parameters(how):
    """A network whose norms are frozen or have no affine map."""
    net = small_net(dtype=torch.float64)
    for index in (1, 4):
        if how == "frozen":
            net[index].requires_grad_(False)
        else:
            net[index] = nn.BatchNorm2d(net[index].num_features, affine=False, dtype=torch.float64)
    return memnorm.convert(net, "two_way", warmup=0, decay=DECAY)


WITHOUT_PARAMETERS = pytest.mark.parametrize("how", ["frozen", "without affine map"])


def optimizer_of(net):
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)


@pytest.mark.filterwarnings("ignore")  # of torch about itself
@WITHOUT_PARAMETERS
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer_without_trainable_parameters_follows_the_optimizer_of_its_model(how, compiled):
    torch.compiler.reset()
    net = without_parameters(how)
    optimizer = optimizer_of(net)
    called = torch.compile(net, backend="aot_eager") if compiled else net
    for step in range(3):
        for part in range(2):
            loss_of(called, 10 * step + part).backward()
        optimizer.step()
    assert_weights(net, [3, 3, 2, 2, 1, 1])


@WITHOUT_PARAMETERS
def test_a_layer_without_trainable_parameters_follows_another_optimizer_if_the_first_no_longer_steps(how):
    net = without_parameters(how)
    first, second = optimizer_of(net), optimizer_of(net)
    for optimizer, steps in ((first, 3), (second, 60)):
        for step in range(steps):
            loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(weights(net), closed_form(range(1, 60)), rtol=1e-6, atol=0)


def test_a_closure_is_one_update():
    net = two_way()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(net, step)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_weights(net, [3, 2, 1])


def test_steps_while_gradients_arrive_count_once():
    """One optimizer for each parameter, as in memory-saving trainings."""
    net = two_way()
    for parameter in net.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.01)
        parameter.register_post_accumulate_grad_hook(lambda _parameter, optimizer=optimizer: optimizer.step())
    for step in range(3):
        loss_of(net, step).backward()
        net.zero_grad()
    assert_weights(net, [3, 2, 1])


def test_a_layer_in_eval_mode_keeps_its_memory():
    net = two_way()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loss_of(net, 0).backward()
    net[1].eval()
    optimizer.step()
    expected = [closed_form([0])[0], closed_form([1])[1]]
    torch.testing.assert_close(weights(net), expected, rtol=1e-12, atol=0)


def test_a_model_that_is_not_used_any_more_is_not_kept():
    import gc
    import weakref

    net = two_way()
    loss_of(net, 0).backward()
    gone = weakref.ref(net[1])
    del net
    gc.collect()
    assert gone() is None


# GradScaler


def scaled_training(net, scaler, steps, *, broken=(), accumulate=2):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            loss = loss_of(net, 10 * step + part)
            if step in broken:
                loss = loss * float("inf")
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif step not in broken:
            optimizer.step()
    return net


def test_a_scale_that_doubles_does_not_disturb_what_is_remembered():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    scaled, plain = scaled_training(two_way(), scaler, 9), scaled_training(two_way(), None, 9)
    assert scaler.get_scale() == 64
    assert_same_state(scaled, plain, atol=1e-12)


def test_a_skipped_step_is_no_update_and_its_gradients_are_not_remembered():
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    scaled = scaled_training(two_way(), scaler, 6, broken=(0, 3))
    plain = scaled_training(two_way(), None, 6, broken=(0, 3))
    assert scaler.get_scale() == 16
    assert_same_state(scaled, plain, atol=1e-12)
    forward, backward = weights(scaled)[0]
    ages = {0: 4, 1: 4, 2: 3, 3: 2, 4: 2, 5: 1}
    assert forward == pytest.approx(2 * VALUES[0] * sum(DECAY**age for age in ages.values()))
    assert backward == pytest.approx(2 * VALUES[0] * sum(DECAY ** ages[step] for step in (1, 2, 4, 5)))


def test_a_step_that_a_fused_optimizer_skips_is_no_update():
    net = two_way()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
    loss_of(net, 0).backward()
    optimizer.found_inf = torch.tensor(1.0)  # as GradScaler tells an optimizer that skips by itself
    optimizer.step()
    assert_weights(net, [0])
    del optimizer.found_inf
    optimizer.step()
    assert_weights(net, [1])


def test_clipping_has_no_effect_on_what_is_remembered():
    nets = [two_way(), two_way()]
    for net, clip in zip(nets, (True, False), strict=True):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            optimizer.step()
    assert_same_state(*nets)


def test_an_average_of_the_model_averages_the_memory_and_counts_no_updates():
    net = two_way()
    average = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(3):
        loss_of(net, step).backward()
        optimizer.step()
        average.update_parameters(net)
    first = sum(VALUES[0] * sum(DECAY**age for age in range(1, count + 1)) for count in (1, 2, 3)) / 3
    assert float(average.module[1].running_weight) == pytest.approx(first)


def test_an_optimizer_that_is_made_after_a_first_backward_is_found():
    net = two_way()
    loss_of(net, 0).backward()  # a check before the training
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for part in range(1, 5):
        loss_of(net, part).backward()
    assert_weights(net, [1, 0, 0, 0, 0])
    optimizer.step()
    assert_weights(net, [2, 1, 1, 1, 1])


@pytest.mark.parametrize("then", ["a checkpoint", "a forward"])
def test_a_scaled_backward_that_raises_leaves_nothing_scaled(then):
    net, scaler = two_way(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler.scale(loss_of(net, 0)).backward()
    before = net[4].backward_product.clone()
    handle = net[0].weight.register_hook(lambda _gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaler.scale(loss_of(net, 1)).backward()
    handle.remove()
    assert net[4].backward_product.abs().max() > 100 * before.abs().max()
    if then == "a forward":
        loss_of(net, 2)
        state = dict(net.named_buffers())
    else:
        state = net.state_dict()
    assert state["4.backward_product"].abs().max() < 10 * before.abs().max()
    assert torch.equal(state["4.backward_product"], net[4].backward_product)
    del optimizer


def after_a_scaled_backward_that_raised(net, scaler):
    handle = net[0].weight.register_hook(lambda _gradient: 1 / 0)
    with memnorm.recording(net, False), pytest.raises(ZeroDivisionError):
        scaler.scale(loss_of(net, 1)).backward()
    handle.remove()
    return net


def test_a_model_pickled_after_a_scaled_backward_that_raised_is_not_scaled():
    net, scaler = two_way(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss_of(net, 0).backward()
    before = net[4].backward_product.clone()
    pickled = pickle.dumps(after_a_scaled_backward_that_raised(net, scaler))
    net.state_dict()
    assert torch.equal(pickle.loads(pickled)[4].backward_product, before)


def test_a_model_loaded_after_a_scaled_backward_that_raised_is_what_was_pickled():
    net, scaler = two_way(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss_of(net, 0).backward()
    pickled, before = pickle.dumps(net), net[4].backward_product.clone()
    after_a_scaled_backward_that_raised(net, scaler)
    loaded = pickle.loads(pickled)
    net.state_dict()
    assert torch.equal(loaded[4].backward_product, before)


def test_a_scale_of_zero_does_not_spoil_the_memory():
    net, scaler = two_way(), torch.amp.GradScaler("cpu", init_scale=1.0)
    loss_of(net, 0).backward()
    scaler.scale(torch.ones(1))  # which makes the scale
    scaler._scale.zero_()
    scaler.scale(loss_of(net, 1)).backward()
    assert net[1].backward_mean.isfinite().all()


class Sam(torch.optim.Optimizer):
    """An optimizer that steps another one inside its own step."""

    def __init__(self, parameters, inner):
        super().__init__(parameters, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()


def test_a_step_inside_a_step_is_one_update():
    net = two_way()
    optimizer = Sam(net.parameters(), torch.optim.SGD(net.parameters(), lr=0.01))
    for step in range(3):
        loss_of(net, step).backward()
        optimizer.step()
    assert_weights(net, [3, 2, 1])


def test_a_frozen_teacher_fades_with_the_steps_of_its_student():
    student = two_way()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
    for step in range(3):
        with torch.no_grad():
            loss_of(teacher, step)
        loss_of(student, step).backward()
        optimizer.step()
    expected = closed_form([3, 2, 1])
    assert float(teacher[1].running_weight) == pytest.approx(expected[0][0])
    assert float(teacher[1].backward_weight) == 0


def test_a_teacher_whose_parameters_require_grad_fades_with_its_student_after_some_steps():
    student = two_way()
    teacher = copy.deepcopy(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
    for step in range(PATIENCE + 20):
        with torch.no_grad():
            loss_of(teacher, step)
        loss_of(student, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    ages = [*([20] * (PATIENCE + 1)), *range(19, 0, -1)]
    assert float(teacher[1].running_weight) == pytest.approx(closed_form(ages)[0][0])
    assert int(teacher[1].num_images) == 0


def gan_step(generator, discriminator, optimizers, step, toggle):
    """As in pix2pix: each network is frozen while the other one learns."""

    def fake():
        return generator(images(COUNT, seed=step, dtype=torch.float64))

    if toggle:
        discriminator.requires_grad_(True)
    discriminator(fake().detach()).square().mean().backward()
    optimizers[1].step()
    optimizers[1].zero_grad()
    if toggle:
        discriminator.requires_grad_(False)
    discriminator(fake()).mean().backward()
    optimizers[0].step()
    for optimizer in optimizers:
        optimizer.zero_grad()


@pytest.mark.parametrize("toggle", [False, True])
def test_in_a_gan_each_network_fades_with_its_own_optimizer(toggle):
    generator = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh()).double()
    generator = memnorm.convert(generator, "two_way", warmup=0, decay=DECAY)
    discriminator = two_way()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (generator, discriminator)]
    for step in range(6):
        gan_step(generator, discriminator, optimizers, step, toggle)
    assert [int(layer.num_images) for layer in (generator[1], discriminator[1])] == [0, COUNT]
    ages = [6 - step for step in range(6)]  # of the batches before and behind the discriminator's steps
    behind = sum(DECAY ** (age - 1) for age in ages)
    before = sum(DECAY**age for age in ages)
    assert float(discriminator[1].running_weight) == pytest.approx(VALUES[0] * (before + behind))
    values = COUNT * images(1, seed=0)[0, 0].numel()
    assert float(generator[1].running_weight) == pytest.approx(2 * values * before)


def test_backwards_count_again_if_the_optimizer_is_gone():
    net = two_way()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loss_of(net, 0).backward()
    optimizer.step()
    del optimizer
    gc.collect()
    for step in range(1, 4):
        loss_of(net, step).backward()
    assert_weights(net, [4, 3, 2, 1])


@pytest.mark.parametrize("how", ["load_state_dict", "deepcopy", "pickle", "to"])
def test_a_step_with_nothing_recorded_is_no_update_after_loading_or_copying_either(how):
    net = two_way(warmup=10)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(3):
        loss_of(net, step).backward()
        optimizer.step()
    if how == "load_state_dict":
        net.load_state_dict(copy.deepcopy(net.state_dict()))
    elif how == "to":
        net = net.float().double()
    else:
        net = copy.deepcopy(net) if how == "deepcopy" else pickle.loads(pickle.dumps(net))
    before = weights(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loss_of(net.eval(), 3).backward()
    net.train()
    optimizer.step()
    assert weights(net) == before
    assert int(net[1].num_updates) == 3
    loss_of(net, 4).backward()
    optimizer.step()
    assert int(net[1].num_updates) == 4


def test_an_optimizer_of_the_biases_alone_counts():
    net = two_way()
    optimizer = torch.optim.SGD([net[1].bias, net[4].bias], lr=0.01)
    for part in range(3):
        loss_of(net, part).backward()
    assert_weights(net, [0, 0, 0])
    optimizer.step()
    assert_weights(net, [1, 1, 1])


def test_an_optimizer_like_object_without_groups_does_no_harm():
    class Several(torch.optim.Optimizer):
        def __init__(self, *optimizers):
            self.optimizers = optimizers

    several, net = Several(), two_way()
    loss_of(net, 0).backward()
    assert_weights(net, [1])
    del several


def test_a_model_on_meta_does_not_disturb_the_steps_of_others():
    with torch.device("meta"):
        bystander = memnorm.convert(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False)), "two_way")
    bystander(torch.randn(2, 3, 8, 8, device="meta")).sum().backward()
    linear = nn.Linear(2, 2)
    linear(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(linear.parameters(), lr=0.1).step()


def test_a_checkpoint_loaded_after_a_scaled_backward_that_raised_is_what_was_saved():
    net, scaler = two_way(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss_of(net, 0).backward()
    saved = copy.deepcopy(net.state_dict())
    handle = net[0].weight.register_hook(lambda _gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaler.scale(loss_of(net, 1)).backward()
    handle.remove()
    net.load_state_dict(saved)
    with torch.no_grad():
        loss_of(net, 2)
    assert torch.equal(net[4].backward_product, saved["4.backward_product"])


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_counts_updates_and_warms_up():
    torch.compiler.reset()
    net = two_way(warmup=4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for seed in range(6):
        optimizer.zero_grad()
        loss_of(net, seed).backward()
        step()
    assert int(net[1].num_updates) == 4
    assert float(net[1].strength) == 1.0
    assert_weights(net, [6, 5, 4, 3, 2, 1])
