# Works on a machine with nothing but Python 3.11 to 3.13 and a C compiler: everything else goes into .venv.
# ARGS is passed on: make test ARGS="-x -k tree"; ARGS="-n 0" runs the tests in one process.

.PHONY: setup demo test soak lint docs clean

setup: .venv/.ready

.venv/.ready: pyproject.toml setup.py scripts/setup_env.sh vllm_redrafter/engine/vllm_interface.json
	bash scripts/setup_env.sh

demo: .venv/.ready
	.venv/bin/vllm-redrafter demo $(ARGS)

# Not `python -m pytest`: it puts the repository root on sys.path, and with it a plain `triton_kernels`.
# Bytecode is written: the tests' many processes would compile vLLM again and again.
test: .venv/.ready
	PYTHONDONTWRITEBYTECODE= .venv/bin/pytest tests -n 2 --dist loadscope --no-loadscope-reorder --durations=10 $(ARGS)

# 2,000 requests to a server that drafts and to plain vLLM: 157 s on one core (AVX2, 2026-11-22).
soak: .venv/.ready
	.venv/bin/python benchmarks/soak.py --requests 2000 $(ARGS)

lint: .venv/.ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

# The site, in build/site; dead links, dead anchors and pages that nothing leads to fail.
docs: .venv/.ready
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict $(ARGS)

# .venv stays: it takes minutes to build.
clean:
	rm -rf .cache build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name .venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
