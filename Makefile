# make demo    train, package, serve, predict and scrape on this machine, start to end
# make test    every test that can run here
# make help    the rest
#
# PYTHON=python3.12 chooses the interpreter (3.10 to 3.14); ACCEL=cuda installs the CUDA builds.
# TORCH_VERSION=2.14.1 takes another torch (2.11 to 2.14), with the fbgemm-gpu that was made for it.

PYTHON ?= python3
ACCEL ?= cpu
VENV ?= .venv
TORCH_VERSION ?= 2.13.0
# fbgemm-gpu follows torch; tessera/releases.py has the same table.
FBGEMM_OF_2.11 := 1.6.0
FBGEMM_OF_2.12 := 1.7.0
FBGEMM_OF_2.13 := 1.8.0
FBGEMM_OF_2.14 := 1.9.0
TORCH_RELEASE := $(word 1,$(subst ., ,$(TORCH_VERSION))).$(word 2,$(subst ., ,$(TORCH_VERSION)))
FBGEMM_VERSION ?= $(or $(FBGEMM_OF_$(TORCH_RELEASE)),$(error TORCH_VERSION=$(TORCH_VERSION) has no fbgemm-gpu that was made for it; take 2.11 to 2.14))
PYTEST_ARGS ?=
TEST_PROCESSES ?= 3
ROUNDS ?= 5
SEED ?=

BIN := $(VENV)/bin
# setuptools warns that an editable install finds the folder tessera/, which is what it is for.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check -q
FBGEMM := $(if $(filter cuda,$(ACCEL)),fbgemm-gpu,fbgemm-gpu-cpu)==$(FBGEMM_VERSION)
# The command line, the folders it is linked to, and what is beside them.
SOURCES := tessera training serving kernels cpp_server tests load_tests examples wheels deploy docs/site

# Each prints a table and names the machine; docs/benchmarks.md holds the results.
BENCHES := training.bench.reader training.bench.startup training.bench.train_speed serving.bench.forward \
  serving.bench.shared_features serving.bench.server_load serving.bench.memory serving.bench.packaging kernels.bench.cpu_lookup \
  kernels.bench.cpu_linear
# A folder with criteo_sample_14584.tsv and ml-100k/, for the quality of trained models.
DATA ?= data

.DEFAULT_GOAL := help
.PHONY: rolling attack attack-lives attack-logs attack-log-lives sanitize help install install-dev version wheels release-notes test-wheels test-bare build build-kernels build-server demo demo-online test test-random check format protos row-types package-rules page-texts config-page metrics-page flags-page docs docs-screenshots monitoring-screenshots bench load-test clean check-cuda gpu-test gpu-test-ranks gpu-bench gpu-bench-ranks

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 17

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' || \
	  { echo "Tessera needs Python 3.10 to 3.14; '$(PYTHON)' is not. Name one: make PYTHON=python3.12 ..."; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "No virtual environment could be made; on Debian: apt-get install python3-venv"; rm -rf $(VENV); exit 2; }

# torch comes first and alone: the packages after it must take the build that is there.
$(VENV)/.installed-$(ACCEL): pyproject.toml | $(BIN)/python
	@echo "installing Tessera into $(VENV) (torch $(TORCH_VERSION), $(FBGEMM)); some minutes the first time"
	@$(PIP) install torch==$(TORCH_VERSION)
	@test $(ACCEL) = cuda || $(BIN)/python -c 'import importlib.util as u; u.find_spec("nvidia") and print("this torch brings CUDA along, some 5 GB; README.md, \"Install\", says how to get the CPU build")'
	@$(PIP) install $(FBGEMM) -e '.[$(ACCEL)]'
	@touch $@

$(VENV)/.installed-$(ACCEL)-dev: pyproject.toml | $(VENV)/.installed-$(ACCEL)
	@$(PIP) install -e '.[$(ACCEL),dev]'
	@touch $@

