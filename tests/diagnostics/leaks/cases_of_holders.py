"""Objects of many kinds that gather a model's outputs: each is named, with the part of it that holds the memory."""

from __future__ import annotations

from diagnostics.leaks.cases import FLOAT, Case  # type: ignore[import-not-found]

LOOP = """
{setup}
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(8):
    output = model(torch.randn(64, 64))
    output.square().mean().backward()
    value = output.detach()
    del output
    {{}}
    del value
    optimizer.step()
    optimizer.zero_grad()
"""


def case(name: str, *, setup: str, keep: str, holder: str, part: str, made: str = "output = model(") -> Case:
    """Return the case of an object that keeps all outputs, and their means once it is mended."""
    script = LOOP.format(setup=setup.strip("\n").replace("{", "{{").replace("}", "}}"))
    return Case(
        name=name,
        script=script,
        broken=(keep,),
        mended=(keep.replace("value)", "value.mean().item())").replace("= value", "= value.mean().item()"),),
        code="LT021",
        holder=holder,
        made=made,
        held_bytes=8 * 64 * 256 * FLOAT,
        fix=f"store less in `{part}`",
    )


CASES = [
    case(
        "array_of_objects_on_an_object",
        setup="""
import numpy as np
class Log:
    def __init__(self): self.kept = np.empty(100, dtype=object)
log = Log()
""",
        keep="log.kept[n] = value",
        holder="'log' -> .kept[8 entries]",
        part="log.kept",
    ),
    case(
        "tuples_in_an_array_of_objects",
        setup="import numpy as np\nkept = np.empty((10, 10), dtype=object)",
        keep="kept[n, 0] = (n, value)",
        holder="ndarray 'kept' [8 entries][1]",
        part="kept[..][1]",
    ),
    case(
        "data_class_with_slots",
        setup="""
from dataclasses import dataclass, field
@dataclass(slots=True)
class Log:
    kept: list = field(default_factory=list)
log = Log()
""",
        keep="log.kept.append(value)",
        holder="'log' -> .kept[8 entries]",
        part="log.kept",
    ),
    case(
        "data_classes_in_a_list",
        setup="""
from dataclasses import dataclass
@dataclass(slots=True)
class Step:
    number: int
    value: object
steps = []
""",
        keep="steps.append(Step(n, value))",
        holder="list 'steps' [8 entries].value",
        part="steps[..].value",
    ),
    case(
        "queue_without_a_limit",
        setup="from collections import deque\nkept = deque()",
        keep="kept.append(value)",
        holder="deque 'kept' [8 entries]",
        part="kept",
    ),
    case(
        "lists_by_name",
        setup="from collections import defaultdict\nkept = defaultdict(list)",
        keep="kept['output'].append(value)",
        holder="list 'kept' ['output'][8 entries]",
        part="kept['output']",
    ),
    case(
        "lists_by_number",
        setup="from collections import defaultdict\nkept = defaultdict(list)",
        keep="kept[n % 2].append(value)",
        holder="dict 'kept' [2 entries][4 entries]",
        part="kept",
    ),
    case(
        "lists_by_number_and_name",
        setup="from collections import defaultdict\nkept = defaultdict(lambda: defaultdict(list))",
        keep="kept[n % 2]['output'].append(value)",
        holder="dict 'kept' [2 entries]['output'][4 entries]",
        part="kept",
    ),
    case(
        "variable_that_a_function_joins_outputs_to",
        setup="""
def joiner():
    total = torch.empty(0, 256)
    def log(value):
        nonlocal total
        total = torch.cat([total, torch.as_tensor(value).expand(64 if hasattr(value, "shape") else 1, 256)])
    return log
log = joiner()
""",
        keep="log(value)",
        holder="closure of 'joiner.<locals>.log' at ",
        part="total",
        made="",
    ),
    case(
        "list_that_a_function_assigns_anew",
        setup="""
def logger():
    seen = []
    def log(value):
        nonlocal seen
        seen = seen + [value]
    return log
log = logger()
""",
        keep="log(value)",
        holder="its variable 'seen' -> [8 entries]",
        part="seen",
    ),
    case(
        "attribute_of_a_function",
        setup="def log(value): log.seen.append(value)\nlog.seen = []",
        keep="log(value)",
        holder="'log' -> .seen[8 entries]",
        part="log.seen",
    ),
    case(
        "variables_of_a_thread",
        setup="import threading\nlocal = threading.local()\nlocal.kept = []",
        keep="local.kept.append(value)",
        holder="'local' -> .kept[8 entries]",
        part="local.kept",
    ),
    case(
        "context_variable",
        setup="from contextvars import ContextVar\nkept = ContextVar('kept')\nkept.set([])",
        keep="kept.get().append(value)",
        holder="context variable 'kept' -> [8 entries]",
        part="kept.get()",
    ),
    case(
        "variables_of_a_running_thread",
        setup="""
import queue, threading
values = queue.Queue()
def work():
    seen = []
    while True:
        seen.append(values.get())
        values.task_done()
threading.Thread(target=work, daemon=True).start()
""",
        keep="values.put(value); values.join()",
        holder="list 'seen' [8 entries]",
        part="seen",
    ),
    case(
        "variables_of_a_coroutine",
        setup="""
import asyncio
async def work(values):
    seen = []
    while True:
        seen.append(await values.get())
loop, values = asyncio.new_event_loop(), asyncio.Queue()
task = loop.create_task(work(values))
""",
        keep="values.put_nowait(value); loop.run_until_complete(asyncio.sleep(0))",
        holder="coroutine 'work', its variable 'seen' -> [8 entries]",
        part="seen",
    ),
]
