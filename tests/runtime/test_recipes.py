"""Every recipe, through the engine's own machinery: bits, strides and gradients are those of the plain run."""

import contextlib
import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comparing import equal
from lowtide._torch.backward import in_backward
from lowtide.profiler import rehearse
from lowtide.profiler.measure_call import identical
from lowtide.runtime.recipes import RECIPES, activations, recipe
from recipes_page import renewed
from runtime import recipe_rows
from runtime.dropping import Dropping, Held, Read, everything, node_names, through
from runtime.recipe_rows import HEADS, IMAGE, ROWS, Row, aten, mask, row

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def layouts(row: Row) -> list[str]:
    found = ["contiguous"]
    if row.shapes and not row.plain:
        found += ["transposed", "expanded", "sliced"]
        found += ["channels last"] if any(len(shape) == 4 for shape in row.shapes) else []
    return found


def leaf(shape: tuple[int, ...], layout: str, row: Row, dtype: torch.dtype, device: str) -> Tensor:
    if layout == "transposed":
        shape = shape[::-1]
    elif layout == "expanded":
        shape = (1, *shape[1:])
    elif layout == "sliced":
        shape = (*shape[:-1], 2 * shape[-1] + 1)
    tensor = torch.rand(shape) * 0.8 + 0.1 if row.unit else torch.randn(shape)
    tensor = tensor.to(device, dtype)
    if layout == "channels last" and tensor.dim() == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor.requires_grad_()


def as_the_op_gets_it(tensor: Tensor, shape: tuple[int, ...], layout: str) -> Tensor:
    if layout == "transposed":
        return tensor.permute(*reversed(range(tensor.dim())))
    if layout == "expanded":
        return tensor.expand(shape)
    return tensor[..., 1::2] if layout == "sliced" else tensor


def run(row: Row, layout: str, dtype: torch.dtype, device: str, drop: bool) -> tuple[list[Tensor], Dropping, set[str]]:
    """All gradients and what the module keeps; with `drop` the row's recipe takes part."""
    torch.manual_seed(0)
    leaves = [leaf(shape, layout, row, dtype, device) for shape in row.shapes]
    op = copy.deepcopy(row.op).to(device, dtype) if isinstance(row.op, nn.Module) else row.op
    module = op if isinstance(op, nn.Module) else None
    with Dropping(through(row.node), module) if drop else contextlib.nullcontext() as dropping:
        pairs = zip(leaves, row.shapes, strict=True)
        made = op(*(as_the_op_gets_it(Held.apply(x), shape, layout) for x, shape in pairs))
        outputs = [made] if isinstance(made, Tensor) else [out for out in made if out.requires_grad]
        total = torch.stack(
            [read.double().sum() for out in outputs for read in (Read.apply(out), Read.apply(-out))]
        ).sum()
    names = node_names(total)
    total.backward()
    if module is not None:
        leaves += module.parameters()
    kept = [] if module is None else list(module.buffers())
    return [x.grad for x in leaves if x.grad is not None] + kept, dropping, names


