"""Rehearse a script on a GPU that the machine does not have: two of its steps on fake tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.estimator.fake_rehearsal import AbsentGpuRehearsal
from lowtide.script.estimate_steps import StepEstimator, run_on_fakes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from lowtide.estimator.absent_processes import AbsentProcesses
    from lowtide.estimator.two_step_run import TwoStepRun
    from lowtide.memory.gpu_specs import GpuSpec
    from lowtide.planner.records import Profile
    from lowtide.script.runner import Script


class FakeRehearsing(StepEstimator):
    """A listener that audits the script's first step on fake tensors, traces the second one, and ends the script."""

    profile: Profile | None = None
    accepts_one_step = False

    def _run(self, model: nn.Module, batch: Sequence[Tensor], reached: tuple[Any, ...]) -> TwoStepRun:
        assert self._gpu is not None
        run = AbsentGpuRehearsal(self._gpu, model, batch, reached, **self._on_gpu())
        run.expect(batch)
        return run

    def _answer(self, run: TwoStepRun, n_passes: int) -> None:
        assert isinstance(run, AbsentGpuRehearsal)
        self.profile = run.to_profile()


def rehearse_script(
    script: Script, gpu: GpuSpec, processes: AbsentProcesses | None = None
) -> tuple[int, Profile | None]:
    """Rehearse two steps of `script` on fake tensors, as on `gpu` and as one of `processes`.

    Returns the script's exit code, and the profile if both steps ran.
    """
    listener = FakeRehearsing(gpu, None, lambda: None, processes)
    return run_on_fakes(script, listener, gpu, processes), listener.profile