install: $(VENV)/.installed-$(ACCEL)  ## the virtual environment with Tessera in it
install-dev: $(VENV)/.installed-$(ACCEL)-dev  ## the same with the development tools

build: build-kernels build-server  ## compile the lookup operators and the C++ server

# The operators that the packages use; a second run compiles only what changed.
build-kernels: install
	@command -v cmake >/dev/null || test -x $(BIN)/cmake || $(PIP) install 'cmake>=3.25,<5'
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python kernels/build.py

# Says which Debian packages to install where it cannot build.
build-server: install
	@PYTHON=$(BIN)/python cpp_server/build.sh

demo: install build-kernels  ## the whole way on generated data: train, package, serve, predict, scrape
	@$(BIN)/python examples/demo.py --dir .demo

demo-online: install build-kernels  ## a truth that drifts, a trainer that publishes, a server that follows: AUC on fresh rows
	@$(BIN)/python examples/online.py --dir .demo-online

# Three processes keep two cores busy, as a test waits for a third of its time; all tests of a file go to one, with the
# file's fixtures, and tests/slow_files.py says which file comes first.  Threads that wait for work leave the cores to
# other processes.  Tests start hundreds of programs, and each process collects all tests: both read the sources
# compiled, which the second run of pytest does, too, even where Python is told elsewhere not to write that.
test: export OMP_WAIT_POLICY := passive
test: export PYTHONDONTWRITEBYTECODE :=
test: install-dev build  ## every test that can run on this machine
	$(BIN)/python -m compileall -q tessera tessera/training tessera/serving tessera/kernels tests
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Installing does it, too; this is for the commits after that.
version: install-dev  ## take the version from git's tag and commit anew, into tessera/_version.py
	@$(BIN)/python -m setuptools_scm --force-write-version-files

# What is compiled tells its version, so that comes first.
wheels: version  ## build what others install into dist/: tessera-rec, tessera-rec-server, tessera-rec-client
	@$(MAKE) --no-print-directory build
	$(BIN)/python wheels/build.py --out dist

VERSION ?=

release-notes: install-dev  ## what the changelog says of a release, where its tag and version agree: VERSION=0.1.0
	@$(BIN)/python wheels/release_notes.py $(if $(VERSION),$(VERSION),$(error VERSION is missing: make release-notes VERSION=0.1.0))

test-wheels: wheels  ## install them into fresh environments and go the whole way with both servers (minutes, 2 GB)
	$(BIN)/python wheels/try_wheels.py --wheels dist

# Further flags of play.py, such as --bind and --env for a mirror of the registries.
PLAY_ARGS ?=
PLAY = $(BIN)/python deploy/containers/play.py $(PLAY_ARGS)

test-bare: wheels  ## the same where Debian has Python alone, and the containers' steps, as root with mmdebstrap (minutes, 6 GB); PLAY_ARGS=...
	$(PLAY) wheels/bare.Containerfile --steps
	$(PLAY) deploy/containers/tessera.Containerfile --train --keep .demo/image.pt
	$(PLAY) deploy/containers/tessera-server.Containerfile --model .demo/image.pt

# Each failure prints its round's seed and the example; make test-random ROUNDS=1 SEED=N is that round again.
test-random: install-dev build  ## the property tests with new examples every time; ROUNDS=5 SEED=N PYTEST_ARGS=tests/kernels
	$(BIN)/python tests/random_rounds.py --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED)) $(PYTEST_ARGS)

FLOOD_S ?= 10
CALLS ?= 1000000

attack: install-dev build  ## floods, faults and damaged packages against both servers at length (about 2 hours); FLOOD_S=10 CALLS=1000000
	$(BIN)/python -m tests.attack --server cpp --seconds $(FLOOD_S)
	$(BIN)/python -m tests.attack --server python --seconds $(FLOOD_S)
	$(BIN)/python -m tests.attack.faults --server cpp --calls $(CALLS)
	$(BIN)/python -m tests.attack.faults --server python --calls $(CALLS)
	$(BIN)/python -m tests.attack.packages --count 3000

