"""Sampled tokens per second: plain transformers `generate` with the adapter on against ours, each gain switched on in turn.

python -m benchmarks.rollout [--json FILE]        (alone on the machine)

16 rows with prompts of 40 tokens on the embedded model in bfloat16; ours on the demo recipe's base and adapter, `generate` on the
unquantised base with PEFT's own adapter, its fastest. Each way samples its own answers, of the lengths that are asked for:

fixed: 24 tokens each.
varying: 8 to 64 tokens. `generate` goes on until the longest answer is done; only the tokens asked for count.
groups: 4 prompts with 4 answers of 24 tokens each.

Ways take turns, so that a machine that slows down slows all; medians. Merging and packing weights is part of the time.
"""

from benchmarks.parts import RECIPE, embedded_policy  # isort: skip  (before torch: it says how its threads wait)

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from pipeline.base_model import locate
from pipeline.data.examples import Prompt
from pipeline.params.base import LoraParams
from pipeline.params.section import load_section
from pipeline.roles import Policy
from pipeline.rollout import Sampling, generate_chunk
from pipeline.sampler import Decoder, OpenDecoder, TransformersDecoder, decoding

ROWS, PROMPT, FIXED, SHORTEST, LONGEST, REPEATS = 16, 40, 24, 8, 64, 5
STOP = 2  # which token ends answers is of no account: it comes when it is told to


class Told:
    """A decoder whose rows stop when they are told to, and at no other time.

    lengths_B: the tokens of each row's answer, the stop token included.
    shared: each prompt is read once; otherwise once for each row.
    """

    def __init__(self, decoder: Decoder, lengths_B: Tensor, shared: bool):
        self._decoder, self._lengths_B, self._shared = decoder, lengths_B, shared
        self._tokens = 0

    def start(self, tokens_UP: Tensor, mask_UP: Tensor, of_B: Tensor) -> Tensor:
        """As in `pipeline.sampler.Decoder`."""
        if self._shared:
            return self._told(self._decoder.start(tokens_UP, mask_UP, of_B))
        return self._told(self._decoder.start(tokens_UP[of_B], mask_UP[of_B], torch.arange(len(of_B))))

    def step(self, tokens_B: Tensor) -> Tensor:
        """As in `pipeline.sampler.Decoder`."""
        return self._told(self._decoder.step(tokens_B))

    def keep(self, going_B: Tensor) -> Tensor:
        """As in `pipeline.sampler.Decoder`."""
        order_B = self._decoder.keep(going_B)
        self._lengths_B = self._lengths_B[order_B]
        return order_B

    @torch.inference_mode()  # as the lean decoder makes them
    def _told(self, logits_BV: Tensor) -> Tensor:
        self._tokens += 1
        logits_BV[:, STOP] = torch.where(self._lengths_B == self._tokens, 1e4, -torch.inf)
        return logits_BV


def ours(
    policy: Policy, prompts: list[Prompt], lengths: list[int], opening: Callable, leave: bool, shared: bool
) -> None:
    """One rollout by ours; without `leave` all rows stay until the longest is done."""
    lengths_B = torch.tensor(lengths if leave else [max(lengths)] * len(lengths))
    asked = [(prompt, sample) for sample, prompt in enumerate(prompts)]
    sampling = Sampling(max(lengths), (STOP,), chunk=len(prompts), seed=1)
    with opening(policy) as open_decoder:
        told = lambda rows, columns: Told(open_decoder(rows, columns), lengths_B, shared)  # noqa: E731
        answers, _ = generate_chunk(policy, asked, sampling, 0, told)
    assert [len(answer) for answer in answers] == lengths_B.tolist()


@contextmanager
def as_in_training(policy: Policy) -> Iterator[OpenDecoder]:
    """transformers' forward on the adapted linears that training uses."""
    backbone = policy.backbone
    backbone.activate(policy.adapter)
    with backbone.inference():
        yield lambda rows, columns: TransformersDecoder(backbone, lambda x: F.linear(x, backbone.head_VH))


