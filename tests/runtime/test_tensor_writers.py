"""Recomputes from tensors that are written to before backward, in rehearsed steps or only in later ones."""

import functools
import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide._torch.inplace_functions import inplace_functions, list_foreach_functions
from lowtide.planner import find_smallest_peak
from lowtide.runtime import inplace_methods
from lowtide.runtime import tensor_writers as writers
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import parse_actions
from runtime.diagonal_params import diagonal_params
from runtime.plans import installed

WIDTH = 64


class Words(nn.Module):
    """Each call normalizes the rows of the table that it looks up."""

    def __init__(self, *, blocks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, WIDTH, max_norm=1.0)
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.layers = nn.ModuleList(layers if blocks else (nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()


class Sum(nn.Module):
    """A bias and a mask are added that autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(4 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.wide(x) + self.shift)).square().mean()


def ids(seed: int, n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 50, (64, 32), generator=generator) for _ in range(n)]


def trained(model: nn.Module, batches: list[list[Tensor]]) -> list[Tensor]:
    """Losses and weights of a training in which backward is through all calls of a batch at once."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    found = []
    for batch in batches:
        loss = torch.stack([model(x) for x in batch]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(p.detach() for p in model.parameters())]


def with_smallest_peak(model: nn.Module, batch: list[Tensor]) -> lowtide.Plan:
    def step(batch: list[Tensor]) -> None:
        torch.stack([model(x) for x in batch]).sum().backward()
        model.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile = lowtide.rehearse(model, step, batch)
    return lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes)


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.mark.parametrize("blocks", [False, True], ids=["recomputed", "run again"])
@pytest.mark.parametrize("rehearsed", [1, 2])
def test_a_table_that_each_call_normalizes_is_not_relied_on(rehearsed: int, blocks: bool) -> None:
    batches = [ids(seed, 2) for seed in range(3)]
    plain = trained(Words(blocks=blocks), batches)
    model = Words(blocks=blocks)
    plan = with_smallest_peak(model, ids(7, rehearsed))
    assert plan.recompute
    said: list[str] = []
    with lowtide.apply(model := Words(blocks=blocks), plan, say=said.append):
        assert same(trained(model, batches), plain)
    assert said == []


def test_a_norm_that_is_set_later_copies_the_table_once_and_keeps_what_is_looked_up_from_then_on() -> None:
    def without() -> Words:
        model = Words()
        model.table.max_norm = None
        return model

    def set_later(apply: Callable[[Words], object]) -> list[Tensor]:
        model = without()
        apply(model)
        first = trained(model, [ids(0, 2)])
        model.table.max_norm = 0.5
        return [*first, *trained(model, [ids(1, 2), ids(2, 2)])]

    plan = with_smallest_peak(without(), ids(7, 2))
    assert any("EmbeddingBackward0" in name for name in plan.recompute.values())
    said: list[str] = []
    planned = set_later(lambda model: lowtide.apply(model, plan, say=said.append))
    assert same(planned, set_later(lambda model: None))
    assert said[0].startswith("an embedding's max_norm writes to table.weight ([50, 64] torch.float32) between forward")


def test_an_optimizer_between_forward_and_backward_finds_what_it_updates_copied() -> None:
    def updated_between(apply: Callable[[Sum], object]) -> list[Tensor]:
        model, x = Sum(), torch.randn(64, 8, WIDTH, generator=torch.Generator().manual_seed(1))
        apply(model)
        optimizer = torch.optim.SGD([model.wide.bias, model.narrow.bias], 0.5)
        found = []
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            loss = model(x)
            optimizer.step()
            model.zero_grad()
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        return found

    plan = with_smallest_peak(Sum(), [torch.randn(64, 8, WIDTH)])
    assert plan.recompute
    said: list[str] = []
    planned = updated_between(lambda model: lowtide.apply(model, plan, say=said.append))
    assert same(planned, updated_between(lambda model: None))
    assert len(said) == 1
    assert said[0].startswith("SGD.step() writes to wide.bias ([256] torch.float32) between forward and backward")


def set_rows(operand: Tensor) -> None:
    operand[3:9] = 0.25


def set_rows_of_data(operand: Tensor) -> None:
    operand.data[3:9] = 0.25


def add_to(operand: Tensor) -> None:
    operand += 0.25


def set_data(operand: Tensor) -> None:
    operand.data = torch.full_like(operand, 0.3)


def set_data_and_write_to_the_former(operand: Tensor) -> None:
    former = operand.data
    set_data(operand)
    former.zero_()


def set_array(operand: Tensor) -> None:
    operand.detach().numpy()[:] = 0.2


def swap(operand: Tensor) -> None:
    if not isinstance(operand, nn.Parameter):  # plain torch refuses a parameter of a graph
        torch.utils.swap_tensors(operand, torch.full_like(operand, 0.3))
    else:
        operand.set_(torch.full_like(operand, 0.3))


WRITERS: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "clamp_": ("Tensor.clamp_", lambda it: it.clamp_(-0.01, 0.01)),
    "copy_": ("Tensor.copy_", lambda it: it.copy_(torch.ones_like(it))),
    "init": ("Tensor.fill_", lambda it: nn.init.constant_(it, 0.3)),
    "[]": ("Tensor.__setitem__", set_rows),
    "+=": ("Tensor.__iadd__", add_to),
    "/=": ("Tensor.__itruediv__", lambda it: it.__itruediv__(2)),
    "through a view": ("Tensor.mul_", lambda it: it[2:5].mul_(0.5)),
    "through detach": ("Tensor.add_", lambda it: it.detach().view(-1).add_(1)),
    "through data": ("Tensor.mul_", lambda it: it.data.mul_(0.5)),
    "through data, []": ("Tensor.__setitem__", set_rows_of_data),
    "foreach": ("torch._foreach_mul_", lambda it: torch._foreach_mul_([it], 0.5)),
    "foreach, a view": ("torch._foreach_add_", lambda it: torch._foreach_add_((it.data[:4],), 1.0)),
    "a function": ("torch.relu_", lambda it: torch.relu_(it)),
    "a function, through data": ("torch.celu_", lambda it: torch.celu_(it.data)),
    "F.hardtanh": ("torch.hardtanh_", lambda it: F.hardtanh(it.data, -0.01, 0.01, inplace=True)),
    "F.leaky_relu_": ("torch.leaky_relu_", lambda it: F.leaky_relu_(it.data)),
    "a module": ("torch.threshold_", lambda it: nn.Threshold(0.1, 0.2, inplace=True)(it.data)),
    "data =": ("Tensor.data = ...", set_data),
    "data =, and the former contents": ("Tensor.data = ...", set_data_and_write_to_the_former),
    "a vector of parameters": (
        "Tensor.data = ...",
        lambda it: nn.utils.vector_to_parameters(torch.full((it.numel(),), 0.3), [it]),
    ),
    "set_": ("Tensor.set_", lambda it: it.set_(torch.full_like(it, 0.3))),
    "swap": ("", swap),
    "a storage": ("UntypedStorage.copy_", lambda it: it.untyped_storage().copy_((it * 2).untyped_storage())),
    "an array": ("Tensor.numpy", set_array),
    "foreach copy": ("torch._foreach_copy_", lambda it: torch._foreach_copy_([it], [torch.ones_like(it)])),
}
"""What is said to write, and the writer."""


