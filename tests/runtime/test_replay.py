"""A module call that is run again sees what the first run saw, leaves no trace, and refuses when it can't."""

import gc
import random
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import Cache, DynamicCache, GPT2Config, GPT2LMHeadModel
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import lowtide
from budgets import step_of, within
from lowtide.errors import ReplayMismatch
from lowtide.planner.records import Decisions
from lowtide.planner.simulate.simulator import predict
from lowtide.runtime import host_rng
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import parse_actions
from lowtide.runtime.replay import ReplayFrame
from parts import Block, Language, convolution
from runtime.plans import Ops, differences, in_force, outcome


class Replayed(nn.Module):
    """Calls `function(module, ...)`; what is replayed in these tests."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class Around(nn.Module):
    """A model whose one part is replayed; gives it `arguments(x)` and sums what comes back."""

    def __init__(self, function, arguments=lambda x: ((x,), {}), **attributes):
        super().__init__()
        self.part, self.arguments = Replayed(function, **attributes), arguments
        self.returned: Any = None

    def forward(self, x):
        args, kwargs = self.arguments(self.part.linear(x))
        self.returned = self.part(*args, **kwargs)
        return sum(
            t.float().sum() for t in torch.utils._pytree.tree_leaves(self.returned) if isinstance(t, torch.Tensor)
        )


X = torch.linspace(-1, 1, 12).view(3, 4)


def nonlinear(x):
    """Saves several tensors that depend on all of `x`."""
    return torch.tanh(x * x.sin()) * x


def same_bits(model, step=None, *, between=None, way="replay", blocks=Replayed):
    """Assert that a step gives the same with the part replayed, and that it was."""

    def whole():
        loss = model(X)
        if between is not None:
            between()
        loss.backward()
        return loss

    step = step or whole
    plain = outcome(model, step)
    runs = patch.object(ReplayFrame, "_run", autospec=True, side_effect=ReplayFrame._run)
    with in_force(model, way, blocks), runs as ran:
        planned = outcome(model, step)
    assert differences(plain, planned) == []
    assert bool(ran.call_count) == (way not in ("keep", "recompute"))


# --- what the first run saw -------------------------------------------------------------------------------------------


def test_random_numbers_of_torch():
    same_bits(Around(lambda m, x: F.dropout(nonlinear(x), 0.5) * torch.rand_like(x)), between=lambda: torch.rand(7))


@pytest.mark.parametrize("between", [lambda: None, lambda: torch.randn(1, dtype=torch.float64)])
def test_random_numbers_that_only_the_replay_draws_are_given_back(between):
    """With the generator as the call found it, and with one that has a normal number in reserve since."""
    draws = []

    def step():
        torch.manual_seed(3)
        draws.clear()
        loss = model(X)
        between()
        draws.append(True)
        loss.backward()
        return loss + torch.randn(1)

    model = Around(lambda m, x: nonlinear(x) + (torch.randn(17, dtype=torch.float64)[0].float() if draws else 0))
    same_bits(model, step)


@pytest.mark.parametrize("inplace", [False, True])
def test_tensors_written_after_they_were_saved_are_replayed(inplace):
    """RReLU saves its noise first and draws it then: a second run does not stop in between."""
    model = Around(lambda m, x: F.rrelu(x.repeat(20, 20) * 2, 0.1, 0.9, training=True, inplace=inplace) + 1)
    # memory that has just been given back is most likely what the noise is drawn into
    same_bits(model, between=lambda: [torch.full((60, 80), torch.nan) for _ in range(100)])


def test_random_numbers_of_python_and_numpy():
    def noisy(m, x):
        return nonlinear(x * random.random()) * float(np.random.rand())

    def step():
        np.random.seed(0)
        loss = model(X)
        random.random(), np.random.rand()
        loss.backward()
        return loss + random.random() + float(np.random.rand())

    model = Around(noisy)
    same_bits(model, step)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_that_the_first_call_did_not_draw(draw):
    def noisy(m, x):
        return nonlinear(x * draw() if m.noisy else x)

    def step():
        random.seed(0)
        np.random.seed(0)
        model.part.noisy = False
        first = model(X)
        model.part.noisy = True
        loss = first + model(X)
        draw()
        loss.backward()
        return loss + draw()

    model = Around(noisy)
    same_bits(model, step)


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
def test_normal_numbers_of_numpy_come_in_pairs_of_which_one_waits(bits):
    """It is given without the generator's own state changing. And the generator may be another one."""
    before = np.random.get_bit_generator()

    def step():
        np.random.seed(0)
        loss = model(X) + model(X)
        np.random.randn(3)
        loss.backward()
        return loss + float(np.random.randn())

    model = Around(lambda m, x: nonlinear(x * float(np.random.randn())))
    np.random.set_bit_generator(bits(0))
    try:
        same_bits(model, step)
    finally:
        np.random.set_bit_generator(before)


def test_a_generator_that_is_passed_in_or_is_an_attribute():
    generator = torch.Generator()

    def noisy(m, x, generator):
        return nonlinear(x * torch.rand(x.shape, generator=generator) + torch.rand(x.shape, generator=m.own))

    def step():
        generator.manual_seed(3)
        model.part.own.manual_seed(4)
        loss = model(X)
        torch.rand(5, generator=generator)
        loss.backward()
        return loss + torch.rand(1, generator=generator) + torch.rand(1, generator=model.part.own)

    model = Around(noisy, lambda x: ((x,), {"generator": generator}), own=torch.Generator())
    same_bits(model, step)


