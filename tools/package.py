"""Makes packages of a built program: a tar that may be unpacked anywhere, and a wheel. `./run package` calls it.

The same commit gives the same bytes: files are sorted, times are the commit's, owners are root. Every library that is not
glibc's goes in. Needs binutils, a C compiler and dpkg-query, and nothing of Python but its standard library.
"""
import argparse, base64, hashlib, io, json, lzma, os, re, struct, subprocess, sys, tarfile, tempfile, time, uuid, zipfile
from concurrent.futures import ThreadPoolExecutor

# Libraries of the machine: glibc, and the MPI library, which must match the launcher.
SYSTEM = re.compile(r'(ld-linux.*|lib(c|m|dl|pthread|rt|resolv|util|anl)|libmpich)\.so\..*')
# These libraries are used; the other ones that they link are encoders, protocols and formats which are never used, 90 MB.
# The latter are replaced by stubs with the same functions.
TRIMMED = {
    r'lib(avformat|avcodec|avutil|swresample|swscale)\.so\..*':
        r'lib(avformat|avcodec|avutil|swresample|swscale|x264|dav1d|z|bz2|lzma|m|c|stdc\+\+|gcc_s|OpenCL)\.so\..*',
    r'libcurl\.so\..*': r'lib(ssl|crypto|z|zstd|brotli.*|nghttp2|idn2|psl|c)\.so\..*',
}
# Functions of the stubs that are called and must return an empty text: whether bytes are in one of their formats.
EMPTY_TEXTS = {'gme_identify_header'}
# Data of ICU that the tokenizers and the cleaning of prompts do not read: languages, currencies, zones, code pages.
UNREAD_BY_US = re.compile(r'icudt\d+l/((coll|curr|lang|region|unit|zone|rbnf|translit)/|brkitr/.*\.(dict|res)$'
                          r'|.*\.(cnv|spp)$|(?!root|pool|res_index|supplemental|likely|key|metadata|icustd|icuver|'
                          r'numbering|plurals|dayPeriods|units|pluralRanges|grammatical|genderList)\w+\.res$)')
KEPT_OF_ICU = re.compile(r'icudt\d+l/brkitr/root\.res$')
NEWEST_GLIBC = (2, 35)

# SPDX expressions of Debian's packages, from the parts of their copyright files about the libraries.
LICENCES = {
    'brotli': 'MIT', 'bzip2': 'bzip2-1.0.6', 'cpp-httplib': 'MIT', 'curl': 'curl', 'dav1d': 'BSD-2-Clause',
    'ffmpeg': 'GPL-2.0-or-later', 'fmtlib': 'MIT', 'fonts-dejavu': 'Bitstream-Vera', 'fonts-noto-color-emoji': 'OFL-1.1',
    'freetype': 'FTL', 'gcc-12': 'GPL-3.0-or-later WITH GCC-exception-3.1', 'glib2.0': 'LGPL-2.1-or-later',
    'google-perftools': 'BSD-3-Clause', 'graphite2': 'LGPL-2.1-or-later', 'harfbuzz': 'MIT-Modern-Variant',
    'highwayhash': 'Apache-2.0', 'icu': 'ICU', 'libidn2': 'LGPL-3.0-or-later OR GPL-2.0-or-later',
    'libjpeg-turbo': 'BSD-3-Clause AND IJG', 'libpng1.6': 'libpng-2.0', 'libpsl': 'MIT',
    'libunistring': 'LGPL-3.0-or-later OR GPL-2.0-or-later', 'libwebp': 'BSD-3-Clause', 'libzstd': 'BSD-3-Clause',
    'nghttp2': 'MIT', 'ocl-icd': 'BSD-2-Clause', 'onednn': 'Apache-2.0', 'openssl': 'Apache-2.0',
    'pcre2': 'BSD-3-Clause', 'protobuf': 'BSD-3-Clause', 'spdlog': 'MIT', 'unicode-data': 'Unicode-DFS-2016',
    'x264': 'GPL-2.0-or-later', 'xxhash': 'BSD-2-Clause', 'xz-utils': 'LicenseRef-public-domain', 'yaml-cpp': 'MIT', 'zlib': 'Zlib',
}
WHEEL_LICENCES = {
    'fastatomstruct-xla-cpu': 'Apache-2.0', 'open_clip_torch': 'MIT', 'pyarrow': 'Apache-2.0',
    'xla-cpu-pjrt': 'Apache-2.0', 'jaxlib': 'Apache-2.0',
}
# Members of a package, for the owners of their files.
PLUGIN, VOCABULARY = 'fastatomstruct_xla_cpu/libpjrt_cpu.so', 'open_clip/bpe_simple_vocab_16e6.txt.gz'
FONTS = {'DejaVuSans.ttf': '/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf',
         'NotoColorEmoji.ttf': '/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf',
         'emoji-test.txt': '/usr/share/unicode/emoji/emoji-test.txt'}
