"""Print docs/findings.md, which is generated from the rules: `python tools/findings_page.py > docs/findings.md`."""

from __future__ import annotations

import sys

from lowtide.diagnostics.leaks.rules import RULES, Rule

_HEAD = """# Findings of `lowtide watch`

All mistakes in a training loop that `lowtide watch` reports: tensors and graphs that stay in memory longer than
needed, work done for nothing, and checkpoints that change results. Codes are stable; a retired code is never reused.
This page is generated from the rules: `python tools/findings_page.py > docs/findings.md`.

```python
with lowtide.watch(model) as watched:
    for batch in loader:
        ...
print(watched)
```

`lowtide watch train.py` does the same for an unmodified script; its exit code is 1 if there are findings. A step begins
when a model is called after an update; in a loop that calls no module, at its first backward pass after an update.
A finding is reported if it holds at least 16 KiB and 1 % of the memory of a forward's graph; an output, 5 %.

Watching takes time mainly in the first five steps, which are inspected closely: 0.35 s in all for the demo's GPT-2. Its
later steps take as long as without the watch (within 3 %, `python bench/watch.py`). A loop of tiny steps (0.2 ms) takes
2.1 times as long, and 5.6 times under `lowtide.measure` (`--tiny`).

In the fixes below, `NAME` stands for the variable, attribute or container that holds the memory, and train.py:42 for
the line to look at. A real finding names both.
"""

_REMEDIES = {"LT024": "run the forward at train.py:42 under `torch.no_grad()`"}


def page() -> str:
    """Return the text of docs/findings.md."""
    rules = sorted(RULES.values(), key=lambda rule: rule.code)
    index = "\n".join(f"| [{rule.code}](#{_anchor(rule)}) | {rule.name} |" for rule in rules)
    return "\n".join([_HEAD, f"| code | finding |\n|---|---|\n{index}\n", *map(_section, rules)])


def _section(rule: Rule) -> str:
    remedy = _REMEDIES.get(rule.code, "")
    names = dict.fromkeys(("name", "names", "owner"), "NAME")
    places = {"made": "train.py:42", "backward": "train.py:43"}
    fix = rule.fix.format(**names, **places, release="`del NAME`", remedy=remedy)
    return (
        f"## {rule.code} {rule.name}\n\n{rule.what}\n\n**Why it is bad.** {rule.why}\n\n"
        f"```python\n{rule.bad}\n```\n\nUse instead:\n\n```python\n{rule.good}\n```\n\n**Fix**, as reported: {fix}\n"
    )


def _anchor(rule: Rule) -> str:
    """Return the anchor that GitHub makes from a rule's heading."""
    kept = (c for c in f"{rule.code} {rule.name}".lower() if c.isalnum() or c in " -_")
    return "".join(kept).replace(" ", "-")


if __name__ == "__main__":
    sys.stdout.write(page())
