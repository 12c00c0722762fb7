"""`dvc repro` on the smoke recipe in a temporary clone: the whole chain, twice, and what bad input gets."""

import contextlib
import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from peft import PeftModel, get_peft_model_state_dict
from ruamel.yaml import YAML
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.base_model import locate
from pipeline.files import hash_path
from pipeline.tracking.view import COMPARISON

ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}
# The reward model as a stage loads it, over the whole part sft.
CENTRED = """
from pathlib import Path
from pipeline.data.examples import demonstrations
from pipeline.data.prepared import read_demonstrations
from pipeline.opening import open_base
from pipeline.scorers import open_reward_model
from pipeline.params.runtime import RuntimeParams
from pipeline.params.section import load_section
from pipeline.diagnosis.opening import untracked
stage = untracked("evaluate", 0, load_section("runtime", RuntimeParams))
rows, _ = demonstrations(read_demonstrations(Path("prepared/sft.jsonl")), stage.tokenizer)
print(float(open_reward_model(stage, open_base(stage), "{name}").score_all(rows, 512).mean()))
"""
STAGE_OUTPUTS = {
    "sft": ("artifacts/sft", "metrics/sft.json", "plots/sft.tsv"),
    "ppo": ("artifacts/policy", "artifacts/development", "metrics/ppo.json", "plots/ppo.tsv"),
}
ARTIFACTS = ("sft", "reward", "judge", "policy", "development", "evaluation")


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, env=ENVIRONMENT | environment, capture_output=True, text=True, check=False)


@contextlib.contextmanager
def edited(folder: Path, changes: dict[str, object]) -> Iterator[None]:
    """params.yaml with other values at dotted keys, for a while."""
    file = folder / "params.yaml"
    original = file.read_text(encoding="utf-8")
    yaml = YAML()
    content = yaml.load(original)
    for key, value in changes.items():
        *parents, last = key.split(".")
        section = content
        for parent in parents:
            section = section[parent]
        section[last] = value
    yaml.dump(content, file)
    try:
        yield
    finally:
        file.write_text(original, encoding="utf-8")


@contextlib.contextmanager
def moved_away(path: Path) -> Iterator[None]:
    """A folder that is not there for a while."""
    away = path.with_name(f"{path.name}_away")
    path.rename(away)
    try:
        yield
    finally:
        away.rename(path)


