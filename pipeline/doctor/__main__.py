"""`make doctor`: one line for each thing that the pipeline stands on, and what to do where something is wrong."""

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from rich.table import Table
from rich.text import Text

from pipeline.base_model import cache_folder
from pipeline.doctor.checkout import look_at, look_at_dvc, look_at_git
from pipeline.doctor.findings import Finding
from pipeline.doctor.gpu import look_at_gpu, look_at_quantization
from pipeline.doctor.machine import look_at_disk, look_at_packages, look_at_python
from pipeline.doctor.services import look_at_docker, look_at_mlflow, look_at_port
from pipeline.errors import UserError
from pipeline.loading import pick_device
from pipeline.params.base import BaseParams
from pipeline.params.check import check_params
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import load_section
from pipeline.preflight import check_memory, find_inputs, refuse_second_dvc
from pipeline.progress import console
from pipeline.stage import quiet_libraries
from pipeline.tracking.destination import destination

STYLES = {"ok": "green", "note": "yellow", "fix": "bold red"}


def examine() -> Iterator[Finding]:
    """From the ground up: the machine, the checkout, and where they are readable what the parameters ask for."""
    yield from chain(look_at_python(), look_at_packages(), look_at_git(), look_at_dvc(refuse_second_dvc))
    try:
        runtime, base = load_section("runtime", RuntimeParams), load_section("base", BaseParams)
    except UserError as error:
        yield Finding("parameters", "fix", str(error))
        return
    models = Path(HF_HUB_CACHE) if base.model.startswith("hf://") else cache_folder()
    yield from look_at_disk({"checkout": Path.cwd(), "models": models})
    yield from look_at_gpu(runtime.device)
    try:
        yield from look_at_quantization(pick_device(runtime))
    except UserError as error:
        yield Finding("bitsandbytes", "fix", str(error))
    yield from chain(look_at_docker(torch.cuda.is_available()), look_at_port(), look_at_mlflow(destination(runtime)))
    yield from chain(look_at("parameters", _parameters), look_at("data", _data), look_at("memory", _memory))


def _parameters() -> str:
    unusual = check_params()
    return "; ".join(unusual) if unusual else "all in their ranges, none unusual"


def _data() -> str:
    find_inputs()
    return "every source is there"


def _memory() -> str:
    check_memory()
    return "no stage is bound to fail; make plan says what each takes"


def table(findings: list[Finding]) -> Table:
    """What was found; a remedy under what it is for."""
    made = Table.grid(padding=(0, 2))
    for finding in findings:
        made.add_row(Text(finding.state, STYLES[finding.state]), finding.subject, Text(finding.text))
        if finding.remedy:
            made.add_row("", "", Text(f"→ {finding.remedy}", "bold"))
    return made


def main() -> None:
    """Exit status 1 where something is to be mended."""
    quiet_libraries()
    findings = list(examine())
    console.print(table(findings))
    wrong = sum(finding.state == "fix" for finding in findings)
    if wrong:
        console.print(f"\n{wrong} to mend before the pipeline can run as it should.", style="bold red", markup=False)
        sys.exit(1)
    console.print("\nNothing is in the way: make repro.", style="green", markup=False)


if __name__ == "__main__":
    main()
