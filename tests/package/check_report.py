"""Checks the report of `accelerator_check sizes=tiny hardware=cpu`: every step must have succeeded, and only tests that need
an accelerator or PyTorch may be skipped.

  python3 tests/package/check_report.py FOLDER
"""
import json, os, re, sys

folder = sys.argv[1]
with open(os.path.join(folder, 'report.json')) as f:
    report = json.load(f)
with open(os.path.join(folder, 'report.md')) as f:
    text = f.read()
for step in report['steps']:
    assert step['well'], step
for kind in ('records', 'collectives', 'random numbers', 'attention', 'goldens'):
    tests = report['tests'][kind]
    assert tests['passed'] > 0 and not tests['failed'] and tests['end'] == 'exit status 0', (kind, tests)
    with open(os.path.join(folder, 'logs', kind.replace(' ', '_') + '.txt')) as f:
        skipped = re.findall(r'\[  SKIPPED \] (\S+)', f.read())
    assert not skipped, (kind, skipped)
speed = report['speed']['quickstart 48']
assert speed['step_s'] > 0 and speed['sampling']['warm']['step_s'] > 0, speed
assert report['trace']['steps'] == 10, report['trace']
assert len(report['resumed']) == 2, report['resumed']
for run, files in report['resumed'].items():
    assert files['same_files'] == files['files'] > 0, (run, files)
skipped = [line for line in text.splitlines() if 'skipped' in line or 'ended early' in line]
assert len(skipped) == 1 and skipped[0].startswith('PyTorch: skipped'), skipped
print(f"accelerator_check: {len(report['steps'])} steps ended well")
