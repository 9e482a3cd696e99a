"""`lowtide estimate --device`: an unchanged script, for a GPU that is not there."""

import importlib
import json
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from lowtide import cli
from lowtide.estimator.cuda import absent_gpu_run
from lowtide.memory.memory_timeline import Timeline
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.script import estimate_steps as estimating
from lowtide.units import format_bytes

TRAIN = """
import argparse, torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=256)
given = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    assert torch.cuda.get_device_capability() == (8, 6), torch.cuda.get_device_name()
model = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Dropout(0.1), nn.Linear(4096, 64)).to(device)
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
first = model[0].weight.detach().clone()
try:
    for step in range(5):
        x = torch.randn(given.rows, 64).to(device, non_blocking=True)
        y = torch.randint(0, 64, (given.rows,)).cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        print(f"loss {loss.item():.3f}")
finally:
    # as a script that saves its model at the end: everything is real again, and as it was
    torch.save(model.state_dict(), __file__ + ".pt")
    print("same weights", torch.equal(model[0].weight, first), type(model[0].weight).__name__)
print("the end")
"""


@pytest.fixture
def estimate(
    tmp_path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    # a torch whose sources were not read is one more thing that is assumed; the tests ask for the others
    monkeypatch.setattr(absent_gpu_run, "READ_IN", torch.__version__.rpartition(".")[0])

    def command(*options: str, text: str = TRAIN, args: tuple[str, ...] = ()) -> tuple[int, str, str]:
        path = tmp_path / "train.py"
        path.write_text(text, encoding="utf-8")
        capfd.readouterr()
        code = cli.main(("estimate", *options, str(path), *args))
        torch.set_default_device(None)
        return (code, *capfd.readouterr())

    return command


def test_a_script_that_works_long_before_it_trains_is_told_that_this_is_computed(estimate, monkeypatch) -> None:
    monkeypatch.setattr(importlib.import_module("lowtide.cli.estimate"), "SLOW_S", 0.1)
    evaluation = "import time\nwith torch.no_grad():\n    time.sleep(0.3)\n    model(torch.randn(4, 64).to(device))\n"
    text = TRAIN.replace("try:\n", f"{evaluation}try:\n", 1)
    code, _, err = estimate("--device", "RTX 3060", text=text)
    assert code == 0
    slow, begins = err.index("has not trained yet"), err.index("from here on nothing is computed")
    assert slow < begins
    assert err.count("has not trained yet") == 1


def test_a_script_for_cuda_runs_two_steps_and_ends_with_everything_as_it_was(estimate, tmp_path) -> None:
    importlib.import_module("torch._dynamo")  # puts another manual_seed in place

    before = dict(vars(torch))
    code, out, err = estimate("--device", "RTX 3060")
    assert [name for name, value in before.items() if vars(torch).get(name) is not value] == []
    assert code == 0
    assert "on RTX 3060, with 11.7 GiB: it fits" in out
    assert "smallest GPU on which it is sure to fit: RTX 3070\n  of those with compute capability from 8.0 on;" in out
    assert "compiled code (torch.compile) is estimated uncompiled" in out
    assert re.search("nothing is computed.*\nloss 1.000", err)  # said before the first number that is not true
    assert "same weights True Parameter" in err
    assert "the end" not in err
    assert "torch.save is left out" not in out  # it came after all was known
    assert [*tmp_path.iterdir()] == [tmp_path / "train.py"]


def test_a_script_that_reads_back_what_it_saved_is_refused_in_words(estimate, tmp_path) -> None:
    text = """
import torch

model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    model(torch.randn(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), "of_this_test.pt")
    model.load_state_dict(torch.load("of_this_test.pt"))
"""
    code, _, err = estimate("--device", "RTX 3060", text=text)
    assert code == 2
    assert "FileNotFoundError" in err
    assert "An estimate saves nothing (torch.save), so a file that the script reads back is missing." in err


def test_a_step_that_does_not_fit_has_exit_code_1_and_names_a_gpu(estimate) -> None:
    code, out, _ = estimate("--device", "RTX 3060", args=("--rows", "400000"))
    assert code == 1
    assert "it does not fit" in out
    assert "smallest GPU on which it is sure to fit: RTX 5080" in out


def test_the_step_is_written_as_a_snapshot(estimate, tmp_path) -> None:
    file = tmp_path / "step.pickle"
    code, out, _ = estimate("--device", "RTX 3060", "--snapshot", str(file))
    assert code == 0
    assert (
        f"{format_bytes(Timeline.from_snapshot(file).peak_bytes)}  requested at the peak of both steps, in the " in out
    )
    code, _, err = estimate("--device", "T4", "--batch", "1", "--batch", "2", "--snapshot", "x")
    assert code == 2
    assert "--snapshot" in err


def test_a_sweep_gives_what_the_script_does_at_those_sizes(estimate) -> None:
    code, out, _ = estimate("--device", "RTX 3060", "--json", "-", "--batch", "64", "--batch", "1024")
    assert code == 0
    small, large = json.loads(out)
    assert (small["batch"], large["batch"]) == (64, 1024)
    assert small["peak_requested_bytes"] < large["peak_requested_bytes"]
    for found in (small, large):
        _, alone, _ = estimate("--device", "RTX 3060", "--json", "-", args=("--rows", str(found["batch"])))
        (by_itself,) = json.loads(alone)
        assert found["peak_requested_bytes"] == pytest.approx(by_itself["peak_requested_bytes"], rel=0.02)


ON_GPU = """
import sys, torch
from torch import nn

rows = int(sys.argv[1])
model = nn.Sequential(nn.Linear(1024, 64), nn.Linear(64, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
images, labels = torch.randn(4 * rows, 1024), torch.randint(0, 10, (4 * rows,))
for i in range(4):
    chosen = slice(i * rows, (i + 1) * rows)
    x, y = images[chosen].cuda(), labels[chosen].cuda()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del x, y
"""


def test_a_sweep_to_far_smaller_sizes_has_nothing_of_the_large_one(estimate) -> None:
    found = {}
    for rows, options in ((8192, ("--batch", "512")), (64, ("--batch", "512")), (512, ())):
        _, out, _ = estimate("--device", "T4", "--json", "-", *options, text=ON_GPU, args=(str(rows),))
        (found[rows],) = json.loads(out)
    for name in ("peak_requested_bytes", "peak_reserved_bytes"):
        assert found[8192][name] == found[64][name] == found[512][name]


def test_without_a_device_the_peak_is_that_of_the_step_on_this_machine(estimate) -> None:
    on_cpu = TRAIN.replace('if device == "cuda":', "if False:").replace('"cuda"', '"cpu"').replace(".cuda()", "")
    code, out, err = estimate(text=on_cpu)
    assert code == 0
    assert re.match(r"peak .*, in phase ", out)
    assert "CUDA" not in out
    assert re.search("nothing is computed.*\nloss 1.000", err)
    assert "same weights True Parameter" in err
    assert "the end" not in err


PLAIN = """
import contextlib, lowtide, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randn(4 * 64, 256)
for i in range(4):
    x = data[i * 64 : (i + 1) * 64].clone()
    with lowtide.measure(model, optimizer) if MEASURED else contextlib.nullcontext() as memory:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_peak_on_this_machine_is_the_measured_one(estimate) -> None:
    code, out, _ = estimate("--json", "-", text=f"MEASURED = False{PLAIN}")
    (found,) = json.loads(out)
    assert code == 0
    measuring: dict[str, object] = {}
    exec(f"MEASURED = True{PLAIN}", measuring)
    n_weights = sum(p.numel() for p in measuring["model"].parameters())
    at_entry = 4 * 3 * n_weights + 4 * 64 * 256 + 4 * 4  # weights, two moments, the batch, step counters
    assert found["peak_bytes"] == pytest.approx(measuring["memory"].peak_bytes + at_entry, abs=64)
    assert found["parameters_bytes"] == found["at_peak_bytes"]["parameters"] == 4 * n_weights
    assert sum(found["at_peak_bytes"].values()) == found["peak_bytes"]
    assert [phase["name"] for phase in found["phases"]] == ["forward", "backward", "optimizer"]
    assert max(phase["peak_bytes"] for phase in found["phases"]) == found["peak_bytes"]


@pytest.mark.parametrize(("budget", "expected", "words"), [("1GiB", 0, "is within"), ("1MiB", 1, "is above")])
def test_the_peak_on_this_machine_is_compared_with_a_budget(estimate, budget, expected, words) -> None:
    code, out, _ = estimate("--budget", budget, text=f"MEASURED = False{PLAIN}")
    assert code == expected
    assert re.search(rf"{words} the budget of .*\n$", out)


def test_a_sweep_on_this_machine_gives_what_the_script_does_at_those_sizes(estimate) -> None:
    text = f"MEASURED = False{PLAIN}"
    code, out, _ = estimate("--json", "-", "--batch", "32", "--batch", "512", text=text)
    assert code == 0
    for found in json.loads(out):
        _, alone, _ = estimate("--json", "-", text=text.replace("64", str(found["batch"])))
        assert found["peak_bytes"] == json.loads(alone)[0]["peak_bytes"]


def test_a_budget_is_refused_for_another_device_and_in_percent(estimate) -> None:
    for options, words in (
        (("--budget", "1GiB", "--device", "T4"), "--budget is a limit on this machine"),
        (("--budget", "50%"), "50%"),
        (("--fewest",), "--fewest are for several GPUs"),
    ):
        code, _, err = estimate(*options)
        assert code == 2
        assert words in err


ONE_AFTER_ANOTHER = """
import sys, torch
from torch import nn

def train(width):
    model = nn.Sequential(nn.Linear(256, width), nn.GELU(), nn.Linear(width, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3 if width == 1024 else int(sys.argv[1])):
        model(torch.randn(64, 256, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

device = "cuda" if torch.cuda.is_available() else "cpu"
if int(sys.argv[1]):
    train(512)
train(1024)
"""


@pytest.mark.parametrize("options", [(), ("--device", "T4")])
def test_a_replaced_model_no_longer_counts(estimate, options) -> None:
    peaks = set()
    for n_steps_of_a_first_one in (0, 1):
        arguments = (str(n_steps_of_a_first_one),)
        code, out, _ = estimate(*options, "--json", "-", text=ONE_AFTER_ANOTHER, args=arguments)
        assert code == 0
        (found,) = json.loads(out)
        peaks.add(found["peak_requested_bytes" if options else "peak_bytes"])
    assert len(peaks) == 1


TAKING_TURNS = """
import sys, torch
from torch import nn

rows = int(sys.argv[1])
generator, critic = nn.Linear(64, 3072).cuda(), nn.Sequential(nn.Linear(3072, 512), nn.LeakyReLU()).cuda()
optimizers = [torch.optim.Adam(m.parameters()) for m in (generator, critic)]
for i in range(4):
    x, z = torch.randn(rows, 3072).cuda(), torch.randn(rows, 64).cuda()
    fake = generator(z)
    optimizers[1].zero_grad()
    (critic(x) - critic(fake.detach())).pow(2).mean().backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    critic(fake).mean().backward()
    optimizers[0].step()
    del x, z, fake
    print(i)
"""


SPECTRAL = """
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

model = nn.Sequential(*[spectral_norm(nn.Linear(64, 64)) for _ in range(2)])
print("built")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
"""


def test_a_parametrization_that_is_registered_does_not_begin_training(estimate) -> None:
    code, out, err = estimate(text=SPECTRAL)
    assert code == 0
    assert err.index("built") < err.index("from here on nothing is computed")
    assert f"parameters  {format_bytes(4 * 2 * (64 * 64 + 64))}  there before" in re.sub(" +  ", "  ", out)


COMPUTED_BEFORE = """
import torch
import torch.nn.functional as F
import lowtide
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).cuda()
prompt = nn.Parameter(torch.randn(64, 64, device="cuda"))
optimizer = torch.optim.Adam([*model.parameters(), prompt])
x, y = torch.randn(256, 64, device="cuda"), torch.randint(8, (256,), device="cuda")

def prompted():
    F.cross_entropy(model(x @ prompt), y).backward()

def swapped():
    doubled = {name: parameter * 2 for name, parameter in model.named_parameters()}
    F.cross_entropy(torch.func.functional_call(model, doubled, (x,)), y).backward()

def in_pieces():
    lowtide.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), (x, y), 4)

def as_representations():
    def loss_of(rows):
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows), device=rows.device))
    lowtide.accumulate(loss_of, x, 4, representations=model)

