# Thin: each target calls a script. `make demo` and `make test` need nothing but Python, a C++ compiler
# and make.
# HASHES=1 installs only packages whose hashes are in hashes/ (docs/decisions/0057).
VENV ?= .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard native/src/*.* native/src/sets/* native/include/thermocline/*) native/CMakeLists.txt
export VENV HASHES
# Where Python may not keep bytecode, every process of hundreds compiles what it imports.
export PYTHONDONTWRITEBYTECODE :=

BENCHMARKS := quick llama llama-gpu llama-qwen35moe llama-olmoe kt layer types lag memory published requests agent overlap overhead http http-large larger predictions experts foresight link streaming round-trip workers gpu settings speculation ranks rank-speed

.PHONY: demo test lint check install docs wheels image fuzz fuzz-api fuzz-wire reliability soak audit hashes schedules speculation parallel prompts allocations sanitize check-neon check-gpu oracle clients golden stub demo-model \
	sample-trace load results picture proof-cpu gpu-proof check-benchmarks clean bench $(BENCHMARKS:%=bench-%)

demo: $(VENV)/.installed-run
	$(BIN)/thermocline demo

test: $(VENV)/.installed-dev
	scripts/test.sh

lint: $(VENV)/.installed-dev
	scripts/lint.sh

check: lint test

install: $(VENV)/.installed-dev

$(VENV)/.installed-run: pyproject.toml constraints.txt scripts/install.sh $(NATIVE)
	scripts/install.sh run

$(VENV)/.installed-dev: pyproject.toml constraints.txt scripts/install.sh $(NATIVE)
	scripts/install.sh dev
	touch $(VENV)/.installed-run

# The reference of all public names, into build/docs.
docs:
	scripts/docs.sh

# dist/: wheels for other machines and an sdist, checked and tried in a bare Debian. As root, with mmdebstrap and a
# network; some ten minutes. scripts/wheel.sh builds one wheel for one Python.
wheels: $(VENV)/.installed-dev
	scripts/wheels.sh
	THERMOCLINE_PACKAGES=dist scripts/test.sh tests/packages/test_packages.py --timeout 600 -o faulthandler_timeout=0

# The Dockerfile's steps in a bare Debian, up to a server that answers as nobody in particular: some ten minutes.
image: $(VENV)/.installed-dev
	THERMOCLINE_PACKAGES=image scripts/test.sh tests/packages/test_image.py --timeout 1200 -o faulthandler_timeout=0

# 20,000 mutated model files; the test suite runs 2,000.
fuzz: $(VENV)/.installed-dev
	THERMOCLINE_FUZZ_FILES=20000 scripts/test.sh tests/unit/modelfile/test_fuzz.py --timeout 3000

# 10,000 broken frames of the workers' protocol, and 100 killed workers; the test suite runs 1,000 and 2.
fuzz-wire: $(VENV)/.installed-dev
	THERMOCLINE_FUZZ_FRAMES=10000 THERMOCLINE_WORKER_KILLS=50 scripts/test.sh \
		tests/unit/remote/test_wire.py tests/unit/remote/test_client.py --timeout 3000

# 5,000 malformed bodies, and hundreds of requests made from /openapi.json for each of its operations.
fuzz-api: $(VENV)/.installed-dev
	THERMOCLINE_API_BODIES=5000 THERMOCLINE_API_EXAMPLES=300 scripts/test.sh \
		tests/server/core/test_refusals.py tests/server/core/test_openapi.py --timeout 3000

# The tests of docs/reliability.md at full size, one to two hours; ARGS="--only R11" is one point. Writes
# docs/results/reliability.md.
reliability: $(VENV)/.installed-dev
	$(BIN)/python -m scripts.reliability $(ARGS)

# Are versions of constraints.txt known to be vulnerable? Needs a service on the network, and says so where there is none.
audit:
	scripts/audit.sh

# Write hashes/ again, after a change of constraints.txt.
hashes:
	scripts/hashes.sh

# One server under everything at a time for a day.
soak: $(VENV)/.installed-dev
	THERMOCLINE_SOAK_SECONDS=$${THERMOCLINE_SOAK_SECONDS:-86400} $(BIN)/python -m pytest tests/reliability/test_soak.py

# Ten times as many random schedules, each combination of the fixed ones, and every architecture on a device: the same
# answers whatever is in flight, shared, preempted or hot. And sets that take the dense kernels of others.
schedules: $(VENV)/.installed-dev
	THERMOCLINE_SCHEDULES=10 scripts/test.sh tests/e2e/test_any_schedule.py tests/e2e/test_gpu_experts.py \
		tests/e2e/test_device_non_expert.py tests/e2e/test_shared_step_on_device.py \
		tests/e2e/test_schedule_invariance.py tests/e2e/test_demo_model.py \
		tests/unit/pipeline/scheduling/test_scheduler_random.py \
		tests/unit/kernels/test_dense.py tests/unit/kernels/test_latent.py tests/unit/kernels/test_delta.py \
		tests/unit/kernels/test_recurrent.py tests/unit/kernels/test_routing.py --timeout 3000

# Ten times as many random requests with drafts: each answer as without, to the bit.
speculation: $(VENV)/.installed-dev
	THERMOCLINE_SPECULATION=10 scripts/test.sh tests/e2e/test_speculation.py tests/e2e/test_file_drafters.py \
		tests/e2e/test_next_token_drafts.py tests/e2e/test_device_drafts.py --timeout 3000

# Ranks of torchrun: every mesh and architecture, and 100 kills and 100 stops under load, with and without agents; an hour.
parallel: $(VENV)/.installed-dev
	THERMOCLINE_PARALLEL=1 scripts/test.sh tests/e2e/test_parallel.py tests/e2e/test_divided_ranks.py tests/unit/parallel --timeout 3000
	THERMOCLINE_RANK_LOSSES=$${THERMOCLINE_RANK_LOSSES:-100} $(BIN)/python -m pytest tests/reliability/test_ranks.py

# 10,000 prompts through LLM.generate_each, in order and with flat memory; the test suite has 300.
prompts: $(VENV)/.installed-dev
	THERMOCLINE_LLM_PROMPTS=10000 scripts/test.sh tests/e2e/test_llm.py --timeout 3000

# Every plan against what the engine takes: published models, device sizes, contexts and requests; and every one of
# those models opened. Some three minutes.
allocations: $(VENV)/.installed-dev
	THERMOCLINE_ALLOCATIONS=all scripts/test.sh tests/e2e/test_device_allocation.py \
		tests/e2e/test_published_models.py --timeout 600

# The native code under the address, undefined-behaviour and thread sanitizers, with 100,000 steps that a device and
# the CPU share: some fifteen minutes.
sanitize: $(VENV)/.installed-dev
	scripts/sanitize.sh

# The NEON kernels in an emulator, where a cross compiler is installed.
check-neon:
	scripts/check_neon.sh

# Every GPU kernel compiled for every generation of GPUs, and every block format for three of them: some minutes, and
# no GPU. The test suite compiles each kernel for one generation.
check-gpu: $(VENV)/.installed-dev
	THERMOCLINE_GPU_TARGETS=all scripts/test.sh tests/unit/kernels/gpu/test_device_compiles.py --timeout 3000

# Against transformers and llama.cpp, in an environment of their own.
oracle:
	scripts/oracle.sh

# The server against clients from PyPI and npm, in an environment of their own.
clients: $(VENV)/.installed-run
	scripts/clients.sh

# Write again the expected values that the suite checks without those packages.
golden:
	scripts/oracle.sh golden

stub: $(VENV)/.installed-dev
	$(BIN)/python -m nanobind.stubgen -q -m thermocline.kernels._native -o thermocline/kernels/_native.pyi

# Train the demo model again: some minutes on two cores.
demo-model: $(VENV)/.installed-dev
	$(BIN)/python -m scripts.demo_model.train
	$(BIN)/python -m scripts.demo_model.train_block out/demo-model/demo-moe.gguf

# The README's picture and the trace that it is of: needs Chromium, and a model of 3.5 GB that is written first.
picture: $(VENV)/.installed-dev
	scripts/timeline_picture.sh

# The sample in traces/.
sample-trace: $(VENV)/.installed-run
	scripts/sample_trace.sh

# Benchmarks of CPU compute: docs/benchmarks.md. ARGS go to the benchmark; build/models gets the models
# (3.5 GB, and 18.6 GB for bench-memory). bench-llama builds llama.cpp the first time, bench-kt downloads KTransformers' kernels.
bench: bench-layer bench-types bench-lag bench-llama

$(BENCHMARKS:%=bench-%): bench-%: $(VENV)/.installed-dev
	scripts/bench.sh $* $(ARGS)

# Every benchmark to its end on a tiny model, and what it wrote looked at; the test suite runs those of a second.
check-benchmarks: $(VENV)/.installed-dev
	THERMOCLINE_BENCHMARKS=1 scripts/test.sh tests/benchmarks --timeout 600

# Write the figures of README.md and docs/benchmarks.md from docs/results; the test suite checks them.
results: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.results $(ARGS)

# The server with 64 streams for eight minutes; the test suite runs 16 for 10 s.
load: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.server_load $(ARGS)

# Are the kernels right and fast on this processor? On this GPU? At most 8 minutes each, for machines that one has for
# an hour. ARGS="--device torch-cpu" rehearses the second without a GPU.
proof-cpu: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.proof_cpu $(ARGS)

gpu-proof: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.gpu_proof $(ARGS)

clean:
	rm -rf build $(VENV)
