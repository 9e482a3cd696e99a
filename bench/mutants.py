"""Mutation tests: small faults put into engine, planner and allocator, and which of them the nearest tests let through.

    python bench/mutants.py [--count 200] [--seed N] [--jobs N] [--json FILE] [--again FILE] [--list]

Mutants are drawn by a seed, which is printed: first a place in the code, then one of the operators of cosmic-ray that
change something there. `mutants.toml` names the tests nearest to each file. They run once without a mutant, and the
functions that each test enters are noted. Each mutant is then tried in a copy of the checkout, against the tests that
enter its function, the quickest first, until one fails or a minute of them has passed. Survivors are listed. Those that
`mutants.toml` shows to be equivalent are not tried. The exit code is 1 if less than 90 % of all others are killed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import itertools
import json
import os
import random
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
"""Of the mutants that are not equivalent, the share that has to be killed."""

TEST_SECONDS, RUN_SECONDS, RUN_BYTES = 120, 1200, 8 << 30
"""The most that one test and one mutant may take: what loops or grows without end is killed by that."""

TRIED_SECONDS = 60
"""Tests of one mutant: as many as took this long without it."""

BESIDE_PYTEST = ("numpy", "scipy.optimize", "torch", "hypothesis")
"""Imported once, before a mutant's process is forked: nothing of Lowtide, nor what imports it."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one line."""

    source: str
    """The file, below the folder that `mutants.toml` names."""
    operator: str
    occurrence: int
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}\n  - {self.before}\n  + {self.after}"

    @property
    def reason(self) -> str | None:
        """Why it changes nothing that a test could see, as `mutants.toml` says."""
        for known in TABLE.get("equivalent", ()):
            if (known["source"], known["before"]) == (self.source, self.before) and self.after in known["after"]:
                return str(known["why"])
        return None


# --- drawing ---------------------------------------------------------------------------------------------------------


def operators() -> dict[str, Any]:
    """cosmic-ray's, but for those that leave out a decorator, or compare by `is` what has no identity of its own."""
    found = {}
    for name in plugins.operator_names():
        kind = plugins.get_operator(name)
        before, _, after = name.partition("ReplaceComparisonOperator_")[2].partition("_")
        of_identity = (before in ("Is", "IsNot")) != (after in ("Is", "IsNot"))
        if not kind.arguments() and "RemoveDecorator" not in name and not of_identity:
            found[name] = kind()
    return found


def places(code: str) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """For each place in the code the operators that change something there, with which of their occurrences it is."""
    nodes = list(ast_nodes(get_ast(code)))
    found: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name, operator in operators().items():
        starts = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(starts):
            found.setdefault(start, []).append((name, occurrence))
    return found


def draw(count: int, seed: int, only: str) -> list[Mutant]:
    """`count` mutants of files that have `only` in their name, each at another place."""
    chosen = random.Random(seed)
    files = {f: (ROOT / TABLE["package"] / f).read_text() for f in sources() if only in f}
    left = [(f, at, choices) for f, code in files.items() for at, choices in sorted(places(code).items())]
    chosen.shuffle(left)
    found: list[Mutant] = []
    for source, _, choices in left:
        if len(found) == count:
            break
        mutant = mutated(source, files[source], *chosen.choice(choices))
        if mutant is not None:
            found.append(mutant)
    return found


def sources() -> list[str]:
    """The files that mutants are drawn of."""
    package = ROOT / TABLE["package"]
    return sorted(f for f in (str(path.relative_to(package)) for path in package.rglob("*.py")) if nearest(f))


def nearest(source: str) -> list[str]:
    """The tests of a file, those that are most likely to see a fault first; none if no rule is for it."""
    rules = (rule["tests"] for rule in TABLE["nearest"] for pattern in rule["sources"] if fnmatch(source, pattern))
    return next(rules, [])


def mutated(source: str, code: str, operator: str, occurrence: int) -> Mutant | None:
    """The mutant; None where the code means the same, as in an annotation, or is none."""
    changed = mutate_code(code, operators()[operator], occurrence)
    try:
        if changed is None or meaning(changed) == meaning(code):
            return None
    except SyntaxError:
        return None
    both = zip(code.splitlines(), changed.splitlines(), strict=False)
    line, before, after = next((n, a.strip(), b.strip()) for n, (a, b) in enumerate(both, 1) if a != b)
    return Mutant(source, operator, occurrence, line, before, after)