def check(row: Row, dtype: torch.dtype, device: str = "cpu", autocast: bool = False) -> bool:
    """Return True if the row's node was dropped and its recompute was exact."""
    there = False
    for layout in layouts(row):
        with torch.autocast(device, dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
            try:
                plain, _, _ = run(row, layout, dtype, device, drop=False)
            except RuntimeError:
                if device == "cpu":
                    raise
                continue  # CUDA has no kernel for this type or layout
            found, dropping, names = run(row, layout, dtype, device, drop=True)
        # An op may be another one for another layout or device, or none at all.
        expected = row.node in names or (layout == "contiguous" and device == "cpu")
        assert dropping.read or not expected, f"nothing was recomputed ({layout}): {dropping.refused}"
        there |= bool(dropping.read)
        # On CUDA some backwards give other bits each time. What was recomputed has been compared as it was read.
        equal = identical if device == "cpu" else nearly_equal
        assert all(equal(one, other) for one, other in zip(found, plain, strict=True)), layout
    return there


def nearly_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if the difference is within the rounding of sums in another order."""
    error = 100 * torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=error, atol=error, equal_nan=True)


def rows_on(device: str) -> list[Row]:
    return [row for row in ROWS if RECIPES[row.node].device in (None, device)]


def names(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("row", "dtype"), [(row, dtype) for row in rows_on("cpu") for dtype in row.dtypes], ids=names)
def test_bits_strides_and_gradients_are_those_of_a_plain_run(row: Row, dtype: torch.dtype) -> None:
    check(row, dtype)


@pytest.mark.parametrize("row", [row for row in rows_on("cpu") if torch.float32 in row.dtypes], ids=names)
def test_under_autocast(row: Row) -> None:
    check(row, torch.float32, autocast=True)


@pytest.mark.gpu
@pytest.mark.parametrize("row", rows_on("cuda"), ids=names)
def test_on_cuda(row: Row) -> None:
    there = [check(row, dtype, "cuda") for dtype in row.dtypes]
    if not any(there):
        pytest.skip("this build of torch makes another node")


def on_meta(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return Held.apply(torch.empty(shape, device="meta", dtype=dtype, requires_grad=True))


def batch_norm_on_meta(op: Callable[..., tuple[Tensor, ...]]) -> Tensor:
    channels = [on_meta(4, dtype=torch.float32) for _ in range(4)]
    return op(
        on_meta(*IMAGE, dtype=torch.float32), *channels[:2], *(x.detach() for x in channels[2:]), True, 0.1, 1e-5
    )[0]


ON_META: dict[str, Callable[[], Tensor]] = {
    "ScaledDotProductFlashAttentionBackward0": lambda: aten._scaled_dot_product_flash_attention(
        *(on_meta(*HEADS) for _ in range(3)), 0.0, True, scale=0.3
    )[0],
    "ScaledDotProductEfficientAttentionBackward0": lambda: aten._scaled_dot_product_efficient_attention(
        *(on_meta(*HEADS) for _ in range(3)), on_meta(2, 2, 8, 8), True
    )[0],
    "ScaledDotProductCudnnAttentionBackward0": lambda: aten._scaled_dot_product_cudnn_attention(
        *(on_meta(*HEADS) for _ in range(3)), None, True
    )[0],
    "CudnnBatchNormBackward0": lambda: batch_norm_on_meta(aten.cudnn_batch_norm),
    "MiopenBatchNormBackward0": lambda: batch_norm_on_meta(aten.miopen_batch_norm),
}


@pytest.mark.parametrize("node", ON_META)
def test_recipes_for_cuda_only_fit_their_nodes(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everywhere: its node has all that the recipe asks for, and the op takes it. The numbers need a device."""
    monkeypatch.setitem(RECIPES, node, replace(RECIPES[node], device=None))
    with Dropping(through(node)) as dropping:
        out = ON_META[node]()
        reader = Read.apply(out)
    assert dropping.dropped == [node]
    (value,) = (value for value in dropping.values if not value.kept)
    made = value.get()
    assert (made.shape, made.stride(), made.dtype) == (out.shape, out.stride(), out.dtype)
    del reader


def test_every_recipe_has_a_row() -> None:
    assert {row.node for row in ROWS} == RECIPES.keys()


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == renewed(page), "run: python tools/recipes_page.py docs/recipes.md"


def test_the_example_on_the_page_is_the_one_in_use() -> None:
    recipe, row = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert recipe in Path(activations.__file__).read_text(encoding="utf-8")
    assert row.strip() in Path(recipe_rows.__file__).read_text(encoding="utf-8")


# --- a wrong recipe


def test_a_wrong_recipe_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RECIPES, "GeluBackward0")

    @recipe("GeluBackward0", edges={"self": 0})
    def gelu(self: Tensor) -> Tensor:
        return F.gelu(self, approximate="tanh")  # whatever the node says

    check(row("GeluBackward0", lambda x: F.gelu(x, approximate="tanh"), (4, 6)), torch.float32)
    with pytest.raises(AssertionError):
        check(row("GeluBackward0", F.gelu, (4, 6)), torch.float32)


@pytest.mark.parametrize(
    ("wrong_everywhere", "why"),
    [(True, "recomputing it gives other bits on this device"), (False, "recomputing it in backward gives other bits")],
)
def test_the_audit_refuses_a_wrong_recipe(wrong_everywhere: bool, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is wrong in the thread of backward alone, as cuDNN's may be, which tries its algorithms there."""
    monkeypatch.delitem(RECIPES, "SiluBackward0")

    @recipe("SiluBackward0", edges={"self": 0})
    def silu(self: Tensor) -> Tensor:
        return self * torch.sigmoid(self) if wrong_everywhere or in_backward() else F.silu(self)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 1))
    profile = rehearse(model, lambda batch: model(batch).sum().backward(), torch.randn(32, 64))
    found = {value.node: (value.recipe, value.refused) for value in profile.values}
    assert found["SiluBackward0"] == (None, why)
    assert found["GeluBackward0"] == ("GeluBackward0", None)


# --- what is not recorded


def cat_with_a_constant(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(4, 6)])


REFUSED: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("number added in C++", lambda x: aten.add(x, 1.0), "AddBackward0 does not record other"),
    ("constant tensor added", lambda x: torch.ones(4, 6) + x, "AddBackward0 does not record self"),
    ("constant tensor subtracted", lambda x: x - torch.ones(4, 6), "SubBackward0 does not record other"),
    (
        "where with a constant",
        lambda x: x.where(mask(x, 4, 6), torch.ones(4, 6)),
        "WhereBackward0 does not record other",
    ),
    (
        "number filled in in C++",
        lambda x: aten.masked_fill(x, mask(x, 4, 6), 1.0).softmax(0),
        "MaskedFillBackward0 does not record value",
    ),
    ("padding on the way", lambda x: F.pad(x, (1, 0), value=2.0).exp(), "constant_pad_nd wrote is not recorded"),
    ("cat with a constant", cat_with_a_constant, "CatBackward0 does not record the inputs that need no gradient"),
    ("no recipe", lambda x: torch.linalg.qr(x[:, :4])[1], "no recipe for LinalgQrBackward0"),
]


