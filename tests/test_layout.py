"""The layout that the design fixes: layers, sizes of stages, and dvc.yaml's lists against the imports."""

from pathlib import Path, PurePosixPath

import pytest
from imports import EXEMPT, ROOT, code_deps, direct_imports, dvc_stages
from ruamel.yaml import YAML

from pipeline.lineage import DVC_FILES, stage_address
from pipeline.params.check import SECTIONS

# From the top down; a module may import its own layer and those below it.
LAYERS = [
    ["stages"],
    ["pipeline.diagnose", "pipeline.doctor", "pipeline.export.__main__", "pipeline.chat"],
    ["pipeline.diagnosis"],
    ["pipeline.report"],
    [
        "pipeline.loop",
        "pipeline.online",
        "pipeline.offline",
        "pipeline.comparison",
        "pipeline.pair_figures",
        "pipeline.development",
        "pipeline.held_out",
        "pipeline.candidate",
        "pipeline.stage",
        "pipeline.stage_run",
        "pipeline.launch",
        "pipeline.recovery",
        "pipeline.opening",
        "pipeline.scorers",
        "pipeline.summary",
        "pipeline.preflight",
        "pipeline.plan",
        "pipeline.pin",
        "pipeline.check_data",
        "pipeline.sync_tracking",
        "pipeline.warmup",
        "pipeline.warmup_summary",
        "pipeline.export",
    ],
    [
        "pipeline.planning",
        "pipeline.rollout",
        "pipeline.evaluation",
        "pipeline.update",
        "pipeline.algorithms",
        "pipeline.kl_control",
        "pipeline.place",
        "pipeline.samples",
        "pipeline.rewards",
        "pipeline.cartpole",
    ],
    [
        "pipeline.objectives",
        "pipeline.advantages",
        "pipeline.roles",
        "pipeline.classifier",
        "pipeline.imported",
        "pipeline.preferences",
        "pipeline.backbone",
        "pipeline.base_checks",
        "pipeline.loading",
        "pipeline.heads",
        "pipeline.weights",
        "pipeline.checkpoint",
        "pipeline.lora",
        "pipeline.side_by_side",
        "pipeline.sharding",
        "pipeline.attention",
        "pipeline.blocks",
        "pipeline.quantization",
        "pipeline.sampling_linears",
        "pipeline.lean_decoder",
        "pipeline.cuda_graphs",
        "pipeline.sampler",
        "pipeline.base_model",
        "pipeline.tiny",
        "pipeline.data",
        "pipeline.baselines",
        "pipeline.penalties",
        "pipeline.reward_function",
        "pipeline.statistics",
        "pipeline.lineage",
        "pipeline.verdict",
        "pipeline.tracking",
        "pipeline.health",
    ],
    [
        "pipeline.tensors",
        "pipeline.batch",
        "pipeline.moments",
        "pipeline.randomness",
        "pipeline.params",
        "pipeline.files",
        "pipeline.masking",
        "pipeline.progress",
        "pipeline.banner",
        "pipeline.lock",
        "pipeline.finished",
        "pipeline.interruption",
        "pipeline.out_of_memory",
        "pipeline.processes",
        "pipeline.ranks",
    ],
    ["pipeline.errors", "pipeline.__init__"],
]
DATA = ("${data.pairs}", "${data.demonstrations}", "${data.prompts}")
FUNCTIONS = "rewards"  # the users' own
MODULES = sorted(path.relative_to(ROOT) for folder in ("pipeline", "stages") for path in (ROOT / folder).rglob("*.py"))
DVC = {file: YAML(typ="safe").load((ROOT / file).read_text(encoding="utf-8")) for file in DVC_FILES}
STAGES = dvc_stages()


