# Every target does the set-up that it needs, once, in .venv. "make demo" and "make test" work on a fresh machine that has
# g++ >= 12 and Python >= 3.10 with its headers and venv. PYTHON=python3.12 picks another interpreter, and
# TORCH="torch --index-url https://download.pytorch.org/whl/cpu" another build of torch than pip's default.

PYTHON ?= python3
VENV := .venv
TORCH ?= $(shell $(PYTHON) -c 'import sys; print("torch==2.13.0" if sys.version_info[:2] == (3, 11) else "torch")')
CXX ?= g++

BIN := $(VENV)/bin
NATIVE := $(shell find csrc)

.PHONY: install demo test layouts lint format tsan cuda-check nvcc clean
.DELETE_ON_ERROR:

install: $(VENV)/stamp-test ## everything that the targets below need

demo: $(VENV)/stamp-train
	$(BIN)/megatron-ep train recipes/tiny_moe_cpu.yaml

test: $(VENV)/stamp-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 $(PYTEST_ARGS)
ifndef PYTEST_ARGS # torch takes its kernels by the CPU: what compares floating-point results must hold with the plainest too
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest -q -n 2 -m numerical
endif

# MEGATRON_LM: a tree of Megatron-LM, of the installed megatron-core's version. About half an hour on two cores.
layouts: $(VENV)/stamp-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m layouts tests/training/test_pretrain.py

$(VENV)/stamp-torch:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("megatron_ep needs Python >= 3.10, $(PYTHON) is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install setuptools pybind11 ninja
	touch $@

$(VENV)/stamp-train: EXTRAS := megatron,train
$(VENV)/stamp-test: EXTRAS := megatron,train,test
$(VENV)/stamp-train $(VENV)/stamp-test: $(VENV)/stamp-torch pyproject.toml setup.py $(NATIVE)
	$(BIN)/python -m pip install --no-build-isolation -e '.[$(EXTRAS)]'
	touch $@

# ---- style

CLANG_FORMAT = find csrc tests -name '*.h' -o -name '*.inl' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' | xargs -r $(BIN)/clang-format

lint: $(VENV)/stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror

format: $(VENV)/stamp-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(CLANG_FORMAT) -i

# ---- ThreadSanitizer: tests/csrc/tsan_NAME.cpp must run clean, tests/csrc/tsan_NAME_negative.cpp must be reported

TSAN_FLAGS := -std=c++20 -O1 -g -fsanitize=thread -Wall -Wextra -Werror=return-type -Wno-psabi -Icsrc -MMD -MP
TSAN_HOST := $(wildcard csrc/exec/host/*.cpp csrc/fabric/*.cpp csrc/router/*/host/*.cpp csrc/launch/host/*.cpp)
TSAN_TESTS := $(patsubst %.cpp,build/tsan/%,$(wildcard tests/csrc/tsan_*.cpp))

tsan: $(TSAN_TESTS)
	tests/csrc/run_tsan.sh $^

$(TSAN_TESTS): %: %.o build/tsan/host.a
	$(CXX) -fsanitize=thread $^ -lrt -lpthread -o $@

build/tsan/host.a: $(TSAN_HOST:%.cpp=build/tsan/%.o)
	rm -f $@
	ar rcs $@ $^

build/tsan/%.o: %.cpp Makefile
	@mkdir -p $(@D)
	$(CXX) $(TSAN_FLAGS) -c $< -o $@

# ---- every kernel compiled for sm_90a and sm_100a, its registers held to tests/packaging/cuda_budget.txt; those over NVSHMEM and NCCL where PYTHON has
# the wheels with their headers

NVCC := $(firstword $(shell command -v nvcc; ls "$$CUDA_HOME/bin/nvcc" /usr/local/cuda/bin/nvcc 2>/dev/null))
NVCC_FLAGS := -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -gencode=arch=compute_100a,code=sm_100a -Xptxas -v --expt-relaxed-constexpr -Icsrc
wheel = $(shell $(PYTHON) -c 'from importlib.util import find_spec as find; found = find("nvidia") and find("nvidia.$(1)"); print(found.submodule_search_locations[0] if found else "")')
NVSHMEM := $(call wheel,nvshmem)
NCCL := $(wildcard $(call wheel,nccl)/include/nccl_device.h)
CUDA_SOURCES := $(wildcard csrc/launch/cuda/*.cu csrc/fabric/cuda/*.cu csrc/router/launch/cuda/*.cu)
CUDA_SOURCES += $(if $(NVSHMEM),$(wildcard csrc/launch/nvshmem/*.cu)) $(if $(NCCL),$(wildcard csrc/launch/nccl/*.cu))
CUDA_BUDGETS := tests/packaging/cuda_budget.txt $(if $(NVSHMEM),tests/packaging/cuda_budget_nvshmem.txt)
PTXAS_LOGS := $(CUDA_SOURCES:%.cu=build/cuda-check/%.ptxas)

cuda-check: $(PTXAS_LOGS) | nvcc
	cat $(CUDA_BUDGETS) > build/cuda-check/budget.txt
	$(PYTHON) tests/packaging/cuda_budget.py build/cuda-check/budget.txt $^

build/cuda-check/csrc/launch/nvshmem/%.ptxas: NVCC_FLAGS += -rdc=true -diag-suppress=3012,3013 -I$(NVSHMEM)/include
build/cuda-check/csrc/launch/nccl/%.ptxas: NVCC_FLAGS += -I$(dir $(NCCL))

nvcc:
	@test -n '$(NVCC)' || { echo 'nvcc was not found in PATH, CUDA_HOME or /usr/local/cuda' >&2; exit 1; }

build/cuda-check/%.ptxas: %.cu Makefile | nvcc
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -MD -MP -MT $@ -MF $(@:.ptxas=.d) -c $< -o $(@:.ptxas=.o) > $@ 2>&1 || { cat $@ >&2; exit 1; }

clean:
	rm -rf build

-include $(shell find build/tsan build/cuda-check -name '*.d' 2>/dev/null)
