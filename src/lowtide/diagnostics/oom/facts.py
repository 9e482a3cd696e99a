"""Facts about an out-of-memory error that its message lacks, from a log's traceback or from the running process."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from lowtide.diagnostics.oom.message import Holder
from lowtide.diagnostics.oom.text_stream import LONGEST, PREFIX, PatternFinder, parse_process
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
    """The statement that was running, if the traceback shows it."""

    @property
    def short(self) -> str:
        """Text such as `train.py:42 in step`."""
        name = re.split(r"[/\\]", self.file)[-1]
        return f"{name}:{self.line} in {self.function}" if self.line else f"{name} in {self.function}"


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Pattern of a traceback line: its file and function must match, or its statement.

    If only one of `file` and `function` is given, the other one may be any.
    """

    file: str = ""
    function: str = ""
    """Pattern that the whole name must match."""
    code: str = ""

    def matches(self, place: Place) -> bool:
        """Return True if the traceback line `place` matches the pattern."""
        has_place = bool(self.file or self.function) and re.search(self.file, place.file)
        has_function = has_place and (not self.function or re.fullmatch(self.function, place.function))
        return bool(has_function or (self.code and re.search(self.code, place.code)))


_OPTIMIZER = r"[/\\]optim[/\\]|optimizer|transformers[/\\]optimization\.py"


