"""Mutation tests: put small faults into engine, planner and allocator, and list those that the nearest tests miss.

    python bench/mutants.py [--count 200] [--seed N] [--jobs N] [--results FILE] [--again] [--seconds N] [--list]

Mutants are drawn by a seed, which is printed: first a place in the code, then an operator of cosmic-ray that can change
that place. `mutants.toml` names the tests nearest to each file. These tests run once without a mutant, and the
functions that each quick test enters are noted. Each mutant is then tried in a copy of the checkout, against the tests
that enter its function, until one fails or their times add up to twenty seconds; tests that enter the fewest functions
run first. Survivors are listed. Mutants that `mutants.toml` shows to be equivalent are not tried. The exit code is 1 if
less than 90 % of all others are killed.

Results are written to a file after each mutant, and the same command continues from there: `--seconds 180` tries
mutants for three minutes, `--again` tries the survivors again. Tests that have not changed are not noted twice.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import CodeType, FrameType
from typing import IO, Any

import pytest
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).resolve().parent.parent
TABLE = tomllib.loads((ROOT / "bench" / "mutants.toml").read_text())
ENOUGH = 0.9
"""Share of the mutants that has to be killed, without equivalent ones."""

TEST_SECONDS, RUN_SECONDS, RUN_BYTES = 60, 600, 8 << 30
"""Limits for one test and for one mutant; they end tests that loop or grow without end."""

QUICK_SECONDS = 5
"""Largest time of a test, without a mutant, to be used with mutants."""

TRIED_SECONDS = 20
"""Total time, without a mutant, of the tests that are run for one mutant."""

BESIDE_PYTEST = (
    *("numpy", "scipy.optimize", "hypothesis", "torch", "torch._dynamo"),
    *("transformers.models.gpt2.modeling_gpt2", "transformers.models.bert.modeling_bert"),
)
"""Modules imported once, before processes for mutants are forked: nothing of Lowtide, and nothing that imports it."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one line of source code."""

    source: str
    """Path of the file, below the folder that `mutants.toml` names."""
    operator: str
    occurrence: int
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}\n  - {self.before}\n  + {self.after}"

    @property
    def path(self) -> Path:
        return ROOT / TABLE["package"] / self.source

    def find_in_current_source(self) -> Mutant | None:
        """Find the same change in the current source, on any line; None if the source has no such line."""
        code = self.path.read_text()
        lines = code.splitlines()
        occurrences = (
            (abs(line - self.line), occurrence)
            for (line, _), choices in places(code).items()
            if lines[line - 1].strip() == self.before
            for operator, occurrence in choices
            if operator == self.operator
        )
        changed = (mutated(self.source, code, self.operator, occurrence) for _, occurrence in sorted(occurrences))
        return next((one for one in changed if one is not None and one.after == self.after), None)

    @property
    def reason(self) -> str | None:
        """The reason in `mutants.toml` why no test can notice the change; None if there is none."""
        for known in TABLE.get("equivalent", ()):
            if (known["source"], known["before"]) == (self.source, self.before) and self.after in known["after"]:
                return str(known["why"])
        return None


# --- drawing ---------------------------------------------------------------------------------------------------------


def operators() -> dict[str, Any]:
    """Return cosmic-ray's operators by name, except some that no test could judge.

    Left out are operators that remove a decorator, and those that exchange a comparison by value and one by identity.
    """
    found = {}
    for name in plugins.operator_names():
        kind = plugins.get_operator(name)
        before, _, after = name.partition("ReplaceComparisonOperator_")[2].partition("_")
        of_identity = (before in ("Is", "IsNot")) != (after in ("Is", "IsNot"))
        if not kind.arguments() and "RemoveDecorator" not in name and not of_identity:
            found[name] = kind()
    return found


