"""The tools and settings of each device vendor, by the kind of memory that ran out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """Commands and settings for one kind of device. Those that do not exist are empty."""

    monitor: str
    """Command or program that shows the memory of the device by process."""
    visible_devices: str
    """Environment variable that selects devices."""
    fraction: str
    """Setting that limits the memory of a process."""
    libraries: str
    """Libraries that allocate outside PyTorch."""


_CUDA = Vendor(
    monitor="nvidia-smi",
    visible_devices="CUDA_VISIBLE_DEVICES",
    fraction="torch.cuda.set_per_process_memory_fraction",
    libraries="a context is 0.3 to 0.7 GiB; NCCL, TensorRT, vLLM and bitsandbytes take more",
)
_VENDORS = {
    "cuda": _CUDA,
    "hip": Vendor(
        monitor="rocm-smi --showpids",
        visible_devices="HIP_VISIBLE_DEVICES",
        fraction="torch.cuda.set_per_process_memory_fraction",
        libraries="a context is 0.3 to 0.7 GiB; RCCL, MIOpen's workspaces and vLLM take more",
    ),
    "xpu": Vendor(
        monitor="xpu-smi ps",
        visible_devices="ZE_AFFINITY_MASK",
        fraction="torch.xpu.set_per_process_memory_fraction",
        libraries="oneDNN's workspaces and oneCCL",
    ),
    "npu": Vendor(
        monitor="npu-smi info",
        visible_devices="ASCEND_RT_VISIBLE_DEVICES",
        fraction="torch_npu.npu.set_per_process_memory_fraction",
        libraries="HCCL's buffers (HCCL_BUFFSIZE) and operator workspaces",
    ),
    "mps": Vendor(
        monitor="Activity Monitor",
        visible_devices="",
        fraction="PYTORCH_MPS_HIGH_WATERMARK_RATIO",
        libraries="compiled graphs of MPS, one for each input shape, and other Metal code of the process",
    ),
    "hpu": Vendor(
        monitor="hl-smi",
        visible_devices="HABANA_VISIBLE_MODULES",
        fraction="",
        libraries="HCCL's buffers and compiled recipes",
    ),
    "musa": Vendor(
        monitor="mthreads-gmi",
        visible_devices="MUSA_VISIBLE_DEVICES",
        fraction="torch_musa.set_per_process_memory_fraction",
        libraries="MCCL and muDNN's workspaces",
    ),
    "mlu": Vendor(
        monitor="cnmon",
        visible_devices="MLU_VISIBLE_DEVICES",
        fraction="torch_mlu.mlu.set_per_process_memory_fraction",
        libraries="CNCL and CNNL's workspaces",
    ),
    "gcu": Vendor(monitor="efsmi", visible_devices="TOPS_VISIBLE_DEVICES", fraction="", libraries="ECCL's buffers"),
    "neuron": Vendor(
        monitor="neuron-top",
        visible_devices="NEURON_RT_VISIBLE_CORES",
        fraction="",
        libraries="compiled graphs and their scratch memory",
    ),
    "directml": Vendor(
        monitor="Task Manager (Performance, GPU)",
        visible_devices="",
        fraction="",
        libraries="the desktop and other programs share this memory",
    ),
    "xla": Vendor(
        monitor="tpu-info",
        visible_devices="TPU_VISIBLE_CHIPS",
        fraction="XLA_PYTHON_CLIENT_MEM_FRACTION",
        libraries="compiled programs and their temporaries",
    ),
    "jax": Vendor(
        monitor="nvidia-smi",
        visible_devices="CUDA_VISIBLE_DEVICES",
        fraction="XLA_PYTHON_CLIENT_MEM_FRACTION",
        libraries="JAX preallocates 75 % of the device (XLA_PYTHON_CLIENT_PREALLOCATE=false)",
    ),
}
_LIBRARIES = {"hipblas": "hip", "rocblas": "hip", "miopen": "hip", "rccl": "hip"}


def find_vendor(kind: str) -> Vendor:
    """Return the commands and settings for a message's kind: `hip`, `hip driver`, or a library. Default is CUDA's."""
    name = kind.removesuffix(" driver")
    return _VENDORS.get(_LIBRARIES.get(name, name), _CUDA)
