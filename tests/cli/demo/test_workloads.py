"""The demo's workloads: real data, real weights, equal builds, a loop that can be repeated bit by bit."""

import socket
from collections import Counter

import pytest
import torch
from torch import Tensor

from lowtide.cli.demo import text_batches as text
from lowtide.cli.demo.demo_packages import need, need_folder
from lowtide.cli.demo.models import BUILDERS, MINILM, VOCAB, find_tokens_in_use, load_minilm_tokenizer
from lowtide.cli.demo.training import compute_state_digests, digest, train
from lowtide.cli.demo.workloads import MODELS, Workload, workload
from lowtide.errors import PackageMissing

SMALL = {
    "gpt2": {"batch_size": 2, "length": 64, "layers": 2},
    "bert": {"batch_size": 4, "length": 64, "layers": 1},
    "llama": {"batch_size": 2, "length": 64, "layers": 1},
    "resnet": {"batch_size": 8, "length": 32, "layers": 1},
}
BY_DEFAULT = [pytest.param(name, marks=[pytest.mark.slow] * (name == "llama")) for name in MODELS]
CHECKPOINTED = [param for param in BY_DEFAULT if param.values != ("resnet",)]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a workload reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def built() -> dict[str, Workload]:
    """Workloads that tests have asked for, by name."""
    return {}


@pytest.fixture
def work(built: dict[str, Workload], request: pytest.FixtureRequest) -> Workload:
    name = request.param
    work = built[name] = built[name] if name in built else workload(name, **SMALL[name])
    work.reset()
    return work


every_model = pytest.mark.parametrize("work", BY_DEFAULT, indirect=True)
every_checkpointed_model = pytest.mark.parametrize("work", CHECKPOINTED, indirect=True)
gpt2 = pytest.mark.parametrize("work", ["gpt2"], indirect=True)
bert = pytest.mark.parametrize("work", ["bert"], indirect=True)
resnet = pytest.mark.parametrize("work", ["resnet"], indirect=True)


def weights() -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = need("safetensors.torch").load_file(need_folder(*MINILM) / "model.safetensors")
    return loaded


# --- builds ---------------------------------------------------------------------------------------------------------


@every_model
def test_two_builds_are_equal_bit_by_bit(work: Workload) -> None:
    again = workload(work.name, **SMALL[work.name])
    assert digest(again.tensors().items()) == digest(work.tensors().items())
    assert len(again.batches) == len(work.batches)
    for ours, theirs in zip(work.batches, again.batches, strict=True):
        assert digest(ours.items()) == digest(theirs.items())