def places(code: str) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Return the operators that can change each place in the code, each with the number of its occurrence."""
    nodes = list(ast_nodes(get_ast(code)))
    found: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name, operator in operators().items():
        starts = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(starts):
            found.setdefault(start, []).append((name, occurrence))
    return found


FOR_READERS = re.compile(r"@dataclass\(|if (not )?TYPE_CHECKING:")
"""Lines whose change no test can see: flags of records that are neither written to nor compared, and type imports."""


def draw(count: int, seed: int, only: str) -> list[Mutant]:
    """Draw `count` mutants of files with `only` in their name, each at another place."""
    chosen = random.Random(seed)
    files = {f: (ROOT / TABLE["package"] / f).read_text() for f in sources() if only in f}
    left = [(f, at, choices) for f, code in files.items() for at, choices in sorted(places(code).items())]
    chosen.shuffle(left)
    found: list[Mutant] = []
    for source, _, choices in left:
        if len(found) == count:
            break
        mutant = mutated(source, files[source], *chosen.choice(choices))
        if mutant is not None and not FOR_READERS.match(mutant.before):
            found.append(mutant)
    return found


def sources() -> list[str]:
    """List the files that mutants are drawn from."""
    package = ROOT / TABLE["package"]
    return sorted(f for f in (str(path.relative_to(package)) for path in package.rglob("*.py")) if nearest(f))


def nearest(source: str) -> list[str]:
    """Return the tests of a file, the most likely to notice a fault first; empty if no rule covers the file."""
    rules = (rule["tests"] for rule in TABLE["nearest"] for pattern in rule["sources"] if fnmatch(source, pattern))
    return next(rules, [])


def mutated(source: str, code: str, operator: str, occurrence: int) -> Mutant | None:
    """Apply an operator to one of its occurrences in the code, and return the mutant.

    None if the changed code is invalid, or means the same, as for a changed annotation.
    """
    changed = mutate_code(code, operators()[operator], occurrence)
    try:
        if changed is None or meaning(changed) == meaning(code):
            return None
    except SyntaxError:
        return None
    both = zip(code.splitlines(), changed.splitlines(), strict=False)
    line, before, after = next((n, a.strip(), b.strip()) for n, (a, b) in enumerate(both, 1) if a != b)
    return Mutant(source, operator, occurrence, line, before, after)


class _Meaning(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        for each in node.decorator_list:
            if isinstance(each, ast.Call):
                each.keywords = [one for one in each.keywords if one.arg not in ("frozen", "slots", "kw_only")]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [one for one in node.keywords if one.arg != "strict"]  # an assertion that lengths are equal
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def meaning(code: str) -> str:
    """Return the code as text without parts that only type checkers read, and without restrictions such as `frozen`."""
    return ast.dump(_Meaning().visit(ast.parse(code)))


# --- running ---------------------------------------------------------------------------------------------------------

ENTERED = "entered.json"
Entered = dict[str, tuple[float, list[str]]]
"""Seconds of each test and the functions that it enters, by the test's name."""


