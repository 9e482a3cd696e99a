"""The first rehearsed steps of a script need no more memory than plain ones, whatever the model is made of."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import ReplayMismatch
from lowtide.memory.memory_timeline import Timeline
from lowtide.profiler.audit import Audit
from lowtide.profiler.fsdp_units import FsdpUnits
from lowtide.profiler.online import OnlineProfiler
from lowtide.profiler.partial_reads import PIECES
from lowtide.profiler.repeated_blocks import AuditedBlocks, find_freed_blocks


class UNet(nn.Module):
    """Blocks of which no two are alike."""

    def __init__(self, width=8):
        super().__init__()
        self.down, self.middle = self.two(3, width), self.two(width, 2 * width)
        self.up, self.out = self.two(3 * width, width), nn.Conv2d(width, 2, 1)

    def two(self, given, width):
        layers = (nn.Conv2d(given, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU())
        return nn.Sequential(*layers, nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU())

    def forward(self, x):
        down = self.down(x)
        middle = F.interpolate(self.middle(F.max_pool2d(down, 2)), scale_factor=2)
        return self.out(self.up(torch.cat([middle, down], 1)))


class Flat(nn.Module):
    """One module without children."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) * 0.1) for _ in range(6))

    def forward(self, x):
        for weight in self.weights:
            x = F.layer_norm(x + F.gelu(x @ weight), (64,))
        return x


class Listed(nn.Module):
    """Lists in a list, whose parts the model calls itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(64), self.wide(), nn.Identity()]) for _ in range(4))

    def wide(self):
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        for norm, wide, last in self.layers:
            x = last(x + wide(norm(x)))
        return x


class Mixing(nn.Module):
    """A block whose result is saved by nothing, and not recomputed where the block's tensors are freed."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.cfloat) / width)

    def forward(self, x):
        waves = torch.fft.rfft2(x)
        mixed = torch.zeros_like(waves)
        mixed[..., :4, :4] = torch.einsum("bixy,io->boxy", waves[..., :4, :4], self.weight)
        return torch.fft.irfft2(mixed, s=x.shape[-2:])


class Spectral(nn.Module):
    """Results of blocks that are added to others, as in a Fourier neural operator."""

    def __init__(self, width=8):
        super().__init__()
        self.mixing = nn.ModuleList(Mixing(width) for _ in range(4))
        self.point = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(4))
        self.into, self.wide, self.out = nn.Conv2d(3, width, 1), nn.Conv2d(width, 32, 1), nn.Conv2d(32, 2, 1)

    def forward(self, x):
        x = self.into(x)
        for mix, point in zip(self.mixing, self.point, strict=True):
            x = F.gelu(mix(x) + point(x))
        return self.out(F.gelu(self.wide(x)))


class Recurrent(nn.Module):
    """A layer that saves most of what the model saves, in one operator."""

    def __init__(self, **settings):
        super().__init__()
        self.layer, self.out = nn.LSTM(64, 96, batch_first=True, **settings), nn.Linear(96, 64)

    def forward(self, x):
        return self.out(self.layer(x)[0])


class RecurrentBlocks(nn.Module):
    """Recurrent layers of other kinds, inside blocks and in a list."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.GRU(64, 64, batch_first=True))
        self.layers = nn.ModuleList(nn.RNN(64, 64, batch_first=True) for _ in range(2))

    def forward(self, x):
        x, _ = self.block(x)
        for layer in self.layers:
            x, _ = layer(x)
        return x


class PostNorm(nn.Module):
    """Blocks that end with a norm, as in BART: its result is the next block's argument and cheap to recompute."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(PostNormBlock() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class PostNormBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow, self.wide, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(x + self.wide(F.gelu(self.narrow(x))))


