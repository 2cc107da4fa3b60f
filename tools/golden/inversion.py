"""Records textual inversion: PYTHONPATH=.deps/interop python3 tools/golden/inversion.py

tests/golden/inversion/ gets files of learned embeddings, random ones for the models of tools/golden/pipelines.py, and
  cases.json, golden.safetensors     samples of diffusers' pipelines after load_textual_inversion, as pipelines.py writes
                                     them; weighted prompts as weighted_prompts.py computes them
  training.json, training.safetensors  three training steps of the word <new> with the formulas of diffusers'
                                     textual_inversion.py and textual_inversion_sdxl.py, and for FLUX.1 with the loss
                                     of flow matching: per case the batches (latents, noise, timesteps, token ids),
                                     losses and trained rows; with the distances of a float64 run from the float32 one
FLUX.1 reads the pooled output of CLIP alone. transformers takes it, for configs with the legacy eos_token_id, at the
largest id, which would be the new word's; here at the end token, as for texts without new words.
"""

import json
import pathlib

import diffusers
import torch
import weighted_prompts
from diffusers import FluxPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors.torch import save_file
from wan_pipelines import kept_precision

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
OUT = ROOT / "inversion"
GENERATOR = torch.Generator().manual_seed(31)
CASES = {  # name: (folder, files, syntax, prompt, negative prompt)
    "sd_one_vector": ("sd", ["cat"], None, "a <cat> heart", "purple"),
    "sd_vectors": ("sd", ["dog"], None, "red <dog> heart, <dog>", "purple <dog>"),
    "sd_web_ui": ("sd", ["web_style"], None, "a red heart, web_style", "purple"),
    "sd_several": ("sd", ["cat", "dog"], None, "<cat> and <dog><cat>", "purple"),
    "sd_weighted": ("sd", ["cat", "dog"], "a1111", "a (red <dog>:1.4) BREAK [<cat>] heart", "(<dog>:0.7)"),
    "sd_comfyui": ("sd", ["dog"], "comfyui", "a (red <dog>:1.4) heart", "(<dog>:0.7)"),
    "sdxl_vectors": ("sdxl", ["learned_embeds", "learned_embeds_2"], None, "a <bird> heart", "purple"),
    "sdxl_one_file": ("sdxl", ["both"], None, "a red both", "blue both"),
    "flux_vectors": ("flux", ["sky"], None, "a red <sky> heart", None),
}
STEPS, BATCH, RATE, DECAY = 3, 2, 5e-3, 1e-2
WORD, INITIAL = "<new>", "red"
TRAINING = {"sd": (1, ["a photo of a <new>", "red <new> heart"]), "sd_vectors": (3, ["a photo of a <new>", "<new> <new>"]),
            "sdxl": (2, ["the <new>", "a heart of <new>"]), "flux": (2, ["the <new>", "a heart of <new>"])}
FOLDERS = {"sd": "pipelines/sd", "sdxl": "pipelines/sdxl", "flux": "flux/dev"}
FLUX_LENGTH = 12  # tokens of T5


def files(pipes):
    randn = lambda *shape: torch.randn(*shape, generator=GENERATOR) * 0.7
    wide = [e.config.hidden_size for e in (pipes["sdxl"].text_encoder, pipes["sdxl"].text_encoder_2)]
    width = pipes["sd"].text_encoder.config.hidden_size
    return {"cat": {"<cat>": randn(width)}, "dog": {"<dog>": randn(3, width)}, "web_style": {"emb_params": randn(2, width)},
            "learned_embeds": {"<bird>": randn(2, wide[0])}, "learned_embeds_2": {"<bird>": randn(2, wide[1])},
            "both": {"clip_l": randn(2, wide[0]), "clip_g": randn(2, wide[1])},
            "sky": {"<sky>": randn(2, pipes["flux"].text_encoder.config.hidden_size)}}


def load(folder, dtype):
    kind = {"sd": StableDiffusionPipeline, "sdxl": StableDiffusionXLPipeline, "flux": FluxPipeline}[folder]
    pipe = kind.from_pretrained(ROOT / FOLDERS[folder], torch_dtype=dtype)
    if folder == "flux":
        next(m for m in pipe.text_encoder.modules() if hasattr(m, "eos_token_id")).eos_token_id = pipe.tokenizer.eos_token_id
    pipe.set_progress_bar_config(disable=True)
    return pipe


