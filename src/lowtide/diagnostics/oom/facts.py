"""Facts in addition to the message: from the traceback in a log, or from the process at the moment of failure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from lowtide.diagnostics.oom.message import Holder
from lowtide.diagnostics.oom.text_stream import LONGEST, PREFIX, PatternFinder, process_named
from lowtide.planner.serialization import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Record):
    """A line of a traceback."""

    file: str
    line: int
    function: str
    process: str | None = None
    """Process that wrote the line, if the log's lines begin with it."""
    code: str = ""
    """The statement that was running, where the traceback shows it."""

    @property
    def short(self) -> str:
        """Text such as `train.py:42 in step`."""
        name = re.split(r"[/\\]", self.file)[-1]
        return f"{name}:{self.line} in {self.function}" if self.line else f"{name} in {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(Record):
    """Facts about the failed process. Each may be unknown: None, or empty."""

    places: tuple[Place, ...] = ()
    """Lines of the traceback, outermost first."""
    expandable: bool | None = None
    """True if `expandable_segments` was on."""
    windows: bool = False
    inside: str = ""
    """Path of the module whose forward was running."""
    evaluation_bytes: int = 0
    """Bytes held by graphs of a model in evaluation mode, which no backward pass will reach."""
    evaluation_graphs: int = 0
    """Number of graphs of a model in evaluation mode: more than one if outputs are kept."""
    leftover_graphs: int = 0
    """Number of graphs of earlier steps that are still alive."""
    leftover_bytes: int = 0
    new_state_bytes: int = 0
    """Bytes of optimizer state that does not exist yet."""
    holders: tuple[Holder, ...] = ()
    """Largest holders of memory, by part of the step and by module."""
    limit_bytes: int | None = None
    """Bytes of a limit on this process's memory; `limit_name` is the name of the limit."""
    limit_name: str = ""
    limit_used_bytes: int = 0
    host_bytes: int | None = None
    """Bytes of the machine's main memory."""
    host_free_bytes: int | None = None
    smallest_peak_bytes: int | None = None
    """Peak of the step under the plan with the smallest peak; from a rehearsal."""
    plain_peak_bytes: int | None = None
    static_bytes: int | None = None
    """Bytes in use before the step begins, which no plan lowers."""
    notes: tuple[str, ...] = ()

    @property
    def in_optimizer(self) -> bool:
        """True if an optimizer's step was running."""
        return any(_in_optimizer(place) for place in self.places)

    @property
    def in_torch_optimizer(self) -> bool:
        """True if the step of one of torch's own optimizers was running."""
        return any(_TORCH_OPTIMIZER.search(place.file) for place in self.places)

    @property
    def makes_state(self) -> bool:
        """True if the optimizer was creating its state."""
        return any(_makes_state(place) for place in self.places)

    @property
    def updates_with_temporaries(self) -> bool:
        """True if the optimizer was updating parameters, and its state was there."""
        return any(_updates_parameters(place) for place in self.places)

    @property
    def evaluates(self) -> bool:
        """True if an evaluation was running."""
        return any(_evaluates(place) for place in self.places)

    @property
    def gathers_evaluation(self) -> bool:
        """True if an evaluation was joining the predictions of several batches."""
        joins = any(_evaluates(place) and _JOINING.search(place.code) for place in self.places[-1:])
        return joins or any(_gathers_evaluation(place) for place in self.places)

    @property
    def loads_checkpoint(self) -> bool:
        """True if a checkpoint was being read."""
        return any(_loads_checkpoint(place) for place in self.places)

    @property
    def moves_model(self) -> bool:
        """True if a model was being moved to a device."""
        return any(_moves_model(place) for place in self.places)

    @property
    def pins_memory(self) -> bool:
        """True if tensors were being copied to pinned host memory."""
        return any(_pins_memory(place) for place in self.places)

    @property
    def pins_batches(self) -> bool:
        """True if the DataLoader's thread was copying a batch to pinned host memory."""
        return any(place.file.endswith("pin_memory.py") for place in self.places)

    @property
    def starts_communication(self) -> bool:
        """True if a collective operation was running, whose buffers the library allocates at first use."""
        return any(_communicates(place) for place in self.places)

    @property
    def in_triton(self) -> bool:
        """True if Triton was loading or launching a kernel."""
        return any(_in_triton(place) for place in self.places)

    @property
    def shares_memory(self) -> bool:
        """True if tensors were being handed over between processes."""
        return any(_shares_memory(place) for place in self.places)

    @property
    def copies_tensors(self) -> bool:
        """True if tensors were being copied by `copy.deepcopy`."""
        return any(_copies_tensors(place) for place in self.places)

    @property
    def gathers_state(self) -> bool:
        """True if sharded parameters or optimizer state were being gathered whole, as for a checkpoint."""
        return any(_gathers_state(place) for place in self.places)

    @property
    def starts_engine(self) -> bool:
        """True if a parallel engine was allocating its own buffers, before the first step."""
        return any(_starts_engine(place) for place in self.places)

    @property
    def large_tensor(self) -> str:
        """A key of LARGE_TENSORS, if a tensor was being made that is known to be large; else empty."""
        return next((name for name, makes in _LARGE_TENSORS.items() if any(map(makes, self.places))), "")

    @property
    def starts_device(self) -> bool:
        """True if the process was making its context on the device."""
        return any(_starts_device(place) for place in self.places)

    @property
    def inference(self) -> str:
        """Program that was running a model without training it; empty if none is known."""
        if any(_trains(place) for place in self.places):
            return ""
        named = (name for place in reversed(self.places) for name, files in _INFERENCE.items() if files(place))
        return next(named, "a model" if _runs_without_gradients(self.places) else "")

    @property
    def own_place(self) -> Place | None:
        """Innermost line outside installed packages."""
        own = [place for place in self.places if not _INSTALLED.search(place.file)]
        return own[-1] if own else None

    def of_process(self, process: str | None) -> Facts:
        """Return the facts about one process: places in the lines of others are left out."""
        return replace(self, places=tuple(place for place in self.places if place.process in (None, process)))


