# potluck's commands. Each one works from a fresh clone: what it needs goes into .venv, once.

.DEFAULT_GOAL := help
SHELL := /bin/bash
BIN := .venv/bin
export PYTHON
# Else each process of a test run would compile pytest's plugins again.
unexport PYTHONDONTWRITEBYTECODE
# Two processes more than two cores have: while a test waits for processes of its own, others run.
PARALLEL := -n 4 --dist loadfile --no-loadscope-reorder
# Other random data each time, told at the beginning of the run.
SEED := POTLUCK_TEST_SEED=$${POTLUCK_TEST_SEED:-$$RANDOM}

.PHONY: help
help: ## Show this list
	@echo 'potluck: train on the machines you already own'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo 'Start with: make demo. Python 3.11 or newer is all it asks for;'
	@echo 'another interpreter: make PYTHON=/path/to/python3 demo'

.PHONY: demo
demo: ## Train on four workers, lose one on the way, get the right answer
	@tools/environment demo
	@$(BIN)/potluck run --workers 4 --chaos "kill rank 2 at step 60" examples/digits.py

.PHONY: demo-cluster
demo-cluster: ## Three hosts on this machine train one model, one is cut off and returns (Linux, root)
	@tools/environment demo
	@$(BIN)/python -m support.demo_cluster

