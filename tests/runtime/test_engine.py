"""Whatever a plan decides, a step gives the same bits; and the model is as it was."""

import copy
import io
import pickle
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from comparing import equal
from lowtide._torch.modes import saved_tensor_hooks
from lowtide._torch.modules import CALL, get_original_call
from lowtide.planner.records import Profile
from lowtide.runtime.call_interceptor import CallInterceptor
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import parse_actions
from parts import VOCABULARY, WIDTH, Language
from runtime.plans import WAYS, Ops, count_packs, differences, engine, in_force, outcome
from zoo import ZOO

# --- every architecture under every kind of plan ----------------------------------------------------------------------


def recipes(profile: Profile) -> dict[str, str]:
    values = profile.values
    return {s.address: values[s.value].node for s in profile.slots if s.storage is not None and values[s.value].recipe}


def blocks(profile: Profile) -> list[str]:
    """The outermost calls that can be replayed, of modules that stand beside others of their class."""
    calls = profile.calls
    count = Counter(call.cls for call in calls if call.refused is None)
    chosen: list[int] = []
    for number, call in enumerate(calls):
        above, parent = [], call.parent
        while parent is not None:
            above.append(parent)
            parent = calls[parent].parent
        if call.refused is None and count[call.cls] > 1 and not set(above) & set(chosen):
            chosen.append(number)
    return [calls[number].id for number in chosen]


def cheap(profile: Profile) -> tuple[dict[str, str], list[str]]:
    expensive = {s.address for s in profile.slots if profile.values[s.value].expensive}
    return {a: node for a, node in recipes(profile).items() if a not in expensive}, []