class Shared(nn.Module):
    """A layer that is called several times, as in ALBERT."""

    def __init__(self):
        super().__init__()
        inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        self.layer = nn.Sequential(inner, nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        for _ in range(8):
            x = x + self.layer(x)
        return x


IMAGE, ROWS = (2, 3, 64, 64), (16, 64, 64)


def peak_and_gradients(model, x):
    """Return the peak of a step, and its gradients."""
    torch.manual_seed(1)
    with lowtide.measure() as measured:
        model(x).square().mean().backward()
    return measured.peak_bytes, [p.grad.clone() for p in model.parameters()]


def first_peaks(model, x, expected):
    """Return the peaks of an audited and of a traced step, whose gradients are to be `expected`."""
    observed, peaks = OnlineProfiler(model), []
    for _ in range(2):
        model.zero_grad()
        observed.begin(x)
        watch = observed._recording
        torch.manual_seed(1)
        model(x).square().mean().backward()
        observed.end()
        peaks.append(Timeline(watch.recorder.stream).peak_bytes)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))
    observed.leave()
    return peaks


@pytest.mark.parametrize(("kind", "shape"), [(UNet, IMAGE), (Flat, ROWS), (Listed, ROWS), (Spectral, IMAGE)])
def test_audited_and_traced_steps_peak_below_the_plain_one(kind, shape):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(shape)
    plain_bytes, expected = peak_and_gradients(model, x)
    peaks = first_peaks(model, x, expected)
    assert max(peaks) <= plain_bytes
    assert peaks[0] <= 0.9 * plain_bytes


def test_a_layer_that_is_called_again_is_freed_as_a_whole():
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(ROWS)
    plain_bytes, expected = peak_and_gradients(model, x)
    model.layer.forward = partial(checkpoint, model.layer.forward, use_reentrant=False)
    least_bytes, _ = peak_and_gradients(model, x)
    del model.layer.forward
    inside_bytes = (plain_bytes - least_bytes) // 7  # of the first call, in which nothing shows that others will come
    assert max(first_peaks(model, x, expected)) <= least_bytes + inside_bytes


@pytest.mark.parametrize("kind", [Recurrent, partial(Recurrent, num_layers=2, dropout=0.1), RecurrentBlocks])
def test_a_recurrent_layer_is_tried_without_holding_its_saved_tensors_twice(kind):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(16, 24, 64)
    plain_bytes, expected = peak_and_gradients(model, x)
    held_bytes = x.nbytes + 4 * 16 * 96 * 4  # for replays: the argument, and the first states
    assert max(first_peaks(model, x, expected)) <= plain_bytes + held_bytes


@pytest.mark.parametrize(("kind", "shape", "most"), [(UNet, IMAGE, 1.1), (Listed, ROWS, 1.01), (PostNorm, ROWS, 1.01)])
def test_first_steps_peak_as_low_as_checkpointing_every_child_that_has_children(kind, shape, most):
    # A block is tried in forward, where a UNet holds inputs in variables that are gone when checkpointing recomputes.
    torch.manual_seed(0)
    model, checkpointed, x = kind(), kind(), torch.randn(shape)
    checkpointed.load_state_dict(model.state_dict())
    for block in find_freed_blocks(checkpointed):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    least_bytes, expected = peak_and_gradients(checkpointed, x)
    assert max(first_peaks(model, x, expected)) <= most * least_bytes


OWN = torch.Generator()


