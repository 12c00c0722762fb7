"""The GPU, its driver, and bitsandbytes on the device that stages will use."""

import shutil
import subprocess  # nosec B404
from collections.abc import Callable, Iterator

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from pipeline.doctor.findings import Finding

BLOCK = 64
# Half of the widest gap between two of NF4's levels, -1 and -0.696: no weight is further from its level, as a share of its block's
# largest. A hundredth is left for the rounding of scales.
WORST = 0.152 + 0.01
ASKED = "name,driver_version,memory.total,memory.used"
Ask = Callable[[], str | None]


def nvidia_smi() -> str | None:
    """Name, driver, memory and used memory of each NVIDIA GPU, a line each; None where the driver or a GPU is missing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    words = [program, f"--query-gpu={ASKED}", "--format=csv,noheader"]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)  # nosec B603
    return answer.stdout.strip() or None if answer.returncode == 0 else None


def look_at_gpu(
    wanted: str,
    ask: Ask = nvidia_smi,
    cuda_of_torch: str | None = torch.version.cuda,
    usable: Callable[[], bool] = torch.cuda.is_available,
) -> Iterator[Finding]:
    """Whether there is one, and torch can use it.

    wanted: `runtime.device`.
    """
    if usable():
        yield from _usable()
        return
    state = "fix" if wanted == "cuda" else "note"
    driver = ask()
    if driver is None:
        remedy = "set runtime.device to auto or cpu, or look why nvidia-smi shows none" if wanted == "cuda" else ""
        yield Finding("GPU", state, "none: stages run on the CPU", remedy)
    elif cuda_of_torch is None:
        yield Finding(
            "GPU",
            "fix",
            f"{driver.splitlines()[0]}; but torch {torch.__version__} is a build for the CPU",
            "install the build for CUDA: docs/doctor.md says how",
        )
    else:
        yield Finding(
            "GPU",
            "fix",
            f"{driver.splitlines()[0]}; but torch, built for CUDA {cuda_of_torch}, cannot use it",
            "install a driver that is new enough for that CUDA; or is CUDA_VISIBLE_DEVICES set?",
        )


def _usable() -> Iterator[Finding]:
    free, total = torch.cuda.mem_get_info()
    found = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding(
            "GPU", "fix", f"{found}; it has no bfloat16", "set base.dtype to float32, or take a card of Ampere or later"
        )
    elif free < 0.9 * total:
        yield Finding("GPU", "note", f"{found}: others use it", "nvidia-smi says who")
    else:
        yield Finding("GPU", "ok", found)


def look_at_quantization(device: torch.device) -> Iterator[Finding]:
    """Whether bitsandbytes quantises to NF4 and back here, no weight further off than NF4's levels allow."""
    weights_BI = torch.randn(64, BLOCK, generator=torch.Generator().manual_seed(0)).to(device)
    try:
        quantised, state = quantize_4bit(weights_BI, blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
        back_BI = dequantize_4bit(quantised, state)
        off = ((back_BI - weights_BI).abs().amax(1) / weights_BI.abs().amax(1)).max().item()
    except (RuntimeError, OSError, AttributeError) as error:  # a missing library shows as any of them
        text = f"does not work on {device}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        yield Finding(
            "bitsandbytes", "fix", text, "python -m bitsandbytes says more; base.quantization: none does without it"
        )
        return
    if off <= WORST:
        yield Finding("bitsandbytes", "ok", f"NF4 on {device}, a weight at most {off:.1%} of its block's largest off")
    else:
        text = f"NF4 on {device} gives wrong numbers: a weight is {off:.0%} of its block's largest off"
        yield Finding(
            "bitsandbytes", "fix", text, "base.quantization: none does without it; please report it to bitsandbytes"
        )