def first_half(profile: Profile) -> tuple[dict[str, str], list[str]]:
    found = blocks(profile)
    return {}, found[: (len(found) + 1) // 2]


def drawn(profile: Profile, seed: int) -> tuple[dict[str, str], list[str]]:
    """Any recipes and any calls, also calls inside others that are replayed."""
    choose = random.Random(seed)
    share = choose.choice([0.2, 0.5, 0.9])
    replay = [call.id for call in profile.calls if call.refused is None and choose.random() < 0.4]
    return {a: node for a, node in recipes(profile).items() if choose.random() < share}, replay


PLANS = {
    "cheap recipes": cheap,
    "all recipes": lambda profile: (recipes(profile), []),
    "every block": lambda profile: ({}, blocks(profile)),
    "the first half": first_half,
    "all recipes in every block": lambda profile: (recipes(profile), blocks(profile)),
    "every call": lambda profile: ({}, [call.id for call in profile.calls if call.refused is None]),
    **{f"drawn {seed}": partial(drawn, seed=seed) for seed in range(5)},
}


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("name", ZOO)
def test_loss_gradients_buffers_and_random_numbers_are_those_of_the_plain_step(name):
    model, batch, step = ZOO[name]()
    profile = lowtide.rehearse(model, step, batch)
    before, generators = copy.deepcopy(model.state_dict()), [m.generator for m in model.modules() if has_generator(m)]
    states = [generator.get_state() for generator in generators]

    def run():
        model.load_state_dict(before)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return outcome(model, lambda: step(batch))

    plain = run()
    assert any(name.startswith("gradient") for name in plain)
    assert differences(plain, run()) == []  # else the step itself is not deterministic
    for kind, plan in PLANS.items():
        engine = Engine(model, parse_actions(*plan(profile)))
        engine.install()
        try:
            assert differences(plain, run()) == [], kind
            assert differences(plain, run()) == [], f"{kind}, where only needed tensors are seen"
        finally:
            engine.remove()
        assert not engine.packer.drifted, kind
        assert not engine.packer.learns_again, kind


def has_generator(module: nn.Module) -> bool:
    return isinstance(getattr(module, "generator", None), torch.Generator)


# --- the model under a plan is the model ------------------------------------------------------------------------------


def anatomy(model: nn.Module) -> list[object]:
    """Everything about a model that a user or another library may look at."""
    return [
        list(model.state_dict()),
        [(path, id(module), type(module)) for path, module in model.named_modules()],
        [(name, id(parameter)) for name, parameter in model.named_parameters()],
        [(name, id(buffer)) for name, buffer in model.named_buffers()],
        [(dict(m._forward_hooks), dict(m._forward_pre_hooks), dict(m._backward_hooks)) for m in model.modules()],
        [(module.forward, module.training) for module in model.modules()],
    ]


def attributes(model: nn.Module) -> list[set[str]]:
    return [set(vars(module)) for module in model.modules()]


class Failing(nn.Module):
    """Raises in forward or in backward on request."""

    def __init__(self):
        super().__init__()
        self.when = ""

    def forward(self, x):
        if self.when == "forward":
            raise ValueError("in forward")
        y = x * 1
        if self.when == "backward":
            y.register_hook(self.fail)
        return y

    def fail(self, grad):
        raise ValueError("in backward")


def failing_language() -> Language:
    model = Language(layers=2)
    model.blocks[1].mlp.append(Failing())
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["", "forward", "backward"])
def test_a_model_is_the_same_under_a_plan_and_afterwards(way, when):
    model, ids = failing_language(), torch.zeros(2, 8, dtype=torch.long)
    model.register_forward_hook(lambda *_: None)
    model.blocks[0].register_forward_pre_hook(lambda *_: None)
    before, own = anatomy(model), attributes(model)
    with in_force(model, way) as engine:
        assert anatomy(model) == before
        model.blocks[1].mlp[-1].when = when
        if when:
            with pytest.raises(ValueError, match=f"in {when}"):
                model(ids).sum().backward()
        else:
            model(ids).sum().backward()
        assert anatomy(model) == before
        assert engine.here.handler is None
        model.blocks[1].mlp[-1].when = ""
        model(ids).sum().backward()  # the engine is none the worse for it
    assert anatomy(model) == before
    assert attributes(model) == own


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class WithState(nn.Linear):
    """A module that copies all its attributes, as some libraries' do."""

    def __getstate__(self):
        return dict(self.__dict__)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded]
)
def test_copies_and_pickles_of_a_model_have_no_plan(copied):
    model = Language(layers=1)
    model.blocks[0].out = WithState(WIDTH, WIDTH)
    x = torch.randn(2, 8, WIDTH, requires_grad=True)
    with in_force(model, "both") as engine:
        other = copied(model)
        packs = count_packs(engine)
        assert not isinstance(other.__dict__.get(CALL), CallInterceptor)
        if other.blocks is not model.blocks:  # a shallow copy has the same parts, so what holds for them holds for it
            assert not any(isinstance(module.__dict__.get(CALL), CallInterceptor) for module in other.modules())
            other.blocks[0](x).sum().backward()
            other(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
            assert packs.total == 0
        other.eval(), model.eval()
        assert torch.equal(other.blocks[0].out(x), model.blocks[0].out(x))


def test_a_second_plan_on_the_same_model_is_refused():
    model = Language(layers=1)
    with (
        in_force(model, "keep"),
        pytest.raises(lowtide.LowtideError, match=r"already: remove it first with lowtide\.remove"),
        in_force(model, "keep"),
    ):
        pass
    with in_force(model, "keep"):
        pass


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_models_with_parts_in_common_can_each_have_a_plan(first_out):
    trunk = Language(layers=2)
    models = [nn.Sequential(trunk, nn.Linear(VOCABULARY, 3)) for _ in range(2)]
    own = [attributes(model) for model in models]
    ids = torch.zeros(2, 8, dtype=torch.long)
    plain = [outcome(model, lambda model=model: model(ids).sum().backward()) for model in models]
    engines = [engine(model, "both") for model in models]
    for made in engines:
        made.install()
    for _ in range(2):
        planned = [outcome(model, lambda model=model: model(ids).sum().backward()) for model in models]
        assert [differences(a, b) for a, b in zip(plain, planned, strict=True)] == [[], []]
        engines.pop(first_out if len(engines) == 2 else 0).remove()
    assert [attributes(model) for model in models] == own


def test_module_compile_is_asked_inside_and_restored():
    model = Language(layers=2)
    calls = []

    def compiled(*args, **kwargs):
        calls.append(args)
        return get_original_call(model.blocks[1])(*args, **kwargs)

    ids = torch.zeros(2, 8, dtype=torch.long)
    plain = outcome(model, lambda: model(ids).sum().backward())
    model.blocks[1].__dict__[CALL] = compiled
    with in_force(model, "replay"):
        planned = outcome(model, lambda: model(ids).sum().backward())
    assert len(calls) == 2  # forward and replay
    assert model.blocks[1].__dict__[CALL] is compiled
    assert differences(plain, planned) == []


def test_a_module_that_is_compiled_while_a_plan_is_in_force_stays_so():
    model = Language(layers=1)
    with in_force(model, "keep"):
        model.blocks[0].compile(backend="eager")
        theirs = model.blocks[0].__dict__[CALL]
    assert model.blocks[0].__dict__[CALL] is theirs


# --- when a plan is at work -------------------------------------------------------------------------------------------


def test_nothing_happens_without_gradients_or_in_eval_mode():
    model, ids = Language(layers=1), torch.zeros(2, 8, dtype=torch.long)
    with in_force(model, "both") as engine:
        packs = count_packs(engine)
        with torch.no_grad():
            model(ids)
        with torch.inference_mode():
            model(ids)
        model.eval()
        model(ids).sum().backward()
        model.blocks[0](torch.randn(2, 8, WIDTH)).sum().backward()  # a part by itself
        assert packs.total == 0
        model.train()
        model(ids).sum().backward()
        assert packs.total > 0


@pytest.mark.parametrize("hooks", [torch.autograd.graph.save_on_cpu, None])
def test_hooks_around_the_model_win_and_that_is_said_once(hooks):
    model, ids = Language(layers=2), torch.zeros(2, 8, dtype=torch.long)
    plain = outcome(model, lambda: model(ids).sum().backward())

    def step():
        if hooks is None:
            checkpoint(model, ids, use_reentrant=False).sum().backward()
        else:
            with hooks():
                model(ids).sum().backward()

    with in_force(model, "both") as engine:
        packs = count_packs(engine)
        with pytest.warns(UserWarning, match="inside other saved-tensor hooks") as said:
            planned = [outcome(model, step) for _ in range(2)]
        assert len(said) == 1
        assert packs.total == 0
    assert [differences(plain, found) for found in planned] == [[], []]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, lambda f: torch.func.jacfwd(f)])
