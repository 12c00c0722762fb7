"""The report: what it says, that it says what is missing, and that nothing in it can run or be fetched."""

from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import DESKTOP, PHONE, browser_path, page_in, shown
from conftest import ROOT
from report_world import empty_run, evaluation, finished_run, lock, rate
from ruamel.yaml import YAML

from pipeline.files import hash_file
from pipeline.health.findings import Finding
from pipeline.report.__main__ import main
from pipeline.report.answers import representative
from pipeline.report.charts import PLOTS, curve_chart, marks_of
from pipeline.report.graph import drawing
from pipeline.report.page import _marked, render
from pipeline.report.recipe import Change, changes, nearest_recipe
from pipeline.report.run import StageFacts, read_run
from pipeline.tracking.destination import Destination
from pipeline.tracking.records import Records, RunRecord
from pipeline.tracking.store import Store
from pipeline.tracking.tracker import STORE_LOCK, start_run
from pipeline.verdict import mood, verdict

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
ATTACKS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</p></main></body><iframe src='https://example.org'>",
    "{{ 7 * 7 }} & <svg/onload=alert(1)>",
]


class Read(HTMLParser):
    """A page's elements, with their attributes, and its text."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(folder: Path) -> str:
    return render(read_run(folder), RECIPES, NOW)


@pytest.mark.parametrize(
    ("rates", "colour", "says"),
    [
        (
            {},
            "better",
            "The policy is better than the SFT model: the judge prefers its answer on 64% (54% to 73%) of the prompts; "
            "it is 13.4 nats per answer away, and the median length went from 33 to 21 tokens.",
        ),
        (
            {"judge_length_controlled": rate(0.55, 0.45, 0.65)},
            "better",
            "of the prompts, though at equal length no difference is shown; it is",
        ),
        (
            {"judge": rate(0.52, 0.42, 0.61), "reward": rate(0.55, 0.45, 0.65)},
            "even",
            "No difference from the SFT model is shown: the judge prefers the policy's answer on 52% (42% to 61%) of the prompts; it is",
        ),
        (
            {"judge": rate(0.3, 0.2, 0.4)},
            "worse",
            "The policy is worse than the SFT model: the judge prefers its answer on only 30% (20% to 40%) of the prompts, while the "
            "reward that it was trained on says 80% (70% to 90%), as where a reward model is exploited; it is",
        ),
        ({"judge": rate(0.6, 0.5, 0.7), "reward": rate(0.5, 0.4, 0.6)}, "even", "No difference"),
    ],
)
def test_the_verdict_is_the_judges_and_counts_outside_the_interval_only(
    rates: dict[str, dict[str, float]], colour: str, says: str
) -> None:
    metrics = evaluation(**rates)
    assert says in verdict(metrics, "policy")
    assert mood(metrics, "policy") == colour


def test_a_policy_that_has_not_moved_is_no_negative_distance_away() -> None:
    metrics = evaluation()
    metrics["sampled"]["policy"] |= {"kl_per_sequence_k1": -0.02, "length_median": 33.0}
    assert verdict(metrics, "policy").endswith(
        "; it is 0.0 nats per answer away, and the median length is still 33 tokens."
    )


def test_shown_answers_go_from_the_largest_loss_to_the_largest_gain_in_equal_steps() -> None:
    gains = [7, 0, 3, 9, 1, 8, 2, 6, 4, 5, 10]  # in no order
    rows = [
        {"prompt": str(gain), "base": "", "sft": "", "policy": ""}
        | {f"{role}_reward": 0.0 for role in ("base", "sft", "policy")}
        | {"base_judge": 0.0, "sft_judge": 5.0, "policy_judge": gain}
        for gain in gains
    ]
    assert [exchange.prompt for exchange in representative(rows, "policy", 3)] == ["0", "5", "10"]
    assert [exchange.gain for exchange in representative(rows[:2], "policy", 3)] == [-5.0, 2.0]


def test_a_stage_stands_below_what_it_needs_and_implied_arrows_are_left_out() -> None:
    inputs = {"prepare": (), "sft": ("prepare",), "reward": ("prepare", "sft"), "ppo": ("prepare", "sft", "reward")}
    drawn = drawing({name: StageFacts(name, needs) for name, needs in inputs.items()})
    rows = sorted(drawn.boxes, key=lambda box: box.y)
    assert [box.stage.name for box in rows] == ["prepare", "sft", "reward", "ppo"]
    assert {(source.stage.name, target.stage.name) for source, target in drawn.arrows} == {
        ("prepare", "sft"),
        ("sft", "reward"),
        ("reward", "ppo"),
    }


def test_code_in_a_finding_is_marked_and_the_rest_escaped() -> None:
    assert _marked("<b> `make plan` says") == "&lt;b&gt; <code>make plan</code> says"


def test_a_mark_after_the_last_step_stands_at_it() -> None:
    """A finding of a stage's result is made after its two steps, 0 and 1."""
    rows = [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}]
    plot = next(plot for plot in PLOTS if plot.stage == "sft")
    assert curve_chart(plot, rows, {2: "1"}).svg == curve_chart(plot, rows, {1: "1"}).svg


