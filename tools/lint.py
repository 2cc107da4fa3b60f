"""Reads sources with clang-tidy, many at a time: `./run lint` says which.

What a source costs is mostly the headers that it includes, which every run reads and checks again. So neighbours are
joined: a generated file includes a dozen sources, and clang-tidy reads that. Two of which one has something of its own
under a name that the other has too are not put into one file; a file that still does not compile is left, and its
sources are read alone.

lint.py CLANG_TIDY BUILD_FOLDER PROCESSES SOURCE...   (BUILD_FOLDER has compile_commands.json)
"""
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
FOLDERS = f'{re.escape(ROOT)}/(maxdiffusion|apps|tests|bench|examples)/'
MOST = 12  # sources in one file

UNNAMED = re.compile(r'^namespace \{$(.*?)^\}  // namespace$', re.M | re.S)
# A match at the start of a line is a definition in a namespace.
DEFINED = [re.compile(pattern, re.M) for pattern in (
    r'^(?:struct|class|enum(?: class)?|union) (\w+)',
    r'^using (\w+) =',
    r'^(?!using|namespace)\w[^;(={]*?(?<![\w:])(\w+)(?:\[\w*\])*(?: =|\{|;)',
    r'^(?!using|namespace|TEST|INSTANTIATE)\w[^;(={]*?(?<![\w:])(\w+)\(',
    r'^(?:TEST\w*|INSTANTIATE\w*)\((?:\w+, )?(\w+)',
    r'\b(k[A-Z]\w*)(?:\[\w*\])* =',  # also the second name of a definition
    r'^#define (\w+)')]


TYPES = DEFINED[:2]
UNITED = re.compile(r'^#include "(.+\.cc)"$', re.M)  # in a unity source that CMake generates


def names(text, patterns=tuple(DEFINED)):
    return {name for pattern in patterns for name in pattern.findall(text)}


def text_of(path):
    with open(path) as file:
        return file.read()


def own_text(source):
    return '\n'.join(UNNAMED.findall(text_of(source)))


def types_of_headers():
    files = (f'{folder}/{name}' for top in ('maxdiffusion', 'tests') for folder, _, here in os.walk(f'{ROOT}/{top}')
             for name in here if name.endswith('.h'))
    return set().union(*(names(text_of(file), TYPES) for file in files))


def is_test(source):
    return source.endswith('_test.cc') or '/tests/' in source


def flags_of(build):
    """Source → include and define flags of its compile command."""
    flags = {}
    with open(f'{build}/compile_commands.json') as file:
        for command in json.load(file):
            words = shlex.split(command['command'])
            of_file = (
                tuple(word for i, word in enumerate(words) if word.startswith('-I') or '-isystem' in words[max(i - 1, 0):i + 1]),
                tuple(word for word in words if word.startswith(('-D', '-std'))))
            source = os.path.realpath(command['file'])
            for part in (source, *(UNITED.findall(text_of(source)) if '/Unity/' in source else ())):
                flags.setdefault(os.path.realpath(part), of_file)
    return flags


def parts(sources, of_headers):
    """Sources as lists that can be joined."""
    alone = [source for source in sources if names(own_text(source), TYPES) & of_headers]
    found = []  # (sources, names in unnamed namespaces, all names)
    for source in sorted({*sources} - {*alone}):
        defined = names(text_of(source))
        own_names = names(own_text(source)) | ({'main'} & defined)
        for part in found:
            if len(part[0]) < MOST and not part[1] & defined and not part[2] & own_names:
                break
        else:
            part = ([], set(), set())
            found.append(part)
        part[0].append(source)
        part[1].update(own_names)
        part[2].update(defined)
    return [part[0] for part in found] + [[source] for source in alone]


def tidy(tool, flags, sources, to):
    """Output of clang-tidy for sources that are joined in the file `to`; None: they cannot be joined."""
    if len(sources) > 1:
        with open(to, 'w') as file:
            file.writelines(f'#include "{source}"  // NOLINT(bugprone-suspicious-include)\n' for source in sources)
    words = [*flags[sources[0]][0], *dict.fromkeys(flag for source in sources for flag in flags[source][1])]
    # The analyzer takes more than half of the time, and running a test finds the same errors in it.
    checks = ['--checks=-clang-analyzer-*'] if is_test(sources[0]) else []
    run = subprocess.run(
        [tool, '--quiet', f'--config-file={ROOT}/.clang-tidy', f'--header-filter={FOLDERS}', *checks,
         to if len(sources) > 1 else sources[0], '--', *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if len(sources) > 1 and 'clang-diagnostic' in run.stdout:
        return None
    return run.stdout if run.returncode == 0 or run.stdout else run.stderr


def main():
    tool, build, processes, *sources = sys.argv[1:]
    flags = flags_of(build)
    folder = f'{build}/lint'
    os.makedirs(folder, exist_ok=True)
    groups = {}
    for source in map(os.path.realpath, sources):
        flags.setdefault(source, flags[f'{ROOT}/apps/main.cc'])  # if this build does not compile it
        groups.setdefault((flags[source][0], is_test(source)), []).append(source)
    of_headers = types_of_headers()
    jobs = [part for group in groups.values() for part in parts(group, of_headers)]
    jobs.sort(key=lambda part: -sum(map(os.path.getsize, part)))
    print(f'lint: {len(sources)} sources in {len(jobs)} parts', file=sys.stderr)
    faults = 0

    def say(job, text):
        nonlocal faults
        faults += bool(text)
        if text:
            print(text, flush=True)
        print(f'lint: {", ".join(os.path.relpath(source, ROOT) for source in job)}', file=sys.stderr, flush=True)

    with ThreadPoolExecutor(int(processes)) as pool:
        alone = []
        for job, text in zip(jobs, pool.map(lambda n: tidy(tool, flags, jobs[n], f'{folder}/{n}.cc'), range(len(jobs)))):
            if text is None:
                alone += [[source] for source in job]
            else:
                say(job, text)
        if alone:
            print(f'lint: {len(alone)} sources alone, since what they were joined to does not compile', file=sys.stderr)
        for job, text in zip(alone, pool.map(lambda job: tidy(tool, flags, job, ''), alone)):
            say(job, text)
    sys.exit(1 if faults else 0)


main()
