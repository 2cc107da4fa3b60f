"""Records small tokenizers of the tokenizers library, and the ids that transformers gives texts, into tests/golden/data/tokenizers.

    python tools/golden/json_tokenizers.py record tests/golden/data/tokenizers
    python tools/golden/json_tokenizers.py qwen qwen.tiktoken tests/golden/data/tokenizers FOLDER
    python tools/golden/json_tokenizers.py check FOLDER tests/golden/data/tokenizers NAME   # a folder that save() wrote of NAME

Needs transformers. The ids must agree exactly, there is no tolerance. Folders:
  qwen       byte-level BPE with Qwen's steps (Qwen2Tokenizer), vocab.json and merges.txt too
  gpt2       byte-level BPE with GPT-2's words, a space before the text, and a template with two tokens
  llama      BPE over '▁' with byte fallback and a token before the text
  words      BPE with unknown tokens, lower case, suffixes, digits and signs apart, Roberta's post-processor
  unigram    Unigram with NFKC, runs of spaces replaced, and '▁' before the first word only
lines.json: the pools of which lines are made, and for each folder the hash of the ids of COUNTS lines. A line is made of
fragments that a generator of numbers chooses (the test has the same one), broken UTF-8 among them; it is read as U+FFFD.
`qwen` writes the tokenizer of Qwen itself, of the vocabulary that the dashscope wheel ships, to FOLDER, and prints its hash.
"""
import base64
import json
import pathlib
import random
import shutil
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
import tokenizers
import transformers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

COUNTS = {"qwen": 100_000, "gpt2": 10_000, "llama": 10_000, "words": 10_000, "unigram": 10_000}
LENGTH = 128
QWEN = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
WORDS = """the a of in on with cat cats dog running mountain river photo photograph painting cinematic light slowly camera
moves through forest city street night rain ein Hund läuft über die Straße schön größer café naïve résumé élégant
garçon 東京 の 猫 が 走る 今天 天气 很 好 一只 红色 的 苹果 привет мир кошка бежит по улице hello world 3.14 photo-realistic
안녕 세계 مرحبا नमस्ते สวัสดี שלום It's they're I'VE don't WE'LL o'clock return for int main std::vector<float> x += 1;""".split()
POOLS = [
    WORDS,
    [" ", " ", " ", "  ", "   ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\u0085", "\x0b", "\x1c", " \n ", "\n\n", "\u200b", "\u180e"],
    list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    list("0123456789") + ["1234567", "½", "²", "Ⅷ", "٣٤", "一二三", "①", "𝟙𝟚"],
    list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") + ["...", "==", "->", "//", "/*", "''", "€", "£", "…", "—", "“", "”", "’", "。", "，", "▁"],
    ["🍎", "👩🏿‍🦰", "🏳️‍🌈", "1️⃣", "🇯🇵", "❤️", "😀", "\u200d", "\ufe0f", "🏿"],
    ["e\u0301", "A\u030a", "\u0301", "\u212b", "\ufb01", "\u1e9b\u0323", "가", "\u1112\u1161\u11ab", "ｶﾞ", "ﷺ", "İ", "ı", "ſ", "K", "ß", "ẞ", "Σ", "ς", "ǅ"],
    ["'s", "'S", "'T", "'re", "'VE", "'ſ", "'ll", "'d", "'x", "s'"],
    ["def f(x):\n    return x\n", "if (a && b) {\n\t", "</div>", "#include <vector>\n", "https://example.com/a?b=c&d=e", "\\n", "C++20", "λx.x", "snake_case", "camelCase"],
    ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\n", "<s>", "</s>", "<my-cat>", "<MY-CAT>", "<|im_", "|>"],
    [[0xFF], [0xC3], [0xE2, 0x82], [0xF0, 0x9F], [0x80], [0xC0, 0xAF], [0xED, 0xA0, 0x80]],
    ["\x00", "\x7f", "\x01", "\ufffd", "\U0010ffff", "\ue000", "\ufeff", "𝕳", "𠀀", "𐐀", "ก็", "क्ष", "\u0345"],
]


def generator(state=1):
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33


def lines(count):
    numbers = generator()
    pools = [[bytes(e) if isinstance(e, list) else e.encode() for e in pool] for pool in POOLS]
    for _ in range(count):
        parts = []
        for _ in range(1 + next(numbers) % 24):
            pool = pools[next(numbers) % len(pools)]
            parts.append(pool[next(numbers) % len(pool)])
        yield b"".join(parts).decode("utf-8", errors="replace")


def digest(tokenizer, name):
    """FNV-1a of each line's ids and their number, little endian, 32 bits each."""
    value = 0xCBF29CE484222325
    batch = list(lines(COUNTS[name]))
    for begin in range(0, len(batch), 1000):
        for ids in tokenizer(batch[begin:begin + 1000], max_length=LENGTH, truncation=True).input_ids:
            for b in b"".join(i.to_bytes(4, "little") for i in [*ids, len(ids)]):
                value = (value ^ b) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def corpus():
    rng = random.Random(0)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 14))) for _ in range(600)]


