# Every target does the set-up that it needs, once, in .venv. "make demo" and "make test" work on a fresh machine that has
# g++ >= 12 and Python >= 3.10 with its headers and venv. PYTHON=python3.12 takes another interpreter, and
# TORCH="torch --index-url https://download.pytorch.org/whl/cpu" another build of torch than pip's default.

PYTHON ?= python3
VENV := .venv
TORCH ?= $(shell $(PYTHON) -c 'import sys; print("torch==2.13.0" if sys.version_info[:2] == (3, 11) else "torch")')

BIN := $(VENV)/bin
NATIVE := $(shell find csrc)
# Beside other targets (-j) ninja would ask for make's own job slots, and not find them.
ALONE := env -u MAKEFLAGS

.PHONY: install native demo test nightly docs wheel lint format tsan fuzz mutants aarch64 clean
.PHONY: cuda-check cuda-check-oldest cuda-check-newest cuda-check-12.4 cuda-check-13.5

install: $(VENV)/stamp-test ## everything that the targets below need

demo: $(VENV)/stamp-train
	$(BIN)/megatron-ep train recipes/tiny_moe_cpu.yaml

# A file is run by one process: its tests share what is made once. The longest files come first (tests/conftest.py). One
# process more than the two cores that continuous integration has, because many a test waits.
PYTEST_N = -n 3 --dist loadfile --no-loadscope-reorder

test: $(VENV)/stamp-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PYTEST_N) $(PYTEST_ARGS)

# What `make test` leaves out; CONTRIBUTING.md names it. About an hour on two cores. Torch takes its kernels by the CPU:
# what compares floating-point results must hold with the plainest, too.
nightly: $(VENV)/stamp-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PYTEST_N) -m nightly
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest -q $(PYTEST_N) -m numerical

