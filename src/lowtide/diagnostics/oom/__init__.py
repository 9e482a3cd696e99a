"""`lowtide explain`: reads the numbers of an out-of-memory message of any version and library, and finds cause and
remedy.
"""

from lowtide.diagnostics.oom.explanation import Explanation as Explanation
from lowtide.diagnostics.oom.explanation import explain as explain