@pytest.mark.parametrize("around_backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, around_backward):
    seen = []

    def mixed(m, x):
        seen.append(
            (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())
        )
        return nonlinear(m.linear(x))

    def step():
        with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
            loss = model(X)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around_backward):
            loss.backward()
        return loss

    model = Around(mixed)
    same_bits(model, step)
    assert seen == [(True, dtype, False)] * 3


def test_a_cast_that_autocast_remembers_from_another_replay():
    """Two calls of one linear share the cast of its weight: neither replay waits for the other."""
    model = Language(layers=3, shared=True)

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.arange(20).view(2, 10)).sum()
        loss.backward()
        return loss

    plain = outcome(model, step)
    log = []
    block = model.blocks[0]

    def watch(module, args):
        args[0].register_hook(lambda grad: log.append("gradient"))

    block.register_forward_pre_hook(watch)
    forward = block.mlp.forward
    block.mlp.forward = lambda x: (log.append("run"), forward(x))[1]
    with in_force(model, "replay"):
        assert differences(plain, outcome(model, step)) == []
        log.clear()
        step()
    assert log == ["run"] * 3 + ["run", "gradient"] * 3


def test_the_choice_of_attention_kernels():
    def attention(m, x):
        q = m.linear(x)[None, None]
        return F.scaled_dot_product_attention(q, q, q)

    def step():
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(X)
        loss.backward()
        assert torch.backends.cuda.flash_sdp_enabled()
        return loss

    model = Around(attention)
    same_bits(model, step)


def test_training_flags():
    def moody(m, x):
        return nonlinear(F.dropout(x, 0.5, m.training))

    def step():
        loss = model(X)
        model.eval()
        loss.backward()
        assert not model.part.training
        model.train()
        return loss

    model = Around(moody)
    same_bits(model, step)


def test_grad_mode():
    def partly(m, x):
        with torch.no_grad():
            scale = m.linear(x).sigmoid()
        return nonlinear(x) * scale

    model = Around(partly)
    same_bits(model, lambda: torch.autograd.backward(model(X)))


