"""What is said of a pipeline run as a whole once its policy has been compared with SFT: figures to compare runs by, and a model version."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.files import hash_path
from pipeline.lineage import digest
from pipeline.stage import Stage
from pipeline.statistics import Rate
from pipeline.tracking.standing import Standing
from pipeline.verdict import mood, verdict

PREFIX = {"policy": "summary", "dpo": "summary_dpo"}  # of the figures on the pipeline run


def headline(metrics: Mapping[str, Any], trained: str) -> dict[str, float]:
    """The few figures of metrics/evaluate*.json by which runs are compared, under short names."""
    ours = metrics["sampled"][trained]
    judge, reward = ours["win_rate_judge"], ours["win_rate_reward"]
    return {
        "win_rate_judge": judge["mean"],
        "win_rate_judge_low": judge["low"],
        "win_rate_judge_high": judge["high"],
        "win_rate_reward": reward["mean"],
        "win_rate_judge_equal_length": ours["win_rate_judge_length_controlled"]["mean"],
        "kl": ours["kl_per_sequence_k1"],
        "reward": ours["reward_mean"],
        "judge": ours["judge_mean"],
        "length": ours["length_median"],
        "reward_model_accuracy": metrics["reward_model"]["accuracy"]["mean"],
        "judge_accuracy": metrics["judge_model"]["accuracy"]["mean"],
    }


def stand(stage: Stage, metrics: Mapping[str, Any], trained: str, temperature: float, resamples: int) -> None:
    """Tells MLflow: the headline and the verdict on the pipeline run, and the policy as a version of the registered model.

    Args:
        metrics: what the stage finishes with; its curves have the judge's score of each answer.
        trained: whose adapter is registered: `policy` or `dpo`.
    """
    figures = headline(metrics, trained)
    tracker = stage.tracker
    tracker.sum_up(PREFIX[trained], figures)
    tracker.set_tags({f"verdict.{trained}": mood(metrics, trained)}, on="parent")
    tracker.describe_parent(trained, verdict(metrics, trained))
    folder = Path(f"artifacts/{trained}")
    scores = tuple(float(row["judge"]) for row in stage.curves if row["role"] == trained)
    court = digest(hash_path(Path("artifacts/judge")), hash_path(Path("prepared/heldout.jsonl")), temperature)
    rate = Rate(**metrics["sampled"][trained]["win_rate_judge"])
    standing = Standing(hash_path(folder), court, scores, rate, figures)
    tracker.register(f"{stage.runtime.experiment}-policy", folder, standing, resamples, stage.seed)
