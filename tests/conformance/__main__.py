"""Runs the areas and prints a table of counts: `python -m tests.conformance [AREA ...]`.

Exit status: 1 where a failure is not in known.toml, or where an entry of it fails no longer.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
import time
import traceback

from tests.conformance import areas
from tests.conformance.packages import Packages
from tests.conformance.report import Report, read_known, surprises


def main() -> int:
    names = sorted(module.name for module in pkgutil.iter_modules(areas.__path__))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("area", nargs="*", choices=[[], *names], help="areas to run; all of them without any")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each refusal and each failure")
    options = parser.parse_args()
    os.environ |= {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    known, packages, unexpected = read_known(), Packages(), list[str]()
    print(f"{'area':<24}{'passed':>8}{'refused':>9}{'failed':>8}{'seconds':>9}")
    for name in options.area or names:
        report, began = Report(name), time.monotonic()
        try:
            importlib.import_module(f"tests.conformance.areas.{name}").run(report, packages)
        except Exception as error:
            traceback.print_exc()
            report.fails("(the area itself)", repr(error))
        seconds = time.monotonic() - began
        counts = (report.passed, len(report.refused), len(report.failures), f"{seconds:.0f}")
        print("{:<24}{:>8}{:>9}{:>8}{:>9}".format(name, *counts), flush=True)
        if options.verbose:
            for kind, found in (("refused", report.refused), ("failed", report.failures)):
                for case, reason in found.items():
                    print(f"  {kind}: {case}: {reason}")
        unexpected += surprises(report, known.get(name, {}))
    print("\n".join(unexpected))
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
