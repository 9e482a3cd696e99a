"""The trained module, and the first call and last update of each step, in loops of different kinds."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lowtide.errors import RehearsalError
from lowtide.runtime.composite_model import CompositeModel
from lowtide.script.alternating_models import PATIENCE
from lowtide.script.manual_updates import MOST
from lowtide.script.rehearse_steps import StepRehearser
from lowtide.script.run_listened import run_watched
from lowtide.script.runner import Script
from lowtide.script.step_detector import StepDetector
from lowtide.script.step_listener import StepListener, StopScript

Log = list[str]


class Notes(StepListener):
    """A listener that records its callbacks."""

    awaits = "was written down"

    def __init__(self) -> None:
        self.done = False
        self.log: Log = []
        self.models: list[nn.Module] = []

    def on_step_begin(self, model: nn.Module, batch: Any, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        self.models.append(model)
        self.log.append(f"begins {len(optimizers)}")

    def on_step_end(self, model: nn.Module) -> None:
        assert model is self.models[-1]
        self.log.append("ends")

    def on_model_replaced(self, model: nn.Module) -> None:
        self.done = False
        self.log.append("gives up")

    def on_unplanned_model(self) -> None:
        self.log.append("passes over")

    def on_stop(self) -> None:
        self.log.append("leaves")


X = torch.randn(4, 8)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


AS_A_SCRIPT: dict[str, Any] = {"__name__": Script.__module__}
exec("def call(loop): loop()", AS_A_SCRIPT)  # what is looked for in variables of callers is not looked for further up


def watched(loop: Callable[[], object], listener: Notes | None = None) -> Notes:
    listener = listener or Notes()
    before = nn.Module.__call__
    with StepDetector(listener):
        AS_A_SCRIPT["call"](loop)
    assert nn.Module.__call__ is before
    assert listener.log.pop() == "leaves"
    return listener


def test_an_ordinary_loop() -> None:
    model = net()
    optimizer = sgd(model)

    def loop() -> None:
        for _ in range(2):
            model(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(X)
            model.train()

    listener = watched(loop)
    assert listener.log == ["begins 0", "ends", "begins 1", "ends"]
    assert listener.models == [model, model]


def test_gradients_of_several_calls_belong_to_one_step() -> None:
    model = net()
    optimizer = sgd(model)

    def loop() -> None:
        for i in range(6):
            model(X).sum().backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    assert watched(loop).log == ["begins 0", "ends", "begins 1", "ends"]


def test_a_closure_runs_the_step_inside_of_the_update() -> None:
    model = net()
    optimizer = sgd(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).square().sum()
        loss.backward()
        return loss

    def loop() -> None:
        for _ in range(2):
            optimizer.step(closure)

    assert watched(loop).log == ["begins 0", "ends", "begins 1", "ends"]


def test_a_step_with_updates_inside_of_backward_is_over_when_a_module_is_called_next() -> None:
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[arg-type]

    listener = Notes()

    def loop() -> None:
        for _ in range(2):
            model(X).sum().backward()
            assert listener.log[-1].startswith("begins")
        model.eval()
        model(X)
        assert listener.log[-1] == "ends"

    assert watched(loop, listener).log == ["begins 0", "ends", "begins 4", "ends"]


def test_a_step_is_over_when_every_optimizer_of_the_model_has_stepped() -> None:
    model = net()
    first, second = sgd(model[0]), sgd(model[2])

    def loop() -> None:
        for _ in range(2):
            model(X).sum().backward()
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()

    assert watched(loop).log == ["begins 0", "ends", "begins 2", "ends"]


def test_a_step_does_not_wait_for_an_optimizer_that_was_replaced() -> None:
    model = net()
    gone = []

    def loop() -> None:
        optimizer = sgd(model)
        for i in range(6):
            if i in (2, 4):
                gone.append(weakref.ref(optimizer))
                optimizer = sgd(model)
            model(X).sum().backward()
            optimizer.step()
            assert not any(reference() for reference in gone)

    assert watched(loop).log == ["begins 0", "ends", "begins 1", "ends", *["begins 0", "ends", "begins 1", "ends"] * 2]


def test_a_model_with_an_optimizer_for_each_step_is_more_than_a_guess() -> None:
    model, larger = net(), nn.Linear(64, 64)

    def loop() -> None:
        for _ in range(3):
            model(X).sum().backward()
            sgd(model).step()
            larger(torch.ones(64))

    listener = watched(loop)
    assert listener.log == ["begins 0", "ends"] * 3
    assert listener.models == [model] * 3


def test_gradients_that_no_optimizer_uses_do_not_keep_a_step_open() -> None:
    model = net()
    optimizer = sgd(model[0])

    def loop() -> None:
        for _ in range(3):
            model(X).sum().backward()
            optimizer.step()

    assert watched(loop).log == ["begins 0", "ends", "begins 1", "ends", "begins 1"]


def test_a_module_that_is_only_asked_is_not_the_model() -> None:
    teacher, student = net(), net()
    optimizer = sgd(student)

    def loop() -> None:
        for _ in range(2):
            target = teacher(X).detach()
            (student(X) - target).square().sum().backward()
            optimizer.step()

    listener = watched(loop)
    assert listener.log == ["begins 0", "gives up", "begins 1", "ends"]
    assert listener.models[-1] is student


def test_a_larger_module_takes_the_place_of_a_small_one_that_was_tried_first() -> None:
    small, model = nn.Linear(8, 8), net()
    optimizer = sgd(model)

    def loop() -> None:
        small(X).sum().backward()
        for _ in range(2):
            model(X).sum().backward()
            optimizer.step()

    listener = watched(loop)
    assert listener.log == ["begins 0", "gives up", "begins 0", "ends", "begins 1", "ends"]
    assert listener.models == [small, model, model]


def test_modules_that_are_trained_together_are_parts_of_one() -> None:
    encoder, decoder, probe = net(), net(), nn.Linear(8, 8)
    optimizer = sgd(encoder, decoder, probe)

    def loop() -> None:
        for _ in range(2):
            code = encoder(X)
            (decoder(code) + probe(code)).sum().backward()
            optimizer.step()

    listener = watched(loop)
    assert listener.log == ["begins 0", "gives up", "begins 1", "ends"]
    parts = listener.models[-1]
    assert isinstance(parts, CompositeModel)
    assert list(parts.children()) == [encoder, decoder, probe]
    assert [name for name, _ in parts.named_children()] == ["Sequential", "Sequential2", "Linear"]


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor.requires_grad_], ids=["parameter", "tensor"])
def test_parameters_of_no_module_are_parts_of_one_with_the_frozen_model_that_they_go_through(
    kind: Callable[[Tensor], Tensor],
) -> None:
    model, teacher = net().requires_grad_(False), net().requires_grad_(False)
    prompt = kind(torch.randn(4, 8))
    optimizer = torch.optim.SGD([prompt], lr=0.1)

    def loop() -> None:
        for _ in range(3):
            with torch.no_grad():
                model(X)
            teacher(X)
            (model(X + prompt) - teacher(X)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    listener = watched(loop)
    assert listener.log == ["begins 1", "ends", "begins 1", "ends"]
    (parts,) = {*listener.models}
    assert isinstance(parts, CompositeModel)
    assert [*parts.children()] == [model]
    assert [name for name, p in parts.named_parameters() if p is prompt] == ["alone0"]


def test_a_model_behind_a_frozen_one_is_the_model() -> None:
    frozen, model = net().requires_grad_(False), net()
    optimizer = sgd(model)
    image = nn.Parameter(torch.randn(4, 8))

    def loop() -> None:
        for _ in range(2):
            frozen(image)
            model(frozen(X)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    listener = watched(loop)
    assert listener.log == ["begins 0", "ends", "begins 1", "ends"]
    assert {*listener.models} == {model}


def test_a_model_in_evaluation_mode_is_not_taken_for_parameters_of_no_module() -> None:
    model = nn.Sequential(nn.Linear(8, 8), net().requires_grad_(False)).eval()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def loop() -> None:
        for _ in range(3):
            model(X).sum().backward()
            optimizer.step()

    assert watched(loop).log == []


def test_parts_of_a_model_that_is_called_as_a_whole_are_not_apart_from_it() -> None:
    model = net()
    optimizer = sgd(model)

    def loop() -> None:
        for _ in range(2):
            (model[0](X).sum() + model(X).sum()).backward()
            optimizer.step()

    listener = watched(loop)
    assert listener.log == ["begins 0", "gives up", "begins 0", "ends", "begins 1", "ends"]
    assert listener.models[-1] is model


@pytest.mark.parametrize("n_critic", [1, 2])
@pytest.mark.parametrize("is_late", [False, True], ids=["first of all", "last"])
@pytest.mark.parametrize("makes", ["graph", "no graph", "once"])
def test_two_models_that_take_turns_are_parts_of_one(n_critic: int, is_late: bool, makes: str) -> None:
    maker, critic = net(), net()
    of_maker, of_critic = sgd(maker), sgd(critic)
    log: Log = []
    listener = Notes()
    listener.log = log

    def loop() -> None:
        for step in range(8 * n_critic):
            of_critic.zero_grad()
            with torch.set_grad_enabled(makes != "no graph"):
                made = maker(X)
            (critic(X) - critic(made.detach())).sum().backward()
            log.append("critic")
            of_critic.step()
            if step % n_critic == (n_critic - 1) * is_late:
                of_maker.zero_grad()
                critic(made if makes == "once" else maker(X)).sum().backward()
                log.append("maker")
                of_maker.step()

    watched(loop, listener)
    both = listener.models[-1]
    assert isinstance(both, CompositeModel)
    assert set(both.children()) == {maker, critic}
    assert [model is both for model in listener.models] == sorted(model is both for model in listener.models)
    steps = " ".join(log).rpartition("gives up")[2].split(" begins 2 ")[1:]
    whole = [*["critic"] * n_critic, "maker", "ends"]
    assert len(steps) >= 5
    assert all(sorted(step.split()) == sorted(whole) for step in steps[1:-1])
    assert all(step.split()[-1] == "ends" for step in steps[:-1])
    if makes == "once":  # the maker's backward goes through the call before the critic's update
        assert {step.split()[0] for step in steps[:-1]} == {"critic"}


def test_two_models_that_are_trained_one_after_the_other_in_each_step_are_parts_of_one() -> None:
    models = net(), net()
    optimizers = [sgd(model) for model in models]

    def loop() -> None:
        for _ in range(5):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(X).sum().backward()
                optimizer.step()

    listener = watched(loop)
    assert listener.log[-7:] == [*["begins 2", "ends"] * 3, "begins 2"]
    assert list(listener.models[-1].children()) == list(models)


@pytest.mark.parametrize("n_first", [1, 2])
def test_a_model_that_takes_the_place_of_another_is_the_one_from_its_third_step_on(n_first: int) -> None:
    first, model = net(), net()

    def train(model: nn.Module, n_steps: int) -> None:
        optimizer = sgd(model)
        for _ in range(n_steps):
            model(X).sum().backward()
            optimizer.step()

    def loop() -> None:
        train(first, n_first)
        train(model, 4)

    listener = watched(loop)
    assert listener.log == [
        *["begins 0", "ends", "begins 1", "ends"][: 2 * n_first],
        "gives up",
        *["begins 1", "ends"] * 2,
    ]
    assert listener.models == [*[first] * n_first, model, model]


def test_modules_that_take_the_place_of_a_model_are_parts_of_one() -> None:
    first, encoder, decoder = net(), net(), net()
    optimizers = sgd(first), sgd(encoder), sgd(decoder)

    def loop() -> None:
        first(X).sum().backward()
        optimizers[0].step()
        for _ in range(4):
            decoder(encoder(X)).sum().backward()
            optimizers[1].step()
            optimizers[2].step()

    listener = watched(loop)
    assert listener.log == ["begins 0", "ends", "gives up", "begins 2", "ends", "begins 2", "ends"]
    assert list(listener.models[-1].children()) == [encoder, decoder]


def test_models_that_are_trained_for_two_steps_each_in_turn_are_not_taken_in_turn() -> None:
    models = net(), net()
    optimizers = [sgd(model) for model in models]

    def loop() -> None:
        for step in range(16):
            turn = step // 2 % 2
            models[turn](X).sum().backward()
            optimizers[turn].step()
            optimizers[turn].zero_grad()

    listener = watched(loop)
    assert listener.log.count("gives up") <= 1
    assert listener.log.count("ends") >= 6


@pytest.mark.parametrize("how", ["eval", "no_grad", "frozen", "nothing to train"])
def test_calls_that_no_training_follows_begin_nothing(how: str) -> None:
    model = nn.Sequential(nn.GELU()) if how == "nothing to train" else net()
    model.requires_grad_(how != "frozen")
    model.train(how != "eval")
    with torch.set_grad_enabled(how != "no_grad"):
        assert watched(lambda: model(X)).log == []


class Once(Notes):
    def on_step_end(self, model: nn.Module) -> None:
        super().on_step_end(model)
        self.models.clear()
        self.done = True


def test_a_model_trained_after_the_listener_is_done_is_reported_once_and_not_held() -> None:
    def loop() -> None:
        gone = []
        for _ in range(3):
            model = net()
            optimizer = sgd(model)
            for _ in range(3):
                model(X).sum().backward()
                optimizer.step()
            gone.append((weakref.ref(model), weakref.ref(optimizer)))
        del model, optimizer
        gc.collect()
        assert not [reference for pair in gone for reference in pair if reference() is not None]

    assert watched(loop, Once()).log == ["begins 0", "ends", "passes over"]


def test_several_optimizers_of_the_model_are_its_own() -> None:
    one, other = net(), net()
    optimizers = sgd(one), sgd(other)

    def loop() -> None:
        for _ in range(4):
            other(one(X)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()

    assert "passes over" not in watched(loop, Once()).log


def test_updates_that_a_rehearsal_tries_when_a_step_begins_are_none_of_the_scripts() -> None:
    model = net()
    optimizer, other = sgd(model), sgd(model)

    class Tries(Notes):
        def on_step_begin(self, model: nn.Module, batch: Any, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
            super().on_step_begin(model, batch, optimizers)
            other.step()

    def loop() -> None:
        for _ in range(3):
            model(X).sum().backward()
            optimizer.step()

    assert watched(loop, Tries()).log == ["begins 0", "ends", "begins 1", "ends", "begins 1", "ends"]


def test_nothing_is_watched_once_the_listener_is_done() -> None:
    model = net()
    optimizer = sgd(model)
    calls: list[bool] = []
    before = nn.Module.__call__

    def loop() -> None:
        for _ in range(3):
            calls.append(nn.Module.__call__ is before)
            model(X).sum().backward()
            optimizer.step()

    assert watched(loop, Once()).log == ["begins 0", "ends"]
    assert calls == [False, False, True]


def test_a_critic_may_be_ahead_of_its_generator_when_the_listener_is_done() -> None:
    maker, critic = net(), net()
    of_maker, of_critic = sgd(maker), sgd(critic)

    def loop() -> None:
        for step in range(16):
            critic(X).sum().backward()
            of_critic.step()
            of_critic.zero_grad()
            if step % 5 == 4:
                critic(maker(X)).sum().backward()
                of_maker.step()
                of_maker.zero_grad()

    listener = watched(loop, Once())
    assert listener.log == ["begins 0", "ends", "gives up", "begins 2", "ends"]


def test_models_that_may_take_turns_are_waited_for() -> None:
    model, other = net(), net()
    optimizer, spare = sgd(model), sgd(other)
    calls: list[bool] = []
    before = nn.Module.__call__

    def loop() -> None:
        for _ in range(2 * PATIENCE):
            calls.append(nn.Module.__call__ is before)
            model(X).sum().backward()
            optimizer.step()
        other(X).sum().backward()
        spare.step()

    assert watched(loop, Once()).log == ["begins 0", "ends", "passes over"]
    assert calls == [False] * (PATIENCE + 2) + [True] * (PATIENCE - 2)


def test_a_script_that_catches_every_exception_does_not_go_on() -> None:
    model = net()
    optimizer = sgd(model)

    class Failing(Notes):
        def on_step_end(self, model: nn.Module) -> None:
            raise RehearsalError("not this one")

    def steps() -> Iterator[str]:
        for _ in range(3):
            try:
                model(X).sum().backward()
                optimizer.step()
                yield "went through"
            except RuntimeError as error:
                yield str(error)

    found: list[str] = []
    with pytest.raises(StopScript):
        watched(lambda: found.extend(steps()), Failing())
    assert found == []


def test_the_error_is_the_first_one_also_where_everything_is_caught(tmp_path: Path) -> None:
    from torch._dynamo.mutation_guard import install_generation_tagging_init

    install_generation_tagging_init()  # the first compile puts it around `Module.__init__` for good
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "model = torch.compile(nn.Linear(4, 4), backend='eager')\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n    try:\n        model(torch.ones(2, 4)).sum().backward()\n        optimizer.step()\n"
        "    except:\n        pass\n",
        encoding="utf-8",
    )
    with pytest.raises(RehearsalError, match="inductor compiled nothing"):
        run_watched(Script(target=str(script)), StepRehearser())


def test_parameters_that_are_exchanged_for_a_call_are_not_updated_by_hand() -> None:
    model = net()
    optimizer = sgd(model)

    def loop() -> None:
        for _ in range(2):
            fast = dict(model.named_parameters())
            for _ in range(2 * MOST):
                loss = functional_call(model, fast, (X,)).square().mean()
                slopes = torch.autograd.grad(loss, [*fast.values()], create_graph=True)
                fast = {name: p - 0.01 * slope for (name, p), slope in zip(fast.items(), slopes, strict=True)}
            functional_call(model, fast, (X,)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert watched(loop).log == ["begins 0", "ends", "begins 1", "ends"]


class Normalized(nn.Module):
    """A layer whose first call sets its parameter from the batch, as in normalizing flows."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.is_set = nn.Parameter(torch.zeros(8)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.shift.data, self.is_set = -x.detach().mean(0), True
        return x + self.shift


def test_parameters_that_a_forward_sets_are_not_updated_by_hand() -> None:
    layers = nn.ModuleList(Normalized() for _ in range(2 * MOST))
    optimizer = sgd(layers)

    def loop() -> None:
        for _ in range(2):
            x = X
            for layer in layers:
                x = layer(x)
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert watched(loop).log[-2:] == ["begins 1", "ends"]
