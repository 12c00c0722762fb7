"""What the peer's measurements share: tokenizer, LoRA settings, the plain model with an adapter."""

import warnings
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.work import Work

PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets")


def prepare(work: Work) -> None:
    """Threads, seed, and no warnings."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(work.threads)
    torch.manual_seed(0)


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """The embedded model's, with a pad token that is not its end token: TRL masks every pad token out."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.padding_side = "left"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    return tokenizer


def lora_settings(work: Work) -> dict:
    """As in ours: alpha is twice the rank, no dropout."""
    return {"r": work.lora_r, "lora_alpha": 2 * work.lora_r, "lora_dropout": 0.0, "target_modules": "all-linear"}


def adapted_model(folder: Path, work: Work) -> PeftModel:
    """The 16-bit model with a fresh adapter, as PEFT makes it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora_settings(work)))