def test_marks_name_the_findings_of_their_step() -> None:
    found = [Finding(rule, step, "", "", "") for rule, step in (("a", 3), ("b", 3), ("c", 5))]
    assert marks_of(found, 4) == {3: "4,5", 5: "6"}
    chart = curve_chart(PLOTS[0], [{"step": step, "score_mean": 1.0} for step in range(7)], marks_of(found, 4))
    assert ">4,5</text>" in chart.svg and ">6</text>" in chart.svg
    assert curve_chart(PLOTS[0], [{"step": 0}], {}) is None


def test_the_recipe_with_the_fewest_differences_is_named_and_runtime_is_none() -> None:
    params = YAML(typ="safe", pure=True).load((ROOT / "recipes/demo.yaml").read_text(encoding="utf-8"))
    params["ppo"]["kl_coef"] = 0.5
    params["runtime"]["threads"] = 9
    assert nearest_recipe(RECIPES, params) == ("demo", [Change("ppo.kl_coef", 0.03, 0.5)])
    assert changes({"a": {"b": 1}}, {"a": {"c": 1}}) == [Change("a.b", 1, None), Change("a.c", None, 1)]


def test_a_whole_run_is_on_the_page(tmp_path: Path) -> None:
    page = page_of(finished_run(tmp_path))
    read = Read(page)
    assert "The policy is better than the SFT model" in read.text
    for title in (
        *(
            "Score of sampled answers",
            "KL to the SFT model",
            "Length of answers",
            "Entropy",
            "PPO's losses",
            "Clip fraction",
        ),
        *("Explained variance of returns", "SFT's loss", "Reward model's loss", "Judge's loss"),
        *("Reward against KL, development prompts", "Scores by the reward of training", "Scores by the judge"),
    ):
        assert title in read.text, title
    assert "length-collapse in ppo at step 5" in " ".join(read.text.split())
    assert page.count(">1</text>") >= 7, "the finding is marked on each of ppo's curves"
    assert all(f"question {number}" in read.text for number in range(4))
    assert "empty answer: 1" in read.text and "1 of 10" in read.text
    assert "As recipe demo has them" in " ".join(read.text.split())
    assert "MLflow has no run that made what lies here" in read.text


def test_what_a_model_says_is_text_and_nothing_else(tmp_path: Path) -> None:
    plain, attacked = (
        Read(page_of(finished_run(tmp_path / name, answers=said))) for name, said in (("a", None), ("b", ATTACKS))
    )
    assert attacked.tags == plain.tags
    assert [name for name, _ in attacked.attributes] == [name for name, _ in plain.attributes]
    assert all(attack in attacked.text for attack in ATTACKS)


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    page = page_of(finished_run(tmp_path))
    read = Read(page)
    assert not {"script", "img", "iframe", "object"} & set(read.tags)
    places = [value for name, value in read.attributes if name in ("src", "href", "xlink:href", "action")]
    assert places and all(place.startswith(("#", "data:")) for place in places)
    assert "url(http" not in page and "@import" not in page
    assert len(page) < 2e6
    assert "default-src 'none'" in page


def test_where_nothing_has_run_the_page_says_so(tmp_path: Path) -> None:
    text = " ".join(Read(page_of(empty_run(tmp_path))).text.split())
    assert "there is no verdict" in text
    assert "Not run yet: prepare, sft, reward, judge, ppo, evaluate. `make repro` runs them." in text
    assert "dpo" not in text and "There are no answers here." in text


def test_after_make_dpo_alone_the_page_is_about_dpo(tmp_path: Path) -> None:
    text = " ".join(Read(page_of(finished_run(tmp_path, "dpo"))).text.split())
    assert "DPO's policy is better than the SFT model" in text
    assert "Not run yet: ppo, evaluate." in text and "this page is about DPO's" in text
    assert "DPO's loss" in text and "Reward against KL" not in text