class Blocks(nn.Module):
    """Two equal blocks, which a plan runs again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


class Shifting(nn.Module):
    """A block that reads a large mask, its own or its caller's."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.randn(512, WIDTH) if own else None)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        shift = (self.get_buffer("mask") if mask is None else mask)[: len(x), None]
        return torch.tanh(F.gelu(self.linear(x + shift)) + 0.5 * shift)


class Shifted(nn.Module):
    """Blocks that a plan runs again, and a mask that is too large to be copied for each call."""

    def __init__(self, *, own: bool, views: bool = False) -> None:
        """`views`: each block gets a view that the model makes for it."""
        super().__init__()
        torch.manual_seed(0)
        self.views = views
        self.blocks = nn.ModuleList(Shifting(own=own) for _ in range(3))
        self.register_buffer("mask", None if own else torch.randn(512, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.mask[1:] if self.views else self.mask)
        return x.square().mean()


def named(name: str) -> Callable[[nn.Module], Tensor]:
    return lambda model: {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]


OPERANDS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "a parameter, recomputed from": (Sum, named("wide.bias")),
    "a buffer, recomputed from": (Sum, named("shift")),
    "a parameter of a block that is run again": (Blocks, named("blocks.0.0.bias")),
    "a buffer of a block that is run again": (lambda: Shifted(own=True), named("blocks.0.mask")),
    "an argument of a block that is run again": (lambda: Shifted(own=False), named("mask")),
    "a view, as an argument": (lambda: Shifted(own=False, views=True), named("mask")),
}
ROWS = torch.randn(64, 8, WIDTH, generator=torch.Generator().manual_seed(1))


