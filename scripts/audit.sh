#!/usr/bin/env bash
# Are versions of constraints.txt known to be vulnerable? Status 0: none is. 1: some are, listed. 2: not checked.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=build/audit
not_checked() {
  echo "NOT CHECKED: $1. Nothing is known about the versions in constraints.txt: try again with a network." >&2
  exit 2
}
if [ ! -x "$tools/bin/pip-audit" ]; then
  "${PYTHON:-python3}" -m venv "$tools"
  "$tools/bin/pip" install --quiet "pip-audit==2.10.1" || not_checked "pip-audit could not be installed"
fi
report=$tools/report.json
rm -f "$report"
status=0
"$tools/bin/pip-audit" --requirement constraints.txt --no-deps --disable-pip --progress-spinner off \
  --format json --output "$report" 2>"$tools/log" || status=$?
# With no report there was no answer, whatever the status says.
[ -s "$report" ] || not_checked "the service of vulnerabilities gave no answer ($(tail -n 1 "$tools/log" | cut -c1-200))"
set +e
"$tools/bin/python" - "$report" <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as file:
    found = json.load(file)["dependencies"]
skipped = [entry["name"] for entry in found if "skip_reason" in entry]
bad = [entry for entry in found if entry.get("vulns")]
for entry in bad:
    for fault in entry["vulns"]:
        print(f"{entry['name']} {entry['version']}: {fault['id']}, fixed in {', '.join(fault['fix_versions']) or 'none'}")
if len(skipped) == len(found):
    sys.exit(2)
print(f"{len(found) - len(skipped)} versions checked, {len(bad)} vulnerable; not checked: {', '.join(skipped) or 'none'}")
sys.exit(bool(bad))
PYTHON
status=$?
[ "$status" != 2 ] || not_checked "the service knows none of the packages"
exit "$status"
