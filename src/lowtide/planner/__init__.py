"""From what a step does with memory to what to do about it: records, the simulator, the solvers. Needs no torch."""

from lowtide.planner.planning import plan as plan
from lowtide.planner.planning import smallest_peak as smallest_peak
from lowtide.planner.simulate.simulator import predict as predict
