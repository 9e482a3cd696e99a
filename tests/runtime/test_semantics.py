"""Whatever autograd can do with a model, it can do under a plan, with the same bits."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowtide.runtime import recompute as recompute
from lowtide.runtime.recompute import Recompute
from lowtide.runtime.replay import ReplayFrame
from lowtide.runtime.saved_values import native
from parts import WIDTH, Block, Language, LoRA, Swish
from runtime.plans import WAYS, Ops, differences, in_force, outcome, step_of

ways = pytest.mark.parametrize("way", WAYS)


def ids(rows: int = 2) -> torch.Tensor:
    return torch.arange(rows * 10).view(rows, 10)


class Trunk(nn.Module):
    """Two blocks, between two layers of their own."""

    def __init__(self, dropout: float = 0.1, outputs: int = 3):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, outputs)
        self.blocks = nn.Sequential(Block(dropout=dropout), Block(dropout=dropout))

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


def inputs(rows: int = 2) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 8 * WIDTH).view(rows, 8, WIDTH)


def same(model, step, way, blocks=Block):
    """Assert that `step` does the same to `model` under a plan of this kind, twice in a row, as it does without."""
    plain = [outcome(model, step) for _ in range(2)]
    runs = patch.object(ReplayFrame, "_run", autospec=True, side_effect=ReplayFrame._run)
    recomputes = patch.object(Recompute, "make", autospec=True, side_effect=Recompute.make)
    with in_force(model, way, blocks), runs as ran, recomputes as made:
        planned = [outcome(model, step) for _ in range(2)]
    assert [differences(a, b) for a, b in zip(plain, planned, strict=True)] == [[], []]
    if native is None:  # compiled hooks recompute without a call that a patch counts
        assert way == "keep" or ran.call_count + made.call_count > 0  # else it would show nothing


# --- ways to run backward ---------------------------------------------------------------------------------------------


@ways
def test_several_backwards_over_a_retained_graph(way):
    model = Trunk()

    def step():
        loss = model(inputs()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        return loss

    same(model, step, way)


def test_each_backward_over_a_retained_graph_makes_each_value_once():
    model = Trunk(dropout=0.0)
    with in_force(model, "recompute"):
        loss = model(inputs()).sum()
        counts = []
        for _ in range(3):
            with Ops() as ops:
                loss.backward(retain_graph=True)
            counts.append((ops.count["native_layer_norm"], ops.count["gelu"], ops.count["addmm"]))
    assert counts == [(4, 2, 9)] * 3


def test_each_backward_over_a_retained_graph_replays_each_call_once():
    model, runs = Trunk(), Counter()
    for block in model.blocks:
        block.mlp[1].forward = lambda x: (runs.update("r"), F.gelu(x))[1]
    with in_force(model, "replay"):
        loss = model(inputs()).sum()
        for _ in range(3):
            runs.clear()
            loss.backward(retain_graph=True)
            assert runs["r"] == 2


@ways
def test_two_losses_with_a_trunk_in_common(way):
    model = Trunk()

    def step():
        out = model(inputs())
        out[..., 0].sum().backward(retain_graph=True)
        out[..., 1].square().sum().backward()
        return out

    same(model, step, way)


@ways
def test_gradient_penalty(way):
    model = Trunk()

    def step():
        x = inputs().requires_grad_()
        loss = model(x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + (gradient.flatten(1).norm(dim=1) - 1).square().sum()).backward()
        return torch.cat([loss[None], gradient.detach().flatten(), x.grad.flatten()])

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the fused one has no second derivative
        same(model, step, way)


@ways
def test_hessian_vector_product(way):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(dropout=0.0), nn.Tanh())
    parameters = list(model.parameters())

    def step():
        gradients = torch.autograd.grad(model(inputs()).square().sum(), parameters, create_graph=True)
        products = torch.autograd.grad(sum((g * g.detach()).sum() for g in gradients), parameters)
        return torch.cat([product.flatten() for product in products])

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        same(model, step, way)


@ways
def test_gradients_of_some_inputs_only(way):
    model = Trunk()

    def step():
        x = inputs().requires_grad_()
        out = model(x)
        late = torch.autograd.grad(out.sum(), model.blocks[1].out.weight, retain_graph=True)
        out.sum().backward(inputs=[model.last.weight, model.blocks[0].qkv.weight])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(out.sum(), x)
        return late[0]

    same(model, step, way)


@ways
def test_a_part_of_the_graph_that_backward_never_reaches(way):
    model = Trunk()

    def step():
        x = model.first(inputs())
        hidden = model.blocks[0](x)
        dead = model.blocks[1](hidden)
        hidden.sum().backward()
        return dead

    same(model, step, way)


@ways
def test_backward_in_another_thread(way):
    model = Trunk()

    def step():
        loss = model(inputs()).sum()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(loss.backward).result()
        return loss

    same(model, step, way)


@ways
def test_backward_inside_of_autocast_or_with_gradients_off(way):
    model = Trunk()

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(inputs()).float().sum()
            loss.backward(retain_graph=True)
        with torch.no_grad():
            loss.backward()
        return loss

    same(model, step, way)


@ways
def test_looking_at_what_a_node_saved_changes_nothing(way):
    model = Trunk()

    def step():
        out = model(inputs())
        seen = out.grad_fn.next_functions[0][0].next_functions[1][0]
        before = [getattr(seen, name) for name in dir(seen) if name.startswith("_saved_")]
        out.sum().backward()
        return len(before)

    same(model, step, way)


# --- hooks ------------------------------------------------------------------------------------------------------------


@ways
def test_hooks_on_tensors_and_parameters(way):
    model, fired = Trunk(), []

    def watch(module, args, out):
        out.register_hook(lambda grad: fired.append(grad.sum().item()))
        out.retain_grad()
        out.grad_fn.register_hook(lambda *_: fired.append("node"))

    for module in (model.first, *model.blocks, model.blocks[1].mlp[0]):
        module.register_forward_hook(watch)
    model.first.weight.register_hook(lambda grad: grad * 2)
    model.last.weight.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))

    def step():
        fired.clear()
        model(inputs()).square().sum().backward()
        return list(fired)

    plain = step()
    assert len(plain) == 4 * 2 + 1
    same(model, step, way)


# --- steps ------------------------------------------------------------------------------------------------------------


@ways
def test_gradient_accumulation(way):
    model = Trunk()

    def step():
        losses = [model(inputs() * n).square().sum() for n in range(3)]
        losses[1].backward()
        losses[0].backward()
        model(inputs() * 5).sum().backward()
        losses[2].backward()

    same(model, step, way)


@ways
def test_many_steps_of_an_optimizer(way):
    def trained(way):
        torch.manual_seed(0)
        model = Trunk()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with in_force(model, way):
            for n in range(5):
                model(inputs() * n).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.state_dict()

    assert differences(trained("keep"), trained(way)) == []


@ways
def test_frozen_layers(way):
    model = Trunk()
    model.first.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].mlp[0].weight.requires_grad_(False)
    same(model, lambda: model(inputs()).square().sum().backward(), way)


@ways
def test_low_rank_adapters(way):
    model = Trunk().requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.mlp[0] = LoRA(block.qkv), LoRA(block.mlp[0])
    same(model, lambda: model(inputs()).square().sum().backward(), way)


@ways
def test_tied_weights_and_a_block_that_is_used_again(way):
    model = Language(layers=3, shared=True)
    assert model.head.weight is model.embed.weight
    same(model, lambda: F.cross_entropy(model(ids()).flatten(0, 1), ids().flatten()).backward(), way)


@ways
def test_a_model_called_twice_in_one_step(way):
    model = Trunk()

    def step():
        one, two = model(inputs()), model(inputs() * 2)
        (one * two).sum().backward()

    same(model, step, way)


@ways
def test_a_part_that_the_step_calls_by_itself(way):
    model = Trunk()

    def step():
        hidden = model.blocks(model.first(inputs()))
        return torch.autograd.backward(model.last(hidden).sum() + model(inputs()).sum())

    same(model, step, way)


@pytest.mark.parametrize("detached", [True, False])
@ways
def test_a_state_that_is_carried_from_step_to_step(way, detached):
    cell = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), Block(), nn.Tanh())

    def step():
        state, losses = torch.zeros(2, 8, WIDTH), []
        for n in range(4):
            state = cell(torch.cat([state, inputs() * n], -1))
            losses.append(state.square().sum())
            if detached:
                losses.pop().backward()
                state = state.detach()
        if losses:
            sum(losses).backward()
        return state

    same(cell, step, way)


@ways
def test_a_generator_and_a_discriminator_with_a_plan_each(way):
    def trained(way):
        torch.manual_seed(0)
        generator, discriminator = Trunk(outputs=WIDTH), Trunk(outputs=1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (generator, discriminator)]
        with in_force(generator, way), in_force(discriminator, way):
            for _ in range(3):
                fake = generator(torch.randn(2, 8, WIDTH))
                loss = F.softplus(-discriminator(inputs())).mean() + F.softplus(discriminator(fake.detach())).mean()
                loss.backward()
                optimizers[1].step()
                discriminator.requires_grad_(False)
                F.softplus(-discriminator(fake)).mean().backward()
                discriminator.requires_grad_(True)
                optimizers[0].step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
        return generator.state_dict() | {f"d {name}": value for name, value in discriminator.state_dict().items()}

    assert differences(trained("keep"), trained(way)) == []


@ways
def test_a_guard_that_skips_backward(way):
    model = Trunk()

    def step():
        for n in range(4):
            loss = model(inputs() * n).square().sum()
            if n % 2:
                loss.backward()

    same(model, step, way)


@ways
def test_evaluation_between_forward_and_backward(way):
    model = Trunk()

    def step():
        loss = model(inputs()).sum()
        with torch.no_grad():
            model.eval()
            metric = model(inputs()).sum()
            model.train()
        loss.backward()
        return metric

    same(model, step, way)


# --- when something goes wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["keep", "recompute", "replay", "both"])
def test_an_exception_anywhere_leaves_the_engine_as_new(way):
    model, failing = Trunk(), Counter()
    layer_norm, backward = F.layer_norm, Swish.backward

    class Fails(nn.Module):
        def forward(self, x):
            if failing["forward"]:
                raise ValueError("in forward")
            return Failing.apply(x)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            if failing["backward"]:
                raise ValueError("in backward")
            return grad

    model.blocks[0].mlp.insert(1, Fails())
    step = lambda: model(inputs()).square().sum().backward()  # noqa: E731
    plain = outcome(model, step)
    with in_force(model, way):
        for where in ("forward", "backward"):
            failing[where] = 1
            with pytest.raises(ValueError, match=f"in {where}"):
                step()
            failing.clear()
            assert differences(plain, outcome(model, step)) == []
    assert layer_norm is F.layer_norm
    assert backward is Swish.backward


@pytest.mark.parametrize("way", ["replay", "both"] if native else ["recompute", "replay", "both"])
def test_an_exception_in_a_recompute_or_in_a_replay(way, monkeypatch):
    model = Trunk()
    step = lambda: model(inputs()).square().sum().backward()  # noqa: E731
    plain = outcome(model, step)

    class Broken(Exception):
        pass

    def fails(*args, **kwargs):
        raise Broken

    with in_force(model, way) as engine:
        loss = model(inputs()).square().sum()
        state = torch.get_rng_state()
        with monkeypatch.context() as patch:
            patch.setattr(recompute, "any_autocast", fails)
            if way == "replay" or native:
                patch.setattr(model.blocks[1], "forward", fails)
            with pytest.raises(Broken):
                loss.backward()
        assert torch.equal(state, torch.get_rng_state())
        assert engine.here.handler is None
        assert model.training
        assert differences(plain, outcome(model, step)) == []


@ways
def test_a_weight_changed_in_place_before_backward_raises_as_without_a_plan(way):
    model = Trunk()

    def step():
        loss = model(inputs()).square().sum()
        with torch.no_grad():
            model.blocks[0].mlp[0].weight.add_(1)
        loss.backward()

    words = (
        r"one of the variables needed for gradient computation has been modified by an inplace operation.*is at version"
    )
    with pytest.raises(RuntimeError, match=words):
        step()
    with in_force(model, way), pytest.raises(RuntimeError, match=words):
        step()


@pytest.mark.parametrize("way", ["keep", "recompute"])
def test_an_activation_changed_in_place_is_never_used_as_it_is_now(way):
    """Kept: it raises, as without a plan. Recomputed: what was saved comes back."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    seen = []
    model[1].register_forward_hook(lambda m, args, out: seen.append(out) and None)
    plain = outcome(model, lambda: model(torch.ones(2, 4)).sum().backward())

    def step():
        loss = model(torch.ones(2, 4)).sum()
        with torch.no_grad():
            seen[-1].mul_(0)
        loss.backward()

    with in_force(model, way):
        if way == "keep":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                step()
        else:
            assert differences(plain, outcome(model, step)) == []