_INSTALLED = re.compile(r"(?:site|dist)-packages|[/\\]lib[/\\]python3|<frozen|<__array_function__|lowtide[/\\]oom[/\\]")
_WINDOWS = re.compile(r"[A-Za-z]:\\")
_OPTIMIZER = re.compile(r"[/\\]optim[/\\]|optimizer|transformers[/\\]optimization\.py")
_TORCH_OPTIMIZER = re.compile(r"torch[/\\]optim[/\\]")
_STATE = re.compile(r"_?init_group|_new_buffer|_?init_states?|_?initialize_(?:optimizer_)?states?|get_state_buffer")
_STATE_CODE = re.compile(r"\bstate\[.{1,60}\]\s?=\s?torch\.(?:zeros|empty|full|ones|clone)")
_UPDATING = re.compile(r"_(?:multi|single)_tensor_\w+")
_EVALUATING = re.compile(
    r"_?(?:on_|run_|do_)?(?:eval|evaluate|evaluation|val|valid|validate|validation|predict|prediction|test)"
    r"(?:_(?:loop|step|epoch|end|batch|one|model|set|loader|dataset|metrics))*"
)
_JOINING = re.compile(r"\b(?:cat|concat|concatenate|[vh]?stack|nested_concat)\(")
_GATHERING = re.compile(
    r"nested_(?:concat|gather|numpify)|torch_pad_and_concatenate|numpy_pad_and_concatenate|to_cpu_and_numpy"
    r"|_?pad_across_processes|gather_for_metrics|(?:add_)?arrays?_?to_container|distributed_concat|dim_zero_cat"
    r"|collect_results_[gc]pu"
)
_SERIALIZATION = re.compile(r"torch[/\\]serialization\.py|safetensors[/\\]|\bmodeling_utils\.py")
_LOADING = re.compile(
    r"load|_load|_legacy_load|load_file|load_tensor|persistent_load|\w*restore_location|\w*deserialize"
)
_MODULE_FILES = re.compile(
    r"torch[/\\]nn[/\\]modules[/\\]module\.py|accelerate[/\\]utils[/\\]modeling\.py|core_model_loading\.py"
    r"|\bmodeling_utils\.py|fsdp[/\\]_init_utils\.py"
)
_MOVING = re.compile(
    r"_apply|convert|_move_module_to_device|_move_states_to_device|set_module_tensor_to_device|_load_\w*state_dict\w*|_materialize_copy|to"
)
_PINNING = re.compile(r"_pin_memory_loop|pin_memory(?:_batch)?|do_one_step")
_PINNING_CODE = re.compile(
    r"\.pin_memory\(|torch\.(?:empty|zeros|ones|full|rand|randn|tensor)(?:_like)?\(.{0,200}\bpin_memory=True"
)
_COMMUNICATION = re.compile(r"distributed_c10d\.py|torch[/\\]cuda[/\\]nccl\.py|_functional_collectives\.py")
_TRITON = re.compile(r"[/\\]triton[/\\]|[/\\]_?inductor[/\\]runtime[/\\]")
_TENSOR_FILES = re.compile(r"torch[/\\]_tensor\.py|torch[/\\]nn[/\\]parameter\.py|torch[/\\]storage\.py")
_STATE_GATHERING = re.compile(
    r"_full_(?:pre|post)_state_dict_hook|_?summon_full_params|_unshard_(?:fsdp_)?(?:state_)?params|full_tensor"
    r"|_gather_(?:orig_param_state|all_orig_param_state|state_dict|full_state\w{0,20})|_optim_state_dict(?:_impl)?"
    r"|_zero3_consolidated_16bit_state_dict|consolidate_state_dict|get_full_\w{0,20}state_dict"
)
_ENGINE_START = re.compile(r"_ddp_init_helper|_create_fp32_partitions")
_ENGINE_CODE = re.compile(r"single_partition_of_fp32_groups\.append|fp32_partitioned_groups_flat\.append")
_MEGATRON_START = re.compile(r"param_and_grad_buffer\.py|distrib_optimizer\.py")
_TRAINING = re.compile(
    r"training_step|train_step|train(?:_one)?_epoch|train(?:_loop)?|fit|_inner_training_loop|backward|_run_backward"
)
_TRAINING_FILE = re.compile(r"(?:^|[/\\_])(?:pre|fine)?_?(?:train|tune|tuning)(?:ing)?\w*\.py$")
_SHARING = re.compile(r"multiprocessing[/\\](?:heap|shared_memory|reductions|reduction)\.py")


