"""The rules of `watch`, one file per group. Importing this package registers all of them."""

from lowtide.diagnostics.leaks.rules import carried_state as carried_state
from lowtide.diagnostics.leaks.rules import checkpoint_mistakes as checkpoint_mistakes
from lowtide.diagnostics.leaks.rules import duplicate_inputs as duplicate_inputs
from lowtide.diagnostics.leaks.rules import growing_containers as growing_containers
from lowtide.diagnostics.leaks.rules import interpreter as interpreter
from lowtide.diagnostics.leaks.rules import long_lived_outputs as long_lived_outputs
from lowtide.diagnostics.leaks.rules import retained_graphs as retained_graphs
from lowtide.diagnostics.leaks.rules import small_views as small_views
from lowtide.diagnostics.leaks.rules import stale_gradients as stale_gradients
from lowtide.diagnostics.leaks.rules import stored_tensors as stored_tensors
from lowtide.diagnostics.leaks.rules import unreached_graphs as unreached_graphs
from lowtide.diagnostics.leaks.rules import weight_graphs as weight_graphs
from lowtide.diagnostics.leaks.rules.rule_registry import RULES as RULES
from lowtide.diagnostics.leaks.rules.rule_registry import Rule as Rule