def clone_to(folder: Path) -> Path:
    """The working tree as it is, as a repository of its own on the smoke recipe."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file() and not name.endswith("dvc.lock") and not name.startswith(("metrics/", "plots/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    shutil.copy2(ROOT / "recipes" / "smoke.yaml", folder / "params.yaml")
    for words in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "start"],
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A clone in which the chain has run once, and what it printed."""
    folder = clone_to(tmp_path_factory.mktemp("clone"))
    done = run(folder, "dvc", "repro")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def newest_run(folder: Path) -> Run:
    """The stage's run that was started last; a parent may have been made in the same millisecond."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("solo-rlhf").experiment_id
    return client.search_runs([experiment], "tags.`tracking.run` != ''", order_by=["attributes.start_time DESC"])[0]


def output_hashes(folder: Path) -> dict[str, str]:
    """path -> hash of every output, as dvc.lock has them."""
    lock = YAML(typ="safe").load(folder / "dvc.lock")
    return {out["path"]: out["md5"] for stage in lock["stages"].values() for out in stage["outs"]}


def test_every_stage_leaves_what_it_should(finished: tuple[Path, str]) -> None:
    folder, printed = finished
    for name in ARTIFACTS:
        assert (folder / "artifacts" / name).is_dir()
    metrics = json.loads((folder / "metrics/evaluate.json").read_text())
    assert metrics["sampled"]["sft"]["kl_per_sequence_k1"] == 0
    for mode in ("sampled", "greedy"):
        for rate in ("win_rate_reward", "win_rate_judge", "win_rate_judge_length_controlled"):
            found = metrics[mode]["policy"][rate]
            assert 0 <= found["low"] <= found["mean"] <= found["high"] <= 1
    watched = (folder / "plots/overoptimisation.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in watched] == ["step", "0", "2", "3"]
    prepared = json.loads((folder / "metrics/prepare.json").read_text())
    assert prepared["prompts_in_two_parts"] == 0
    assert sum(prepared["prompts"].values()) == 120
    curve = (folder / "plots/ppo.tsv").read_text().splitlines()
    assert len(curve) == 4
    first = dict(zip(curve[0].split("\t"), curve[1].split("\t"), strict=True))
    assert float(first["kl_per_sequence_k1"]) == 0 and float(first["first_log_ratio_max"]) == 0
    assert "score" in printed and "KL" in printed and "loss" in printed


def names_this_machine(folder: Path) -> list[Path]:
    """Outputs that hold the path of the clone."""
    found = []
    for tree in ("artifacts", "metrics", "plots", "prepared"):
        for file in (folder / tree).rglob("*"):
            if file.is_file() and str(folder).encode() in file.read_bytes():
                found.append(file)
    return found


def stages_run(printed: str) -> list[str]:
    """The stages that dvc ran, or would run, in order."""
    return [line.split("'")[1] for line in printed.splitlines() if line.startswith("Running stage")]


def test_nothing_is_left_that_names_this_machine(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    assert names_this_machine(folder) == []


def test_mlflow_has_the_parent_its_children_and_their_lineage(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = {
        run.info.run_name: run for run in client.search_runs([client.get_experiment_by_name("solo-rlhf").experiment_id])
    }
    assert set(runs) == {"seed 17", "prepare", "sft", "reward", "judge", "ppo", "evaluate"}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    parent = runs.pop("seed 17")
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id}
    tags = runs["ppo"].data.tags
    assert tags["upstream:artifacts/sft"] == runs["sft"].info.run_id
    assert tags["upstream:artifacts/reward"] == runs["reward"].info.run_id
    assert tags["input:artifacts/sft"] == runs["sft"].data.tags["output:artifacts/sft"]
    assert len(client.get_metric_history(runs["ppo"].info.run_id, "score_mean")) == 3
    assert runs["ppo"].data.params["ppo.kl_coef"] == "0.02"
    assert "evaluate.sampled.policy.win_rate_judge.mean" in parent.data.metrics
    samples = folder / "mlruns/solo-rlhf" / runs["ppo"].info.run_id / "artifacts/samples"
    assert sorted(file.name for file in samples.iterdir()) == ["step_0000.json", "step_0002.json"]


def test_mlflow_has_what_runs_are_compared_by_and_the_policy_as_a_model_version(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("solo-rlhf").experiment_id
    (parent,) = client.search_runs([experiment], "attributes.run_name = 'seed 17'")
    metrics = json.loads((folder / "metrics/evaluate.json").read_text())
    found = parent.data.metrics
    assert found["summary.kl"] == pytest.approx(metrics["sampled"]["policy"]["kl_per_sequence_k1"])
    assert found["summary.win_rate_judge"] == pytest.approx(metrics["sampled"]["policy"]["win_rate_judge"]["mean"])
    stages = ("prepare", "sft", "reward", "judge", "ppo", "evaluate")
    assert found["cost.seconds"] == pytest.approx(sum(found[f"cost.seconds.{stage}"] for stage in stages))
    assert found["cost.peak_memory_gb"] == max(found[f"cost.peak_memory_gb.{stage}"] for stage in stages)
    assert parent.data.tags["verdict.policy"] in ("better", "even", "worse")
    name, view = COMPARISON  # the columns of the table that docs/compare.md names are there
    assert client.get_experiment(experiment).tags[name] == view
    known = [f"metrics.`{metric}`" for metric in found] + [f"tags.`{tag}`" for tag in parent.data.tags]
    assert set(json.loads(view)["selectedColumns"]) <= set(known)
    rows = client.search_runs([experiment], json.loads(view)["searchFilter"])
    assert [row.info.run_id for row in rows] == [parent.info.run_id]
    assert parent.data.tags["mlflow.note.content"].endswith(" tokens.")
    (version,) = client.search_model_versions("name = 'solo-rlhf-policy'")
    assert str(client.get_registered_model("solo-rlhf-policy").aliases["candidate"]) == str(version.version)
    assert version.tags["policy.hash"] == hash_path(folder / "artifacts/policy")
    weights = folder / f"mlruns/solo-rlhf/{version.run_id}/artifacts/policy/adapter_model.safetensors"
    assert weights.read_bytes() == (folder / "artifacts/policy/adapter_model.safetensors").read_bytes()


def test_experiments_stand_side_by_side(finished: tuple[Path, str]) -> None:
    """docs/compare.md: run beside the present result, listed, drawn over it, queued; the workspace stays as it is."""
    folder, _ = finished
    before = output_hashes(folder)
    run(folder, "git", "add", "-A")
    run(folder, "git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "the present result")
    done = run(folder, "dvc", "exp", "run", "--temp", "-n", "dear", "-S", "ppo.kl_coef=0.5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert stages_run(done.stdout) == ["ppo", "evaluate"]
    table = csv.DictReader(run(folder, "dvc", "exp", "show", "--csv").stdout.splitlines())
    (dear,) = (row for row in table if row["Experiment"] == "dear")
    assert float(dear["ppo.kl_coef"]) == 0.5
    assert any(key.endswith("sampled.policy.kl_per_sequence_k1") and value for key, value in dear.items())
    drawn = run(folder, "dvc", "plots", "diff", "HEAD", "dear", "--out", "drawn")
    assert drawn.returncode == 0, drawn.stderr
    page = (folder / "drawn/index.html").read_text(encoding="utf-8")
    assert "PPO, KL to the SFT model" in page and "dear" in page
    queued = run(folder, "dvc", "exp", "run", "--queue", "-S", "seed=18,19")
    assert queued.returncode == 0, queued.stderr
    assert run(folder, "dvc", "queue", "status").stdout.count("Queued") == 2
    run(folder, "dvc", "queue", "remove", "--queued")
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("solo-rlhf").experiment_id
    (parent,) = client.search_runs([experiment], "attributes.run_name = 'dear'")
    assert "summary.kl" in parent.data.metrics and parent.data.params["ppo.kl_coef"] == "0.5"
    trained = {run.data.tags.get("output:artifacts/policy") for run in client.search_runs([experiment])} - {None}
    versions = client.search_model_versions("name = 'solo-rlhf-policy'")
    assert {version.tags["policy.hash"] for version in versions} == trained, "equal bytes are one version"
    assert output_hashes(folder) == before


@pytest.mark.parametrize("name", ["sft", "reward", "judge", "policy"])
def test_peft_loads_what_the_stages_saved(finished: tuple[Path, str], name: str) -> None:
    folder, _ = finished
    base = AutoModelForCausalLM.from_pretrained(locate("tiny"))
    model = PeftModel.from_pretrained(base, folder / "artifacts" / name)
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    saved = load_file(folder / "artifacts" / name / "adapter_model.safetensors")
    assert loaded.keys() == saved.keys() and len(saved) == 28
    assert all(torch.equal(loaded[key], saved[key]) and saved[key].dtype == torch.float32 for key in saved)


def test_the_table_is_printed(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    table = run(folder, sys.executable, "-m", "pipeline.summary")
    assert table.returncode == 0
    for word in ("base", "SFT", "policy", "wins by", "at equal", "bag of", "lead over", "make ui"):
        assert word in table.stdout


def test_a_second_repro_does_nothing(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    again = run(folder, "dvc", "repro")
    assert again.returncode == 0
    assert "Running stage" not in again.stdout
    assert "up to date" in again.stdout


def test_runtime_parameters_rerun_nothing(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    with edited(folder, {"runtime.log_every": 7, "runtime.microbatch_tokens": 256}):
        assert "up to date" in run(folder, "dvc", "repro", "--dry").stdout


def test_a_ppo_parameter_reruns_ppo_and_nothing_before_it(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    with edited(folder, {"ppo.kl_coef": 0.05}):
        planned = run(folder, "dvc", "repro", "--dry").stdout
    # evaluate follows only if the policy comes out differently, which a dry run cannot know
    assert stages_run(planned) == ["ppo"]


def test_forced_again_everything_has_the_same_hash(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    before = output_hashes(folder)
    forced = run(folder, "dvc", "repro", "--force")
    assert forced.returncode == 0, forced.stdout + forced.stderr
    assert forced.stdout.count("Running stage") == 6
    assert output_hashes(folder) == before
    assert len(before) == 27


def test_dpo_runs_when_asked_and_stands_beside_ppo(finished: tuple[Path, str]) -> None:
    """The second DVC file: it takes prepare, sft, reward and judge as they are, and changes nothing of the first."""
    folder, printed = finished
    assert stages_run(printed) == ["prepare", "sft", "reward", "judge", "ppo", "evaluate"]
    lock = (folder / "dvc.lock").read_bytes()
    done = run(folder, "dvc", "repro", "alternatives/dvc.yaml:evaluate_dpo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert stages_run(done.stdout) == ["alternatives/dvc.yaml:dpo", "alternatives/dvc.yaml:evaluate_dpo"]
    assert (folder / "dvc.lock").read_bytes() == lock
    assert "up to date" in run(folder, "dvc", "status", "dvc.yaml", "alternatives/dvc.yaml:evaluate_dpo").stdout
    ppo, dpo = (json.loads((folder / f"metrics/{name}.json").read_text()) for name in ("evaluate", "evaluate_dpo"))
    for mode in ("sampled", "greedy"):
        assert list(dpo[mode]) == ["base", "dpo", "sft"]
        assert all(dpo[mode][role] == ppo[mode][role] for role in ("base", "sft"))
    header, first = (line.split("\t") for line in (folder / "plots/dpo.tsv").read_text().splitlines()[:2])
    curve = dict(zip(header, first, strict=True))
    assert float(curve["reward_chosen"]) == float(curve["reward_rejected"]) == float(curve["margin"]) == 0
    assert names_this_machine(folder) == []
    table = run(folder, sys.executable, "-m", "pipeline.summary", "dpo").stdout
    assert "  policy  " in table and "  DPO  " in table
    with edited(folder, {"dpo.epochs": 2}):
        assert stages_run(run(folder, "dvc", "repro", "--dry").stdout) == []
        planned = run(folder, "dvc", "repro", "--dry", "alternatives/dvc.yaml:evaluate_dpo").stdout
    assert stages_run(planned) == ["alternatives/dvc.yaml:dpo"]


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_a_killed_stage_goes_on_to_the_same_bytes_in_the_same_run(finished: tuple[Path, str], stage: str) -> None:
    """Reports iterative/dvc#1214 and mlflow/mlflow#4248: kill -9, again, and the log says where it goes on; one row per step."""
    folder, _ = finished
    outputs = [folder / out for out in STAGE_OUTPUTS[stage]]
    before = [hash_path(path) for path in outputs]
    killed = subprocess.Popen([sys.executable, "-m", f"stages.{stage}"], cwd=folder, env=ENVIRONMENT)
    while not list((folder / ".work" / stage).glob("*/step-*[0-9]")):
        assert killed.poll() is None, "it ended before its first checkpoint"
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    again = run(folder, sys.executable, "-m", f"stages.{stage}")
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"{stage}: goes on after " in again.stdout
    assert [hash_path(path) for path in outputs] == before
    assert sorted(path.name for path in (folder / ".work" / stage).iterdir()) == ["lock", "pid"]
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    newest = newest_run(folder)
    assert (newest.info.run_name, newest.info.status) == (stage, "FINISHED")
    steps = sorted(metric.step for metric in client.get_metric_history(newest.info.run_id, "loss"))
    assert steps == list(range(len((folder / f"plots/{stage}.tsv").read_text().splitlines()) - 1))