def _in_optimizer(place: Place) -> bool:
    return bool(_OPTIMIZER.search(place.file))


def _makes_state(place: Place) -> bool:
    return bool(_STATE.fullmatch(place.function) or _STATE_CODE.search(place.code))


def _updates_parameters(place: Place) -> bool:
    return bool(_UPDATING.fullmatch(place.function) and _in_optimizer(place))


def _evaluates(place: Place) -> bool:
    return bool(_EVALUATING.fullmatch(place.function))


def _gathers_evaluation(place: Place) -> bool:
    return bool(_GATHERING.fullmatch(place.function))


def _loads_checkpoint(place: Place) -> bool:
    if place.function in ("load_state_dict", "restore_optimizers", "_process_value_according_to_param_policy"):
        return True
    return bool(_SERIALIZATION.search(place.file) and _LOADING.fullmatch(place.function))


def _moves_model(place: Place) -> bool:
    if place.function in ("from_pretrained", "caching_allocator_warmup"):
        return True
    return bool(_MODULE_FILES.search(place.file) and _MOVING.fullmatch(place.function))


def _pins_memory(place: Place) -> bool:
    in_thread = _PINNING.fullmatch(place.function) and place.file.endswith("pin_memory.py")
    return bool(in_thread or place.function == "pin_memory" or _PINNING_CODE.search(place.code))


def _communicates(place: Place) -> bool:
    return bool(_COMMUNICATION.search(place.file))


def _in_triton(place: Place) -> bool:
    return bool(_TRITON.search(place.file))


def _shares_memory(place: Place) -> bool:
    return bool(_SHARING.search(place.file))


def _copies_tensors(place: Place) -> bool:
    return place.function == "__deepcopy__" and bool(_TENSOR_FILES.search(place.file))


def _gathers_state(place: Place) -> bool:
    return bool(_STATE_GATHERING.fullmatch(place.function))


def _starts_engine(place: Place) -> bool:
    in_megatron = _MEGATRON_START.search(place.file) and place.function in ("__init__", "_build_model_param_groups")
    return bool(in_megatron or _ENGINE_START.fullmatch(place.function) or _ENGINE_CODE.search(place.code))


def _starts_device(place: Place) -> bool:
    return place.function == "_lazy_init" or "_cuda_init()" in place.code


def _trains(place: Place) -> bool:
    return bool(_TRAINING.fullmatch(place.function) or _TRAINING_FILE.search(place.file) or _in_optimizer(place))


def _switches_gradients_off(place: Place) -> bool:
    return place.function == "decorate_context"


def _runs_without_gradients(places: tuple[Place, ...]) -> bool:
    """Return True if a module is called inside a function under `torch.no_grad` or `torch.inference_mode`."""
    is_off = False
    for place in places:
        is_off |= _switches_gradients_off(place)
        if is_off and _calls_module(place):
            return True
    return False


def _calls_module(place: Place) -> bool:
    return place.function == "_call_impl"


def _in(pattern: str) -> Callable[[Place], object]:
    return lambda place: re.search(pattern, place.file)


