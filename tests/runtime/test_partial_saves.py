"""Of some saved tensors backward reads only the shape, or which elements are positive: that is all that is held."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.memory.cpu_recorder import CpuRecorder
from lowtide.planner import find_smallest_peak
from lowtide.planner.address_nodes import SHAPE, SIGNS
from lowtide.profiler.measure_call import identical
from lowtide.runtime.engine import Engine
from lowtide.runtime.partial_saves import READS_SHAPE, packed
from lowtide.runtime.plan_table import parse_actions
from lowtide.runtime.recipes import CannotRecompute
from runtime.plans import differences, outcome, step_of
from runtime.test_leaks import level_after


class Convolutions(nn.Sequential):
    """As in VGG and U-Net: what a ReLU gives goes to a pooling layer and nowhere else."""

    def __init__(self, *, inplace=False):
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(inplace),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace),
            nn.AvgPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(inplace),
            nn.ReflectionPad2d(1),
            nn.Conv2d(32, 10, 3),
            nn.Flatten(),
            nn.Linear(640, 10),
        )


def images(shape=(4, 3, 32, 32)):
    torch.manual_seed(0)
    return torch.randn(shape)


def packings(profile):
    """Decisions by address, for slots of which only the shape or the signs are kept."""
    found = {slot.address: profile.values[slot.value].node for slot in profile.slots}
    return {address: node for address, node in found.items() if node in {SHAPE, SIGNS}}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_pooled_relu_is_held_as_bits(inplace, layout):
    torch.manual_seed(0)
    model = Convolutions(inplace=inplace).to(memory_format=layout)
    x = images().contiguous(memory_format=layout)
    step = step_of(model)
    profile = lowtide.rehearse(model, step, x)
    assert packings(profile) == {
        "1#0:0": SIGNS, "2#0:0": SHAPE, "5#0:0": SIGNS, "6#0:0": SHAPE, "8#0:0": SIGNS, "9#0:0": SHAPE
    }  # fmt: skip
    plan = lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes)
    assert {plan.recompute[address] for address in ("1#0:0", "2#0:0")} == {SIGNS, SHAPE}
    verdict = lowtide.verify(model, step, x, plan)
    assert verdict.identical
    assert verdict.measured_peak_bytes == plan.predicted.peak_bytes < profile.measured_plain_peak_bytes


def test_it_takes_a_32nd():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), images()
    result = 4 * 16 * 32 * 32 * 4
    held = []
    for recompute in ({}, {"1#0:0": SIGNS, "2#0:0": SHAPE}):
        engine = Engine(model, parse_actions(recompute, ()))
        engine.install()
        with CpuRecorder() as recorder:
            loss = model(x).sum()
            recorder.mark("forward is over", None)
        held += level_after(recorder.stream.events, "forward is over")
        engine.remove()
        del loss
    assert held[0] - held[1] == result - result // 32


def test_readers_of_values_keep_the_tensor():
    """The result of the ReLU is also what a convolution multiplies with."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.relu = nn.Conv2d(3, 8, 3), nn.ReLU()
            self.pool, self.second = nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)

        def forward(self, x):
            x = self.relu(self.first(x))
            return self.pool(x).sum() + self.second(x).sum()

    model = Both()
    profile = lowtide.rehearse(model, lambda x: model(x).backward(), images())
    assert packings(profile) == {"pool#0:0": SHAPE}


class Functional(nn.Module):
    """A convolution, and what is called in the same call of a module."""

    def __init__(self, inputs, then):
        super().__init__()
        self.inner, self.then = nn.Conv2d(inputs, 16, 3, padding=1), then

    def forward(self, x):
        return self.then(self.inner(x))


SAVED_TWICE = {
    "a ReLU": (lambda x: F.max_pool2d(x.relu(), 2), {"#0:0": SIGNS, "#0:1": SHAPE}),
    "who needs the values": (lambda x: F.avg_pool2d(x.tanh(), 2), {"#0:1": SHAPE}),
    "a view": (lambda x: F.max_pool2d(x.relu().permute(0, 1, 3, 2), 2), {"#0:0": SIGNS, "#0:1": SHAPE}),
}


@pytest.mark.parametrize("case", SAVED_TWICE)
def test_saved_for_its_shape_in_the_call_that_saves_it_for_more(case):
    torch.manual_seed(0)
    then, expected = SAVED_TWICE[case]
    model, x = nn.Sequential(Functional(3, then), Functional(16, then), nn.Conv2d(16, 4, 3)), images()
    step = step_of(model)
    profile = lowtide.rehearse(model, step, x)
    assert packings(profile) == {f"{n}{address}": node for n in range(2) for address, node in expected.items()}
    plan = lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes)
    verdict = lowtide.verify(model, step, x, plan)
    assert verdict.identical
    assert not verdict.drifted
    assert verdict.measured_peak_bytes == plan.predicted.peak_bytes


