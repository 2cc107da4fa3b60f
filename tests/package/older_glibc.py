"""Makes copies of libc.so.6 and libm.so.6 lack everything newer than glibc 2.35: a program that needs more is not loaded.

  python3 tests/package/older_glibc.py FILE …
"""
import struct, sys


def elf_hash(name):
    h = 0
    for c in name.encode():
        h = (h << 4) + c
        h = (h ^ (h & 0xF0000000) >> 24) & 0x0FFFFFFF
    return h


for file in sys.argv[1:]:
    with open(file, 'rb') as f:
        data = bytearray(f.read())
    table, = struct.unpack_from('<Q', data, 40)
    size, count, names = struct.unpack_from('<HHH', data, 58)
    rows = [struct.unpack_from('<IIQQQQIIQQ', data, table + i * size) for i in range(count)]
    text = lambda at: data[at:data.index(0, at)].decode()
    sections = {text(rows[names][4] + row[0]): row[4] for row in rows}
    at = sections['.gnu.version_d']
    while True:
        _, _, _, _, _, first, following = struct.unpack_from('<HHHHIII', data, at)
        name, = struct.unpack_from('<I', data, at + first)
        name = text(sections['.dynstr'] + name)
        if name.startswith('GLIBC_2.') and int(name[8:].split('.')[0]) > 35:
            struct.pack_into('<I', data, at + 8, elf_hash('GONE_' + name))
        if not following:
            break
        at += following
    with open(file, 'wb') as f:
        f.write(data)
