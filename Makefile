# Everything runs inside .venv, which the first target that needs it creates.
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers
FUSION := .venv-fusion-bench
OLDEST := .venv-oldest

# One thread per test worker: two workers with all the cores each would be slower than either alone.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -q

.DEFAULT_GOAL := help
.PHONY: help venv demo picture test test-slow test-all test-cuda test-peers test-browser test-oldest package fuzz fuzz-faults fuzz-minute lint format docs coverage-page bench bench-survey paper clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch first, alone and exact: a looser requirement resolved with no torch present may pick another build of it,
# together with gigabytes of CUDA packages. The pip of Python 3.10 builds seqeval, which has no wheel, only with the flag.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==$$(sed -n 's/^torch==//p' constraints.txt) -c constraints.txt
	$(BIN)/python -m pip install -q --use-pep517 -c constraints.txt -e ".[dev]"
	touch $@

venv: $(STAMP)  ## create .venv with everything for development

demo: $(STAMP)  ## train three tiny models, align, merge, show the numbers (half a minute)
	$(BIN)/isomerge demo -o demo-out

picture: demo  ## the README's picture of the demo's report (needs Chromium, see test-browser)
	$(BIN)/python tests/browser/report_picture.py demo-out/report.html docs/images/report.png

test: $(STAMP)  ## the quick tests (three to four minutes on two cores)
	$(PYTEST) -n $(JOBS) -m "not slow and not browser and not peers"

test-slow: $(STAMP)  ## the tests that take more than a few seconds each
	$(PYTEST) -n $(JOBS) -m "slow and not browser and not peers"

test-all: $(STAMP)  ## both, with the lines of the source that no test runs, into htmlcov/
	$(PYTEST) -n $(JOBS) -m "not browser and not peers" --cov --cov-report=term:skip-covered --cov-report=html

test-cuda: $(STAMP)  ## the tests that need a CUDA device: the same results as on the CPU
	$(PYTEST) -m cuda

$(PEERS)/.installed: constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q torch==$$(sed -n 's/^torch==//p' constraints.txt) -c constraints.txt
	$(PEERS)/bin/python -m pip install -q -c constraints.txt mergekit==0.1.5
	touch $@

$(FUSION)/.installed: constraints.txt
	test -x $(FUSION)/bin/python || $(PYTHON) -m venv $(FUSION)
	$(FUSION)/bin/python -m pip install -q torch==$$(sed -n 's/^torch==//p' constraints.txt) -c constraints.txt
	$(FUSION)/bin/python -m pip install -q -c constraints.txt fusion_bench==0.2.33
	touch $@

test-peers: $(STAMP) $(PEERS)/.installed $(FUSION)/.installed  ## beside mergekit and fusion_bench, in their own environments
	MERGEKIT_PYTHON=$${MERGEKIT_PYTHON:-$(CURDIR)/$(PEERS)/bin/python} $(PYTEST) -n $(JOBS) -m peers tests/peers

# Not torch, see tests/packaging/oldest.py. Tests of what the lowest versions cannot have are not among these.
$(OLDEST)/.installed: pyproject.toml constraints.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q torch==$$(sed -n 's/^torch==//p' constraints.txt) -c constraints.txt
	$(OLDEST)/bin/python tests/packaging/oldest.py hf demo ot report search studio > $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python -m pip install -q -r $(OLDEST)/requirements.txt "peft==0.13.0" "httpx==0.27.0" "pytest>=8" "pytest-xdist>=3.6"
	$(OLDEST)/bin/python -m pip install -q --no-deps -e .
	touch $@

test-oldest: $(OLDEST)/.installed  ## merge, align and the command line with the lowest versions that pyproject.toml allows
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(OLDEST)/bin/python -m pytest -q -n $(JOBS) -m "not slow and not peers" \
	  tests/checkpoint tests/merging/test_merge_linear.py tests/merging/test_merge_library.py tests/merging/methods \
	  tests/alignment/test_align_gauge.py tests/alignment/solvers tests/cli tests/studio

package: $(STAMP)  ## build wheel and source archive; each runs the demo in an empty environment elsewhere (minutes)
	$(BIN)/python tests/packaging/run_package.py $$(sed -n 's/^torch==//p' constraints.txt)

