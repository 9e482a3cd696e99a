"""Recomputes from tensors that are written to before backward, in rehearsed steps or only in later ones."""

import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.planner import smallest_peak
from lowtide.runtime import parameter_methods
from lowtide.runtime import tensor_writers as writers

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
    return lowtide.plan(profile, smallest_peak(profile)[1].peak_bytes)


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


def set_rows(bias: Tensor) -> None:
    bias[3:9] = 0.25


def add_to(bias: Tensor) -> None:
    bias += 0.25


WRITERS: dict[str, Callable[[Tensor], object]] = {
    "clamp_": lambda bias: bias.clamp_(-0.01, 0.01),
    "copy_": lambda bias: bias.copy_(torch.ones_like(bias)),
    "fill_": lambda bias: nn.init.constant_(bias, 0.3),
    "__setitem__": set_rows,
    "__iadd__": add_to,
}


class Blocks(nn.Module):
    """Two equal blocks, which a plan runs again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", [Sum, Blocks], ids=["recomputed", "run again"])
def test_a_later_writer_to_a_parameter_finds_it_copied_and_the_loop_goes_on(kind: type[nn.Module], writer: str) -> None:
    x = torch.randn(64, 8, WIDTH, generator=torch.Generator().manual_seed(1))

    def gradients(model: nn.Module) -> list[Tensor]:
        found: list[Tensor] = []
        bias = next(p for name, p in model.named_parameters() if name.endswith("bias"))
        for n in range(3):
            loss = model(x)
            if n:
                with torch.no_grad():
                    WRITERS[writer](bias)
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
        return found

    plan, model, said = with_smallest_peak(kind(), [x]), kind(), list[str]()
    with lowtide.apply(model, plan, say=said.append):
        assert same(gradients(model), gradients(kind()))
    assert len(said) == 1
    assert f"Tensor.{writer} writes to " in said[0]


def test_methods_of_parameters_are_torchs_own_without_a_plan() -> None:
    before = dict(vars(nn.Parameter))
    model = Sum()
    with lowtide.apply(model, with_smallest_peak(Sum(), [torch.randn(64, 8, WIDTH)])):
        assert nn.Parameter.clamp_ is not Tensor.clamp_
        assert Tensor.clamp_ is torch._C.TensorBase.clamp_
    assert dict(vars(nn.Parameter)) == before


def test_every_method_that_writes_is_intercepted() -> None:
    wrote = [name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_")]
    assert set(wrote) - {*parameter_methods.writers()} == parameter_methods._NO_WRITERS & {*wrote}


def test_an_optimizer_compiled_while_a_plan_is_in_force_updates_parameters() -> None:
    model, other, plain = Sum(), nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(other.state_dict())
    with lowtide.apply(model, with_smallest_peak(Sum(), [torch.randn(64, 8, WIDTH)])):
        for net in (other, plain):
            optimizer = torch.optim.SGD(net.parameters(), 0.5, foreach=False, weight_decay=0.1)
            net(torch.ones(2, 4)).sum().backward()
            update = torch.compile(optimizer.step, backend="eager") if net is other else optimizer.step
            update()
    assert same([*other.parameters()], [*plain.parameters()])


def test_another_writer_ends_one_step_in_words_and_the_plan_gives_way() -> None:
    x = torch.randn(64, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    model, plain = Sum(), Sum()
    plan = with_smallest_peak(Sum(), [x])

    def step(model: Sum) -> list[Tensor]:
        loss = model(x)
        with torch.no_grad():
            model.get_buffer("shift").mul_(0.5)
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
    lowtide.apply(model, with_smallest_peak(Sum(), [torch.randn(64, 8, WIDTH)]))
    assert writers._undo
    del model
    gc.collect()
    assert torch.embedding_renorm_ is own
    assert not writers._undo


def test_nothing_is_watched_where_no_plan_is_in_force() -> None:
    own, model = torch.embedding_renorm_, Sum()
    with lowtide.apply(model, with_smallest_peak(Sum(), [torch.randn(64, 8, WIDTH)])):
        assert torch.embedding_renorm_ is not own
    assert torch.embedding_renorm_ is own
    assert not writers._undo
