"""The verdict: code, setting, reward model or nothing; and the command itself."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from diagnosis_world import copied, open_world, write_world

import pipeline.algorithms
from pipeline import diagnose
from pipeline.data.prepared import read_pairs
from pipeline.diagnosis.compare import ARITHMETIC, Beat, compare
from pipeline.diagnosis.ladder import Budget, Climb, rungs, still_fault
from pipeline.diagnosis.learning import ShortRun, trend
from pipeline.diagnosis.sanity import Kind, Sanity, check_reward_model
from pipeline.diagnosis.verdict import CODE, SETTING, SOUND, Verdict, judge
from pipeline.errors import DataError
from pipeline.files import hash_path
from pipeline.heads import ScalarHead
from pipeline.params.evaluate import EvaluateParams
from pipeline.params.ppo import PPOParams
from pipeline.params.section import read_params, unusual_values
from pipeline.weights import save_head

CFG = PPOParams(**read_params(ROOT / "recipes" / "demo.yaml")["ppo"])
SMALL = Budget(rows=4, answers=6, iterations=2, still_iterations=1, pairs=8)


def run_with(
    cfg: PPOParams = CFG, *, kl: float = 3.0, rise: float = 1.0, moved: float = 1e-3, **figures: float
) -> ShortRun:
    """A run of 4 iterations of 4 steps that came to `kl` nats, with a standard error of 0.2."""
    one = {"kl_per_token_k3": kl / 20, "length_mean": 20.0, "update_steps": 4.0, "update_steps_skipped": 0.0}
    one |= {"clip_fraction": 0.1, "update_k3": 1e-5} | figures
    return ShortRun(cfg, [0.0, rise], [one] * 4, rise, 0.2, 0.1, moved, "")


def climb_with(cfg: PPOParams = CFG, **parts) -> Climb:
    """A climb in which all is well, but for `parts`."""
    kinds = [Kind("chosen", 1.0, 1.0, 0.5), Kind("rejected", -1.0, 1.0, 0.9), Kind("empty", -1.0, 1.0, 0.9)]
    still = run_with(kl=1e-4, moved=5e-7)
    whole = {
        "cfg": cfg,
        "beats": [Beat("rollout: log-probs", "pipeline/rollout.py", "within 0", False)],
        "as_set": run_with(cfg),
        "pure": run_with(),
        "wide": run_with(),
        "still": still,
        "gentle": None,
        "sanity": Sanity(40, kinds),
        "limit": 1e-2,
    }
    return Climb(**(whole | parts))


def verdict_of(found: Climb, temperature: float = 1.0) -> Verdict:
    """With the warnings that `check_params` would give of section ppo."""
    evaluate = EvaluateParams(temperature=temperature, bootstrap=200)
    return judge(found, evaluate, unusual_values("ppo", found.cfg))


def test_where_all_is_well_nothing_deviates() -> None:
    verdict = verdict_of(climb_with())
    assert (verdict.status, verdict.notes) == (SOUND, [])
    assert [line.word for line in rungs(climb_with())] == ["ok"] * 6


def test_a_learning_rate_of_a_hundredth_is_a_setting() -> None:
    cfg = CFG.model_copy(update={"lr": 1e-2})
    wild = run_with(cfg, kl=60.0, rise=-1.0, update_steps=1.0, update_steps_skipped=3.0)
    found = climb_with(cfg, as_set=wild, gentle=run_with(cfg.model_copy(update={"lr": 1e-3})))
    verdict = verdict_of(found)
    assert verdict.status == SETTING and "SETTINGS" in verdict.headline
    assert verdict.next_steps == [
        "ppo.lr is 0.01: stop_kl left out 12 of 16 optimizer steps. With 0.001 that does not happen: lower it."
    ]


@pytest.mark.parametrize(
    ("changes", "parts", "key"),
    [
        ({"kl_coef": 0.1}, {"as_set": run_with(kl=0.3)}, "ppo.kl_coef"),
        ({"kl_coef": 2.0}, {}, "ppo.kl_coef"),
        ({"clip": 0.15}, {"as_set": run_with(kl=0.3), "pure": run_with(kl=0.4)}, "ppo.clip"),
        ({"lr": 2e-5}, {name: run_with(kl=0.001) for name in ("as_set", "pure", "wide")}, "ppo.lr"),
        ({"temperature": 0.2}, {}, "ppo.temperature"),
        ({"gamma": 0.9}, {}, "ppo.gamma"),
    ],
    ids=["price holds", "price unusual", "clip holds", "hardly moves", "cold", "discount"],
)
def test_bad_settings_are_named_by_their_key(changes: dict, parts: dict, key: str) -> None:
    cfg = CFG.model_copy(update=changes)
    verdict = verdict_of(climb_with(cfg, **parts), cfg.temperature)
    assert verdict.status == SETTING
    assert [step.split()[0] for step in verdict.next_steps] == [key]


def test_two_temperatures_are_a_setting() -> None:
    verdict = verdict_of(climb_with(), temperature=0.7)
    assert verdict.status == SETTING
    assert "ppo.temperature is 1 but evaluate.temperature 0.7" in verdict.next_steps[0]


def test_unusual_values_that_decide_nothing_are_notes() -> None:
    verdict = verdict_of(climb_with(CFG.model_copy(update={"rollout_size": 16})))
    assert verdict.status == SOUND
    assert verdict.notes[0].startswith("ppo.rollout_size is 16")


def test_code_comes_before_everything_else() -> None:
    beats = [
        Beat("evaluate: scores", "pipeline/roles.py", "within 0", False),
        Beat("evaluate: KL per token", "pipeline/evaluation.py", "answer 1 …", True, "the numbers are those of no KL"),
        Beat("update: loss", "pipeline/update.py", "…", True),
    ]
    cfg = CFG.model_copy(update={"lr": 1e-2})
    found = climb_with(cfg, beats=beats, as_set=None, pure=None, wide=None, still=None)
    verdict = verdict_of(found)
    assert verdict.status == CODE
    assert "`evaluate: KL per token`" in verdict.headline
    assert "pipeline/evaluation.py" in verdict.next_steps[0] and "update: loss" in verdict.next_steps[2]
    assert [line.word for line in rungs(found)] == ["CODE", "left out", "left out", "left out", "ok"]


@pytest.mark.parametrize(
    ("still", "words"),
    [
        (run_with(kl=1e-4, moved=1e-3), "a weight moved"),
        (run_with(kl=1e-4, moved=0.0), "no weight moved at all"),
        (run_with(kl=3.0, moved=5e-7), "KL of 3"),
        (run_with(kl=1e-4, moved=5e-7, update_k3=0.7), "0.7 nats per token"),
    ],
)
def test_a_tiny_learning_rate_that_moves_something_is_code(still: ShortRun, words: str) -> None:
    found = climb_with(still=still)
    assert words in still_fault(found)
    assert verdict_of(found).status == CODE


def test_a_reward_model_at_chance_is_neither_code_nor_setting() -> None:
    kinds = [Kind("chosen", 0.0, 1.0, 0.5), Kind("rejected", 0.0, 1.0, 0.55), Kind("copied", 2.0, 1.0, 0.1)]
    verdict = verdict_of(climb_with(sanity=Sanity(40, kinds)))
    assert verdict.status == SETTING and verdict.headline.startswith("REWARD MODEL")
    assert "rejected in 55% of 40 pairs; 63% would be more than chance" in verdict.next_steps[0]
    assert "copied in 10% of 40 pairs: PPO will find that out" in verdict.next_steps[1]


def test_what_few_pairs_cannot_tell_is_a_note() -> None:
    kinds = [Kind("chosen", 0.0, 1.0, 0.5), Kind("rejected", 0.0, 1.0, 0.83), Kind("shuffled", 0.0, 1.0, 0.6)]
    verdict = verdict_of(climb_with(sanity=Sanity(24, kinds)))
    assert verdict.status == SOUND
    assert "shuffled in 60% of 24 pairs, which may be chance; 67% would not be" in verdict.notes[0]


def test_a_reward_model_that_prefers_the_rejected_is_asked_about_its_data() -> None:
    kinds = [Kind("chosen", 0.0, 1.0, 0.5), Kind("rejected", 1.0, 1.0, 0.1)]
    assert "mixed up in the data" in Sanity(40, kinds).faults[0]


def test_scores_without_spread_are_said() -> None:
    kinds = [Kind(name, 1.0, 0.0, 0.5) for name in ("chosen", "rejected")]
    assert "no spread" in Sanity(40, kinds).faults[0]


def test_the_rise_leaves_out_how_prompts_differ() -> None:
    """Scores (0, 10), (1, 12), (2, 14): prompts rise by 2 and 4 in all, 3 on average; standard error sqrt(2) / sqrt(2) = 1."""
    rise, error = trend([torch.tensor(s, dtype=torch.float64) for s in ([0, 10], [1, 12], [2, 14])], 1)
    assert (rise, error) == (pytest.approx(3.0), pytest.approx(1.0))


def test_a_comparison_says_where_it_is_off() -> None:
    right = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    beat = compare("beat", "module", [[1.0, 2.0, 3.5], [4.0, 5.0, 6.5]], right, ARITHMETIC)
    assert beat.deviates
    assert beat.found == ("answer 1, token 3: 3.5 where 3 is right; 2 of 6 numbers are off, at the last token alone")
    assert compare("beat", "module", [[1.0, 2.0, math.nan], [4.0, 5.0, 6.0]], right, ARITHMETIC).deviates
    assert not compare("beat", "module", right, right, ARITHMETIC).deviates


# --- the command ---


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On models as small as these a second thread only waits, and on a busy machine for long."""
    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


