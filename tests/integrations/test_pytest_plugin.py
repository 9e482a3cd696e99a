"""The marker that bounds a test's memory, in runs of pytest of their own, and in a project that has only the wheel."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

import torch._dynamo  # noqa: E402, F401 - pytester forgets modules that its runs import, and this one registers operators

INSTALLED = importlib.metadata.entry_points(group="pytest11", name="lowtide")
PLUGIN = [] if INSTALLED else ["-p", "lowtide.integrations.pytest_plugin"]

TESTS = """
import pytest, torch
from torch import nn

@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))

kept = []

def step(model, x):
    loss = model(x).square().mean()
    loss.backward()
    model.zero_grad()
    return loss

@pytest.mark.lowtide(peak="16MiB", findings=0)
def test_fits(model):
    for _ in range(4):
        step(model, torch.randn(512, 256))

@pytest.mark.lowtide(peak="1MiB")
def test_peaks(model):
    step(model, torch.randn(512, 256))

@pytest.mark.lowtide(findings=0)
def test_leaves(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        kept.append(model(torch.randn(512, 256)).square().mean())
        kept[-1].backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()

@pytest.mark.lowtide(findings=3)
def test_leaves_as_much_as_allowed(model):
    test_leaves(model)

@pytest.mark.lowtide(peak="1MiB")
def test_fails_by_itself(model):
    step(model, torch.randn(512, 256))
    raise ValueError("its own")

def test_is_not_marked(model):
    step(model, torch.randn(512, 256))
"""


def test_a_marked_test_keeps_its_limits(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--strict-markers", *PLUGIN)
    done.assert_outcomes(passed=3, failed=3)
    report = done.stdout.str()
    assert "lowtide: the test peaks at" in report
    assert "above its limit of 1 MiB." in report
    assert "largest blocks there:" in report
    assert "what the test uses" in report
    assert re.search(r"^  activations +\S+ [KM]iB", report, re.MULTILINE)
    assert "lowtide: the test leaves memory behind: 1 finding, at most 0 allowed." in report
    assert "ValueError: its own" in report


def test_the_peak_counts_what_the_test_was_given(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch
        from torch import nn

        big = nn.Linear(1024, 1024, bias=False)  # 4 MiB

        @pytest.fixture
        def batch():
            return {"x": torch.zeros(1024, 512), "like": torch.zeros(1024, 512, device="meta")}  # 2 MiB

        @pytest.mark.parametrize("limit", [0])
        @pytest.mark.lowtide(peak=6 * 2**20 + 4096)
        def test_fits(limit, batch):
            with torch.no_grad():
                big.weight.mul_(2)
                batch["x"].add_(1)

        @pytest.mark.lowtide(peak=6 * 2**20 - 1)
        def test_does_not(batch):
            with torch.no_grad():
                big.weight.mul_(2)
        """
    )
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", *PLUGIN)
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["lowtide: the test peaks at 62914?? B, above its limit of 6291455 B."])


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ("", "takes peak="),
        ("'512MiB'", "found lowtide('512MiB')"),
        ("peaks='512MiB'", "found lowtide(peaks='512MiB')"),
        ("peek=None, findings=0", "found lowtide(peek=None, findings=0)"),
        ("peak='512M'", "512M"),
        ("findings=-1", "takes a number of findings, 0 or more; found -1"),
        ("peak=None, findings=None", "found lowtide(peak=None, findings=None)"),
    ],
)
def test_limits_that_are_none_are_refused(limits: str, words: str, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.lowtide({limits})\ndef test_nothing():\n    pass\n")
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", *PLUGIN)
    done.assert_outcomes(failed=1)
    report = done.stdout.str()
    assert words in report
    assert "pytest_plugin.py" not in report  # no traceback through Lowtide


def test_a_test_has_the_limits_of_its_class_too(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch

        @pytest.mark.lowtide(peak="1MiB")
        class TestSteps:
            @pytest.mark.lowtide(findings=0)
            def test_peaks(self):
                torch.zeros(2**20)

            @pytest.mark.lowtide(peak="5MiB")
            def test_has_its_own(self):
                torch.zeros(2**20)
        """
    )
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", *PLUGIN)
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["*TestSteps.test_peaks*", "lowtide: the test peaks at 4 MiB, above its limit of 1 MiB."])


def test_what_an_earlier_test_left_is_not_this_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch
        from torch import nn

        kept = []

        def train(keeps):
            model = nn.Linear(512, 512)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(4):
                loss = model(torch.randn(512, 512)).square().mean()
                loss.backward(retain_graph=keeps)
                kept.extend([loss] * keeps)
                optimizer.step()
                optimizer.zero_grad()

        @pytest.mark.lowtide(findings=0)
        def test_leaves():
            train(True)

        @pytest.mark.lowtide(findings=0)
        def test_leaves_nothing():
            train(False)
        """
    )
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", *PLUGIN)
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["FAILED *::test_leaves - *"])


def test_tests_without_the_marker_load_no_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_nothing():\n    assert 'torch' not in sys.modules\n")
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", *PLUGIN)
    done.assert_outcomes(passed=1)


@pytest.mark.slow
def test_a_project_of_its_own_that_has_the_wheel(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(root)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("lowtide-*.whl")
    site, project = tmp_path / "site", tmp_path / "project"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True)
    project.mkdir()
    (project / "test_steps.py").write_text(TESTS)
    (project / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = ["--strict-markers"]\n')
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "lowtide: the test peaks at" in done.stdout
    assert "lowtide: the test leaves memory behind" in done.stdout