def test_answers_that_are_not_here_are_said_to_be_elsewhere(tmp_path: Path) -> None:
    (finished_run(tmp_path) / "artifacts/evaluation/sampled.tsv").unlink()
    assert "The answers are not on this machine" in page_of(tmp_path)


def test_parameters_that_have_changed_since_are_named(tmp_path: Path) -> None:
    lock(finished_run(tmp_path), ppo={"kl_coef": 0.1, "lr": 8.0e-4}, seed=17)
    assert read_run(tmp_path).stages["ppo"].changed == (Change("ppo.kl_coef", 0.1, 0.03),)
    text = " ".join(Read(page_of(tmp_path)).text.split())
    assert "params.yaml has changed since these ran: ppo." in text
    assert "ppo was run with ppo.kl_coef 0.1 (now 0.03)." in text
    assert "0123abc.dir" in text


def test_times_and_versions_are_those_of_the_run_that_made_the_bytes(tmp_path: Path) -> None:
    to = Destination(f"sqlite:///{tmp_path}/mlflow.db", "tests", tmp_path / "spools", 300)
    for seconds, content_hash in ((61.0, "aa"), (7.0, "bb")):
        tracker = start_run(to, "ppo", "key", "seed 1", {}, {}, {"hardware": "<b>two cores</b>"})
        tracker.set_tags({"output:metrics/ppo.json": content_hash})
        tracker.log_metrics(0, {"cost.seconds": seconds, "cost.peak_memory_gb": 3.5})
        tracker.end("FINISHED")
    records = Records(Store.connect(to.uri, to.folder / STORE_LOCK), "tests")
    found = records.find("metrics/ppo.json", "aa")
    assert (found.seconds, found.memory_gb) == (61.0, 3.5)
    assert records.find("metrics/ppo.json", "cc") is None
    run = read_run(finished_run(tmp_path), lambda path, _: records.find(path, "aa") if "ppo" in path else None)
    read = Read(render(run, RECIPES, NOW))
    assert "1 min 01 s" in read.text and "3.5 GB" in read.text and "<b>two cores</b>" in read.text
    assert "b" not in read.tags


def test_the_report_becomes_a_file_of_the_pipeline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, as `make report` may be called again; the pictures have colours of their own, being no part of a page."""
    monkeypatch.chdir(finished_run(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri, spools = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / ".work/tracking"
    tracker = start_run(Destination(uri, "solo-rlhf", spools, 300), "evaluate", "key", "seed 17", {}, {}, {})
    tracker.set_tags({"output:metrics/evaluate.json": hash_file(Path("metrics/evaluate.json"))})
    tracker.end("FINISHED")
    main()
    main()
    (kept,) = Path("mlruns/solo-rlhf").glob("*/artifacts/report")
    names = [
        "index.html",
        "reward_against_kl_development_prompts.svg",
        "scores_by_the_judge.svg",
        "scores_by_the_reward_of_training.svg",
    ]
    assert sorted(file.name for file in kept.iterdir()) == names
    assert (kept / "index.html").read_bytes() == Path("reports/index.html").read_bytes()
    assert not any("var(" in (kept / name).read_text() for name in names[1:])


def test_without_mlflow_there_is_a_report_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(finished_run(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # the port of discard: nobody is there
    main()
    assert "MLflow does not answer" in capsys.readouterr().out
    assert "The policy is better" in Path("reports/index.html").read_text(encoding="utf-8")


@pytest.mark.skipif(browser_path() is None, reason="there is no Chromium on this machine")
def test_a_browser_shows_it_without_a_word_of_complaint(tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="pip install --requirement requirements-browser.lock")
    file = finished_run(tmp_path, answers=ATTACKS) / "index.html"
    made = RunRecord("1", "2", NOW, 9.0, 3.5, {"git.commit": "0123abcd" * 5, "hardware": "two cores"})
    file.write_text(render(read_run(tmp_path, lambda *_: made), RECIPES, NOW), encoding="utf-8")
    papers = []
    for size, scheme in ((DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light")):
        with page_in(size, scheme) as (page, wrong):
            shown(page, file)
            assert page.evaluate("document.documentElement.scrollWidth") == size[0], "it is no wider than the screen"
            assert page.locator(".chart svg").count() == 13
            tallest = page.evaluate("Math.max(...[...document.querySelectorAll('tr')].map(row => row.offsetHeight))")
            assert tallest < 150, "hashes are not broken into single characters"
            papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert wrong == []
    assert papers[0] == papers[2] != papers[1]
