"""What runs are compared by, what they cost together, and which policy is champion."""

from pathlib import Path

import pytest
from test_tracking import begin, client, parent_of, run_of, runs_of, to

from pipeline.statistics import Rate
from pipeline.tracking.delivery import deliver
from pipeline.tracking.spool import Delivered
from pipeline.tracking.standing import Ruling, Standing, ruling
from pipeline.tracking.store import Store

MODEL = "tests-policy"
GOOD, EVEN, BAD = Rate(0.64, 0.54, 0.73), Rate(0.52, 0.42, 0.61), Rate(0.3, 0.2, 0.4)


def standing(policy: str, scores: list[float], court: str = "c", against_sft: Rate = GOOD) -> Standing:
    return Standing(policy, court, tuple(scores), against_sft, {"kl": 13.4})


def adapter(folder: Path, name: str) -> Path:
    place = folder / name
    place.mkdir()
    (place / "adapter_model.safetensors").write_text(name)
    (place / "adapter_config.json").write_text("{}")
    return place


def register(folder: Path, key: str, held: Standing) -> None:
    tracker = begin(folder, "evaluate", key)
    tracker.register(MODEL, adapter(folder, f"weights-{key}"), held, resamples=500, seed=1)
    tracker.end("FINISHED")


def aliases(folder: Path) -> dict[str, int]:
    return {alias: int(version) for alias, version in client(folder).get_registered_model(MODEL).aliases.items()}


@pytest.mark.parametrize(
    ("rate", "champion"), [(GOOD, True), (EVEN, False), (BAD, False), (Rate(0.6, 0.5, 0.7), False)]
)
def test_where_there_is_no_champion_sft_is_the_one_to_beat(rate: Rate, champion: bool) -> None:
    decided = ruling(standing("p", [1.0], against_sft=rate), None, (), "", 100, 1)
    assert decided.champion is champion


def test_the_title_goes_to_who_wins_outside_the_interval() -> None:
    """60 of 100 prompts: the interval of a share of 0.6 is 0.6 -+ 1.96 * sqrt(0.24 / 100) = 0.504 to 0.696; of 55: 0.452."""
    theirs = tuple(0.0 for _ in range(100))
    for won, champion in ((70, True), (55, False), (50, False), (30, False)):
        ours = standing("p", [1.0] * won + [-1.0] * (100 - won))
        assert ruling(ours, "c", theirs, "version 1", 2000, 1).champion is champion, won
    same = ruling(standing("p", [0.0] * 100), "c", theirs, "version 1", 2000, 1)
    assert same == Ruling(False, "over version 1 it wins 50% (50% to 50%) by the judge")


@pytest.mark.parametrize(("court", "scores"), [("other", (0.0, 0.0)), ("c", (0.0,))])
def test_scores_of_another_judge_or_other_prompts_are_not_compared(court: str, scores: tuple[float, ...]) -> None:
    decided = ruling(standing("p", [9.0, 9.0]), court, scores, "version 3", 100, 1)
    assert not decided.champion and "not compared with version 3" in decided.why


def test_policies_become_versions_and_the_better_one_champion(tmp_path: Path) -> None:
    """One beats SFT and takes the title; a second is no better and stays candidate; a third beats the first."""
    register(tmp_path, "k1", standing("first", [0.0] * 40))
    assert aliases(tmp_path) == {"candidate": 1, "champion": 1}
    register(tmp_path, "k2", standing("second", [-1.0] * 20 + [1.0] * 20))
    assert aliases(tmp_path) == {"candidate": 2, "champion": 1}
    register(tmp_path, "k3", standing("third", [1.0] * 40))
    assert aliases(tmp_path) == {"candidate": 3, "champion": 3}
    versions = {
        int(version.version): version for version in client(tmp_path).search_model_versions(f"name = '{MODEL}'")
    }
    assert versions[2].tags["champion.why"] == "over version 1 it wins 50% (35% to 65%) by the judge"
    assert versions[3].tags["figure.kl"] == "13.4" and versions[3].tags["policy.hash"] == "third"
    (run,) = runs_of(tmp_path, f"attributes.run_id = '{versions[3].run_id}'")
    assert versions[3].source == f"{run.info.artifact_uri}/policy"
    weights = tmp_path / "mlruns/tests" / run.info.run_id / "artifacts/policy/adapter_model.safetensors"
    assert weights.read_text() == "weights-k3"


