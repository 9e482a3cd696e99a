"""Writes docs/findings.md from the rules; `python -m lowtide.diagnostics.leaks.rules.findings_page` prints it."""

from __future__ import annotations

import sys

from lowtide.diagnostics.leaks.finding import Rule
from lowtide.diagnostics.leaks.rules import RULES

_HEAD = """# Findings of `lowtide watch`

What the watch can find in a training loop. Codes stay; a code that is given up is not used again. This page is made
from the rules: `python -m lowtide.diagnostics.leaks.rules.findings_page > docs/findings.md`.

```python
with lowtide.watch(model) as watched:
    for batch in loader:
        ...
print(watched)
```

`lowtide watch train.py` does the same for a script that nobody edits; its exit code is 1 if something was found.
Nothing below 16 KiB or 1 % of a forward's graph is said, and no output below 5 %.
"""


def page() -> str:
    """The whole page."""
    index = "\n".join(f"| [{rule.code}](#{_anchor(rule)}) | {rule.name} |" for rule in RULES.values())
    return "\n".join([_HEAD, f"| code | finding |\n|---|---|\n{index}\n", *map(_section, RULES.values())])


def _section(rule: Rule) -> str:
    fix = rule.fix.format(name="x", names="x", made="train.py:42", backward="train.py:43")
    return (
        f"## {rule.code} {rule.name}\n\n{rule.what}\n\n**Why it is bad.** {rule.why}\n\n"
        f"```python\n{rule.bad}\n```\n\nUse instead:\n\n```python\n{rule.good}\n```\n\n**Fix**, as it is said: {fix}\n"
    )


def _anchor(rule: Rule) -> str:
    """As GitHub makes them of headings."""
    kept = (c for c in f"{rule.code} {rule.name}".lower() if c.isalnum() or c in " -_")
    return "".join(kept).replace(" ", "-")


if __name__ == "__main__":
    sys.stdout.write(page())