# --- no trace ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["replay", "nest", "both"])
def test_batch_norm_counts_once(way):
    parts = [nn.Sequential(nn.Conv2d(n, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for n in (3, 4)]
    model = nn.Sequential(*parts, nn.Flatten())
    x = torch.randn(2, 3, 6, 6)
    plain = outcome(model, lambda: model(x).sum().backward())
    model[0][1].reset_running_stats(), model[1][1].reset_running_stats()
    with in_force(model, way, nn.Sequential):
        assert differences(plain, outcome(model, lambda: model(x).sum().backward())) == []
    assert model[0][1].num_batches_tracked == 1


def test_batch_norm_that_was_frozen_in_the_first_step():
    model = nn.Sequential(convolution(3, 4), nn.Flatten())
    x = torch.randn(2, 3, 6, 6)
    with in_force(model, "replay", nn.Sequential):
        model[0][1].eval()
        model(x).sum().backward()
        model[0][1].train()
        model(x).sum().backward()
        mean = model[0][1].running_mean.clone()
    model[0][1].reset_running_stats()
    model(x)
    assert torch.equal(mean, model[0][1].running_mean)


BIG = 40_000  # more elements than a buffer may have to be copied each time


def test_a_large_buffer_that_the_call_writes_to():
    def counting(m, x):
        m.counts.add_(1)
        return nonlinear(x * m.counts[:4].clone())

    def step():
        model.part.counts.zero_()
        loss = model(X) + model(X)
        loss.backward()
        return loss

    model = Around(counting)
    model.part.register_buffer("counts", torch.zeros(BIG))
    same_bits(model, step)


def test_a_large_buffer_that_is_written_to_without_a_version():
    """By native batch norm, which counts none, or through `.data`."""
    features = 16400
    norm = nn.BatchNorm1d(features)
    assert norm.running_mean.nbytes > 2**16

    def normed(m, x):
        m.norm.usage.data.lerp_(x.detach().mean(), 0.1)
        return nonlinear(m.norm(x.repeat(1, features // 4)))

    norm.register_buffer("usage", torch.zeros(features))
    model = Around(normed, norm=norm)

    def step():
        norm.reset_running_stats()
        norm.usage.zero_()
        loss = model(X)
        loss.backward()
        return loss

    same_bits(model, step)


@pytest.mark.parametrize("counted", [True, False])
def test_a_large_buffer_that_a_later_step_is_the_first_to_write_to(counted):
    """As codes that are averaged after a warm-up, by a writer that is not seen beforehand."""

    def averaging(m, x):
        if m.warm:
            with torch.no_grad():
                usage = m.usage if counted else m.usage.data
                torch.lerp(usage, x.detach().mean(), 0.1, out=usage)
        return nonlinear(x * m.usage[:4])

    model = Around(averaging, warm=False)
    model.part.register_buffer("usage", torch.ones(BIG))

    def step():
        model(X).backward()

    with in_force(model, "replay", Replayed):
        step()
        model.part.warm = True
        with pytest.raises(
            ReplayMismatch, match="wrote to its buffer 'usage' for the first time since the plan was made"
        ):
            step()
        step()  # from here on it is copied


def test_a_large_buffer_that_the_call_binds_anew():
    def remembering(m, x):
        y = nonlinear(x * m.state[:4])
        m.state = m.state + y.detach().sum()
        return y

    def step():
        model.part.state = torch.ones(BIG)
        loss = model(X) + model(X)
        loss.backward()
        return loss

    model = Around(remembering)
    model.part.register_buffer("state", torch.ones(BIG))
    same_bits(model, step)


def test_a_large_buffer_that_something_else_changes_is_refused():
    model = Around(lambda m, x: nonlinear(x * m.table[:4]))
    model.part.register_buffer("table", torch.ones(BIG))
    with in_force(model, "replay", Replayed):
        loss = model(X)
        model.part.table.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(
    ("rows_and_columns", "refused"),
    [
        (torch.triu_indices(4, 4, 1), None),
        (torch.from_numpy(np.triu_indices(4, 1)[0].repeat(2))[::2].expand(2, 6), "running it again gives other bits"),
    ],
    ids=["of one tensor", "of every second element"],  # of which a copy has other strides
)
def test_buffers_that_are_views(rows_and_columns, refused):
    def turned(m, x):
        turn = x.new_zeros(4, 4).index_put((m.rows, m.columns), m.linear.bias.repeat(2)[:6])
        return nonlinear(x @ (turn - turn.T))

    model = Around(turned)
    for name, buffer in zip(("rows", "columns"), rows_and_columns, strict=True):
        model.part.register_buffer(name, buffer)
    profile, _, verdict = within(model, step_of(model), torch.randn(500, 4), 0)
    (call,) = (call for call in profile.calls if call.cls == "Replayed")
    assert (call.refused and call.refused.partition(" for ")[0], verdict.identical) == (refused, True)


def test_plain_attributes_are_as_before_the_replay():
    def counting(m, x):
        m.calls += 1
        m.last = y = nonlinear(x)
        m.new = 1
        return y

    def step():
        model.part.calls, model.part.last = 0, None
        loss = model(X)
        last = model.part.last
        del model.part.new
        loss.backward()
        assert model.part.last is last
        assert not hasattr(model.part, "new")
        return loss + model.part.calls

    model = Around(counting, calls=0, last=None)
    same_bits(model, step)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (2, 3),
        (None, 0.5),
        ("a", "b"),
        ((1, 2), (3,)),
        ([1], [2, 3]),
        ({"a": 1}, {}),
        (torch.ones(4), None),
        (X, X + 1),
        ([(1, 2)], [(1, 3)]),
        ({"a": [1]}, {"a": [2]}),
        (("scale", torch.ones(4)), ("shift", X)),
        ([X], [X + 1]),
        (Counter("ab"), Counter("b")),
        (deque([1]), deque([2])),
    ],
)
def test_attributes_that_are_bound_anew_before_the_next_call(first, second):
    def conditioned(m, x):
        how = m.how
        if isinstance(how, torch.Tensor):
            return nonlinear(x * how)
        if isinstance(how, list | tuple) and isinstance(how[-1], torch.Tensor):
            return nonlinear(x * how[-1] + len(how))
        return nonlinear(x * (1 + sum(map(ord, repr(how))) % 7))

    def step():
        model.part.how = first
        loss = model(X)
        model.part.how = second
        loss = loss + model(X) if second is not None else loss
        model.part.how = "at last"
        loss.backward()
        assert model.part.how == "at last"
        return loss

    model = Around(conditioned, how=None)
    same_bits(model, step)


def test_attributes_are_restored_to_what_the_call_found():
    def counting(m, x):
        m.seen["calls"] += 1
        m.calls += 1
        m.nested["a"][0] += 1
        m.counted["x"] += 1
        return nonlinear(x * m.seen["calls"] * m.calls * m.nested["a"][0] * m.counted["x"])

    def step():
        model.part.seen, model.part.calls = {"calls": 0}, 0
        model.part.nested, model.part.counted = {"a": [0]}, Counter()
        loss = model(X) + model(X)
        model.part.seen["calls"] = 7
        loss.backward()
        assert model.part.seen["calls"] == 7
        assert model.part.nested == {"a": [2]}
        assert model.part.counted == {"x": 2}
        return loss

    model = Around(counting, seen=None, calls=0)
    same_bits(model, step)


@pytest.mark.parametrize("filled", [lambda y: y.mean(0), lambda y: y.mean(0).numpy(), lambda y: 1.0, lambda y: True])
def test_a_call_fills_a_dict_that_held_a_number(filled):
    """Tensors and arrays have no single truth value, and 1 equals True and 1.0."""

    def filling(m, x):
        scale = torch.ones(4, dtype=torch.int64) * m.load["now"]
        m.load["now"] = filled(x.detach())
        return nonlinear(x * (2 if scale.is_floating_point() or scale.dtype is torch.bool else 3))

    def step():
        model.part.load["now"] = 1
        loss = model(X)
        loss.backward()
        return loss

    model = Around(filling, load={"now": 1})
    same_bits(model, step)


@pytest.mark.parametrize("length", [0, 99, 100, 150])
def test_logs_that_a_call_writes_grow_once(length):
    def logging(m, x):
        m.log.append(x.detach().sum().item())
        m.pairs.append(("m", 1.0))
        m.table[len(m.table)] = len(m.log)
        m.last.append(len(m.log))
        return nonlinear(x) * len(m.log) * len(m.table)

    def step():
        model.part.log = [0.0] * length
        model.part.pairs = [("m", 0.0)] * length
        model.part.table = dict.fromkeys(range(length))
        model.part.last = deque([0] * 3, maxlen=3)
        log = model.part.log
        loss = model(X) + model(X)
        loss.backward()
        assert model.part.log is log
        assert len(log) == len(model.part.pairs) == len(model.part.table) == length + 2
        assert list(model.part.last) == [0, length + 1, length + 2]
        return loss

    model = Around(logging)
    same_bits(model, step)


def test_a_tensor_on_a_module_that_is_changed_in_place_is_refused():
    model = Around(lambda m, x: nonlinear(x * m.how), how=torch.ones(4))
    with in_force(model, "replay", Replayed):
        loss = model(X)
        model.part.how.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_result_that_a_module_remembers_is_not_held():
    def remembering(m, x):
        m.last = y = nonlinear(x)
        return y

    model = Around(remembering, last=None)
    with in_force(model, "replay", Replayed):
        model(X).backward()
        loss = model(X)
        last = weakref.ref(model.part.last)
        model.part.last = model.returned = None
        assert last() is None
        loss.backward()


def test_hooks_fire_as_often_as_without():
    model, ids = Language(layers=2), torch.arange(20).view(2, 10)
    fired = Counter()
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: fired.update([f"before {path}"]))
        module.register_forward_hook(lambda *_, path=path: fired.update([f"after {path}"]))
        module.register_forward_hook(lambda *_, path=path: fired.update([f"always {path}"]), always_call=True)
        if path not in ("", "blocks"):
            module.register_full_backward_hook(lambda *_, path=path: fired.update([f"backward {path}"]))
            module.register_full_backward_pre_hook(lambda *_, path=path: fired.update([f"before backward {path}"]))
    every = nn.modules.module.register_module_forward_hook(lambda *_: fired.update(["any"]))

    def watch_the_gradient(module, args, out):
        out.register_hook(lambda grad: fired.update(["tensor"]))

    model.blocks[0].mlp[0].register_forward_hook(watch_the_gradient)
    own = [dict(module._forward_hooks) for module in model.modules()]

    def step():
        fired.clear()
        model(ids).sum().backward()
        return dict(fired)

    plain = outcome(model, step)
    assert plain["result"]["after blocks.1.mlp.2"] == 1
    assert plain["result"]["any"] == len(list(model.modules())) - 1
    for way in ("recompute", "replay", "nest", "both"):
        with in_force(model, way):
            assert differences(plain, outcome(model, step)) == [], way
        assert [dict(module._forward_hooks) for module in model.modules()] == own
    every.remove()


def test_hooks_that_change_something_act_again():
    model, ids = Language(layers=2), torch.arange(20).view(2, 10)
    model.blocks[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.blocks[1].mlp.register_forward_hook(lambda m, args, out: out.tanh())
    model.blocks[1].mlp[0].register_forward_pre_hook(
        lambda m, args, kwargs: ((args[0].sin(),), kwargs), with_kwargs=True
    )
    for way in ("replay", "nest", "both"):
        same = outcome(model, lambda: model(ids).sum().backward())
        with in_force(model, way):
            assert differences(same, outcome(model, lambda: model(ids).sum().backward())) == [], way


def test_a_hook_that_takes_itself_out_stays_out():
    model = Around(lambda m, x: nonlinear(m.linear(x)))
    fired = []

    def once(*_):
        fired.append(1)
        handle.remove()

    with in_force(model, "replay", Replayed):
        for _ in range(2):
            handle = model.part.linear.register_forward_hook(once)
            model.part(X).sum().backward()
            model(X).backward()
    assert fired == [1, 1]
    assert not model.part.linear._forward_hooks


# --- arguments --------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "first second")


@dataclass
class Held:
    tensor: torch.Tensor
    note: str = "x"


@dataclass(frozen=True, slots=True)
class Slotted:
    tensor: torch.Tensor


class Plain:
    def __init__(self, tensor):
        self.tensors = [tensor]


class Bag(dict):
    """A dict of a class that torch's pytrees do not know."""


class Ordered(OrderedDict):
    def __init__(self, own, **items):
        super().__init__(**items)
        self.own = own


class Row(list):
    pass


class Hidden:
    __slots__ = ("__tensor", "note")

    def __init__(self, tensor):
        self.__tensor = tensor

    def take(self):
        return self.__tensor


NESTINGS = {
    "positional": (lambda t: ((t,), {}), lambda args, kwargs: args[0]),
    "keyword": (lambda t: ((), {"t": t}), lambda args, kwargs: kwargs["t"]),
    "list": (lambda t: (([1, [t]],), {}), lambda args, kwargs: args[0][1][0]),
    "tuple": (lambda t: (((None, t),), {}), lambda args, kwargs: args[0][1]),
    "named tuple": (lambda t: ((Pair(1, t),), {}), lambda args, kwargs: args[0].second),
    "dict": (lambda t: ((), {"d": {"t": {"t": t}}}), lambda args, kwargs: kwargs["d"]["t"]["t"]),
    "ordered dict": (lambda t: ((OrderedDict(t=t),), {}), lambda args, kwargs: args[0]["t"]),
    "dataclass": (lambda t: ((Held(t),), {}), lambda args, kwargs: args[0].tensor),
    "frozen slots": (lambda t: (([Slotted(t)],), {}), lambda args, kwargs: args[0][0].tensor),
    "object": (lambda t: ((Plain(t),), {}), lambda args, kwargs: args[0].tensors[0]),
    "dict of its own": (lambda t: ((Bag(t=t),), {}), lambda args, kwargs: args[0]["t"]),
    "ordered dict of its own": (lambda t: ((Ordered(t, x=1),), {}), lambda args, kwargs: args[0].own * args[0]["x"]),
    "list of its own": (lambda t: ((Row([1, t]),), {}), lambda args, kwargs: args[0][1]),
    "slots": (lambda t: ((Hidden(t),), {}), lambda args, kwargs: args[0].take()),
    "model output": (lambda t: ((BaseModelOutput(t),), {}), lambda args, kwargs: args[0].last_hidden_state),
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_tensors_are_found_wherever_they_are(nesting):
    pack, take = NESTINGS[nesting]
    same_bits(Around(lambda m, *args, **kwargs: nonlinear(take(args, kwargs)), pack))


@pytest.mark.parametrize("nesting", NESTINGS)
def test_a_tensor_changed_in_place_before_backward_raises(nesting):
    pack, take = NESTINGS[nesting]
    factor = torch.ones(4)

    def scaled(m, x, *args, **kwargs):
        return nonlinear(x * take(args, kwargs))

    def arguments(x):
        args, kwargs = pack(factor)
        return (x, *args), kwargs

    model = Around(scaled, arguments)
    with in_force(model, "replay", Replayed):
        loss = model(X)
        torch.add(factor, 1, out=factor)  # its method would be seen beforehand, and the tensor copied
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation: .*is at version 1; expected version 0"
        ):
            loss.backward()
        model(X).backward()


def test_arguments_that_are_no_tensors_pass_through():
    marker, seen = object(), []
    given = (
        None,
        3,
        2.5,
        "s",
        True,
        slice(1, 2),
        torch.float64,
        torch.Size([2]),
        len,
        nn.Identity(),
        {1: 2},
        {3},
        marker,
    )

    def look(m, x, *args, **kwargs):
        seen.append((args, kwargs))
        return nonlinear(x)

    same_bits(Around(look, lambda x: ((x, *given), {"mask": None, "marker": marker})))
    (one, options), *_, (two, options_again) = seen
    assert [a is b or a == b for a, b in zip(one, two, strict=True)] == [True] * len(given)
    assert two[-1] is marker is options_again["marker"]
    assert options == options_again


def test_a_tensor_given_twice_is_one_tensor_again():
    seen = []

    def attention(m, query, key, value):
        seen.append(query is key is value)
        return nonlinear(m.attention(query, key, value)[0])

    model = Around(attention, lambda x: ((x, x, x), {}))
    model.part.attention = nn.MultiheadAttention(4, 2)
    same_bits(model)
    assert seen == [True] * 3


def test_a_replay_does_not_append_twice():
    states = []

    def collecting(m, x, states, table, held):
        y = nonlinear(x * len(states) + sum(s.detach().sum() for s in states) + len(table) + held.tensor.sum())
        states.append(y)
        table[len(table)] = y
        held.tensor = y
        return y

    def step():
        states[:] = [torch.ones(2)]
        loss = model(X)
        loss.backward()
        return loss + len(states)

    model = Around(collecting, lambda x: ((x, states, {0: x}, Held(x)), {}))
    same_bits(model, step)


class State:
    """Object that a model passes from block to block."""


CARRIERS = {
    "dict": (dict, dict.get, dict.__setitem__),
    "dict of its own": (Bag, dict.get, dict.__setitem__),
    "ordered dict of its own": (lambda: Ordered(1), OrderedDict.get, OrderedDict.__setitem__),
    "namespace": (SimpleNamespace, lambda state, name: getattr(state, name, None), setattr),
    "object": (State, lambda state, name: getattr(state, name, None), setattr),
    "slots": (
        lambda: Hidden(None),
        lambda state, name: getattr(state, "note", None),
        lambda s, n, v: setattr(s, "note", v),
    ),
}


@pytest.mark.parametrize("kind", CARRIERS)
@pytest.mark.parametrize("empty", [False, True])
def test_later_writes_into_an_argument_are_not_seen(kind, empty):
    make, get, put = CARRIERS[kind]

    def read(m, x, state):
        found = get(state, "x")
        return nonlinear(x if found is None else x + found)

    def step():
        state = make()
        if not empty:
            put(state, "x", X * 2)
        hidden = model.part.linear(X)
        for _ in range(3):
            hidden = model.part(hidden, state)
            put(state, "x", hidden)
        loss = hidden.sum()
        loss.backward()
        assert get(state, "x") is hidden
        return loss

    model = Around(read)
    model.forward = lambda: step()
    same_bits(model, lambda: model())


def test_objects_that_are_as_they_were_are_the_same_ones():
    """Somebody may know them by what they are."""
    seen = []

    def look(m, x, *objects):
        seen.append(objects)
        return nonlinear(x)

    config = State()
    config.width, config.kind = 12345, State
    marker = State()
    same_bits(Around(look, lambda x: ((x, marker, config, {"a": [marker]}), {})))
    (plain, first, again) = seen
    assert plain[0] is first[0] is again[0] is marker
    assert plain[1] is first[1] is again[1] is config
    assert again[2]["a"][0] is marker


def test_a_state_that_is_filled_later_holds_nothing_that_is_dropped():
    model = Around(lambda m, x, state: nonlinear(x), lambda x: ((x, State()), {}))

    def forward(x):
        state = State()
        hidden = model.part(model.part.linear(x), state)
        state.hidden = model.part(hidden, state)
        made.append(weakref.ref(state.hidden))
        return state.hidden.sum()

    made = []
    model.forward = forward
    with in_force(model, "replay", Replayed):
        loss = model(X)
        del loss  # and no backward, as where it is not a number
        gc.collect()
        assert made[0]() is None


def test_views_and_tensors_without_gradient_as_arguments():
    def both(m, x, mask, row):
        return nonlinear(x.masked_fill(mask, 0.5)) * row.exp()

    base = torch.randn(5, 4)
    same_bits(Around(both, lambda x: ((x.t().contiguous().t(), X > 0, base[3].expand(3, 4)), {})))


@pytest.mark.parametrize(
    "returned",
    [
        lambda y: y,
        lambda y: (y, y * 2),
        lambda y: [y, (y * 2, None)],
        lambda y: {"a": y, "b": 3},
        Held,
        lambda y: BaseModelOutput(y, hidden_states=(y, y * 2)),
        lambda y: (y, y),
    ],
)
def test_outputs_are_handed_on_as_they_are(returned):
    class Any(Around):
        def forward(self, x):
            self.returned = self.part(self.part.linear(x))
            held = self.returned.tensor if isinstance(self.returned, Held) else self.returned
            tensors = [t for t in torch.utils._pytree.tree_leaves(held) if isinstance(t, torch.Tensor)]
            return sum(nonlinear(t).sum() for t in tensors)

    model = Any(lambda m, x: returned(nonlinear(x)))
    same_bits(model)
    kind = type(returned(X))
    with in_force(model, "replay", Replayed):
        model(X)
        assert type(model.returned) is kind


# --- caches of keys and values ----------------------------------------------------------------------------------------


def gpt2(**settings):
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=3, n_head=2, **settings)
    ).train()


@pytest.mark.parametrize("way", ["recompute", "replay", "nest", "both"])
def test_a_cache_is_not_appended_to_twice(way):
    model, ids = gpt2(), torch.arange(20).view(2, 10)

    def step(past=None):
        out = model(input_ids=ids, labels=ids, use_cache=True, past_key_values=past)
        out.loss.backward()
        return torch.stack([t for layer in out.past_key_values.layers for t in (layer.keys, layer.values)])

    plain = outcome(model, step)
    with in_force(model, way, GPT2Block):
        assert differences(plain, outcome(model, step)) == []


@pytest.mark.parametrize("way", ["replay", "nest"])
def test_a_cache_that_has_a_prefix(way):
    model, ids = gpt2(), torch.arange(20).view(2, 10)
    prefix = [(torch.randn(2, 2, 4, 8), torch.randn(2, 2, 4, 8)) for _ in range(3)]

    def step():
        past = DynamicCache()
        for layer, (keys, values) in enumerate(prefix):
            past.update(keys, values, layer)
        loss = model(input_ids=ids, labels=ids, past_key_values=past).loss
        del past
        loss.backward()
        return loss

    plain = outcome(model, step)
    with in_force(model, way, GPT2Block):
        assert differences(plain, outcome(model, step)) == []


class Windowed(nn.Module):
    """Attention over a cache that keeps the last few keys only, and counts in tensors how much it has seen."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, cache, layer):
        keys, values = cache.update(x[:, None], self.linear(x)[:, None], layer)
        return x + F.scaled_dot_product_attention(x[:, None], keys, values.tanh())[:, 0]


class Windows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Windowed() for _ in range(3))

    def forward(self, x):
        cache = Cache([DynamicSlidingWindowLayer(4) for _ in self.layers])
        for number, layer in enumerate(self.layers):
            x = layer(layer(x, cache, number) * 2, cache, number)
        return x


@pytest.mark.parametrize("way", ["recompute", "replay", "nest", "both"])
def test_a_cache_with_a_sliding_window(way):
    model, x = Windows(), torch.linspace(-1, 1, 2 * 6 * 8).view(2, 6, 8)
    plain = outcome(model, lambda: model(x).sum().backward())
    with in_force(model, way, Windowed):
        assert differences(plain, outcome(model, lambda: model(x).sum().backward())) == []


def test_keys_and_values_of_other_layers_are_not_held():
    model, ids = gpt2(), torch.arange(20).view(2, 10)
    with in_force(model, "replay", GPT2Block):
        out = model(input_ids=ids, labels=ids)
        made = [torch.utils.weak.WeakTensorKeyDictionary({layer.keys: 1}) for layer in out.past_key_values.layers]
        loss = out.loss
        del out
        assert [len(alive) for alive in made] == [0, 0, 0]
        loss.backward()


# --- stopping early, and what others already checkpoint ---------------------------------------------------------------


def products(step) -> int:
    """Number of matrix products in a step."""
    with Ops() as ops:
        step()
    return sum(ops.count[name] for name in ("mm", "addmm", "bmm"))


@pytest.mark.parametrize(("dropout", "redone"), [(0.0, 3), (0.1, 4)])  # dropout saves its mask at the end of a block
def test_replaying_every_block_costs_no_more_than_checkpointing_every_block(dropout, redone):
    model, ids = Language(layers=4, block=lambda: Block(dropout=dropout)), torch.arange(20).view(2, 10)
    plain = products(lambda: model(ids).sum().backward())
    with in_force(model, "replay"):
        replayed = products(lambda: model(ids).sum().backward())
    for block in model.blocks:
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
    checkpointed = products(lambda: model(ids).sum().backward())
    assert checkpointed - plain == 4 * redone
    assert replayed == checkpointed


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_calls_inside_are_left_alone(reentrant):
    model, ids = Language(layers=2), torch.arange(20).view(2, 10)
    for block in model.blocks:
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=reentrant)
    plain = outcome(model, lambda: model(ids).sum().backward())
    for way in ("recompute", "replay"):
        with in_force(model, way):
            assert differences(plain, outcome(model, lambda: model(ids).sum().backward())) == [], way


@pytest.mark.filterwarnings("error::FutureWarning")
def test_selective_checkpointing_inside_does_not_see_the_hooks_of_a_plan():
    """Torch 2.15 warns of other hooks: some day they will pack the tensors that it caches."""
    model, ids = Language(layers=2), torch.arange(20).view(2, 10)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    plain = outcome(model, lambda: model(ids).sum().backward())
    for way in ("recompute", "replay"):
        with in_force(model, way):
            assert differences(plain, outcome(model, lambda: model(ids).sum().backward())) == [], way


def test_a_replay_inside_of_a_checkpoint_is_left_out_and_that_is_said():
    model, ids = Language(layers=2), torch.arange(20).view(2, 10)
    for block in model.blocks:
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
    plain = outcome(model, lambda: model(ids).sum().backward())
    with (
        in_force(model, "replay", nn.Sequential),
        pytest.warns(UserWarning, match=r"other hooks: torch.utils.checkpoint"),
    ):
        assert differences(plain, outcome(model, lambda: model(ids).sum().backward())) == []


def test_the_switch_of_transformers_is_respected_and_that_is_said():
    model, ids = gpt2(attn_pdrop=0.2), torch.arange(20).view(2, 10)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    plain = outcome(model, lambda: model(input_ids=ids, labels=ids).loss.backward())
    with in_force(model, "nest", GPT2Block), pytest.warns(UserWarning, match="gradient_checkpointing_enable"):
        assert differences(plain, outcome(model, lambda: model(input_ids=ids, labels=ids).loss.backward())) == []


@pytest.mark.parametrize("n_calls", [1, 2])
@pytest.mark.parametrize("is_backward_inside", [False, True])
def test_parametrizations_that_forward_caches_are_computed_again(is_backward_inside, n_calls):
    """A replay that found the weight where the call itself computed it would save less than forward did."""
    model = Around(lambda m, x: nonlinear(m.wide(x)), wide=weight_norm(nn.Linear(4, 4)))

    def step():
        with parametrize.cached():
            loss = sum(model(n * X) for n in range(1, n_calls + 1))
            if is_backward_inside:
                loss.backward()
            assert parametrize._cache
        if not is_backward_inside:
            loss.backward()

    same_bits(model, step)


@pytest.mark.parametrize("way", ["keep", "recompute", "replay", "both"])
def test_hooks_of_the_users_own_inside_win(way):
    packed = []

    def double(m, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t.detach(), lambda t: t):
            y = x.exp() * x
        return nonlinear(y)

    model = Around(double)
    same_bits(model, way=way)
    assert len(packed) == 6 if way in ("keep", "recompute") else 9


# --- nesting ----------------------------------------------------------------------------------------------------------


def test_an_outer_replay_frees_the_arguments_of_the_inner_ones():
    """Held after forward: the block's argument and nothing inside it."""
    parts = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()) for _ in range(5)]
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*parts))
    alive = []
    for part in parts:
        part.register_forward_hook(lambda m, args, out: alive.append(weakref.ref(out)))
    plain = outcome(model, lambda: model(X).sum().backward())
    made = Engine(model, parse_actions({}, ["1#0", *[f"1.{n}#0" for n in range(5)]]))
    made.install()
    try:
        assert differences(plain, outcome(model, lambda: model(X).sum().backward())) == []
        alive.clear()
        loss = model(X).sum()
        assert [ref() is None for ref in alive] == [True] * 5
        with Ops() as ops:
            loss.backward()
    finally:
        made.remove()
    # The outer replay runs four parts, so that all have their arguments; then the last part runs, for both its results,
    # and each other one up to its first, for its second was the argument of the next.
    assert ops.count["addmm"] == 4 * 2 + 2 + 4 * 1


