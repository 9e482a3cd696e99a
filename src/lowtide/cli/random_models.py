"""Models of transformers with random weights on the meta device, and estimates of a training step of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowtide.cli.demo.demo_packages import need
from lowtide.errors import LowtideError
from lowtide.estimator.cuda.absent_gpu_run import estimate_on
from lowtide.estimator.unrehearsed_plans import How, build_engine

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate
    from lowtide.memory.gpu_specs import GpuSpec

DEFAULT_SEQ = 1024
"""Default tokens in a row; fewer if the model takes fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """A model on the meta device, and `batch_of`, which makes a batch of a given size."""

    model: nn.Module
    batch_of: Callable[[int], dict[str, Tensor]]
    bf16: bool
    about: str
    """The model and its step, in words."""

    def estimate_at(self, gpu: GpuSpec, size: int, how: How) -> GpuMemoryEstimate:
        """Estimate the memory of a step with AdamW on `gpu`; `how` says if and what the step recomputes."""
        model, batch = self.model, self.batch_of(size)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(batch: dict[str, Tensor]) -> None:
            autocast = torch.autocast("cuda", torch.bfloat16) if self.bf16 else contextlib.nullcontext()
            with autocast:
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return estimate_on(gpu, model, step, batch, optimizer=optimizer, engine=build_engine(how, model))


def build_random_model(architecture: str, *, layers: int | None, seq: int | None, bf16: bool) -> RandomModel:
    """Build a transformers model on the meta device from an architecture's name, or from a folder with a configuration.

    Raises LowtideError for an unknown architecture, and for more tokens than the model takes.
    """
    transformers = need("transformers")
    config = _config(transformers, architecture, layers)
    kind = _find_trained_class(transformers, config)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    with torch.device("meta"):
        model = kind.from_config(config)
    model.train()
    n_weights = sum(parameter.numel() for parameter in model.parameters())
    if kind is transformers.AutoModelForImageClassification:
        side = int(config.image_size)
        shape: tuple[int, ...] = (int(config.num_channels), side, side)
        given = f"images of {side} x {side}"

        def batch_of(size: int) -> dict[str, Tensor]:
            return {"pixel_values": torch.empty(size, *shape), "labels": torch.zeros(size, dtype=torch.long)}

    else:
        length = _length(config, architecture, seq)
        given = f"{length} tokens a row"

        def batch_of(size: int) -> dict[str, Tensor]:
            tokens = torch.zeros(size, length, dtype=torch.long)
            return {"input_ids": tokens, "labels": tokens.clone()}

    precision = "bf16 autocast" if bf16 else "float32"
    about = f"{type(model).__name__}, {n_weights / 1e6:,.0f} million parameters, {given}, {precision}, AdamW"
    return RandomModel(model=model, batch_of=batch_of, bf16=bf16, about=about)


def _config(transformers: Any, architecture: str, layers: int | None) -> Any:
    path = Path(architecture)
    known = [*transformers.CONFIG_MAPPING.keys()]
    if path.exists():
        try:
            config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise LowtideError(f"{architecture} has no configuration that transformers reads: {error}") from error
    elif architecture in known:
        config = transformers.AutoConfig.for_model(architecture)
    else:
        near = get_close_matches(architecture.rpartition("/")[2].lower(), known, n=3, cutoff=0.4)
        raise LowtideError(
            f"{architecture!r} is neither an architecture of transformers {transformers.__version__} nor a folder "
            "with a config.json.\n  "
            f"Nothing is downloaded. Nearest: {', '.join(near) or 'gpt2, bert, llama'}."
        )
    if layers is not None:
        if not hasattr(config, "num_hidden_layers"):
            raise LowtideError(f"{architecture} has no num_hidden_layers that --layers could set: leave --layers out.")
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[n % len(config.layer_types)] for n in range(layers)]
    return config


def _find_trained_class(transformers: Any, config: Any) -> Any:
    """Find the transformers class that computes a loss for models of `config`. Raises LowtideError if there is none."""
    kinds: tuple[str, ...] = ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForImageClassification")
    if config.is_encoder_decoder:
        kinds = ("AutoModelForSeq2SeqLM", *kinds)
    for name in kinds:
        kind = getattr(transformers, name)
        if type(config) in kind._model_mapping:
            return kind
    raise LowtideError(
        f"{config.model_type} is neither a language model nor an image classifier, so its loss is not known.\n"
        "  Write a training script, and give that: lowtide largest-batch train.py."
    )


def _length(config: Any, architecture: str, seq: int | None) -> int:
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if seq is not None and most is not None and seq > most:
        raise LowtideError(f"--seq {seq}: {architecture} takes at most {most} tokens a row.")
    return seq or min(DEFAULT_SEQ, most or DEFAULT_SEQ)
