"""Checks the SPDX file of a package against its files.

  python3 tests/package/check_bill.py FOLDER
"""
import hashlib, json, os, re, sys

folder = os.path.realpath(sys.argv[1])
with open(os.path.join(folder, 'share/maxdiffusion/sbom.spdx.json')) as f:
    bill = json.load(f)
assert bill['spdxVersion'] == 'SPDX-2.3' and bill['dataLicense'] == 'CC0-1.0', bill['spdxVersion']
found = {}
for path, _, names in os.walk(folder):
    for name in names:
        file = os.path.join(path, name)
        with open(file, 'rb') as f:
            found['./' + os.path.relpath(file, folder)] = hashlib.sha256(f.read()).hexdigest()
del found['./share/maxdiffusion/sbom.spdx.json']
listed = {f['fileName']: c['checksumValue'] for f in bill['files'] for c in f['checksums'] if c['algorithm'] == 'SHA256'}
assert listed == found, set(listed.items()) ^ set(found.items())
identities = [e['SPDXID'] for e in bill['packages'] + bill['files']]
assert len(set(identities)) == len(identities), 'an identity is there twice'
assert all(re.fullmatch(r'SPDXRef-[A-Za-z0-9.-]+', i) for i in identities)
for package in bill['packages']:
    assert package['versionInfo'] and package['licenseDeclared'] != 'NOASSERTION', package
owned = {r['relatedSpdxElement'] for r in bill['relationships'] if r['relationshipType'] == 'CONTAINS'}
assert owned == {f['SPDXID'] for f in bill['files']}
print(f"{len(bill['packages'])} packages, {len(bill['files'])} files in the bill of materials")
