"""Centred gradients: which layers, what they lose, and every training loop they must survive."""

import copy
import pickle

import pytest
import torch
from helpers.common import images, labels, small_net
from torch import nn
from torch.nn.utils import prune

import memnorm


def means(tensor):
    return tensor.flatten(1).mean(1)


def loss_of(net, seed=0):
    return nn.functional.cross_entropy(net(images(4, seed=seed)), labels(4, seed=seed))


def assert_centred(net, names=("0", "3")):
    for name in names:
        gradient = net.get_submodule(name).weight.grad
        torch.testing.assert_close(means(gradient), torch.zeros(len(gradient)), rtol=0, atol=1e-7)
        assert gradient.abs().max() > 1e-4


def test_it_names_the_layers_that_feed_a_norm_and_leaves_the_classifier_alone():
    net = small_net()
    handle = memnorm.center(net)
    assert handle.layers == ("0", "3")
    loss_of(net).backward()
    assert_centred(net)
    assert means(net[8].weight.grad).abs().max() > 1e-4


class Zoo(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise, self.depthwise_norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 6, 1)
        self.grouped, self.grouped_norm = nn.Conv2d(8, 12, 3, padding=1, groups=2), nn.GroupNorm(3, 12)
        self.up, self.up_norm = nn.ConvTranspose2d(12, 4, 2, stride=2, groups=2), nn.InstanceNorm2d(4)
        self.hidden, self.hidden_norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = self.stem_norm(self.stem(x)).relu()
        x = self.depthwise_norm(self.depthwise(x)).relu()
        x = x + self.excite(self.squeeze(x)).mean()
        x = self.up_norm(self.up(self.grouped_norm(self.grouped(x)).relu())).relu()
        return self.head(self.hidden_norm(self.hidden(x.mean((2, 3)))).relu())


def test_filters_of_one_channel_layers_before_no_norm_and_the_head_are_left_alone():
    assert memnorm.center(Zoo()).layers == ("stem", "grouped", "up", "hidden")


def test_a_transposed_convolution_loses_the_mean_over_what_each_output_is_made_of():
    net = Zoo()
    memnorm.center(net)
    loss_of(net).backward()
    gradient = net.up.weight.grad.unflatten(0, (2, 6))  # group, inputs of the group, outputs of the group, …
    torch.testing.assert_close(gradient.mean((1, 3, 4)), torch.zeros(2, 2), rtol=0, atol=1e-7)
    assert net.up.weight.grad.flatten(1).mean(1).abs().max() > 1e-6


def test_with_gradients_the_outputs_before_training_are_bit_equal():
    net = small_net()
    wanted = copy.deepcopy(net)(images(4, seed=0))
    memnorm.center(net, "gradients")
    assert torch.equal(net(images(4, seed=0)), wanted)
    assert net.state_dict().keys() == small_net().state_dict().keys()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_means_of_weights_move_only_by_weight_decay(decay):
    net = small_net()
    memnorm.center(net)
    before = means(net[0].weight.detach())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=decay)
    for seed in range(5):
        optimizer.zero_grad()
        loss_of(net, seed).backward()
        optimizer.step()
    wanted = before * (1 - 0.1 * decay) ** 5
    torch.testing.assert_close(means(net[0].weight.detach()), wanted, rtol=1e-5, atol=1e-7)


def test_the_conversion_centres_weights_of_untrained_and_gradients_of_trained_models():
    fresh, pretrained = small_net(), small_net()
    pretrained(images(8, seed=0))
    weights = pretrained[0].weight.clone()
    memnorm.convert(fresh, "two_way")
    memnorm.convert(pretrained, "two_way")
    assert means(fresh[0].weight).abs().max() < 1e-7
    assert torch.equal(pretrained[0].weight, weights)
    for net in (fresh, pretrained):
        loss_of(net).backward()
        assert_centred(net)


def test_the_conversion_can_leave_it_out():
    net = memnorm.convert(small_net(), "two_way", center=None)
    loss_of(net).backward()
    assert means(net[0].weight.grad).abs().max() > 1e-4