NAN_REWARD = "def broken(prompts, responses):\n    return [float('nan')] * len(prompts)\n"
BAD_PAIR = '{"prompt": "What is tea?", "chosen": NaN, "rejected": "No."}\n'


@contextlib.contextmanager
def rewritten(file: Path, text: str) -> Iterator[None]:
    """Another text in a file for a while; without one before, no file after."""
    before = file.read_bytes() if file.exists() else None
    file.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        file.unlink() if before is None else file.write_bytes(before)


def test_killed_between_a_stages_end_and_dvcs_note_of_it_nothing_is_trained_again(finished: tuple[Path, str]) -> None:
    """DVC has no note of sft, as on a first run; the stage ends; DVC is gone. The next run has nothing left to train."""
    folder, _ = finished
    outputs = [folder / out for out in STAGE_OUTPUTS["sft"]]
    before = [hash_path(path) for path in outputs]
    noted = YAML(typ="safe").load(folder / "dvc.lock")
    del noted["stages"]["sft"]
    with rewritten(folder / "dvc.lock", json.dumps(noted)):
        for goes_on in (False, True):
            done = run(folder, sys.executable, "-m", "stages.sft", DVC_STAGE="sft", DVC_ROOT=str(folder))
            assert done.returncode == 0, done.stdout + done.stderr
            assert ("sft: goes on after step " in done.stdout) == goes_on
            assert [hash_path(path) for path in outputs] == before
            assert list((folder / ".work/sft").glob("*/step-*"))
    done = run(folder, sys.executable, "-m", "stages.prepare")  # any stage; DVC has its note again
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list((folder / ".work/sft").glob("*/step-*"))


