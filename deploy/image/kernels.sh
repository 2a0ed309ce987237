#!/bin/sh
# Puts the native kernels into the package: what `make wheels` compiled, or compiled here, by a GCC from the distribution
# where there is none. Without them the image serves by torch, only slower: this tries, says so and never fails.
folder=model/native/prebuilt

compile() { python3 -m triptych.model.native.build --portable "$folder"; }
fetch() {
    echo "no GCC in this stage: asking the distribution for one"
    apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=20 update &&
        apt-get -qq -y --no-install-recommends install gcc libc6-dev >/dev/null
}

mkdir -p "$folder"
find . -maxdepth 1 -name 'native-*.so' -exec mv {} "$folder" ';'
compile || { ! command -v gcc >/dev/null && fetch && compile; } ||
    echo "WARNING: no native kernels in this image: torch computes alone, more slowly. Run 'make wheels' where GCC is."
exit 0