_INFERENCE: dict[str, Callable[[Place], object]] = {
    "vLLM": _in(r"[/\\]vllm[/\\]"),
    "SGLang": _in(r"[/\\]sglang[/\\]"),
    "ComfyUI": _in(r"[/\\]comfy[/\\]|ComfyUI[/\\]"),
    "Stable Diffusion web UI": _in(r"stable-diffusion-webui"),
    "diffusers": _in(r"[/\\]diffusers[/\\](?:pipelines|models[/\\]autoencoders)[/\\]"),
    "a model": _in(
        r"whisper[/\\](?:transcribe|decoding)\.py|ultralytics[/\\]engine[/\\]predictor\.py"
        r"|sentence_transformers[/\\]SentenceTransformer\.py"
    ),
    "generation": _in(r"[/\\]transformers[/\\](?:generation[/\\]|pipelines[/\\])"),
}
"""Programs that run models, by the files of their tracebacks."""
_LARGE_TENSORS: dict[str, Callable[[Place], object]] = {
    "boxes": lambda place: re.search(r"bbox_overlaps|pairwise_(?:iou|intersection)|\bbox_iou", place.function),
    "transducer": lambda place: re.search(r"rnnt|transducer", place.file) and "joint" in place.function,
}
"""Functions whose tensors are known to be large: keys of LARGE_TENSORS."""


_INFORMATIVE: tuple[Callable[[Place], object], ...] = (
    _in_optimizer,
    _makes_state,
    _updates_parameters,
    _evaluates,
    _gathers_evaluation,
    _loads_checkpoint,
    _moves_model,
    _pins_memory,
    _communicates,
    _in_triton,
    _shares_memory,
    _copies_tensors,
    _gathers_state,
    _starts_engine,
    _starts_device,
    _trains,
    _switches_gradients_off,
    *_LARGE_TENSORS.values(),
    *_INFERENCE.values(),
    lambda place: _WINDOWS.match(place.file),
)

_NAME = r"([\w.]{1,500}|<\w{1,100}>)"
_INDENT = r"(?:\r?\n|\\n)[^\n]{0,200}? {4,200}(?!\s|File |\^|~)"
"""Pattern of the indent of a code line in a traceback, behind any prefix of a logger."""
_PLACE = re.compile(
    rf'File \\?"([^"\n]{{1,3000}}?)\\?", line (\d{{1,9}}), in {_NAME}(?:{_INDENT}((?:(?!\\n)[^\n]){{1,300}}))?'
)
_CODE = re.compile(r"(?:❱|-{1,10}>) {0,9}(\d{1,9})[ │|]{1,200}([^\n]{1,300})")
"""The running statement as rich and notebooks mark it, with its line."""
_RICH = re.compile(
    rf"[│|❱]\s{{1,20}}(\S[^│|\n]{{0,1000}}\.py):(\d{{1,9}})(?:\s{{0,200}}[│|]\n[│|])?\s{{1,9}}in {_NAME}"
)
_IPYTHON = re.compile(rf"File (\S{{1,1000}}?):(\d{{1,9}}), in {_NAME}")
_CELL = re.compile(
    r"^\[?(\S{1,3000}\.py|<ipython-input-[^>\n]{1,100}>)(?:\]\(\S{1,500}\))? in (\w{1,500}|<module>)\(", re.MULTILINE
)
_INPUT = re.compile(rf"(?:Cell |Input )In ?\[\d{{1,9}}\], (?:line (\d{{1,9}}), )?in {_NAME}")
_HEADER = re.compile(r"Traceback \(most recent call last\)")
_OUT_OF_MEMORY = re.compile(r"(?:[Oo]ut of memory|OutOfMemoryError|\bMemoryError|o allocate )(?!\s{0,200}Traceback)")
_SETTING = re.compile(
    r"try setting\s{1,20}\S{0,200}expandable_segments:True"
    r"|expandable_segments[\"']?\s{0,20}[:=]\s{0,20}[\"']?(True|False)",
    re.IGNORECASE,
)
"""The first alternative is torch's advice, which does not mean that the setting is on."""
_LINE = 2000
"""Largest number of characters between the beginning of a line and a place of a traceback in it."""
MOST_PLACES = 1000
"""Largest number of lines of a traceback that are kept, besides earlier ones that carry a fact by themselves."""