def test_in_function_transforms_the_plan_does_nothing(transform):
    model = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3), nn.GELU())
    plain = transform(lambda x: model(x).sum())(torch.ones(2, 3))
    with in_force(model, "replay", nn.Linear), pytest.warns(UserWarning, match=r"inside a transform of torch\.func"):
        planned = transform(lambda x: model(x).sum())(torch.ones(2, 3))
    assert torch.equal(planned, plain)


def test_in_forward_mode_the_plan_does_nothing_and_other_calls_of_the_step_follow_it():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3), nn.GELU()), torch.ones(2, 3)

    def step():
        with forward_ad.dual_level():
            out, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones(2, 3))))
        (out.square().sum() + tangent.square().sum() + model(x).sum()).backward()

    plain = outcome(model, step)
    with in_force(model, "replay", nn.Linear) as engine:
        packs = count_packs(engine)
        assert [differences(plain, outcome(model, step)) for _ in range(2)] == [[], []]
        assert packs.total > 0


def test_functional_call_with_other_parameters_works():
    model, ids = Language(layers=2), torch.zeros(2, 8, dtype=torch.long)
    other = {name: p.detach().clone().mul_(0.5).requires_grad_() for name, p in model.named_parameters()}

    def gradients():
        torch.manual_seed(0)
        loss = torch.func.functional_call(model, other, (ids,), tie_weights=True).sum()
        return torch.autograd.grad(loss, list(other.values()), allow_unused=True)

    plain = gradients()
    for way in ("recompute", "replay", "nest", "both"):
        with in_force(model, way):
            assert equal(plain, gradients()), way


