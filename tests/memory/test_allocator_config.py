"""The allocator's settings, and torch's own reading of the same texts."""

import json
from importlib.metadata import version

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import RunPython
from lowtide.errors import LowtideError
from lowtide.memory.allocator.config import INTERVALS, MIB, UNLIMITED, AllocatorConfig

GOOD = [
    "",
    "expandable_segments:True",
    "expandable_segments:False",
    "max_split_size_mb:20",
    "max_split_size_mb:64 , expandable_segments : True",
    "max_split_size_mb:64,",
    "max_non_split_rounding_mb:30",
    "garbage_collection_threshold:0.8",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[4:2,>:8,16:4]",
    "roundup_power2_divisions:[>:8]",
    "roundup_power2_divisions:[1:2,2:0]",
    "roundup_power2_divisions:[131072:2]",
    "backend:native",
    "pinned_use_background_threads:True",
    "per_process_memory_fraction:0.5",
]
LARGE_SEGMENTS = "large_segment_size_mb:40,max_split_size_mb:40"  # not in torch 2.10
BAD_FOR_TORCH_TOO = [
    "expandable_segments:true",
    "max_split_size_mb:10",
    "max_split_size_mb:abc",
    "max_split_size_mb",
    "max_split_size_mb:",
    "max_non_split_rounding_mb:10",
    "large_segment_size_mb:10",
    "large_segment_size_mb:40,max_split_size_mb:30",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:x",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[300:2]",
    "roundup_power2_divisions:[256:1,512:2",
]
BAD_FOR_LOWTIDE = [
    "max_split_size_mb:-1",
    "max_split_size_mb:64.5",
    "max_split_size:64",
    "roundup_power2_divisions:[256]",
    "per_process_memory_fraction:1.5",
    "backend:cudaMallocAsync",
    "no_such_thing:1",
]
SIZES = [1, 512, 600, *(MIB << i for i in range(18)), (MIB << 4) - 1]

# On the CPU too, torch's library reads the text and tells the divisions for a size; the C++ name is that of 2.13.
ASK_TORCH = """
import contextlib, ctypes, json, os, sys, torch
if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
    sys.exit("too old")
symbol = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
divisions = getattr(library, symbol, None)
if divisions is not None:
    divisions.restype, divisions.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
answers = {}
for text in json.loads(sys.argv[1]):
    with contextlib.suppress(Exception):  # the only one that outlasts the next; torch 2.10 has none
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except Exception:
        answers[text] = "refused"
    else:
        answers[text] = [divisions(n) for n in json.loads(sys.argv[2])] if divisions else "read"
print(json.dumps(answers))
"""


def test_torch_reads_the_same_into_the_same_texts(run_python: RunPython) -> None:
    good = GOOD + [LARGE_SEGMENTS] * (version("torch") >= "2.11")
    ran = run_python("-c", ASK_TORCH, json.dumps(good + BAD_FOR_TORCH_TOO), json.dumps(SIZES))
    if "too old" in ran.stderr:
        pytest.skip("this torch does not tell without CUDA how it reads them")
    assert ran.returncode == 0, ran.stderr
    answers = json.loads(ran.stdout)
    assert [text for text in BAD_FOR_TORCH_TOO if answers[text] != "refused"] == []
    for text in good:
        config = AllocatorConfig.parse(text)
        # "read": this build of torch has another name for the function that tells what it read.
        assert answers[text] in ("read", [config.find_divisions(n) for n in SIZES]), text


@pytest.mark.parametrize("text", BAD_FOR_TORCH_TOO + BAD_FOR_LOWTIDE)
def test_invalid_settings_are_refused(text: str) -> None:
    with pytest.raises(LowtideError):
        AllocatorConfig.parse(text)


def test_errors_name_the_setting_and_what_would_do() -> None:
    with pytest.raises(LowtideError, match=r"no setting 'max_split_size', found in .*\n.*max_split_size_mb"):
        AllocatorConfig.parse("max_split_size:64")
    with pytest.raises(LowtideError, match=r"expandable_segments:true cannot be read: torch reads True and False"):
        AllocatorConfig.parse("expandable_segments:true")
    with pytest.raises(LowtideError, match=r"Known: expandable_segments, "):
        AllocatorConfig.parse("x:1")


def test_values_are_read_into_bytes() -> None:
    text = "large_segment_size_mb:40,max_split_size_mb:64,max_non_split_rounding_mb:50,garbage_collection_threshold:0.6"
    assert AllocatorConfig.parse(text) == AllocatorConfig(
        large_segment_size=40 * MIB,
        max_split_size=64 * MIB,
        max_non_split_rounding=50 * MIB,
        garbage_collection_threshold=0.6,
    )
    assert AllocatorConfig.parse("") == AllocatorConfig()
    assert AllocatorConfig().max_split_size == UNLIMITED


def test_the_environment_is_asked_in_torch_s_order() -> None:
    old, new = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert AllocatorConfig.from_environment(old).max_split_size == 64 * MIB
    assert AllocatorConfig.from_environment(old | new) == AllocatorConfig(expandable_segments=True)
    assert AllocatorConfig.from_environment({}) == AllocatorConfig()


segment_sizes = st.integers(11, 500).map(lambda n: n * MIB)
divisions = st.sampled_from([0, 1, 2, 4, 8, 16])


@st.composite
def configs(draw: st.DrawFn) -> AllocatorConfig:
    segment = draw(segment_sizes)
    at_least = st.integers(segment // MIB, 2000).map(lambda n: n * MIB)
    return AllocatorConfig(
        expandable_segments=draw(st.booleans()),
        large_segment_size=segment,
        max_split_size=draw(at_least | st.just(UNLIMITED)),
        max_non_split_rounding=draw(at_least),
        garbage_collection_threshold=draw(st.just(0.0) | st.floats(0.01, 0.99)),
        per_process_memory_fraction=draw(st.floats(0, 1)),
        roundup_power2_divisions=draw(
            st.tuples(*[divisions] * INTERVALS) | st.sampled_from([0, 1, 4]).map(lambda n: (n,) * INTERVALS)
        ),
    )


@given(configs())
def test_text_and_back(config: AllocatorConfig) -> None:
    assert AllocatorConfig.parse(str(config)) == config


def test_more_than_an_address_can_count_is_as_much_as_it_can() -> None:
    assert UNLIMITED == 2**64 - 1
    assert AllocatorConfig.parse(f"max_split_size_mb:{2**50}").max_split_size == 2**64 - MIB


@pytest.mark.parametrize(
    ("n_bytes", "expected"), [(1, 1), (MIB - 1, 1), (MIB, 1), (2 * MIB, 2), (4 * MIB - 1, 2), (4 * MIB, 4), (2**40, 8)]
)
def test_a_request_is_rounded_as_set_for_its_power_of_two(n_bytes: int, expected: int) -> None:
    assert AllocatorConfig.parse("roundup_power2_divisions:[1:1,2:2,4:4,>:8]").find_divisions(n_bytes) == expected