def layer(file: Path) -> int:
    """The number of a module's layer, 0 at the top."""
    module = ".".join(file.with_suffix("").parts)
    for number, names in enumerate(LAYERS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    raise AssertionError(f"{file} is in no layer; give it one in {Path(__file__).name}")


@pytest.mark.parametrize("file", MODULES, ids=str)
def test_imports_go_downward_only(file: Path) -> None:
    for imported in direct_imports(file):
        assert layer(imported) >= layer(file), f"{file} imports {imported}, which is above it"


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {file: direct_imports(file) for file in MODULES}
    finished: set[Path] = set()

    def visit(file: Path, trail: tuple[Path, ...]) -> None:
        assert file not in trail, " -> ".join(map(str, (*trail, file)))
        if file not in finished:
            for imported in graph[file]:
                visit(imported, (*trail, file))
            finished.add(file)

    for file in MODULES:
        visit(file, ())


@pytest.mark.parametrize("file", [file for file in MODULES if file.parts[0] == "stages"], ids=str)
def test_stages_are_short(file: Path) -> None:
    assert len((ROOT / file).read_text(encoding="utf-8").splitlines()) < 100


def modules_with(*texts: str) -> list[Path]:
    """The modules whose source holds any of the texts."""
    return [file for file in MODULES if any(text in (ROOT / file).read_text(encoding="utf-8") for text in texts)]


def test_mlflow_is_imported_in_one_place() -> None:
    assert modules_with("import mlflow", "from mlflow") == [Path("pipeline/tracking/store.py")]


def test_the_optimizer_steps_in_one_place() -> None:
    assert modules_with("_adam.step()", "optimizer.step()") == [Path("pipeline/update.py")]


@pytest.mark.parametrize("stage", STAGES)
def test_deps_are_the_imports(stage: str) -> None:
    listed = sorted(dep for dep in STAGES[stage]["deps"] if dep.endswith(".py"))
    assert listed == code_deps(stage), f"put the output of `python -m tests.imports {stage}` into dvc.yaml"


def test_the_default_chain_needs_nothing_of_the_alternatives() -> None:
    """`dvc repro` in the root runs dvc.yaml alone, and what that needs."""
    default, alternatives = (content["stages"] for content in DVC.values())
    assert list(default) == ["prepare", "sft", "reward", "judge", "ppo", "evaluate"]
    made = {path for name in alternatives for path in outputs(name)}
    assert not any(made & set(stage["deps"]) for stage in default.values())


def test_stages_of_the_second_file_run_in_the_root_and_have_their_address() -> None:
    assert {stage["wdir"] for stage in DVC[DVC_FILES[1]]["stages"].values()} == {".."}
    assert [stage_address(name) for name in ("ppo", "dpo")] == ["ppo", "alternatives/dvc.yaml:dpo"]


def test_editing_ppo_does_not_rerun_sft() -> None:
    for file in (
        "pipeline/online.py",
        "pipeline/algorithms.py",
        "pipeline/params/ppo.py",
        "pipeline/objectives/online.py",
    ):
        assert file in STAGES["ppo"]["deps"]
        assert file not in STAGES["sft"]["deps"] + STAGES["reward"]["deps"]


def test_exempt_modules_exist() -> None:
    assert all((ROOT / file).is_file() for file in EXEMPT)


def outputs(stage: str) -> list[str]:
    """All paths that a stage writes."""
    entries = [entry for kind in ("outs", "metrics", "plots") for entry in STAGES[stage].get(kind, [])]
    return [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]


def test_no_output_lies_in_another() -> None:
    """Report iterative/dvc#8974: a metrics file inside a tracked folder breaks repro and experiments."""
    paths = [PurePosixPath(path) for stage in STAGES for path in outputs(stage)]
    assert len(paths) == len(set(paths))
    for path in paths:
        assert not set(path.parents) & set(paths), f"{path} lies in another output"


def test_metrics_stay_in_git() -> None:
    for stage in STAGES.values():
        assert all(settings == {"cache": False} for entry in stage["metrics"] for settings in entry.values())


def test_every_input_is_made_by_a_stage_or_is_the_data() -> None:
    made = {path for stage in STAGES for path in outputs(stage)}
    for stage in STAGES.values():
        for dep in stage["deps"]:
            assert dep.endswith(".py") or dep in made or dep in (*DATA, FUNCTIONS)


def test_a_users_function_that_changes_reruns_what_it_scores() -> None:
    assert [name for name, stage in STAGES.items() if FUNCTIONS in stage["deps"]] == ["ppo", "evaluate", "evaluate_dpo"]


def test_ppo_never_sees_the_judge() -> None:
    readers = [name for name, stage in STAGES.items() if "artifacts/judge" in stage["deps"]]
    assert readers == ["evaluate", "evaluate_dpo"]
    assert "prepared/judge.jsonl" not in STAGES["ppo"]["deps"] + STAGES["reward"]["deps"] + STAGES["sft"]["deps"]


def test_stages_track_their_own_section_and_never_runtime() -> None:
    for name, stage in STAGES.items():
        sections = {key.partition(".")[0] for key in stage["params"]}
        assert sections <= {*SECTIONS, "seed"} - {"runtime"}
        assert {"prepare": "data", "evaluate_dpo": "evaluate"}.get(name, name) in sections


def test_plots_name_their_axes() -> None:
    for plot in (plot for content in DVC.values() for plot in content["plots"]):
        for settings in plot.values():
            assert settings["x_label"] and settings["y_label"] and set(settings["y"])