class _Traceback:
    """The traceback of one process that belongs to its first out-of-memory error."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self._is_over = False

    def begin(self) -> None:
        """Drop the places of an earlier traceback, unless that one ended in an out-of-memory error."""
        if not self._is_over:
            self.places.clear()

    def add(self, place: Place) -> None:
        if not self._is_over:
            self.places.append(place)
            self.places = _informative(self.places)

    def complete(self, line: int, code: str) -> None:
        """Record the statement that a rich or notebook traceback marks below its last place."""
        if self.places and not self._is_over and self.places[-1].line in (0, line):
            self.places[-1] = replace(self.places[-1], code=code)

    def end(self) -> None:
        """Record that the error of this traceback is an out-of-memory error."""
        self._is_over = self._is_over or bool(self.places)


class FactReader:
    """Reader of the facts in a log that comes in pieces."""

    def __init__(self) -> None:
        self._window = ""
        self._has_moved = False
        self._finders = {
            "place": PatternFinder(_PLACE, ('File "', 'File \\"')),
            "rich": PatternFinder(_RICH, ("│", "|")),
            "ipython": PatternFinder(_IPYTHON, (", in ",)),
            "cell": PatternFinder(_CELL, (".py in ", "> in ", ") in ")),
            "code": PatternFinder(_CODE, ("❱", "->")),
            "input": PatternFinder(_INPUT, ("In [", "In[")),
            "header": PatternFinder(_HEADER, ("Traceback (",)),
            "error": PatternFinder(_OUT_OF_MEMORY, ("ut of memory", "MemoryError", "o allocate ")),
            "setting": PatternFinder(_SETTING, ("",)),
        }
        self._tracebacks: dict[str | None, _Traceback] = {}
        self._expandable: bool | None = None

    def read(self, piece: str, *, is_last: bool) -> None:
        """Read the next `piece` of the text, and record the facts that are complete with it."""
        self._window += piece
        matches = [
            (match.start(), kind, match)
            for kind, finder in self._finders.items()
            for match in finder.found(self._window, is_last=is_last)
        ]
        for _, kind, match in sorted(matches, key=lambda entry: entry[0]):
            self._take(kind, match)
        over = max(0, len(self._window) - LONGEST - _LINE)
        self._window, self._has_moved = self._window[over:], self._has_moved or over > 0
        for finder in self._finders.values():
            finder.move_on(over)

    def facts(self) -> Facts:
        """Return all facts read so far."""
        places = tuple(place for traceback in self._tracebacks.values() for place in traceback.places)
        is_windows = any(_WINDOWS.match(place.file) for place in places)
        return Facts(places=places, expandable=self._expandable, windows=is_windows)

    def _take(self, kind: str, match: re.Match[str]) -> None:
        if kind == "setting":
            self._expandable = match[1].lower() == "true" if match[1] else self._expandable
            return
        process = self._process(match.start())
        traceback = self._tracebacks.get(process)
        if traceback is None:
            if len(self._tracebacks) >= MOST_PLACES:
                return
            traceback = self._tracebacks[process] = _Traceback()
        if kind == "header":
            traceback.begin()
        elif kind == "error":
            traceback.end()
        elif kind == "code":
            traceback.complete(int(match[1]), match[2].strip(" │|"))
        else:
            traceback.add(_place(kind, match, process))

    def _process(self, position: int) -> str | None:
        """Return the process that the line of `position` begins with, if it begins at most _LINE characters before."""
        begin = self._window.rfind("\n", max(0, position - _LINE), position) + 1
        if begin == 0 and (self._has_moved or position > _LINE):
            return None
        prefix = PREFIX.match(self._window, begin, position)
        return None if prefix is None else process_named(prefix)


def _place(kind: str, match: re.Match[str], process: str | None) -> Place:
    if kind == "cell":
        return Place(file=match[1], line=0, function=match[2], process=process)
    if kind == "input":
        return Place(file="cell", line=int(match[1] or 0), function=match[2], process=process)
    function = match[3] if kind == "place" else match[3].rpartition(".")[2]
    return Place(
        file=match[1].replace("\\\\", "\\"),
        line=int(match[2]),
        function=function.rstrip("."),
        process=process,
        code=(match[4] or "").strip() if kind == "place" else "",
    )


def _informative(places: list[Place]) -> list[Place]:
    """Return the last of very many places, and earlier ones that carry a fact of their own."""
    if len(places) < 2 * MOST_PLACES:
        return places
    before, last = places[:-MOST_PLACES], places[-MOST_PLACES:]
    first = [next((n for n, place in enumerate(before) if tells(place)), -1) for tells in _INFORMATIVE]
    own = max((n for n, place in enumerate(before) if not _INSTALLED.search(place.file)), default=-1)
    return [*(before[n] for n in sorted({*first, own} - {-1})), *last]