for _ in range(4):
    WORK()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("work", ["prompted", "swapped", "in_pieces", "as_representations"])
def test_tensors_computed_before_the_first_forward_are_on_the_gpu_too(estimate, work) -> None:
    code, out, _ = estimate("--device", "T4", text=COMPUTED_BEFORE.replace("WORK", work))
    assert code == 0
    assert "on the CPU is assumed" not in out
    n_trained = 64 * 256 + 256 + 256 * 8 + 8 + (64 * 64 if work == "prompted" else 0)
    (state,) = re.findall(r"optimizer state +(.+?)  there before", out)
    assert state == format_bytes(2 * 4 * n_trained)  # Adam's two averages; its counts are on the CPU


@pytest.mark.parametrize("rows", [64, 16, 256])
def test_a_sweep_keeps_the_graph_of_computed_tensors(estimate, rows) -> None:
    found = []
    for options, given in (((), 64), (("--batch", "64"), rows)):
        _, out, err = estimate("--device", "T4", "--json", "-", *options, text=TAKING_TURNS, args=(str(given),))
        (one,) = json.loads(out)
        assert not any("several sizes" in note for note in one["assumed"])  # it is another model that begins a step
        found.append((one["peak_requested_bytes"], one["peak_reserved_bytes"], err.count("0")))
    assert found[0] == found[1]