@pytest.mark.parametrize("where", ["data", "gradient", "score"])
def test_nan_wherever_it_is_planted_fails_cleanly_and_leaves_the_artifacts(
    finished: tuple[Path, str], where: str
) -> None:
    """One sentence, no traceback, FAILED in MLflow with finite figures alone, and every artifact as it was."""
    folder, _ = finished
    # prepared/rejects.jsonl is written anew: it lists the rows at fault
    artifacts = [
        folder / name for name in ("prepared/sft.jsonl", "prepared/ppo.jsonl", "artifacts", "metrics", "plots")
    ]
    before = [hash_path(path) for path in artifacts]
    with contextlib.ExitStack() as planted:
        if where == "data":
            stage, said = (
                "prepare",
                "chosen is null, not text or messages prepare: data.pairs 'nan.jsonl' has no row that can be used",
            )
            planted.enter_context(rewritten(folder / "nan.jsonl", BAD_PAIR))
            planted.enter_context(edited(folder, {"data.pairs": "nan.jsonl"}))
        elif where == "gradient":
            stage, said = "sft", "not finite 3 steps in a row"
            source = (folder / "stages/sft.py").read_text()
            hook = '    model.backbone.adapter_parameters("sft")[0].register_hook(lambda gradient: gradient * float("nan"))\n'
            head = "    stage.tell_trained"
            assert source.count(head) == 1
            planted.enter_context(rewritten(folder / "stages/sft.py", source.replace(head, hook + head)))
        else:
            stage, said = "ppo", "rewards.broken:broken returned nan (float) for row 0"
            planted.enter_context(rewritten(folder / "rewards/broken.py", NAN_REWARD))
            planted.enter_context(
                edited(
                    folder, {"ppo.reward": [{"term": "function", "weight": 1.0, "function": "rewards.broken:broken"}]}
                )
            )
        done = run(folder, sys.executable, "-m", f"stages.{stage}")
    assert done.returncode == 1
    assert said in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout + done.stderr
    assert [hash_path(path) for path in artifacts] == before
    newest = newest_run(folder)
    assert (newest.info.run_name, newest.info.status) == (stage, "FAILED")
    assert all(math.isfinite(value) for value in newest.data.metrics.values())