def test_no_recompute_uses_a_tensor_that_nothing_holds():
    """The pooled convolution is held by its shape alone, so what the pooling gives can't be made of it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Identity(), nn.AvgPool2d(2), nn.Conv2d(16, 16, 3), nn.Tanh(), nn.Conv2d(16, 4, 3)
    )
    step, x = step_of(model), images()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile = lowtide.rehearse(model, step, x)
        plan = lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes)
        verdict = lowtide.verify(model, step, x, plan)
    assert verdict.identical
    assert verdict.measured_peak_bytes == plan.predicted.peak_bytes


def test_nothing_is_made_of_what_takes_a_number_to_make():
    """The number is noted only for a ReLU that is made again, and of this one the signs are held."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.last((self.first(x) + 0.5).relu() * 2)

    torch.manual_seed(0)
    model, x = Shifted(), torch.randn(64, 64)
    step = step_of(model)
    profile = lowtide.rehearse(model, step, x)
    plan = lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes)
    verdict = lowtide.verify(model, step, x, plan)
    assert not verdict.drifted
    assert verdict.measured_peak_bytes == plan.predicted.peak_bytes


def under(model, actions, run):
    engine = Engine(model, actions)
    engine.install()
    try:
        return outcome(model, run), engine
    finally:
        engine.remove()


@pytest.mark.parametrize("odd", [float("nan"), -0.0, float("inf"), -float("inf"), 1e-45, -1e-45])
def test_every_number_has_the_sign_that_backward_sees(odd):
    relu = nn.ReLU()
    x = images((8, 8, 16, 16))
    x[::2, ::3] = odd
    given = torch.randn_like(x)

    def run():
        leaf = x.clone().requires_grad_()
        relu(leaf).backward(given)
        return leaf.grad

    plain, (packed_away, engine) = outcome(relu, run), under(relu, parse_actions({"#0:0": SIGNS}, ()), run)
    assert not engine.packer.drifted
    assert identical(plain["result"], packed_away["result"])


class Differentiates(nn.Module):
    """The ReLU's node has let go of its result when another one saves that."""

    def forward(self, x):
        y = x.relu()
        torch.autograd.grad(y.sum(), x)
        (gradient,) = torch.autograd.grad((y * y).sum(), y)
        return x * gradient


def test_readers_of_a_released_relu_result_recompute_it():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), Differentiates(), nn.Linear(64, 64)), images((64, 64))

    def run():
        return model(x).square().sum().backward()

    profile = lowtide.rehearse(model, step_of(model), x)
    assert not packings(profile)
    plain = outcome(model, run)
    with pytest.warns(UserWarning, match="saves different tensors than the rehearsed step"):
        planned, engine = under(model, parse_actions({"1#0:1": SIGNS}, ()), run)
    assert engine.packer.drifted == {"1#0:1"}
    assert not differences(plain, planned)


POOLS = {
    "AdaptiveAvgPool2DBackward0": (nn.AdaptiveAvgPool2d(3), 4),
    "AdaptiveAvgPool3DBackward0": (nn.AdaptiveAvgPool3d(3), 5),
    "AdaptiveMaxPool2DBackward0": (nn.AdaptiveMaxPool2d(3), 4),
    "AdaptiveMaxPool3DBackward0": (nn.AdaptiveMaxPool3d(3), 5),
    "AvgPool2DBackward0": (nn.AvgPool2d(3, 2, 1), 4),
    "AvgPool3DBackward0": (nn.AvgPool3d(3, 2, 1), 5),
    "MaxPool2DWithIndicesBackward0": (nn.MaxPool2d(3, 2, 1, 1), 4),
    "MaxPool3DWithIndicesBackward0": (nn.MaxPool3d(3, 2, 1, 1), 5),
    "ReflectionPad1DBackward0": (nn.ReflectionPad1d(2), 3),
    "ReflectionPad2DBackward0": (nn.ReflectionPad2d(2), 4),
    "ReflectionPad3DBackward0": (nn.ReflectionPad3d(2), 5),
    "ReplicationPad1DBackward0": (nn.ReplicationPad1d(2), 3),
    "ReplicationPad2DBackward0": (nn.ReplicationPad2d(2), 4),
    "ReplicationPad3DBackward0": (nn.ReplicationPad3d(2), 5),
}


