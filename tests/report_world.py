"""Folders as a run leaves them, small, with figures chosen so that what the report says of them is known."""

import json
import shutil
from pathlib import Path
from typing import Any

from conftest import ROOT

from pipeline.files import write_json, write_tsv

PARTS = {"heldout": 4, "sft": 6}
LENGTHS = {"count": 10, "cut": 1, "max": 80, "p5": 9, "p50": 32, "p90": 48, "p99": 66, "spell_special_tokens": 0}
MODEL = {"pairs": 9, "accuracy": {"mean": 0.8, "low": 0.7, "high": 0.9}}


def rate(mean: float, low: float, high: float) -> dict[str, float]:
    return {"mean": mean, "low": low, "high": high}


def evaluation(trained: str = "policy", **rates: dict[str, float]) -> dict[str, Any]:
    """metrics/evaluate.json: the trained model wins, in 80% by the reward and 64% by the judge, unless told otherwise."""
    wins = {
        "win_rate_reward": rate(0.8, 0.7, 0.9),
        "win_rate_judge": rate(0.64, 0.54, 0.73),
        "win_rate_judge_length_controlled": rate(0.68, 0.57, 0.79),
    } | {f"win_rate_{name}": value for name, value in rates.items()}
    row = {"reward_mean": 1.0, "judge_mean": 0.5, "length_median": 33.0, "end_token_rate": 1.0, "distinct_2": 0.5}
    sampled = {
        "base": row | wins | {"kl_per_sequence_k1": 40.0},
        "sft": row | {"kl_per_sequence_k1": 0.0},
        trained: row | wins | {"kl_per_sequence_k1": 13.4, "length_median": 21.0},
    }
    return {"sampled": sampled, "greedy": sampled, "reward_model": MODEL, "judge_model": MODEL}


def empty_run(folder: Path) -> Path:
    """A checkout in which nothing has run."""
    for name in ("params.yaml", "dvc.yaml", "alternatives/dvc.yaml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def ppo_curve(lengths: list[float]) -> list[dict[str, float | str]]:
    """Iterations in which all is well but, if so told, the length."""
    still = {
        "score_std": 3.0,
        "advantage_positive_share": 0.5,
        "distinct_2": 0.8,
        "entropy": 3.0,
        "end_token_rate": 1.0,
    }
    return [
        {
            "step": step,
            "score_mean": float(step),
            "score_p10": step - 2.0,
            "score_p90": step + 2.0,
            "kl_per_sequence_k1": float(step),
            "kl_per_token_k1": 0.04 * step,
            "length_mean": length,
            "policy_loss": 0.1,
            "value_loss": 1.0,
            "clip_fraction": 0.05,
            "explained_variance": 0.1,
            **still,
        }
        for step, length in enumerate(lengths)
    ]


def finished_run(folder: Path, trained: str = "policy", answers: list[str] | None = None) -> Path:
    """A checkout whose chain has come to its end. Answers to four prompts; at iteration 5 they are half as long as at the start."""
    empty_run(folder)
    suffix = "" if trained == "policy" else "_dpo"
    for stage in ("sft", "reward", "judge") if trained == "policy" else ("sft", "reward", "judge", "dpo"):
        write_json(folder / f"metrics/{stage}.json", {"steps": 3})
        write_tsv(folder / f"plots/{stage}.tsv", [{"step": step, "loss": 1.0 - 0.1 * step} for step in range(3)])
    sources = {"pairs": {"rows": 11, "rows_used": 10, "rejected": {"empty answer": 1}}}
    prepared = {"sources": sources, "prompts": PARTS, "lines": PARTS, "tokens": {"lengths": {"prompt": LENGTHS}}}
    write_json(folder / "metrics/prepare.json", prepared)
    write_json(folder / f"metrics/evaluate{suffix}.json", evaluation(trained))
    if trained == "policy":
        write_json(folder / "metrics/ppo.json", {"kept_step": 3})
        write_tsv(folder / "plots/ppo.tsv", ppo_curve([30, 30, 30, 14, 14, 14, 14]))
        watched = [
            {"step": 0, "kl": 0.0, "reward": -1.0, "judge": -1.0},
            {"step": 3, "kl": 4.5, "reward": 0.5, "judge": 0.1},
        ]
        write_tsv(folder / "plots/overoptimisation.tsv", watched)
    points = [
        {"role": role, "prompt": prompt, "reward": float(prompt), "judge": float(-prompt), "kl": 1.0, "tokens": 9}
        for role in ("base", "sft", trained)
        for prompt in range(4)
    ]
    write_tsv(folder / f"plots/evaluate{suffix}.tsv", points)
    rows = [
        {
            "prompt": f"question {number}",
            "base": "of the base",
            "base_reward": 0.0,
            "base_judge": 0.0,
            "sft": f"before {number}",
            "sft_reward": 0.0,
            "sft_judge": 0.0,
            trained: text,
            f"{trained}_reward": 1.0,
            f"{trained}_judge": float(number),
        }
        for number, text in enumerate(answers or ["one", "two", "three", "four"])
    ]
    write_tsv(folder / f"artifacts/evaluation{suffix}/sampled.tsv", rows)
    return folder


def lock(folder: Path, **params: Any) -> None:
    """A dvc.lock by which ppo was run with these values."""
    stage = {"outs": [{"path": "artifacts/policy", "md5": "0123abc.dir"}], "params": {"params.yaml": params}}
    (folder / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": {"ppo": stage}}))
