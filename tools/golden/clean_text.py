"""Records what diffusers' Wan pipelines make of prompts (prompt_clean: ftfy.fix_text, html.unescape twice, white space)
into tests/golden/data/clean_text.json, and writes the table of HTML's entities.

    python tools/golden/clean_text.py record tests/golden/data/clean_text.json
    python tools/golden/clean_text.py entities maxdiffusion/tokenizers/html_entities.cc

Needs diffusers, ftfy and transformers; the texts must agree exactly. `fixed`: ftfy.fix_text alone; `cleaned`: all.
"""
import html
import html.entities
import json
import pathlib
import random
import re
import sys

ENCODINGS = ["latin-1", "sloppy-windows-1252", "sloppy-windows-1251", "sloppy-windows-1250", "sloppy-windows-1253",
             "sloppy-windows-1254", "sloppy-windows-1257", "iso-8859-2", "macroman", "cp437"]
PROSE = [
    "Un garçon déjà vu mange un gâteau à la crème près de l’hôtel Ångström…", "“Straße” – schöne Grüße aus Köln, für 5 € täglich!",
    "El niño corrió ¿dónde? ¡Mañana! España", "Zażółć gęślą jaźń, Łódź", "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "Съешь ещё этих мягких французских булок", "Γρήγορη αλεπού πηδάει πάνω", "Şişli’de güneşli bir gün ığdır", "Ātri lāči ēd žūpas",
    "東京の猫が走る", "今天天气很好，阳光明媚。", "한국어 문장입니다", "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "😀 👩‍🚀 🍎 ✔ ★ ♥ → ™ © ® ½ ² °C",
    "naïve café – it’s “fine”, don’t…", "a photo of a cat, 8k, (masterpiece:1.2)", "Ünïcödé TÉXT", "ПРИВЕТ МИР", "ÉCOLE À NOËL", "30°C ± 2 × 5 ÷ 3 µm",
]
ODD = [
    "", " ", "\n\t \u3000", "plain ascii text", "  lead and trail  ", "a  b\t\tc\n\nd", "a\r\nb\rc\u2028d\u2029e\x85f", "&amp;", "&amp;amp;", "&amp;amp;amp;lt;",
    "&lt;b&gt;bold&lt;/b&gt;", "<b>&amp;</b>", "<b>x</b>\n&eacute;", "&eacute;\n<b>\n&eacute;", "&eacute &Eacute; &EACUTE; &nTILDE; &NTILDE; &SZLIG;", "this&not that", "&notit; &notin; &notin",
    "&hellip; &nbsp;x&nbsp; &shy;", "&#233; &#xe9; &#XE9; &#233 &#xe9g", "&#128; &#x80; &#150; &#x9f; &#129;", "&#0; &#13; &#11; &#31; &#127; &#xfffe; &#xd800; &#x110000; &#99999999999999999999;",
    "&#; &#x; &; & ; &&amp;&", "&#x3b; &#59; &semi; &lpar;x&rpar;", "&NotEqualTilde; &acE; &fjlig; &ThickSpace;.", "&CounterClockwiseContourIntegral; &unknown; &AMP &AMP;", "&ampamp; &ltgt; &copyright &copy2023",
    "\x1b[36;44mI'm blue\x1b[0m", "\x1b[1;31m \x1b[ 3m \x1b[K", "zero\x00byte \x07bell \x7f del \x0b vt \x0c ff", "\ufeffbom \ufffc \ufff9a\ufffb \u206a", "a\u200bb\u200cc\u200dd\u2060e\u00ad",
    "“curly” ‘single’ „low‚ «guillemets» ‹x› ‛ ‟ ʼ", "ﬂuﬃeﬆ ﬁ Ĳ ĳ ŉ Ǆ ǅ ǆ Ǳ ﬅ", "ＬＯＵＤ　ＮＯＩＳＥＳ！ ｱｲｳ ｶﾞ ﾊﾟ ￦ ￩ ﾡ", "e\u0301 A\u030a n\u0303 \u1112\u1161\u11ab \u212b \u2126",
    "âœ” No problems", "&macr;\\_(ã\x83\x84)_/&macr;", "Broken text&hellip; it&#x2019;s ﬂubberiﬁc!", "voilÃ le travail", "sÃ³", "fÃ cil", "Ã la mode Ã quele Ã s vezes", "l’humanitÃ©",
    "schÃ¶n – GrÃ¼ÃŸe", "â€œquotedâ€\x9d â€œ like this â€�", "â€™ â€“ â€” â€¦ â€¢ â‚¬ â„¢", "Â£5 Â© Â® Â°C Â½ Â» 10Â\xa0km", "ÃƒÂ©", "ÃƒÆ’Ã‚Â©", "Ã¢â‚¬â„¢", "ÃÂ¢Ã¢ÂÂ¬", "caf\u00c3\u00a9 and naïve", "naïve and café", "ð\x9f\x98\x80", "ðŸ˜€ ðŸ\x8d\x8e", "ðŸ˜? â€?",
    "ÐŸÑ€Ð¸Ð²ÐµÑ‚", "РџСЂРёРІРµС‚", "æ±äº¬", "ä»Šå¤©", "Î“ÎµÎ¹Î¬", "â€šÃ„Ã²", "‚Äôs", "√©t√©", "caf├⌐", "Ã\xa0 la", "Â\xa0", "\xa0", "a\x80b\x93c\x94", "caf\x8e", "\x84low\x93", "\x81\x8d\x90", "E2 80 99", "âˆ’ âˆž",
    "MARQUÉ…", "É»", "à «x»", "Ö»", "Ã", "Â ", " Â ", "Ã ", "x Â y", "œuvre œ Œ œ.", "Ü°", "²×² ×²", "10 °C", "São Paulo – Ñandú", "»Ö« «é» é» “é”", "ÀÉÎ", "ñ™", "é€", "€é", "â ê î", "æøå ÆØÅ Å", "ÄÖÜ äöü ß", "¡Ñ!", "ﾟ", "(°□°) ┻━┻ ヽ༼ຈل͜ຈ༽ﾉ", "│Ò", "═╬", "β€™", "ā€™",
    "í\xa0½í¸\x80 cesu", "Ã€ À\x80", "À\x80\u00c3\u00a9", "\u00ed\u0095\u009cÃ©", "\x1a Ã©", "� Ã©", "Ã? Ã�", "â�™", "ð�’©", "long " * 50 + "cafÃ©", "tab\tnbsp\xa0em\u2003", "\x1c\x1d\x1e\x1f", "Å\xa0koda Å koda", "Ð Ð°", "Ø§Ù„Ø¹Ø±Ø¨ÙŠØ©", "×©×œ×•×", "Å\x81Ã³dÅº", "à¤¨à¤®", "à² à²", "Ã¡Ã©Ã­Ã³Ãº", "Ãƒ Ã‚",
]


