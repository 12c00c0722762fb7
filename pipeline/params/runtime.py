"""Section `runtime`: what no stage tracks, because it changes speed, memory and logging but not the result."""

from typing import Literal

from pydantic import model_validator

from pipeline.params.section import Section, param


class RuntimeParams(Section):
    """Section `runtime`. Changing it reruns nothing. It may change rounding: see docs/reproducibility.md."""

    device: Literal["auto", "cpu", "cuda"] = param("auto takes a GPU where there is one", "auto")
    launch: Literal["single", "ddp", "fsdp"] = param(
        "processes at work on one stage: single: one; ddp: each holds the base; fsdp: they hold it together", "single"
    )
    processes: int = param("how many with ddp and fsdp, on GPUs one for each", 2, ge=2)
    threads: int = param("CPU threads of a process; the number changes the last bits of results", 2, ge=1)
    deterministic: bool = param("deterministic algorithms only", True)
    attention: Literal["auto", "recompute", "eager", "sdpa"] = param(
        "recompute: eager without keeping scores; auto: that on CPU, where sdpa's backward is slow, and sdpa on a GPU",
        "auto",
    )
    base_cache: Literal["auto", "on", "off"] = param(
        "keep dequantised weights in memory: the same numbers, faster, larger", "auto"
    )
    microbatch_tokens: int = param(
        "tokens per forward and backward, padding included; a longer row goes alone: memory grows with it", 1024, ge=1
    )
    rollout_chunk: int = param("prompts that are sampled together", 64, ge=1)
    decoder: Literal["auto", "transformers", "lean"] = param(
        "lean: sampling by fewer and larger operations, for the Llama family; auto: in bfloat16, where on CPU its numbers are "
        "those of transformers",
        "auto",
    )
    cuda_graphs: bool = param("on a GPU the lean decoder's step is recorded once and replayed", False)
    logprob_chunk: int = param("response tokens whose logits exist at once", 512, ge=1)
    check_memory: bool = param("a stage that cannot fit into memory by `make plan` does not start", True)
    gradient_checkpointing: bool = param("recompute activations in the backward pass: slower, smaller", False)
    compile: Literal["off", "layers"] = param(
        "layers: each block becomes compiled code at its first use, which takes a minute and a C++ compiler", "off"
    )
    packing: bool = param(
        "rows of a micro-batch go through the model as one, without padding, and do not see each other", False
    )
    checkpoint_steps: int = param("a training state is kept every so many optimizer steps", 100, ge=1)
    checkpoint_minutes: float = param("and where so many minutes have passed since the last one", 5.0, gt=0)
    progress: Literal["auto", "bars", "lines", "json", "quiet"] = param(
        "how a loop is shown; auto: bars on a terminal, quiet where the variable CI is set, lines elsewhere", "auto"
    )
    log_every: int = param("a line of numbers every so many steps", 5, ge=1)
    samples_every: int = param("a table of sampled answers in MLflow every so many PPO iterations", 5, ge=1)
    tracking_uri: str = param(
        "MLflow's database or server; the variable MLFLOW_TRACKING_URI goes before it", "sqlite:///mlflow.db"
    )
    tracking_wait: float = param(
        "seconds that a stage's end waits for MLflow; what it has not taken by then is sent later", 20.0, ge=0
    )
    experiment: str = param("MLflow's experiment", "solo-rlhf")

    @model_validator(mode="after")
    def _fsdp_holds_no_copies(self) -> "RuntimeParams":
        asked = {"base_cache": self.base_cache == "on", "compile": self.compile != "off"}
        for key, whole in asked.items():
            if self.launch == "fsdp" and whole:
                raise ValueError(
                    f"runtime.{key} is {getattr(self, key)} but with runtime.launch fsdp no process keeps whole weights; "
                    "set it to off, or runtime.launch to ddp."
                )
        return self
