"""Count two habits in the package's docstrings and comments, and fail where there are more than pyproject.toml allows.

Indirect questions are docstrings that open with a question word ("Whether it fits"), or have one right after the
first verb ("Return how many fit"), where a verb and a noun would do ("Return True if it fits", "Count those that fit").
Indefinite persons are words such as "nobody" in place of the part of the program that acts.

    python tools/prose.py          # from the root of the repository
    python tools/prose.py --list   # and each place
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]

QUESTION_WORDS = frozenset({"what", "whether", "how", "where", "who", "which", "why"})
WORD = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*")
PERSON = re.compile(r"\b(?:nobody|somebody|anybody|whoever|someone|anyone|no\s+one)\b", re.IGNORECASE)


@dataclass(slots=True)
class Counts:
    """Numbers of docstrings and words, and the places of indirect questions and of indefinite persons."""

    docstrings: int = 0
    words: int = 0
    questions: list[str] = field(default_factory=list)
    persons: list[str] = field(default_factory=list)

    @property
    def questions_percent(self) -> float:
        """Number of indirect questions in 100 docstrings."""
        return 100 * len(self.questions) / max(1, self.docstrings)

    @property
    def persons_in_10000(self) -> float:
        """Number of indefinite persons in 10,000 words."""
        return 10_000 * len(self.persons) / max(1, self.words)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring: of the file, of classes and functions, and of assignments."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for before, statement in zip([None, *body], body, strict=False):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    if (before is None and documented) or isinstance(before, ast.Assign | ast.AnnAssign):
                        yield statement.lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#")


def is_question(docstring: str) -> bool:
    """Return True if the first or the second word of a docstring is a question word."""
    return not QUESTION_WORDS.isdisjoint(word.lower() for word in WORD.findall(docstring)[:2])


def count(sources: Iterable[tuple[str, str]]) -> Counts:
    """Count indirect questions and indefinite persons in Python sources.

    Args:
        sources: Pairs of a name, by which places are listed, and the source.
    """
    counts = Counts()
    for name, source in sources:
        documented = list(docstrings(source))
        counts.docstrings += len(documented)
        for line, text in documented:
            if is_question(text):
                counts.questions.append(f"{name}:{line}: {text.strip().splitlines()[0]}")
        for line, text in [*documented, *comments(source)]:
            counts.words += len(WORD.findall(text))
            for found in PERSON.finditer(text):
                counts.persons.append(f"{name}:{line + text.count(chr(10), 0, found.start())}: {found.group()}")
    return counts


def main(arguments: list[str]) -> int:
    """Print the counts of indirect questions and indefinite persons beside their limits; return 1 if one is above its
    limit.
    """
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["lowtide-prose"]
    paths = sorted((ROOT / "src").rglob("*.py"))
    counts = count((path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths)
    over = False
    for habit, amount, unit, limit, places in (
        ("indirect questions", counts.questions_percent, "% of docstrings", "max_questions_percent", counts.questions),
        ("indefinite persons", counts.persons_in_10000, "in 10,000 words", "max_persons", counts.persons),
    ):
        is_over = amount > limits[limit]
        over |= is_over
        if is_over or "--list" in arguments:
            print(*places, sep="\n")
        print(f"prose: {len(places)} {habit}, {amount:.1f} {unit}; {limit} is {limits[limit]}")
    return int(over)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
