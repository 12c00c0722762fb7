"""What stands beside a row changes nothing in it: padding on either side, other rows, rows without an answer."""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from worlds import BASES, FAMILIES, Setting, World, ppo_params

from pipeline import backbone as backbone_module
from pipeline.backbone import Backbone
from pipeline.batch import Experience, Rollout
from pipeline.data.examples import sequences
from pipeline.data.tokenization import ChatTokenizer
from pipeline.heads import ScalarHead
from pipeline.roles import Policy, RewardModel
from pipeline.tensors import token_logprobs

LENGTHS = (1024, 515, 37, 2)
# In bfloat16 an activation has 8 bits, and sums over other numbers of columns round elsewhere.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def random_rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 320, (length,), generator=generator) for length in LENGTHS]


def logprobs_of(backbone: Backbone, rows: list[Tensor], width: int, side: str) -> list[Tensor]:
    """Log-probabilities of each row's tokens but the first, rows padded to `width` on a side."""
    places = [slice(0, len(row)) if side == "right" else slice(width - len(row), width) for row in rows]
    tokens_BT, mask_BT = torch.zeros(len(rows), width).long(), torch.zeros(len(rows), width).bool()
    for number, (row, place) in enumerate(zip(rows, places, strict=True)):
        tokens_BT[number, place], mask_BT[number, place] = row, True
    with backbone.inference():
        hidden_BTH = backbone.hidden(tokens_BT, mask_BT)
    return [
        token_logprobs(hidden_BTH[number, place][:-1], backbone.head_VH, row[1:], 1.0, 256)
        for number, (row, place) in enumerate(zip(rows, places, strict=True))
    ]


def largest_difference(ones: list[Tensor], others: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_to_1024_tokens_on_either_side_moves_no_logprob(
    make_backbone: Callable[..., Backbone], family: str, dtype: str, attention: str
) -> None:
    """Rows of 1,024, 515, 37 and 2 tokens together, against each alone. 1,024 is all that GPT-2's table of positions has."""
    backbone = make_backbone(family, dtype=dtype, attention=attention)
    rows = random_rows()
    alone = [logprobs_of(backbone, [row], len(row), "right")[0] for row in rows]
    for side in ("left", "right"):
        assert largest_difference(logprobs_of(backbone, rows, 1024, side), alone) < TOLERANCE[dtype]


def test_positions_that_count_padding_would_be_seen(
    make_backbone: Callable[..., Backbone], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report CarperAI/trlx#508: the test above would see that fault, on the family whose positions are absolute."""
    backbone = make_backbone("gpt2")
    rows = random_rows()[2:]
    right = logprobs_of(backbone, rows, 64, "right")
    monkeypatch.setattr(backbone_module, "positions", lambda mask_BT: torch.arange(mask_BT.shape[1])[None])
    assert largest_difference(logprobs_of(backbone, rows, 64, "left"), right) > 1e-2


@pytest.mark.parametrize("setting", BASES, ids=str)
def test_scores_and_logprobs_in_a_batch_are_those_of_a_row_alone(
    make_backbone: Callable[..., Backbone], setting: Setting
) -> None:
    backbone = make_backbone(**setting.keys)
    reward_model = RewardModel(backbone, "sft", ScalarHead(backbone.hidden_size, std=0.1))
    policy = Policy(backbone, "sft", 1.0, 16)
    rows = sequences([([5 + n] * (2 + 3 * n), [*range(40 + n, 42 + 5 * n), 2]) for n in range(7)])
    scores_B, logprobs_BR = reward_model.score_all(rows, 10_000), policy.logprobs_all(rows, 10_000)
    for number, row in enumerate(rows.split(1)):
        length = int(row.response_lengths_B)
        wider = replace(row, tokens_BT=torch.nn.functional.pad(row.tokens_BT, (0, 5), value=9))
        for one in (row, wider):
            assert abs(float(reward_model.score_all(one, 1) - scores_B[number])) < TOLERANCE[setting.dtype]
            apart = (policy.logprobs_all(one, 1)[0] - logprobs_BR[number, :length]).abs()
            assert float(apart.max()) < TOLERANCE[setting.dtype]
    assert float(scores_B.std()) > 0.1


# --- rows without an answer ---


def with_empty_answers(rollout: Rollout, places: tuple[int, ...]) -> Rollout:
    """The rollout with prompts of 4 tokens put in at `places` to which there is no answer."""
    order = list(range(len(rollout)))
    for place in places:
        order.insert(place, -1)
    empty = [number for number, row in enumerate(order) if row < 0]
    wider = rollout.select(torch.tensor(order).clamp(min=0))
    for number in empty:
        wider.response_lengths_B[number] = 0
        wider.prompt_ids_B[number] = 100 + number
        wider.truncated_B[number] = False
    return wider


@pytest.mark.parametrize("family", FAMILIES)
def test_empty_answers_are_taken_out_before_any_forward(make_backbone: Callable[..., Backbone], family: str) -> None:
    """The sampler makes none; another engine may. What is learnt from the others is the same, bit for bit."""
    world = World(make_backbone, ppo_params(minibatch_size=2), family=family)
    torch.nn.init.normal_(world.value_head.linear.weight, std=0.1)
    rollout = world.rollout()
    clean, cleaned = world.evaluate(rollout, 3), world.evaluate(with_empty_answers(rollout, (0, 3, 10)), 3)
    for field in fields(Experience):
        assert torch.equal(getattr(clean, field.name), getattr(cleaned, field.name)), field.name
    for one, other in zip(world.gradients(clean, 3), world.gradients(cleaned, 3), strict=True):
        assert torch.equal(one, other)


def test_an_empty_answer_takes_its_group_along() -> None:
    """Two answers to each of three prompts: groups stay whole, and in their order."""
    rows = sequences([([5], [6, 2]), ([5], [7, 2]), ([8], []), ([8], [9, 2]), ([10], [11]), ([10], [2])])
    rollout = Rollout(
        rows.tokens_BT,
        rows.prompt_lengths_B,
        rows.response_lengths_B,
        behaviour_logprobs_BR=torch.zeros(6, 2),
        truncated_B=torch.tensor([False, False, False, False, True, False]),
        prompt_ids_B=torch.tensor([1, 1, 2, 2, 3, 3]),
    )
    kept = rollout.answered()
    assert kept.prompt_ids_B.tolist() == [1, 1, 3, 3]
    assert kept.tokens_BT.tolist() == [[5, 6, 2], [5, 7, 2], [10, 11, 0], [10, 2, 0]]
    assert kept.answered() is kept


def test_an_empty_text_is_an_answer_of_one_end_token(tokenizer: ChatTokenizer) -> None:
    """So SFT, reward model and DPO never see a row without a response."""
    assert tokenizer.response_ids("") == ([tokenizer.end_id], False)