# --- kinds of tensors -------------------------------------------------------------------------------------------------


@ways
def test_complex_tensors_and_conjugate_views(way):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.view_as_real(torch.randn(5, dtype=torch.cfloat)))

        def forward(self, x):
            spectrum = torch.fft.rfft(x) * torch.view_as_complex(self.weight)
            return x + torch.fft.irfft(spectrum * spectrum.conj() * spectrum.conj().imag, n=8)

    model = nn.Sequential(nn.Linear(8, 8), Spectral(), Spectral())
    x = torch.randn(3, 8)
    same(model, lambda: model(x).square().sum().backward(), way, Spectral)


@ways
def test_sparse_gradients_and_sparse_tensors(way):
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 4, sparse=True)
            self.mix = torch.eye(20).to_sparse()

        def forward(self, x):
            return torch.sparse.mm(self.mix, self.table(x).tanh()) * 2

    model = nn.Sequential(Mixing(), nn.Linear(4, 4))

    def step():
        model(torch.arange(20)).square().sum().backward()
        gradient, model[0].table.weight.grad = model[0].table.weight.grad, None
        return gradient.coalesce().values()

    same(model, step, way, Mixing)


class Tagged(torch.Tensor):
    """A subclass with a will of its own."""

    made = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.made += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@ways
