# make train   install what is missing, make the digits example, train on it
# make judge   the same with a judge that alone says what is right: in turns with the policy, then beside it
# make motion  the same with videos: digits that move in MP4 clips, and which way they go
# make test    install what is missing, then lint, types and all tests
# make check   lint and types only
# make light    what needs no torch, on Python 3.12 and 3.13 where they are installed
# make explore the tests of properties, on many new random examples
# make parity  every model in every layout against transformers, with the differences as a table
# On a machine with CUDA:  make train EXTRA=gpu CONFIG=... ARGS="..."
EXTRA ?= cpu
CONFIG ?= configs/digits_cpu.yaml
ARGS ?=
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed-$(EXTRA)

NONE_IS_FINE = $(if $(ARGS),|| [ $$? = 5 ])# what ARGS picks may be all of one kind

.PHONY: train judge motion test check parity explore light data clean
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

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: check
	$(PYTHON) -m pytest -m "not alone" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS) $(NONE_IS_FINE)
	$(PYTHON) -m pytest -m alone $(ARGS) $(NONE_IS_FINE)

parity: $(STAMP)
	$(PYTHON) -m pytest tests/models $(ARGS)

explore: $(STAMP)
	$(PYTHON) -m pytest -m hypothesis --hypothesis-profile explore $(ARGS)

light:
	.ci/light

clean:
	rm -rf runs examples/digits/data examples/judge/data examples/motion/data .pytest_cache .mypy_cache .ruff_cache .hypothesis