def test_registering_again_changes_nothing(tmp_path: Path) -> None:
    """The same bytes, evaluated again; and one spool delivered twice."""
    register(tmp_path, "k1", standing("first", [0.0] * 40))
    tracker = begin(tmp_path, "evaluate", "k2")
    tracker.register(MODEL, adapter(tmp_path, "again"), standing("first", [0.0] * 40), resamples=500, seed=1)
    tracker.end("FINISHED")
    tracker.spool.note(Delivered())
    with tracker.spool.lock:
        deliver(tracker.spool, Store.connect(to(tmp_path).uri, tmp_path / "lock"), print)
    assert aliases(tmp_path) == {"candidate": 1, "champion": 1}
    assert len(client(tmp_path).search_model_versions(f"name = '{MODEL}'")) == 1


def test_a_registry_that_refuses_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow.exceptions import MlflowException

    def refuses(*_: object) -> str:
        raise MlflowException("no registry here")

    monkeypatch.setattr("pipeline.tracking.registry.register", refuses)
    tracker = begin(tmp_path, "evaluate")
    tracker.register(MODEL, adapter(tmp_path, "weights"), standing("first", [0.0]), resamples=10, seed=1)
    tracker.log_metrics(0, {"after": 1.0})
    tracker.end("FINISHED")
    run = run_of(tmp_path, tracker)
    assert run.data.metrics["after"] == 1.0 and run.info.status == "FINISHED"
    assert "no registry here" in capsys.readouterr().out
    assert tracker.spool.waiting() == 1, "it is tried again"


def test_costs_are_added_up_on_the_pipeline_run(tmp_path: Path) -> None:
    for stage, seconds, memory in (("sft", 60.0, 3.0), ("ppo", 540.0, 2.5), ("ppo", 500.0, 2.0)):
        tracker = begin(tmp_path, stage)
        tracker.cost(stage, {"cost.seconds": seconds, "cost.peak_memory_gb": memory})
        tracker.end("FINISHED")
    metrics = parent_of(tmp_path, tracker).data.metrics
    assert metrics == {
        "cost.seconds.sft": 60.0,
        "cost.seconds.ppo": 500.0,
        "cost.seconds": 560.0,
        "cost.peak_memory_gb.sft": 3.0,
        "cost.peak_memory_gb.ppo": 2.0,
        "cost.peak_memory_gb": 3.0,
    }
    assert run_of(tmp_path, tracker).data.metrics["cost.seconds"] == 500.0


def test_a_pipeline_run_has_headline_tags_and_a_description(tmp_path: Path) -> None:
    tracker = begin(tmp_path, "evaluate")
    tracker.sum_up("summary", {"kl": 13.4})
    tracker.set_tags({"verdict.policy": "better"}, on="parent")
    for part, text in (("policy", "Worse."), ("dpo", "DPO's policy is even."), ("policy", "The policy is better.")):
        tracker.describe_parent(part, text)
    tracker.describe("Stage evaluate.")
    tracker.end("FINISHED")
    parent = parent_of(tmp_path, tracker)
    assert parent.data.metrics == {"summary.kl": 13.4}
    assert parent.data.tags["verdict.policy"] == "better"
    assert parent.data.tags["mlflow.note.content"] == "DPO's policy is even.\n\nThe policy is better."
    assert run_of(tmp_path, tracker).data.tags["mlflow.note.content"] == "Stage evaluate."