# Files that `accelerator_check` needs: its helper programs, and their inputs.
TOOLS = ('device_tests', 'random_weights')
LIBRARIES = 'lib/maxdiffusion/'
SHARE = 'share/maxdiffusion/'
# Python packages that a GPU or a TPU needs in addition to the plugin; cmake/wheels_*.txt pin their versions.
CUDA = ['nvidia-cublas', 'nvidia-cuda-cupti', 'nvidia-cuda-nvrtc', 'nvidia-cuda-runtime', 'nvidia-cudnn-cu13',
        'nvidia-cufft', 'nvidia-cusolver', 'nvidia-cusparse', 'nvidia-nccl-cu13']


def output(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def fail(message):
    sys.exit(f'error: package: {message}')


# --- ELF ---------------------------------------------------------------------------------------------------------------


def needed(file):
    return re.findall(r'\(NEEDED\).*\[(.*)\]', output('readelf', '-dW', file))


def dynamic_symbols(file, undefined):
    """{name: version or ''} of the symbols that a library needs, or defines."""
    found = {}
    for line in output('nm', '-D', '--undefined-only' if undefined else '--defined-only', file).splitlines():
        name, _, version = line.split()[-1].replace('@@', '@').partition('@')
        if line.split()[-2] != 'A':
            found[name] = version
    return found


class Elf:
    """The version requirements of a library for x86_64, which can be changed in place."""

    def __init__(self, data):
        self.data = bytearray(data)
        table, = struct.unpack_from('<Q', data, 40)
        size, count, names = struct.unpack_from('<HHH', data, 58)
        rows = [struct.unpack_from('<IIQQQQIIQQ', data, table + i * size) for i in range(count)]
        self.sections = {self.text(rows[names][4] + row[0]): row for row in rows}

    def text(self, at):
        return self.data[at:self.data.index(0, at)].decode()

    def section(self, name):
        row = self.sections.get(name)
        return (row[4], row[5]) if row else (0, 0)

    def versions(self):
        """(offset, file, version, flags, index) of every required version of another library."""
        at, _ = self.section('.gnu.version_r')
        strings, _ = self.section('.dynstr')
        while at:
            _, count, file, first, following = struct.unpack_from('<HHIII', self.data, at)
            entry = at + first
            for _ in range(count):
                _, flags, index, name, step = struct.unpack_from('<IHHII', self.data, entry)
                yield entry, self.text(strings + file), self.text(strings + name), flags, index
                entry += step
            at = at + following if following else 0

    def glibc(self):
        """The newest glibc version that it requires."""
        found = [(0,)]
        for _, _, version, flags, _ in self.versions():
            if version.startswith('GLIBC_2') and not flags & 2:
                found.append(tuple(int(n) for n in version[6:].split('.')))
        return max(found)

    def forget_version(self, version):
        """Makes symbols of this version resolve to any definition, versioned or not. Returns their names."""
        symbols, size = self.section('.dynsym')
        strings, _ = self.section('.dynstr')
        table, _ = self.section('.gnu.version')
        names = []
        entries = list(self.versions())
        for entry, file, name, _, index in entries:
            if name != version:
                continue
            other = next(e for e, f, n, _, _ in entries if f == file and n == 'GLIBC_2.2.5')
            # The entry becomes a copy of another required version. (The loader also reports missing weak ones.)
            struct.pack_into('<I', self.data, entry, struct.unpack_from('<I', self.data, other)[0])
            struct.pack_into('<I', self.data, entry + 8, struct.unpack_from('<I', self.data, other + 8)[0])
            for i in range(size // 24):
                if struct.unpack_from('<H', self.data, table + 2 * i)[0] == index:
                    struct.pack_into('<H', self.data, table + 2 * i, 1)
                    names.append(self.text(strings + struct.unpack_from('<I', self.data, symbols + 24 * i)[0]))
        return names


# --- files of a package ------------------------------------------------------------------------------------------------


class Package:
    def __init__(self, arguments):
        self.build, self.wheels, self.source = arguments.build, arguments.wheels, arguments.source
        self.temporary = tempfile.TemporaryDirectory()
        self.files = {}  # path in the package: (bytes, is a program)
        self.origins = {}  # path in the package: source file
        self.paths = {}
        for line in output('/sbin/ldconfig', '-p').splitlines():
            if ' => ' in line and 'x86-64' in line:
                self.paths.setdefault(line.split()[0], line.split(' => ')[1])

    def path_of(self, name):
        for folder in (self.build, os.path.join(self.wheels, 'pyarrow')):
            if os.path.exists(os.path.join(folder, name)):
                return os.path.join(folder, name)
        return self.paths.get(name) or fail(f'the library {name} is nowhere')

    def add(self, path, file, program=False):
        with open(file, 'rb') as f:
            self.files[path] = (f.read(), program)
        self.origins[path] = os.path.realpath(file)

    def stripped(self, file):
        out = os.path.join(self.temporary.name, 'stripped')
        output('strip', '--strip-unneeded', '--remove-section=.comment', '-o', out, file)
        with open(out, 'rb') as f:
            return f.read()

    def add_library(self, name, path):
        file = self.path_of(name)
        data = self.stripped(file)
        if name.startswith('libicudata.'):
            data = self.small_icu(name, file)
        elf = Elf(data)
        for version in ('GLIBC_2.36',):
            if names := elf.forget_version(version):
                if names != ['arc4random']:  # which the program defines (apps/older_libc.cc)
                    fail(f'{name} calls {", ".join(names)} of {version}, which apps/older_libc.cc does not have')
        self.files[path] = (bytes(elf.data), False)
        self.origins[path] = os.path.realpath(file)

    def add_libraries(self):
        program = os.path.join(self.build, 'maxdiffusion')
        self.files['bin/maxdiffusion'] = (self.stripped(program), True)
        self.origins['bin/maxdiffusion'] = program
        parts = sorted(n for n in os.listdir(self.build) if re.fullmatch(r'md_\w+\.so', n))
        if len(parts) < 5:
            fail(f'{self.build} is not built')
        todo, seen, unused, callers = needed(program) + parts, set(), {}, []
        while todo:
            name = todo.pop()
            if name in seen or SYSTEM.fullmatch(name):
                continue
            seen.add(name)
            file = self.path_of(name)
            callers.append(file)
            self.add_library(name, LIBRARIES + name)
            allowed = next((allowed for ours, allowed in TRIMMED.items() if re.fullmatch(ours, name)), None)
            for other in needed(file):
                if allowed and not re.fullmatch(allowed, other) and not SYSTEM.fullmatch(other):
                    unused[other] = self.path_of(other)
                else:
                    todo.append(other)
        unused = {name: file for name, file in unused.items() if name not in seen}
        lacking = {}
        for file in callers:
            lacking.update(dynamic_symbols(file, True))
        for name, file in sorted(unused.items()):
            self.files[LIBRARIES + name] = (self.empty_library(name, file, lacking), False)

    def empty_library(self, name, file, lacking):
        """A stub with the functions that other libraries need of a library; each returns 0, or an empty text."""
        have = dynamic_symbols(file, False)
        lines, versions = [], {}
        for symbol in sorted(s for s in have if s in lacking):
            lines.append(f'.globl {symbol}\n.type {symbol}, @function\n{symbol}:')
            if symbol in EMPTY_TEXTS:
                lines.append('lea empty(%rip), %rax\nret')
            if lacking[symbol]:
                versions.setdefault(lacking[symbol], []).append(symbol)
        lines.append('xor %eax, %eax\nret\nempty: .quad 0\n.section .note.GNU-stack,"",@progbits\n')
        base = os.path.join(self.temporary.name, 'empty')
        with open(base + '.s', 'w') as f:
            f.write('.text\n' + '\n'.join(lines))
        with open(base + '.map', 'w') as f:
            f.write(''.join(f'{v} {{ {"; ".join(symbols)}; }};\n' for v, symbols in sorted(versions.items())))
        script = [f'-Wl,--version-script={base}.map'] if versions else []
        output('gcc', '-shared', '-nostdlib', '-Wl,--build-id=none', f'-Wl,-soname={name}', *script, base + '.s', '-o',
               base + '.so')
        return self.stripped(base + '.so')

    def small_icu(self, name, file):
        """ICU's data library, reduced to the items that are used."""
        with open(file, 'rb') as f:
            data = f.read()
        symbol = next(l.split() for l in output('nm', '-D', file).splitlines() if re.search(r' icudt\d+_dat$', l))
        address = int(symbol[0], 16)
        for row in Elf(data).sections.values():
            if row[3] and row[3] <= address < row[3] + row[5]:
                start, end = row[4] + address - row[3], row[4] + row[5]
        header, = struct.unpack_from('<H', data, start)
        toc = start + header
        count, = struct.unpack_from('<I', data, toc)
        items = []
        for i in range(count):
            label, item = struct.unpack_from('<II', data, toc + 4 + 8 * i)
            following = struct.unpack_from('<I', data, toc + 16 + 8 * i)[0] + toc if i + 1 < count else end
            label = data[toc + label:data.index(0, toc + label)].decode()
            if KEPT_OF_ICU.match(label) or not UNREAD_BY_US.match(label):
                items.append((label, data[toc + item:following]))
        names, contents, table = b'', b'', b''
        names_at = 4 + 8 * len(items)
        contents_at = names_at + sum(len(n) + 1 for n, _ in items)
        contents_at += -(contents_at + header) % 16
        for label, item in items:
            contents += b'\0' * (-len(contents) % 16)
            table += struct.pack('<II', names_at + len(names), contents_at + len(contents))
            names += label.encode() + b'\0'
            contents += item
        out = data[start:toc] + struct.pack('<I', len(items)) + table + names
        out += b'\0' * (header + contents_at - len(out)) + contents
        base = os.path.join(self.temporary.name, 'icu')
        with open(base + '.dat', 'wb') as f:
            f.write(out)
        with open(base + '.s', 'w') as f:
            f.write(f'.section .rodata\n.balign 16\n.globl {symbol[2]}\n.type {symbol[2]}, @object\n{symbol[2]}:\n'
                    f'.incbin "{base}.dat"\n.size {symbol[2]}, .-{symbol[2]}\n.section .note.GNU-stack,"",@progbits\n')
        output('gcc', '-shared', '-nostdlib', '-Wl,--build-id=none', f'-Wl,-soname={name}', base + '.s', '-o', base + '.so')
        return self.stripped(base + '.so')

    def add_share(self):
        for folder, _, names in os.walk(os.path.join(self.source, 'configs')):
            for name in names:
                file = os.path.join(folder, name)
                self.add(SHARE + os.path.relpath(file, self.source), file)
        for name, file in FONTS.items():
            self.add(SHARE + 'fonts/' + name, file)
        self.add(SHARE + VOCABULARY, os.path.join(self.wheels, VOCABULARY))
        self.add('share/bash-completion/completions/maxdiffusion',
                 os.path.join(self.source, 'apps/completion/maxdiffusion.bash'))
        self.add('share/zsh/site-functions/_maxdiffusion', os.path.join(self.source, 'apps/completion/_maxdiffusion'))
        self.add(SHARE + 'LICENSE', os.path.join(self.source, 'LICENSE'))
        for package in self.debian_packages():
            self.add(f'{SHARE}licences/{package}', f'/usr/share/doc/{package}/copyright')

    def add_shared(self, *paths):
        for path in paths:
            self.add(SHARE + path, os.path.join(self.source, path))

    def add_accelerator_check(self):
        for name in TOOLS:
            file = os.path.join(self.build, name)
            if not os.path.exists(file):
                fail(f'{file} is not built; try: ninja -C {self.build} {" ".join(TOOLS)}')
            self.files['libexec/' + name] = (self.stripped(file), True)
            self.origins['libexec/' + name] = file
            for library in needed(file):
                if not SYSTEM.fullmatch(library) and LIBRARIES + library not in self.files:
                    fail(f'{name} links {library}, which the program does not')
        manifests = os.listdir(os.path.join(self.source, 'bench/accelerator'))
        self.add_shared('bench/accelerator_peer.py', *(f'bench/accelerator/{name}' for name in manifests))
        for name in manifests:
            with open(os.path.join(self.source, 'bench/accelerator', name)) as f:
                for model in json.load(f)['models']:
                    self.add_shared(*(f'tests/golden/full/{part}.json' for part in model.get('parts', {}).values()))
        goldens, tests = os.path.join(self.source, 'tests/golden'), ''
        with open(os.path.join(self.source, 'cmake/modules.cmake')) as f:
            names = re.search(r'set\(goldens_on_device (.+)\)', f.read()).group(1).split()
        for name in names:
            with open(os.path.join(goldens, name + '.cc')) as f:
                tests += f.read()
        for name in os.listdir(goldens):
            folder = os.path.join(goldens, name)
            if f'"{name}"' in tests and os.path.isdir(folder):
                self.add_shared(*(f'tests/golden/{name}/{file}' for file in os.listdir(folder)))

    def add_plugin(self):
        self.add(LIBRARIES + os.path.basename(PLUGIN), os.path.join(self.wheels, PLUGIN))

    def debian_packages(self):
        """{name: (version, source, files)} of the Debian packages whose files are in this package."""
        found = {}
        for path, file in sorted(self.origins.items()):
            if file.startswith((self.build, self.wheels, os.path.realpath(self.wheels), self.source, '/usr/share/doc/')):
                continue
            owner = None
            for form in (file, file.removeprefix('/usr')):  # packages that name /lib as it was before it was /usr/lib
                out = subprocess.run(['dpkg-query', '-S', form], capture_output=True, text=True).stdout
                owner = owner or (out.split(':')[0] or None)
            if not owner:
                fail(f'{file} is of no package of Debian')
            if owner not in found:
                version, source = output('dpkg-query', '-W', '-f=${Version}\n${source:Package}\n', owner).split()[:2]
                found[owner] = (version, source, [])
            found[owner][2].append(path)
        return found

    def glibc(self):
        """The newest glibc version that a file requires, and the files that do."""
        newest, who = (0,), []
        for path, (data, _) in sorted(self.files.items()):
            if data[:4] == b'\x7fELF':
                version = Elf(data).glibc()
                if version > newest:
                    newest, who = version, []
                if version == newest:
                    who.append(os.path.basename(path))
        return newest, who

    def check(self):
        newest, who = self.glibc()
        if newest > NEWEST_GLIBC:
            fail(f'{", ".join(who)} need glibc {".".join(map(str, newest))}; expected at most 2.35')
        for path, (data, _) in self.files.items():
            for folder in {self.source, os.path.realpath(self.source)}:
                # Where a path begins: others' libraries have paths of theirs, in which a short name may be a part.
                if re.search(rb'(?<![\w.+-])' + re.escape(folder.encode() + b'/'), data):
                    fail(f'{path} holds the path of this checkout, {folder}')
        return newest


def stage(package, folder):
    for path, (data, program) in package.files.items():
        file = os.path.join(folder, path)
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(file, 'wb') as f:
            f.write(data)
        os.chmod(file, 0o755 if program else 0o644)


# --- tar ---------------------------------------------------------------------------------------------------------------

BLOCK = 32 << 20


def compressed(data, preset):
    """xz, in blocks that are compressed in parallel; the result does not depend on the number of processors."""
    filters = [{'id': lzma.FILTER_X86}, {'id': lzma.FILTER_LZMA2, 'preset': preset, 'dict_size': BLOCK}]
    def one(at):
        return lzma.compress(data[at:at + BLOCK], lzma.FORMAT_XZ, lzma.CHECK_CRC64, filters=filters)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return b''.join(pool.map(one, range(0, len(data), BLOCK)))


def write_tar(package, file, top, epoch, preset):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode='w', format=tarfile.GNU_FORMAT) as tar:
        folders = {top} | {f'{top}/{d}' for p in package.files for d in parents(p)}
        for path in sorted(folders | {f'{top}/{p}' for p in package.files}):
            info = tarfile.TarInfo(path)
            info.mtime, info.uname, info.gname, info.mode = epoch, 'root', 'root', 0o755
            if path in folders:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            else:
                data, program = package.files[path[len(top) + 1:]]
                info.size, info.mode = len(data), 0o755 if program else 0o644
                tar.addfile(info, io.BytesIO(data))
    with open(file, 'wb') as f:
        f.write(compressed(raw.getvalue(), preset))


def parents(path):
    parts = path.split('/')
    return ['/'.join(parts[:i]) for i in range(1, len(parts))]


# --- wheel -------------------------------------------------------------------------------------------------------------


def pinned(source, name):
    """{wheel: (version, sha256)} of a list in cmake/."""
    with open(os.path.join(source, 'cmake', name)) as f:
        return {m[1]: (m[2], m[3]) for line in f if (m := re.match(r'([\w-]+)==(\S+) --hash=sha256:(\w+)', line))}


def write_wheel(package, file, version, tag, epoch, level):
    """The files in the scheme `data`, below the prefix that a Python installs into, and the program among its scripts:
    bin/, lib/ and share/ lie there as in the tar, whichever version of Python it is, in a virtual environment, for one
    user (~/.local) and for all."""
    source = package.source
    main, gpu, tpu = (pinned(source, f'wheels{kind}.txt') for kind in ('', '_gpu', '_tpu'))
    metadata = ['Metadata-Version: 2.1', 'Name: maxdiffusion-cpp', f'Version: {version}',
                'Summary: Trains and samples diffusion models, on CPUs, GPUs and TPUs; a program without Python code',
                'License: Apache-2.0', 'License-File: LICENSE', 'Classifier: Operating System :: POSIX :: Linux',
                'Requires-Python: >=3.9',
                f'Requires-Dist: fastatomstruct-xla-cpu=={main["fastatomstruct-xla-cpu"][0]}', 'Provides-Extra: cuda13']
    metadata += [f'Requires-Dist: {name}=={v}; extra == "cuda13"' for name, (v, _) in gpu.items()]
    metadata += [f'Requires-Dist: {name}; extra == "cuda13"' for name in CUDA]
    metadata += ['Provides-Extra: tpu'] + [f'Requires-Dist: {name}=={v}; extra == "tpu"' for name, (v, _) in tpu.items()]
    metadata += ['Description-Content-Type: text/markdown', '',
                 'Puts `maxdiffusion` on the PATH: `maxdiffusion train configs/quickstart.yml` trains a small model.']
    info, data = f'maxdiffusion_cpp-{version}.dist-info', f'maxdiffusion_cpp-{version}.data'
    members = {f'{info}/METADATA': ('\n'.join(metadata) + '\n').encode(),
               f'{info}/WHEEL': f'Wheel-Version: 1.0\nGenerator: maxdiffusion\nRoot-Is-Purelib: false\nTag: {tag}\n'.encode(),
               f'{info}/LICENSE': package.files[SHARE + 'LICENSE'][0]}
    programs = set()
    for path, (content, program) in package.files.items():
        name = f'{data}/scripts/{os.path.basename(path)}' if program else f'{data}/data/{path}'
        members[name] = content
        if program:
            programs.add(name)
    def digest(content):
        return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()
    record = [f'{name},sha256={digest(content)},{len(content)}' for name, content in sorted(members.items())]
    members[f'{info}/RECORD'] = '\n'.join(record + [f'{info}/RECORD,,\n']).encode()
    with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED, compresslevel=level) as wheel:
        for name in sorted(members, key=lambda n: ('.dist-info/' in n, n)):
            entry = zipfile.ZipInfo(name, time.gmtime(max(epoch, 315532800))[:6])
            entry.external_attr = (0o100755 if name in programs else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, members[name], compresslevel=level)


