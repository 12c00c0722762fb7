"""What a run takes beside memory: room on the disk, and hours. From shapes, and for hours from two rates of the card.

Rows are as long as `tokens` lets them be, as everywhere in the plan, so both are upper bounds of what they count.
"""

from dataclasses import dataclass
from math import ceil

from transformers import PretrainedConfig

from pipeline.checkpoint import KEPT
from pipeline.params.ppo import PPOParams
from pipeline.planning.settings import GIB, Machine, Settings
from pipeline.planning.skeleton import BaseShape, build, frozen_sizes
from pipeline.planning.stages import FLOAT32, at_all_layers, experience_size
from pipeline.planning.work import Rates, Shape, backward_flops, decoding, forward_flops, prefill

# GB, operations per second of dense bfloat16 with sums in float32, bytes per second; from NVIDIA's data sheets and whitepapers
CARDS = {
    "RTX 4060": (8, Rates(30e12, 272e9)),
    "RTX 3090": (24, Rates(71e12, 936e9)),
    "RTX 4090": (24, Rates(165e12, 1008e9)),
    "RTX A6000": (48, Rates(155e12, 768e9)),
    "L40S": (48, Rates(362e12, 864e9)),
    "A100 80GB": (80, Rates(312e12, 2039e9)),
    "H100 SXM": (80, Rates(989e12, 3350e9)),
}
# Of a card's rates; 30 to 40% of the matmul rate is usual in training. On two CPU cores sampling reached a third, and scoring and updates
# over a half, of what a matmul benchmark and a copy reach (docs/performance.md).
USED = 0.35
UNCACHED = 4.5  # bytes moved for each 4-bit weight without a cache: half a byte read, 2 written, 2 read again
CACHED = 2.0
TRAINED_STATE = 3  # weights and Adam's two moments


@dataclass(frozen=True)
class Disk:
    """Bytes.

    base: weights from the hub, or as they are converted from the embedded ones; none where base.model is a folder.
    adapters: of all stages in artifacts/, as often again in DVC's cache, and one in MLflow's registry.
    checkpoints: of PPO, the largest, those that are kept and one that is being written; gone when the stage is done.
    export: what `make export` adds: adapter, merged policy, reward model.
    """

    base: int
    adapters: int
    checkpoints: int
    export: int


def shape_of(settings: Settings, config: PretrainedConfig, cache: bool) -> Shape:
    """Of the base and one adapter."""
    shape = BaseShape(config, settings.base, "recompute", False, False)

    def sizes(layers: int) -> dict[str, int]:
        base, adapted = build(shape, layers, ()), build(shape, layers, ("sft",), settings.lora)
        lora = sum(weight.numel() for weight in adapted.adapter_parameters("sft"))
        return {"body": frozen_sizes(base)["linears"] // base.head_VH.itemsize, "lora": lora}

    weights = at_all_layers(config, sizes)
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        body=weights["body"],
        head=config.vocab_size * config.hidden_size,
        lora=weights["lora"],
        kv_values=2 * config.num_hidden_layers * key_heads * head_size,
        bytes_per_body_weight=CACHED if cache or settings.base.quantization == "none" else UNCACHED,
    )


def disk(settings: Settings, shape: Shape, tied: bool) -> Disk:
    """Tables of data and figures are left out, as are the data themselves."""
    matrices = shape.body + shape.head * (1 if tied else 2)
    adapter = FLOAT32 * shape.lora
    is_folder = not (settings.base.model.startswith("hf://") or settings.base.model in ("embedded", "tiny"))
    return Disk(
        base=0 if is_folder else 2 * matrices,
        adapters=(2 * 4 + 1) * adapter,
        checkpoints=(KEPT + 1) * (TRAINED_STATE * adapter + experience_size(settings)),
        export=adapter + 2 * 2 * matrices,
    )