TOWERS = """
import sys, torch
from torch import nn

rows = int(sys.argv[1])
images, texts = nn.Linear(256, 64).cuda(), nn.Linear(512, 64).cuda()
optimizer = torch.optim.Adam([*images.parameters(), *texts.parameters()])
for i in range(3):
    x, captions = torch.randn(rows, 256).cuda(), torch.randn(80, 512).cuda()
    loss = (images(x) @ texts(captions).T).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del x, captions, loss
"""


def test_a_sweep_does_not_resize_tensors_of_another_length(estimate) -> None:
    found = []
    for options, rows in ((("--batch", "512"), "32"), ((), "512")):
        _, out, _ = estimate("--device", "T4", "--json", "-", *options, text=TOWERS, args=(rows,))
        (one,) = json.loads(out)
        found.append((one["peak_requested_bytes"], one["peak_reserved_bytes"]))
    assert found[0] == found[1]


def test_the_first_batch_is_gone_when_the_script_lets_go_of_it(estimate) -> None:
    rows = 2048
    model = nn.Sequential(nn.Linear(1024, 64), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    batch = torch.randn(rows, 1024), torch.randint(0, 10, (rows,))
    estimated = lowtide.estimate(model, step, batch, device="T4", optimizer=optimizer)
    code, out, _ = estimate("--device", "T4", "--json", "-", text=ON_GPU, args=(str(rows),))
    assert code == 0
    (found,) = json.loads(out)
    assert found["peak_requested_bytes"] == estimated.peak_requested_bytes
    assert found["peak_reserved_bytes"] == estimated.peak_reserved_bytes


def test_a_sweep_looks_for_tensors_in_the_script_and_not_around_it(estimate, monkeypatch) -> None:
    around, seen = [torch.zeros(256, 64)], []

    def looking(value):
        seen.append(value)
        return collect_tensors(value)

    monkeypatch.setattr(estimating, "collect_tensors", looking)
    assert estimate("--device", "RTX 3060", "--batch", "64")[0] == 0
    assert seen
    assert not any(value is around for value in seen)


STEPS = """
import sys, torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=float(sys.argv[2]))
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(128, 64)).square().mean().backward()
    optimizer.step()
with torch.no_grad():
    model(torch.randn(128_000, 64))
"""
N_PARAMETERS = 2 * 64 * 256 + 256 + 64


@pytest.mark.parametrize("device", [(), ("--device", "T4")], ids=["here", "on a GPU"])
def test_a_script_that_takes_one_step_is_answered_with_that_step(device: tuple[str, ...], estimate) -> None:
    """Its peak is that of a second step without optimizer state; what comes after the step does not count. On a GPU,
    the first step allocates cuBLAS's workspaces as well.
    """
    peak = r"\S+ \S+  allocated\n.* reserved" if device else "peak .*"
    code, out, _ = estimate(*device, text=STEPS, args=("2", "0"))
    assert code == 0
    assert "takes one step" not in out
    code, only, _ = estimate(*device, text=STEPS, args=("1", "0"))
    assert code == 0
    assert re.findall(peak, only) == re.findall(peak, out) != []
    gradients = f"{format_bytes(4 * N_PARAMETERS)} of gradients that this one made"
    assert f"the script takes one step: a second one would begin with {gradients}" in only
    assert ("requested at the peak of the script's only step" in only) == bool(device)
    code, only, _ = estimate(*device, text=STEPS, args=("1", "0.9"))
    assert code == 0
    assert f"with {format_bytes(4 * N_PARAMETERS)} of optimizer state and {gradients}" in only


def test_a_script_that_takes_one_step_can_not_be_planned_for(capfd: pytest.CaptureFixture[str], tmp_path) -> None:
    (tmp_path / "train.py").write_text(STEPS)
    assert cli.main(("rehearse", "--device", "T4", str(tmp_path / "train.py"), "1", "0")) == 2
    assert "ended after 1 step, before Sequential was rehearsed: that takes two steps" in capfd.readouterr().err


def test_a_script_that_fails_has_exit_code_2(estimate) -> None:
    code, _, err = estimate("--device", "RTX 3060", text="raise ValueError('no data')")
    assert code == 2
    assert "no data" in err
    assert err.endswith("train.py ended with exit code 1, before two steps of it were rehearsed.\n")
    code, _, err = estimate("--device", "RTX 3060", text=f"{ON_GPU}    raise SystemExit(3)", args=("64",))
    assert code == 2
    assert "ended with exit code 3, before two steps" in err
    code, _, err = estimate(
        *("--device", "RTX 3060", "--batch", "32"), text=ON_GPU.replace("model(x)", "model(x).view(rows, 10)"),
        args=("64",),
    )  # fmt: skip
    assert code == 2
    assert "With --batch 32 all tensors" in err
    decides = TRAIN.replace("optimizer.zero_grad()", "loss.item() < 100 and optimizer.zero_grad()")
    code, _, err = estimate("--device", "RTX 3060", text=decides)
    assert code == 2
    assert "train.py:" in err
    assert "it decides by a number from a tensor" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--device", "RTX 9999"), "no GPU"),
        (("--rank", "0"), "several GPUs"),
        (("--device", "T4", "--plain"), "--plain"),
        (("--device", "T4", "--snapshot", "no such folder/step.pickle"), "no such folder is not a folder"),
    ],
)
def test_contradicting_options_are_refused_before_the_script_runs(estimate, options, said) -> None:
    code, out, err = estimate(*options, text="print('it runs')")
    assert code == 2
    assert said in err
    assert "it runs" not in out + err


