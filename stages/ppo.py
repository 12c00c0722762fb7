"""Stage ppo: the policy, a copy of sft, is moved toward higher scores at a price per nat of KL to the frozen sft.

`ppo.algorithm` says how: PPO, REINFORCE, RLOO or GRPO.
"""

from pathlib import Path

from torch import Tensor

from pipeline.algorithms import algorithm_of
from pipeline.batch import Experience
from pipeline.comparison import Answers, answer, kl_per_answer
from pipeline.data.examples import demonstrations, prompts
from pipeline.data.prepared import read_demonstrations, read_pairs, read_prompts
from pipeline.development import Development
from pipeline.evaluation import score_normalizer
from pipeline.heads import ScalarHead
from pipeline.online import optimizer_for, prompts_in_turn, train_online
from pipeline.opening import open_base, open_reward_model
from pipeline.params.ppo import PPOParams
from pipeline.progress import tell
from pipeline.rewards import Rewards, find_functions
from pipeline.roles import Policy
from pipeline.rollout import Sampling
from pipeline.samples import sample_rows
from pipeline.stage import Stage, run_stage
from pipeline.update import Rehearsal
from pipeline.weights import save_head

FOLDER = Path("artifacts/policy")
WATCHED = ("score_mean", "kl_per_sequence_k1", "length_mean", "end_token_rate", "entropy", "explained_variance")


def ppo(stage: Stage) -> None:
    """Writes artifacts/policy, artifacts/development, metrics/ppo.json, plots/ppo.tsv."""
    cfg, runtime, tokenizer = stage.params(PPOParams), stage.runtime, stage.tokenizer
    microbatch = runtime.microbatch_size
    algorithm = algorithm_of(cfg)
    questions = prompts(read_prompts(stage.input("prepared/ppo.jsonl")), tokenizer)
    asked = prompts_in_turn(questions, cfg, stage.seed)
    watched = prompts(read_pairs(stage.input("prepared/development.jsonl")), tokenizer)
    tell(cfg.notes)
    functions = find_functions(cfg.reward)  # before any weight is loaded
    backbone = open_base(stage)
    backbone.load_adapter("sft", stage.input("artifacts/sft"))
    backbone.load_adapter("policy", Path("artifacts/sft"))  # the policy starts as a copy of sft, so KL is 0 at step 0
    model = open_reward_model(stage, backbone, "reward") if cfg.uses_reward_model else None
    frozen = {name: backbone.adapter_hash(name) for name in ("sft", "reward")[: 1 + cfg.uses_reward_model]}
    value_head = ScalarHead(backbone.hidden_size, std=0.0).to(backbone.device) if algorithm.critic_objective else None
    policy = Policy(backbone, "policy", cfg.temperature, runtime.logprob_chunk, value_head)
    reference = Policy(backbone, "sft", cfg.temperature, runtime.logprob_chunk)
    optimizer = optimizer_for(policy, cfg)
    ptx = None
    if cfg.ptx_coef:
        shown, _ = demonstrations(read_demonstrations(stage.input("prepared/sft.jsonl")), tokenizer)
        ptx = Rehearsal(Policy(backbone, "policy", 1.0, runtime.logprob_chunk), shown, cfg.ptx_coef)
    sampling = Sampling(tokenizer.max_response, tokenizer.stop_ids, runtime.rollout_chunk, stage.seed)
    rewards = Rewards(cfg.reward, functions, [*questions, *watched], tokenizer, model, microbatch)

    def sample() -> tuple[Answers, Tensor]:
        found = answer(policy, rewards, {}, watched, sampling, tokenizer, microbatch)
        return found, kl_per_answer(policy, reference, found.rollout, microbatch)

    development = Development(sample, optimizer.parameters, tokenizer.end_id, cfg, stage.tracker.log_metrics)
    with stage.progress(cfg.iterations) as bar:

        def log(step: int, stats: dict[str, float], experience: Experience) -> None:
            stage.log(step, stats | rewards.means())
            stage.tracker.log_metrics(step, rewards.seconds)
            if step == 0:
                tell(cfg.discount_notes(float(experience.response_lengths_B.float().median())))
            shown = {"score": "score_mean", "KL": "kl_per_sequence_k1", "length": "length_mean", "loss": "loss"}
            bar.advance(step, **{label: stats[name] for label, name in shown.items()})
            if step % runtime.samples_every == 0 or step + 1 == cfg.iterations:
                stage.tracker.log_table(f"samples/step_{step:04d}", sample_rows(experience, tokenizer)[:16])

        train_online(
            policy,
            reference,
            rewards.by_minibatch(cfg.minibatch_size),
            asked,
            optimizer,
            algorithm,
            cfg,
            sampling,
            microbatch,
            log,
            development,
            score_normalizer(cfg),
            ptx,
        )
    assert frozen == {name: backbone.adapter_hash(name) for name in frozen}, "a frozen adapter has moved"
    development.restore_kept()
    development.write()
    backbone.save_adapter("policy", FOLDER)
    if value_head is not None:
        save_head(value_head, FOLDER)
    first, last = ({key: row[key] for key in WATCHED if key in row} for row in (stage.curves[0], stage.curves[-1]))
    stage.finish({"prompts": len(questions), **development.summary(), "first": first, "last": last})


if __name__ == "__main__":
    run_stage("ppo", ppo)
