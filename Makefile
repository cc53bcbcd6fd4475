PYTHON ?= python3
.PHONY: native
native:
	cmake -S . -B build/dev -G Ninja -DOCTAVO_IN_PLACE=ON -DPython_EXECUTABLE=$$(command -v $(PYTHON)) > build.log 2>&1 || (cat build.log; exit 1)
	cmake --build build/dev