@pytest.mark.parametrize("way", ["replay", "nest", "both"])
def test_backward_after_the_plan_was_removed(way):
    model, ids = Language(layers=2), torch.arange(20).view(2, 10)

    def step():
        with in_force(model, way) if planned else in_force(nn.Identity(), "keep"):
            loss = model(ids).sum()
        loss.backward()
        return loss

    planned = False
    plain = outcome(model, step)
    planned = True
    assert differences(plain, outcome(model, step)) == []
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())


def test_a_plan_in_which_only_some_calls_are_replayed():
    """Inside a replayed call, calls of one module of which some are replayed: each stays what it is."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(self.inner(self.inner(x)) * x)

    model = nn.Sequential(nn.Linear(4, 4), Twice(), Twice())
    plain = outcome(model, lambda: model(X).sum().backward())
    made = Engine(model, parse_actions({}, ["1#0", "1.inner#1", "1.inner#4", "1.inner#5", "2#0"]))
    made.install()
    try:
        assert differences(plain, outcome(model, lambda: model(X).sum().backward())) == []
    finally:
        made.remove()


# --- refusing ---------------------------------------------------------------------------------------------------------


def test_a_call_that_saves_something_else_the_second_time_is_refused():
    first = [True]
    model = Around(lambda m, x: nonlinear(x) if first[0] else x * 2)
    with in_force(model, "replay", Replayed):
        loss = model(X)
        first[0] = False
        with pytest.raises(ReplayMismatch, match=r"part \(Replayed\) saved nothing when it was replayed"):
            loss.backward()
        first[0] = True
        model(X).backward()


def test_a_call_that_saves_another_shape_the_second_time_is_refused():
    rows = [3]
    model = Around(lambda m, x: nonlinear(x[: rows[0]]))
    with in_force(model, "replay", Replayed):
        loss = model(X)
        rows[0] = 2
        with pytest.raises(ReplayMismatch, match=r"saved \[2, 4\] torch.float32 .* had saved \[3, 4\]"):
            loss.backward()


def test_a_parameter_changed_before_backward_is_copied_or_refused_where_it_matters():
    """An in-place method of a parameter is seen before it writes; other writers are not."""
    model = Around(lambda m, x: nonlinear(x + m.shift) + m.bias)
    model.part.shift, model.part.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    plain = outcome(model, lambda: model(X).backward())

    def step(parameter, write):
        loss = model(X)
        with torch.no_grad():
            write(parameter)
        try:
            loss.backward()
        finally:
            with torch.no_grad():
                parameter.sub_(1)

    def by_method(parameter):
        parameter.add_(1)

    def unseen(parameter):
        torch.add(parameter, 1, out=parameter)

    with in_force(model, "replay", Replayed):
        assert differences(plain, outcome(model, lambda: step(model.part.bias, unseen))) == []
        assert differences(plain, outcome(model, lambda: step(model.part.shift, by_method))) == []
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(model.part.shift, unseen)


def test_stepping_inside_of_backward():
    """An optimizer that steps on each parameter as soon as its gradient is there, and frees the gradient."""
    ids = torch.arange(20).view(2, 10)

    def trained(way):
        torch.manual_seed(0)
        model = Language(layers=3)
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def now(parameter, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(now)
        with in_force(model, way):
            for _ in range(3):
                model(ids).sum().backward()
        return model.state_dict()

    plain = trained("keep")
    for way in ("recompute", "replay", "nest", "both"):
        assert differences(plain, trained(way)) == [], way


# --- threads, and backward inside forward --------------------------------------------------------------------------


def test_backward_in_other_threads_at_once():
    model = Around(lambda m, x: F.dropout(nonlinear(m.linear(x)), 0.5))

    def losses():
        torch.manual_seed(0)
        return [model(X * n) for n in range(6)]

    def gradients(loss):
        return torch.autograd.grad(loss, list(model.parameters()))

    plain = [gradients(loss) for loss in losses()]
    with in_force(model, "replay", Replayed), ThreadPoolExecutor(3) as pool:
        planned = list(pool.map(gradients, losses()))
    assert all(
        torch.equal(a, b) for one, two in zip(plain, planned, strict=True) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("way", ["recompute", "replay"])
def test_forward_in_two_threads_at_once(way):
    """Between the state that a call begins with and what it draws the other thread may draw."""
    inside, over = threading.Event(), threading.Event()

    def slowly(m, x):
        inside.set()
        assert over.wait(20)
        return F.dropout(nonlinear(m.linear(x)), 0.5)

    model = Around(slowly)
    with in_force(model, way, Replayed), ThreadPoolExecutor(1) as pool:
        first = pool.submit(model, X)
        assert inside.wait(20)
        if way == "replay":
            with pytest.raises(lowtide.LowtideError, match="called in two threads at once"):
                model(X)
            over.set()
        else:
            over.set()
            model(X).backward()
        first.result().backward()
        model(X).backward()


@pytest.mark.parametrize("way", ["recompute", "replay", "both"])
def test_a_call_that_runs_backward_inside(way):
    """Forces from an energy: the forward differentiates, and the loss differentiates that."""

    def forces(m, x):
        energy = nonlinear(m.linear(x)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return nonlinear(force)

    same_bits(Around(forces), way=way)


class Attending(torch.autograd.Function):
    """Function that saves an uninitialised seed, as flash attention without dropout does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.run, result = time.perf_counter_ns(), x.sin()
        ctx.save_for_backward(x, torch.tensor([ctx.run, 0]), result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, seed, _ = ctx.saved_tensors
        assert seed[0] == ctx.run
        return grad * x.cos()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(Attending.apply(self.before(x)))


def test_unwritten_seeds_are_kept_and_do_not_prevent_a_replay():
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Attention() for _ in range(3)]).train(), torch.randn(256, 64)
    profile, plan, verdict = within(model, step_of(model), x, 0)
    assert [call.refused for call in profile.calls if call.cls == "Attention"] == [None] * 3
    assert plan.replay
    assert verdict.identical
    assert verdict.measured_peak_bytes <= plan.predicted.peak_bytes <= 1.001 * verdict.measured_peak_bytes
    assert predict(profile, Decisions()).peak_bytes == profile.measured_plain_peak_bytes


