"""Records texts and their token ids by transformers' CLIPTokenizer into tests/golden/data/tokenizer.json.

    python tools/golden/tokenizer.py record bpe_simple_vocab_16e6.txt.gz tests/golden/data/tokenizer.json
    python tools/golden/tokenizer.py check FOLDER tests/golden/data/tokenizer.json     # a folder that save() wrote

Needs transformers; the ids must agree exactly, there is no tolerance.
"""
import gzip
import json
import os
import random
import sys
import tempfile

import transformers
from transformers import CLIPTokenizer


def byte_alphabet():
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in printing]
    return [chr(b) for b in printing] + [chr(256 + i) for i in range(len(moved))]


def write_folder(bpe, folder):
    lines = gzip.open(bpe).read().decode().split("\n")[1 : 49152 - 256 - 2 + 1]
    tokens = byte_alphabet()
    tokens += [t + "</w>" for t in tokens] + ["".join(line.split()) for line in lines]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    json.dump({t: i for i, t in enumerate(tokens)}, open(os.path.join(folder, "vocab.json"), "w"))
    open(os.path.join(folder, "merges.txt"), "w").write("#version: 0.2\n" + "\n".join(lines) + "\n")


def texts():
    rng = random.Random(1)
    out = [
        "", " ", "\n\t ", "a", "A photo of a cat", "red apple", "woman: dark skin tone, red hair", "flag: Côte d’Ivoire",
        "keycap: #", "It's, they're, I've, I'm, he'll, we'd, don't, DON'T, o'clock, ''s 's' 'ss '''", "x'S y'LL",
        "1234567890 3.14159 1e-5 ½ ² Ⅷ ٣٤ 一二三", "Hello!!! ... ?! -- @#$%^&*()_+{}|:\"<>?~`[]\\;',./", "!", "!!", "a!b ! c!",
        "&amp; &lt;b&gt; &quot;x&quot; &#39; &nbsp;", "<b>bold</b> http://example.com/a?b=c&d=e user@example.com",
        "<|startoftext|>", "<|endoftext|>", "a <|endoftext|> b", "<|ENDOFTEXT|>", "<|StartOfText|>|x", "<|<|startoftext|>|x",
        "ÀÉÎÕÜ àéîõü ß ẞ ŒÆ œæ ñ ç", "e\u0301 A\u030a \u212b \u1e9b\u0323 \ufb01", "İstanbul I ı Σίσυφος ΌΣΟΣ Ǆ ǅ ǆ",
        "Привет, мир! Як справи?", "你好，世界。一只红色的苹果", "こんにちは カタカナ ｶﾀｶﾅ 東京", "안녕하세요 세계 \u1112\u1161\u11ab",
        "مرحبا بالعالم ١٢٣", "שלום עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก", "ﬁ ﬂ ﬀ", "𝕳𝖊𝖑𝖑𝖔 𝟙𝟚𝟛 𐐀𐐨 𠀀", "👩🏿‍🦰 🍎 🏳️‍🌈 👨‍👩‍👧‍👦 ❤️ 1️⃣ 🇯🇵",
        "a\u00a0b\u2003c\u3000d\u200be\u2028f\u0085g\u180eh\ufeffi\x1cj\x0bk", "zero\x00byte \x7f \x01", "tab\tnew\nline\r\nend  ",
        "supercalifragilisticexpialidocious antidisestablishmentarianism", "a" * 300, "ab" * 500, "é" * 100, "!" * 200, "9" * 100,
        "word " * 100, "🍎" * 90, "_under_score_ snake_case camelCase kebab-case", "C++20 C# F♯ λx.x ∀x∈ℝ: √2≈1.414 €5 £6 ¥7 ©®™",
        "don’t “quotes” ‘single’ – — …", "a photo of sks dog, 8k, (masterpiece:1.2), [blurry], best quality",
        "Ünïcödé TÉXT wïth MÍXED Cäse", "\U0010ffff \ue000 \ufffd", "ᾳ ᾼ Ὀδυσσεύς ǰ ŉ ΐ ﬓ", "K Å Ω ſ", "\u0345\u0301a \u0300",
    ]
    words = "a the of red green blue cat dog photo painting drawing on in with sky tree house robot astronaut riding horse 3d".split()
    pools = ["abcdefghijklmnopqrstuvwxyz", "ABCXYZ'!?., -0123456789", "äöüßéèñçŁø", "日本語中文字", "😀🍎🏿‍️♀", "αβγΣςΩ", "жшщЯ", "\t\n \u00a0"]
    for _ in range(160):
        out.append(" ".join(rng.choice(words) for _ in range(rng.randint(1, 20))))
    for _ in range(100):
        out.append("".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 60))))
    return out


def encode(tokenizer, text, length=77):
    return tokenizer(text, padding="max_length", max_length=length, truncation=True).input_ids


def compact(ids, pad):
    while len(ids) > 1 and ids[-1] == pad and ids[-2] == pad:
        ids = ids[:-1]
    return ids


def load(folder, **options):
    return CLIPTokenizer.from_pretrained(folder, model_max_length=77, **options)


def main():
    act, source, target = sys.argv[1:]
    if act == "record":
        with tempfile.TemporaryDirectory() as folder:
            write_folder(source, folder)
            plain, bang = load(folder), load(folder, pad_token="!")
            rows = [{"text": t, "ids": encode(plain, t), "ids_pad_0": encode(bang, t)} for t in texts()]
        for row in rows:  # trailing padding is left out
            row["ids"] = compact(row["ids"], plain.pad_token_id)
            row["ids_pad_0"] = compact(row["ids_pad_0"], 0)
        with open(target, "w") as f:
            head = json.dumps({"written_by": "tools/golden/tokenizer.py", "transformers": transformers.__version__})
            f.write(head[:-1] + ', "rows": [\n' + ",\n".join(json.dumps(r) for r in rows) + "\n]}\n")
        print(f"{len(rows)} texts")
    elif act == "check":
        golden = json.load(open(target))
        tokenizer = CLIPTokenizer.from_pretrained(source)
        pad = tokenizer.pad_token_id
        key = "ids_pad_0" if pad == 0 else "ids"
        wrong = [r["text"] for r in golden["rows"] if compact(encode(tokenizer, r["text"]), pad) != r[key]]
        print(f"{len(golden['rows'])} texts, {len(wrong)} differ {wrong[:3]}")
        sys.exit(bool(wrong))


main()