# As if a quarter GiB of what the process has already were wanted by others.
SHORT_OF_MEMORY = """
import runpy, psutil
real = psutil.virtual_memory
psutil.virtual_memory = lambda: real()._replace(available=-2**28)
runpy.run_module("stages.sft", run_name="__main__")
"""


def test_a_stage_that_cannot_fit_does_not_start(finished: tuple[Path, str]) -> None:
    """One sentence before a weight is loaded, FAILED in MLflow, artifacts as they were."""
    folder, _ = finished
    artifacts = [folder / name for name in ("artifacts", "metrics", "plots")]
    before = [hash_path(path) for path in artifacts]
    refused = run(folder, sys.executable, "-c", SHORT_OF_MEMORY)
    assert refused.returncode == 1 and "Traceback" not in refused.stdout + refused.stderr
    complaint = refused.stdout.splitlines()[-1]
    assert (
        complaint.startswith("sft: it does not fit into memory: it takes about ") and "base, nf4" not in refused.stdout
    )
    assert [hash_path(path) for path in artifacts] == before
    newest = newest_run(folder)
    assert (newest.info.run_name, newest.info.status) == ("sft", "FAILED")


def test_planning_memory_changes_no_result(finished: tuple[Path, str]) -> None:
    """Its adapters are drawn too, and those that are trained must not be others for that."""
    folder, _ = finished
    before = hash_path(folder / "artifacts/sft")
    with edited(folder, {"runtime.check_memory": False}):
        done = run(folder, sys.executable, "-m", "stages.sft")
    assert done.returncode == 0 and "memory plan" not in done.stdout
    assert hash_path(folder / "artifacts/sft") == before


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        ("prepare", {"ppo.clip": 3.0}, "ppo.clip is 3.0 but must be less than 1"),
        ("prepare", {"ppo.cliip": 0.2}, "ppo.cliip is not a parameter; did you mean ppo.clip?"),
        ("prepare", {"base.model": "/no/model"}, "base.model is '/no/model' but that folder does not exist"),
        ("prepare", {"data.pairs": "data/nothing.jsonl"}, "data.pairs is 'data/nothing.jsonl' but there is no such file"),
        ("prepare", {"ppo.rollout_size": 64, "ppo.minibatch_size": 16}, "ppo.rollout_size is 64 but the part ppo has 18 prompts, fewer than one batch"),
        ("prepare", {"judge.cut_pairs": "drop", "tokens.max_response": 4, "data.max_bad_share": 1.0}, "in the part judge none is left for judge"),
        ("ppo", {"ppo.rollout_size": 64, "ppo.minibatch_size": 16}, "ppo.rollout_size is 64 but the part ppo has 18 prompts, fewer than one batch"),
        ("sft", {"base.model": "embedded"}, "has changed since `prepare` ran"),
        ("reward", {"reward.cut_pairs": "drop", "tokens.max_response": 2}, "none is left"),
    ],
    ids=["range", "unknown", "no base", "no data", "few prompts ahead", "no pairs ahead", "few prompts", "other base", "no pairs"],
)  # fmt: skip
def test_bad_input_gets_one_line(finished: tuple[Path, str], stage: str, changes: dict, message: str) -> None:
    folder, _ = finished
    with edited(folder, changes):
        failed = run(
            folder, sys.executable, "-m", f"stages.{stage}", MLFLOW_TRACKING_URI="sqlite:////proc/nothing/mlflow.db"
        )
    assert failed.returncode == 1
    assert "Traceback" not in failed.stdout + failed.stderr
    *begun, complaint = [line for line in failed.stdout.splitlines() if line.startswith(f"{stage}:")]
    assert message in complaint
    assert not any(message in line for line in begun)


