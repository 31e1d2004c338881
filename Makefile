# Every target does the set-up that it needs, once, in .venv. "make demo" and "make test" work on a fresh machine that has
# g++ >= 12 and Python >= 3.10 with its headers and venv. PYTHON=python3.12 picks another interpreter, and
# TORCH="torch --index-url https://download.pytorch.org/whl/cpu" another build of torch than pip's default.

PYTHON ?= python3
VENV := .venv
TORCH ?= $(shell $(PYTHON) -c 'import sys; print("torch==2.13.0" if sys.version_info[:2] == (3, 11) else "torch")')
CXX ?= g++
PYTEST_ARGS ?=

BIN := $(VENV)/bin
NATIVE := $(shell find csrc)

.PHONY: install demo test lint format tsan cuda-check nvcc clean
.DELETE_ON_ERROR:

install: $(VENV)/stamp-test ## everything that the targets below need

demo: $(VENV)/stamp-train
	$(BIN)/megatron-ep train recipes/tiny_moe_cpu.yaml

test: $(VENV)/stamp-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 $(PYTEST_ARGS)

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

CLANG_FORMAT = find csrc tests -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' | xargs -r $(BIN)/clang-format

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
TSAN_HOST := $(wildcard csrc/exec/host/*.cpp csrc/fabric/*.cpp csrc/router/*.cpp csrc/launch/host/*.cpp)
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

# ---- every kernel compiled for sm_90a, its registers held to tests/cuda_budget.txt

NVCC := $(firstword $(shell command -v nvcc; ls "$$CUDA_HOME/bin/nvcc" /usr/local/cuda/bin/nvcc 2>/dev/null))
NVCC_FLAGS := -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Xptxas -v --expt-relaxed-constexpr -Icsrc
CUDA_SOURCES := $(wildcard csrc/launch/cuda/*.cu csrc/fabric/cuda/*.cu csrc/router/*.cu)
PTXAS_LOGS := $(CUDA_SOURCES:%.cu=build/cuda-check/%.ptxas)

cuda-check: $(PTXAS_LOGS) | nvcc
	$(PYTHON) tests/cuda_budget.py tests/cuda_budget.txt $^

nvcc:
	@test -n '$(NVCC)' || { echo 'nvcc was not found in PATH, CUDA_HOME or /usr/local/cuda' >&2; exit 1; }

build/cuda-check/%.ptxas: %.cu Makefile | nvcc
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -MD -MP -MT $@ -MF $(@:.ptxas=.d) -c $< -o $(@:.ptxas=.o) > $@ 2>&1 || { cat $@ >&2; exit 1; }

clean:
	rm -rf build

-include $(shell find build/tsan build/cuda-check -name '*.d' 2>/dev/null)
