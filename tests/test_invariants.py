"""What must hold whatever the settings: ratio 1 before the first step, sums that no micro-batch changes, frozen things frozen."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from conftest import LORA, ROOT

from pipeline.algorithms import ppo
from pipeline.backbone import Backbone
from pipeline.batch import Experience, Pairs
from pipeline.data.examples import Prompt, sequences
from pipeline.errors import TrainingError
from pipeline.evaluation import evaluate, summarize
from pipeline.heads import ScalarHead
from pipeline.objectives.offline import bradley_terry
from pipeline.objectives.offline import sft as sft_objective
from pipeline.offline import train_offline
from pipeline.online import train_online
from pipeline.params.ppo import PPOParams
from pipeline.params.section import read_params
from pipeline.roles import Policy, RewardModel
from pipeline.rollout import Sampling, generate
from pipeline.update import Optimizer, ParameterGroup, UpdatePlan, accumulate, constant_after_warmup, update

PROMPTS = [Prompt(key, (), [5 + (key * 7 + place) % 200 for place in range(3 + 3 * key)]) for key in range(8)]
SAMPLING = Sampling(max_new_tokens=10, stop_ids=tuple(range(2, 320, 30)), chunk=64, seed=3)
DEMO_PPO = read_params(ROOT / "recipes" / "demo.yaml")["ppo"]


def ppo_params(**changes) -> PPOParams:
    return PPOParams(**(DEMO_PPO | {"iterations": 2, "rollout_size": 8, "minibatch_size": 4} | changes))


class World:
    """A policy that is a copy of the reference, a value head, and a score that one can work out: the answer's length."""

    def __init__(self, make_backbone: Callable[..., Backbone], cfg: PPOParams, lr: float = 1e-2, **backbone_settings):
        self.cfg = cfg
        self.backbone = make_backbone(adapters=("sft", "reward"), **backbone_settings)
        self.backbone.add_adapter("policy", LORA)
        with torch.no_grad():
            for mine, theirs in zip(*map(self.backbone.adapter_parameters, ("policy", "sft")), strict=True):
                mine.copy_(theirs)
        self.value_head = ScalarHead(self.backbone.hidden_size, std=0.0)
        self.policy = Policy(self.backbone, "policy", cfg.temperature, 16, self.value_head)
        self.reference = Policy(self.backbone, "sft", cfg.temperature, 16)
        self.optimizer = Optimizer(
            [
                ParameterGroup("policy", self.backbone.train("policy"), lr),
                ParameterGroup("value", list(self.value_head.parameters()), lr),
            ],
            cfg.max_grad_norm,
            constant_after_warmup(0),
        )

    def experience(self, microbatch_size: int) -> Experience:
        rollout = generate(self.policy, PROMPTS, SAMPLING, step=0)
        return evaluate(rollout, self.policy, self.reference, lengths_B, ppo(self.cfg), self.cfg, microbatch_size)

    def update(self, experience: Experience, microbatch_size: int) -> dict[str, float]:
        plan = UpdatePlan(self.cfg.epochs, self.cfg.minibatch_size, microbatch_size, self.cfg.stop_kl)
        with self.backbone.training(dropout=False):
            return update(self.policy, self.optimizer, experience, ppo(self.cfg).objective, plan, seed=1)

    def train(self, iterations: int, log: Callable = lambda *_: None) -> None:
        train_online(
            self.policy, self.reference, lengths_B, [PROMPTS] * iterations, self.optimizer, ppo(self.cfg), self.cfg, SAMPLING, 3, log, lambda _: None
        )  # fmt: skip