class Scaled(nn.Module):
    """Notes the weight with which each of its calls runs."""

    def __init__(self, note):
        super().__init__()
        self.weight, self.note = nn.Parameter(torch.ones(WIDTH)), note

    def forward(self, x):
        self.note(self.weight)
        return (x * self.weight).exp().tanh()


@pytest.mark.parametrize("has_history", [False, True])
def test_a_replay_runs_with_the_weight_of_its_call_and_without_that_one_s_history(has_history):
    weights = []
    model = nn.Sequential(Scaled(weights.append), nn.Tanh())
    x, given = torch.randn(64, WIDTH), torch.ones(WIDTH, requires_grad=True)
    with in_force(model, "replay", Scaled):
        weight = given * 2 if has_history else given
        torch.func.functional_call(model, {"0.weight": weight}, (x,)).sum().backward()
    called, replayed = weights
    assert called is weight
    assert replayed.is_leaf
    assert replayed.requires_grad
    assert (replayed is weight) == (not has_history)


class Inner(nn.Module):
    """Takes a step of gradient descent inside its forward, as in MAML, and runs with the weights that it gives."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        weights = dict(self.part.named_parameters())
        loss = torch.func.functional_call(self.part, weights, (x,)).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        stepped = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return torch.func.functional_call(self.part, stepped, (x,))


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_made_in_the_forward(way):
    model, x = Inner(), torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)
    plain = outcome(model, lambda: model(x).square().sum().backward())
    with in_force(model, way, nn.Sequential):
        assert differences(plain, outcome(model, lambda: model(x).square().sum().backward())) == []


def test_replicas_of_data_parallel_run_as_without_a_plan():
    model, ids = Language(layers=1), torch.zeros(2, 8, dtype=torch.long)
    seen = []

    def replica(module: nn.Module) -> nn.Module:
        """As torch.nn.parallel.replicate makes them, with weights of their own."""
        made = module._replicate_for_data_parallel()
        for name, child in module._modules.items():
            made._modules[name] = replica(child)
        for name, parameter in module._parameters.items():
            setattr(made, name, None if parameter is None else parameter * 2)
        return made

    with torch.no_grad():
        expected = replica(model.eval())(ids)
        assert not torch.equal(expected, model(ids))
    with in_force(model.train(), "both"):
        one = replica(model.eval())
        thread = threading.Thread(target=lambda: seen.append(one(ids).detach()))
        thread.start()
        thread.join()
    assert torch.equal(seen[0], expected)


def test_a_forward_in_another_thread_is_a_pass_of_its_own():
    model = Language(layers=2)
    batches = [torch.full((2, 8), n) for n in range(4)]

    def gradients(ids):
        return torch.autograd.grad(model(ids).sum(), list(model.parameters()))

    for block in model.blocks:
        block.mlp[-1].p = 0  # threads share the random numbers
    plain = [gradients(ids) for ids in batches]
    with in_force(model, "recompute"), ThreadPoolExecutor(4) as pool:
        planned = list(pool.map(gradients, batches))
    assert all(
        torch.equal(a, b) for one, two in zip(plain, planned, strict=True) for a, b in zip(one, two, strict=True)
    )


class Tree(nn.Module):
    """Calls itself for each branch."""

    def __init__(self):
        super().__init__()
        self.leaf, self.join = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU())

    def forward(self, x, depth=3):
        if not depth:
            return self.leaf(x)
        return self.join(torch.cat([self(x, depth - 1), self(x * 2, depth - 1)], -1))


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_calls_itself(way):
    model, x = Tree(), torch.randn(4, WIDTH)
    plain = outcome(model, lambda: model(x).sum().backward())
    with in_force(model, way, (nn.Sequential, nn.Linear)):
        assert differences(plain, outcome(model, lambda: model(x).sum().backward())) == []


def test_unexpected_tensors_are_kept_and_reported_once():
    model, ids = Language(layers=2), torch.zeros(2, 8, dtype=torch.long)
    plain = outcome(model, lambda: model(ids).sum().backward())
    addresses = ["blocks.0#0:0", "blocks.1.mlp.0#0:0", "norm#0:1"]
    engine = Engine(model, parse_actions(dict.fromkeys(addresses, "CosBackward0"), ()))
    engine.install()
    with pytest.warns(UserWarning, match="saves different tensors than the rehearsed step") as said:
        planned = [outcome(model, lambda: model(ids).sum().backward()) for _ in range(2)]
    engine.remove()
    assert len(said) == 1
    assert engine.packer.drifted <= set(addresses)
    assert engine.packer.drifted
    assert [differences(plain, found) for found in planned] == [[], []]


class Turned(nn.Module):
    """Its linear reads a transposed copy of what it was given, which has no recipe and which nothing else saves."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x.transpose(0, 1).contiguous())


