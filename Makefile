# Every target does one thing; loops and string surgery live in Python. `make` alone prints this help.
MAKEFLAGS += --warn-undefined-variables
.DELETE_ON_ERROR:
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

RUN       ?= examples/digits.yaml
GPUS      ?=
WORKERS   ?=
NAMESPACE ?= trainyard
# The tag is a hash of what the image is made of: a changed trainer is a new image.
IMAGE     ?= 127.0.0.1:5000/trainyard:$(shell find train_image -type f -not -name '*.pyc' | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-12)
# The image's name in a release; its tag is the version.
RELEASE_IMAGE ?= trainyard
# Where `plan` and `render` take the platform from: `cluster` (the namespace's own), `packaged`
# (the chart at its default values), or a file.
PLATFORM  ?= $(if $(HAS_CLUSTER),cluster,packaged)
# Values for the chart; on the test cluster small ones.
VALUES    ?= $(if $(TEST_CLUSTER),tests/cluster/values.yaml)
SET       ?=
FOLLOW    ?=
KUBECONFIG ?=
TRAINYARD_CLUSTER_HOME ?=
TEST      ?=
# That run tests at a time; 0 for the one that pytest itself is.
TEST_PROCESSES ?= 2
# Where CI is set, `make test` also runs the tests that are marked `ci`.
CI        ?=
QUICK      = not slow$(if $(CI),, and not ci)
BENCH     ?=
MINUTES   ?= 90
# Which of the tests on a cluster: see the markers in pyproject.toml.
E2E       ?= not drills and not full
# Of the groups of tests/e2e/groups.py, the only one that `e2e` runs; empty for all.
GROUP     ?=
# The groups that have a cluster of their own, with other systems in it.
SUITES    := alerts git queue
KUBERAY   := 1.6.2

# helm and kubectl of one's own come first, then those that the test cluster built.
CLUSTER_HOME := $(if $(TRAINYARD_CLUSTER_HOME),$(TRAINYARD_CLUSTER_HOME),$(HOME)/.cache/trainyard/cluster)
export PATH  := $(PATH):$(CLUSTER_HOME)/bin

BIN        := .venv/bin
TRAINYARD  := $(BIN)/trainyard
IN_CLUSTER := tests/cluster/run
RESOURCES   = $(if $(GPUS),--gpus '$(GPUS)') $(if $(WORKERS),--workers '$(WORKERS)') $(foreach s,$(SET),--set '$(s)')
RUN_IMAGE   = $(if $(filter command line environment,$(origin IMAGE)),--set 'image=$(IMAGE)')
TEST_CLUSTER = $(if $(OTHER_CLUSTER),,$(wildcard $(CLUSTER_HOME)/kubeconfig))
HAS_CLUSTER = $(wildcard $(if $(KUBECONFIG),$(subst :, ,$(KUBECONFIG)),$(CLUSTER_HOME)/kubeconfig $(HOME)/.kube/config))
OTHER_CLUSTER = $(filter-out $(CLUSTER_HOME)/kubeconfig,$(KUBECONFIG))
PLATFORM_FILE = $(if $(filter-out cluster packaged,$(PLATFORM)),--platform '$(PLATFORM)')
LOCK       := $(BIN)/uv pip compile --quiet --universal --python-version 3.10 --fork-strategy fewest \
  --generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock'

##@ On this machine

.PHONY: help setup train test test-slow lint
help: ## Print this help
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.complete ## Make .venv with all that `train` and `test` need

.venv/.complete: requirements.txt pyproject.toml
	@if command -v uv >/dev/null; then \
	  uv venv --quiet --allow-existing .venv && \
	  uv pip sync --quiet --compile-bytecode --python $(BIN)/python --require-hashes requirements.txt && \
	  uv pip install --quiet --python $(BIN)/python --no-deps --editable . ; \
	else \
	  python3 -m venv .venv && \
	  $(BIN)/pip install --quiet --require-hashes --requirement requirements.txt && \
	  $(BIN)/pip install --quiet --no-deps --editable . ; \
	fi
	@touch $@

train: setup ## Train RUN on a local Ray:  make train RUN=examples/digits.yaml
	$(TRAINYARD) train $(RUN) $(RESOURCES)