def lengths_B(rollout) -> torch.Tensor:
    return rollout.response_lengths_B.float()


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("microbatch_size", [1, 3, 8])
def test_at_learning_rate_0_kl_is_0_and_the_ratio_1(
    make_backbone: Callable[..., Backbone], quantization: str, microbatch_size: int
) -> None:
    """Reports CarperAI/trlx#508, huggingface/trl#1340 and #487: prompts of unequal length, two epochs."""
    world = World(make_backbone, ppo_params(lr=0.0), lr=0.0, quantization=quantization)
    experience = world.experience(microbatch_size)
    summary = summarize(experience)
    assert summary["kl_per_sequence_k1"] == summary["kl_per_token_k3"] == 0
    assert torch.equal(experience.old_logprobs_BR, experience.ref_logprobs_BR)
    stats = world.update(experience, microbatch_size)
    assert stats["first_log_ratio_max"] == 0
    assert stats["log_ratio_max"] < 1e-4
    assert stats["clip_fraction"] == 0
    assert summarize(world.experience(microbatch_size))["kl_per_sequence_k1"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_ratio_is_exactly_1_in_any_precision(make_backbone: Callable[..., Backbone], dtype: str) -> None:
    """Report jingyaogong/minimind#814: one function, one precision, one shape."""
    world = World(make_backbone, ppo_params(epochs=1, minibatch_size=8), quantization="nf4", dtype=dtype)
    assert world.update(world.experience(3), 3)["first_log_ratio_max"] == 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_microbatch_size_changes_no_gradient(make_backbone: Callable[..., Backbone], family: str) -> None:
    world = World(make_backbone, ppo_params(), family=family)
    experience = world.experience(8)
    torch.nn.init.normal_(world.value_head.linear.weight, std=0.1)

    def gradient(microbatch_size: int) -> torch.Tensor:
        world.optimizer.zero_grad()
        with world.backbone.training(dropout=False):
            accumulate(world.policy, experience, ppo(world.cfg).objective, microbatch_size)
        groups = world.optimizer.groups
        return torch.cat([parameter.grad.flatten() for group in groups for parameter in group.parameters])

    whole = gradient(8)
    for size in (1, 3):
        assert float((gradient(size) - whole).norm() / whole.norm()) < 1e-6


def test_gradient_checkpointing_changes_no_gradient(make_backbone: Callable[..., Backbone]) -> None:
    """Reports locuslab/open-unlearning#178 and huggingface/trl#1066: it runs, and it changes nothing."""
    grads, forwards = {}, {}
    for checkpointing in (False, True):
        world = World(make_backbone, ppo_params(), gradient_checkpointing=checkpointing)
        experience = world.experience(8)
        calls = []
        hook = world.backbone.decoder.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        with world.backbone.training(dropout=False):
            accumulate(world.policy, experience, ppo(world.cfg).objective, 8)
        hook.remove()
        grads[checkpointing] = torch.cat(
            [parameter.grad.flatten() for parameter in world.optimizer.groups[0].parameters]
        )
        forwards[checkpointing] = len(calls)
    assert torch.equal(grads[True], grads[False])
    assert forwards == {False: 1, True: 2}


def test_after_ppo_what_is_frozen_has_not_moved_and_every_b_has(make_backbone: Callable[..., Backbone]) -> None:
    world = World(make_backbone, ppo_params(), quantization="nf4")
    frozen = {
        "base": world.backbone.base_hash(),
        **{name: world.backbone.adapter_hash(name) for name in ("sft", "reward")},
    }
    before = {key: tensor.clone() for key, tensor in world.backbone.adapter_state("policy").items()}
    world.train(2)
    after = world.backbone.adapter_state("policy")
    assert frozen == {
        "base": world.backbone.base_hash(),
        **{name: world.backbone.adapter_hash(name) for name in ("sft", "reward")},
    }
    b_matrices = [key for key in after if "lora_B" in key]
    assert len(b_matrices) == 14
    assert all(not torch.equal(after[key], before[key]) for key in b_matrices)
    assert float(world.value_head.linear.weight.detach().abs().max()) > 0


def test_ppo_raises_a_reward_it_can_reach(make_backbone: Callable[..., Backbone]) -> None:
    """The score is the answer's length: with kl_coef 0 answers grow, and with the sign flipped they shrink."""
    asked = [Prompt(key, (), [5 + (key * 7) % 200, 40, 41 + key]) for key in range(32)]
    sampling = replace(
        SAMPLING, stop_ids=tuple(range(2, 320, 8))
    )  # an untrained policy stops after about 6 of 10 tokens
    lengths = {}
    for sign in (1, -1):
        cfg = ppo_params(kl_coef=0.0, missing_eos_penalty=0.0, stop_kl=None, minibatch_size=16, rollout_size=32)
        world = World(make_backbone, cfg, lr=1e-2)
        history: list[float] = []
        train_online(
            world.policy,
            world.reference,
            lambda rollout, sign=sign: sign * (lengths_B(rollout) - 6) / 3,
            [asked] * 15,
            world.optimizer,
            ppo(cfg),
            cfg,
            sampling,
            32,
            lambda _, stats, __, history=history: history.append(stats["length_mean"]),
            lambda _: None,
        )
        lengths[sign] = history
    first = lengths[1][0]
    assert first == lengths[-1][0]
    last = {sign: sum(history[-4:]) / 4 for sign, history in lengths.items()}
    assert last[1] > first + 1
    assert last[-1] < first - 1


def test_critic_warmup_moves_the_value_head_alone(make_backbone: Callable[..., Backbone]) -> None:
    """Report microsoft/DeepSpeedExamples#556."""
    world = World(make_backbone, ppo_params(critic_warmup=2))
    before = world.backbone.adapter_hash("policy")
    losses: list[float] = []
    world.train(2, lambda _, stats, __: losses.append(stats["value_loss"]))
    assert world.backbone.adapter_hash("policy") == before
    assert losses[1] < losses[0]


@pytest.mark.parametrize(("backprop", "moves"), [("full", True), ("detached", False)])
def test_value_backprop_says_whether_the_value_loss_reaches_the_adapter(
    make_backbone: Callable[..., Backbone], backprop: str, moves: bool
) -> None:
    world = World(make_backbone, ppo_params(value_backprop=backprop))
    torch.nn.init.normal_(world.value_head.linear.weight, std=0.1)
    world.policy.detach_values = backprop == "detached"
    experience = world.experience(8)
    with world.backbone.training(dropout=False):
        accumulate(world.policy, experience, ppo(world.cfg).critic_objective, 8)
    assert any(parameter.grad is not None for parameter in world.optimizer.groups[0].parameters) == moves


def test_stop_kl_leaves_the_rest_of_the_update_out(make_backbone: Callable[..., Backbone]) -> None:
    world = World(make_backbone, ppo_params(epochs=4, stop_kl=1e-9))
    stats = world.update(world.experience(8), 8)
    # the first minibatch has KL 0 and is taken; after it the policy has moved
    assert (stats["update_steps"], stats["update_steps_skipped"]) == (1, 7)


def test_old_logprobs_may_be_the_samplers(make_backbone: Callable[..., Backbone]) -> None:
    world = World(make_backbone, ppo_params(old_logprobs="rollout"))
    experience = world.experience(8)
    assert torch.equal(experience.old_logprobs_BR, experience.behaviour_logprobs_BR)
    assert torch.equal(experience.weights_BR, torch.ones_like(experience.weights_BR))


def test_rewards_sum_to_score_less_kl(make_backbone: Callable[..., Backbone]) -> None:
    """Report huggingface/trl#3750: the score stands on the last token of the answer, and nowhere else."""
    world = World(make_backbone, ppo_params(kl_coef=0.1, missing_eos_penalty=1.0))
    with torch.no_grad():
        for parameter in world.backbone.adapter_parameters("policy"):
            parameter.add_(torch.randn_like(parameter) * 0.02)
    experience = world.experience(4)
    kl_BR = experience.old_logprobs_BR - experience.ref_logprobs_BR
    expected_B = experience.scores_B - experience.truncated_B.float() - 0.1 * kl_BR.sum(1)
    assert float(kl_BR.abs().max()) > 0.01
    torch.testing.assert_close(experience.rewards_BR.sum(1), expected_B, rtol=0, atol=1e-5)
    last_B = experience.rewards_BR.gather(1, experience.response_lengths_B[:, None] - 1).squeeze(1)
    assert float(last_B.min()) > 0


def test_the_raw_figures_that_health_rules_read(make_backbone: Callable[..., Backbone]) -> None:
    """Report hiyouga/LLaMA-Factory#803: the share of bare end tokens is logged; pairs of tokens and signs of advantages, by hand."""
    world = World(make_backbone, ppo_params(missing_eos_penalty=0.0))
    answers = [[2], [32], [7, 7, 7, 2], [7, 7, 9], [9]]  # the last two are cut
    tokens = sequences([([5, 6], answer) for answer in answers])
    rollout = replace(
        generate(world.policy, PROMPTS[:5], SAMPLING, step=0),
        tokens_BT=tokens.tokens_BT,
        prompt_lengths_B=tokens.prompt_lengths_B,
        response_lengths_B=tokens.response_lengths_B,
        behaviour_logprobs_BR=torch.zeros(5, 4),
        truncated_B=torch.tensor([False, False, False, True, True]),
    )
    experience = evaluate(
        rollout, world.policy, world.reference, lambda rows: lengths_B(rows) - 2, ppo(world.cfg), world.cfg, 8
    )
    figures = summarize(experience)
    assert figures["end_token_only_rate"] == pytest.approx(2 / 5)
    assert figures["distinct_2"] == pytest.approx(3 / 5)  # 77 77 72 | 77 79: three of five differ
    # KL and values are 0, so an advantage has the sign of its answer's score: plus for the 4 + 3 tokens of the long ones
    assert figures["advantage_positive_share"] == pytest.approx(7 / 10)


@pytest.mark.parametrize("what", ["score", "policy"])
def test_a_score_or_logprob_that_is_not_finite_stops_before_the_update(
    make_backbone: Callable[..., Backbone], what: str
) -> None:
    world = World(make_backbone, ppo_params())
    rollout = generate(world.policy, PROMPTS, SAMPLING, step=0)
    if what == "policy":
        rollout = replace(rollout, behaviour_logprobs_BR=rollout.behaviour_logprobs_BR * float("inf"))

    def score(rows) -> torch.Tensor:
        return lengths_B(rows) * (float("nan") if what == "score" else 1.0)

    with pytest.raises(TrainingError, match="is not finite: nothing is learnt from it"):
        evaluate(rollout, world.policy, world.reference, score, ppo(world.cfg), world.cfg, 4)


def test_a_gradient_that_is_not_finite_never_reaches_the_weights() -> None:
    """Reports MakazhanAlpamys/Soup#532 and huggingface/trl#6668: skipped, counted, and after three the stage fails."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Optimizer([ParameterGroup("adapter", [weight], 0.1)], 1.0, lambda _: 1.0)

    def step(gradient: float, loss: float = 1.0) -> dict[str, float]:
        weight.grad = torch.full((2,), gradient)
        return optimizer.step(loss)

    assert step(float("nan"))["non_finite_steps"] == 1
    assert step(1.0, loss=float("inf"))["non_finite_steps"] == 1
    assert weight.tolist() == [1, 1]
    assert step(1.0)["non_finite_steps"] == 0
    assert weight.tolist() != [1, 1]
    step(float("nan"))
    step(float("nan"))
    with pytest.raises(TrainingError, match="not finite 3 steps in a row"):
        step(float("nan"))


def test_groups_are_clipped_apart_and_by_global_norm() -> None:
    """Gradient (3, 4) has norm 5 and is scaled to 1; Adam's first step is then lr * g / (|g| + eps) per element."""
    big, small = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    optimizer = Optimizer(
        [ParameterGroup("big", [big], 0.1), ParameterGroup("small", [small], 0.2)], 1.0, lambda _: 0.5
    )
    big.grad, small.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.5])
    stats = optimizer.step(1.0)
    assert (stats["grad_norm_big"], stats["grad_norm_small"]) == (5.0, 0.5)
    assert (stats["lr_big"], stats["lr_small"]) == (0.05, 0.1)
    expected = [-0.05 * g / (g + 1e-5) for g in (0.6, 0.8)]
    torch.testing.assert_close(big.detach(), torch.tensor(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(small.detach(), torch.tensor([-0.1 * 0.5 / (0.5 + 1e-5)]), rtol=1e-5, atol=0)


# --- offline ---

ROWS = sequences([([5 + n] * (2 + n % 4), [40 + n, 60 + n, 2][n % 3 :]) for n in range(9)])
OTHERS = sequences([([5 + n] * (2 + n % 4), [90 + n, 2]) for n in range(9)])


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_microbatch_size_changes_no_offline_gradient(make_backbone: Callable[..., Backbone], kind: str) -> None:
    backbone = make_backbone()
    parameters = backbone.train("sft")
    if kind == "sft":
        model, batch = Policy(backbone, "sft", 1.0, 16), ROWS
        objective = lambda output, rows: sft_objective(output.logprobs_BR, rows.response_mask_BR)  # noqa: E731
    else:
        model, batch = RewardModel(backbone, "sft", ScalarHead(backbone.hidden_size, std=0.1)), Pairs(ROWS, OTHERS)
        objective = lambda scores, _: bradley_terry(*scores)  # noqa: E731
    gradients = []
    for size in (9, 3, 1):
        for parameter in parameters:
            parameter.grad = None
        with backbone.training(dropout=False):
            stats = accumulate(model, batch, objective, size)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
    assert stats["loss"] > 0
    # in a pair the two answers' gradients through the shared prompt nearly cancel, which leaves fewer digits
    tolerance = 1e-6 if kind == "sft" else 3e-6
    for gradient in gradients[1:]:
        assert float((gradient - gradients[0]).norm() / gradients[0].norm()) < tolerance


def test_sft_learns_rows_by_heart_and_every_b_moves(make_backbone: Callable[..., Backbone]) -> None:
    backbone = make_backbone(perturb=False, quantization="nf4")
    model = Policy(backbone, "sft", 1.0, 16)
    optimizer = Optimizer([ParameterGroup("adapter", backbone.train("sft"), 2e-2)], 1.0, constant_after_warmup(0))
    losses: list[float] = []
    train_offline(
        model,
        [ROWS] * 40,
        optimizer,
        lambda output, rows: sft_objective(output.logprobs_BR, rows.response_mask_BR),
        4,
        dropout=True,
        log=lambda _, stats: losses.append(stats["loss"]),
    )
    assert losses[-1] < losses[0] / 2
    b_norms = [float(tensor.norm()) for key, tensor in backbone.adapter_state("sft").items() if "lora_B" in key]
    assert len(b_norms) == 14 and min(b_norms) > 0


def test_sft_loss_is_the_mean_over_response_tokens_by_a_loop(make_backbone: Callable[..., Backbone]) -> None:
    """Against transformers' logits and a loop over rows and tokens."""
    backbone = make_backbone()
    model = Policy(backbone, "sft", 1.0, 16)
    backbone.train("sft")
    with backbone.training(dropout=False):
        stats = accumulate(
            model, ROWS, lambda output, rows: sft_objective(output.logprobs_BR, rows.response_mask_BR), 4
        )
    total, count = 0.0, 0
    for row in range(len(ROWS)):
        length, start = int(ROWS.lengths_B[row]), int(ROWS.prompt_lengths_B[row])
        with torch.no_grad():
            logits = backbone.causal(input_ids=ROWS.tokens_BT[row : row + 1, :length]).logits[0]
        for place in range(start, length):
            total -= float(torch.log_softmax(logits[place - 1], -1)[ROWS.tokens_BT[row, place]])
            count += 1
    assert count == ROWS.num_terms
    assert abs(stats["loss"] - total / count) < 1e-5