VERIFIED = [
    {"term": "function", "weight": 1.0, "function": "rewards.arithmetic:number_alone"},
    {"term": "length_penalty", "weight": 0.1, "target": 4},
]


def test_ppo_climbs_a_users_function_without_a_reward_model(finished: tuple[Path, str]) -> None:
    """Its adapter is not even there; the curves, the watched answers and the samples have the values of the function."""
    folder, _ = finished
    with edited(folder, {"ppo.reward": VERIFIED, "ppo.normalize_scores": True}):
        with moved_away(folder / "artifacts/reward"):
            done = run(folder, sys.executable, "-m", "stages.ppo")
        assert done.returncode == 0, done.stdout + done.stderr
        newest = newest_run(folder)
        evaluated = run(folder, sys.executable, "-m", "stages.evaluate")
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    rows = [line.split("\t") for line in (folder / "plots/ppo.tsv").read_text().splitlines()]
    for row in (dict(zip(rows[0], map(float, cells), strict=True)) for cells in rows[1:]):
        alone, penalty = row["reward_terms/number_alone"], row["reward_terms/length_penalty"]
        assert 0 <= alone <= 1 and penalty < 0
        assert row["score_mean"] == pytest.approx(alone + 0.1 * penalty, abs=1e-5)
        assert not any("seconds" in name for name in row)  # a time would make equal runs differ
    watched = [json.loads(line) for line in (folder / "artifacts/development/answers.jsonl").read_text().splitlines()]
    for answer in watched:
        alone = re.fullmatch(r"-?\d+", answer["answer"].strip()) is not None
        cut = len(answer["response_ids"]) > 24  # tokens.max_response; an end token was put after
        penalty = max(0, len(answer["response_ids"]) - cut - 4)
        assert answer["reward"] == pytest.approx(alone - 0.1 * penalty, abs=1e-5)
    for role, found in json.loads((folder / "metrics/evaluate.json").read_text())["greedy"].items():
        paid = found["reward_terms/number_alone"] + 0.1 * found["reward_terms/length_penalty"]
        assert found["reward_mean"] == pytest.approx(paid, abs=1e-5), role
    assert "reward_seconds/number_alone" in newest.data.metrics
    assert "development_reward_terms/length_penalty" in newest.data.metrics