@pytest.fixture(scope="module")
def world(tiny_folders: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder, tiny_folders(), tokens__max_response=12, ppo__lr=1e-2)
    return folder


def test_a_run_at_a_hundredth_on_a_real_loop_is_a_setting_and_writes_nothing(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world)
    before = hash_path(world)
    verdict = diagnose.diagnose(SMALL)
    assert hash_path(world) == before
    assert verdict.status == SETTING and "BAD SETTINGS" in verdict.headline
    assert any(step.startswith("ppo.lr is 0.01") for step in verdict.next_steps)
    printed = capsys.readouterr().out
    assert "DEVIATES" not in printed and "BAD SETTINGS" in printed
    assert max(map(len, printed.splitlines()[-80:])) <= 80


def test_faulty_code_ends_with_its_own_status(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world)
    monkeypatch.setattr(pipeline.algorithms, "masked_whiten", lambda x, mask: -x * mask)
    monkeypatch.setattr(diagnose, "Budget", lambda: SMALL)
    with pytest.raises(SystemExit) as ended:
        diagnose.main()
    assert ended.value.code == CODE
    assert "the first beat that deviates is `evaluate: advantages`" in " ".join(capsys.readouterr().out.split())


def test_what_is_missing_is_said_at_once(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copied(world, tmp_path))
    for name in ("adapter_config.json", "adapter_model.safetensors", "origin.json"):
        (tmp_path / "artifacts/sft" / name).unlink()
    (tmp_path / "artifacts/sft").rmdir()
    (tmp_path / "prepared/ppo.jsonl").unlink()
    with pytest.raises(
        DataError, match=r"prepared/ppo.jsonl, artifacts/sft are not there; run `dvc repro reward` first"
    ):
        diagnose.diagnose(SMALL)


def test_a_random_head_in_the_artifact_is_at_chance(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code reads the head that it is given: no beat deviates, and the reward model cannot tell answers apart."""
    monkeypatch.chdir(copied(world, tmp_path))
    save_head(ScalarHead(64, std=0.1), tmp_path / "artifacts/reward")
    case = open_world()
    sanity = check_reward_model(
        case.loop.reward_model, read_pairs(Path("prepared/development.jsonl")), case.tokenizer, 4
    )
    assert sanity.faults and "rejected" in sanity.faults[0]
    assert [kind.name for kind in sanity.kinds] == ["chosen", "rejected", "shuffled", "empty", "copied"]
