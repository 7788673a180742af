# `make demo` and `make test` need Linux with Python 3.10+ (with its venv module) and make.
PYTHON ?= python3
VENV := .venv
HOROVOD_VENV ?= .venv-horovod
BIN := $(VENV)/bin
ALGORITHMS := sync-sgd dp-sgd edp-sgd

.PHONY: demo test test-gpu test-horovod

demo: $(VENV)/.runs
	for algorithm in $(ALGORITHMS); do \
		OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc_per_node=2 \
			trainer.py --config configs/demo.yaml --algorithm $$algorithm --overwrite || exit 1; \
	done
	$(BIN)/python -m plots runs/demo --out runs/demo/report
	@echo "figures and summary are in runs/demo/report"

test: $(VENV)/.tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-gpu: $(VENV)/.tests
	$(BIN)/python -m pytest -m gpu tests/test_gpu.py

test-horovod: $(HOROVOD_VENV)/.tests
	$(HOROVOD_VENV)/bin/python -m pytest tests/test_horovod.py tests/test_without_horovod.py

# Built there for the PyTorch that is there, which takes some ten minutes of two cores.
$(HOROVOD_VENV)/.tests: requirements.txt requirements-dev.txt scripts/install_horovod.sh
	$(PYTHON) -m venv $(HOROVOD_VENV)
	$(HOROVOD_VENV)/bin/python -m pip install -r requirements-dev.txt
	scripts/install_horovod.sh $(HOROVOD_VENV)/bin/python
	touch $@

$(VENV)/.runs: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -r requirements.txt
	touch $@

$(VENV)/.tests: $(VENV)/.runs requirements-dev.txt
	$(BIN)/python -m pip install -r requirements-dev.txt
	touch $@
