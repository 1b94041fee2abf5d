# make test      the whole suite on a fresh machine: makes .venv, installs, runs          (a few minutes on two cores);
#                make test SLOWEST=20 also prints the twenty that took longest
# make compare   mechanisms of every family on two generated tasks, into compare/: a table, a picture, a report (a few minutes)
# make lint      ruff and mypy
# make test-gpu  the laws and the kernels on a CUDA device, with the python that has torch there; JOBS=8 with
#                pytest-xdist; PART=1/2, then PART=2/2, where the time for a command is short
# make bench     the growth, stream, peer and recall results, and the tables in the docs
# make tables    what is generated: tables and the gallery of the docs, and the table of `regard list`
# make docs     the documentation site, into build/site; a warning is an error              (half a minute)
# make mutants   breaks the library on purpose, one defect at a time: do the laws notice?

VENV ?= .venv
PY = $(VENV)/bin/python
JOBS ?= 2
# One thread a worker: two workers with two threads each would fight over two cores.
THREADS = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Byte code is kept whatever the environment says: else every process of a test compiles all of src and tests again.
KEPT = PYTHONDONTWRITEBYTECODE=

.PHONY: test compare lint test-gpu bench mutants tables docs clean

$(VENV)/ready: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

test: $(VENV)/ready
	$(THREADS) $(KEPT) $(PY) -m pytest -n $(JOBS) --dist worksteal $(if $(SLOWEST),--durations=$(SLOWEST))

# Stopped and started again, it goes on from the cells that are there.
compare: $(VENV)/ready
	$(VENV)/bin/regard compare --out compare $(COMPARE)

lint: $(VENV)/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Runs in whatever python has a CUDA torch and pytest: nothing is installed. JOBS workers where that python has pytest-xdist.
GPU_LAWS = laws layer_weights packed_documents precision limits positions padding states attend caches transforms
GPU_KERNELS = band_kernels causal_exp graph_tiles two_streams feature_kernels fused_blocks depthwise position_product backends triton_tiles linear_backends linear_kernels delta_triton bucket_backends pair_backends small_kernels mix_blocks kernel_launch decode_step graphed_step graphed_decoder nat_decoder
GPU_WORKERS = $(shell python3 -c "import xdist" 2>/dev/null && echo "-n $(JOBS) --dist worksteal")
test-gpu:
	PYTHONPATH=src REGARD_DEVICE=cuda python3 -m pytest $(GPU_WORKERS) -rfE --tb=short -p no:cacheprovider -p no:benchmark $(if $(PART),--part $(PART)) $(patsubst %,tests/test_%.py,$(GPU_KERNELS) $(GPU_LAWS))

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
	$(PY) docs/make_lra.py
	$(PY) docs/make_images.py

docs: $(VENV)/ready
	$(THREADS) $(PY) docs/make_site.py

mutants: $(VENV)/ready
	$(THREADS) $(PY) tests/mutants.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build
