"""Causes of an out-of-memory error: messages of every version and kind as numbers, the likely cause, and remedies."""

from lowtide.diagnostics.oom.explanation import Explanation as Explanation
from lowtide.diagnostics.oom.explanation import explain as explain
