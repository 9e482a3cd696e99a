"""Why memory ran out: messages of every version and kind as numbers, the most likely cause, and what to do."""

from lowtide.diagnostics.oom.explanation import Explanation as Explanation
from lowtide.diagnostics.oom.explanation import explain as explain