# --- bill of materials -------------------------------------------------------------------------------------------------


def bill(package, version, epoch):
    """SPDX 2.3 of a package's files."""
    def identity(text):
        return 'SPDXRef-' + re.sub(r'[^A-Za-z0-9.-]', '-', text)
    def spdx(name, version, licence, supplier, purpose, **fields):
        return {'name': name, 'SPDXID': identity('Package-' + name), 'versionInfo': version, 'supplier': supplier,
                'downloadLocation': 'NOASSERTION', 'filesAnalyzed': False, 'licenseConcluded': 'NOASSERTION',
                'licenseDeclared': licence, 'copyrightText': 'NOASSERTION', 'primaryPackagePurpose': purpose, **fields}
    main = spdx('maxdiffusion', version, 'Apache-2.0', 'Organization: the authors of maxdiffusion.cpp', 'APPLICATION')
    packages, owner = [main], {}
    for name, (debian, source, paths) in package.debian_packages().items():
        packages.append(spdx(name, debian, LICENCES.get(source, 'NOASSERTION'), 'Organization: Debian', 'LIBRARY',
                             sourceInfo=f'built by Debian from its source package {source}; its copyright file is '
                                        f'{SHARE}licences/{name}'))
        owner.update({p: identity('Package-' + name) for p in paths})
    for name, (wheel, digest) in pinned(package.source, 'wheels.txt').items():
        folder = {'fastatomstruct-xla-cpu': 'libpjrt_cpu.so', 'open_clip_torch': 'bpe_simple_vocab',
                  'pyarrow': r'lib(arrow|parquet)'}.get(name)
        paths = [p for p in package.files if folder and re.match(folder, os.path.basename(p))]
        if paths:
            packages.append(spdx(name, wheel, WHEEL_LICENCES[name], 'NOASSERTION', 'LIBRARY',
                                 checksums=[{'algorithm': 'SHA256', 'checksumValue': digest}],
                                 sourceInfo='taken from the wheel of this name, whose checksum this is'))
            owner.update({p: identity('Package-' + name) for p in paths})
    files, relations = [], [{'spdxElementId': 'SPDXRef-DOCUMENT', 'relationshipType': 'DESCRIBES',
                             'relatedSpdxElement': main['SPDXID']}]
    for path, (content, _) in sorted(package.files.items()):
        if path == SHARE + 'sbom.spdx.json':
            continue
        files.append({'fileName': './' + path, 'SPDXID': identity('File-' + path),
                      'checksums': [{'algorithm': a, 'checksumValue': hashlib.new(a.lower(), content).hexdigest()}
                                    for a in ('SHA1', 'SHA256')],
                      'licenseConcluded': 'NOASSERTION', 'licenseInfoInFiles': ['NOASSERTION'],
                      'copyrightText': 'NOASSERTION'})
        relations.append({'spdxElementId': owner.get(path, main['SPDXID']), 'relationshipType': 'CONTAINS',
                          'relatedSpdxElement': identity('File-' + path)})
    for one in packages:
        mine = {r['relatedSpdxElement'] for r in relations
                if r['spdxElementId'] == one['SPDXID'] and r['relationshipType'] == 'CONTAINS'}
        sums = sorted(f['checksums'][0]['checksumValue'] for f in files if f['SPDXID'] in mine)
        if sums:
            one.update(filesAnalyzed=True, packageVerificationCode={
                'packageVerificationCodeValue': hashlib.sha1(''.join(sums).encode()).hexdigest()})
    for one in packages[1:]:
        relations.append({'spdxElementId': main['SPDXID'], 'relationshipType': 'DEPENDS_ON',
                          'relatedSpdxElement': one['SPDXID']})
    digest = hashlib.sha256(json.dumps([packages, files]).encode()).hexdigest()
    return {'spdxVersion': 'SPDX-2.3', 'dataLicense': 'CC0-1.0', 'SPDXID': 'SPDXRef-DOCUMENT',
            'name': f'maxdiffusion-{version}',
            'documentNamespace': f'urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}',
            'creationInfo': {'created': time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(epoch)),
                             'creators': ['Tool: maxdiffusion-package']},
            'hasExtractedLicensingInfos': [{'licenseId': 'LicenseRef-public-domain', 'name': 'public domain',
                                           'extractedText': 'The library is in the public domain.'}],
            'packages': packages, 'files': files, 'relationships': relations}