def trained(model, normalizer, pre, vocab_size=450, special=(), trainer=trainers.BpeTrainer, **options):
    t = Tokenizer(model)
    t.normalizer, t.pre_tokenizer = normalizer, pre
    t.train_from_iterator(corpus(), trainer(vocab_size=vocab_size, special_tokens=list(special), show_progress=False, **options))
    return t


def write(folder, t, **names):
    PreTrainedTokenizerFast(tokenizer_object=t, clean_up_tokenization_spaces=False, **names).save_pretrained(folder)


def qwen_steps():
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), behavior="isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def save_qwen(folder, vocab, merges):
    folder.mkdir(parents=True, exist_ok=True)
    q = Qwen2Tokenizer(vocab=vocab, merges=merges)
    q.add_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    q.save_pretrained(folder)


def make(root):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t = trained(models.BPE(), normalizers.NFC(), qwen_steps(), 600, initial_alphabet=alphabet)
    model = json.loads(t.to_str())["model"]
    save_qwen(root / "qwen", model["vocab"], [tuple(m) for m in model["merges"]])
    (root / "qwen" / "vocab.json").write_text(json.dumps(model["vocab"]))
    (root / "qwen" / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(m) + "\n" for m in model["merges"]))
    t = trained(models.BPE(), None, pre_tokenizers.ByteLevel(add_prefix_space=True), 420, ["<s>", "</s>"], initial_alphabet=alphabet)
    t.post_processor = processors.TemplateProcessing(single="<s> $A </s> </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    write(root / "gpt2", t, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    t = trained(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True), None,
                pre_tokenizers.Metaspace(prepend_scheme="first"), 560, ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)])
    t.add_tokens([AddedToken("<my-cat>", normalized=True)])
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    write(root / "llama", t, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>")
    t = trained(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>", fuse_unk=True),
                normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]),
                pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True),
                                         pre_tokenizers.Punctuation("merged_with_previous")]),
                380, ["<unk>", "<s>", "</s>"], end_of_word_suffix="</w>")
    t.add_tokens([AddedToken("<my-cat>", normalized=True, lstrip=True)])
    t.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1))
    write(root / "words", t, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>")
    t = trained(models.Unigram(), normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s{2,}"), " "),
                                                        normalizers.Strip(left=False)]),
                pre_tokenizers.Metaspace(prepend_scheme="first"), 300, ["<unk>", "<s>", "</s>"], trainer=trainers.UnigramTrainer, unk_token="<unk>")
    t.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    write(root / "unigram", t, eos_token="</s>", unk_token="<unk>", pad_token="</s>")


def load(folder, name):
    return (Qwen2Tokenizer if name == "qwen" else PreTrainedTokenizerFast).from_pretrained(folder)


def main():
    act = sys.argv[1]
    if act == "record":
        root = pathlib.Path(sys.argv[2])
        shutil.rmtree(root, ignore_errors=True)
        make(root)
        opened = {name: load(root / name, name) for name in COUNTS}
        (root / "lines.json").write_text(json.dumps({
            "transformers": transformers.__version__, "tokenizers": tokenizers.__version__, "counts": COUNTS, "length": LENGTH,
            "sizes": {n: len(t) for n, t in opened.items()}, "hashes": {n: digest(t, n) for n, t in opened.items()},
            "samples": {n: [t(line, max_length=LENGTH, truncation=True).input_ids for line in lines(50)] for n, t in opened.items()},
            "pools": POOLS}) + "\n")
    elif act == "qwen":
        source, root, folder = map(pathlib.Path, sys.argv[2:])
        ranks = dict(line.split() for line in source.read_bytes().splitlines())
        tokens = [base64.b64decode(t) for t, _ in sorted(ranks.items(), key=lambda r: int(r[1]))]
        order = {t: i for i, t in enumerate(tokens)}
        byte = {b: c for b, c in transformers.convert_slow_tokenizer.bytes_to_unicode().items()}
        text = lambda t: "".join(byte[b] for b in t)

        def parts(token):  # the pair of which merges make a token: byte pairs joined as long as they are of a lower rank
            pieces = [bytes([b]) for b in token]
            while len(pieces) > 2:
                best = min((order.get(pieces[i] + pieces[i + 1], len(order)), i) for i in range(len(pieces) - 1))[1]
                pieces[best:best + 2] = [pieces[best] + pieces[best + 1]]
            return tuple(text(p) for p in pieces)

        save_qwen(folder, {text(t): i for i, t in enumerate(tokens)}, [parts(t) for t in tokens if len(t) > 1])
        print(len(tokens), digest(load(folder, "qwen"), "qwen"))
    else:
        folder, root, name = sys.argv[2:]
        want = json.loads((pathlib.Path(root) / "lines.json").read_text())["hashes"][name]
        found = digest(load(folder, name), name)
        assert found == want, (found, want)
        print(f"{COUNTS[name]} lines agree")


if __name__ == "__main__":
    main()
