"""Every test that docs/known-reports.md names exists. Usage: known_reports.py SOURCE_DIR"""

import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
named = re.findall(r"`([A-Z]\w+)(?:\.([A-Z]\w+))?`", (root / "docs/known-reports.md").read_text())
known, suites = set(), set()
for path in [*root.glob("src/**/*_test.cc"), *root.glob("tests/**/*_test.cc")]:
    for suite, test in re.findall(r"^TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)", path.read_text(), re.MULTILINE):
        known.add((suite, test))
        suites.add(suite)
if len(named) < 40:
    sys.exit("docs/known-reports.md names hardly any test: was its form changed?")
missing = [f"{s}.{t}" if t else s for s, t in named if (s, t) not in known and not (t == "" and s in suites)]
for name in missing:
    print(f"docs/known-reports.md names {name}, which is no test", file=sys.stderr)
print(f"{len(named) - len(missing)} of {len(named)} named tests exist")
sys.exit(1 if missing else 0)
