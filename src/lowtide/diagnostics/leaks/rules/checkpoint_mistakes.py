"""Mistakes with `torch.utils.checkpoint`, which cost gradients or statistics rather than memory."""

from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT026",
    name="checkpoint recomputes another block",
    what="In backward, `torch.utils.checkpoint` runs another module than forward ran: a function made in a loop reads "
    "the loop's variable only when it is called, and by then it names the last block.",
    why="Gradients are those of another function, without any error: blocks train on wrong gradients, or on none.",
    bad="for block in blocks:\n    x = checkpoint(lambda t: t + block(t), x, use_reentrant=False)",
    good="for block in blocks:\n    x = checkpoint(lambda t, block=block: t + block(t), x, use_reentrant=False)",
    fix="gradients are wrong: bind the block when the function is made (`def f(t, block=block): ...`), or pass it to "
    "`checkpoint(f, x, block)`",
)
class OtherBlock(Rule):
    """Rule for another block in backward, recorded when the modules called there differ from those of forward."""


@rule(
    "LT027",
    name="running statistics counted twice by a checkpoint",
    what="A checkpointed block updates buffers in training, as BatchNorm and codebooks with running averages do: in "
    "forward, and again when backward recomputes the block.",
    why="Each batch counts twice: `num_batches_tracked` is doubled, and running statistics move at nearly twice the "
    "momentum, so evaluation differs from a model trained without checkpointing.",
    bad="x = checkpoint(nn.Sequential(conv, batch_norm, relu), x, use_reentrant=False)",
    good="x = batch_norm(checkpoint(conv, x, use_reentrant=False))",
    fix=(
        "leave `{name}` outside the checkpointed part; for BatchNorm, a momentum of 1 - sqrt(1 - momentum) also "
        "works. Recomputation by `lowtide.fit` restores the statistics"
    ),
)
class CountedTwice(Rule):
    """Rule for buffers that forward has updated, recorded when backward updates them again."""


@rule(
    "LT028",
    name="reentrant checkpoint whose inputs need no gradient",
    what=(
        "`checkpoint(..., use_reentrant=True)` is given no tensor that needs a gradient, and its block has trained "
        "parameters: usually the first block after a frozen embedding."
    ),
    why="The reentrant checkpoint records nothing then: parameters inside it get no gradient and are not trained.",
    bad="x = checkpoint(block, embedded, use_reentrant=True)",
    good="x = checkpoint(block, embedded, use_reentrant=False)",
    fix="`use_reentrant=False` (in transformers: gradient_checkpointing_kwargs={{'use_reentrant': False}}), or "
    "`model.enable_input_require_grads()`",
)
class LostGradients(Rule):
    """Rule for checkpointed blocks whose parameters get no gradient, recorded when the block is called."""