.PHONY: check
check: ## Lint, types, floors, known vulnerabilities: ruff, mypy, import-linter, pip-audit
	@tools/environment dev
	@echo 'potluck: ruff' && $(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@echo 'potluck: mypy for linux, darwin and win32' && \
		printf '%s\n' linux darwin win32 | xargs -P 2 -I SYSTEM sh -c '$(BIN)/mypy \
		--no-error-summary --platform SYSTEM --cache-dir .mypy_cache/SYSTEM || \
		{ echo "potluck: mypy found this for SYSTEM"; exit 1; }'
	@echo 'potluck: import-linter' && \
		{ report=$$($(BIN)/lint-imports --no-logo) || { echo "$$report"; false; }; }
	@tools/audit

.PHONY: sbom
sbom: ## List all packages of this environment in CycloneDX (build/sbom.cdx.json)
	@tools/environment dev
	@tools/sbom

.PHONY: test-oldest
test-oldest: ## The tests without torch on the oldest versions that pyproject.toml declares
	@tools/environment dev
	@tools/without-torch --oldest $(ARGS)

.PHONY: test
test: check ## Everything in check, then all tests (ARGS="-k shared_memory" for some)
	@tools/system-packages
	@$(BIN)/pytest $(PARALLEL) $(ARGS)

# What a change breaks most often, without proofs over thousands of cases (mark costly).
FAST := tests/unit tests/architecture tests/conformance/test_links.py \
	tests/world/test_messages.py tests/world/test_ddp.py tests/world/test_elastic.py

.PHONY: test-fast
test-fast: ## The inner loop: units, rules of the source, a slice of the rest
	@tools/environment dev
	@$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not costly" $(FAST) $(ARGS)

.PHONY: test-long
test-long: ## The tests that take minutes or repeat another with other backends
	@tools/environment dev
	@tools/system-packages
	@$(SEED) $(BIN)/pytest $(PARALLEL) --long -m long $(ARGS)

.PHONY: test-components
test-components: ## The tests with Jupyter, Chromium and the like, which they install (ARGS="-k lab")
	@tools/environment dev
	@tools/system-packages
	@$(BIN)/pytest -rs tests/components $(ARGS)

.PHONY: mutants
mutants: ## Put each of 104 faults into the code: which test notices it? (an hour; ARGS="--only ring")
	@tools/environment dev
	@$(BIN)/python -m support.mutants $(ARGS)

.PHONY: bench
bench: ## All claims about speed, against Gloo, Open MPI and MLX (ARGS="--save" keeps the result)
	@tools/environment dev
	@tools/system-packages
	@$(BIN)/python benchmarks/run_all.py $(ARGS)

.PHONY: soak
soak: ## 10,000 seeds of the cluster simulator: faults, liars, bans (ARGS="--count 500")
	@tools/environment dev
	@$(BIN)/python -m support.cluster_sim $(ARGS)

.PHONY: jitter
jitter: ## The tests of whole worlds on links that dawdle, other ones each time (ARGS="-k save")
	@tools/environment dev
	@$(SEED) $(BIN)/pytest -n 2 --jitter tests/world $(ARGS)

.PHONY: attack
attack: ## All live attacks, on hosts (root), as a table
	@tools/environment dev
	@tools/system-packages
	@$(BIN)/python tests/net/attack.py $(ARGS)

.PHONY: faults
faults: ## The table of faults, on hosts (root); into docs/reliability.md and docs/security.md
	@tools/environment dev
	@tools/system-packages
	@$(BIN)/python tests/net/run.py $(ARGS)

.PHONY: torch-suite
torch-suite: ## torch's own backend tests on Gloo and potluck; writes docs/torch-backend-tests.md
	@tools/environment dev
	@$(BIN)/python tests/torch_suite/run.py

.PHONY: gpu
gpu: ## The tests that need a CUDA GPU, with the torch of PYTHON; the native core is built anew
	@tools/gpu $(ARGS)

.PHONY: docs
docs: ## Build the documentation as a site, the reference of the API included, into site/
	@tools/environment docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'potluck: to read it: $(BIN)/python -m http.server --directory site'

.PHONY: torchft-suite
torchft-suite: ## torchft's own process group tests on Gloo and potluck; writes docs/torchft-tests.md
	@tools/environment ecosystem
	@$(BIN)/python tests/torchft_suite/run.py

.PHONY: mlx-suite
mlx-suite: ## MLX's own distributed tests (MLX=a checkout of it); writes docs/mlx-tests.md
	@tools/environment dev
	@$(BIN)/python tests/mlx_suite/run.py $(MLX)

.PHONY: ecosystem
ecosystem: ## Install DeepSpeed, Ray and torchft (400 MB) and run their tests on potluck
	@tools/environment ecosystem
	@$(BIN)/pytest -q $(ARGS) tests/process/test_frameworks.py

.PHONY: native
native: ## Build the native core again after a change in native/ (seconds)
	@tools/native

.PHONY: sanitize
sanitize: ## Test the native core under the address and undefined-behaviour sanitizers
	@tools/environment dev
	@tools/sanitize

.PHONY: fuzz
fuzz: ## Hostile bytes for the native frame parser, 5 minutes (ARGS="SECONDS SEED")
	@tools/environment dev
	@tools/sanitize fuzz $(ARGS)

.PHONY: portable
portable: ## Compile the native core for ARM, macOS and Windows; run its tests on ARM (QEMU)
	@tools/environment dev
	@tools/portable $(ARGS)

.PHONY: wheels
wheels: ## Build the sdist and Linux wheels with their own OpenSSL into dist/ (Zig, Debian's sources)
	@tools/environment dev
	@tools/wheels $(ARGS)

.PHONY: test-without-torch
test-without-torch: ## The tests that need no torch, in an environment that has none (build/without-torch)
	@tools/environment dev
	@tools/without-torch $(ARGS)

.PHONY: test-without-native
test-without-native: ## Conformance and worlds without the native core: the Python engine
	@tools/environment dev
	@POTLUCK_NATIVE=0 tools/without-torch tests/conformance tests/world $(ARGS)

.PHONY: test-oldest-torch
test-oldest-torch: ## The tests of torch's part on the oldest torch declared, in a venv of its own
	@tools/oldest-torch $(ARGS)

.PHONY: clean
clean: ## Remove .venv and everything else that these commands made
	rm -rf .venv build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache
	rm -f src/potluck/_core/_native.*.so src/potluck/_core/_native_testing.*.so src/potluck/_core/_native.*.pyd
	find native/build -mindepth 1 ! -name CMakeLists.txt -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