# A warning is an error: a link that leads nowhere, a docstring that does not parse.
docs: $(VENV)/stamp-docs ## the site, build/site/index.html
	PYTHONWARNINGS=ignore $(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/site

# What the documented modules import, but not this package, which would be compiled.
DOCS_NEED = import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; e = p["optional-dependencies"]; \
	print(*p["dependencies"], *e["megatron"], *e["train"], *e["docs"], sep="\n")
$(VENV)/stamp-docs: $(VENV)/stamp-torch pyproject.toml
	$(BIN)/python -c '$(DOCS_NEED)' | xargs -d '\n' $(BIN)/python -m pip install
	touch $@

$(VENV)/stamp-tools:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("megatron_ep needs Python >= 3.10, $(PYTHON) is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install pybind11 cmake ninja
	touch $@

$(VENV)/stamp-torch: $(VENV)/stamp-tools
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install setuptools
	touch $@

$(VENV)/stamp-train: EXTRAS := megatron,train
$(VENV)/stamp-test: EXTRAS := megatron,train,test
$(VENV)/stamp-train $(VENV)/stamp-test: $(VENV)/stamp-torch pyproject.toml setup.py $(NATIVE)
	$(ALONE) $(BIN)/python -m pip install --no-build-isolation -e '.[$(EXTRAS)]'
	touch $@

# What setup.py does first, for "make -j2 install native": the extension is compiled while pip fetches the rest.
native: export PATH := $(CURDIR)/$(BIN):$(PATH)
native: $(VENV)/stamp-tools
	mkdir -p $(BUILD)
	flock $(BUILD)/lock cmake -S csrc --preset default -B $(BUILD) \
		-DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	$(ALONE) flock $(BUILD)/lock cmake --build $(BUILD) -j $$(nproc)

# What it needs at least is the glibc of the machine that builds it: on an older one more machines can install it.
wheel: CUDA_HOMES ?= $(or $(CUDA_HOME),$(wildcard /usr/local/cuda))
wheel: $(VENV)/stamp-test ## dist/: the host alone, and +cu12 or +cu13 for each toolkit of CUDA_HOMES
	$(ALONE) $(BIN)/python tests/packaging/make_wheel.py dist
	set -e; for home in $(CUDA_HOMES); do $(ALONE) $(BIN)/python tests/packaging/make_wheel.py dist $$home; done

# ---- style

CLANG_FORMAT = find csrc tests -name '*.h' -o -name '*.inl' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' | xargs -r $(BIN)/clang-format

lint: $(VENV)/stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(CLANG_FORMAT) --dry-run -Werror

format: $(VENV)/stamp-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(CLANG_FORMAT) -i

# ---- C++ checks, which csrc/CMakeLists.txt and tests/csrc/CMakeLists.txt describe

BUILD = build/$(shell $(BIN)/python -c 'import sys; print(sys.implementation.cache_tag)')
tsan fuzz mutants cuda-check: export PATH := $(CURDIR)/$(BIN):$(PATH)

tsan: $(VENV)/stamp-test ## the protocol's threads under ThreadSanitizer, and a planted race that it must report
	$(ALONE) cmake --build $(BUILD) --target tsan
	ctest --test-dir $(BUILD) -L '^tsan$$' -j 2 --output-on-failure --no-tests=error

# Random clusters and programs, with failures, on all cores until the time is up. Says how many, and how to repeat a wrong one.
fuzz: SECONDS ?= 60
fuzz: $(VENV)/stamp-test
	$(ALONE) cmake --build $(BUILD) --target fuzz
	$(BUILD)/tests/fuzz seconds $(SECONDS)

# Without each fence, wait or order of the kernels in turn a lane-by-lane program must fail, and without what watches a card a program of the host. About a quarter of an hour of one core.
mutants: JOBS ?= $(shell nproc)
mutants: $(VENV)/stamp-test
	$(ALONE) cmake --build $(BUILD) --target simt nightly -j $(JOBS)
	$(BIN)/python tests/mutants.py --build $(BUILD) --jobs $(JOBS)

# In a folder of its own: with the sums of all types, of which an extension has few unless it is asked for them.
cuda-check: $(VENV)/stamp-test ## every kernel for sm_90 and sm_100a, its registers and spills within tests/packaging/cuda_budget.txt
	MEGATRON_EP_CUDA=1 MEGATRON_EP_ARCHITECTURES=90 MEGATRON_EP_DTYPES=all cmake -S csrc --preset default -B build/cuda-check \
		-DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	$(ALONE) cmake --build build/cuda-check --target cuda-check

# One kernel of each kind with the compilers of NVIDIA's wheels, held to the same budget: needs no nvcc.
cuda-check-oldest: cuda-check-12.4
cuda-check-newest: cuda-check-13.5
cuda-check-12.4: ARCHITECTURES = 80,90
cuda-check-13.5: ARCHITECTURES = 90,100
cuda-check-12.4 cuda-check-13.5: cuda-check-%: build/cuda-%/stamp
	$(BIN)/python tests/packaging/cuda_wheels/check.py $(<D) $(ARCHITECTURES) tests/packaging/cuda_budget.txt

build/cuda-%/stamp: tests/packaging/cuda_wheels/cuda-%.txt $(VENV)/stamp-tools
	$(BIN)/python -m pip install --no-deps --upgrade --target $(@D) -r $<
	touch $@

# The whole host backend for 64-bit Arm, and what of the C++ tests qemu runs in minutes.
aarch64: export PATH := $(CURDIR)/$(BIN):$(PATH)
aarch64: $(VENV)/stamp-tools ## needs g++-aarch64-linux-gnu and qemu-user
	MEGATRON_EP_CUDA=0 cmake -S csrc --preset default -B build/aarch64 \
		-DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/csrc/aarch64.cmake -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	$(ALONE) cmake --build build/aarch64 -j $$(nproc) --target _C numbering send_queue steps schedules
	ctest --test-dir build/aarch64 -L '^(numbering|send_queue|steps|schedules)$$' --output-on-failure --no-tests=error

clean:
	rm -rf build
