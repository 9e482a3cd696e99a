"""Kernels for chains of operators: their text, and where Triton is installed the bits of torch's operators."""

import importlib.util
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.runtime.kernels.chain_source import find_run, write_chain
from lowtide.runtime.recipes import IMPLEMENTATIONS, RECIPES
from lowtide.runtime.recipes.chains import CHAIN, EXPRESSIONS

HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, which is not installed"),
    pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_each_operator_rounds_to_its_dtype_and_only_read_results_are_stored() -> None:
    text = write_chain([False, True], [("a0 * a1", torch.bfloat16), ("libdevice.tanh(v0)", torch.float32)], [1])
    assert text.splitlines() == [
        "def chain(x0, x1, y1, n, inner1, count1, BLOCK: tl.constexpr):",
        "    index = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)",
        "    inside = index < n",
        "    a0 = tl.load(x0 + index, mask=inside, other=0).to(tl.float32)",
        "    a1 = tl.load(x1 + (index // inner1) % count1, mask=inside, other=0).to(tl.float32)",
        "    v0 = round_to_bfloat16(a0 * a1)",
        "    v1 = libdevice.tanh(v0)",
        "    tl.store(y1 + index, v1.to(y1.dtype.element_ty), mask=inside)",
    ]


@pytest.mark.parametrize(
    ("shape", "full", "run"),
    [
        ((5,), (3, 4, 5), (1, 5)),
        ((3, 1, 1), (3, 4, 5), (20, 3)),
        ((4, 1), (3, 4, 5), (5, 4)),
        ((4, 5), (3, 4, 5), (1, 20)),
        ((3, 4, 1), (3, 4, 5), (5, 12)),
        ((3, 1, 5), (3, 4, 5), None),
        ((1, 1, 1), (3, 4, 5), (1, 1)),
        ((), (3, 4), (1, 1)),
        ((3, 1, 5), (3, 1, 5), (1, 15)),
    ],
)
def test_a_repeated_operand_is_found_by_two_numbers(
    shape: tuple[int, ...], full: tuple[int, ...], run: tuple[int, int] | None
) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    wide = tensor.expand(full)
    assert find_run(wide.shape, wide.stride(), full) == run
    if run is not None:
        index = torch.arange(torch.Size(full).numel())
        assert torch.equal(tensor.flatten()[index // run[0] % run[1]], wide.flatten())


def test_every_expression_has_the_parameters_of_its_recipe() -> None:
    for node, expression in EXPRESSIONS.items():
        recipe = IMPLEMENTATIONS[node][CHAIN]
        code: Any = expression.__code__
        assert set(code.co_varnames[: code.co_argcount]) <= {*recipe.operands, *recipe.constants}, node
        assert recipe.expression is expression
        assert RECIPES[node].expression is None


def run(source: str, inputs: list[Tensor], dtypes: list[torch.dtype], runs: list[tuple[int, int]]) -> list[Tensor]:
    from lowtide.runtime.kernels.chain_kernel import run_chain

    outputs = [torch.empty_like(inputs[0], dtype=dtype) for dtype in dtypes]
    run_chain(source, inputs, outputs, runs)
    return outputs


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch compute the functions that the interpreter lacks, or computes with other bits."""
    from triton.runtime.interpreter import TensorHandle  # type: ignore[import-not-found,unused-ignore]

    from lowtide.runtime.kernels import chain_kernel

    tl = chain_kernel.tl

    def of(op: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
        def function(x: Any) -> Any:
            data = op(torch.from_numpy(x.handle.data)).numpy()
            return tl.core.tensor(TensorHandle(data, x.handle.dtype), x.type)

        return function

    names = {"exp": torch.exp, "erf": torch.erf, "tanh": torch.tanh, "rsqrt": torch.rsqrt}
    library = SimpleNamespace(**{name: of(op) for name, op in names.items()})
    chain_kernel.compile_chain.cache_clear()
    monkeypatch.setitem(chain_kernel.MATH, "libdevice", library)


N = 4096


def numbers(dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (torch.randn(N, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def single(op: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Compute in single precision by the formula of torch's CUDA kernel, which is not that of its CPU kernel."""
    return lambda x: op(x.float()).to(x.dtype)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "add": (lambda x: x + 1.0, (EXPRESSIONS["AddBackward0"](self="a0", other="1.0", alpha="1.0"),)),
    "sub": (lambda x: 1.5 - x, (EXPRESSIONS["SubBackward0"](self="1.5", other="a0", alpha="1.0"),)),
    "mul": (lambda x: x * 0.75, (EXPRESSIONS["MulBackward0"](self="a0", other="0.75"),)),
    "square": (lambda x: x.pow(2), (EXPRESSIONS["PowBackward0"](self="a0", exponent="2.0"),)),
    "neg": (lambda x: -x, (EXPRESSIONS["NegBackward0"](self="a0"),)),
    "exp": (torch.exp, (EXPRESSIONS["ExpBackward0"](self="a0"),)),
    "erf": (single(torch.erf), (EXPRESSIONS["ErfBackward0"](self="a0"),)),
    "tanh": (torch.tanh, (EXPRESSIONS["TanhBackward0"](self="a0"),)),
    "relu": (torch.relu, (EXPRESSIONS["ReluBackward0"](self="a0"),)),
    "sqrt": (lambda x: (x * x).sqrt(), ("a0 * a0", EXPRESSIONS["SqrtBackward0"](self="v0"))),
    "division": (lambda x: x / (x * x), ("a0 * a0", EXPRESSIONS["DivBackward0"](self="a0", other="v0"))),
    "silu": (single(lambda x: x / (1 + torch.exp(-x))), (EXPRESSIONS["SiluBackward0"](self="a0"),)),
    "sigmoid": (single(lambda x: 1 / (1 + torch.exp(-x))), (EXPRESSIONS["SigmoidBackward0"](self="a0"),)),
    "gelu": (
        single(lambda x: x * 0.5 * (1 + torch.erf(x * 0.5**0.5))),
        (EXPRESSIONS["GeluBackward0"](self="a0", approximate="none"),),
    ),
    "a chain": (
        lambda x: 0.5 * x * (1.0 + torch.tanh(0.75 * (x + 0.0625 * x))),
        (
            "a0 * 0.0625",
            "tl.fma(1.0, v0, a0)",
            "v1 * 0.75",
            "libdevice.tanh(v2)",
            "tl.fma(1.0, 1.0, v3)",
            "a0 * 0.5",
            "v5 * v4",
        ),
    ),
}


class TestInterpreted:
    pytestmark = interpreted

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("name", CASES)
    def test_it_has_the_bits_of_torchs_operators(self, name: str, dtype: torch.dtype, by_torch: None) -> None:
        op, expressions = CASES[name]
        x = numbers(dtype)
        last = len(expressions) - 1
        (made,) = run(write_chain([False], [(text, dtype) for text in expressions], [last]), [x], [dtype], [])
        assert torch.equal(made, op(x))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_casts_round_to_the_nearest_even(self, dtype: torch.dtype) -> None:
        x = torch.cat((numbers(torch.float32), torch.tensor([1.00390625, 1.01171875, float("inf"), -0.0])))
        (made,) = run(write_chain([False], [("a0", dtype)], [0]), [x], [dtype], [])
        assert torch.equal(made, x.to(dtype))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_results_are_stored_where_they_are_read(self, dtype: torch.dtype) -> None:
        x, y = numbers(dtype), numbers(dtype, 1)
        text = write_chain([False, False], [("a0 * a1", dtype), ("tl.fma(1.0, a1, v0)", dtype)], [0, 1])
        product, total = run(text, [x, y], [dtype, dtype], [])
        assert torch.equal(product, x * y)
        assert torch.equal(total, x * y + y)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_operands_are_repeated_over_rows_and_columns(self, dtype: torch.dtype) -> None:
        x, row, column = numbers(dtype).view(64, 64), numbers(dtype, 1)[:64], numbers(dtype, 2)[:64, None]
        text = write_chain([False, True, True], [("a0 * a1", dtype), ("tl.fma(1.0, a2, v0)", dtype)], [1])
        (made,) = run(text, [x, row, column], [dtype], [(1, 64), (64, 64)])
        assert torch.equal(made, x * row + column)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_dropout_from_its_mask(self, dtype: torch.dtype) -> None:
        x, mask = numbers(dtype), numbers(torch.float32, 3) > 0
        text = EXPRESSIONS["NativeDropoutBackward0"](input="a0", result1="a1", p="0.5")
        (made,) = run(write_chain([False, False], [(text, dtype)], [0]), [x, mask], [dtype], [])
        assert torch.equal(made, x * mask * 2)

    def test_a_last_program_may_be_partial(self) -> None:
        x = numbers(torch.float32)[:1500]
        (made,) = run(write_chain([False], [("a0 * 2.0", torch.float32)], [0]), [x], [torch.float32], [])
        assert torch.equal(made, x * 2)


GPUS = [(80, "tl.int32"), (90, "tl.int64")]


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, which is not installed")
@pytest.mark.skipif(IS_INTERPRETED, reason="Triton is told to interpret kernels")
@pytest.mark.parametrize(("capability", "index"), GPUS)
def test_every_expression_compiles_for_gpus_without_contraction(capability: int, index: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lowtide.runtime.kernels import chain_kernel

    texts = []
    for node, expression in EXPRESSIONS.items():
        code: Any = expression.__code__
        words = {"alpha": "1.0", "exponent": "3.0", "approximate": "tanh", "p": "0.1"}
        names = {name: words.get(name, f"a{min(n, 2)}") for n, name in enumerate(code.co_varnames[: code.co_argcount])}
        texts.append((expression(**names), DTYPES[len(node) % 3]))
    source = write_chain([False, False, True], texts, list(range(len(texts))))
    outputs = {f"y{n}": "*bf16" for n in range(len(texts))}
    inputs = {"x0": "*bf16", "x1": "*i1", "x2": "*fp32"}
    types = {**inputs, **outputs, "n": "i32", "inner2": "i32", "count2": "i32", "BLOCK": "constexpr"}
    kernel = triton.compile(
        ASTSource(chain_kernel.compile_chain(source, index), types, {"BLOCK": 128}),
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": False},
    )
    assert "mul.rn.f32" in kernel.asm["ptx"]  # an unrounded `mul.f32` may be contracted
    assert "mul.f32" not in kernel.asm["ptx"]
    assert "add.f32" not in kernel.asm["ptx"]