@functools.cache
def plan_of(operand: str) -> lowtide.Plan:
    return with_smallest_peak(OPERANDS[operand][0](), [ROWS])


@pytest.mark.parametrize(("operand", "writer"), diagonal_params(OPERANDS, WRITERS))
def test_a_later_writer_finds_the_operand_copied_and_the_loop_goes_on(operand: str, writer: str) -> None:
    make, find = OPERANDS[operand]
    called, write = WRITERS[writer]

    def gradients(model: nn.Module) -> list[Tensor]:
        results: list[Tensor] = []
        for n in range(4):
            loss = model(ROWS)
            if n in (1, 2):
                with torch.no_grad():
                    write(find(model))
            loss.backward()
            results += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
        return results

    model, said = make(), list[str]()
    with lowtide.apply(model, plan_of(operand), say=said.append):
        assert same(gradients(model), gradients(make()))
    assert len(said) == 1
    assert said[0].startswith(called)
    assert " writes to " in said[0] or " gives away the memory of " in said[0]
    assert "between forward and backward" in said[0]


class Convolutions(nn.Module):
    """A plan recomputes results of convolutions, whose weights backward reads too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv1d(8, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)
        self.second = nn.Conv1d(WIDTH, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.second(F.gelu(self.norm(self.first(x))))).square().mean()


HIDDEN = {name: write for name, (_, write) in WRITERS.items() if "data" in name or name == "a storage"}
"""Writers that change no version."""


@pytest.mark.parametrize("writer", HIDDEN)
def test_a_hidden_write_to_a_weight_changes_what_backward_reads_and_not_what_is_recomputed(writer: str) -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        results: list[Tensor] = []
        for n in range(4):
            loss = model(ROWS)
            if n > 1:
                with torch.no_grad():
                    for weight in (named("first.weight"), named("norm.weight"), named("second.weight")):
                        HIDDEN[writer](weight(model))
            loss.backward()
            results += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
        return results

    plan = with_smallest_peak(Convolutions(), [ROWS])
    assert any("Convolution" in node for node in plan.recompute.values())
    model = Convolutions()
    with lowtide.apply(model, plan, say=lambda what: None):
        assert same(gradients(model), gradients(Convolutions()))


class Scaled(nn.Module):
    """A buffer that autograd saves, and that a recompute reads, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("scale", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.layers
        x = F.gelu(first(x))
        x = x + torch.tanh(second(x) * self.scale)
        return fourth(F.gelu(third(x))).square().mean()


def test_a_hidden_write_to_a_saved_buffer_changes_what_backward_reads_and_not_what_is_recomputed() -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        results: list[Tensor] = []
        for n in range(4):
            loss = model(ROWS)
            if n > 1:
                named("scale")(model).data.add_(0.5)
            loss.backward()
            results += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
        return results

    model, said = Scaled(), list[str]()
    engine = Engine(model, parse_actions({"#0:2": "TanhBackward0"}, ()))
    engine.messages.tell = said.append
    with installed(engine):
        assert same(gradients(model), gradients(Scaled()))
    assert len(said) == 1


def test_arrays_of_all_parameters_between_forward_and_backward_are_said_once_and_of_results_never() -> None:
    model, said = Blocks(), list[str]()
    with lowtide.apply(model, plan_of("a parameter of a block that is run again"), say=said.append):
        for _ in range(2):
            loss = model(ROWS)
            loss.detach().numpy()
            assert not said
            loss.backward()
        loss = model(ROWS)
        for parameter in model.parameters():
            parameter.data.numpy()
        loss.backward()
    assert [text.split()[0] for text in said] == ["Tensor.numpy"]


class Averaging(nn.Module):
    """A block that averages what it sees in a large buffer of its own from the third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("mean", torch.zeros(512, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.get_buffer("mean")
        x = torch.tanh(F.gelu(self.linear(x - mean[: len(x), None])))
        self.calls += 1
        if self.calls > 2:
            with torch.no_grad():
                mean[: len(x)].lerp_(x.mean(1), 0.1)
        return x


def test_a_block_that_writes_to_a_large_buffer_in_later_steps_only_is_run_again_with_its_first_contents() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Averaging() for _ in range(3)))

    def trained(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for _ in range(5):
            loss = model(ROWS).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(p.detach() for p in model.parameters()), *model.buffers()]

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    model = make()
    profile = lowtide.rehearse(model, step, ROWS)
    plan = lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes)
    assert plan.replay
    planned, said = make(), list[str]()
    with lowtide.apply(planned, plan, say=said.append):
        assert same(trained(planned), trained(make()))
    assert [what.partition(" writes to ")[0] for what in said] == ["Tensor.lerp_"] * 3  # once for each block


def test_methods_of_tensors_are_torchs_own_without_a_plan() -> None:
    def functions() -> dict[object, object]:
        places = [*inplace_functions(), *((torch, name) for name in list_foreach_functions())]
        functions = {(owner.__name__, name): getattr(owner, name) for owner, name in places}
        return {**vars(Tensor), **functions, **vars(torch.UntypedStorage), "swap": torch.utils.swap_tensors}

    before, model = functions(), Sum()
    with lowtide.apply(model, plan_of("a buffer, recomputed from")):
        assert functions() == before  # until a tensor is to be read again
        model(ROWS).backward()
        assert Tensor.clamp_ is not torch._C.TensorBase.clamp_
        assert torch._foreach_mul_ is not before["torch", "_foreach_mul_"]
        assert nn.Parameter.clamp_ is Tensor.clamp_
    assert functions() == before
    assert Tensor.clamp_ is torch._C.TensorBase.clamp_


def test_functions_that_write_in_place_compile_in_one_graph_while_a_plan_is_in_force() -> None:
    def scale(x: Tensor) -> Tensor:
        y = x.clone()
        y.mul_(2)
        y[0] = 3
        y += 1
        torch._foreach_add_([y], 1.0)
        F.leaky_relu(y, inplace=True)
        F.threshold(torch.relu_(y), 0.1, 0.2, inplace=True)
        weight.data = y.data
        return F.elu_(y)

    weight, model = nn.Parameter(torch.zeros(4)), Sum()
    with lowtide.apply(model, plan_of("a buffer, recomputed from")):
        model(ROWS).backward()
        compiled = torch.compile(scale, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(4)), scale(torch.ones(4)))


def test_functions_that_write_in_place_can_be_scripted_while_a_plan_is_in_force_and_after_it() -> None:
    layers = nn.Sequential(nn.ReLU(inplace=True), nn.ELU(inplace=True), nn.Threshold(0.1, 0.2, inplace=True))
    with lowtide.apply(Sum(), plan_of("a buffer, recomputed from")):
        scripted = torch.jit.script(layers)
        assert torch.equal(scripted(ROWS.clone()), layers(ROWS.clone()))
    scripted = torch.jit.script(nn.Sequential(*layers))
    assert torch.equal(scripted(ROWS.clone()), layers(ROWS.clone()))


def test_every_method_that_writes_is_intercepted() -> None:
    wrote = [name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_")]
    assert set(wrote) - {*inplace_methods.writers()} == inplace_methods._NO_WRITERS & {*wrote}


def test_an_optimizer_compiled_while_a_plan_is_in_force_updates_parameters() -> None:
    model, other, plain = Sum(), nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(other.state_dict())
    x = torch.randn(64, 8, WIDTH)
    with lowtide.apply(model, with_smallest_peak(Sum(), [x])):
        model(x).backward()
        for net in (other, plain):
            optimizer = torch.optim.SGD(net.parameters(), 0.5, foreach=False, weight_decay=0.1)
            net(torch.ones(2, 4)).sum().backward()
            update = torch.compile(optimizer.step, backend="eager") if net is other else optimizer.step
            update()
    assert same([*other.parameters()], [*plain.parameters()])


def test_a_writer_that_is_not_seen_beforehand_ends_one_step_in_words_and_the_plan_gives_way() -> None:
    x = torch.randn(64, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    model, plain = Sum(), Sum()
    plan = with_smallest_peak(Sum(), [x])

    def step(model: Sum) -> list[Tensor]:
        loss = model(x)
        with torch.no_grad():
            torch.mul(model.get_buffer("shift"), 0.5, out=model.get_buffer("shift"))
        model.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with lowtide.apply(model, plan, say=lambda what: None):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            step(model)
        assert " from shift, which was written to once between forward and backward" in str(error.value)
        assert "From here on values computed from that tensor are kept" in str(error.value)
        step(plain)
        assert same(step(model), step(plain))
    del model, plain, error
    gc.collect()
    assert not writers._overwritten


def test_nothing_is_watched_where_the_model_of_a_plan_is_gone() -> None:
    own, model = torch.embedding_renorm_, Sum()
    lowtide.apply(model, with_smallest_peak(Sum(), [ROWS]))
    model(ROWS).backward()
    assert writers._undo
    del model
    gc.collect()
    assert torch.embedding_renorm_ is own
    assert not writers._undo


def test_nothing_is_watched_where_no_plan_is_in_force() -> None:
    own, model = torch.embedding_renorm_, Sum()
    with lowtide.apply(model, with_smallest_peak(Sum(), [ROWS])):
        model(ROWS).backward()
        assert torch.embedding_renorm_ is not own
    assert torch.embedding_renorm_ is own
    assert not writers._undo


def test_what_is_watched_does_not_grow_in_a_loop_without_writers() -> None:
    model = Blocks()
    with lowtide.apply(model, plan_of("a parameter of a block that is run again")):
        for _ in range(2 * writers._FEW):
            torch.autograd.grad(model(ROWS[:1]), [*model.parameters()])
        (relied_on,) = writers._alive(writers._watching)
        assert len(relied_on._values) + len(relied_on._unlooked) <= 3 * writers._FEW


def test_a_large_buffer_is_copied_though_a_method_has_written_elsewhere_in_the_first_call() -> None:
    """In its first call a block's buffers are copied, and only then left alone."""

    def gradients(model: Shifted) -> list[Tensor]:
        loss = model(ROWS)
        with torch.no_grad():
            model.get_buffer("blocks.2.mask").mul_(0.5)
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def write_elsewhere(block: nn.Module, _: object) -> None:
        torch.zeros(2).add_(1)

    def make() -> Shifted:
        model = Shifted(own=True)
        for block in model.blocks:
            block.register_forward_pre_hook(write_elsewhere)
        return model

    model = make()
    with lowtide.apply(model, plan_of("a buffer of a block that is run again"), say=lambda what: None):
        assert same(gradients(model), gradients(make()))


def test_a_replacement_that_fails_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*reports: object) -> None:
        raise RuntimeError("no such attribute")

    before = vars(Tensor).get("add_"), torch.relu_, torch.UntypedStorage.fill_
    monkeypatch.setattr(inplace_methods, "intercept_data", fails)
    with pytest.raises(RuntimeError, match="no such attribute"):
        inplace_methods.intercept(lambda memory, writer: True)
    assert (vars(Tensor).get("add_"), torch.relu_, torch.UntypedStorage.fill_) == before
    assert not inplace_methods.torchs_own


def test_memory_that_fsdp2_frees_is_not_written_to() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param import free_storage

    reports = []
    undo = inplace_methods.intercept(lambda memory, writer: reports.append(writer) or True)
    try:
        for free in (free_storage, lambda tensor: tensor.untyped_storage().resize_(0)):
            inplace_methods.watched = True
            free(torch.ones(4))
    finally:
        inplace_methods.watched = False
        undo()
    assert reports == ["UntypedStorage.resize_"]


def test_tensors_that_share_the_memory_of_an_overwritten_one_are_excluded_as_well() -> None:
    tensor = torch.ones(4)
    writers.mark(tensor)
    assert writers.is_overwritten(tensor)
    assert writers.is_overwritten(tensor.detach())
    assert not writers.is_overwritten(torch.ones(4))
    number = id(tensor)
    del tensor
    assert number not in writers._overwritten
