"""Stage ppo: the policy, a copy of sft, is moved toward higher scores at a price per nat of KL to the frozen sft."""

from pathlib import Path

from torch import Tensor

from pipeline.algorithms import ppo as ppo_algorithm
from pipeline.batch import Experience
from pipeline.comparison import Answers, answer, kl_per_answer
from pipeline.data.examples import prompt_batches, prompts, refuse_too_few
from pipeline.data.prepared import read_pairs, read_prompts
from pipeline.development import Development
from pipeline.evaluation import score_normalizer
from pipeline.heads import ScalarHead
from pipeline.online import train_online
from pipeline.opening import open_base, open_reward_model
from pipeline.params.ppo import PPOParams
from pipeline.rewards import Rewards, find_functions
from pipeline.roles import Policy
from pipeline.rollout import Sampling
from pipeline.samples import sample_rows
from pipeline.stage import Stage, run_stage
from pipeline.update import Optimizer, ParameterGroup, constant_after_warmup
from pipeline.weights import save_head

FOLDER = Path("artifacts/policy")
WATCHED = ("score_mean", "kl_per_sequence_k1", "length_mean", "end_token_rate", "entropy", "explained_variance")


def ppo(stage: Stage) -> None:
    """Writes artifacts/policy, artifacts/development, metrics/ppo.json, plots/ppo.tsv."""
    cfg, runtime, tokenizer = stage.params(PPOParams), stage.runtime, stage.tokenizer
    questions = prompts(read_prompts(stage.input("prepared/ppo.jsonl")), tokenizer)
    watched = prompts(read_pairs(stage.input("prepared/development.jsonl")), tokenizer)
    refuse_too_few(questions, cfg.rollout_size)
    functions = find_functions(cfg.reward)  # before any weight is loaded
    backbone = open_base(stage)
    backbone.load_adapter("sft", stage.input("artifacts/sft"))
    backbone.load_adapter("policy", Path("artifacts/sft"))  # the policy starts as a copy of sft, so KL is 0 at step 0
    model = open_reward_model(stage, backbone, "reward") if cfg.uses_reward_model else None
    frozen = {name: backbone.adapter_hash(name) for name in ("sft", "reward")[: 1 + cfg.uses_reward_model]}
    value_head = ScalarHead(backbone.hidden_size, std=0.0).to(backbone.device)
    policy = Policy(backbone, "policy", cfg.temperature, runtime.logprob_chunk, value_head)
    reference = Policy(backbone, "sft", cfg.temperature, runtime.logprob_chunk)
    actor, critic = backbone.train("policy"), list(value_head.parameters())
    groups = [ParameterGroup("policy", actor, cfg.lr), ParameterGroup("value", critic, cfg.value_lr)]
    optimizer = Optimizer(groups, cfg.max_grad_norm, constant_after_warmup(cfg.warmup_steps))
    sampling = Sampling(tokenizer.max_response, tokenizer.stop_ids, runtime.rollout_chunk, stage.seed)

    asked = [*questions, *watched]
    rewards = Rewards(cfg.reward, functions, asked, tokenizer, model, runtime.microbatch_size)

    def sample() -> tuple[Answers, Tensor]:
        found = answer(policy, rewards, {}, watched, sampling, tokenizer, runtime.microbatch_size)
        return found, kl_per_answer(policy, reference, found.rollout, runtime.microbatch_size)

    development = Development(sample, [*actor, *critic], tokenizer.end_id, cfg, stage.tracker.log_metrics)
    with stage.progress(cfg.iterations) as bar:

        def log(step: int, stats: dict[str, float], experience: Experience) -> None:
            stage.log(step, stats | rewards.means())
            stage.tracker.log_metrics(step, rewards.seconds)
            shown = {"score": "score_mean", "KL": "kl_per_sequence_k1", "length": "length_mean", "loss": "loss"}
            bar.advance(step, **{label: stats[name] for label, name in shown.items()})
            if step % runtime.samples_every == 0 or step + 1 == cfg.iterations:
                stage.tracker.log_table(f"samples/step_{step:04d}", sample_rows(experience, tokenizer)[:16])

        train_online(
            policy,
            reference,
            rewards.by_minibatch(cfg.minibatch_size),
            prompt_batches(questions, cfg.rollout_size, cfg.iterations, stage.seed),
            optimizer,
            ppo_algorithm(cfg),
            cfg,
            sampling,
            runtime.microbatch_size,
            log,
            development,
            score_normalizer(cfg),
        )
    assert frozen == {name: backbone.adapter_hash(name) for name in frozen}, "a frozen adapter has moved"
    development.restore_kept()
    development.write()
    backbone.save_adapter("policy", FOLDER)
    save_head(value_head, FOLDER)
    ends = {"first": stage.curves[0], "last": stage.curves[-1]}
    stage.finish(
        {
            "prompts": len(questions),
            "kept_step": development.kept_step,
            "development": {f"step_{step:04d}": found for step, found in development.figures.items()},
            **{name: {key: row[key] for key in WATCHED} for name, row in ends.items()},
        }
    )


if __name__ == "__main__":
    run_stage("ppo", ppo)