def test_a_changed_function_reruns_ppo(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    file = folder / "rewards" / "arithmetic.py"
    original = file.read_text()
    file.write_text(original + "# changed\n")
    planned = run(folder, "dvc", "status")
    file.write_text(original)
    changed = re.findall(r"^(\w+):$", planned.stdout, re.M)
    assert {"ppo", "evaluate"} <= set(changed) and not {"prepare", "sft", "reward", "judge"} & set(changed)


@pytest.mark.parametrize("name", ["reward", "judge"])
def test_the_answers_that_sft_was_trained_on_score_0_on_average(finished: tuple[Path, str], name: str) -> None:
    folder, _ = finished
    program = CENTRED.format(name=name)
    found = run(folder, sys.executable, "-c", program)
    assert abs(float(found.stdout.split()[-1])) < 1e-4, found.stdout + found.stderr
    assert load_file(folder / "artifacts" / name / "head.safetensors")["linear.bias"].abs() > 0


def test_missing_data_is_said_before_dvc_starts(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    with edited(folder, {"data.pairs": "data/nothing.jsonl"}):
        failed = run(folder, sys.executable, "-m", "pipeline.preflight")
    assert failed.returncode == 1
    assert (
        failed.stdout
        == "data.pairs is 'data/nothing.jsonl' but there is no such file or folder; relative paths start at the project's root.\n"
    )
    assert run(folder, sys.executable, "-m", "pipeline.preflight").returncode == 0


def test_a_failed_stage_is_failed_in_mlflow(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    with edited(folder, {"ppo.rollout_size": 64}):
        assert run(folder, sys.executable, "-m", "stages.ppo").returncode == 1
    newest = newest_run(folder)
    assert (newest.info.run_name, newest.info.status) == ("ppo", "FAILED")


def test_what_a_run_has_learnt_goes_out_and_comes_in_again(finished: tuple[Path, str]) -> None:
    """`make export`, `make chat`, and the exports as `sft.from`, `reward.from` (a model with a tokenizer, asked in text) and
    `judge.from` (an adapter with a head). The last test: it leaves the chain as it then is."""
    folder, _ = finished
    assert run(folder, "dvc", "repro").returncode == 0
    done = run(folder, sys.executable, "-m", "pipeline.export")
    assert done.returncode == 0, done.stdout
    assert "20 of 20 greedy answers are the same token by token" in done.stdout  # float32
    exported = sorted(path.name for path in (folder / "exports").iterdir())
    assert exported == ["policy", "policy-adapter", "reward"]
    words = [sys.executable, "-m", "pipeline.chat"]
    chat = subprocess.run(
        words,
        input="hi\n/greedy\nwhy?\n/quit\n",
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert chat.returncode == 0 and chat.stdout.count("policy: ") == 2, chat.stdout + chat.stderr
    for name, source in (("sft", "exports/policy-adapter"), ("reward", "exports/reward"), ("judge", "artifacts/judge")):
        shutil.copytree(folder / source, folder / "own" / name)
    with edited(folder, {f"{name}.from": f"own/{name}" for name in ("sft", "reward", "judge")}):
        done = run(folder, "dvc", "repro")
        assert done.returncode == 0, done.stdout + done.stderr
        done = run(folder, sys.executable, "-m", "pipeline.export")  # a reward model that was brought is not taken away
        assert done.returncode == 0 and "reward" not in done.stdout, done.stdout
    weights = [load_file(folder / place / "adapter_model.safetensors") for place in ("artifacts/sft", "own/sft")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])
    assert [file.name for file in (folder / "artifacts/reward").iterdir()] == ["classifier.json"]
    assert json.loads((folder / "metrics/reward.json").read_text())["steps"] == 0