def test_a_model_whose_norms_nothing_feeds_is_converted_and_cannot_be_centred():
    memnorm.convert(nn.Sequential(nn.BatchNorm2d(3)), "two_way")
    with pytest.raises(memnorm.MemnormError, match="feeds a norm"):
        memnorm.center(nn.Sequential(nn.BatchNorm2d(3)))


@pytest.mark.parametrize("undo", ["handle", "to_batchnorm"])
def test_it_can_be_removed(undo):
    net = memnorm.convert(small_net(), "two_way") if undo == "to_batchnorm" else small_net()
    if undo == "handle":
        memnorm.center(net).remove()
    else:
        memnorm.center(net)  # not only the centring by the conversion
        memnorm.to_batchnorm(net)
    loss_of(net).backward()
    assert means(net[0].weight.grad).abs().max() > 1e-4
    assert vars(net[0]).keys() == vars(nn.Conv2d(3, 3, 3)).keys()


def test_calling_it_twice_is_calling_it_once():
    net = small_net()
    memnorm.center(net)
    memnorm.center(net).remove()
    loss_of(net).backward()
    assert means(net[0].weight.grad).abs().max() > 1e-4


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), lambda net: copy.deepcopy(copy.deepcopy(net))],
)
def test_copies_keep_it_and_are_removed_apart(duplicate):
    net = small_net()
    handle = memnorm.center(net)
    twin = duplicate(net)
    handle.remove()
    for one in (net, twin):
        loss_of(one).backward()
    assert_centred(twin)
    assert means(net[0].weight.grad).abs().max() > 1e-4


def test_a_model_made_on_meta_is_centred_once_it_has_weights():
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 6), nn.Flatten())
    memnorm.convert(net, "two_way")
    net = copy.deepcopy(net).to_empty(device="cpu")
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for _ in range(2):
        loss_of(net).backward()
    assert_centred(net, ["0"])
    assert not net[0]._forward_pre_hooks


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_accumulated_gradients_of_any_layout_and_dtype(layout, dtype):
    net, plain = (small_net(dtype=dtype).to(memory_format=layout) for _ in range(2))
    memnorm.center(net)
    for model in (net, plain):
        for seed in range(3):
            x = images(4, seed=seed, dtype=dtype).contiguous(memory_format=layout)
            nn.functional.cross_entropy(model(x).float(), labels(4, seed=seed)).backward()
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    for index in (0, 3):
        gradient = plain[index].weight.grad
        wanted = gradient - gradient.mean((1, 2, 3), keepdim=True)
        torch.testing.assert_close(net[index].weight.grad, wanted, rtol=tolerance, atol=tolerance)


def fused(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)


def grouped(net):
    sizes = [[p for p in net.parameters() if p.dim() > 1], [p for p in net.parameters() if p.dim() == 1]]
    return torch.optim.SGD([{"params": one, "lr": rate} for one, rate in zip(sizes, (0.1, 0.01), strict=True)])


@pytest.mark.parametrize("make", [fused, grouped], ids=["fused", "parameter groups"])
@pytest.mark.parametrize("extra", ["nothing", "clipping", "scaler", "closure"])
def test_weights_stay_centred_in_every_loop(make, extra):
    net = small_net()
    memnorm.center(net, "weights")
    optimizer, scaler = make(net), torch.amp.GradScaler("cpu", init_scale=8.0, enabled=extra == "scaler")
    for seed in range(4):

        def closure(seed=seed):
            optimizer.zero_grad()
            loss = loss_of(net, seed)
            scaler.scale(loss).backward()
            return loss

        if extra == "closure":
            optimizer.step(closure)
            continue
        closure()
        if extra == "clipping":
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert means(net[3].weight.detach()).abs().max() < 1e-6


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_under_create_graph_the_centred_gradient_can_be_differentiated():
    net = small_net()
    memnorm.center(net)
    loss_of(net).backward(create_graph=True)
    assert_centred(net)
    plain = small_net()
    gradient = torch.autograd.grad(loss_of(plain), plain[0].weight, create_graph=True)[0]
    wanted = torch.autograd.grad((gradient - gradient.mean((1, 2, 3), keepdim=True)).square().sum(), plain[3].weight)
    found = torch.autograd.grad(net[0].weight.grad.square().sum(), net[3].weight)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    net.zero_grad()


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_has_centred_gradients():
    torch.compiler.reset()
    net = small_net()
    memnorm.center(net)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    loss_of(compiled).backward()
    assert_centred(net)


