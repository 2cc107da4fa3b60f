"""Records embeddings of weighted and long prompts: PYTHONPATH=.deps/interop python3 tools/golden/weighted_prompts.py

tests/golden/prompts/ gets cases.json and golden.safetensors, as tools/golden/pipelines.py writes them, for the models that
it wrote. The embeddings are computed with transformers' CLIP by what AUTOMATIC1111's web UI and ComfyUI define, written
here a second time; prompts with and without go through the UNet one after the other, with as many tokens as each has.
"""

import json
import math
import pathlib
import re

import diffusers
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
LONG = "red heart, " + "blue heart " * 4 + ("a b c d e f g h, " * 9) + "red " * 30 + "heart, blue " * 20 + "(red:1.4) end"
CASES = {  # name: (folder, syntax, prompt, negative, words)
    "a1111_weights": ("sd", "a1111", "(red) ((heart)) [blue] (a:1.5) \\(b\\) c:d [[e]", "purple", []),
    "a1111_nested": ("sd", "a1111", "(red (heart:1.5) blue:0.7) a (b [c)", "(purple:1.3)", []),
    "a1111_break": ("sd", "a1111", "red heart BREAK (blue:1.2) heart\nBREAK end BREAKING", "purple", []),
    "a1111_long": ("sd", "a1111", LONG, "purple", []),
    "a1111_lone": ("sd2", "a1111", "red) heart] :1.5) \\a (blue", "purple " * 90, []),
    "a1111_clip_skip": ("sd", "a1111", "(red:1.3) heart", "", ["clip_skip=1"]),
    "a1111_sdxl": ("sdxl", "a1111", "(red:1.4) heart BREAK [blue]", "(purple)", []),
    "a1111_sdxl_zeros": ("sdxl", "a1111", LONG, None, []),
    "comfyui_weights": ("sd", "comfyui", "(red) ((heart)) [blue] (a:1.5) \\(b\\) c:d", "purple", []),
    "comfyui_nested": ("sd", "comfyui", "(red (heart:1.5) (a (b) c) blue:0.7) d (e:f) (g", "(purple:0.5)", []),
    "comfyui_long": ("sd", "comfyui", LONG + " " + "(blue heart a:1.2) " * 30, "purple", []),
    "comfyui_lone": ("sd2", "comfyui", "red) heart (blue:1.2", "purple " * 90, []),
    "comfyui_sdxl": ("sdxl", "comfyui", "(red:1.4) heart " + "blue " * 80, "(purple)", []),
}


def parse_a1111(text):
    tokens = re.compile(r"\\[()\[\]\\]|\\|\(|\[|:\s*([+-]?[.\d]+)\s*\)|\)|]|[^\\()\[\]:]+|:")
    result, round_open, square_open = [], [], []

    def scale(start, by):
        for piece in result[start:]:
            piece[1] *= by

    for m in tokens.finditer(text):
        word, weight = m.group(0), m.group(1)
        if word.startswith("\\"):
            result.append([word[1:], 1.0])
        elif word == "(":
            round_open.append(len(result))
        elif word == "[":
            square_open.append(len(result))
        elif weight is not None and round_open:
            scale(round_open.pop(), float(weight))
        elif word == ")" and round_open:
            scale(round_open.pop(), 1.1)
        elif word == "]" and square_open:
            scale(square_open.pop(), 1 / 1.1)
        else:
            for i, part in enumerate(re.split(r"\s*\bBREAK\b\s*", word)):
                if i > 0:
                    result.append([None, 1.0])
                result.append([part, 1.0])
    for start in round_open:
        scale(start, 1.1)
    for start in square_open:
        scale(start, 1 / 1.1)
    merged = []
    for piece in result or [["", 1.0]]:
        if merged and None not in (merged[-1][0], piece[0]) and merged[-1][1] == piece[1]:
            merged[-1][0] += piece[0]
        else:
            merged.append(piece)
    return merged


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, truncation=False).input_ids


def chunks_a1111(text, tokenizer):
    comma, chunks, current, last_comma = ids_of(tokenizer, ",")[0], [], [], -1

    def close(tokens):
        tokens = tokens + [(tokenizer.eos_token_id, 1.0)] * (75 - len(tokens))
        whole = [(tokenizer.bos_token_id, 1.0), *tokens, (tokenizer.eos_token_id, 1.0)]
        ids = [t for t, _ in whole]
        end = ids.index(tokenizer.eos_token_id)
        chunks.append((ids[:end + 1] + [tokenizer.pad_token_id] * (76 - end), [w for _, w in whole]))

    for part, weight in parse_a1111(text):
        if part is None:
            close(current)
            current, last_comma = [], -1
            continue
        for token in ids_of(tokenizer, part):
            if token == comma:
                last_comma = len(current)
            elif len(current) == 75 and last_comma != -1 and len(current) - last_comma <= 20:
                close(current[:last_comma + 1])
                current, last_comma = current[last_comma + 1:], -1
            if len(current) == 75:
                close(current)
                current, last_comma = [], -1
            current.append((token, weight))
    if current or not chunks:
        close(current)
    return chunks


def parse_comfyui(text, weight=1.0):
    items, item, level = [], "", 0
    for c in text:
        if c == "(":
            if level == 0:
                items += [item] if item else []
                item = ""
            level += 1
        item += c
        if c == ")":
            level -= 1
            if level == 0:
                items.append(item)
                item = ""
    items += [item] if item else []
    out = []
    for item in items:
        if len(item) >= 2 and item[0] == "(" and item[-1] == ")":
            item, inner = item[1:-1], weight * 1.1
            colon = item.rfind(":")
            if colon > 0:
                try:
                    inner = float(item[colon + 1:])
                    item = item[:colon]
                except ValueError:
                    pass
            out += parse_comfyui(item, inner)
        else:
            out.append((item, weight))
    return out