@pytest.mark.parametrize(("op", "why"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_values_with_unrecorded_inputs_are_kept(op: Callable[[Tensor], Tensor], why: str) -> None:
    with Dropping(everything) as dropping:
        out = op(Held.apply(torch.randn(4, 6, requires_grad=True)))
        Read.apply(out).sum().backward()
    assert why in " ".join(dropping.refused.values())
    assert out.grad_fn is not None
    assert out.grad_fn.name() not in dropping.dropped


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


FROZEN = {
    "linear, bias": ("AddmmBackward0", frozen(nn.Linear(6, 6), "bias"), (4, 6)),
    "linear, all": ("AddmmBackward0", frozen(nn.Linear(6, 6), "weight", "bias"), (4, 6)),
    "convolution, bias": ("ConvolutionBackward0", frozen(nn.Conv1d(4, 4, 3), "bias"), (2, 4, 6)),
    "convolution, all": ("ConvolutionBackward0", frozen(nn.Conv1d(4, 4, 3), "weight", "bias"), (2, 4, 6)),
    "layer norm, all": ("NativeLayerNormBackward0", frozen(nn.LayerNorm(6, 0.1), "weight", "bias"), (4, 6)),
    "batch norm, bias": ("NativeBatchNormBackward0", frozen(nn.BatchNorm1d(4), "bias"), (2, 4, 6)),
    "batch norm, all": ("NativeBatchNormBackward0", frozen(nn.BatchNorm1d(4), "weight", "bias"), (2, 4, 6)),
    "group norm, all": ("NativeGroupNormBackward0", frozen(nn.GroupNorm(2, 4), "weight", "bias"), (2, 4, 6)),
}


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_inputs_are_read_from_the_module(name: str) -> None:
    node, module, shape = FROZEN[name]
    check(row(node, module, shape), torch.float32)


@pytest.mark.parametrize("op", [F.linear, F.conv1d], ids=["linear", "convolution"])
def test_a_frozen_bias_that_no_module_owns_is_not_taken_for_none(op: Callable[..., Tensor]) -> None:
    x, weight = torch.randn(2, 4, 6, requires_grad=True), torch.randn(5, 6 if op is F.linear else 4, requires_grad=True)
    with Dropping(everything) as dropping:
        Read.apply(op(x, weight if op is F.linear else weight[..., None], torch.ones(5))).sum().backward()
    assert dropping.read == []
    assert "does not record bias" in " ".join(dropping.refused.values())


def test_tensors_packed_by_other_hooks_are_not_taken_for_absent() -> None:
    norm = frozen(nn.LayerNorm(6), "weight", "bias")
    with Dropping(everything) as dropping:
        x = Held.apply(torch.randn(4, 6, requires_grad=True))
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: [tensor], lambda packed: packed[0]):
            y = norm(x)
        Read.apply(y).sum().backward()
    assert "other hooks" in dropping.refused["NativeLayerNormBackward0"]
    assert dropping.read == []


def test_attention_with_dropout_is_kept() -> None:
    fused = [found for node, found in RECIPES.items() if "Attention" in node]
    assert fused
    assert all(found.when == {"dropout_p": 0.0} for found in fused)


def test_a_parameter_that_changed_in_between_is_noticed() -> None:
    bias, x, w = torch.zeros(5, requires_grad=True), torch.randn(4, 6, requires_grad=True), torch.randn(6, 5)
    with Dropping(everything):
        y = Read.apply(torch.addmm(bias, Held.apply(x), w))
    with torch.no_grad():
        bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- layouts that nobody recorded


@pytest.mark.parametrize("first", ["copy", "what is made of it"])
def test_a_copy_with_unknown_strides_is_right_for_every_reader(first: str) -> None:
    """Autograd does not say what strides the copy has: its own reader knows, the other one does not look."""
    leaf = torch.randn(2, 3, 4, 5, requires_grad=True)
    with Dropping(everything) as dropping:
        copied = Held.apply(leaf).contiguous(memory_format=torch.channels_last)
        made = copied.tanh()
        readers = (copied[:, 1:], made.permute(0, 2, 3, 1)) if first == "copy" else (made[:, 1:], copied.mT)
        sum(Read.apply(reader).sum() for reader in readers).backward()
    assert set(dropping.read) == {"CloneBackward0", "TanhBackward0"}


# --- a vision block


class Block(nn.Module):
    """Convolution, batch norm and ReLU in place, twice, around an identity."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x
        return self.relu(out)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_relu_in_place_is_recomputed_from_the_input_of_the_batch_norm(training: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), Block(), Block(), Block()).train(training)
    model, images = copy.deepcopy(plain), torch.randn(4, 3, 10, 10)
    plain(images).square().mean().backward()
    with Dropping(through("NativeBatchNormBackward0"), model) as dropping:
        loss = model(images).square().mean()
        loss.backward()
    assert dropping.dropped == ["ReluBackward0"] * 6  # and each reader of one, ReLU itself and a convolution, finds it
    assert equal(*([p.grad for p in one.parameters()] for one in (model, plain)))
    assert equal(model.buffers(), plain.buffers())
