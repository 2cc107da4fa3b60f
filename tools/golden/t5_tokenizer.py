"""Records small T5 tokenizers and the ids that transformers' T5Tokenizer gives texts into tests/golden/data/t5/.

    python tools/golden/t5_tokenizer.py record tests/golden/data/t5
    python tools/golden/t5_tokenizer.py check FOLDER tests/golden/data/t5 NAME   # a folder that save() wrote of NAME

Needs transformers, sentencepiece and protobuf. The ids must agree exactly, there is no tolerance. Three folders:
  spiece   spiece.model with SentencePiece's nmt_nfkc normalization, as Google publishes T5's
  whole    tokenizer.json as transformers 5 writes it, with a normalization of a few rules
  flags    the same model with tokens whose flags tokenizer_config.json lists, as transformers 4 wrote them
texts.json: the texts, and for each folder the ids up to the end token, at most LENGTH.
"""
import io
import json
import pathlib
import random
import shutil
import sys

import sentencepiece
import transformers
from transformers import T5Tokenizer

LENGTH = 64
WORDS = """the a of in on with cat cats dog running mountain river photo photograph painting video high quality cinematic
light slowly camera moves through forest city street night rain ein Hund läuft über die Straße schön größer café naïve
résumé élégant garçon 東京 の 猫 が 走る 今天 天气 很 好 一只 红色 的 苹果 привет мир кошка бежит по улице hello world 1 2 3 10 2024
3.14 , . ! ? 's " ( ) - photo-realistic 4k 8k → € ½ 안녕 세계 مرحبا नमस्ते""".split()
# Compositions, a removal, one to several, a prefix of another rule, and texts with several code points.
RULES = [("65 301", "e9"), ("41 30a", "c5"), ("41", "61"), ("ff01", "21"), ("2026", "2e 2e 2e"), ("200b", ""),
         ("fb01", "66 69"), ("3000", "20"), ("9", "20"), ("a", "20"), ("aa", "61"), ("76 301", "78 79 7a"), ("1f34e", "2581")]


def train(folder, **options):
    rng = random.Random(0)
    lines = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 14))) for _ in range(600)]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, vocab_size=220, hard_vocab_limit=False, model_type="unigram",
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, character_coverage=0.98, num_threads=1, minloglevel=2, **options)
    (folder / "spiece.model").write_bytes(out.getvalue())


def texts():
    rng = random.Random(1)
    out = [
        "", " ", "\n\t \u3000", "a", "A photo of a cat", "hello world", "hello  world ", "  leading", "tab\tnew\nline\r\nend  ",
        "</s>", "a </s> b", "<pad> <unk>", "<extra_id_0> cat <extra_id_4>", "<extra_id_9>", "x<extra_id_0>y", "x  <extra_id_1>  y",
        "<extra_id_0><extra_id_1>", "  <extra_id_2>  ", "<my-cat>", "a <my-cat> b", "a<MY-CAT>b", "<EXTRA_ID_0>", "<extra_id_", "A\u030a",
        "▁", "▁cat", "a▁b", "▁▁ a ▁", "cat▁", "🍎cat", "🍎", "e\u0301", "cafe\u0301 cafe\u0301s", "v\u0301 v", "A\u0301", "e\u0301\u0302", "AA\u030aA",
        "ﬁre …！", "½ ªº ② ㎏ Ⅷ ﷺ ｶﾞ", "\u1e9b\u0323", "가각 \u1112\u1161\u11ab", "क्ष नमस्ते", "ก็ ำ", "👩🏿‍🦰 🏳️‍🌈 1️⃣ 🇯🇵🇯", "\u200b\u200d\ufeff\u00ad", "\u0301a", "a\u0300\u0301\u0302\u0303",
        "zero\x00byte \x7f \x01", "a\u00a0b\u2003c\u3000d\u200be\u2028f\u0085g\u180eh\ufeffi\x1cj\x0bk", "\ufffd \U0010ffff \ue000", "İı ẞß",
        "Привет, мир! 今天天气很好。 東京の猫が走る", "مرحبا بالعالم", "𝕳𝖊𝖑𝖑𝖔 𠀀", "qqq xyz qq🍎qq", "日本語" * 30, "cat " * 200, "q" * 300, "a" * 300, "🍎" * 90,
        "don’t “quotes” ‘single’ – — …", "e\u0301" * 40, "\r\n", "a\r\nb", "ΐ ǰ K Å Ω ſ", "\u0345", "\U0001d15e \u0958 \u2adc",
    ]
    pools = ["abcdefghijklmnopqrstuvwxyz", "ABCXYZ'!?., -0123456789", "äöüßéèñçŁø", "日本語中文字東京猫", "😀🍎🏿\u200d♀️", "αβγΣςΩ", "жшщЯ",
             "\t\n \u00a0\u3000", "\u0301\u0302\u030a\u0308\u20e3", "ｶﾞﾟﾊＡａ！", "ａｂ①㍿ﬁ½", "\u1112\u1161\u11ab가", "▁", "e\u0301A\u030av\u0301"]
    for _ in range(120):
        out.append(" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 20))))
    for _ in range(160):
        out.append("".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 40))))
    for _ in range(40):
        out.append("".join(chr(rng.choice([c for c in (rng.randint(1, 0x2FFF), rng.randint(0xF900, 0xFFFF))])) for _ in range(12)))
    return out


