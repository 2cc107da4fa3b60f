#!/usr/bin/env python3
"""Prints one page of all messages of the program: what the sources pass to check, fail, Error, note and the log.

  tools/messages.py              Markdown, by module
  tools/messages.py --literals   every string literal of the sources: FILE:LINE<tab>text, a line each

A message that is concatenated from parts shows its parts; {} is a value filled in by the program.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
KINDS = {
    "check": "error", "fail": "error", "Error": "error", "note": "try", "log_warning": "warning", "log_warning_once": "warning",
    "log_error": "error line", "log_info": "info", "log_info_once": "info", "log_line": "log", "log_line_once": "log",
    "print_line": "line", "format": "part",
}
TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|(?:u8|L)?R"(?P<d>[^(\s]*)\((?P<raw>.*?)\)(?P=d)"|"(?P<s>(?:\\.|[^"\\\n])*)"|\'(?:\\.|[^\'\\])+\'|'
    r"[A-Za-z_]\w*|\d[\w'.]*|\S", re.S)


def tokens(text):
    """(line, kind, text) of identifiers, string literals and punctuation; adjacent literals are joined."""
    out, line, last = [], 1, 0
    for m in TOKEN.finditer(text):
        line += text.count("\n", last, m.start())
        last = m.start()
        t = m.group()
        if t.startswith(("//", "/*")):
            continue
        if m.group("raw") is not None or m.group("s") is not None:
            s = m.group("raw") if m.group("raw") is not None else unescaped(m.group("s"))
            if out and out[-1][1] == "string":
                out[-1] = (out[-1][0], "string", out[-1][2] + s)
            else:
                out.append((line, "string", s))
        else:
            out.append((line, "name" if re.match(r"[A-Za-z_]", t) else "mark", t))
    return out


def unescaped(s):
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m.group(1), m.group(1)), s)


def messages(text):
    """(line, kind, text) of literals inside calls of KINDS; the innermost call determines the kind."""
    calls, out, toks = [], [], tokens(text)
    for i, (line, kind, t) in enumerate(toks):
        if kind == "mark" and t == "(":
            calls.append(toks[i - 1][2] if i and toks[i - 1][1] == "name" else "")
        elif kind == "mark" and t == ")" and calls:
            calls.pop()
        elif kind == "string":
            of = [c for c in calls if c in KINDS]
            if of and " " in t:
                out.append((line, KINDS[of[0]] if of[0] != "format" or len(of) < 2 else KINDS[of[-1]], t))
    return out


def sources():
    for top in ("maxdiffusion", "apps"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix in (".cc", ".h") and not path.name.endswith("_test.cc") and "testing" not in path.name:
                yield path


def main():
    module = None
    for path in sources():
        name = path.relative_to(ROOT)
        text = path.read_text()
        if "--literals" in sys.argv:
            for line, kind, t in tokens(text):
                if kind == "string":
                    print(f"{name}:{line}\t" + t.replace("\n", "\\n"))
            continue
        found = messages(text)
        if not found:
            continue
        if name.parts[:2] != module:
            module = name.parts[:2]
            print(f"\n## {'/'.join(p for p in module if not p.endswith('.cc'))}")
        print(f"\n### {'/'.join(name.parts[1:])}\n")
        for line, kind, t in found:
            print(f"- {line} {kind}: `" + t.replace("\n", " / ") + "`")


if __name__ == "__main__":
    main()
