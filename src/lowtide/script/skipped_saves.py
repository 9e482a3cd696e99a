"""Skip a script's calls that save files once its tensors are fake, so that no real checkpoint is overwritten."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Self
from unittest.mock import patch

SAVERS = {
    "torch": ("save",),
    "torch.distributed.checkpoint": ("save", "async_save", "save_state_dict"),
    "safetensors.torch": ("save_file", "save_model"),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained",),
    "transformers.trainer": ("Trainer._save_checkpoint", "Trainer.save_model"),
    "accelerate.accelerator": ("Accelerator.save", "Accelerator.save_model", "Accelerator.save_state"),
    "peft.peft_model": ("PeftModel.save_pretrained",),
    "diffusers.models.modeling_utils": ("ModelMixin.save_pretrained",),
    "diffusers.pipelines.pipeline_utils": ("DiffusionPipeline.save_pretrained",),
}
"""Functions and methods that save, by module. `Trainer._save_checkpoint` also deletes older checkpoints."""


class Saved(Future[None]):
    """Result of a skipped save: a finished future, which also serves as the response of `async_save`."""

    def __init__(self) -> None:
        super().__init__()
        self.staging_completion = self.upload_completion = self
        self.set_result(None)


class SkippedSaves(contextlib.ExitStack):
    """Context in which functions that save files do nothing, once `begin` was called."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: dict[str, None] = {}
        """Names of the savers that were called; the keys are ordered."""

    def begin(self, note: Callable[[str], object]) -> Self:
        """Replace the saving functions of all modules imported so far; `note` gets a line for each skipped call."""
        functions: dict[int, Callable[..., Any]] = {}
        for place, names in SAVERS.items():
            for name in names if place in sys.modules else ():
                *path, last = name.split(".")
                owner = operator.attrgetter(*path)(sys.modules[place]) if path else sys.modules[place]
                saver = getattr(owner, last, None)
                if saver is None:
                    continue
                shown = f"{place.split('.')[0] if path else place}.{name}"
                skip = functions[id(saver)] = self._skipping(saver, shown, note)
                if path:
                    self.enter_context(patch.object(owner, last, skip))
        for module, name, skip in [*_find_bindings(functions)]:
            self.enter_context(patch.object(module, name, skip))
        return self

    def _skipping(self, saver: Callable[..., Any], name: str, note: Callable[[str], object]) -> Callable[..., Saved]:
        @functools.wraps(saver)
        def skip(*args: Any, **kwargs: Any) -> Saved:
            self.skipped[name] = None
            note(f"{name} is left out")
            return Saved()

        return skip


def _find_bindings(functions: dict[int, Callable[..., Any]]) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield the module, name and replacement of each global variable whose value has its id among `functions`."""
    for module in [*sys.modules.values()]:
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict) and not functions.keys().isdisjoint(map(id, [*namespace.values()])):
            for name, value in [*namespace.items()]:
                if id(value) in functions:
                    yield module, name, functions[id(value)]
