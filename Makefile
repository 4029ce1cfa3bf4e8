# Every verb does its own set-up. PYTHON may name another interpreter (3.11 or newer).
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: format
format:
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .
