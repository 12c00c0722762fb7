"""The benchmark's own arithmetic, by hand, and that what it measures is what it says."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from worlds import PROMPTS, World

from benchmarks import machine, results
from benchmarks.floor import Beats, beats, shape_of
from benchmarks.ours import ppo as ours_ppo
from benchmarks.ours import rollout as ours_rollout
from benchmarks.ours import sft as ours_sft
from benchmarks.ours.roles import Stopwatch
from benchmarks.ours.rollout import STOP_ID, lengths_planned
from benchmarks.plan import NF4, OURS, PEER, PEER_SETTINGS, growing, parts
from benchmarks.probe import ProbeError, measure
from benchmarks.render import BEGIN, END, PAGE, block, markdown, read_report, with_block
from benchmarks.results import TARGETS, judged, spread
from benchmarks.setting import our_setting, rows_at_once
from benchmarks.work import Work, prompt_ids, spread_lengths
from pipeline import online, rollout
from pipeline.backbone import Backbone
from pipeline.planning.work import Rates, Shape, decode_step
from pipeline.roles import Policy
from pipeline.rollout import Sampling, generate

SHAPE = Shape(body=1000, head=100, lora=10, kv_values=5)
RATES = Rates(flops=1000.0, bandwidth=100.0)
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


def test_a_shape_from_a_configuration() -> None:
    """Per layer 2 x 576 x 576 + 2 x 576 x 192 + 3 x 576 x 1536 weights; an adapter has r x (in + out) per linear."""
    shape = shape_of(SMOLLM2, lora_r=16)
    assert shape.body == 30 * (663_552 + 221_184 + 2_654_208) == 106_168_320
    assert shape.head == 49152 * 576
    assert shape.lora == 30 * 16 * (2 * 1152 + 2 * 768 + 3 * 2112)
    assert shape.kv_values == 2 * 30 * 192


def test_a_decode_step_takes_what_takes_longer() -> None:
    """Reading: 2 x 1000 + 2 x 100 + 2 x 5 x 2 rows x 3 tokens = 2260 bytes; computing: 2 x 1100 x 2 rows = 4400 operations."""
    assert decode_step(SHAPE, RATES, rows=2, context=3) == pytest.approx(22.6)
    assert decode_step(SHAPE, Rates(flops=100.0, bandwidth=100.0), rows=2, context=3) == pytest.approx(44.0)


def test_the_floor_of_an_iteration() -> None:
    """Two prompts of 3 tokens, 2 new tokens each, one epoch.

    Prefill: 2 x 1000 x 6 + 2 x 100 x 2 = 12,400 operations, 12.4 s. One decode step at 3 + 2 / 2 = 4 tokens: 2280 bytes, 22.8 s.
    A forward of all: 2 x 1000 x 10 + 2 x 100 x 4 = 20,800. A backward: the same and 6 x 10 x 10. Adam: 28 x 10 bytes, 2.8 s.
    """
    floor = beats(SHAPE, RATES, rows=2, prompt=3, response=2, epochs=1)
    assert floor.rollout == pytest.approx(12.4 + 22.8)
    assert floor.evaluate == pytest.approx(20.8)
    assert floor.update == pytest.approx(20.8 + 21.4 + 2.8)
    assert floor.iteration == pytest.approx(floor.rollout + floor.evaluate + floor.update)
    twice = beats(SHAPE, RATES, rows=2, prompt=3, response=2, epochs=2)
    assert twice == Beats(floor.rollout, floor.evaluate, pytest.approx(90.0))


def test_median_and_extremes() -> None:
    assert spread([5.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 5.0, "count": 3}


def ppo_runs(seconds: list[float], peak: float, imported: float = 0.5) -> list[dict[str, Any]]:
    """One process whose iterations took so long, each beat a part of it."""
    iterations = [{"iteration": s, "rollout": s / 2, "evaluate": s / 8, "update": s / 4} for s in seconds]
    return [{"seconds": iterations, "peak_gb": peak, "imported_gb": imported}]


@pytest.fixture
def measured() -> dict[str, Any]:
    """Summaries of all parts that the ratios need."""
    work = Work(rows=2, prompt=3, response=5, epochs=4)
    ppo = {OURS: ppo_runs([3.0, 9.0, 4.0], peak=1.7), NF4: ppo_runs([4.2], peak=2.0)}
    peers = zip(PEER_SETTINGS, ([20.0, 22.0, 21.0], [16.0], [30.0]), (4.0, 5.0, 2.5), strict=True)
    ppo |= {name: ppo_runs(seconds, peak) for name, seconds, peak in peers}
    lengths = {"fixed": [24, 24], "varied": [8, 64]}
    speeds = {OURS: (2.0, 1.0), "plain generate": (8.0, 6.0)}
    return {
        "ppo": results.summarize_ppo(ppo, work),
        "rollout": results.summarize_rollout(
            {name: [{"seconds": {"fixed": [one], "varied": [other]}}] for name, (one, other) in speeds.items()}, lengths
        ),
        "sft": results.summarize_sft(
            {
                OURS: [{"seconds": [1.0], "peak_gb": 1.5, "imported_gb": 0.5}],
                "plain PEFT": [{"seconds": [1.0], "peak_gb": 1.65, "imported_gb": 0.4}],
            }
        ),
        "steps": results.summarize_steps(
            {"x": [{"peak_gb_after": [1.0 + step / 100 for step in range(1, 65)], "resident_gb_after": [1.0] * 64}]}
        ),
    }


def test_ratios(measured: dict[str, Any]) -> None:
    """Ours has the median 4 s and 1.7 GB; the peer's fastest 16 s, its leanest 2.5 GB."""
    expected = {
        "time_ratio": 4 / 16,
        "memory_ratio": 1.7 / 2.5,
        "rollout_fixed": 8 / 2,
        "rollout_varied": 6 / 1,
        "ppo_over_sft": (1.7 - 0.5) / (1.5 - 0.5),
        "sft_memory": (1.5 - 0.5) / (1.65 - 0.4),
        "late_over_early": 1.30 / 1.05,
        "nf4_ratio": 4.2 / 4,
    }
    found = judged(measured)
    assert {name: judgement["value"] for name, judgement in found.items()} == pytest.approx(expected)
    missed = {name for name, judgement in found.items() if not judgement["met"]}
    assert missed == {"memory_ratio", "late_over_early"}


def test_tokens_per_second(measured: dict[str, Any]) -> None:
    """The update takes a quarter of 4 s for 4 epochs of 2 rows of 8 tokens, the rollout half of it for 2 answers of 5."""
    assert measured["ppo"][OURS]["update_tokens_per_second"] == pytest.approx(64 / 1)
    assert measured["ppo"][OURS]["rollout_tokens_per_second"] == pytest.approx(10 / 2)
    assert measured["rollout"][OURS]["varied"]["median"] == pytest.approx(72 / 1)


def test_what_was_not_measured_is_not_judged(measured: dict[str, Any]) -> None:
    assert set(judged({"rollout": measured["rollout"]})) == {"rollout_fixed", "rollout_varied"}
    assert len(judged(measured)) == len(TARGETS)


def test_a_busy_machine_is_refused_with_a_sentence() -> None:
    assert machine.refusal(1.0) is None
    assert machine.refusal(1.01).startswith("The load is 1.01 but must be at most 1: ")


def test_the_share_that_others_had() -> None:
    """In 10 seconds two cores had 20; 15 were busy, 12 of them for us: 3 of 20."""
    start, end = machine.Moment(100.0, 1000.0, 50.0), machine.Moment(110.0, 1015.0, 62.0)
    assert start.others_share(end, cores=2) == pytest.approx(0.15)
    assert machine.Moment.now().busy > 0


def test_ours_and_the_peers_take_turns() -> None:
    ppo = next(part for part in parts(Work(), "model") if part.name == "ppo")
    assert [probe.side for probe in ppo.probes] == [OURS, PEER, OURS, PEER, OURS, PEER, OURS, OURS]
    assert {probe.request["work"]["rows"] for probe in ppo.probes} == {16}


def test_the_peer_has_our_microbatch_in_sft() -> None:
    sft = next(part for part in parts(Work(), "model") if part.name == "sft")
    setting = our_setting(Work(), {"runtime": {"microbatch_tokens": 300}})
    assert rows_at_once(setting.runtime, 64) == 4
    assert rows_at_once(setting.runtime, 512) == 1
    assert sft.probes[1].request["microbatch"] == rows_at_once(our_setting(Work()).runtime, 64)


def test_growth_goes_as_far_as_the_issue_says() -> None:
    works = list(growing().values())
    assert [work.row_tokens for work in works if work.rows == 4] == [64, 256, 1024]
    assert [work.rows for work in works if work.row_tokens == 64] == [4, 16, 64]


def test_our_setting_is_the_work() -> None:
    setting = our_setting(Work(rows=8, epochs=3, lora_r=4), {"base": {"quantization": "nf4"}})
    assert (setting.ppo.rollout_size, setting.ppo.minibatch_size, setting.ppo.epochs) == (8, 8, 3)
    assert (setting.lora.r, setting.lora.alpha, setting.base.quantization) == (4, 8.0, "nf4")
    assert setting.stated()["ppo"]["stop_kl"] is None


def test_prompts_are_the_same_on_both_sides_and_another_time_others() -> None:
    work = Work(rows=2, prompt=3)
    assert prompt_ids(work, 0) == prompt_ids(work, 0) != prompt_ids(work, 1)
    assert all(20 <= token <= 40_000 for row in prompt_ids(Work(), 0) for token in row)


def test_lengths_are_spread_evenly() -> None:
    lengths = spread_lengths(8, 8, 64)
    assert sorted(lengths) == [8, 16, 24, 32, 40, 48, 56, 64] != lengths


def test_answers_end_where_they_are_planned_to(make_backbone: Callable[..., Backbone]) -> None:
    """Whatever the sampler does with finished rows: the noise belongs to prompts."""
    lengths = [3, 9, 1, 6, 9, 2, 4, 5]
    noise = rollout.uniforms
    asked = [prompt.__class__(row, (), prompt.ids) for row, prompt in enumerate(PROMPTS[: len(lengths)])]
    policy = Policy(make_backbone(), "sft", 1.0, 16)
    with lengths_planned(lengths):
        made = generate(policy, asked, Sampling(max(lengths), (STOP_ID,), chunk=64, seed=0), step=0)
    assert rollout.uniforms is noise
    assert made.response_lengths_B.tolist() == lengths
    assert not made.truncated_B.any()


def test_the_stopwatch_takes_every_beat_and_leaves_the_loop_as_it_was(make_backbone: Callable[..., Backbone]) -> None:
    before = (online.generate, online.evaluate, online.update)
    stopwatch = Stopwatch()
    with stopwatch.at_beats():
        World(make_backbone).train(2, watch=stopwatch.watch)
    assert (online.generate, online.evaluate, online.update) == before
    assert len(stopwatch.seconds) == 2
    for seconds in stopwatch.seconds:
        inside = seconds["rollout"] + seconds["evaluate"] + seconds["update"]
        assert min(seconds.values()) > 0 and inside < seconds["iteration"]


def test_our_measurements_run(tiny_folders: Callable[..., Path]) -> None:
    """On the tiny model: one warm-up, one measured iteration, rows of six tokens."""
    work = Work(rows=4, prompt=4, response=2, epochs=1, highest_id=300)
    request = work.request(model=str(tiny_folders()), lengths={"fixed": [2] * 4, "varied": [1, 3, 2, 1]})
    loop = ours_ppo.run(request)
    assert [set(seconds) for seconds in loop["seconds"]] == [set(results.BEATS)]
    assert len(loop["peak_gb_after"]) == 2 and loop["setting"]["ppo"]["rollout_size"] == 4
    rollouts = ours_rollout.run(request | {"changes": {"runtime": {"attention": "sdpa"}}})["seconds"]
    assert {name: len(seconds) for name, seconds in rollouts.items()} == {"fixed": 1, "varied": 1}
    assert len(ours_sft.run(request)["seconds"]) == 1


def test_a_process_that_fails_says_its_last_lines() -> None:
    with pytest.raises(ProbeError, match=r"(?s)benchmarks\.nowhere ended with status 1.*No module named"):
        measure(Path(sys.executable), "benchmarks.nowhere", {})


def test_the_parent_is_small() -> None:
    """A child's peak memory begins at what its parent held when it forked."""
    code = "import benchmarks.bench, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_tables_hold_the_figures(measured: dict[str, Any]) -> None:
    growth = results.summarize_growth(
        {"64 rows of 64 tokens": ppo_runs([8.0], 2.5), "4 rows of 64 tokens": ppo_runs([2.0], 1.5)}
    )
    floor = {"iteration": 3.0, "rollout": 1.0, "evaluate": 0.5, "update": 1.5}
    parts = measured | {"growth": growth, "rates": {"flops": 2e12, "bandwidth": 3e10, "floor_seconds": floor}}
    report = {
        "machine": machine.describe(),
        "load": {"before": [0.5, 0.5, 0.5], "after": [2.0, 1.5, 1.0], "others_share": 0.0123},
        "work": asdict(Work()),
        "repetitions": 3,
        "minutes": 38.2,
        "runtime": {"microbatch_tokens": 256},
        "setting": our_setting(Work()).stated(),
        "versions": {OURS: {"torch": "2.13.0"}, PEER: {"trl": "1.12.0"}},
        "parts": parts,
        "targets": judged(parts),
    }
    lines = markdown(report).splitlines()
    assert "recipes/demo.yaml with `runtime.microbatch_tokens: 256`; " in markdown(report)
    assert "| PPO iteration, seconds: ours over TRL's fastest setting | 0.25 | at most 0.333 | yes |" in lines
    assert "| PPO, peak memory: ours over TRL's leanest setting | 0.68 | at most 0.5 | **no** |" in lines
    ours = "| ours | 4.00 (3.00 to 9.00) | 2.00 (1.50 to 4.50) | 0.50 (0.38 to 1.12) | 1.00 (0.75 to 2.25) | 5 | 64 | 1.70 |"
    assert ours in lines
    assert ", 1.2% of the cores' time taken by other processes; " in lines[0]
    rows = [line.split(" |")[0] for line in lines if "rows of" in line]
    assert rows == ["| 4 rows of 64 tokens", "| 64 rows of 64 tokens"]
    assert "| 30 | 1.300 | 1.000 |" in lines
    assert "iteration 3.00 s, rollout 1.00 s, evaluate 0.50 s, update 1.50 s." in markdown(report)


def test_the_page_shows_the_last_run() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_block(page, block(read_report())) == page, "run `python -m benchmarks.render`"


def test_only_what_is_between_the_marks_changes() -> None:
    assert with_block(f"a {BEGIN} old {END} z", "new") == f"a {BEGIN}\n\nnew\n\n{END} z"