def test_subclasses_of_tensor_are_kept_whole(way):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), nn.LayerNorm(WIDTH))
    same(model, lambda: model(inputs().as_subclass(Tagged)).square().sum().as_subclass(torch.Tensor).backward(), way)


@ways
def test_a_function_that_reads_its_saved_tensors_twice(way):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = x * x.tanh()
            ctx.save_for_backward(x, out)
            return out

        @staticmethod
        def backward(ctx, grad):
            one, _ = ctx.saved_tensors
            two, out = ctx.saved_tensors
            assert torch.equal(one, two)
            return grad * out + two

    class Applies(nn.Module):
        def forward(self, x):
            return Twice.apply(x.exp()) * x

    model = nn.Sequential(nn.Linear(4, 4), Applies(), nn.GELU())
    same(model, lambda: model(torch.ones(2, 4)).sum().backward(), way, Applies)


@ways
def test_vmap_inside_of_the_model(way):
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return torch.func.vmap(lambda row: (self.weight @ row).tanh() * row.exp())(x)

    model = nn.Sequential(nn.Linear(4, 4), Mapped(), nn.GELU())
    same(model, lambda: model(torch.ones(2, 4)).square().sum().backward(), way, Mapped)


class OfItsOwnGradient(nn.Module):
    """A block that differentiates something inside its forward, with transforms of torch.func."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.energy = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 1)

    def forward(self, x):
        score = torch.func.grad(lambda y: (y.sin() * y).sum())(x.detach())
        force = torch.func.vmap(torch.func.grad(lambda row: self.energy(row).tanh().sum()))(x.detach())
        flow = torch.func.jacrev(lambda y: self.energy(y).tanh().sum())(x)
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1) + 0.1 * (score + force.detach() + flow)


@ways
def test_transforms_inside_of_a_model_are_as_without_a_plan(way):
    torch.manual_seed(0)
    model, x = nn.Sequential(*[OfItsOwnGradient() for _ in range(3)]), torch.randn(16, 64)
    disable = torch.autograd.graph.disable_saved_tensors_hooks
    plain = outcome(model, lambda: step_of(model)(x))
    with in_force(model, way, OfItsOwnGradient):
        planned = outcome(model, lambda: step_of(model)(x))
        threads = [Thread(target=lambda: model(x).sum()) for _ in range(2 * (way == "keep"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert differences(plain, planned) == []
    assert torch.autograd.graph.disable_saved_tensors_hooks is disable
    with pytest.raises(RuntimeError, match="saved tensor hooks"), torch.autograd.graph.save_on_cpu():
        model(x)  # hooks of others are refused as ever