# Debian's Chromium; root may install it, others are told what is missing.
test-browser: $(STAMP)  ## the tests that look at a page in a real browser
	@if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then \
	  if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	    apt-get install -y -q chromium chromium-driver >/dev/null || \
	    { apt-get update -q && apt-get install -y -q chromium chromium-driver >/dev/null; }; \
	  else echo "test-browser needs a browser: apt-get install chromium chromium-driver" >&2; exit 1; fi; fi
	$(PYTEST) -m browser tests/browser

# What it finds is saved under build/fuzz. The records of a full run are docs/trust.json and docs/faults.json.
FUZZ := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=tests $(BIN)/python -m fuzz
fuzz: $(STAMP)  ## damage files of every kind and read them, for an hour (SEED=n gives other damage)
	$(FUZZ) --minutes 60 --jobs $(JOBS) --seed $(or $(SEED),0) --out docs/trust.json

fuzz-faults: $(STAMP)  ## every fault at every I/O call of merge, align and reconstruct (two core-hours)
	$(FUZZ).faults --jobs $(JOBS) --json docs/faults.json

fuzz-minute: $(STAMP)  ## the same for a minute
	$(FUZZ) --minutes 1 --seed $(or $(SEED),0)

lint: $(STAMP)  ## style, types, layers, dead code, dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture
	$(BIN)/deptry src

format: $(STAMP)  ## let ruff repair and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[docs]"
	touch $@

coverage-page: $(STAMP)  ## which of transformers' model types can be aligned, each proven; results are kept, --again by hand (an hour)
	OMP_NUM_THREADS=1 $(BIN)/python docs/coverage.py

# The variable silences a notice about mkdocs 2, which this theme does not use.
docs: $(VENV)/.docs  ## the documentation as a site, into site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# Small models on scikit-learn's digits and Python's manual pages, unless data are named: CIFAR10=archive WIKITEXT2=folder
bench: $(STAMP)  ## the benchmark tables that two cores can make (minutes)
	$(BIN)/python benchmarks/align.py --shapes vit roberta-base
	$(BIN)/python benchmarks/vit_cifar10.py --tiny $(if $(CIFAR10),--data $(CIFAR10))
	$(BIN)/python benchmarks/resnet_cifar10.py --tiny --work $(or $(TMPDIR),/tmp)/isomerge-resnet
	$(BIN)/python benchmarks/lm_wikitext2.py --tiny --arch llama $(if $(WIKITEXT2),--data $(WIKITEXT2))
	$(BIN)/python benchmarks/lm_wikitext2.py --tiny --arch gpt2 $(if $(WIKITEXT2),--data $(WIKITEXT2))
	$(BIN)/python benchmarks/skills.py --tiny
	$(BIN)/python benchmarks/shapes.py --tiny
	$(BIN)/python benchmarks/search.py

SURVEY := $(filter-out setting,$(basename $(notdir $(wildcard benchmarks/survey/*.py))))
bench-survey: $(STAMP)  ## the tables of the survey's families, on digits (half an hour; OUT=folder keeps them)
	@set -e; for name in $(SURVEY); do $(BIN)/python benchmarks/survey/$$name.py $(if $(OUT),--out $(OUT)); done

# With a GPU the small scale (vision first: it trains what others merge), else the reduced one; every script says what it
# leaves out. A script that was interrupted or failed goes on where it was; the others run all the same.
# DATA=folder MODELS=folder SCALE=small|reduced|original WORK=folder: see benchmarks/paper/README.md
PAPER := vision $(sort $(basename $(notdir $(wildcard $(addprefix benchmarks/paper/,table?.py figure*.py))))) plane
WORK ?= build/paper
paper: $(STAMP)  ## the founding paper's tables and figures (with a GPU; without: a reduced form)
	@unfinished=; for name in $(PAPER); do \
	  $(BIN)/python benchmarks/paper/$$name.py --work $(WORK) $(if $(SCALE),--scale $(SCALE)) \
	    $(if $(DATA),--data $(DATA)) $(if $(MODELS),--models $(MODELS)) || unfinished="$$unfinished $$name"; \
	done; test -z "$$unfinished" || { echo "not finished:$$unfinished; make paper goes on with them"; exit 1; }

clean:  ## remove .venv, caches and demo output
	rm -rf $(VENV) $(PEERS) $(FUSION) $(OLDEST) build dist site demo-out htmlcov .coverage* .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
