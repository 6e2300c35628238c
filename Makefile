# make demo: from nothing to a trained model, on a Slurm that this starts itself.   make test: all checks.
PYTHON ?= python3
# For tests Debian's own Python, as on a fresh machine: other users can read it, and so the tests with a second user run.
TEST_PYTHON := $(if $(filter file,$(origin PYTHON)),$(firstword $(wildcard /usr/bin/python3.1[1-9]) $(PYTHON)),$(PYTHON))
BIN := .venv/bin
# Of the tests: two more than the processors of CI, as those with Slurm mostly wait.
WORKERS ?= 4
SUITES ?= bookworm trixie sid
# Of the soak.
FAULTS ?= 300

# Where it is set, as in images of containers, each worker would translate the assertions of all tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo setup test test-fast pytest test-slurm nemo-test gpu-test gpu-step data-torture lint bench soak docs wheel release golden clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo    set up, boot a throw-away Slurm, train a small GPT-3 on it, plot the loss;'
	@echo '             DEMO_OVERRIDES=training.trainer.max_steps=400 trains it for longer'
	@echo 'make setup   the virtual environment .venv with `slipway` and what a training needs'
	@echo 'make test    set up everything that the tests need and run all checks'
	@echo 'make test-fast  the inner loop, three minutes on two cores: no Slurm, no training, no lint'
	@echo 'make test-slurm  the tests on the Slurm of Debian 12, 13 and unstable, in roots of debootstrap (20 GB);'
	@echo '             SUITES=sid takes one of them; takes hours, and root privileges'
	@echo 'make nemo-test  NeMo itself trains what we render, on the CPU; its own environment (2 GB);'
	@echo '             with SLIPWAY_NEMO_LAUNCHER=DIR:DIR also the trees of NeMo launchers, adopted'
	@echo 'make gpu-test  what the GPUs of this machine compute, as a table'
	@echo 'make gpu-step  a training step on a GPU without Transformer Engine, next to a compiled GPT by hand'
	@echo 'make data-torture  data and tokenizers of others, real and hostile, next to their references; downloads 300 MB'
	@echo 'make lint    ruff, mypy, the import contracts, the supervisor'"'"'s Python and the documentation alone'
	@echo 'make bench   the performance tables of benchmarks/perf'
	@echo 'make soak    FAULTS=300 faults in real chains, and whether all held; interrupted, it goes on'
	@echo 'make docs    the documentation, into site/'
	@echo 'make wheel   the wheel, into dist/'
	@echo 'make release tag this commit, with wheel, SBOM and checksums in dist/VERSION; uploads nothing'
	@echo 'make golden  write the golden scripts anew, for review as a diff'
	@echo 'make clean   remove what the above made; results/ stays'

setup: .venv/setup.done

demo: .venv/setup.done
	@scripts/system-packages.sh --optional slurmctld:slurm-wlm munged:munge
	@scripts/demo.sh

test: .venv/test.done
	@scripts/system-packages.sh slurmctld:slurm-wlm munged:munge slurmdbd:slurmdbd \
	    /usr/lib/*/slurm-wlm/accounting_storage_mysql.so:slurm-wlm-mysql-plugin mariadbd:mariadb-server git:git \
	    buildah:buildah /usr/lib/podman/netavark:netavark skopeo:skopeo umoci:umoci \
	    mksquashfs:squashfs-tools docker-registry:docker-registry envsubst:gettext-base
	$(MAKE) --no-print-directory --jobs=2 lint pytest

pytest: .venv/test.done
	$(BIN)/pytest --warm --ignore=tests/nemo -n $(WORKERS)

test-fast: .venv/test.done
	$(BIN)/pytest --warm --ignore=tests/nemo -n 2 -m 'not slow'

test-slurm: .venv/test.done
	@scripts/system-packages.sh debootstrap:debootstrap git:git ip:iproute2
	@$(BIN)/python scripts/test_slurm.py --workers $(WORKERS) --suites $(SUITES)

nemo-test: .venv/test.done
	@scripts/system-packages.sh slurmctld:slurm-wlm munged:munge slurmdbd:slurmdbd \
	    /usr/lib/*/slurm-wlm/accounting_storage_mysql.so:slurm-wlm-mysql-plugin mariadbd:mariadb-server
	@scripts/nemo-env.sh $(PYTHON)
	$(BIN)/pytest tests/nemo tests/config/test_nemo_launcher_releases.py

gpu-test: .venv/test.done
	$(BIN)/python -m benchmarks.gpu_check

lint: .venv/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.14
	$(BIN)/lint-imports
	$(BIN)/python scripts/structure.py
	$(BIN)/vermin --target=3.6- --violations --eval-annotations --no-tips slipway/__init__.py slipway/common/__init__.py slipway/common/backoff.py slipway/common/files.py slipway/common/node slipway/supervisor slipway/watch tests/supervisor/programs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir .cache/site

bench: .venv/test.done
	$(BIN)/python benchmarks/perf/launch_latency.py
	$(BIN)/python benchmarks/perf/check.py
	$(BIN)/python benchmarks/perf/sweep.py
	$(BIN)/python benchmarks/perf/train_step.py
	$(BIN)/python benchmarks/perf/watched_training.py
	$(BIN)/python benchmarks/perf/resume.py
	$(BIN)/python benchmarks/perf/checkpoints.py
	$(BIN)/python benchmarks/perf/conversion.py --layers 8
	$(BIN)/python benchmarks/perf/status.py
	$(BIN)/python benchmarks/perf/reading.py
	$(BIN)/python benchmarks/perf/job_start.py
	$(BIN)/python benchmarks/perf/tokenizing.py
	$(BIN)/python -m benchmarks.watch
	@scripts/system-packages.sh mksquashfs:squashfs-tools
	$(BIN)/python benchmarks/perf/squashfs.py

soak: .venv/test.done
	@scripts/system-packages.sh slurmctld:slurm-wlm munged:munge
	$(BIN)/python -m benchmarks.soak --faults $(FAULTS)

gpu-step: .venv/test.done
	$(BIN)/python benchmarks/perf/gpu_step.py

data-torture: .venv/test.done
	$(BIN)/python -m benchmarks.torture

docs: .venv/test.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: .venv/test.done
	$(BIN)/python -m build --no-isolation

release: .venv/test.done
	@scripts/release.sh

golden: .venv/test.done
	$(BIN)/pytest tests/rendering/test_golden.py --write-golden

clean:
	rm -rf .cache .venv .venv-nemo build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.venv/setup.done: setup.cfg constraints.txt
	@scripts/venv.sh $(PYTHON) train,data,conversion,plot
	@touch $@

.venv/test.done: setup.cfg constraints.txt
	@scripts/venv.sh $(TEST_PYTHON) train,data,cleaning,conversion,evaluation,plot,dev
	@touch .venv/setup.done $@
