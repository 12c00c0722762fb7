"""The tables that `make repro` and `make dpo` end with."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.summary import main, merged

RATE = {"mean": 0.5, "low": 0.4, "high": 0.6}
MODEL = {"pairs": 9} | {f"accuracy{rival}": RATE for rival in ("", "_length_alone", "_bag_of_words")}
MODEL |= {"by_length": {group: {"pairs": 0} for group in ("chosen_shorter", "similar", "chosen_longer")}}
MODEL |= {"confidence": 0.7, "ece": 0.1}
MODEL |= {f"lead_over_{rival}": RATE for rival in ("length_alone", "bag_of_words")}


def evaluation(trained: str, length: float = 20.0, **more: Any) -> dict[str, Any]:
    """What an evaluate stage writes, as far as the tables show it."""
    rates = {f"win_rate_{name}": RATE for name in ("reward", "judge", "judge_length_controlled")}
    row = {"kl_per_sequence_k1": 0.0, "length_median": length, "end_token_rate": 1.0, "distinct_2": 0.5}
    roles = {"base": row | rates, "sft": row, trained: row | rates}
    return {"sampled": roles, "greedy": roles, "reward_model": MODEL, "judge_model": MODEL} | more


def test_two_evaluations_of_one_run_are_one() -> None:
    both = merged(evaluation("policy"), evaluation("dpo", dpo_model=MODEL))
    assert list(both["sampled"]) == ["base", "sft", "dpo", "policy"]
    assert both["dpo_model"] == MODEL


def test_evaluations_of_different_runs_are_not_mixed() -> None:
    assert merged(evaluation("policy"), evaluation("dpo", length=21.0)) is None


def test_wide_intervals_are_not_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of five prompts an interval can go from 0 to 100, and three of those are wider than a terminal of 80."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    wide = {"mean": 0.5, "low": -1.0, "high": 1.0}
    content = evaluation("policy")
    for name in ("reward", "judge", "judge_length_controlled"):
        content["sampled"]["policy"][f"win_rate_{name}"] = wide
    content["judge_model"] = MODEL | {f"lead_over_{rival}": wide for rival in ("length_alone", "bag_of_words")}
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/evaluate.json").write_text(json.dumps(content))
    main("repro")
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert printed.count("50% (-100-100)") == 2 * 3 and printed.count("+50 (-100, +100)") == 2 and "distinct" in printed


@pytest.mark.parametrize(("command", "trained", "other"), [("repro", "policy", "dpo"), ("dpo", "dpo", "policy")])
def test_what_is_there_is_printed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    trained: str,
    other: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics").mkdir()
    files = {"policy": Path("metrics/evaluate.json"), "dpo": Path("metrics/evaluate_dpo.json")}
    names = {"policy": "  policy  ", "dpo": "  DPO  "}
    with pytest.raises(SystemExit):
        main(command)
    assert f"run `make {command}`" in capsys.readouterr().out
    files[trained].write_text(json.dumps(evaluation(trained)))
    main(command)
    alone = capsys.readouterr().out
    assert alone.count(names[trained]) == 2 and names[other] not in alone
    files[other].write_text(json.dumps(evaluation(other)))
    main(command)
    both = capsys.readouterr().out
    assert both.count(names["policy"]) == both.count(names["dpo"]) == 2
    files[other].write_text(json.dumps(evaluation(other, length=21.0)))
    main(command)
    stale = capsys.readouterr().out
    assert names[other] not in stale and f"{files[other]} is of another run" in stale
