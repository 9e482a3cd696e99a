"""Plan a step from its recorded memory: records, the simulator, the solvers. Needs no torch."""

from lowtide.planner.planning import find_smallest_peak as find_smallest_peak
from lowtide.planner.planning import plan as plan
from lowtide.planner.simulate.simulator import predict as predict
