# make train    install what is missing, make the digits example, train on it
# make judge    the same with a judge that alone says what is right: in turns with the policy, then beside it
# make motion   the same with videos: digits that move in MP4 clips, and which way they go
# make algorithms  train on the digits with every algorithm, and with the opposite reward: a table of accuracies
# make compare  the same with two images in a question and a system turn: which of two digits is larger
# make test     install what is missing, then lint, types and the tests
# make unit     the quick half of the tests: those that need neither torch nor vLLM nor Ray
# make check    lint and types only
# make parity   more layouts: every model against transformers, with the differences as a table; curves; checkpoints
# make faults   whole runs of which every kind of process is killed in each of eight phases, and what a loss of power leaves
# make endings  whole runs that are told to end, are lost whole, stand still, or must end; and another user of the machine
# make hosts    whole runs over several hosts, which are namespaces of this machine; needs root
# make host-faults  the same, in each of six phases of which a host, its Ray or its link is lost
# make mutants  300 small changes of the product, drawn at random, which some test must notice
# make explore  the tests of properties, on many new random examples
# make light    what needs no torch, on Python 3.12 and 3.13 where they are installed
# On a machine with CUDA:  make train EXTRA=gpu CONFIG=... ARGS="..."
EXTRA ?= cpu
CONFIG ?= configs/digits_cpu.yaml
ARGS ?=
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed-$(EXTRA)

BESIDE = --dist loadfile --no-loadscope-reorder# groups of files at a time (tests/conftest.py)
SLOWEST = --durations=20 --durations-min=1# listed at the end, so that whoever makes the tests slower sees it
ALONE = $$(grep -rl mark.alone tests --include='test_*.py')# to look at the other files takes as long as a test
NONE_IS_FINE = $(if $(ARGS),|| [ $$? = 5 ])# what ARGS picks may be all of one kind

export PYTHONDONTWRITEBYTECODE =# a run has twenty processes, and the tests have hundreds: what one compiled, all use

.PHONY: train judge motion compare algorithms test unit check parity faults endings hosts host-faults mutants explore light data clean
.DEFAULT_GOAL := train

$(STAMP): pyproject.toml .ci/install
	.ci/install $(VENV) $(EXTRA),examples,test
	@touch $@

data: $(STAMP)
	$(PYTHON) -m examples.digits.prepare

train: data
	$(PYTHON) -m yatt_mm.train $(CONFIG) $(ARGS)

judge: $(STAMP)
	$(PYTHON) -m examples.judge.prepare
	$(PYTHON) -m yatt_mm.train configs/judge_full_cpu.yaml $(ARGS)
	$(PYTHON) -m yatt_mm.train configs/judge_partial_cpu.yaml $(ARGS)

motion: $(STAMP)
	$(PYTHON) -m examples.motion.prepare
	$(PYTHON) -m yatt_mm.train configs/motion_cpu.yaml $(ARGS)

compare: $(STAMP)
	$(PYTHON) -m examples.compare.prepare
	$(PYTHON) -m yatt_mm.train configs/compare_cpu.yaml $(ARGS)

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

algorithms: data
	$(PYTHON) -m benchmarks.algorithms $(ARGS)

test: check
	$(PYTHON) -m pytest -m "not (alone or elsewhere)" -n 4 $(BESIDE) $(SLOWEST) $(ARGS) $(NONE_IS_FINE)
	$(PYTHON) -m pytest -m "alone and not elsewhere" -n 2 $(BESIDE) $(SLOWEST) $(or $(ARGS),$(ALONE)) $(NONE_IS_FINE)

unit: $(STAMP)
	$(PYTHON) -m pytest -m "not (alone or elsewhere or torch)" -n 6 $(BESIDE) $(SLOWEST) $$($(PYTHON) -m tests.import_graph --light) $(ARGS)

parity: $(STAMP)
	$(PYTHON) -m pytest tests/models tests/yatt_mm/training tests/yatt_mm/algorithms $(ARGS)
	$(PYTHON) -m pytest tests/yatt_mm/rollout tests/yatt_mm/preflight tests/yatt_mm/simulator tests/examples tests/benchmarks -m parity $(ARGS)

faults: $(STAMP)
	$(PYTHON) -m pytest -m "faults and not hosts" -n 2 $(BESIDE) $(ARGS)

endings: $(STAMP)
	$(PYTHON) -m pytest -m endings -n 2 $(BESIDE) $(ARGS)

hosts: $(STAMP)
	$(PYTHON) -m pytest tests/hosts -m "not faults" $(ARGS)

host-faults: $(STAMP)
	$(PYTHON) -m pytest tests/hosts -m faults $(ARGS)

mutants: $(STAMP)
	$(PYTHON) -m tests.mutation --out mutants.jsonl $(ARGS)

explore: $(STAMP)
	$(PYTHON) -m pytest -m hypothesis --hypothesis-profile explore $(ARGS)

light:
	.ci/light

clean:
	rm -rf runs examples/digits/data examples/judge/data examples/motion/data examples/compare/data .pytest_cache .mypy_cache .ruff_cache .hypothesis