RESTARTS ?= 3

rolling: install-dev build  ## two servers share a client's calls, a third gets its share, all are restarted under load (about 20 minutes); RESTARTS=3
	$(BIN)/python -m tests.rolling --server cpp --rounds $(RESTARTS)
	$(BIN)/python -m tests.rolling --server python --rounds $(RESTARTS)

LIVES_S ?= 1800

attack-lives: install-dev build  ## 50 models of three versions live and die at random under checked calls (an hour); CALLS=1000000 LIVES_S=1800
	$(BIN)/python -m tests.attack.lives --server cpp --calls $(CALLS) --limit-s $(LIVES_S)
	$(BIN)/python -m tests.attack.lives --server python --calls $(CALLS) --limit-s $(LIVES_S)

FAULTS ?= 10000

attack-logs: install-dev build  ## spoilt logs of commits before servers that follow them, under checked calls; FAULTS=10000
	$(BIN)/python -m tests.attack.logs --server cpp --faults $(FAULTS)
	$(BIN)/python -m tests.attack.logs --server python --faults $(FAULTS)

KILLS ?= 200

attack-log-lives: install-dev build  ## trainer, publishers and servers of one log are killed at random; KILLS=200
	$(BIN)/python -m tests.attack.log_lives --kills $(KILLS)

SANITIZERS ?= asan tsan
SANITIZED_TESTS ?=
SANITIZED_CALLS ?= 20000

sanitize: install-dev build-kernels  ## the C++ tests, floods, conformance suite and calls under faults with ASan + UBSan, then TSan (hours); SANITIZERS=asan
	@for preset in $(SANITIZERS); do \
	  PYTHON=$(BIN)/python CALLS=$(SANITIZED_CALLS) cpp_server/sanitize.sh $$preset $(SANITIZED_TESTS) || exit 1; \
	done