def add(pipe, name, tensors):
    """As a user of diffusers loads the file: for two text encoders each tensor by itself."""
    encoders = [(pipe.text_encoder, pipe.tokenizer)]
    if isinstance(pipe, StableDiffusionXLPipeline):
        encoders.append((pipe.text_encoder_2, pipe.tokenizer_2))
    for key, value in tensors.items():
        word = key if key.startswith("<") else name
        at = {"clip_l": 0, "clip_g": 1}.get(key, 1 if name.endswith("_2") else 0)
        encoder, tokenizer = encoders[at]
        pipe.load_textual_inversion({word: value}, token=word, text_encoder=encoder, tokenizer=tokenizer)


def run(case, dtype, tensors):
    folder, names, syntax, prompt, negative = CASES[case]
    pipe = load(folder, dtype)
    for name in names:
        add(pipe, name, tensors[name])
    generator = torch.Generator().manual_seed(sum(map(ord, case)))
    if folder == "flux":
        noise = torch.randn(1, 16, 8, 8, generator=generator)
        with kept_precision():
            latents = pipe(prompt=prompt, num_inference_steps=8, guidance_scale=7.5, height=16, width=16, output_type="latent",
                           latents=pack(noise.to(dtype)), max_sequence_length=FLUX_LENGTH).images
        return {"noise": noise, "latents": FluxPipeline._unpack_latents(latents, 16, 16, 2).float()}
    noise = torch.randn(1, 4, 8, 8, generator=generator)
    if syntax is None:
        latents = pipe(prompt=prompt, negative_prompt=negative, num_inference_steps=8, guidance_scale=7.5, height=16, width=16,
                       latents=noise.to(dtype), output_type="latent").images
        return {"noise": noise, "latents": latents.float()}
    convert = lambda text: pipe.maybe_convert_prompt(text, pipe.tokenizer)
    weighted_prompts.CASES[case] = (folder, syntax, convert(prompt), convert(negative), [])
    return weighted_prompts.run({folder: pipe}, case, dtype)


def pack(x):
    return FluxPipeline._pack_latents(x, *x.shape)


def training_batches(seed, flow):
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for i in range(STEPS):
        for name in ("latents", "noise"):
            out[f"step{i}.{name}"] = torch.randn(BATCH, 16 if flow else 4, 8, 8, generator=generator)
        out[f"step{i}.timesteps"] = 1000 * torch.rand(BATCH, generator=generator) if flow else torch.randint(
            0, 1000, (BATCH,), generator=generator, dtype=torch.int32)
    return out


def step(loss, optimizer, tables, rows, originals):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for table, new, original in zip(tables, rows, originals):
            keep = torch.ones(len(table), dtype=torch.bool)
            keep[new] = False
            table[keep] = original[keep]
    return loss.item()


