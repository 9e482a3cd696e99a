"""Write docs/api.md, the page of all public names: python tools/api_page.py > docs/api.md."""

import lowtide

_GROUPS = {
    "Fit a step or a loop": ("fit", "within", "fitted", "remove", "Fitted", "FittedSizes", "Run", "RunVerdict"),
    "The stages": ("rehearse", "plan", "apply", "verify", "frontier"),
    "Records": ("Profile", "Plan", "Applied", "Verdict", "Frontier", "RunRecord"),
    "Estimate without the GPU": ("estimate", "largest_batch", "MemoryEstimate", "GpuMemoryEstimate", "LargestBatch"),
    "Measure, watch and explain": ("measure", "timeline", "graph", "watch", "Watch", "explain_oom"),
    "Free graphs, accumulate": ("release", "step", "loss_only", "accumulate", "micro_batches"),
}


def page() -> str:
    """Return the page: a heading for each group, a directive for each name, and errors and ungrouped names last."""
    grouped = {name for names in _GROUPS.values() for name in names}
    others = [name for name in lowtide.__all__ if name not in grouped and not name.startswith("_")]
    errors = [name for name in others if _is_error(name)]
    groups = {**_GROUPS, "Errors": errors, "More": [name for name in others if name not in errors]}
    lines = ["# API reference", "", "Everything that `import lowtide` gives. Bytes are whole numbers.", ""]
    for title, names in groups.items():
        if names:
            lines += [f"## {title}", "", *(line for name in names for line in _directive(name))]
    return "\n".join(lines)


def _directive(name: str) -> list[str]:
    kind = "exception" if _is_error(name) else "class" if isinstance(getattr(lowtide, name), type) else "function"
    members = [":members:"] if kind == "class" else []
    return ["```{eval-rst}", f".. auto{kind}:: lowtide.{name}", *(f"   {line}" for line in members), "```", ""]


def _is_error(name: str) -> bool:
    value = getattr(lowtide, name)
    return isinstance(value, type) and issubclass(value, BaseException)


if __name__ == "__main__":
    print(page(), end="")