test: setup ## Run the quick tests that need no cluster:  make test TEST=tests/launcher
	$(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist worksteal -m "$(QUICK)" $(if $(TEST),$(TEST),tests)

test-slow: setup ## Run the others, which take many seconds each
	$(BIN)/pytest -m "slow or ci" $(if $(TEST),$(TEST),tests)

lint: setup ## Check style, types, and which room imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

##@ On a cluster

.PHONY: operator platform image push plan render deploy status logs stop
operator: ## Install upstream's KubeRay operator by helm
	$(IN_CLUSTER) helm upgrade --install kuberay-operator kuberay-operator \
	  --repo https://ray-project.github.io/kuberay-helm --version $(KUBERAY) \
	  --namespace kuberay-system --create-namespace --wait

platform: ## Install or upgrade our chart in NAMESPACE:  make platform IMAGE=registry/trainyard:1 VALUES=my.yaml
	$(IN_CLUSTER) helm upgrade --install trainyard charts/trainyard \
	  --namespace $(NAMESPACE) --create-namespace --set image=$(IMAGE) $(if $(VALUES),--values $(VALUES))

image: ## Build the image:  make image IMAGE=registry/trainyard:1
	tests/cluster/image.sh $(IMAGE)

push: ## Push the image
	tests/cluster/image.sh $(IMAGE) --push

plan: setup ## Print the numbers of RUN:  make plan GPUS=16
	@$(IN_CLUSTER) $(TRAINYARD) plan $(RUN) $(RESOURCES) $(RUN_IMAGE) $(if $(filter cluster,$(PLATFORM)),--from-cluster,$(PLATFORM_FILE)) --namespace $(NAMESPACE)

render: setup ## Write the objects of RUN as YAML:  make render GPUS=16 > run.yaml
	@$(IN_CLUSTER) $(TRAINYARD) render $(RUN) $(RESOURCES) $(RUN_IMAGE) $(if $(filter cluster,$(PLATFORM)),--from-cluster,$(PLATFORM_FILE)) --namespace $(NAMESPACE)

deploy: setup ## Train RUN on the cluster and wait:  make deploy GPUS=16
	@$(IN_CLUSTER) $(TRAINYARD) submit $(RUN) $(RESOURCES) $(RUN_IMAGE) $(PLATFORM_FILE) --namespace $(NAMESPACE)

status: setup ## Show the runs of NAMESPACE
	@$(IN_CLUSTER) $(TRAINYARD) status --namespace $(NAMESPACE)

logs: setup ## Print the driver's log of RUN:  make logs FOLLOW=1
	@$(IN_CLUSTER) $(TRAINYARD) logs $(RUN) $(if $(FOLLOW),--follow) --namespace $(NAMESPACE)

stop: setup ## Stop RUN; it resumes with the next deploy
	@$(IN_CLUSTER) $(TRAINYARD) stop $(RUN) --namespace $(NAMESPACE)

##@ A real Kubernetes on this machine (root, Linux)

.PHONY: cluster cluster-build cluster-tools cluster-up cluster-down e2e e2e-full $(SUITES:%=e2e-%) drills soak
cluster: cluster-up ## Build and start it, with the operator, the image and the platform in it
	@$(MAKE) --no-print-directory image push platform

cluster-build: ## Build its servers and tools (20 to 30 minutes the first time)
	python3 tests/cluster/cluster.py build
	go -C tests/charts/crds mod download
	go -C tests/cluster/tools/kubernetes mod download k8s.io/pod-security-admission
	go -C tests/e2e/old_kuberay mod download github.com/ray-project/kuberay/ray-operator

cluster-tools: # What tests start themselves: they run in the cluster's network, from which nothing can be fetched
	$(if $(OTHER_CLUSTER),,python3 tests/cluster/cluster.py build faultfs kwok)

cluster-up: cluster-build ## Build and start it alone
	python3 tests/cluster/cluster.py up

cluster-down: ## Stop exactly what `cluster` started
	python3 tests/cluster/cluster.py down

e2e-full: E2E = not drills
e2e-full: e2e ## The same, and all that takes minutes

e2e: setup cluster-tools ## Prove the whole way on a real cluster, this one or that of KUBECONFIG:  make e2e GROUP=sweep
	@$(if $(OTHER_CLUSTER),$(if $(filter 127.0.0.1:%,$(IMAGE)),$(error KUBECONFIG names a cluster of yours: say with IMAGE= where its nodes can pull the image)),$(MAKE) --no-print-directory cluster-up)
	@$(MAKE) --no-print-directory image push
	$(IN_CLUSTER) $(BIN)/pytest tests/e2e --e2e -m "$(E2E)" --timeout 900 --durations 0 --durations-min 5 --image $(IMAGE) $(if $(GROUP),--group '$(GROUP)')
	@$(if $(filter $(SUITES),$(GROUP)),$(MAKE) --no-print-directory e2e-$(GROUP))

e2e-alerts: EXTRAS = --monitoring
e2e-alerts: e2e-suite-alerts ## Prove the alerts with Prometheus and Alertmanager, which then are in this machine's cluster

e2e-git: EXTRAS = --kueue --flux
e2e-git: e2e-suite-git ## Prove runs that are kept in Git, with Flux and Kueue

e2e-queue: EXTRAS = --kueue
e2e-queue: cluster-tools e2e-suite-queue ## Prove the queues with Kueue

e2e-suite-%: setup image
	python3 tests/cluster/cluster.py up $(EXTRAS)
	@$(MAKE) --no-print-directory push
	$(IN_CLUSTER) $(BIN)/pytest tests/e2e/$* --e2e --suite $* --timeout 600 --durations 0 --durations-min 5 --image $(IMAGE)

drills: setup cluster-tools cluster-up image push ## Strike small runs with every fault there; build/drills.json has what that cost
	$(IN_CLUSTER) $(BIN)/pytest tests/e2e/test_drills.py tests/e2e/test_storage_drills.py tests/e2e/test_lost_nodes.py --e2e --timeout 3600 --durations 0 --image $(IMAGE)

soak: setup cluster-up image push platform ## Strike a run every 1 to 3 minutes:  make soak MINUTES=90
	@mkdir -p build
	$(IN_CLUSTER) $(TRAINYARD) soak $(RUN) --minutes '$(MINUTES)' --beside --report build/soak.json $(RESOURCES) --namespace $(NAMESPACE)

##@ On a GPU machine

# A bare machine has its own Python, with torch for its driver.
GPU_PYTHON ?= $(if $(wildcard .venv/.complete),$(BIN)/python,python3)
GPU_PYTHON_VERSION ?=
GPU_TORCH  ?=

.PHONY: gpu gpu-wheels
gpu: ## Measure and test on this machine's CUDA GPU, and write docs/results/gpu.json and .md
	$(GPU_PYTHON) -m tests.gpu

gpu-wheels: setup ## Download what `gpu` needs on a bare machine:  make gpu-wheels GPU_PYTHON_VERSION=3.12
	$(BIN)/python -m tests.gpu.wheels $(if $(GPU_PYTHON_VERSION),--python '$(GPU_PYTHON_VERSION)') $(if $(GPU_TORCH),--torch '$(GPU_TORCH)')

##@ The project itself

.PHONY: dist dist-packages dist-image docs docs-serve screenshots golden lock bench compare fault-table clean
dist: dist-packages dist-image ## Build all that a user installs into dist/: wheel, sdist, chart, image with its bill of materials, checksums
	$(BIN)/python -m release checksums

dist-packages: setup ## Build the wheel, the sdist and the packaged chart into dist/
	rm -rf dist
	$(BIN)/python -m release packages

dist-image: setup # The image goes to buildah's storage, under the version as its tag
	rm -rf build/inventory
	tests/cluster/image.sh $(RELEASE_IMAGE):$$($(BIN)/python -m release version) --inventory build/inventory
	$(BIN)/python -m release bill $(RELEASE_IMAGE):$$($(BIN)/python -m release version) build/inventory

docs: setup ## Build the documentation into build/docs (needs Python 3.11)
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --strict --clean

docs-serve: setup ## Serve the documentation on 127.0.0.1:8000 while it is edited
	$(BIN)/python docs/generate.py
	$(BIN)/zensical serve

screenshots: setup ## Take the pictures of the README anew, with tmux and chromium
	$(BIN)/python docs/screenshots.py

golden: setup ## Rewrite the golden files, the packaged platform, the JSON Schemas, and failures.md and metrics.md in docs/reference
	$(BIN)/python -m tests.golden.golden

lock: ## Compile the locked requirements from pyproject.toml
	$(LOCK) pyproject.toml --all-extras --output-file requirements.txt
	$(LOCK) train_image/requirements.in --constraint requirements.txt --output-file train_image/requirements.txt

bench: setup ## Measure speed, start-up and memory, as docs/explanation/performance.md says:  make bench BENCH=training
	$(BIN)/python -m tests.bench $(BENCH)

compare: setup ## Train in each way that there is, and write docs/results/ways.json and .md
	$(BIN)/python -m tests.bench.ways --write

fault-table: setup ## Take what `make drills` and `make soak` found over into docs/results/faults.md
	$(BIN)/python -m tests.e2e.fault_table $(if $(wildcard build/soak.json),--soak build/soak.json) build/drills.json

clean: ## Remove what `setup` made
	rm -rf .venv build dist