def hours(settings: Settings, shape: Shape, rates: Rates) -> dict[str, float | None]:
    """Of each stage of the chain, where a share USED of the rates is reached; None where data.max_prompts does not bound the rows.

    Each prompt is taken to have one pair.
    """
    clock = _Clock(settings, shape, Rates(USED * rates.flops, USED * rates.bandwidth))
    split, ppo = settings.data.split, settings.ppo
    seconds: dict[str, float | None] = {
        "sft": clock.offline("sft", sequences=1, answers=True),
        "reward": clock.offline("reward", sequences=2, answers=False),
        "judge": clock.offline("judge", sequences=2, answers=False),
        "ppo": ppo.iterations * clock.iteration(ppo)
        + (ppo.iterations // ppo.watch_every + 1) * clock.watching(split.development),
        "evaluate": clock.evaluation(split.heldout),
    }
    return {stage: value if value is None else value / 3600 for stage, value in seconds.items()}


@dataclass(frozen=True)
class _Clock:
    """Seconds of what stages do to `rows` full rows."""

    settings: Settings
    shape: Shape
    rates: Rates

    @property
    def prompt(self) -> int:
        return self.settings.tokens.max_prompt

    @property
    def response(self) -> int:
        return self.settings.tokens.max_response

    def scoring(self, rows: int, answers: bool) -> float:
        """A forward with an adapter. answers: the output head is applied to answers; a scalar head costs nothing."""
        tokens, head_tokens = self._tokens(rows, answers)
        return (forward_flops(self.shape, tokens, head_tokens) + 2.0 * self.shape.lora * tokens) / self.rates.flops

    def training(self, rows: int, answers: bool) -> float:
        """Forward and backward; with gradient checkpointing the blocks' forward once more."""
        tokens, head_tokens = self._tokens(rows, answers)
        flops = forward_flops(self.shape, tokens, head_tokens) + backward_flops(self.shape, tokens, head_tokens)
        again = forward_flops(self.shape, tokens, 0) if self.settings.runtime.gradient_checkpointing else 0.0
        return (flops + again) / self.rates.flops

    def offline(self, section: str, sequences: int, answers: bool) -> float | None:
        """All epochs on a share of the prompts; a row has so many sequences. Models of the person's own are not trained."""
        data, params = self.settings.data, getattr(self.settings, section)
        if params.from_ is not None:
            return 0.0
        if data.max_prompts is None:
            return None
        shared_out = data.max_prompts - data.split.heldout - data.split.development
        rows = ceil(getattr(data.split, section) * shared_out)
        return params.epochs * self.training(sequences * rows, answers)

    def answering(self, rows: int, answers_per_prompt: int = 1) -> float:
        """Prompts are read once for all their answers; every answer is as long as it may be."""
        chunk = min(self.settings.runtime.rollout_chunk, rows)
        reading = prefill(self.shape, self.rates, rows // answers_per_prompt, self.prompt)
        return reading + rows / chunk * decoding(self.shape, self.rates, chunk, self.prompt, self.response)

    def iteration(self, ppo: PPOParams) -> float:
        """Rollout, evaluate with policy, reference and reward model, update."""
        rows = ppo.rollout_size
        scoring = 2 * self.scoring(rows, answers=True) + ppo.uses_reward_model * self.scoring(rows, answers=False)
        update = ppo.epochs * self.training(rows, answers=True)
        return self.answering(rows, ppo.answers_per_prompt) + scoring + update

    def watching(self, rows: int) -> float:
        """Development prompts: answered, scored, and their KL."""
        return self.answering(rows) + 2 * self.scoring(rows, answers=True) + self.scoring(rows, answers=False)

    def evaluation(self, rows: int) -> float:
        """Three roles answer twice; two scorers look at each answer and at held-out pairs, two policies at what was sampled."""
        scored = 2 * (6 * rows + 2 * rows)
        return 6 * self.answering(rows) + self.scoring(scored, answers=False) + self.scoring(6 * rows, answers=True)

    def _tokens(self, rows: int, answers: bool) -> tuple[int, int]:
        return rows * (self.prompt + self.response), rows * self.response if answers else 0


def cards_like(machine: Machine) -> dict[str, Rates]:
    """The card itself where the table has it, else those with as much memory."""
    named = {name: rates for name, (_, rates) in CARDS.items() if name in machine.name}
    return named or {name: rates for name, (memory, rates) in CARDS.items() if machine.free == memory * GIB}