class Drawing(nn.Module):
    """A block that draws from a generator which replays do not set back, behind tensors that a replay brings back."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.wide(F.silu(F.gelu(self.narrow(x)) * torch.rand(1, generator=OWN)))


def test_a_trial_that_fails_midway_brings_back_what_it_has_freed():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), Drawing(), nn.Linear(64, 64)), torch.randn(16, 64, 64)
    OWN.manual_seed(0)
    _, expected = peak_and_gradients(model, x)
    drawn = OWN.get_state()
    model.zero_grad()
    OWN.manual_seed(0)
    observed = OnlineProfiler(model)
    observed.begin(x)
    calls = observed._recording.audit.step.calls
    model(x).square().mean().backward()
    observed.end()
    observed.leave()
    assert None not in [call.refused for call in calls if call.cls == "Drawing"]
    assert torch.equal(OWN.get_state(), drawn)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))


class TwoHeads(nn.Module):
    """A body that is most of the model, and two heads that save its result."""

    def __init__(self, width=128):
        super().__init__()
        self.body = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())))
        self.one, self.other = nn.Linear(width, 1), nn.Linear(width, 10)

    def forward(self, x):
        x = self.body(x)
        return self.one(x), self.other(x)


def test_a_replay_in_a_second_backward_pass_ends_before_tensors_that_are_still_there():
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(1024, 128)

    def run():
        one, other = model(x)
        one.square().mean().backward(retain_graph=True)
        other.square().mean().backward()

    with lowtide.measure() as plain:
        run()
    model.zero_grad()
    observed = OnlineProfiler(model)
    observed.begin(x)
    watch = observed._recording
    run()
    observed.end()
    observed.leave()
    bits, pieces = 1024 * 128 // 8, 2 * x.nbytes // PIECES
    assert Timeline(watch.recorder.stream).peak_bytes <= plain.peak_bytes + bits + pieces


def test_signs_of_activations_are_tried_without_another_activation():
    # Each ReLU saves its result for its signs, and nothing can be freed without a matrix product.
    n_layers, rows, width = 6, 512, 64
    activation, bits = 4 * rows * width, rows * width // 8
    model = nn.Sequential(*(layer for _ in range(n_layers) for layer in (nn.Linear(width, width), nn.ReLU())))
    x = torch.randn(rows, width)
    observed = OnlineProfiler(model)
    observed.begin(x)
    watch = observed._recording
    model(x)  # without backward, whose gradients would take more
    observed.end()
    observed.leave()
    # the results of all layers, the last one's input, and one recompute of its result; bits and pieces of it for signs
    most = (n_layers + 2) * activation + bits + 2 * activation // PIECES
    assert Timeline(watch.recorder.stream).peak_bytes <= most


def test_blocks_are_found_in_lists_and_where_no_two_are_alike():
    model, listed = UNet(), Listed()
    assert find_freed_blocks(model) == {model.down, model.middle, model.up}
    assert find_freed_blocks(listed) == {wide for _, wide, _ in listed.layers}
    assert find_freed_blocks(Flat()) == frozenset()
    wrapped = nn.Sequential(nn.Sequential(model), nn.Conv2d(2, 2, 1))
    assert find_freed_blocks(wrapped) == find_freed_blocks(model)


@pytest.mark.parametrize("is_scripted", [False, True])
def test_only_without_torchscript_a_layer_that_is_called_again_is_a_block(is_scripted):
    """TorchScript saves other tensors in its first run than in later ones."""
    model = Shared()
    if is_scripted:
        model.layer[1] = torch.jit.script(model.layer[1])
    blocks = AuditedBlocks(model, FsdpUnits(model), torch.device("cpu"), frugal=True)
    of_each_call = [blocks.begin_call(model.layer, in_call=call) for call in (0, 0, 7)]
    assert of_each_call == [False, not is_scripted, False]


class Hourglass(nn.Module):
    """A model of which one child is most of the model, and so on inside it."""

    def __init__(self, depth=3, width=8):
        super().__init__()
        inner = Hourglass(depth - 1, width) if depth > 1 else self.one(width)
        self.across, self.before, self.inner, self.after = self.one(width), self.one(width), inner, self.one(width)

    def one(self, width):
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, x):
        inner = self.after(self.inner(self.before(F.max_pool2d(x, 2))))
        return self.across(x) + F.interpolate(inner, scale_factor=2)


def test_blocks_are_found_inside_a_child_that_is_most_of_the_model():
    torch.manual_seed(0)
    model, x = Hourglass(), torch.randn(4, 8, 64, 64)
    assert find_freed_blocks(model) == {m for m in model.modules() if type(m) is nn.Sequential}
    plain_bytes, expected = peak_and_gradients(model, x)
    assert max(first_peaks(model, x, expected)) <= 0.9 * plain_bytes


class Renormalised(nn.Module):
    """A table whose rows each call writes to, before backward has read what an earlier one looked up."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 64, max_norm=1.0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.mean(1)