def wrong(rng, text):
    """The text decoded with another encoding than it was written in; sometimes twice, or with no-break spaces lost."""
    import ftfy.bad_codecs  # noqa: F401
    for _ in range(rng.choice([1, 1, 1, 2])):
        try:
            text = text.encode("utf-8").decode(rng.choice(ENCODINGS[:2] * 4 + ENCODINGS))
        except UnicodeError:
            return text
    if rng.random() < 0.15:
        text = text.replace("\xa0", " ")
    if rng.random() < 0.1:
        text = re.sub("[\x80-\x9f]", "\ufffd", text)
    return text


def texts(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 3)):
            part = rng.choice(PROSE)
            words = part.split(" ")
            first = rng.randrange(len(words))
            part = " ".join(words[first:first + rng.randint(1, 6)])
            kind = rng.random()
            if kind < 0.6:
                part = wrong(rng, part)
            elif kind < 0.75:
                part = html.escape(part.encode("ascii", "xmlcharrefreplace").decode() if kind < 0.7 else part)
            parts.append(part)
        yield rng.choice([" ", " ", "\n", ", ", ""]).join(parts)


def each_rule():
    """For each rule of what is unlikely, of lost no-break spaces and of lost bytes: texts that come out otherwise without
    that rule."""
    import ftfy
    import ftfy.bad_codecs  # noqa: F401
    from ftfy import badness, chardata, fixes

    characters = [chr(c) for a, b in [(0xA0, 0x250), (0x370, 0x400), (0x400, 0x460), (0x5D0, 0x5EB), (0x620, 0x64B),
                                      (0x915, 0x920), (0xC95, 0xCA0), (0x2010, 0x2027), (0x20A0, 0x20AD), (0x2120, 0x2123),
                                      (0x2190, 0x2193), (0x3042, 0x3048), (0x4E00, 0x4E08), (0xAC00, 0xAC04), (0x1F600, 0x1F604)]
                  for c in range(a, b)]
    pool = []
    for c in characters:
        for e in ENCODINGS:
            try:
                m = c.encode().decode(e)
            except UnicodeError:
                continue
            spaced, lost = m.replace("\xa0", " "), re.sub("[\x80-\x9f]", "\ufffd", m)
            for x in dict.fromkeys([m, spaced, lost, m[:-1] + "?"]):
                pool += [x, "a" + x, "a" + x + "b", "a " + x + " b", x + x, "é" + x, "Ã©" + x + "b", "Ã© " + x + " b"]
    # Most improbable sequences are pairs and triples of these characters.
    rng = random.Random(7)
    soup = "".join(badness.MOJIBAKE_CATEGORIES.values()) + "aZ  .Œ°√≈‚ÄâóвЂГўВβ€āÃÂ"
    pool += ["".join(rng.choice(soup) for _ in range(rng.randint(2, 4))) for _ in range(60000)]
    pool += ["ГўВЂВ™ b", "ГўВЂВ™", "‚Äô", "≈°", "√±", "aÂ ", "x.Â »"]
    bad = badness.BADNESS_RE
    pool = [t for t in dict.fromkeys(pool) if bad.search(t)]
    rng.shuffle(pool)

    def without(modules, name, reduced, suspects):
        found = 0
        for t in suspects:
            want, pattern = ftfy.fix_text(t), getattr(modules[0], name)
            for module in modules:
                setattr(module, name, reduced)
            got = ftfy.fix_text(t)
            for module in modules:
                setattr(module, name, pattern)
            if got != want:
                yield t
                found += 1
                if found == 2:
                    return

    parts = re.split(r"\n\s*\|\n", bad.pattern)
    for part in parts:
        reduced = re.compile("\n|\n".join(q for q in parts if q is not part), re.VERBOSE)
        yield from without([badness], "BADNESS_RE", reduced, (t for t in pool if not reduced.search(t)))
    for name, modules, signs in [("ALTERED_UTF8_RE", [chardata, fixes], " "), ("LOSSY_UTF8_RE", [fixes], "?\ufffd")]:
        parts = getattr(fixes, name).pattern.split(b"|")
        for part in parts:
            reduced = re.compile(b"|".join(q for q in parts if q is not part))
            yield from without(modules, name, reduced, [t for t in pool if any(c in t for c in signs)][:4000])
    for lead in "ÂÃÅÎÐÙâãàá":
        yield f"Ã© {lead} b"
        yield f"Ã© {lead} \x84 b"
        yield f"Ã© {lead}\x84 b"