def for_sampling(policy: Policy, merge: bool, decoder: str) -> contextmanager:
    """As the pipeline does it."""
    return decoding(policy.backbone, policy.adapter, merge, decoder, False, PROMPT + LONGEST)


def theirs(model: PreTrainedModel, prompts: list[Prompt], lengths: list[int]) -> None:
    """One rollout by `generate`: pure sampling, all rows until the longest is done."""
    ids_BP = torch.tensor([prompt.ids for prompt in prompts])
    steps = max(lengths)
    settings = GenerationConfig(
        max_new_tokens=steps, min_new_tokens=steps, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0
    )
    with torch.no_grad():
        found = model.generate(input_ids=ids_BP, attention_mask=torch.ones_like(ids_BP), generation_config=settings)
    assert found.shape[1] == ids_BP.shape[1] + steps


def plain_model() -> PreTrainedModel:
    """The embedded model in bfloat16 with PEFT's own adapter of the demo recipe's shape."""
    lora = load_section("lora", LoraParams, RECIPE)
    causal = AutoModelForCausalLM.from_pretrained(locate("embedded"), dtype=torch.bfloat16, use_safetensors=True)  # nosec B615  # a local folder
    causal.generation_config.eos_token_id = None
    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.targets, task_type="CAUSAL_LM")
    return get_peft_model(causal, config).eval()


def ways(policy: Policy, model: PreTrainedModel) -> dict[str, Callable[[list[Prompt], list[int]], None]]:
    """What is compared; each of ours has the gains of those before it."""
    merged = partial(for_sampling, merge=True, decoder="lean")
    return {
        "generate": partial(theirs, model),
        "ours, as in training": partial(ours, policy, opening=as_in_training, leave=False, shared=False),
        "+ finished rows leave": partial(ours, policy, opening=as_in_training, leave=True, shared=False),
        "+ one prefill for a group": partial(ours, policy, opening=as_in_training, leave=True, shared=True),
        "+ linears packed": partial(
            ours, policy, opening=partial(for_sampling, merge=False, decoder="transformers"), leave=True, shared=True
        ),
        "+ lean decoder": partial(
            ours, policy, opening=partial(for_sampling, merge=False, decoder="lean"), leave=True, shared=True
        ),
        "+ adapter merged": partial(ours, policy, opening=merged, leave=True, shared=True),
    }


def cases(vocabulary: int) -> dict[str, tuple[list[Prompt], list[int]]]:
    """Name -> prompts and answers' lengths."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, vocabulary, (ROWS, PROMPT), generator=generator).tolist()
    different = [Prompt(key, (), row) for key, row in enumerate(ids)]
    varying = torch.linspace(SHORTEST, LONGEST, ROWS).round().long()[torch.randperm(ROWS, generator=generator)]
    return {
        "fixed": (different, [FIXED] * ROWS),
        "varying": (different, varying.tolist()),
        "groups": ([different[row // 4] for row in range(ROWS)], [FIXED] * ROWS),
    }


def measure(policy: Policy, model: PreTrainedModel, repeats: int) -> dict[str, dict[str, float]]:
    """Case -> way -> tokens per second: the median over `repeats`, after one round that does not count."""
    found: dict[str, dict[str, float]] = {}
    for case, (prompts, lengths) in cases(policy.backbone.head_VH.shape[0]).items():
        seconds: dict[str, list[float]] = {}
        for _ in range(repeats + 1):
            for way, run in ways(policy, model).items():
                started = time.perf_counter()
                run(prompts, lengths)
                seconds.setdefault(way, []).append(time.perf_counter() - started)
        found[case] = {way: sum(lengths) / statistics.median(times[1:]) for way, times in seconds.items()}
    return found


def main() -> None:
    """Prints a table; with --json writes the figures too."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    policy = embedded_policy()
    found = measure(policy, plain_model(), arguments.repeats)
    print(f"{ROWS} rows, {torch.get_num_threads()} threads, torch {torch.__version__}; tokens/s (times `generate`)")
    for case, by_way in found.items():
        print(case)
        for way, speed in by_way.items():
            print(f"  {way:28} {speed:8.1f}  {speed / by_way['generate']:5.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