def chunks_comfyui(text, tokenizer):
    escaped = text.replace("\\)", "\0\1").replace("\\(", "\0\2")
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    chunks, batch = [], [(bos, 1.0)]

    def close():
        nonlocal batch
        batch = batch + [(eos, 1.0)]
        batch += [(pad, 1.0)] * (77 - len(batch))
        chunks.append(([t for t, _ in batch], [w for _, w in batch]))
        batch = [(bos, 1.0)]

    for part, weight in parse_comfyui(escaped):
        group = ids_of(tokenizer, part.replace("\0\1", ")").replace("\0\2", "("))
        large = len(group) >= 8
        while group:
            if len(group) + len(batch) > 76:
                room = 76 - len(batch)
                if large:
                    batch += [(t, weight) for t in group[:room]]
                    group = group[room:]
                close()
            else:
                batch += [(t, weight) for t in group]
                group = []
    if len(batch) > 1 or not chunks:
        close()
    return chunks


def hidden_of(pipe, encoder, ids, skip):
    out = encoder(torch.tensor(ids), output_hidden_states=True)
    if isinstance(pipe, StableDiffusionXLPipeline):
        return out.hidden_states[-2 - skip], out[0]
    norm = getattr(encoder, "text_model", encoder).final_layer_norm
    return (norm(out.hidden_states[-1 - skip]) if skip else out.last_hidden_state), None


def encoded(pipe, syntax, text, skip=0):
    parts, pooled = [], None
    xl = isinstance(pipe, StableDiffusionXLPipeline)
    for encoder, tokenizer in [(pipe.text_encoder, pipe.tokenizer)] + ([(pipe.text_encoder_2, pipe.tokenizer_2)] if xl else []):
        chunks = (chunks_a1111 if syntax == "a1111" else chunks_comfyui)(text, tokenizer)
        empty, _ = hidden_of(pipe, encoder, [chunks_comfyui("", tokenizer)[0][0]], skip)
        rows = []
        for ids, weights in chunks:
            z, p = hidden_of(pipe, encoder, [ids], skip)
            if pooled is None or len(rows) == 0:
                pooled = p
            w = torch.tensor(weights, dtype=z.dtype)[None, :, None]
            if syntax == "a1111":
                before = z.mean()
                z = z * w
                z = z * (before / z.mean())
            else:
                z = torch.where(w != 1, (z - empty) * w + empty, z)
            rows.append(z)
        parts.append(torch.cat(rows, 1))
    return torch.cat(parts, -1), pooled


def run(pipes, case, dtype):
    folder, syntax, prompt, negative, words = CASES[case]
    pipe = pipes[folder].to(dtype)
    skip = 1 if "clip_skip=1" in words else 0
    positive, pooled = encoded(pipe, syntax, prompt, skip)
    if negative is None:
        without, without_pooled = torch.zeros_like(positive), torch.zeros_like(pooled)
    else:
        without, without_pooled = encoded(pipe, syntax, negative)
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(sum(map(ord, case))))
    pipe.scheduler.set_timesteps(8)
    x = noise.to(dtype) * pipe.scheduler.init_noise_sigma
    sizes = torch.tensor([[16, 16, 0, 0, 16, 16]], dtype=dtype)
    for t in pipe.scheduler.timesteps:
        scaled = pipe.scheduler.scale_model_input(x, t)
        outs = []
        for text, vector in ((without, without_pooled), (positive, pooled)):
            extra = {} if vector is None else {"added_cond_kwargs": {"text_embeds": vector, "time_ids": sizes}}
            outs.append(pipe.unet(scaled, t, encoder_hidden_states=text, **extra).sample)
        x = pipe.scheduler.step(outs[0] + 7.5 * (outs[1] - outs[0]), t, x).prev_sample
    return {"noise": noise, "latents": x.float()}


@torch.no_grad()
def main():
    diffusers.logging.set_verbosity_error()
    pipes = {}
    for folder in ("sd", "sd2", "sdxl"):
        kind = StableDiffusionXLPipeline if folder == "sdxl" else StableDiffusionPipeline
        pipes[folder] = kind.from_pretrained(ROOT / "pipelines" / folder, torch_dtype=torch.float32)
    arrays, metadata, cases = {}, {"diffusers": diffusers.__version__}, []
    for case, (folder, syntax, prompt, negative, words) in CASES.items():
        exact, single = run(pipes, case, torch.float64), run(pipes, case, torch.float32)
        difference = (exact["latents"] - single["latents"]).double()
        metadata[f"noise_floor.{case}"] = str((difference.norm() / exact["latents"].double().norm()).item())
        arrays |= {f"{case}.{name}": value for name, value in single.items()}
        all_words = [f"prompt={prompt}", f"prompt_syntax={syntax}", "num_inference_steps=8",
                     "guidance_scale=7.5", "height=16", "width=16", *words]
        if negative is not None:
            all_words.append(f"negative_prompt={negative}")
        cases.append({"name": case, "folder": f"../pipelines/{folder}", "control": False, "words": all_words})
        print(case, [len(encoded(pipes[folder].to(torch.float32), syntax, p)[0][0]) // 77 for p in (prompt, negative or "")],
              metadata[f"noise_floor.{case}"])
    (ROOT / "prompts").mkdir(exist_ok=True)
    (ROOT / "prompts" / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    save_file(arrays, ROOT / "prompts" / "golden.safetensors", metadata=metadata)


if __name__ == "__main__":
    main()