def encode(tokenizer, text, length=LENGTH):
    y = tokenizer(text, padding="max_length", max_length=length, truncation=True)
    real = sum(y.attention_mask)
    assert y.attention_mask == [1] * real + [0] * (length - real)
    assert y.input_ids[real:] == [tokenizer.pad_token_id] * (length - real)
    return y.input_ids[:real]


def dump(path, value):
    path.write_text(json.dumps(value, ensure_ascii=True, indent=1) + "\n")


def make(root):
    for name in ("spiece", "whole", "flags"):
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir(parents=True)
    train(root / "spiece")
    dump(root / "spiece" / "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "extra_ids": 5})
    rules = root / "rules.tsv"
    rules.write_text("".join(f"{a}\t{b}\n" for a, b in RULES))
    train(root / "flags", normalization_rule_tsv=str(rules))
    rules.unlink()
    dump(root / "flags" / "tokenizer_config.json", {"tokenizer_class": "T5Tokenizer", "extra_ids": 5})
    T5Tokenizer.from_pretrained(root / "flags").save_pretrained(root / "whole")
    # transformers 4: flags in tokenizer_config.json, and a token that is matched in normalized text.
    (root / "flags" / "spiece.model").unlink()
    whole = json.loads((root / "whole" / "tokenizer.json").read_text())
    charsmap = whole["normalizer"]
    whole["normalizer"] = {"type": "Sequence", "normalizers": [
        charsmap, {"type": "Strip", "strip_left": False, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}]}
    (root / "flags" / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False))
    size = len(whole["model"]["vocab"])
    token = lambda content, **flags: {"content": content, "lstrip": False, "normalized": False, "rstrip": False,
                                      "single_word": False, "special": True, **flags}
    named = ["<pad>", "</s>", "<unk>"]
    decoder = {str(i): token(t) for i, t in enumerate(named)}
    decoder |= {str(size - 1 - i): token(f"<extra_id_{i}>", lstrip=True, rstrip=True) for i in range(5)}
    decoder[str(size)] = token("<my-cat>", normalized=True, special=False)
    dump(root / "flags" / "tokenizer_config.json", {
        "added_tokens_decoder": decoder, "additional_special_tokens": [f"<extra_id_{i}>" for i in range(5)],
        "clean_up_tokenization_spaces": True, "eos_token": "</s>", "extra_ids": 5, "model_max_length": 512,
        "pad_token": "<pad>", "tokenizer_class": "T5Tokenizer", "unk_token": "<unk>"})
    dump(root / "flags" / "special_tokens_map.json", {"eos_token": token("</s>"), "pad_token": "<pad>", "unk_token": "<unk>"})


def main():
    act = sys.argv[1]
    if act == "record":
        root = pathlib.Path(sys.argv[2])
        make(root)
        tokenizers = {name: T5Tokenizer.from_pretrained(root / name) for name in ("spiece", "whole", "flags")}
        rows = [{"text": t} | {name: encode(k, t) for name, k in tokenizers.items()} for t in texts()]
        (root / "texts.json").write_text("{\"length\": %d, \"transformers\": \"%s\", \"tokenizers\": \"%s\", \"sizes\": %s, \"rows\": [\n" % (
            LENGTH, transformers.__version__, __import__("tokenizers").__version__,
            json.dumps({name: len(k) for name, k in tokenizers.items()})) +
            ",\n".join(json.dumps(r) for r in rows) + "\n]}\n")
        print({name: len(k) for name, k in tokenizers.items()}, len(rows), "texts")
    else:
        folder, root, name = sys.argv[2:]
        tokenizer = T5Tokenizer.from_pretrained(folder)
        rows = json.loads((pathlib.Path(root) / "texts.json").read_text())["rows"]
        wrong = [r["text"] for r in rows if encode(tokenizer, r["text"]) != r[name]]
        assert not wrong, wrong[:5]
        print(f"{len(rows)} texts agree")


if __name__ == "__main__":
    main()