class Written(nn.Module):
    """Writes the results of a loop into rows of one tensor, and hands that to the next part."""

    def __init__(self):
        super().__init__()
        self.first, self.then = nn.Linear(WIDTH, WIDTH), nn.Sequential(Turned(), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        rows = torch.zeros_like(x)
        for n, row in enumerate(self.first(x).unbind(1)):
            rows[:, n] = row
        return self.then(rows)


def test_nothing_is_planned_of_what_only_a_replay_would_hold():
    """Arguments of calls are known to a rehearsal; a plan without a replay of the call does not have them."""
    model, x = Written().train(), torch.randn(16, 24, WIDTH)
    profile = lowtide.rehearse(model, lambda x: model(x).sum().backward(), x)
    refused = {slot.address: profile.values[slot.value].refused for slot in profile.slots}
    assert refused["then.0.linear#0:0"] == "it is computed from an argument of a call that nothing else holds"
    plain = outcome(model, lambda: model(x).sum().backward())
    engine = Engine(model, parse_actions(*PLANS["all recipes"](profile)))
    engine.install()
    planned = outcome(model, lambda: model(x).sum().backward())
    engine.remove()
    assert differences(plain, planned) == []
    assert not engine.packer.drifted


class Masking(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x, mask):
        return self.norm(self.linear(x)).tanh() * mask


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Masking() for _ in range(3))

    def forward(self, x):
        mask = (torch.arange(24) == 3).float()[:, None]
        for block in self.blocks:
            x = block(x, mask)
        return x


def test_the_input_of_a_replayed_block_is_recomputed_from_what_another_one_was_given():
    model, x = Masked().train(), torch.randn(16, 24, WIDTH)
    profile = lowtide.rehearse(model, lambda x: model(x).sum().backward(), x)
    recompute, replay = PLANS["all recipes in every block"](profile)
    assert recompute["blocks.1#0@0"] == "MulBackward0"
    assert replay == [f"blocks.{n}#0" for n in range(3)]
    plain = outcome(model, lambda: model(x).sum().backward())
    engine = Engine(model, parse_actions(recompute, replay))
    engine.install()
    planned = outcome(model, lambda: model(x).sum().backward())
    engine.remove()
    assert differences(plain, planned) == []
    assert not engine.packer.drifted


def test_a_plan_that_changes_nothing_only_looks_how_large_batches_are_and_is_there_for_larger_ones():
    model, x = Masked().train(), torch.randn(2, 24, WIDTH)
    profile = lowtide.rehearse(model, lambda x: model(x).sum().backward(), x)
    whole, *parts = attributes(model)
    plan = lowtide.plan(profile, 2 * profile.measured_plain_peak_bytes)
    with lowtide.apply(model, replace(plan, fallback=None)):
        assert attributes(model) == [whole | {CALL}, *parts]
    assert attributes(model) == [whole, *parts]
    has_hooks = []
    watch = model.blocks[0].register_forward_hook(lambda *_: has_hooks.append(saved_tensor_hooks() is not None))
    with lowtide.apply(model, plan, say=lambda what: None):
        for batch in (x, torch.cat([x, x]), x):
            model(batch)
    watch.remove()
    assert has_hooks == [False, True, False]