class Conditioned(nn.Module):
    """Draws the small indices that it gives to an embedding, which saves them and nothing else knows."""

    def __init__(self) -> None:
        super().__init__()
        self.labels, self.linear = nn.Embedding(5, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.where(torch.rand(4) < 0.5, 4, torch.arange(4))
        return x + torch.tanh(self.linear(x) * self.labels(drawn).mean(0))


@pytest.mark.parametrize("part", [0, 60])
def test_small_indices_that_are_given_to_a_part_and_saved_there_are_counted(part):
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Conditioned() for _ in range(3)]).train(), torch.randn(256, 64)
    profile, plan, verdict = within(model, step_of(model), x, part)
    assert predict(profile, Decisions()).peak_bytes == profile.measured_plain_peak_bytes
    assert verdict.identical
    assert verdict.measured_peak_bytes <= plan.predicted.peak_bytes


def test_a_long_list_of_linked_objects_is_an_argument():
    """Objects are searched to some depth: beyond it they are handed on as they are."""
    last = Plain(torch.ones(4))
    for _ in range(5000):
        before, last = last, Plain(torch.ones(4))
        last.before = before
    same_bits(Around(lambda m, x, link: nonlinear(x * link.tensors[0]), lambda x: ((x, last), {})))
    for _ in range(5000):  # one by one: Python frees a list of links by recursion
        last = last.before


def test_random_numbers_of_the_host_are_unchanged_until_one_is_drawn():
    np.random.seed(0)  # no normal number is cached
    host_rng.states()
    before = host_rng.memory()
    assert before is not None
    assert host_rng.memory() == before
    np.random.rand()
    assert host_rng.memory() != before
    before = host_rng.memory()
    random.random()
    assert host_rng.memory() != before


def test_garbage_of_the_runs_of_a_call_is_not_held_outside():
    cycle = nn.Identity()
    cycle.itself = [cycle]
    frame = SimpleNamespace(held=[weakref.ref(cycle)])
    assert ReplayFrame.is_held_outside(frame)
    del cycle
    assert not ReplayFrame.is_held_outside(frame)
