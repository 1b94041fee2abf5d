# make test      the whole suite on a fresh machine: makes .venv, installs, runs          (a few minutes on two cores);
#                make test SLOWEST=20 also prints the twenty that took longest
# make lint      ruff and mypy
# make test-gpu  the laws on a CUDA device, with the python that has torch there
# make bench     the growth, stream, peer and recall results, and the tables in the docs
# make tables    what is generated: tables and the gallery of the docs, and the table of `regard list`
# make mutants   breaks the library on purpose, one defect at a time: do the laws notice?

VENV ?= .venv
PY = $(VENV)/bin/python
JOBS ?= 2
# One thread a worker: two workers with two threads each would fight over two cores.
THREADS = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: test lint test-gpu bench mutants tables clean

$(VENV)/ready: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

test: $(VENV)/ready
	$(THREADS) $(PY) -m pytest -n $(JOBS) --dist worksteal $(if $(SLOWEST),--durations=$(SLOWEST))

lint: $(VENV)/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Runs in whatever python has a CUDA torch and pytest: nothing is installed.
test-gpu:
	PYTHONPATH=src REGARD_DEVICE=cuda python3 -m pytest -p no:cacheprovider -p no:benchmark tests/test_laws.py tests/test_precision.py tests/test_limits.py tests/test_positions.py tests/test_padding.py tests/test_states.py tests/test_attend.py tests/test_caches.py tests/test_transforms.py tests/test_backends.py tests/test_triton_tiles.py tests/test_linear_kernels.py tests/test_delta_triton.py tests/test_bucket_backends.py tests/test_pair_backends.py tests/test_small_kernels.py tests/test_decode_step.py

bench: $(VENV)/ready
	$(PY) benchmarks/growth.py
	$(PY) benchmarks/peers.py
	$(PY) benchmarks/stream.py
	$(PY) benchmarks/long.py
	$(PY) benchmarks/recall.py
	$(MAKE) tables

tables: $(VENV)/ready
	$(PY) docs/make_tables.py
	$(PY) docs/make_list.py
	$(PY) docs/make_gallery.py

mutants: $(VENV)/ready
	$(THREADS) $(PY) tests/mutants.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build