def main():
    parser = argparse.ArgumentParser(prog='./run package', description=__doc__.split('\n')[0])
    parser.add_argument('what', nargs='*', metavar='tar|wheel|folder|sbom', help='both tar and wheel where none is named')
    parser.add_argument('--out', default='dist', help='folder that packages are written to (dist)')
    parser.add_argument('--without-plugin', action='store_true', help='a tar without the plugin for CPUs')
    parser.add_argument('--fast', action='store_true', help='compress little, for tests')
    for name in ('build', 'wheels', 'source', 'version'):
        parser.add_argument('--' + name, required=True, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for what in arguments.what:
        if what not in ('tar', 'wheel', 'folder', 'sbom'):
            fail(f"'{what}' is no kind of package; expected tar, wheel, folder or sbom")
    wanted = arguments.what or ['tar', 'wheel']
    version = arguments.version
    epoch = int(os.environ.get('SOURCE_DATE_EPOCH') or
                output('git', '-C', arguments.source, 'log', '-1', '--format=%ct'))
    package = Package(arguments)
    package.add_libraries()
    package.add_share()
    def with_bill():
        text = json.dumps(bill(package, version, epoch), indent=1) + '\n'
        package.files[SHARE + 'sbom.spdx.json'] = (text.encode(), False)
        return text
    newest = package.check()
    glibc = '.'.join(map(str, newest))
    os.makedirs(arguments.out, exist_ok=True)
    def print_size(file):
        print(f'{file}: {os.path.getsize(file) / 1e6:.1f} MB, glibc {glibc} or newer')
    if 'wheel' in wanted:
        with_bill()
        tag = f'py3-none-manylinux_{newest[0]}_{newest[1]}_x86_64'
        file = os.path.join(arguments.out, f'maxdiffusion_cpp-{version}-{tag}.whl')
        write_wheel(package, file, version, tag, epoch, 1 if arguments.fast else 9)
        print_size(file)
    if set(wanted) != {'wheel'}:
        package.add_accelerator_check()
        package.check()
    if not arguments.without_plugin:
        package.add_plugin()
    text = with_bill()
    name = f'maxdiffusion-{version}-linux-x86_64' + ('-without-plugin' if arguments.without_plugin else '')
    if 'tar' in wanted:
        file = os.path.join(arguments.out, name + '.tar.xz')
        write_tar(package, file, name, epoch, 0 if arguments.fast else 9)
        print_size(file)
    if 'folder' in wanted:
        stage(package, os.path.join(arguments.out, name))
        print(os.path.join(arguments.out, name))
    if 'sbom' in wanted:
        print(text, end='')


main()