class Sign(Enum):
    """Facts that a single line of a traceback shows, and the patterns of such lines."""

    IN_OPTIMIZER = _Pattern(file=_OPTIMIZER)
    """An optimizer's step was running."""
    IN_TORCH_OPTIMIZER = _Pattern(file=r"torch[/\\]optim[/\\]")
    """The step of one of torch's own optimizers was running."""
    MAKES_STATE = _Pattern(
        function=r"_?init_group|_new_buffer|_?init_states?|_?initialize_(?:optimizer_)?states?|get_state_buffer",
        code=r"\bstate\[.{1,60}\]\s?=\s?torch\.(?:zeros|empty|full|ones|clone)",
    )
    """The optimizer was creating its state."""
    UPDATES_WITH_TEMPORARIES = _Pattern(file=_OPTIMIZER, function=r"_(?:multi|single)_tensor_\w+")
    """The optimizer was updating parameters, and its state was there."""
    EVALUATES = _Pattern(
        function=r"_?(?:on_|run_|do_)?"
        r"(?:eval|evaluate|evaluation|val|valid|validate|validation|predict|prediction|test)"
        r"(?:_(?:loop|step|epoch|end|batch|one|model|set|loader|dataset|metrics))*"
    )
    """An evaluation was running."""
    GATHERS_EVALUATION = _Pattern(
        function=r"nested_(?:concat|gather|numpify)|torch_pad_and_concatenate|numpy_pad_and_concatenate"
        r"|to_cpu_and_numpy|_?pad_across_processes|gather_for_metrics|(?:add_)?arrays?_?to_container"
        r"|distributed_concat|dim_zero_cat|collect_results_[gc]pu",
        code=r"\bnested_concat\(",
    )
    """Predictions of several batches were being concatenated."""
    LOADS_STATE = _Pattern(function=r"load_state_dict|restore_optimizers|_process_value_according_to_param_policy")
    """A state dict was being loaded into a model or an optimizer."""
    READS_CHECKPOINT = _Pattern(
        file=r"torch[/\\]serialization\.py|safetensors[/\\]|\bmodeling_utils\.py",
        function=r"load|_load|_legacy_load|load_file|load_tensor|persistent_load|\w*restore_location|\w*deserialize",
    )
    """A checkpoint was being read."""
    MOVES_MODEL = _Pattern(
        file=r"torch[/\\]nn[/\\]modules[/\\]module\.py|accelerate[/\\]utils[/\\]modeling\.py|core_model_loading\.py"
        r"|\bmodeling_utils\.py|fsdp[/\\]_init_utils\.py",
        function=r"_apply|convert|_move_module_to_device|_move_states_to_device|set_module_tensor_to_device"
        r"|_load_\w*state_dict\w*|_materialize_copy|to",
    )
    """A model was being moved to a device."""
    LOADS_WEIGHTS = _Pattern(function=r"from_pretrained|_load_pretrained_model|caching_allocator_warmup")
    """A model was being created with its weights."""
    PINS_MEMORY = _Pattern(
        function=r"pin_memory",
        code=r"\.pin_memory\(|HostRegister\(|torch\.(?:empty|zeros|ones|full|rand|randn|tensor)(?:_like)?\(.{0,200}\bpin_memory=True",
    )
    """Tensors were being copied to pinned host memory."""
    PINS_BATCHES = _Pattern(file=r"pin_memory\.py$", function=r"_pin_memory_loop|pin_memory(?:_batch)?|do_one_step")
    """The DataLoader's thread was copying a batch to pinned host memory."""
    STARTS_COMMUNICATION = _Pattern(
        file=r"distributed_c10d\.py|torch[/\\]cuda[/\\]nccl\.py|_functional_collectives\.py"
    )
    """A collective operation was running. The library allocates its buffers at first use."""
    IN_WORKER = _Pattern(file=r"_utils[/\\]worker\.py$", function=r"_worker_loop")
    """A DataLoader worker was creating a batch."""
    IN_TRITON = _Pattern(file=r"[/\\]triton[/\\]|[/\\]_?inductor[/\\]runtime[/\\]")
    """Triton was loading or launching a kernel."""
    SHARES_MEMORY = _Pattern(file=r"multiprocessing[/\\](?:heap|shared_memory|reductions|reduction)\.py")
    """Tensors were being passed between processes."""
    COPIES_TENSORS = _Pattern(
        file=r"torch[/\\]_tensor\.py|torch[/\\]nn[/\\]parameter\.py|torch[/\\]storage\.py", function=r"__deepcopy__"
    )
    """Tensors were being copied by `copy.deepcopy`."""
    GATHERS_STATE = _Pattern(
        function=r"_full_(?:pre|post)_state_dict_hook|_?summon_full_params|_unshard_(?:fsdp_)?(?:state_)?params"
        r"|full_tensor|_gather_(?:orig_param_state|all_orig_param_state|state_dict|full_state\w{0,20})"
        r"|_optim_state_dict(?:_impl)?|_zero3_consolidated_16bit_state_dict|consolidate_state_dict"
        r"|get_full_\w{0,20}state_dict"
    )
    """Sharded parameters or optimizer state were being gathered to full tensors, as for a checkpoint."""
    STARTS_ENGINE = _Pattern(
        function=r"_ddp_init_helper|_create_fp32_partitions",
        code=r"single_partition_of_fp32_groups\.append|fp32_partitioned_groups_flat\.append",
    )
    """DistributedDataParallel or DeepSpeed was allocating its own buffers, before the first step."""
    STARTS_MEGATRON = _Pattern(
        file=r"param_and_grad_buffer\.py|distrib_optimizer\.py", function=r"__init__|_build_model_param_groups"
    )
    """Megatron was allocating its own buffers, before the first step."""
    STARTS_DEVICE = _Pattern(
        function=r"_lazy_init|set_device|manual_seed(?:_all)?",
        code=r"_cuda_init\(\)|_cuda_setDevice\(|default_generator\.manual_seed\(",
    )
    """The process was creating its context on the device."""
    TRAINS = _Pattern(
        function=r"training_step|train_step|train(?:_one)?_epoch|train(?:_loop)?|fit|_inner_training_loop|backward"
        r"|_run_backward"
    )
    """A training function was running."""
    IN_TRAINING_FILE = _Pattern(file=r"(?:^|[/\\_])(?:pre|fine)?_?(?:train|tune|tuning)(?:ing)?\w*\.py$")
    """Code of a training script was running, judged by the file's name."""
    SWITCHES_GRADIENTS_OFF = _Pattern(function=r"decorate_context")
    """A function under `torch.no_grad` or `torch.inference_mode` was running."""

    def matches(self, place: Place) -> bool:
        """Return True if the traceback line `place` shows this fact."""
        return self.value.matches(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(Record):
    """Facts about a process that ran out of memory. Unknown facts are None, False, 0 or empty."""

    places: tuple[Place, ...] = ()
    """Lines of the traceback, outermost first."""
    expandable: bool | None = None
    """True if `expandable_segments` was on."""
    windows: bool = False
    program: str = ""
    """Inference program named in the prefixes or banners of the log: a key of INFERENCE."""
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
    is_planned: bool = False
    """True if the model ran under a plan."""
    saves_most: bool = False
    """True if the model's last call ran under the plan with the smallest peak."""
    plain_peak_bytes: int | None = None
    static_bytes: int | None = None
    """Bytes in use before the step begins. No plan can lower them."""
    notes: tuple[str, ...] = ()

    def shows(self, *signs: Sign) -> bool:
        """Return True if a line of the traceback shows one of the facts `signs`."""
        return any(sign.matches(place) for sign in signs for place in self.places)

    @property
    def gathers_evaluation(self) -> bool:
        """True if an evaluation was concatenating the predictions of several batches."""
        joins = any(Sign.EVALUATES.matches(place) and _JOINING.search(place.code) for place in self.places[-1:])
        return joins or self.shows(Sign.GATHERS_EVALUATION)

    @property
    def large_tensor(self) -> str:
        """Key of LARGE_TENSORS for the tensor that was being created; empty if it is none of these."""
        return next((name for name, sign in _LARGE_TENSORS.items() if any(map(sign.matches, self.places))), "")

    @property
    def divisible_tensor(self) -> str:
        """Key of DIVISIBLE_TENSORS for the tensor that the innermost traceback lines create; empty if none of these."""
        innermost = self.places[-2:]
        return next((name for name, sign in _DIVISIBLE_TENSORS.items() if any(map(sign.matches, innermost))), "")

    @property
    def inference(self) -> str:
        """Name of the inference program that ran out of memory; empty if none is known."""
        if self.shows(Sign.TRAINS, Sign.IN_TRAINING_FILE, Sign.IN_OPTIMIZER):
            return ""
        named = (name for place in reversed(self.places) for name, sign in _INFERENCE.items() if sign.matches(place))
        return next(named, self.program or ("a model" if self._calls_module_without_gradients() else ""))

    @property
    def own_place(self) -> Place | None:
        """Innermost line of the traceback outside installed packages; None if there is none."""
        own = [place for place in self.places if not _INSTALLED.search(place.file)]
        return own[-1] if own else None

    def _calls_module_without_gradients(self) -> bool:
        """Return True if a module is called inside a function under `torch.no_grad` or `torch.inference_mode`."""
        places = iter(self.places)
        is_off = any(map(Sign.SWITCHES_GRADIENTS_OFF.matches, places))
        return is_off and any(place.function == "_call_impl" for place in places)

    def of_process(self, process: str | None) -> Facts:
        """Return these facts without the traceback lines of processes other than `process`."""
        return replace(self, places=tuple(place for place in self.places if place.process in (None, process)))


_INSTALLED = re.compile(r"(?:site|dist)-packages|[/\\]lib[/\\]python3|<frozen|<__array_function__|lowtide[/\\]oom[/\\]")
_JOINING = re.compile(r"\b(?:cat|concat|concatenate|[vh]?stack|nested_concat)\(")
_INFERENCE = {
    "vLLM": _Pattern(file=r"[/\\]vllm[/\\]"),
    "SGLang": _Pattern(file=r"[/\\]sglang[/\\]"),
    "ComfyUI": _Pattern(file=r"[/\\]comfy[/\\]|ComfyUI[/\\]"),
    "Stable Diffusion web UI": _Pattern(file=r"stable-diffusion-webui"),
    "diffusers": _Pattern(file=r"[/\\]diffusers[/\\](?:pipelines|models[/\\]autoencoders)[/\\]"),
    "a model": _Pattern(
        file=r"whisper[/\\](?:transcribe|decoding)\.py|ultralytics[/\\]engine[/\\]predictor\.py"
        r"|sentence_transformers[/\\]SentenceTransformer\.py"
    ),
    "generation": _Pattern(file=r"[/\\]transformers[/\\](?:generation[/\\]|pipelines[/\\])"),
}
"""Programs that run models, by the files of their tracebacks."""
_LARGE_TENSORS = {
    "boxes": _Pattern(function=r".*(?:bbox_overlaps|pairwise_(?:iou|intersection)|\bbox_iou).*"),
    "transducer": _Pattern(file=r"rnnt|transducer", function=r".*joint.*"),
}
"""Functions whose tensors are known to be large: keys of LARGE_TENSORS."""
_DIVISIBLE_TENSORS = {
    "logits": _Pattern(
        function=r"\w*cross_entropy\w*|\w*log_softmax|For\w+LMLoss|calculate_\w*logits\w*",
        code=r"\blogits\.float\(\)|\blm_head\(",
    ),
    "attention scores": _Pattern(
        code=r"softmax\((?:attn|att|scores|attention)|\b(?:q|query\w*)\b.{0,10}@ ?\(?k|matmul\(q\w*, ?k|baddbmm\("
    ),
}
"""Lines that create tensors of DIVISIBLE_TENSORS."""
_PROGRAM = re.compile(
    r"(?P<ComfyUI>!!! Exception during processing)|(?P<vLLM>\((?:VllmWorker|EngineCore|Worker(?:_[TPD]P\d| pid=)))"
    r"|(?P<server>-std(?:out|err) (?:MODEL_LOG|com\.amazonaws\.ml\.mms))"
    r"|(?P<Ollama>\bollama(?:\[\d{1,9}\]: |/ollama/| (?:run|serve)\b)|\.ollama[/\\]models)"
)
"""A banner of ComfyUI, or a prefix of processes of vLLM, TorchServe, SageMaker's model server or Ollama."""
_WINDOWS = _Pattern(file=r"^[A-Za-z]:\\")
_INFORMATIVE: tuple[Sign | _Pattern, ...] = (*Sign, *_LARGE_TENSORS.values(), *_INFERENCE.values(), _WINDOWS)

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
"""Largest number of traceback lines that are kept, in addition to earlier lines that show a fact by themselves."""


class _Traceback:
    """The traceback of one process that belongs to its first out-of-memory error."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self._is_over = False

    def begin(self) -> None:
        """Drop the lines of the previous traceback, unless it ended in an out-of-memory error."""
        if not self._is_over:
            self.places.clear()

    def add(self, place: Place) -> None:
        if not self._is_over:
            self.places.append(place)
            self.places = _shorten(self.places)

    def complete(self, line: int, code: str) -> None:
        """Record the statement that a traceback of rich or a notebook marks as running."""
        if self.places and not self._is_over and self.places[-1].line in (0, line):
            self.places[-1] = replace(self.places[-1], code=code)

    def end(self) -> None:
        """Record that the error of this traceback is an out-of-memory error."""
        self._is_over = self._is_over or bool(self.places)


class FactReader:
    """Reader of a failed run's log in pieces. It collects facts from tracebacks, settings and banners of programs."""

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
            "program": PatternFinder(
                _PROGRAM, ("!!! Exception", "(VllmWorker", "(EngineCore", "(Worker", "-std", "ollama")
            ),
            "setting": PatternFinder(_SETTING, ("",)),
        }
        self._tracebacks: dict[str | None, _Traceback] = {}
        self._expandable: bool | None = None
        self._program = ""

    def read(self, piece: str, *, is_last: bool) -> None:
        """Read `piece`, the next part of the text, and record the facts in it."""
        self._window += piece
        matches = [
            (match.start(), kind, match)
            for kind, finder in self._finders.items()
            for match in finder.find_new_matches(self._window, is_last=is_last)
        ]
        for _, kind, match in sorted(matches, key=lambda entry: entry[0]):
            self._record_match(kind, match)
        over = max(0, len(self._window) - LONGEST - _LINE)
        self._window, self._has_moved = self._window[over:], self._has_moved or over > 0
        for finder in self._finders.values():
            finder.move_on(over)

    def facts(self) -> Facts:
        """Return the facts about the failure in the text that was read so far."""
        places = tuple(place for traceback in self._tracebacks.values() for place in traceback.places)
        is_windows = any(map(_WINDOWS.matches, places))
        return Facts(places=places, expandable=self._expandable, windows=is_windows, program=self._program)

    def _record_match(self, kind: str, match: re.Match[str]) -> None:
        if kind == "setting":
            self._expandable = match[1].lower() == "true" if match[1] else self._expandable
            return
        if kind == "program":
            self._program = "a model" if match["server"] else str(match.lastgroup)
            return
        process = self._find_process(match.start())
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
            traceback.add(_make_place(kind, match, process))

    def _find_process(self, position: int) -> str | None:
        """Return the process named at the start of the log line that contains `position`.

        Return None if the line names no process, or if its start is more than _LINE characters away.
        """
        begin = self._window.rfind("\n", max(0, position - _LINE), position) + 1
        if begin == 0 and (self._has_moved or position > _LINE):
            return None
        prefix = PREFIX.match(self._window, begin, position)
        return None if prefix is None else parse_process(prefix)


def _make_place(kind: str, match: re.Match[str], process: str | None) -> Place:
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


def _shorten(places: list[Place]) -> list[Place]:
    """Shorten a long traceback to its last MOST_PLACES lines, preceded by earlier lines that show a fact."""
    if len(places) < 2 * MOST_PLACES:
        return places
    before, last = places[:-MOST_PLACES], places[-MOST_PLACES:]
    first = [next((n for n, place in enumerate(before) if sign.matches(place)), -1) for sign in _INFORMATIVE]
    own = max((n for n, place in enumerate(before) if not _INSTALLED.search(place.file)), default=-1)
    return [*(before[n] for n in sorted({*first, own} - {-1})), *last]
