"""A labelled step: every block that matters at the peak has a name, and the sums are the measured ones."""

from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from models import build, same, state


def test_the_peak_is_the_rehearsed_one_and_has_names():
    case = build("gpt2 fused")
    known = state(case)
    timeline = lowtide.timeline(case.model, case.step, case.batch)
    assert same(known, state(case))
    profile = lowtide.rehearse(case.model, case.step, case.batch)
    assert timeline.peak_bytes == profile.measured_plain_peak_bytes - profile.static.total
    alive = timeline.alive_at_peak()
    assert sum(block.bytes for blocks in alive.values() for block in blocks) == timeline.peak_bytes
    modules = {block.label.module for block in alive["activations"]}
    assert {f"transformer.h.{i}.mlp.c_proj" for i in range(3)} <= modules
    logits = 4 * 64 * 500 * 4  # batch x tokens x vocabulary, float32
    assert any(block.bytes == logits for block in alive["loss head"])


def test_phases_and_what_a_step_leaves():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch):
        model(batch).sum().backward()
        optimizer.step()

    timeline = lowtide.timeline(model, step, torch.randn(32, 64))
    assert [phase.name for phase in timeline.phases if phase.name] == ["forward", "backward", "optimizer"]
    assert {label.category for label in timeline.labels.values()} >= {"activations"}


def test_outputs_that_selective_checkpointing_keeps_are_activations():
    def keeps_products(context, func, *args, **kwargs):
        is_kept = func is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(64, 128)

        def forward(self, x):
            contexts = partial(create_selective_checkpoint_contexts, keeps_products)
            return checkpoint(lambda x: self.linear(x).tanh().sum(), x, use_reentrant=False, context_fn=contexts)

    model, batch = Block(), torch.randn(32, 64)
    timeline = lowtide.timeline(model, lambda batch: model(batch).backward(), batch)
    first = timeline.phases[0]
    kept = [block for block in timeline.alive_at(first.stop - 1) if block.bytes == 32 * 128 * 4]
    assert [block.category for block in kept] == ["activations"]
    assert kept[0].name == "aten::addmm"


def test_under_a_plan_the_peak_is_lower():
    case = build("gpt2")
    with lowtide.fit(case.model, case.step, case.batch, budget="75%") as fitted:
        plan = fitted.plan
    plain = lowtide.timeline(case.model, case.step, case.batch)
    planned = lowtide.timeline(case.model, case.step, case.batch, plan=plan)
    assert planned.peak_bytes + fitted.profile.static.total == fitted.verdict.measured_peak_bytes
    assert planned.peak_bytes < plain.peak_bytes
