"""Room on the disk and hours, by hand.

A shape of 1,000 weights in the blocks, 100 in the output head, 10 in an adapter; rows of 3 + 2 tokens. One operation a second, and reading costs
nothing, so that hours are operations / 3,600:

    forward with the adapter   2 x 1000 x 5 + 2 x 10 x 5 = 10,100; with the head at two tokens 10,500
    forward and backward       2 x (10,000 + 400) + 6 x 10 x 5 = 21,100; without the head 20,300
    an answer                  2 x 1000 x 3 + 2 x 100 = 6,200 until its first token, then 2,200 for the second: 8,400
"""

import pytest
import torch
from conftest import ROOT

from pipeline.planning.bases import configuration
from pipeline.planning.needs import CARDS, USED, Disk, cards_like, disk, hours, shape_of
from pipeline.planning.settings import GIB, Machine, Settings, card
from pipeline.planning.stages import experience_size
from pipeline.planning.work import Rates, Shape

SHAPE = Shape(body=1000, head=100, lora=10, kv_values=5)
RATES = Rates(1 / USED, 1e30)


def settings() -> Settings:
    read = Settings.read(ROOT / "recipes/smoke.yaml").with_("tokens", max_prompt=3, max_response=2)
    split = read.data.split.model_copy(
        update={"heldout": 20, "development": 12, "sft": 0.25, "reward": 0.5, "judge": 0.125, "ppo": 0.125}
    )
    read = read.with_("data", max_prompts=132, split=split)  # 100 to be shared out
    for section, epochs in (("sft", 2), ("reward", 1), ("judge", 3)):
        read = read.with_(section, epochs=epochs)
    return read.with_("ppo", iterations=5, watch_every=2, rollout_size=16, epochs=2)


def test_hours_are_operations() -> None:
    """An iteration answers with 16 rows, scores them with policy, reference and reward model, and trains on them twice; four times
    12 development prompts are answered, scored and compared with the reference. 13 rows are an eighth of a hundred."""
    iteration = 16 * 8_400 + 2 * 16 * 10_500 + 16 * 10_100 + 2 * 16 * 21_100
    assert iteration == 1_307_200
    watching = 12 * 8_400 + 2 * 12 * 10_500 + 12 * 10_100
    found = hours(settings(), SHAPE, RATES)
    assert {stage: value * 3600 for stage, value in found.items()} == pytest.approx(
        {
            "sft": 2 * 25 * 21_100,
            "reward": 1 * 2 * 50 * 20_300,
            "judge": 3 * 2 * 13 * 20_300,
            "ppo": 5 * iteration + 3 * watching,
            "evaluate": 6 * 20 * 8_400 + 2 * (120 + 40) * 10_100 + 120 * 10_500,
        }
    )


def test_what_makes_hours_more_or_fewer() -> None:
    plain = hours(settings(), SHAPE, RATES)
    again = hours(settings().with_("runtime", gradient_checkpointing=True), SHAPE, RATES)
    assert again["sft"] * 3600 == pytest.approx(2 * 25 * (21_100 + 10_000))
    assert again["evaluate"] == plain["evaluate"]
    assert hours(settings().with_("reward", from_="mine"), SHAPE, RATES)["reward"] == 0
    unbounded = hours(settings().with_("data", max_prompts=None), SHAPE, RATES)
    assert unbounded == plain | dict.fromkeys(("sft", "reward", "judge"))


def test_decoding_waits_for_memory() -> None:
    """A step reads 2 x 1000 + 2 x 100 bytes and 2 x 5 for each of 16 x 4 tokens of the cache: 2,840 at a byte a second, for all rows."""
    slow = hours(settings().with_("runtime", rollout_chunk=16), SHAPE, Rates(1e30, 1 / USED))
    # 5 x 16 rows and 3 x 12 rows, whose caches are 12 x 4 tokens; all else takes no time
    assert slow["ppo"] * 3600 == pytest.approx(5 * 2_840 + 3 * (2_200 + 2 * 5 * 12 * 4))


def test_room_on_the_disk() -> None:
    """16-bit weights of a base with an output head of its own are 2 x (1000 + 2 x 100) bytes, an adapter 4 x 10.

    Four adapters lie twice and one is registered; two checkpoints and one being written hold weights and two moments, and a rollout.
    """
    hub = settings().with_("base", model="hf://o/n@main")
    assert disk(hub, SHAPE, tied=False) == Disk(2400, 9 * 40, 3 * (3 * 40 + experience_size(hub)), 40 + 2 * 2400)
    assert disk(hub, SHAPE, tied=True).base == 2200
    assert disk(hub.with_("base", model="/models/mine"), SHAPE, tied=True).base == 0


def test_the_shape_of_the_tiny_model() -> None:
    """Two layers of hidden size 64, see tests/test_planning.py; rank 4; two key-value heads of 16 numbers, twice, in each layer."""
    read = Settings.read(ROOT / "recipes/smoke.yaml")
    shape = shape_of(read, configuration("tiny"), cache=True)
    rank_sides = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128)
    assert shape == Shape(body=73_728, head=320 * 64, lora=2 * 4 * rank_sides, kv_values=2 * 2 * 32)
    assert shape_of(read, configuration("tiny"), cache=False).bytes_per_body_weight == 4.5


def test_cards_by_name_and_by_size() -> None:
    assert list(cards_like(card("24GB"))) == ["RTX 3090", "RTX 4090"]
    assert cards_like(card("20GB")) == {}
    here = Machine("NVIDIA GeForce RTX 4090", torch.device("cuda"), 23 * GIB, 0)
    assert cards_like(here) == {"RTX 4090": CARDS["RTX 4090"][1]}