class _WithoutAnnotations(ast.NodeTransformer):
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

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def meaning(code: str) -> str:
    """The code without what only type checkers read, and without limits to what one may do with a record."""
    return ast.dump(_WithoutAnnotations().visit(ast.parse(code)))


# --- running ---------------------------------------------------------------------------------------------------------

ENTERED = "entered.json"


class NotedFunctions:
    """A plugin of pytest that notes how long each test takes, and the functions of the package that it enters."""

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
        began = time.monotonic()
        with self._noted(self._by_test.setdefault(item.nodeid, set())):
            try:
                return (yield)
            finally:
                self._seconds[item.nodeid] = time.monotonic() - began

    def pytest_sessionfinish(self) -> None:
        """Write all of it: fixtures may serve several tests, so what they enter counts for each of them."""
        found = {
            test: (self._seconds[test], sorted({self._name(code) for code in entered | self._in_setup}))
            for test, entered in self._by_test.items()
        }
        Path(ENTERED).write_text(json.dumps(found))

    def _name(self, code: CodeType) -> str:
        return f"{code.co_filename.removeprefix(self._prefix)}:{code.co_firstlineno}"

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


class ChosenTests:
    """A plugin of pytest that runs some tests alone, in the order in which they are named."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._order = {test: n for n, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order), key=lambda item: self._order[item.nodeid]
        )


@dataclass(slots=True)
class Run:
    """pytest in a process of its own, on a copy of the checkout that has the mutant in it, or none."""

    copy: Path
    tests: Sequence[str]
    """Names of tests in the order in which they run; without a mutant, files of tests."""
    mutant: Mutant | None
    began: float = field(default_factory=time.monotonic)
    out: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    pid: int = 0
    code: int | None = None
    """pytest's exit code, 0 where no test failed; -1 where it was ended."""

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
            self._clear()
        return self.code is not None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def said(self) -> str:
        self.out.seek(0)
        return self.out.read().decode(errors="replace")

    def _clear(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what its tests have started, and itself where it goes on
        if self.code == -1:
            os.waitpid(self.pid, 0)
        self._put(mutated=False)

    def _put(self, *, mutated: bool) -> None:
        if self.mutant is not None:
            code = (ROOT / TABLE["package"] / self.mutant.source).read_text()
            changed = mutate_code(code, operators()[self.mutant.operator], self.mutant.occurrence) if mutated else code
            (self.copy / TABLE["package"] / self.mutant.source).write_text(changed or "")


def runs(copies: Sequence[Path], asked: Sequence[tuple[Sequence[str], Mutant | None]]) -> Iterator[Run]:
    """Run all that is asked for, one at a time in each of the copies; gives each run as it ends."""
    free, left, under_way = list(copies), list(asked)[::-1], list[Run]()
    while left or under_way:
        while free and left:
            under_way.append(Run(free.pop(), *left.pop()))
            under_way[-1].start()
        for one in [each for each in under_way if each.has_ended()]:
            under_way.remove(one)
            yield one
            free.append(one.copy)
        time.sleep(0.02)


def _run_pytest(copy: Path, files: Sequence[str], plugin: object, out: IO[bytes]) -> None:
    """In a process of its own, which ends here."""
    code = 3
    try:
        os.setsid()
        os.dup2(out.fileno(), 1), os.dup2(out.fileno(), 2)
        os.chdir(copy)
        resource.setrlimit(resource.RLIMIT_DATA, (RUN_BYTES, RUN_BYTES))
        folder = TABLE["package"].rpartition("/")[0]
        os.environ |= {"PYTHONPATH": str(copy / folder), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path.insert(0, str(copy / folder))
        options = ["-x", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:xdist"]
        settings = [
            f"--timeout={TEST_SECONDS}",
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
class Baseline:
    """What the tests do without any mutant."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of each test, by its name."""
    by_function: dict[str, set[str]] = field(default_factory=dict)
    """The tests that enter a function, by the function's file and first line."""

    def add(self, path: Path) -> None:
        for test, (seconds, functions) in json.loads(path.read_text()).items():
            self.seconds[test] = seconds
            for function in functions:
                self.by_function.setdefault(function, set()).add(test)

    def chosen(self, mutant: Mutant) -> list[str]:
        """The tests that enter the mutant's function, else all nearest ones; the quickest first, a minute in all."""
        files = nearest(mutant.source)
        near = [test for test in self.seconds if test.partition("::")[0] in files]
        entering = self.by_function.get(f"{mutant.source}:{function_at(mutant.source, mutant.line)}", set())
        quickest = sorted([test for test in near if test in entering] or near, key=self.seconds.__getitem__)
        sums = itertools.accumulate(self.seconds[test] for test in quickest)
        return [
            test for test, total in zip(quickest, sums, strict=True) if total <= TRIED_SECONDS or test == quickest[0]
        ]


def function_at(source: str, line: int) -> int:
    """The first line of the innermost function around a line, 0 outside all."""
    tree = ast.parse((ROOT / TABLE["package"] / source).read_text())
    found = 0
    for node in ast.walk(tree):  # outer ones come first
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line <= (node.end_lineno or 0):
            found = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return found


def run_baseline(copies: Sequence[Path], mutants: Sequence[Mutant]) -> Baseline:
    """Run the nearest tests of all mutants; exit if one fails without any mutant."""
    files = sorted({test for mutant in mutants for test in nearest(mutant.source)})
    baseline = Baseline()
    for one in runs(copies, [([test], None) for test in files]):
        print(f"{one.seconds:6.1f} s  {one.tests[0]}", flush=True)
        if one.code:
            sys.exit(f"{one.said}\n{one.tests[0]} fails without any mutant, so nothing can be said of mutants")
        baseline.add(one.copy / ENTERED)
    return baseline


def try_all(mutants: Sequence[Mutant], jobs: int) -> list[Mutant]:
    """The survivors."""
    survivors: list[Mutant] = []
    ignored = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Path(shutil.copytree(ROOT, Path(folder) / str(n), ignore=ignored)) for n in range(jobs)]
        baseline = run_baseline(copies, mutants)
        for n, one in enumerate(runs(copies, [(baseline.chosen(mutant), mutant) for mutant in mutants]), 1):
            assert one.mutant is not None
            assert one.code != pytest.ExitCode.NO_TESTS_COLLECTED, one.said
            by = next((line for line in one.said.splitlines() if line.startswith("FAILED")), "")
            end = "killed" if one.code else "SURVIVED"
            print(
                f"[{n}/{len(mutants)}] {end}, {one.seconds:.0f} s of {len(one.tests)} tests  {by}\n{one.mutant}",
                flush=True,
            )
            if not one.code:
                survivors.append(one.mutant)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="mutants to draw")
    parser.add_argument("--seed", type=int, help="by which they are drawn")
    parser.add_argument("--only", default="", help="of files with this in their name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants that are tried at once")
    parser.add_argument("--json", type=Path, help="where the survivors are written")
    parser.add_argument("--again", type=Path, help="such a file: only its survivors are tried")
    parser.add_argument("--list", action="store_true", help="draw, and try none")
    asked = parser.parse_args()
    if asked.again:
        mutants = [Mutant(**each) for each in json.loads(asked.again.read_text())]
    else:
        seed = random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
        mutants = draw(asked.count, seed, asked.only)
        mutants.sort(key=lambda mutant: mutant.source)
        print(f"{len(mutants)} mutants by --seed {seed}", flush=True)
    if asked.list:
        print(*mutants, sep="\n")
        return 0
    for name in BESIDE_PYTEST:
        importlib.import_module(name)
    known = [mutant for mutant in mutants if mutant.reason is not None]
    survivors = try_all([mutant for mutant in mutants if mutant.reason is None], asked.jobs)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(each) for each in survivors], indent=1))
    n, n_killed = len(mutants) - len(known), len(mutants) - len(known) - len(survivors)
    for mutant in known:
        print(f"equivalent: {mutant}\n  {mutant.reason}")
    for mutant in survivors:
        print(f"survived: {mutant}")
    print(f"{n_killed} of {n} killed, {n_killed / max(n, 1):.1%}; {len(known)} equivalent ones were not tried")
    return int(n_killed < ENOUGH * n)


if __name__ == "__main__":
    sys.exit(main())