def judged(text):
    import ftfy
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean
    return {"text": text, "fixed": ftfy.fix_text(text), "cleaned": prompt_clean(text)}


def record(target):
    import diffusers
    import ftfy
    rows = [judged(t) for t in dict.fromkeys(ODD + PROSE + list(each_rule()) + list(texts(300, 1)))]
    head = {"written_by": "tools/golden/clean_text.py", "ftfy": ftfy.__version__, "diffusers": diffusers.__version__}
    target.write_text(json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(json.dumps(r) for r in rows) + "\n]}\n")
    print(len(rows), "texts,", sum(r["text"] != r["fixed"] for r in rows), "changed by ftfy")


def entities(target):
    table = html.entities.html5
    words = []
    for name in sorted(n for n in table if n.endswith(";")):
        bare = name[:-1]
        assert bare not in table or table[bare] == table[name]
        words.append(f"{bare}{'!' if bare in table else '='}{','.join(f'{ord(c):x}' for c in table[name])}")
    assert all(n.endswith(";") or n + ";" in table for n in table)
    lines, line = [], ""
    for word in words:
        if len(line) + len(word) > 110:
            lines.append(line)
            line = ""
        line += word + " "
    lines.append(line)
    head, tail = target.read_text().split("// begin: written by tools/golden/clean_text.py\n")[0], target.read_text().split("// end\n")[1]
    target.write_text(head + "// begin: written by tools/golden/clean_text.py\n" + "\n".join(f'    "{l}"' for l in lines) + "\n    // end\n" + tail)


if __name__ == "__main__":
    {"record": record, "entities": entities}[sys.argv[1]](pathlib.Path(sys.argv[2]))
