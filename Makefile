# The two commands a new machine needs. Each installs what is missing, configures, builds and runs.
.PHONY: demo test quick asan clean

demo:
	@scripts/setup.sh demo
	@scripts/build.sh demo
	@scripts/demo.sh

test:
	@scripts/setup.sh test
	@scripts/build.sh test
	@scripts/test.sh

quick:
	@scripts/setup.sh test
	@scripts/build.sh test
	@scripts/test.sh -L quick

asan:
	@scripts/setup.sh test
	@PRESET=asan scripts/build.sh test
	@PRESET=asan scripts/test.sh

clean:
	rm -rf build