# --- how often ops run ------------------------------------------------------------------------------------------------


def test_no_value_is_recomputed_twice_in_one_backward():
    """Each linear output and normalised input is recomputed once, although up to three slots and recomputes read it."""
    model, ids = Language(layers=3), torch.zeros(2, 8, dtype=torch.long)
    for block in model.blocks:
        block.mlp[-1].p = 0

    def backward() -> Counter:
        loss = model(ids).sum()
        with Ops() as ops:
            loss.backward()
        return ops.count

    plain = backward()
    with in_force(model, "recompute"):
        planned = backward()
    extra = planned - plain
    assert extra["native_layer_norm"] == 2 * 3 + 1
    assert extra["gelu"] == 3
    assert extra["addmm"] == 4 * 3


def test_a_deep_chain_of_recomputes_needs_no_recursion():
    model = nn.Sequential(*[layer for _ in range(400) for layer in (nn.Linear(4, 4), nn.Tanh())])
    x = torch.randn(2, 4)
    plain = outcome(model, lambda: model(x).sum().backward())
    with in_force(model, "recompute"):
        assert differences(plain, outcome(model, lambda: model(x).sum().backward())) == []


# --- any network, any plan --------------------------------------------------------------------------------------------


class Drawn(nn.Module):
    """A few ops, drawn: each takes the last value, and the older ones where it joins or comes back to something."""

    def __init__(self, ops: list[tuple[int, int]], parts: list[nn.Module]):
        super().__init__()
        self.ops, self.parts = ops, nn.ModuleList(parts)

    def forward(self, x):
        past = [x]
        for kind, number in self.ops:
            old = past[number % len(past)]
            x = past[-1]
            match kind:
                case 0:
                    x = x + old
                case 1:
                    x = torch.cat([x[:, :16], old[:, 16:]], 1)
                case 2:
                    x = x.t().contiguous().t() * old
                case 3:
                    x = (x * 2).relu_()
                case 4:
                    x = x.clone()
                    x[:, ::2].mul_(0.5)
                case 5:
                    one, two = x.chunk(2, 1)
                    x = torch.cat([one * two.sigmoid(), two.tanh()], 1)
                case 6:
                    x = F.dropout(x, 0.3) - old.detach()
                case 7:
                    x = x.view(8, 4, 32).softmax(1).transpose(0, 1).reshape(32, 32)
                case _:
                    x = self.parts[number % len(self.parts)](x)
            past.append(x)
        return x


def drawn_network(draws: list[list[tuple[int, int]]]) -> nn.Module:
    """Networks of ops and of parts that they share; each may be a part of the next."""
    torch.manual_seed(0)
    parts: list[nn.Module] = [
        nn.Linear(32, 32),
        nn.GELU(),
        nn.LayerNorm(32),
        nn.Sequential(nn.Linear(32, 32), nn.SiLU()),
    ]
    for ops in draws:
        parts.append(Drawn(ops, parts))
    return nn.Sequential(nn.Linear(32, 32), parts[-1], nn.Linear(32, 32))


OPS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=5)


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(draws=st.lists(OPS, min_size=1, max_size=3), seed=st.integers(0, 99))
def test_any_plan_on_any_network(draws, seed):
    model, x = drawn_network(draws), torch.linspace(-2, 2, 32 * 32).view(32, 32)

    def step(_=None):
        model(x).square().mean().backward()

    plain = outcome(model, step)
    profile = lowtide.rehearse(model.train(), step, None)
    for plan in (
        cheap,
        PLANS["all recipes"],
        PLANS["every call"],
        partial(drawn, seed=seed),
        partial(drawn, seed=seed + 1),
    ):
        engine = Engine(model, parse_actions(*plan(profile)))
        engine.install()
        try:
            assert differences(plain, outcome(model, step)) == []
            assert differences(plain, outcome(model, step)) == []
            assert not engine.packer.drifted
            assert not engine.packer.learns_again
        finally:
            engine.remove()
