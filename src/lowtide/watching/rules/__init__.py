"""The rules, by code; one file a group. Where several match a survivor, the first in SURVIVAL is its finding."""

from lowtide.watching.finding import Rule
from lowtide.watching.rules.carried import CARRIED_STATE
from lowtide.watching.rules.gathering import GROWING_LIST, LIST_OF_GRAPHS, SUM_OF_GRAPHS
from lowtide.watching.rules.gradients import SET_TO_ZERO, ZERO_GRAD_LATE
from lowtide.watching.rules.history import EXCEPTION, NOTEBOOK
from lowtide.watching.rules.inputs import BATCH_TWICE
from lowtide.watching.rules.outputs import ALIVE_AT_NEXT_FORWARD, ALIVE_DURING_BACKWARD
from lowtide.watching.rules.retained import CREATE_GRAPH, PARTIAL_BACKWARD, RETAIN_GRAPH
from lowtide.watching.rules.stores import BUFFER, CONTEXT_ATTRIBUTE, HOOK, MODULE_ATTRIBUTE
from lowtide.watching.rules.unreached import BACKWARD_SKIPPED, NO_GRAD_MISSING
from lowtide.watching.rules.views import PINNING_VIEW
from lowtide.watching.rules.weights import OF_WEIGHTS

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