PHYSICS = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
for i in range(4):
    x = torch.rand(256, 1).requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    loss = (slope + u).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_sweep_leaves_inputs_that_are_differentiated_by(estimate) -> None:
    _, out, _ = estimate("--device", "T4", "--json", "-", "--batch", "512", text=PHYSICS)
    (swept,) = json.loads(out)
    _, out, _ = estimate("--device", "T4", "--json", "-", text=PHYSICS.replace("256", "512"))
    (given,) = json.loads(out)
    assert swept["peak_requested_bytes"] == pytest.approx(given["peak_requested_bytes"], rel=0.01)


FOUND_LATE = """
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

{kind}
optimizer = torch.optim.Adam([*model.parameters(), *more], lr=1e-3)
for step in range(5):
    loss = forward(torch.randn(16, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "kind",
    [
        # a parameter of no module, which a function's variables do not lead to
        "model, more = nn.Linear(64, 64), [nn.Parameter(torch.ones([]))]\nforward = lambda x: model(x) * more[0].exp()",
        # the first that is called in training mode is the parametrization itself, when it is put on
        "model, more = nn.Sequential(spectral_norm(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 1)), []\n"
        "forward = model",
    ],
)
def test_parameters_that_are_found_late(estimate, kind: str) -> None:
    code, out, err = estimate("--device", "RTX 3060", text=FOUND_LATE.format(kind=kind))
    assert code == 0, err
    sizes = [64 * 64, 64, 1] if "exp" in kind else [64 * 64, 64, 64, 1]
    assert re.search(f"optimizer state +{format_bytes(2 * 4 * sum(sizes))}  there before", out)
    assert "several sizes" not in out


@pytest.mark.parametrize(("name", "hints"), [("no.py", False), ("package.train", True)])
def test_a_file_that_is_not_there_may_be_a_module(capfd: pytest.CaptureFixture[str], name: str, hints: bool) -> None:
    assert cli.main(("estimate", "--device", "T4", name)) == 2
    assert (f"use -m {name}" in capfd.readouterr().err) == hints


@pytest.mark.parametrize("command", [("estimate", "--device", "T4"), ("rehearse", "--plain")])
def test_a_profile_is_no_script(tmp_path, capfd: pytest.CaptureFixture[str], command) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text("null", encoding="utf-8")
    assert cli.main((*command, str(profile))) == 2
    assert "is a profile" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "way_out"),
    [(("--report", "x.html"), "add --rank 0"), (("--rank", "1", "--fewest"), "leave --rank out")],
)
def test_an_option_that_several_gpus_do_not_have_is_refused(
    options: tuple[str, ...], way_out: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(("estimate", "--device", "8 x T4", *options, __file__)) == 2
    assert way_out in capfd.readouterr().err


SCHEDULED = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
for step in range(5):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
"""