check: install-dev build check-cuda  ## format, lint, types, C++ and CUDA warnings as errors
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check --no-cache $(SOURCES)
	$(BIN)/mypy
	cd deploy/monitoring && MYPYPATH=$(CURDIR) $(abspath $(BIN))/mypy *.py ../containers/play.py ../slurm/play_job.py
	cd docs/site && MYPYPATH=$(CURDIR) $(abspath $(BIN))/mypy *.py
	$(BIN)/mypy examples/*.py load_tests/*.py cpp_server/*.py cpp_server/bench/*.py wheels/[brct]*.py wheels/sbom.py tests/check_protos.py
	$(BIN)/python tests/check_protos.py
	$(BIN)/python kernels/row_header.py
	$(BIN)/python -m tessera.serving.package.generate
	$(BIN)/python -m tessera.serving.server.front.page_texts
	$(BIN)/python -m tessera.training.config_reference
	$(BIN)/python -m tessera.flags_reference
	$(MAKE) --no-print-directory docs
	$(BIN)/python cpp_server/check.py

format: install-dev  ## rewrite the sources as the formatter wants them
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/python cpp_server/check.py --format

protos: install-dev  ## generate serving/protocol from protos/
	$(BIN)/python tests/check_protos.py --write

row-types:  ## regenerate what C++ and the command line read of kernels/row_types.py
	$(BIN)/python kernels/row_header.py --write

metrics-page:  ## regenerate docs/metrics.md and the Grafana dashboard from the servers' code and the table of panels
	$(BIN)/python -m tessera.serving.server.metrics.reference --write
	$(BIN)/python deploy/monitoring/dashboard.py --write

package-rules:  ## regenerate what the C++ reader of packages takes from serving/package
	$(BIN)/python -m tessera.serving.package.generate --write

page-texts:  ## regenerate what the C++ server's status page takes from serving/server/front and tessera/page.css
	$(BIN)/python -m tessera.serving.server.front.page_texts --write

config-page:  ## regenerate docs/config.md from the dataclasses that read a config
	$(BIN)/python -m tessera.training.config_reference --write

flags-page: install build-server  ## regenerate docs/flags.md from the programs' parsers
	$(BIN)/python -m tessera.flags_reference --write

# Strict: a link or an anchor that does not hold, and a page that the navigation leaves out, end it.
docs: export NO_MKDOCS_2_WARNING := 1
docs: install-dev  ## the site of docs/ and of the API, in build/site/index.html
	$(BIN)/python -m mkdocs --quiet build --strict

docs-screenshots: docs build  ## pictures of the site and of the status page at 400 and 1200 px, by Chromium, in bench-out/site
	$(BIN)/python docs/site/screenshots.py --out bench-out/site

MODEL ?= .demo/model.pt

monitoring-screenshots: install-dev build  ## pictures of Prometheus, an alert and traces of both servers under load, in bench-out/monitoring; MODEL=FILE
	$(BIN)/python deploy/monitoring/screenshots.py --model $(MODEL) --server build/cpp/release/tessera-server --out bench-out/monitoring

# nvcc alone is enough for the check of the CUDA sources; without it there is nothing to compile.
# CUDA_CHECK=optimized lets the optimizer have its say, too, in seven times the time.
CUDA_CHECK ?= fast

check-cuda: install
	@if command -v nvcc >/dev/null; then $(BIN)/python kernels/build.py --check-cuda $(CUDA_CHECK); \
	  else echo "check-cuda: no nvcc here; the CUDA sources were not compiled"; fi

gpu-test: install-dev build  ## the GPU tests, on a host with a CUDA device
	$(BIN)/python -m pytest tests/kernels tests/packaging tests/conformance -m gpu
	TESSERA_TEST_DEVICE=cuda $(BIN)/python -m pytest tests/training tests/trainer -m gpu

gpu-test-ranks: install-dev  ## the multi-rank tests with NCCL, on a host with 2 or 4 GPUs
	TESSERA_TEST_DEVICE=cuda $(BIN)/python -m pytest tests/training -m multi_gpu

gpu-bench: install-dev build-kernels  ## our CUDA lookups against FBGEMM's, on a host with a CUDA device
	@mkdir -p bench-out
	$(BIN)/python -m tessera.kernels.bench.gpu_lookup --out bench-out/gpu_lookup.json
	$(BIN)/python -m tessera.kernels.bench.gpu_interaction --out bench-out/gpu_interaction.json

# WORLDS=1,2,4 where there are four GPUs.
WORLDS ?= 1,2

gpu-bench-ranks: install-dev  ## training on several GPUs, with and without the pipeline
	@mkdir -p bench-out
	$(BIN)/python -m tessera.training.bench.scaling --device cuda --worlds $(WORLDS) --batch-size 32768 --json bench-out/scaling.json

load-test: install-dev build-kernels  ## locust without a screen, against a server of its own; ADDRESS=HOST:PORT for another
	@$(BIN)/python load_tests/run.py $(if $(ADDRESS),--address $(ADDRESS))

bench: install-dev build  ## the benchmarks behind docs/benchmarks.md (about 30 minutes)
	@mkdir -p bench-out
	@for module in $(BENCHES); do \
	  echo "== python -m tessera.$$module"; \
	  $(BIN)/python -m tessera.$$module | tee bench-out/$$module.txt || exit 1; \
	done
	@if [ -d "$(DATA)" ]; then $(BIN)/python -m tessera.training.bench.quality --data $(DATA) --out bench-out; \
	else echo "quality was left out: DATA=$(DATA) is no folder"; fi
	@if [ -x build/cpp/release/tessera-server ]; then $(BIN)/python cpp_server/bench/server_bench.py; fi

clean:  ## remove what the other targets made, the virtual environment included
	rm -rf $(VENV) .demo .demo-online build dist bench-out .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info tessera/_version.py
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
