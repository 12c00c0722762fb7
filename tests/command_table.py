"""How each command of the documentation is covered: run by tests/test_commands.py, run by another test, or not to be run by a test.

A session is run from top to bottom in one clone on the smoke recipe, whose chain has run and is committed.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """A command that is run.

    command: as the documentation has it.
    says: what it prints, in part.
    variant: what is run instead: a placeholder or a place of another machine has a value; None: the command itself.
    before: what the documentation takes for granted.
    needs: a program that is not in the environment; without it the session is skipped.
    """

    command: str
    says: str = ""
    variant: str | None = None
    before: str = "true"
    needs: str = ""

    @property
    def line(self) -> str:
        return self.variant or self.command


SOUND = "python -c 'from pipeline.params.check import check_params; check_params()'"


def experiment(change: str, says: str, target: str = "") -> Run:
    """`dvc exp run -S` with a variant that trains nothing: as far as a stage that the change does not concern, and whether what it has put
    into params.yaml is sound."""
    tried = f"dvc exp run -S {change} prepare && {SOUND} && dvc params diff HEAD && git checkout -q params.yaml"
    return Run(f"dvc exp run -S {change} {target}".rstrip(), says=says, variant=tried)


SESSIONS: dict[str, list[Run]] = {
    "the environment": [
        Run("source .venv/bin/activate"),
        Run('printf \'UID=%s\\nGID=%s\\n\' "$(id -u)" "$(id -g)" > .env'),
        Run("make test", says="passed", before="export PYTEST_ADDOPTS=tests/test_examples.py"),
        Run("make lint", says="All checks passed!"),
        Run("make docs"),
        Run(
            "grep -rn OWNER/NAME#NUMBER tests", variant="grep -rn 'iterative/dvc#1214' tests", says="test_end_to_end.py"
        ),
        Run("python -m benchmarks.render", says="docs/performance.md"),
        Run("python -m benchmarks.prepare_million", variant="python -m benchmarks.prepare_million 500"),
    ],
    "what has run": [
        Run("dvc repro", says="up to date"),
        Run("dvc repro reward", says="up to date"),
        Run("dvc repro --no-run-cache", says="up to date"),
        Run("dvc status", says="alternatives/dvc.yaml:dpo"),
        Run("dvc status dvc.yaml", says="up to date"),
        Run("dvc exp show", says="workspace"),
        Run("dvc plots show", says="dvc_plots/index.html"),
        Run("make health", says="Looked at sft"),
        Run("make doctor", says="Nothing is in the way"),
        Run("make sync-tracking", says="MLflow has everything"),
        Run("mlflow db upgrade sqlite:///mlflow.db"),
        Run(
            "python -c \"from mlflow import MlflowClient; MlflowClient('sqlite:///mlflow.db')"
            ".set_registered_model_alias('solo-rlhf-policy', 'champion', '1')\""
        ),
        Run("make pin", says="Every hub revision in params.yaml is a commit already."),
        Run("make export", says="exports/policy"),
    ],
    "before it is run": [
        Run(
            "make check-data DATA=path",
            variant="make check-data DATA=data/demo",
            says="prompt with chosen and rejected",
        ),
        Run(
            "make check-data",
            variant="make check-data DATA=data/demo/rewriting.jsonl SHAPE=prompt-pairs",
            says="different prompts",
        ),
        # planning takes half a minute each time: tests/test_planning.py does it; this is what make hands over
        Run(
            "make plan RECIPE=demo CARD=24GB",
            variant="make --dry-run plan RECIPE=demo CARD=24GB",
            says='pipeline.plan "recipes/demo.yaml" --card "24GB"',
        ),
        Run(
            "make plan CARD=24GB BASE=Qwen2.5-7B",
            variant="make --dry-run plan CARD=24GB BASE=Qwen2.5-7B",
            says='--card "24GB" --base "Qwen2.5-7B"',
        ),
        Run(
            "make plan CARD=24GB BASE=Qwen2.5-7B TOKENS=256+256",
            variant="make --dry-run plan CARD=24GB BASE=Qwen2.5-7B TOKENS=256+256",
            says='--card "24GB" --base "Qwen2.5-7B" --tokens "256+256"',
        ),
        Run(
            "make plan RECIPE=demo CARD=24GB BASE=Qwen2.5-7B TOKENS=256+256",
            variant="make --dry-run plan RECIPE=demo CARD=24GB BASE=Qwen2.5-7B TOKENS=256+256",
            says='pipeline.plan "recipes/demo.yaml" --card "24GB" --base "Qwen2.5-7B" --tokens "256+256"',
        ),
        Run("make use RECIPE=…", variant="make use RECIPE=demo && make use RECIPE=smoke", says="+  model: tiny"),
    ],
    "one experiment": [
        Run("dvc exp run -S ppo.kl_coef=0.1", says="Experiment results have been applied to your workspace."),
        Run("dvc metrics diff", says="metrics/ppo.json"),
        Run("dvc plots diff HEAD", says="dvc_plots/index.html"),
        Run("dvc exp run --temp -n dear -S ppo.kl_coef=0.1", says="dear", before="git checkout -q ."),
        Run("dvc exp show --only-changed", says="dear"),
        Run(
            "dvc exp show --drop '.*' --keep 'Experiment|ppo.kl_coef|sampled.policy.(win_rate_judge.mean|kl_per_sequence_k1)'",
            says="dear",
        ),
        Run("dvc exp show --csv > experiments.csv"),
        Run("dvc metrics diff HEAD dear", says="metrics/ppo.json"),
        Run("dvc params diff HEAD dear", says="ppo.kl_coef"),
        Run("dvc plots diff HEAD dear", says="dvc_plots/index.html"),
        # DPO has not run here, and DVC ends with an error for that, all else done: docs/compare.md says so
        Run(
            "dvc exp apply dear",
            variant="! dvc exp apply dear && dvc params diff HEAD | grep ppo.kl_coef && dvc status dvc.yaml",
            says="up to date",
            before="rm experiments.csv && git checkout -q . && dvc checkout -q --allow-missing",
        ),
        Run("dvc exp branch dear its-branch", says="its-branch"),
        Run(
            "dvc gc --all-branches --all-experiments",
            variant="dvc gc --all-branches --all-experiments --force",
            says="cache",
        ),
        Run("dvc exp remove dear", says="dear"),
    ],
    "many": [
        Run("dvc exp run --queue -S ppo.kl_coef=0.03,0.1,0.3", says="Queued experiment"),
        Run("dvc exp run --queue -S seed=18,19,20", says="Queued experiment"),
        Run("dvc queue status", says="Queued"),
        Run(
            "dvc exp run --run-all",
            variant="dvc exp run --run-all && dvc queue status",
            says="Success",
            before="dvc queue remove --queued && dvc exp run --queue -n again -S ppo.kl_coef=0.1",
        ),
        Run("dvc queue logs NAME", variant="dvc queue logs again", says="evaluate"),
    ],
    "other settings": [
        experiment("ppo.algorithm=grpo", "ppo.algorithm"),
        experiment("warmup.clip=0.9", "warmup.clip", "alternatives/dvc.yaml:warmup"),
        experiment("warmup.epochs=1", "warmup.epochs", "alternatives/dvc.yaml:warmup"),
        experiment("warmup.gamma=1.0", "warmup.gamma", "alternatives/dvc.yaml:warmup"),
        experiment("dpo.beta=0.3", "dpo.beta", "alternatives/dvc.yaml:evaluate_dpo"),
        experiment("ppo.reward.0.weight=0.5", "ppo.reward"),
        Run("dvc repro --all-pipelines", says="Running stage 'alternatives/dvc.yaml:evaluate_dpo'"),
        Run("dvc repro alternatives/dvc.yaml:dpo", says="up to date"),
        Run("make warmup", says="plots/warmup.png"),
    ],
    "a stage by hand": [
        Run("dvc repro -f -s ppo", variant="dvc repro --dry -f -s ppo", says="Running stage 'ppo'"),
        Run("dvc repro -f sft", variant="dvc repro --dry -f sft", says="Running stage 'sft'"),
        Run("python -m stages.NAME", variant="python -m stages.prepare", says="prepare: done"),
        Run(
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m stages.ppo",
            variant="torchrun --nnodes 1 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 -m stages.sft",
            says="sft: done",
            before="sed -i 's/launch: single/launch: ddp/' params.yaml",
        ),
        Run("rm -r .work"),
    ],
    "to follow a run": [
        Run(
            "python -m stages.sft | jq -r 'select(.event == \"step\") | [.step, .of, .loss] | @tsv'",
            says="1\t4\t",
            before="sed -i 's/progress: auto/progress: json/' params.yaml",
            needs="jq",
        ),
    ],
    "elsewhere": [
        Run("dvc remote add --default store /mnt/shared/solo-rlhf", variant="dvc remote add --default store ../store"),
        Run("dvc remote modify --local", variant="dvc remote modify --local store verify true"),
        Run('git commit -am "DVC remote"', says="DVC remote"),
        Run("dvc push --run-cache", says="pushed"),
        Run(
            "git clone ... && cd solo-rlhf && dvc pull --allow-missing && dvc repro",
            variant="git clone . ../elsewhere && cd ../elsewhere && dvc pull --allow-missing && dvc repro",
            says="up to date",
        ),
        Run("dvc pull", variant="dvc pull --allow-missing", says="up to date"),
    ],
}

# command -> the test that runs it, or that calls what it is made of
TESTED = {
    "make repro": "tests/test_commands.py::test_make_repro_ends_with_the_table_and_the_report",
    "make report": "tests/test_commands.py::test_make_repro_ends_with_the_table_and_the_report",
    "python -m pipeline.preflight": "tests/test_end_to_end.py::test_missing_data_is_said_before_dvc_starts",
    "make plan": "tests/test_planning.py::test_make_plan_prints_parts_verdicts_and_changes",
    "python -m tests.recipe_needs": "tests/test_recipes.py::test_the_page_says_what_is_computed",
    "make dpo": "tests/test_end_to_end.py::test_dpo_runs_when_asked_and_stands_beside_ppo",
    "make chat": "tests/test_end_to_end.py::test_what_a_run_has_learnt_goes_out_and_comes_in_again",
    "make diagnose": "tests/test_diagnose.py::test_a_run_at_a_hundredth_on_a_real_loop_is_a_setting_and_writes_nothing",
    "python -m pipeline.diagnose": "tests/test_diagnose.py::test_faulty_code_ends_with_its_own_status",
    "dvc exp run --temp": "tests/test_end_to_end.py::test_experiments_stand_side_by_side",
    "dvc exp run --queue": "tests/test_end_to_end.py::test_experiments_stand_side_by_side",
    "dvc exp run -S reward.from=models/my-reward-model": (
        "tests/test_end_to_end.py::test_what_a_run_has_learnt_goes_out_and_comes_in_again"
    ),
    "dvc repro -f": "tests/test_end_to_end.py::test_forced_again_everything_has_the_same_hash",
    "python -m stages.ppo": "tests/test_end_to_end.py::test_ppo_climbs_a_users_function_without_a_reward_model",
    "deploy/run.sh STAGE": "tests/test_remote.py::test_another_machine_takes_up_what_the_first_has_sent",
    "deploy/run.sh [STAGE ...]": "tests/test_remote.py::test_another_machine_takes_up_what_the_first_has_sent",
    "python -m benchmarks.algorithms": "tests/test_algorithms.py::test_each_algorithm_learns_what_can_be_learnt",
    "python -m benchmarks.gpu": "tests/test_gpu_benchmark.py::test_a_dry_run_writes_every_part",
    "python -m benchmarks.rollout --repeats 3": "tests/test_sampling.py::test_the_benchmark_runs_all_ways",
}


@dataclass(frozen=True)
class NotRun:
    """A command that no test can run, and why; instead: as far as it can be gone with."""

    command: str
    reason: str
    instead: str = "true"


IMPORTED = "python -c 'import benchmarks.update, benchmarks.vocabulary, benchmarks.thread_waiting, benchmarks.memory'"
DOCKER, CLUSTER, CLOUD = "a Docker daemon", "a Kubernetes cluster", "a cloud's account"
NOT_RUN = [
    NotRun("make ui", "a server in the foreground", "make --dry-run ui"),
    NotRun("make ui PORT=5001", "a server in the foreground", "make --dry-run ui PORT=5001 | grep -- '--port 5001'"),
    NotRun("make audit", "asks a registry about each package", "make --dry-run audit"),
    NotRun("make screenshots", "a browser, and a package from a registry", "make --dry-run screenshots"),
    NotRun("apt install chromium", "root and network"),
    NotRun(
        "make bench", "half an hour, alone on the machine", "make --dry-run bench && python -m benchmarks.bench --help"
    ),
    NotRun("python -m benchmarks.memory", "tens of minutes", IMPORTED),
    NotRun("python -m benchmarks.update", "minutes, alone on the machine", IMPORTED),
    NotRun("python -m benchmarks.vocabulary", "minutes", IMPORTED),
    NotRun("python -m benchmarks.thread_waiting", "minutes, alone on the machine", IMPORTED),
    NotRun(
        "python -m benchmarks.chaos --kills 20 --signal KILL", "tens of minutes", "python -m benchmarks.chaos --help"
    ),
    NotRun(
        "python -m benchmarks.chaos --kills 20 --signal TERM", "tens of minutes", "python -m benchmarks.chaos --help"
    ),
    NotRun("make test-container", "root, buildah and debootstrap", "make --dry-run test-container"),
    *(
        NotRun(command, DOCKER)
        for command in (
            "docker compose",
            "docker compose build",
            "docker compose down",
            "docker compose run --rm pipeline dvc repro",
            "docker compose run --rm pipeline dvc repro -s ppo",
            "docker compose run --rm pipeline python -m pipeline.summary",
            "docker compose -f compose.yaml -f compose.gpu.yaml build pipeline",
            "docker compose -f compose.yaml -f compose.gpu.yaml run --rm pipeline dvc repro",
            "docker build --secret",
            "docker build --tag registry.example.com/solo-rlhf:cuda --build-arg TORCH=cuda . && docker push registry.example.com/solo-rlhf:cuda",
            "docker buildx imagetools inspect debian:bookworm-slim",
            "docker run",
            "docker stop",
            "docker kill",
        )
    ),
    NotRun("buildah images", "root"),
    NotRun("buildah bud --volume", "root"),
    NotRun("kubectl apply -f deploy/kubernetes.yaml", CLUSTER),
    NotRun("kubectl logs --follow job/solo-rlhf", CLUSTER),
    NotRun(
        "sky jobs launch deploy/skypilot.yaml --env IMAGE=... --secret AWS_ACCESS_KEY_ID --secret AWS_SECRET_ACCESS_KEY",
        CLOUD,
    ),
]