def train(case, dtype, batches):
    """The loop of the scripts: AdamW over the whole embedding tables; after a step all rows but the new are put back."""
    vectors, captions = TRAINING[case]
    pipe = load(case.split("_")[0], dtype)
    xl, flow = isinstance(pipe, StableDiffusionXLPipeline), isinstance(pipe, FluxPipeline)
    encoders = [(pipe.text_encoder, pipe.tokenizer)] + ([(pipe.text_encoder_2, pipe.tokenizer_2)] if xl else [])
    words = [WORD] + [f"{WORD}_{i}" for i in range(1, vectors)]
    text = [c.replace(WORD, " ".join(words)) for c in captions]
    tables, rows, ids, originals = [], [], [], []
    for encoder, tokenizer in encoders:
        first = len(tokenizer)
        tokenizer.add_tokens(words)
        encoder.resize_token_embeddings(len(tokenizer))
        encoder.requires_grad_(False)
        table = encoder.get_input_embeddings().weight
        with torch.no_grad():
            table[first:] = table[tokenizer.convert_tokens_to_ids(tokenizer.tokenize(INITIAL))[0]].clone()
        table.requires_grad_(True)
        tables.append(table)
        rows.append(slice(first, first + vectors))
        originals.append(table.detach().clone())
        ids.append(tokenizer(text, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids)
    if flow:
        ids.append(pipe.tokenizer_2(captions, padding="max_length", max_length=FLUX_LENGTH, truncation=True,
                                    return_tensors="pt").input_ids)
        with kept_precision():
            t5 = pipe.text_encoder_2(ids[1])[0].detach()
        pipe.transformer.requires_grad_(False)
    else:
        pipe.unet.requires_grad_(False)
        noises = diffusers.DDPMScheduler.from_config(pipe.scheduler.config)
    optimizer = torch.optim.AdamW(tables, lr=RATE, betas=(0.9, 0.999), weight_decay=DECAY, eps=1e-8)
    losses = []
    for i in range(STEPS):
        latents, noise = (batches[f"step{i}.{n}"].to(dtype) for n in ("latents", "noise"))
        if flow:
            t = batches[f"step{i}.timesteps"].to(dtype) / 1000
            at = t.reshape(-1, 1, 1, 1)
            with kept_precision():
                predicted = pipe.transformer(
                    hidden_states=pack((1 - at) * latents + at * noise), timestep=t, guidance=torch.full((BATCH,), 3.5, dtype=dtype),
                    pooled_projections=pipe.text_encoder(ids[0]).pooler_output, encoder_hidden_states=t5,
                    img_ids=FluxPipeline._prepare_latent_image_ids(BATCH, 4, 4, "cpu", dtype),
                    txt_ids=torch.zeros(FLUX_LENGTH, 3, dtype=dtype)).sample
            loss = torch.nn.functional.mse_loss(predicted, pack(noise - latents), reduction="mean")
            losses.append(step(loss, optimizer, tables, rows, originals))
            continue
        t = batches[f"step{i}.timesteps"].long()
        outs = [e(x, output_hidden_states=True) for (e, _), x in zip(encoders, ids)]
        if xl:
            hidden = torch.cat([o.hidden_states[-2] for o in outs], -1)
            sizes = torch.tensor([[16, 16, 0, 0, 16, 16]] * BATCH, dtype=dtype)
            extra = {"added_cond_kwargs": {"text_embeds": outs[1][0], "time_ids": sizes}}
        else:
            hidden, extra = outs[0][0], {}
        predicted = pipe.unet(noises.add_noise(latents, noise, t), t, encoder_hidden_states=hidden, **extra).sample
        loss = torch.nn.functional.mse_loss(predicted, noise, reduction="mean")
        losses.append(step(loss, optimizer, tables, rows, originals))
    return losses, [table[new].detach() for table, new in zip(tables, rows)], ids


def main():
    diffusers.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(True)
    OUT.mkdir(exist_ok=True)
    tensors = files({name: load(name, torch.float32) for name in FOLDERS})
    for name, of_file in tensors.items():
        save_file(of_file, OUT / f"{name}.safetensors", metadata={"format": "pt"})
    arrays, metadata, cases = {}, {"diffusers": diffusers.__version__}, []
    with torch.no_grad():
        for case, (folder, names, syntax, prompt, negative) in CASES.items():
            exact, single = run(case, torch.float64, tensors), run(case, torch.float32, tensors)
            off = (exact["latents"] - single["latents"]).double()
            metadata[f"noise_floor.{case}"] = str((off.norm() / exact["latents"].double().norm()).item())
            arrays |= {f"{case}.{name}": value for name, value in single.items()}
            words = [f"prompt={prompt}", *([f"negative_prompt={negative}"] if negative else [f"max_sequence_length={FLUX_LENGTH}"]),
                     "num_inference_steps=8", "guidance_scale=7.5", "height=16", "width=16", "embeddings=" + ",".join("{}/" + n + ".safetensors" for n in names)]
            if syntax:
                words.append(f"prompt_syntax={syntax}")
            cases.append({"name": case, "folder": f"../{FOLDERS[folder]}", "control": False, "words": words})
            print(case, metadata[f"noise_floor.{case}"])
    (OUT / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    save_file(arrays, OUT / "golden.safetensors", metadata=metadata)
    trained, facts = {}, {}
    for case, (vectors, captions) in TRAINING.items():
        batches = training_batches(sum(map(ord, case)), case == "flux")
        losses, rows, ids = train(case, torch.float32, batches)
        exact_losses, exact_rows, _ = train(case, torch.float64, batches)
        trained |= {f"{case}.{name}": value for name, value in batches.items()}
        trained |= {f"{case}.ids{'' if i == 0 else '_2'}": x.int() for i, x in enumerate(ids)}
        trained |= {f"{case}.rows{i}": x.contiguous() for i, x in enumerate(rows)}
        words = [f"max_sequence_length={FLUX_LENGTH}", "guidance_scale=3.5", "disable_training_weights=true"]
        facts[case] = {"folder": FOLDERS[case.split("_")[0]], "words": words if case == "flux" else [], "vectors": vectors, "captions": captions, "losses": losses,
                       "noise_floor": {
                           "losses": max(abs(a / b - 1) for a, b in zip(losses, exact_losses)),
                           "rows": max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(rows, exact_rows))}}
        print(case, facts[case])
    (OUT / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    save_file(trained, OUT / "training.safetensors")


if __name__ == "__main__":
    main()