def test_a_seed_decides_weights_and_order_and_nothing_outside() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second = (workload("resnet", seed=seed, batch_size=2, length=32, layers=1) for seed in (1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert digest(first.tensors().items()) != digest(second.tensors().items())
    assert digest(first.batches[0].items()) != digest(second.batches[0].items())


@every_model
def test_batches_share_a_shape_and_own_their_bytes(work: Workload) -> None:
    shapes = {tuple((key, value.dtype, value.shape) for key, value in batch.items()) for batch in work.batches}
    assert len(shapes) == 1
    for value in work.batches[0].values():
        assert value.untyped_storage().nbytes() == value.nbytes


def test_the_demo_sizes() -> None:
    width, vocab = 384, VOCAB
    norm = 2 * width
    block = 12 * width**2 + 9 * width + 2 * norm  # qkv, projection and a four times wider MLP, each with its bias
    head = width**2 + width + norm
    used = len(find_tokens_in_use(load_minilm_tokenizer())[1])
    parameters = {
        "gpt2": (vocab + 256) * width + 6 * block + norm,
        "bert": (used + 512 + 2) * width + norm + 4 * block + used + head,
        "llama": 2 * vocab * width + 6 * (4 * width**2 + 3 * 1024 * width + 2 * width) + width,
    }
    items = {"gpt2": 8 * 256, "bert": 14 * 128, "llama": 8 * 256, "resnet": 144}
    for name in MODELS:
        full = workload(name)
        assert full.items_per_step == items[name]
        if name == "resnet":
            assert full.batches[0]["pixel_values"].shape == (144, 1, 8, 8)
            assert sum("BatchNorm2d" in type(module).__name__ for module in full.model.modules()) == 1 + 30 + 3
        else:
            usual = BUILDERS[name][1]
            assert full.batches[0]["input_ids"].shape == (usual.batch_size, usual.length)
            assert sum(parameter.numel() for parameter in full.model.parameters()) == parameters[name]


def test_a_wrong_name_or_size_is_refused() -> None:
    with pytest.raises(ValueError, match="take one of gpt2, bert, llama, resnet"):
        workload("gpt3")
    with pytest.raises(ValueError, match=r"a batch of 10000 rows .* the data has 1797"):
        workload("resnet", batch_size=10000, length=8, layers=1)


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    for missing in (lambda: need("no_such_package.part"), lambda: need_folder("no_such_package", "model")):
        with pytest.raises(PackageMissing, match=r"no.such.package[\s\S]*pip install \"lowtide\[demo\]\""):
            missing()
    with pytest.raises(PackageMissing, match="it has no folder no_such_folder"):
        need_folder("transformers", "no_such_folder")


# --- data -----------------------------------------------------------------------------------------------------------


@gpt2
def test_gpt2_reads_the_python_reference(work: Workload) -> None:
    topics = text.read_python_reference()
    tokenizer = text.train_bpe(topics, VOCAB)
    assert tokenizer.get_vocab_size() == VOCAB
    whole = "".join(topic + text.END for topic in topics)
    for row in work.batches[0]["input_ids"]:
        assert tokenizer.decode(row.tolist(), skip_special_tokens=False).strip("\ufffd") in whole
    seen = tokenizer.decode(torch.cat([batch["input_ids"].flatten() for batch in work.batches]).tolist())
    for word in ("statement", "expression", "iterator", "__init__", "yield from"):
        assert word in seen
    assert torch.equal(work.batches[0]["input_ids"], work.batches[0]["labels"])


def test_every_token_is_in_one_window() -> None:
    ids = torch.arange(103)
    rows = text.windows(ids, 10, torch.Generator().manual_seed(0))
    assert rows.shape == (10, 10)
    assert sorted(rows.flatten().tolist()) == list(range(100))
    assert all((row.diff() == 1).all() for row in rows)


@bert
def test_bert_is_asked_for_15_percent_of_the_tokens(work: Workload) -> None:
    tokenizer = load_minilm_tokenizer()
    _, used = find_tokens_in_use(tokenizer)
    mask, first, last = (used.tolist().index(tokenizer.token_to_id(name)) for name in ("[MASK]", "[CLS]", "[SEP]"))
    each = round(0.15 * 62)
    fates: Counter[str] = Counter()
    for batch in work.batches:
        ids, positions, labels = batch["input_ids"], batch["positions"], batch["labels"]
        assert (ids[:, 0] == first).all()
        assert (ids[:, -1] == last).all()
        assert torch.bincount(positions // 64, minlength=4).tolist() == [each] * 4
        assert len(positions.unique()) == len(positions) == len(labels)
        assert not ((positions % 64 == 0) | (positions % 64 == 63)).any()
        shown = ids.flatten()[positions]
        assert (ids == mask).sum() == (shown == mask).sum()
        fates["mask"] += int((shown == mask).sum())
        fates["kept"] += int((shown == labels).sum())
        fates["all"] += len(shown)
    assert fates["mask"] / fates["all"] == pytest.approx(0.8, abs=0.02)
    assert fates["kept"] / fates["all"] == pytest.approx(0.1, abs=0.02)

    batch = work.batches[0]
    ids = batch["input_ids"].flatten().clone()
    ids[batch["positions"]] = batch["labels"]
    sentence = tokenizer.decode(used[ids.view(4, 64)[0]].tolist()).replace(" ", "")
    reference = "".join("".join(text.read_python_reference()).lower().split())
    assert sentence in reference


@resnet
def test_resnet_enlarges_each_batch_in_the_step(work: Workload) -> None:
    sides = []
    hook = work.model.register_forward_pre_hook(
        lambda _, args, kwargs: sides.append(kwargs["pixel_values"].shape), with_kwargs=True
    )
    try:
        work.step(work.batches[0])
    finally:
        hook.remove()
    assert sides == [(8, 1, 32, 32)]


@resnet
def test_resnet_sees_every_digit_once(work: Workload) -> None:
    assert len(work.batches) == 1797 // 8
    labels = Counter(torch.cat([batch["labels"] for batch in work.batches]).tolist())
    assert sorted(labels) == list(range(10))
    assert all(170 <= count <= 185 for count in labels.values())
    images = torch.cat([batch["pixel_values"] for batch in work.batches])
    assert images.shape[1:] == (1, 8, 8)
    assert images.min() == -1
    assert images.max() == 1


# --- real weights ---------------------------------------------------------------------------------------------------


@bert
def test_bert_starts_from_the_weights_in_the_package(work: Workload) -> None:
    file = weights()
    _, used = find_tokens_in_use(load_minilm_tokenizer())
    rows = "embeddings.word_embeddings.weight"
    file[rows] = file[rows][used]
    encoder = work.model.get_submodule("masked_lm.bert").state_dict()
    assert len(encoder) == 5 + 16  # the embeddings, and the first layer's weights, biases and norms
    for name, tensor in encoder.items():
        assert torch.equal(tensor, file[name]), name
    assert set(file) - set(encoder) == {
        "embeddings.position_ids",
        "pooler.dense.bias",
        "pooler.dense.weight",
        *(name for name in file if name.startswith("encoder.layer.") and not name.startswith("encoder.layer.0.")),
    }
    decoder = work.model.get_parameter("masked_lm.cls.predictions.decoder.weight")
    assert decoder is work.model.get_parameter("masked_lm.bert.embeddings.word_embeddings.weight")


@bert
def test_berts_loss_is_the_one_of_transformers(work: Workload) -> None:
    batch = work.batches[0]
    labels = torch.full((4 * 64,), -100)
    labels[batch["positions"]] = batch["labels"]
    work.model.eval()  # no dropout, whose draws depend on nothing but order
    with torch.no_grad():
        ours = work.loss(work.model, batch)
        theirs = work.model.get_submodule("masked_lm")(input_ids=batch["input_ids"], labels=labels.view(4, 64)).loss
    torch.testing.assert_close(ours, theirs)


# --- the loop -------------------------------------------------------------------------------------------------------


@every_model
def test_a_step_trains_and_leaves_no_gradient(work: Workload) -> None:
    batch = work.batches[0]
    before, data = digest(work.model.named_parameters()), digest(batch.items())
    loss = work.step(batch)
    assert loss.shape == ()
    assert not loss.requires_grad
    assert digest(work.model.named_parameters()) != before
    assert digest(batch.items()) == data
    assert all(parameter.grad is None for parameter in work.model.parameters())
    assert work.model.training


@every_model
def test_training_again_gives_the_same_bits(work: Workload) -> None:
    first = train(work, 2)
    torch.rand(5)
    again = train(work, 2)
    assert again.differences(first) == ()
    assert len(set(first.gradients)) == 2
    assert len(first.step_ms) == 2


@every_model
def test_reset_goes_back_to_the_first_bit(work: Workload) -> None:
    first = compute_state_digests(work)
    addresses = {name: tensor.data_ptr() for name, tensor in work.tensors().items()}
    train(work, 1)
    trained = compute_state_digests(work)
    changed = {"parameters", "optimizer"}
    changed |= {"buffers"} if work.name == "resnet" else set()  # BatchNorm's statistics
    changed |= {"random numbers"} if work.name in ("gpt2", "bert") else set()  # dropout
    assert {what for what in first if first[what] != trained[what]} == changed
    work.model.eval()
    next(work.model.parameters()).grad = torch.ones_like(next(work.model.parameters()))
    work.reset()
    assert compute_state_digests(work) == first
    assert {name: tensor.data_ptr() for name, tensor in work.tensors().items()} == addresses
    assert not work.optimizer.state
    assert work.model.training
    assert all(parameter.grad is None for parameter in work.model.parameters())


@gpt2
def test_gpt2_learns(work: Workload) -> None:
    done: list[tuple[int, float]] = []
    losses = train(work, 8, on_step=lambda step, loss: done.append((step, loss))).losses
    assert losses[0] == pytest.approx(9.0, abs=0.3)  # ln 8000, before anything is learnt
    assert losses[-1] < losses[0] - 0.5
    assert done == list(enumerate(losses, start=1))


@gpt2
def test_a_difference_of_one_bit_is_reported(work: Workload) -> None:
    plain = train(work, 2)

    def flip(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(torch.int32)[0] ^= 1
        return grad

    hook = work.model.get_parameter("transformer.ln_f.bias").register_hook(flip)
    try:
        other = train(work, 2)
    finally:
        hook.remove()
    assert other.losses[0] == plain.losses[0]
    assert other.differences(plain)[0] == "step 1: gradients"
    assert "2 steps, not 1" in plain.differences(train(work, 1))


def test_a_digest_sees_names_shapes_types_and_the_sign_of_zero() -> None:
    zero = torch.zeros(2, 2)
    others = [("b", zero), ("a", zero.view(4)), ("a", zero.view(torch.int32)), ("a", -zero), ("a", zero[:1])]
    assert len({digest([named]) for named in [("a", zero), *others]}) == 6
    assert digest([("a", torch.arange(6).view(2, 3).T)]) == digest([("a", torch.arange(6).view(2, 3).T.contiguous())])
    assert digest([("a", torch.tensor(1.0, dtype=torch.bfloat16))])


# --- checkpointing --------------------------------------------------------------------------------------------------


@every_checkpointed_model
def test_checkpointing_runs_each_block_twice_and_changes_no_bit(work: Workload) -> None:
    calls = []
    inner = {  # not last in the block, for the second run stops as soon as it has all that backward needs
        "gpt2": "transformer.h.0.mlp.act",
        "bert": "masked_lm.bert.encoder.layer.0.intermediate",
        "llama": "model.layers.0.mlp.act_fn",
    }
    hook = work.model.get_submodule(inner[work.name]).register_forward_hook(lambda *_: calls.append(1))
    try:
        plain = train(work, 2)
        assert len(calls) == 2
        with work.checkpoint_every_block():
            checkpointed = train(work, 2)
        assert len(calls) == 6
    finally:
        hook.remove()
    assert checkpointed.differences(plain) == ()


@every_checkpointed_model
def test_checkpointing_leaves_nothing_behind(work: Workload) -> None:
    def attributes() -> dict[str, list[str]]:
        return {name: sorted(vars(module)) for name, module in work.model.named_modules()}

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in work.model.modules())

    def is_checkpointed() -> bool:
        switches = ("is_activation_checkpointing", "is_gradient_checkpointing")  # today's name, and the one before
        return any(getattr(module, name, False) is True for module in work.model.modules() for name in switches)

    before = attributes(), hooks()
    with work.checkpoint_every_block():
        assert is_checkpointed()
        train(work, 1)
    assert (attributes(), hooks()) == before
    with pytest.raises(KeyboardInterrupt), work.checkpoint_every_block():
        raise KeyboardInterrupt
    assert (attributes(), hooks()) == before
    assert not is_checkpointed()


@resnet
def test_resnet_has_no_checkpointing(work: Workload) -> None:
    assert work.checkpoint_refused == "transformers does not support checkpointing for ResNetForImageClassification"
    with pytest.raises(ValueError, match=work.checkpoint_refused), work.checkpoint_every_block():
        pass