def test_a_table_that_a_second_call_renormalises_is_copied_where_an_audit_has_let_go_of_rows():
    torch.manual_seed(0)
    model, plain = Renormalised(), Renormalised()
    plain.load_state_dict(model.state_dict())
    batch = torch.randint(0, 50, (2, 32, 32))

    def gradients(model):
        model.zero_grad()
        (model(batch[0]) - model(batch[1])).square().mean().backward()
        return [p.grad for p in model.parameters()]

    observed = OnlineProfiler(model)
    for _ in range(2):
        observed.begin(batch)
        found = gradients(model)
        observed.end()
        assert all(torch.equal(*pair) for pair in zip(found, gradients(plain), strict=True))
    observed.leave()
    assert observed.profile is not None


class Adversaries(nn.Module):
    """A generator and a critic, which are called one after the other."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = self.narrowing(16, 64), self.narrowing(64, 1)

    def narrowing(self, given, width):
        return nn.Sequential(nn.Linear(given, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, width))


def audited_peak(model, n_rounds):
    """Return the peak of an audited step with several backward passes, each after a graph that none ran through."""
    observed = OnlineProfiler(model)
    observed.begin(torch.zeros(256, 16))
    watch = observed._recording
    for _ in range(n_rounds):
        model.critic(model.generator(torch.randn(256, 16)).detach()).mean().backward()
    observed.end()
    observed.leave()
    return Timeline(watch.recorder.stream).peak_bytes


@pytest.mark.parametrize("is_traced", [False, True])
def test_forwards_whose_graphs_are_dropped_hold_no_tensors_in_rehearsed_steps(is_traced):
    def peak(n_dropped):
        torch.manual_seed(0)
        model = Adversaries().critic
        observed = OnlineProfiler(model)
        for _ in range(1 + is_traced):
            observed.begin(torch.zeros(256, 64))
            watch = observed._recording
            for _ in range(n_dropped):
                model(torch.randn(256, 64))
            model(torch.randn(256, 64)).mean().backward()
            model.zero_grad()
            observed.end()
        observed.leave()
        return Timeline(watch.recorder.stream).peak_bytes

    assert peak(6) <= peak(2)


def test_a_recurrent_layer_that_gives_other_bits_again_ends_the_step(monkeypatch):
    numbers, lstm = itertools.count(1), nn.modules.rnn._VF.lstm
    monkeypatch.setattr(nn.modules.rnn._VF, "lstm", lambda x, *args: lstm(x * next(numbers), *args))
    model, x = Recurrent(), torch.randn(ROWS)
    observed = OnlineProfiler(model)
    observed.begin(x)
    with pytest.raises(ReplayMismatch, match=r"layer \(LSTM\): .* other bits .*, and the step ends before its update"):
        model(x)
    observed.leave()


@pytest.mark.parametrize("frugal", [False, True])
def test_a_workspace_with_bytes_that_its_library_never_writes_is_no_difference(frugal):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Recurrent())
    audit = Audit(model, frozenset(), lambda label, data: None, frugal=frugal)
    with audit.running():
        for _ in range(3):  # memory of earlier steps is used again, with what it had in it
            model.zero_grad()
            model(torch.randn(ROWS)).square().mean().backward()
    assert {call.refused for call in audit.step.calls if call.cls == "LSTM"} == {None}


def test_an_audit_frees_the_operands_of_a_graph_that_is_dropped_without_a_backward():
    model = Adversaries()
    one, four = audited_peak(model, 1), audited_peak(model, 4)
    gradients = sum(p.nbytes for p in model.critic.parameters())
    assert four <= one + gradients