def test_every_node_that_reads_a_shape_is_tested():
    assert POOLS.keys() == READS_SHAPE


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("node", POOLS)
def test_the_shape_is_enough(node, last):
    pool, dims = POOLS[node]
    x = images((2, 8, 10, 9, 8)[:dims])
    if last and dims > 3:
        x = x.contiguous(memory_format=torch.channels_last if dims == 4 else torch.channels_last_3d)

    def run():
        leaf = x.clone().requires_grad_()
        result = pool(leaf)
        assert result.grad_fn.name() == node
        result.square().sum().backward()
        return leaf.grad

    plain, (shape_only, engine) = outcome(pool, run), under(pool, parse_actions({"#0:0": SHAPE}, ()), run)
    assert not engine.packer.drifted
    assert identical(plain["result"], shape_only["result"])


@pytest.mark.parametrize("before", [{}, {"1#0:0": SIGNS}, {"1#0:0": "ReluBackward0"}])
@pytest.mark.parametrize("node", [node for node, (_, dims) in POOLS.items() if dims == 4])
def test_the_result_of_a_pool_is_not_recomputed_from_a_shape(node, before):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), POOLS[node][0], nn.Conv2d(8, 4, 3))
    actions = parse_actions({**before, "2#0:0": SHAPE, "3#0:0": node}, ())

    def run():
        return model(images()).square().sum().backward()

    plain, (planned, engine) = outcome(model, run), under(model, actions, run)
    assert not engine.packer.drifted
    assert not differences(plain, planned)


def test_nor_before_the_call_is_over():
    class Pooled(nn.Module):
        def forward(self, x):
            x = F.max_pool2d(x.relu(), 2)
            self.penalty = x.square().mean()
            return x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), Pooled(), nn.Conv2d(16, 4, 3))

    def step(x):
        loss = model(x).square().mean() + model[1].penalty
        loss.backward()
        return loss.detach()

    profile = lowtide.rehearse(model, step, images())
    assert packings(profile) == {"1#0:0": SIGNS, "1#0:1": SHAPE}
    plan = lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes)
    verdict = lowtide.verify(model, step, images(), plan)
    assert verdict.identical
    assert not verdict.drifted
    assert verdict.measured_peak_bytes == plan.predicted.peak_bytes


def test_the_shape_takes_no_memory():
    tensor = torch.randn(64, 64, 8)
    assert packed(SHAPE, tensor).get().untyped_storage().nbytes() == tensor.element_size()
    with pytest.raises(CannotRecompute):
        packed(SHAPE, tensor.to_sparse())


def test_another_reader_than_the_planned_one_gets_the_values():
    class Changes(nn.Module):
        pools = True

        def forward(self, x):
            return F.max_pool2d(x, 2) if self.pools else x * x

    class Relu(nn.Module):
        positive = True

        def forward(self, x):
            return x.relu() if self.positive else x.tanh()

    model = nn.Sequential(nn.Conv2d(3, 16, 3), Relu(), Changes())
    actions = parse_actions({"1#0:0": SIGNS, "2#0:0": SHAPE}, ())

    def run():
        return model(images()).sum().backward()

    _, engine = under(model, actions, run)
    assert not engine.packer.drifted
    model[1].positive = model[2].pools = False
    plain = outcome(model, run)
    with pytest.warns(UserWarning, match="saves different tensors than the rehearsed step"):
        planned, engine = under(model, actions, run)
    assert engine.packer.drifted == {"1#0:0", "2#0:0"}
    assert not differences(plain, planned)


def test_a_graph_that_is_kept_and_differentiated_again():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AvgPool2d(2)
    )
    actions = parse_actions({"1#0:0": SIGNS, "2#0:0": SHAPE, "4#0:0": SIGNS, "5#0:0": SHAPE}, ())

    def twice():
        loss = model(images()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def double():
        x = images().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()

    for run in (twice, double):
        plain = outcome(model, run)
        planned, engine = under(model, actions, run)
        assert not engine.packer.drifted
        assert not differences(plain, planned)


def test_inside_of_a_replayed_block():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2))
    model = nn.Sequential(block, nn.Conv2d(16, 4, 3))

    def run():
        return model(images()).square().sum().backward()

    plain = outcome(model, run)
    for recompute in ({}, {"0.1#0:0": SIGNS}, {"0.2#0:0": SHAPE}, {"0.1#0:0": SIGNS, "0.2#0:0": SHAPE}):
        planned, engine = under(model, parse_actions(recompute, ("0#0",)), run)
        assert not engine.packer.drifted
        assert not differences(plain, planned)
