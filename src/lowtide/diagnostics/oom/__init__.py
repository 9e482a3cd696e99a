"""`lowtide explain`: cause and remedy of out-of-memory errors, from the numbers in messages of many programs."""

from lowtide.diagnostics.oom.explanation import Explanation as Explanation
from lowtide.diagnostics.oom.explanation import explain as explain