def test_frozen_weights_are_passed_over():
    net = small_net()
    net[0].requires_grad_(False)
    assert memnorm.center(net).layers == ("0", "3")
    loss_of(net).backward()
    assert_centred(net, ["3"])


@pytest.mark.parametrize("how", ["assigned", "replaced", "unfrozen"])
def test_a_weight_that_is_replaced_or_unfrozen_is_centred_from_the_second_step_on(how):
    net = small_net()
    if how == "unfrozen":
        net[0].weight.requires_grad_(False)
    memnorm.center(net)
    if how == "assigned":
        net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    elif how == "replaced":
        net[0].weight = nn.Parameter(net[0].weight.detach().clone())
    else:
        net[0].weight.requires_grad_(True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()
    assert_centred(net)


def test_a_hook_that_clears_the_gradient_first_is_no_error():
    net = small_net()
    net[0].weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    memnorm.center(net)
    loss_of(net).backward()
    assert net[0].weight.grad is None


def test_wrong_arguments_are_errors():
    with pytest.raises(memnorm.MemnormError, match="'gradients' or 'weights'"):
        memnorm.center(small_net(), "filters")
    with pytest.raises(memnorm.MemnormError, match=r"torch\.nn\.Module"):
        memnorm.center(nn.Conv2d)


class Probe(nn.Module):
    """A frozen encoder with layer norms, a fresh batch norm and a head."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2).requires_grad_(False)
        self.hidden, self.norm, self.head = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.norm(self.hidden(self.encoder(x).mean(1))))


def test_the_conversion_touches_only_weights_that_feed_its_own_norms_and_are_trained():
    model, x = Probe().eval(), torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    wanted = model.encoder(x)
    memnorm.convert(model, "two_way")
    assert torch.equal(model.encoder(x), wanted)
    assert model.hidden.weight.mean(1).abs().max() < 1e-6
    frozen = small_net().requires_grad_(False)
    weight = frozen[0].weight.clone()
    memnorm.convert(frozen, "two_way")
    assert torch.equal(frozen[0].weight, weight)


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.3)


@pytest.mark.parametrize("change", [nn.utils.parametrizations.weight_norm, pruned])
def test_weights_that_are_computed_from_others_are_left_alone(change):
    net = small_net()
    change(net[0])
    memnorm.convert(net, "two_way")
    loss_of(net).backward()
    assert_centred(net, ["3"])
    assert memnorm.center(net).layers == ("3",)


def test_another_conversion_keeps_what_the_user_has_centred():
    net = small_net()
    handle = memnorm.center(net)
    memnorm.convert(net, "mbn")
    loss_of(net).backward()
    assert_centred(net)
    handle.remove()


def test_a_sparse_gradient_passes():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    memnorm.center(net)
    table = nn.Embedding(6, 4, sparse=True)
    table.weight = net[0].weight
    table(torch.tensor([1, 2])).sum().backward()
    assert net[0].weight.grad.is_sparse


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("how", ["unfrozen", "replaced"])
def test_in_a_copy_a_weight_that_is_unfrozen_or_replaced_is_centred_too(copied, how):
    net = small_net()
    net[0].weight.requires_grad_(how == "replaced")
    memnorm.center(net)
    net = copied(net)
    if how == "replaced":
        net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    net.requires_grad_(True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for seed in range(2):
        optimizer.zero_grad()
        loss_of(net, seed).backward()
        optimizer.step()
    assert_centred(net)


def test_what_center_was_called_for_stays_through_conversions():
    net = small_net()
    memnorm.center(net)
    memnorm.convert(memnorm.convert(net, "two_way"), "mbn", strength=0.1)
    loss_of(net).backward()
    assert_centred(net)