class NotedFunctions:
    """A pytest plugin that notes the time of each passed test, and the functions that it enters."""

    def __init__(self, package: Path) -> None:
        self._prefix = f"{package}{os.sep}"
        self._in_setup: set[CodeType] = set()
        self._seconds: dict[str, float] = {}
        self._by_test: dict[str, set[CodeType]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        with self._noted(self._in_setup):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        began, entered = _measure_processor_seconds(), set[CodeType]()
        with self._noted(entered):
            yield
        self._seconds[item.nodeid], self._by_test[item.nodeid] = _measure_processor_seconds() - began, entered

    def pytest_sessionfinish(self) -> None:
        """Write all notes to a file. Functions that fixtures enter count for every test, because tests may share
        fixtures.
        """
        found = {
            test: (self._seconds[test], sorted(self._names(entered | self._in_setup)))
            for test, entered in self._by_test.items()
        }
        Path(ENTERED).write_text(json.dumps(found))

    def _names(self, codes: set[CodeType]) -> set[str]:
        named = ((code.co_filename.removeprefix(self._prefix), code.co_qualname) for code in codes)
        return {f"{source}:{name}" for source, name in named if nearest(source)}

    @contextlib.contextmanager
    def _noted(self, entered: set[CodeType]) -> Iterator[None]:
        def note(frame: FrameType, _event: str, _argument: object) -> None:
            code = frame.f_code
            if code not in entered and code.co_filename.startswith(self._prefix):
                entered.add(code)

        sys.settrace(note)
        try:
            yield
        finally:
            sys.settrace(None)


def _measure_processor_seconds() -> float:
    """Return the processor time of this process and its ended children: it doesn't depend on the machine's load."""
    return sum(os.times()[:4])


class ChosenTests:
    """A pytest plugin that runs only the given tests, in the given order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._order = {test: n for n, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order), key=lambda item: self._order[item.nodeid]
        )


@dataclass(slots=True)
class Run:
    """A run of pytest in a process of its own, on a copy of the checkout with or without a mutant."""

    copy: Path
    tests: Sequence[str]
    """Names of tests in the order in which they run; without a mutant, test files."""
    mutant: Mutant | None
    began: float = field(default_factory=time.monotonic)
    out: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    pid: int = 0
    code: int | None = None
    """Exit code of pytest, 0 if no test failed; -1 if the run was ended early."""

    def start(self) -> None:
        self._put(mutated=True)
        self.pid = os.fork()
        if not self.pid:
            plugin = ChosenTests(self.tests) if self.mutant else NotedFunctions(self.copy / TABLE["package"])
            _run_pytest(
                self.copy, list(dict.fromkeys(test.partition("::")[0] for test in self.tests)), plugin, self.out
            )

    def has_ended(self) -> bool:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.code = os.waitstatus_to_exitcode(status)
        elif self.seconds > RUN_SECONDS:
            self.code = -1
        if self.code is not None:
            self.end()
        return self.code is not None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def said(self) -> str:
        self.out.seek(0)
        return self.out.read().decode(errors="replace")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # the run, if it goes on, and processes that its tests started
        if self.code in (None, -1):
            os.waitpid(self.pid, 0)
        self._put(mutated=False)

    def _put(self, *, mutated: bool) -> None:
        if self.mutant is not None:
            code = self.mutant.path.read_text()
            changed = mutate_code(code, operators()[self.mutant.operator], self.mutant.occurrence) if mutated else code
            (self.copy / TABLE["package"] / self.mutant.source).write_text(changed or "")


def runs(copies: Sequence[Path], asked: Sequence[tuple[Sequence[str], Mutant | None]], until: float) -> Iterator[Run]:
    """Run all of `asked`, one at a time in each copy, until the time `until`; yield each run as it ends."""
    free, left, under_way = list(copies), list(asked)[::-1], list[Run]()
    try:
        while (left and time.monotonic() < until) or under_way:
            while free and left and time.monotonic() < until:
                under_way.append(Run(free.pop(), *left.pop()))
                under_way[-1].start()
            for one in [each for each in under_way if each.has_ended()]:
                under_way.remove(one)
                yield one
                free.append(one.copy)
            time.sleep(0.02)
    finally:
        for one in under_way:  # an interrupt
            one.end()


def _run_pytest(copy: Path, files: Sequence[str], plugin: NotedFunctions | ChosenTests, out: IO[bytes]) -> None:
    """Run pytest in this forked process, which ends here."""
    code = 3
    try:
        os.setsid()
        os.dup2(out.fileno(), 1), os.dup2(out.fileno(), 2)
        os.chdir(copy)
        resource.setrlimit(resource.RLIMIT_DATA, (RUN_BYTES, RUN_BYTES))
        folder = TABLE["package"].rpartition("/")[0]
        os.environ |= {"PYTHONPATH": str(copy / folder), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path.insert(0, str(copy / folder))
        options = (
            ["-x", f"--timeout={TEST_SECONDS}"] if isinstance(plugin, ChosenTests) else [f"--timeout={QUICK_SECONDS}"]
        )
        options += ["-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:xdist"]
        settings = [
            "--hypothesis-profile=brief",
            "-m",
            "not slow and not gpu",
            "--tb=line",
        ]
        code = int(pytest.main([*options, *settings, "-q", f"--rootdir={copy}", *files], [plugin]))
    finally:
        sys.stdout.flush()
        os._exit(code)


@dataclass(slots=True)
class Results:
    """All results for the mutants of one draw, which may be kept in a file."""

    seed: int
    mutants: list[Mutant]
    failed: dict[Mutant, str] = field(default_factory=dict)
    """Test that failed for each mutant that was tried; "" if none failed."""
    entered: dict[str, Entered] = field(default_factory=dict)
    """Notes without a mutant, by the name and digest of each test file: each test's time and the functions that it
    enters.
    """

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a file that `write` wrote; mutants that the source no longer has are left out."""
        found = json.loads(path.read_text())
        results = cls(found["seed"], [], entered=found["entered"])
        for fields, digest, failed in found["mutants"]:
            known = Mutant(**fields)
            mutant = known if digest == with_digest(known.path) else known.find_in_current_source()
            if mutant is None:
                print(f"left out, its source has changed: {known}")
                continue
            results.mutants.append(mutant)
            if failed is not None:
                results.failed[mutant] = failed
        return results

    def write(self, path: Path) -> None:
        mutants = [(asdict(one), with_digest(one.path), self.failed.get(one)) for one in self.mutants]
        path.write_text(json.dumps({"seed": self.seed, "mutants": mutants, "entered": self.entered}))

    @property
    def survivors(self) -> list[Mutant]:
        return [one for one, failed in self.failed.items() if not failed and one.reason is None]

    @property
    def left(self) -> list[Mutant]:
        return [one for one in self.mutants if one not in self.failed and one.reason is None]

    def chosen(self, mutant: Mutant) -> list[str]:
        """Choose the tests to run for a mutant: those that enter its function, or else all nearest tests.

        Tests that enter the fewest functions come first, until their times add up to TRIED_SECONDS.
        """
        near = [test for file in nearest(mutant.source) for test in self.entered[with_digest(ROOT / file)].items()]
        function = f"{mutant.source}:{find_function_at(mutant.path, mutant.line)}"
        entering = [(test, entry) for test, entry in near if function in entry[1]]
        closest = sorted(entering or near, key=lambda each: (len(each[1][1]), each[1][0]))
        sums = itertools.accumulate(seconds for _, (seconds, _) in closest)
        within = [test for (test, _), total in zip(closest, sums, strict=True) if total <= TRIED_SECONDS]
        return within or [test for test, _ in closest[:1]]


def with_digest(path: Path) -> str:
    """Return the name of a file with a digest of its text."""
    return f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def find_function_at(path: Path, line: int) -> str:
    """Return the qualified name of the innermost function around a line; "" outside all functions."""
    return _find_function_at(ast.parse(path.read_text()), line, "")


def _find_function_at(scope: ast.AST, line: int, prefix: str) -> str:
    for node in ast.iter_child_nodes(scope):
        if not (getattr(node, "lineno", line) <= line <= (getattr(node, "end_lineno", None) or line)):
            continue
        if isinstance(node, ast.ClassDef):
            return _find_function_at(node, line, f"{prefix}{node.name}.")
        if isinstance(node, ast.FunctionDef):
            name = f"{prefix}{node.name}"
            inner = _find_function_at(node, line, f"{name}.<locals>.")
            return inner or (name if node.body[0].lineno <= line else "")
        if (inner := _find_function_at(node, line, prefix)) != "":
            return inner
    return ""


def note_entered(results: Results, copies: Sequence[Path], until: float, path: Path | None) -> bool:
    """Run the nearest tests of all mutants that are left without a mutant, and note the functions that each test
    enters.

    Returns True if all of them ran before the time `until`.
    """
    files = sorted({test for mutant in results.left for test in nearest(mutant.source)})
    new = [file for file in files if with_digest(ROOT / file) not in results.entered]
    for one in runs(copies, [([test], None) for test in new], until):
        print(f"{one.seconds:6.1f} s  {one.tests[0]}", flush=True)
        if one.code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):  # all may be slow
            failed = (line for line in one.said.splitlines() if line.startswith(("FAILED", "ERROR")))
            print("not used, too slow or failing without any mutant:", *failed, sep="\n  ")
        results.entered[with_digest(ROOT / one.tests[0])] = json.loads((one.copy / ENTERED).read_text())
        if path:
            results.write(path)
    return all(with_digest(ROOT / file) in results.entered for file in files)


