"""Writes a small T5 tokenizer (tokenizer.json, tokenizer_config.json): one token for each word of the captions of
prepare_moving_emoji, and one for each letter, of which other words are made.

    python tools/word_tokenizer.py FOLDER/metadata.jsonl configs/models/moving_emoji/tokenizer
"""

import json
import pathlib
import string
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors


def main(captions, folder):
    texts = [json.loads(line)["text"] for line in open(captions)]
    words = sorted({word for text in texts for word in text.split()})
    # A word is more probable than its spelling in characters.
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -6.0)]
    vocabulary += [("▁" + word, -3.0) for word in words]
    vocabulary += [(letter, -6.0) for letter in string.ascii_lowercase + string.digits + ".,!?:;'\"-"]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2, byte_fallback=False))
    mark = dict(replacement="▁", prepend_scheme="always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**mark)])
    tokenizer.decoder = decoders.Metaspace(**mark)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>",
         "extra_ids": 0}, indent=2) + "\n")
    print(len(vocabulary), "tokens")


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