def test_a_script_with_a_scheduler(estimate) -> None:
    code, out, err = estimate("--device", "RTX 3060", text=SCHEDULED)
    assert code == 0, err
    assert "on RTX 3060, with 11.7 GiB: it fits" in out


BESIDE = """
import torch
from torch import nn

teacher = nn.Linear(64, 4096).eval().requires_grad_(False)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 4096))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = torch.randn(32, 64)
    loss = (model(x) - teacher(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_models_beside_the_trained_one_are_on_the_gpu_from_the_start(estimate) -> None:
    code, out, err = estimate("--device", "RTX 3060", "--json", "-", text=BESIDE)
    assert code == 0, err
    parameters = 4 * (65 * 4096 + 65 * 256 + 257 * 4096)
    assert json.loads(out)[0]["peak_requested_bytes"] > 1.9 * parameters - 4 * 65 * 4096  # and gradients of the model
    assert len(json.loads(out)[0]["assumed"]) == 2  # the second batch, where the model and where the teacher reads it


def test_a_model_that_is_called_in_parts_is_rehearsed_as_it_is_as_a_whole(estimate) -> None:
    as_whole = TRAIN.replace("model = torch.compile(model)", "")
    calls = "model[3](model[2](model[1](model[0](x))))"
    whole_code, whole, _ = estimate("--device", "RTX 3060", "--json", "-", text=as_whole)
    code, parts, err = estimate("--device", "RTX 3060", "--json", "-", text=as_whole.replace("model(x)", calls))
    assert (whole_code, code) == (0, 0), err
    (alone,), (found,) = json.loads(whole), json.loads(parts)
    for bytes_of in ("peak_requested_bytes", "peak_reserved_bytes"):
        assert found[bytes_of] == alone[bytes_of]
    assert "same weights True Parameter" in err


def test_something_small_that_is_called_before_the_model_is_not_taken_for_it(estimate) -> None:
    first = "model[0](torch.randn(2, 64).to(device)); "
    code, out, err = estimate("--device", "RTX 3060", "--json", "-", text=TRAIN.replace("try:", f"{first}\ntry:"))
    _, alone, _ = estimate("--device", "RTX 3060", "--json", "-")
    assert code == 0, err
    assert json.loads(out)[0]["peak_reserved_bytes"] == json.loads(alone)[0]["peak_reserved_bytes"]


LOOP = """
import random, torch
from pydoc_data.topics import topics
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForMaskedLM

