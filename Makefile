# make bench   compare custom_kernel with torch.geqrf            (make bench ARGS="--board qr_v2 --json out.json")
# make test    run the tests; those that need a GPU skip without (make test ARGS="-k reference")
# make clean   remove the virtual environment and the caches
VENV   := .venv
PYTHON ?= python3
ARGS   ?=

# load_inline looks for ninja on PATH; the environment brings its own.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: venv install bench test clean
.DEFAULT_GOAL := bench

venv: $(VENV)/bin/python

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The list that was installed is kept beside the packages and compared by content: file dates change with every checkout.
install: venv
	@cmp -s requirements.txt $(VENV)/installed.txt || { \
	    $(VENV)/bin/python -m pip install --disable-pip-version-check -r requirements.txt \
	    && cp requirements.txt $(VENV)/installed.txt; }

bench: install
	$(VENV)/bin/python eval.py $(ARGS)

test: install
	$(VENV)/bin/python -m pytest $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis __pycache__ */__pycache__ tests/*/__pycache__
