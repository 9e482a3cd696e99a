"""The rules, by code; one file a group. Where several match a survivor, the first in SURVIVAL is its finding."""

from lowtide.diagnostics.leaks.finding import Rule
from lowtide.diagnostics.leaks.rules.carried_state import CARRIED_STATE
from lowtide.diagnostics.leaks.rules.duplicate_inputs import BATCH_TWICE
from lowtide.diagnostics.leaks.rules.growing_containers import GROWING_LIST, LIST_OF_GRAPHS, SUM_OF_GRAPHS
from lowtide.diagnostics.leaks.rules.interpreter import EXCEPTION, NOTEBOOK
from lowtide.diagnostics.leaks.rules.long_lived_outputs import ALIVE_AT_NEXT_FORWARD, ALIVE_DURING_BACKWARD
from lowtide.diagnostics.leaks.rules.retained_graphs import CREATE_GRAPH, PARTIAL_BACKWARD, RETAIN_GRAPH
from lowtide.diagnostics.leaks.rules.small_views import PINNING_VIEW
from lowtide.diagnostics.leaks.rules.stale_gradients import SET_TO_ZERO, ZERO_GRAD_LATE
from lowtide.diagnostics.leaks.rules.stored_tensors import BUFFER, CONTEXT_ATTRIBUTE, HOOK, MODULE_ATTRIBUTE
from lowtide.diagnostics.leaks.rules.unreached_graphs import BACKWARD_SKIPPED, NO_GRAD_MISSING
from lowtide.diagnostics.leaks.rules.weight_graphs import OF_WEIGHTS

SURVIVAL = (
    EXCEPTION,
    NOTEBOOK,
    CREATE_GRAPH,
    BUFFER,
    HOOK,
    MODULE_ATTRIBUTE,
    CONTEXT_ATTRIBUTE,
    CARRIED_STATE,
    SUM_OF_GRAPHS,
    LIST_OF_GRAPHS,
    RETAIN_GRAPH,
    PARTIAL_BACKWARD,
    OF_WEIGHTS,
    BACKWARD_SKIPPED,
    PINNING_VIEW,
    GROWING_LIST,
    ALIVE_AT_NEXT_FORWARD,
)
EVENTS = (NO_GRAD_MISSING, ALIVE_DURING_BACKWARD, ZERO_GRAD_LATE, SET_TO_ZERO, BATCH_TWICE)
RULES: dict[str, Rule] = {rule.code: rule for rule in sorted((*SURVIVAL, *EVENTS), key=lambda rule: rule.code)}
