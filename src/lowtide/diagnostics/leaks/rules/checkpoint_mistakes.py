"""Mistakes with `torch.utils.checkpoint`, which cost gradients or statistics rather than memory."""

from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT026",
    name="checkpoint recomputes the wrong block",
    what="In backward, `torch.utils.checkpoint` runs a different module than forward did: a function defined in a "
    "loop looks up the loop variable when it is called, and during backward that variable is the last block.",
    why="No error is raised, but the gradients belong to a different function: blocks get wrong gradients, or none.",
    bad="for block in blocks:\n    x = checkpoint(lambda t: t + block(t), x, use_reentrant=False)",
    good="for block in blocks:\n    x = checkpoint(lambda t, block=block: t + block(t), x, use_reentrant=False)",
    fix="gradients are wrong: bind the block when the function is defined (`def f(t, block=block): ...`), or pass it "
    "as an argument: `checkpoint(f, x, block)`",
)
class OtherBlock(Rule):
    """Rule for a checkpoint that runs other modules in backward than in forward, recorded in backward."""


@rule(
    "LT027",
    name="running statistics counted twice by a checkpoint",
    what="A checkpointed block updates buffers during training (BatchNorm, or a codebook with running averages): once "
    "in forward, and again when backward recomputes the block.",
    why="Each batch counts twice: `num_batches_tracked` doubles, and running statistics move at nearly twice the "
    "momentum, so the model evaluates differently from one trained without checkpointing.",
    bad="x = checkpoint(nn.Sequential(conv, batch_norm, relu), x, use_reentrant=False)",
    good="x = batch_norm(checkpoint(conv, x, use_reentrant=False))",
    fix=(
        "move `{name}` outside the checkpointed part; for BatchNorm, a momentum of 1 - sqrt(1 - momentum) also "
        "works. `lowtide.fit` restores the statistics when it recomputes"
    ),
)
class CountedTwice(Rule):
    """Rule for buffers that a checkpointed block updates in forward and again in backward, recorded in backward."""


@rule(
    "LT028",
    name="reentrant checkpoint whose inputs need no gradient",
    what=(
        "No input of `checkpoint(..., use_reentrant=True)` requires a gradient, although the block has trainable "
        "parameters: usually the first block after a frozen embedding."
    ),
    why="Without such an input, a reentrant checkpoint records no graph: its parameters get no gradient and do not "
    "train.",
    bad="x = checkpoint(block, embedded, use_reentrant=True)",
    good="x = checkpoint(block, embedded, use_reentrant=False)",
    fix="set `use_reentrant=False` (in transformers: gradient_checkpointing_kwargs={{'use_reentrant': False}}), or "
    "call `model.enable_input_require_grads()`",
)
class LostGradients(Rule):
    """Rule for checkpointed blocks whose parameters get no gradient, recorded when the block is called."""