random.seed(0)
text = "".join(topics.values()).encode()
size = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=256)
model = BertForMaskedLM(BertConfig(**size)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    starts = [random.randrange(len(text) - 200) for _ in range(8)]
    rows = [torch.tensor(list(text[at : at + random.randint(20, 200)])) for at in starts]
    ids = pad_sequence(rows, batch_first=True).cuda()
    mask = ids > 0
    chosen = (torch.rand(ids.shape) < 0.15).cuda() & mask
    labels = ids.masked_fill(~chosen, -100)
    ids[chosen] = 255
    loss = model(ids, attention_mask=mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


def test_a_loop_that_pads_and_masks_by_itself(estimate) -> None:
    code, out, err = estimate("--device", "RTX 4090", text=LOOP)
    assert code == 0, err
    assert "it fits" in out
    sizes = re.search(r"batches are of several sizes, and these two steps had (\[8, \d+\]).* and (\[8, \d+\])", out)
    assert sizes is not None
    assert sizes[1] != sizes[2]


PARTS = """
import torch
from torch import nn

words, reader = nn.Embedding(100, 16).cuda(), nn.LSTM(16, 16, batch_first=True).cuda()
optimizer = torch.optim.Adam([*words.parameters(), *reader.parameters()])
for _ in range(4):
    ids = torch.randint(0, 100, (8, 33), device="cuda")
    states, _ = reader(words(ids[:, :-1]))
    states.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_parts_that_are_called_in_turn_are_not_batches_of_several_sizes(estimate) -> None:
    _, out, _ = estimate("--device", "RTX 4090", text=PARTS)
    assert "several sizes" not in out


IN_OTHER_ORDER = """
import torch
from torch import nn

images, texts = nn.Linear(256, 64).cuda(), nn.Linear(512, 64).cuda()
optimizer = torch.optim.Adam([*images.parameters(), *texts.parameters()])
for i in range(4):
    calls = [(images, torch.randn(8, 256).cuda()), (texts, torch.randn(8, 512).cuda())]
    first, second = calls if i % 2 else calls[::-1]
    (first[0](first[1]) @ second[0](second[1]).T).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_steps_that_begin_with_other_parts_are_not_batches_of_several_sizes(estimate) -> None:
    code, out, _ = estimate("--device", "RTX 4090", text=IN_OTHER_ORDER)
    assert code == 0
    assert "several sizes" not in out


def test_batches_of_one_size_are_not_said_to_be_of_several(estimate) -> None:
    _, out, _ = estimate("--device", "RTX 3060")
    assert "several sizes" not in out


ASKS = """
import torch
from torch import nn

CUDA = torch.device("cuda", 0)
with torch.device("cuda"):
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))
    scale = torch.ones(10)
model.to(0)
device = next(model.parameters()).device
assert device == scale.device == CUDA and scale.is_cuda and scale.get_device() == 0
kept = torch.ones(10)
assert kept.cuda().device == CUDA and kept.device == torch.device("cpu")
assert scale.cpu().device == torch.device("cpu") and scale.device == CUDA
table = torch.rand(16, 32, device=CUDA)
rows = table[::2]
generator = torch.Generator(device=device).manual_seed(0)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(5):
    x = torch.randn(64, 32, device=0, generator=generator)
    y = torch.randint(0, 10, (64,)).to(0, non_blocking=True)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        if step:
            assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
        out = model(x)
    near = torch.cdist(x.detach(), rows).mean()
    loss = nn.functional.cross_entropy(out.float(), y, weight=scale) + near
    assert loss.device == near.device == device and loss.device.type == "cuda" and loss.is_cuda
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_script_finds_on_cuda_what_it_asked_for_there(estimate) -> None:
    code, out, err = estimate("--device", "RTX 4090", text=ASKS)
    assert code == 0, err
    assert "assumed" not in out


def test_tensors_made_by_default_are_on_the_scripts_default_device(estimate) -> None:
    by_default = TRAIN.replace('device = "cuda"', 'torch.set_default_device("cuda")\ndevice = "cuda"')
    code, out, err = estimate("--device", "RTX 3060", "--json", "-", text=by_default)
    _, alone, _ = estimate("--device", "RTX 3060", "--json", "-")
    assert code == 0, err
    assert json.loads(out)[0]["peak_reserved_bytes"] == json.loads(alone)[0]["peak_reserved_bytes"]


WORKERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(96, 64), torch.randint(0, 10, (96,)))
for epoch in range(9):
    for x, y in DataLoader(data, batch_size=96, shuffle=True, num_workers=1):
        loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_data_come_from_other_processes_also_when_nothing_is_computed(estimate) -> None:
    code, out, err = estimate("--device", "RTX 4090", text=WORKERS)
    assert code == 0, err
    assert "it fits" in out


def test_a_branch_on_cpu_contents_is_refused_with_its_line(estimate) -> None:
    matched = WORKERS.replace("optimizer.step()", "optimizer.step(); cost = model(x.cuda()).detach().cpu().numpy()")
    code, out, _ = estimate("--device", "RTX 4090", text=matched)
    assert code == 0
    assert "train.py:14: the numbers of an array, which are not known, are taken as 1" in out
    code, _, err = estimate("--device", "RTX 4090", text=matched.replace(".numpy()", ".numpy(); sorted(cost[0])"))
    assert code == 2
    assert "train.py:14: it decides by a number from a tensor" in err


CHECKPOINTED = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    x = torch.randn(128, 64).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = HERE.float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


NO_DECORATOR = pytest.mark.skipif(torch.__version__ < "2.15", reason="checkpoint is a decorator since torch 2.15")


@pytest.mark.parametrize(
    "here",
    [
        "checkpoint(model, x, use_reentrant=False)",
        pytest.param("checkpoint(use_reentrant=False)(model)(x)", marks=NO_DECORATOR),
        "model(x)",
    ],
)
def test_a_script_that_checkpoints_its_model(here: str, estimate) -> None:
    inside = (
        CHECKPOINTED.replace("model = nn.Sequential(", "model = nn.Sequential(Checkpointed(")
        .replace(
            "model = nn",
            "class Checkpointed(nn.Sequential):\n    def forward(self, x):\n        return checkpoint("
            "super().forward, x, use_reentrant=False)\n\nmodel = nn",
            1,
        )
        .replace("64)).cuda()", "64))).cuda()")
    )
    text = inside if here == "model(x)" else CHECKPOINTED
    code, out, err = estimate("--device", "RTX 4090", text=text.replace("HERE", here))
    assert code == 0, err
    assert "it fits" in out


TABLE = """
import torch
from torch import nn

model = nn.Linear(64, 10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
table = torch.empty(500_000, 64)
for first in range(0, 1000, 96):
    x = table[first : first + 96].to("cuda")
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_takes_its_batches_from_a_table_on_the_cpu(estimate) -> None:
    found = []
    for text in (TABLE, TABLE.replace("table[first : first + 96]", "torch.empty(96, 64)")):
        code, out, err = estimate("--device", "cuda:1GiB", "--json", "-", text=text)
        assert code == 0, err
        found.append(json.loads(out)[0]["peak_reserved_bytes"])
    assert found[0] == found[1]


API = """
import pathlib, tempfile, torch
from torch import nn

CUDA = torch.device("cuda", 0)
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()
file = pathlib.Path(tempfile.mkdtemp()) / "state.pt"
torch.save(model.state_dict(), file)


def ask():
    tensor = torch.ones(4).cuda()
    with torch.cuda.device(0), torch.cuda.device(CUDA), torch.cuda.device_of(tensor), torch.cuda.device(None):
        assert torch.cuda.current_device() == 0
    for where in ("cuda", "cuda:0", CUDA, {"cpu": "cuda:0"}, lambda storage, place: storage.cuda(0), None):
        for weights_only in (True, False):
            found = torch.load(file, map_location=where, weights_only=weights_only)
            assert [*found] == [*model.state_dict()] and found["0.weight"].device.type in ("cpu", "cuda")
            model.load_state_dict(found)
    state, states = torch.cuda.get_rng_state(), torch.cuda.get_rng_state_all()
    torch.cuda.set_rng_state(state)
    torch.cuda.set_rng_state(state, "cuda:0")
    torch.cuda.set_rng_state_all(states)
    torch.cuda.random.set_rng_state_all(torch.cuda.random.get_rng_state_all())
    torch.cuda.seed(), torch.cuda.seed_all()
    assert len(states) == 1 and torch.cuda.initial_seed() == torch.initial_seed()
    with torch.random.fork_rng(), torch.random.fork_rng(devices=[0]), torch.random.fork_rng(device_type="cuda"):
        torch.rand(4, device="cuda")
    assert "cudaMalloc" in torch.cuda.memory_summary() and torch.cuda.memory_summary(0, abbreviated=True)
    stats = torch.cuda.memory_stats()
    assert stats["reserved_bytes.all.current"] >= stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
    assert stats["allocated_bytes.all.peak"] == torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated()
    assert stats["num_ooms"] == 0 and stats.get("oversize_allocations.peak", 0) == 0
    assert torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"] >= 0
    torch.cuda.reset_max_memory_allocated(), torch.cuda.reset_max_memory_cached(), torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_cached() == torch.cuda.memory_cached() == torch.cuda.max_memory_reserved()
    known = torch.cuda.get_device_properties("cuda")
    assert known.multi_processor_count > 0 and known.warp_size == 32 and known.max_threads_per_multi_processor > 0
    assert known.shared_memory_per_block_optin > 0 and str(known.uuid) and known.L2_cache_size == 0
    tensor.record_stream(torch.cuda.current_stream())
    torch.cuda.Stream().synchronize()
    torch.cuda.nvtx.range_push("forward"), torch.cuda.nvtx.mark("here"), torch.cuda.nvtx.range_pop()
    with torch.cuda.nvtx.range("{}", 1):
        pass
    torch.cuda.profiler.start(), torch.cuda.profiler.stop()
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "cuda"
    assert torch.ones(1, device=torch.accelerator.current_accelerator()).is_cuda
    assert torch.accelerator.device_count() == 1
    torch.accelerator.synchronize()
    assert torch.backends.cuda.is_built() and torch.cuda.get_arch_list() == ["sm_89"]
    torch.cuda.utilization(), torch.cuda.list_gpu_processes(), torch.cuda.can_device_access_peer(0, 0)
    return torch.cuda.memory_allocated()


assert ask() > 0
alone = nn.DataParallel(model)
optimizer = torch.optim.AdamW(alone.parameters())
with torch.no_grad():
    alone(torch.ones(2, 32))
for step in range(5):
    assert ask() > 0
    loss = alone(torch.randn(64, 32)).square().mean()
    assert loss.device == CUDA
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_script_may_ask_what_a_gpu_can_be_asked_before_its_first_forward_and_after(estimate) -> None:
    code, out, err = estimate("--device", "RTX 4090", text=API)
    assert code == 0, err
    assert "assumed" not in out


STOPS = """
import copy, math, torch
from torch import nn

class EarlyStopping:
    def __init__(self):
        self.best, self.counter, self.stop = math.inf, 0, False

    def __call__(self, loss, model):
        if loss < self.best - 1e-4:
            self.best, self.counter = loss, 0
            torch.save(model.state_dict(), "best.pt")
        else:
            self.counter += 1
            if self.counter >= 3:
                self.stop = True

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
early, best, best_state = EarlyStopping(), math.inf, None
for epoch in range(9):
    x, y = torch.randn(96, 64).cuda(), torch.randint(0, 10, (96,)).cuda()
    loss = nn.functional.cross_entropy(model(x), y)
    if loss.item() != loss.item():
        print("nan")
        break
    if loss > 1e4 or loss.item() < 0:
        optimizer.zero_grad()
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("good" if loss.item() < 1 else "bad")
    if loss.item() < best:
        best = loss.item()
        best_state = copy.deepcopy(model.state_dict())
    best = min(best, loss.item())
    early(loss.item(), model)
    if early.stop or best < 0.1:
        break
"""


def test_guards_and_early_stopping_let_training_go_on_and_the_best_model_is_kept(estimate) -> None:
    code, out, err = estimate("--device", "RTX 4090", text=STOPS)
    assert code == 0, err
    notes = [line.partition("train.py:")[2] for line in out.partition("assumed:\n")[2].splitlines()]
    more = "the way that saves or copies something is taken, as the one that needs more memory"
    assert notes == [
        *(
            "24: training is assumed to continue",
            "27: training is assumed to continue",
            "33: both ways only print or count",
        ),
        *(f"34: {more}", f"10: {more}", "12: torch.save is left out", "39: training is assumed to continue"),
    ]
    shrinks = STOPS.replace("optimizer.zero_grad()\n        cont", "x = torch.cat([x, x])\n        cont")
    code, _, err = estimate("--device", "RTX 4090", text=shrinks)
    assert code == 2
    assert "train.py:27: it decides by the contents of a tensor" in err


BY_HAND = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
sgd = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for step in range(STEPS):
    x = torch.randn(128, 64).cuda()
    loss = (model(x) - x).square().mean()
    loss.backward()
    UPDATE
    model.zero_grad()
"""


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("steps", ["9", "2"])
@pytest.mark.parametrize(
    "update",
    [
        "with torch.no_grad():\n        for p in model.parameters():\n            p -= 0.1 * p.grad",
        "for p in model.parameters():\n        p.data.add_(p.grad, alpha=-0.1)",
        "for p in model.parameters():\n        p.data = p.data - 0.1 * p.grad",
    ],
    ids=["no_grad", "data", "other data"],
)
def test_parameters_may_be_updated_by_hand(update, steps, estimate) -> None:
    by_hand = BY_HAND.replace("STEPS", steps)
    code, out, err = estimate("--device", "RTX 4090", "--json", "-", text=by_hand.replace("UPDATE", "sgd.step()"))
    assert code == 0, err
    (alone,) = json.loads(out)
    by_hand = by_hand.replace("sgd = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)\n", "")
    code, out, err = estimate("--device", "RTX 4090", "--json", "-", text=by_hand.replace("UPDATE", update))
    assert code == 0, err
    (found,) = json.loads(out)
    assert found["peak_reserved_bytes"] == alone["peak_reserved_bytes"]
    assert found["assumed"] == [
        "a step is over when the model is called after its parameters changed: no torch.optim.Optimizer updates them"
    ]
    code, out, _ = estimate("--device", "RTX 4090", text=by_hand.replace("UPDATE", "pass"))
    assert code == 0
    assert f"{steps} forward and backward passes (no optimizer stepped)" in out


PHYSICS = """
import torch
from torch import nn

points = torch.rand(4000, 1, dtype=torch.float64, requires_grad=True)
x = points.float()
y = torch.rand(4000, 1, requires_grad=True)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
before = [x.grad_fn, x.detach().clone(), y.detach().clone()]
try:
    for step in range(5):
        optimizer.zero_grad()
        u = model(torch.cat([x, y], 1))
        u_x, u_y = torch.autograd.grad(u, (x, y), torch.ones_like(u), create_graph=True)
        u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u), create_graph=True)[0]
        (u_y + u * u_x - u_xx).square().mean().backward()
        optimizer.step()
finally:
    print("as before", before[0] is x.grad_fn, torch.equal(before[1], x), torch.equal(before[2], y))
"""


def test_derivatives_for_what_is_computed_before_the_model_is_called(estimate) -> None:
    code, out, err = estimate("--device", "RTX 3060", "--json", "-", text=PHYSICS)
    assert code == 0, err
    assert "as before True True True" in err
    on_gpu = PHYSICS.replace("dtype=torch.float64, requires_grad=True)", "requires_grad=True)")
    _, plain, _ = estimate("--device", "RTX 3060", "--json", "-", text=on_gpu.replace("points.float()", "points"))
    (found,), (expected,) = json.loads(out), json.loads(plain)
    assert found["peak_requested_bytes"] == pytest.approx(expected["peak_requested_bytes"], rel=0.02)


LEARNS = """
import torch
from torch import nn
from torch.func import functional_call

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    fast, x = dict(model.named_parameters()), torch.randn(512, 64)
    for _ in range(3):
        loss = functional_call(model, fast, (x,)).square().mean()
        slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        fast = {name: p - 0.01 * slope for (name, p), slope in zip(fast.items(), slopes)}
    optimizer.zero_grad()
    functional_call(model, fast, (x,)).square().mean().backward()
    optimizer.step()
    print("step", step)
"""


def test_inner_updates_of_parameters_that_are_exchanged_end_no_step(estimate) -> None:
    code, out, err = estimate("--device", "RTX 3060", text=LEARNS)
    assert code == 0, err
    assert estimating.BY_HAND not in out
    assert re.search("forward  .*  most of 4\n", out)
    assert err.count("step 0") == 1