def try_left(results: Results, jobs: int, until: float, path: Path | None) -> None:
    """Try the mutants that are left, until the time `until`, and keep the results in the file `path`."""
    ignored = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Path(shutil.copytree(ROOT, Path(folder) / str(n), ignore=ignored)) for n in range(jobs)]
        asked = []
        if note_entered(results, copies, until, path):
            chosen = {mutant: results.chosen(mutant) for mutant in results.left}
            results.failed |= {mutant: "" for mutant, tests in chosen.items() if not tests}
            asked = [(tests, mutant) for mutant, tests in chosen.items() if tests]
        for one in runs(copies, asked, until):
            assert one.mutant is not None
            assert one.code != pytest.ExitCode.NO_TESTS_COLLECTED, one.said
            by = next(
                (line for line in one.said.splitlines() if line.startswith(("FAILED", "ERROR"))), "without a test"
            )
            results.failed[one.mutant] = by if one.code else ""
            print(
                f"[{len(results.mutants) - len(results.left)}/{len(results.mutants)}] "
                f"{'killed' if one.code else 'SURVIVED'}, {one.seconds:.0f} s of {len(one.tests)} tests  "
                f"{results.failed[one.mutant]}\n{one.mutant}",
                flush=True,
            )
            if path:
                results.write(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="mutants to draw")
    parser.add_argument("--seed", type=int, help="by which they are drawn")
    parser.add_argument("--only", default="", help="of files with this in their name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants that are tried at once")
    parser.add_argument(
        "--results", type=Path, help="where results are kept; if the file exists, its draw is gone on with"
    )
    parser.add_argument("--again", action="store_true", help="try the survivors of that file again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after that time")
    parser.add_argument("--list", action="store_true", help="draw, and try none")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and copies are removed
    until = time.monotonic() + asked.seconds
    if asked.results and asked.results.exists():
        results = Results.read(asked.results)
    else:
        seed = random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
        results = Results(seed, draw(asked.count, seed, asked.only))
    print(f"{len(results.mutants)} mutants by --seed {results.seed}", flush=True)
    if asked.list:
        print(*results.mutants, sep="\n")
        return 0
    if asked.again:
        results.failed = {one: failed for one, failed in results.failed.items() if failed}
    for name in BESIDE_PYTEST:
        importlib.import_module(name)
    try_left(results, asked.jobs, until, asked.results)
    known = [mutant for mutant in results.mutants if mutant.reason is not None]
    for mutant in known:
        print(f"equivalent: {mutant}\n  {mutant.reason}")
    for mutant in results.survivors:
        print(f"survived: {mutant}")
    n = len(results.mutants) - len(known) - len(results.left)
    n_killed = n - len(results.survivors)
    print(
        f"{n_killed} of {n} killed, {n_killed / max(n, 1):.1%}; {len(known)} equivalent ones were not tried, "
        f"{len(results.left)} are left"
    )
    return int(n_killed < ENOUGH * n)


if __name__ == "__main__":
    sys.exit(main())
