# Task names; what they do is in scripts/.
CASES ?= 2000

.PHONY: help setup build test sanitize release-check bench check lint format cuda gpu wheel wheel-test clean

help:
	@echo "make setup    install what is missing (Debian packages, .venv with torch)"
	@echo "make build    the library, the command and the PyTorch operators, for the CPU"
	@echo "make test     every test of C++, Python, the package and the README (CASES=$(CASES) fuzzed cases per operator)"
	@echo "make sanitize what touches kernels and parsers again under ASan, UBSan and TSan (200 fuzzed cases)"
	@echo "make release-check  everything at full size, by hand before a release: 10000 cases, all under sanitizers"
	@echo "make bench    quick benchmark suites and their peers; writes report.html"
	@echo "make check    annulus check: every operator against double precision (CASES=$(CASES))"
	@echo "make lint     formatting and forbidden words;  make format rewrites the files"
	@echo "make cuda     compile and link all CUDA code (needs nvcc 13, no GPU)"
	@echo "make gpu      build, test, check, sanitize and measure on a machine with a Hopper GPU"
	@echo "make wheel    dist/annulus-*.whl, for the CPU and with CUDA;  make wheel-test also runs Python tests on the first"
	@echo "make clean    remove build/, out/ and dist/"

setup:
	@scripts/setup
build: setup
	@scripts/build cpu annulus annulus_cli annulus_python
test: setup
	@scripts/test $(CASES)
sanitize: setup
	@scripts/test 200 sanitize
release-check: export CUDA_PRESET = cuda
release-check: setup
	@scripts/test 10000
	@[ ! -x build/cpu/bin/annulus_mpi_ring ] || python3 annulus/ring_attention/test/ranks/mpi_faults.py build/cpu/bin/annulus_mpi_ring
	@scripts/test 500 sanitize-all
	@scripts/wheel --test
bench: build
	@scripts/bench
check: build
	@build/cpu/bin/annulus check --cases $(CASES)
lint:
	@scripts/lint
format:
	@scripts/lint --fix
cuda: setup
	@scripts/build cuda
gpu:
	@scripts/gpu
wheel: setup
	@scripts/wheel
wheel-test: setup
	@scripts/wheel --test
clean:
	@rm -rf build out dist
