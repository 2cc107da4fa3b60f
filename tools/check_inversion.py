"""Checks files of learned embeddings with diffusers: every vector must be that of its token, and the word must sample.

    python tools/check_inversion.py MODEL FILE [FILE]

MODEL: a folder of Stable Diffusion, SDXL or FLUX.1; FILE: learned_embeds.safetensors, and for SDXL's second text encoder
learned_embeds_2.safetensors. Needs torch, diffusers and transformers. Exit status 0 if all checks pass.
"""
import argparse
import sys

import diffusers
import torch
from safetensors.torch import load_file


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--size", type=int, default=512)
    words = parser.parse_args()
    diffusers.logging.set_verbosity_error()
    pipe = diffusers.DiffusionPipeline.from_pretrained(words.model, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    encoders = [(pipe.text_encoder, pipe.tokenizer)]
    if hasattr(pipe, "text_encoder_2") and type(pipe.text_encoder_2).__name__.startswith("CLIP"):
        encoders.append((pipe.text_encoder_2, pipe.tokenizer_2))
    if len(words.files) != len(encoders):
        sys.exit(f"{len(words.files)} files for {len(encoders)} text encoders")
    for file, (encoder, tokenizer) in zip(words.files, encoders):
        ((word, rows),) = load_file(file).items()
        pipe.load_textual_inversion(file, text_encoder=encoder, tokenizer=tokenizer)
        tokens = [word] + [f"{word}_{i}" for i in range(1, len(rows))]
        table = encoder.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(tokens)]
        if not torch.equal(table, rows):
            sys.exit(f"{file}: the vectors of {word} are not those of the file")
        print(f"{word}: {len(rows)} vectors of {rows.shape[1]}")
    with torch.no_grad():
        image = pipe(f"a {word}", num_inference_steps=2, height=words.size, width=words.size, output_type="np").images
    print(f"{type(pipe).__name__}: {image.shape[2]}x{image.shape[1]} image")


if __name__ == "__main__":
    main()
