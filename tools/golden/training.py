"""Writes the goldens of training: six steps of PyTorch on the tiny folders of tests/golden/pipelines, wan, flux, zimage and qwenimage.

tests/golden/training/ gets
  batches_<folder>.safetensors   step{i}.latents, .noise, .timesteps, .encoder_hidden_states and SDXL's .text_embeds,
                                 .time_ids: what `replay_batches` reads; for Wan .sigmas in place of .timesteps, and
                                 .condition and .image_embeds; for Flux .pooled_projections; for Z-Image
                                 .prompt_lengths
  golden.json                    per case: folder, words of the command, loss and gradient norm (before clipping) of
                                 every step, learning rates, and the distances of a float64 run from this one; with
                                 rounded weights the largest of that run's and of four whose masters start off by 1e-7
  golden.safetensors             <case>.<name> of some weights after the last step
All in float32 on the CPU: torch.optim.AdamW, clip_grad_norm_, diffusers' models, schedules and formulas. Cases with
"weights_dtype=bfloat16" have float32 masters, which are what is updated and recorded; the model computes, in float32,
with the masters rounded to bfloat16.

    python tools/golden/training.py             all of it
    python tools/golden/training.py CASE …      these cases; the others and the batches stay as they are
"""

import json
import pathlib
import sys

import diffusers
import torch
from diffusers import (DDPMScheduler, Flux2KleinPipeline, Flux2Transformer2DModel, FluxPipeline, FluxTransformer2DModel,
                       QwenImageTransformer2DModel,
                       UNet2DConditionModel, WanTransformer3DModel, ZImageTransformer2DModel)
from diffusers.optimization import get_scheduler
from diffusers.training_utils import compute_snr
from safetensors.torch import load_file, save_file
from wan_pipelines import kept_precision

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
ROOT = GOLDEN / "training"
STEPS, BATCH = 6, 2
# name: (folder, prediction, snr gamma, schedule, warm-up steps, clip by norm, clip by value, words)
CASES = {
    "sdxl": ("sdxl", "epsilon", None, "constant", 0, None, None,
             ["lr_scheduler=constant", "warmup_steps_fraction=0"]),
    "sdxl_clipped": ("sdxl", "epsilon", None, "cosine", 2, 0.05, 0.01,
                     ["lr_scheduler=cosine", "warmup_steps_fraction=0.34", "opt_enable_grad_clipping=true",
                      "max_grad_value=0.01", "opt_enable_grad_global_norm_clipping=true", "max_grad_norm=0.05"]),
    "sd_v_snr": ("sd", "v_prediction", 5.0, "polynomial", 1, 1.0, None,
                 ["prediction_type=v_prediction", "snr_gamma=5.0", "lr_scheduler=polynomial", "lr_power=2",
                  "warmup_steps_fraction=0.17"]),
    "sd_sample": ("sd", "sample", 5.0, "cosine_with_restarts", 0, 1.0, None,
                  ["prediction_type=sample", "snr_gamma=5.0", "lr_scheduler=cosine_with_restarts", "lr_num_cycles=2",
                   "warmup_steps_fraction=0"]),
    "sdxl_bf16": ("sdxl", "epsilon", None, "constant", 0, None, None,
                  ["lr_scheduler=constant", "warmup_steps_fraction=0", "weights_dtype=bfloat16"]),
    "sd_v_snr_bf16": ("sd", "v_prediction", 5.0, "polynomial", 1, 1.0, None,
                      ["prediction_type=v_prediction", "snr_gamma=5.0", "lr_scheduler=polynomial", "lr_power=2",
                       "warmup_steps_fraction=0.17", "weights_dtype=bfloat16"]),
    # The prediction type is the folder's.
    "sd2": ("sd2", "v_prediction", None, "constant", 0, 1.0, None,
            ["lr_scheduler=constant", "warmup_steps_fraction=0"]),
    "sd2_contrastive": ("sd2", "v_prediction", None, "constant", 0, 1.0, None,
                        ["lr_scheduler=constant", "warmup_steps_fraction=0", "contrastive_flow_matching=true",
                         "cfm_lambda=0.2"]),
}
BATCHES = {"sd2": "sd", "dev": "flux", "schnell": "flux", "base": "zimage", "distilled": "flux2"}  # batches of another folder
# Flow matching; name: (folder, component, shift of the grid of weights or None, words)
FLOWS = {
    "wan": ("t2v", "transformer", 3.0, ["lr_scheduler=constant", "warmup_steps_fraction=0"]),
    "wan_unweighted": ("t2v", "transformer", None, ["lr_scheduler=constant", "warmup_steps_fraction=0",
                                                    "disable_training_weights=true"]),
    "wan_contrastive": ("t2v", "transformer", 3.0, ["lr_scheduler=constant", "warmup_steps_fraction=0",
                                                    "contrastive_flow_matching=true"]),
    "wan_image": ("i2v", "transformer", 3.0, ["lr_scheduler=constant", "warmup_steps_fraction=0"]),
    "wan_low": ("a14b", "transformer_2", 5.0, ["lr_scheduler=constant", "warmup_steps_fraction=0", "train_expert=low",
                                               "train_flow_shift=5", "timestep_lookup=reference_table"]),
}
# Flow matching; name: (folder, guidance, words)
FLUXES = {
    "flux_dev": ("dev", 3.5, ["lr_scheduler=constant", "warmup_steps_fraction=0", "disable_training_weights=true",
                              "guidance_scale=3.5"]),
    "flux_schnell": ("schnell", None, ["lr_scheduler=constant", "warmup_steps_fraction=0",
                                       "disable_training_weights=true", "max_sequence_length=12"]),
}
# Flow matching; name: (folder, words)
Z_IMAGES = {
    "z_image": ("base", ["lr_scheduler=constant", "warmup_steps_fraction=0", "disable_training_weights=true"]),
}
# Flow matching; name: (folder, words)
FLUX2S = {
    "flux2": ("distilled", ["lr_scheduler=constant", "warmup_steps_fraction=0", "disable_training_weights=true",
                       "text_encoder_out_layers=[1,2,3]"]),
}
# Flow matching; name: (folder, words)
QWEN_IMAGES = {
    "qwen_image": ("base", ["lr_scheduler=constant", "warmup_steps_fraction=0", "disable_training_weights=true"]),
}
# Flow matching with reference images of the sample's size; name: (folder under tests/golden, words)
EDITS = {
    "qwen_edit": ("qwenimage_edit/plus", ["lr_scheduler=constant", "warmup_steps_fraction=0",
                                          "disable_training_weights=true"]),
    "flux2_edit": ("flux2/distilled", FLUX2S["flux2"][1]),
}
SIGMA_MIN = 0.003 / 1.002
RATE, DECAY = 1e-3, 1e-2


def batches(folder, seed):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    out = {}
    for i in range(STEPS):
        out |= {f"step{i}.latents": randn(BATCH, 4, 8, 8), f"step{i}.noise": randn(BATCH, 4, 8, 8),
                f"step{i}.timesteps": torch.randint(0, 1000, (BATCH,), generator=generator, dtype=torch.int32),
                f"step{i}.encoder_hidden_states": randn(BATCH, 7, 24 if folder == "sdxl" else 16)}
        if folder == "sdxl":
            out |= {f"step{i}.text_embeds": randn(BATCH, 16),
                    f"step{i}.time_ids": torch.tensor([[16.0, 16, 0, 0, 16, 16], [20, 16, 2, 1, 16, 16]])}
    return out


def flow_batches(folder, seed):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    out = {}
    for i in range(STEPS):
        out |= {f"step{i}.latents": randn(BATCH, 4, 2, 4, 4), f"step{i}.noise": randn(BATCH, 4, 2, 4, 4),
                f"step{i}.sigmas": SIGMA_MIN + (1 - SIGMA_MIN) * torch.rand(BATCH, generator=generator),
                # diffusers separates image and text tokens at this number
                f"step{i}.encoder_hidden_states": randn(BATCH, 512 if folder == "i2v" else 7, 16)}
        if folder == "i2v":
            out |= {f"step{i}.condition": randn(BATCH, 8, 2, 4, 4), f"step{i}.image_embeds": randn(BATCH, 5, 16)}
    return out


def flux_batches(seed):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    out = {}
    for i in range(STEPS):
        out |= {f"step{i}.latents": randn(BATCH, 16, 8, 6), f"step{i}.noise": randn(BATCH, 16, 8, 6),
                f"step{i}.timesteps": 1000 * torch.rand(BATCH, generator=generator),
                f"step{i}.encoder_hidden_states": randn(BATCH, 7, 12),
                f"step{i}.pooled_projections": randn(BATCH, 16)}
    return out


def pack(x):
    return FluxPipeline._pack_latents(x, *x.shape)


def flow_steps(model, data, dtype, loss_of):
    """Six steps on all weights with loss_of(batch, latents, noise, noisy latents, time in [0, 1])."""
    model = model.to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)
    log = {"loss": [], "grad_norm": [], "learning_rate": []}
    for i in range(STEPS):
        b = {k.split(".")[1]: v.to(dtype) if v.is_floating_point() else v for k, v in data.items()
             if k.startswith(f"step{i}.")}
        latents, eps, t = b["latents"], b["noise"], b["timesteps"] / 1000
        x = (1 - t.reshape(-1, 1, 1, 1)) * latents + t.reshape(-1, 1, 1, 1) * eps
        with kept_precision():
            loss = loss_of(b, latents, eps, x, t)
        loss.backward()
        used = [p for p in model.parameters() if p.grad is not None]
        log["loss"].append(loss.item())
        log["grad_norm"].append(torch.stack([p.grad.norm() for p in used]).norm().item())
        log["learning_rate"].append(RATE)
        optimizer.step()
        model.zero_grad()
    return log, {k: p.detach().float() for k, p in model.named_parameters()}


def flux2_batches(seed):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    out = {}
    for i in range(STEPS):
        out |= {f"step{i}.latents": randn(BATCH, 16, 5, 3), f"step{i}.noise": randn(BATCH, 16, 5, 3),
                f"step{i}.timesteps": 1000 * torch.rand(BATCH, generator=generator),
                f"step{i}.encoder_hidden_states": randn(BATCH, 7, 24)}
    return out


def train_flux2(case, data, dtype):
    """The loss of examples/dreambooth/train_dreambooth_lora_flux2_klein.py without weighting, on all weights."""
    model = Flux2Transformer2DModel.from_pretrained(GOLDEN / "flux2" / FLUX2S[case][0] / "transformer")
    model = model.to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)
    log = {"loss": [], "grad_norm": [], "learning_rate": []}
    pack = Flux2KleinPipeline._pack_latents
    for i in range(STEPS):
        b = {k.split(".")[1]: v.to(dtype) for k, v in data.items() if k.startswith(f"step{i}.")}
        latents, eps, texts = b["latents"], b["noise"], b["encoder_hidden_states"]
        level = b["timesteps"].reshape(-1, 1, 1, 1) / 1000
        with kept_precision():
            out = model(hidden_states=pack((1 - level) * latents + level * eps), timestep=b["timesteps"] / 1000,
                        encoder_hidden_states=texts, txt_ids=Flux2KleinPipeline._prepare_text_ids(texts),
                        img_ids=Flux2KleinPipeline._prepare_latent_ids(latents), return_dict=False)[0]
        loss = ((pack(eps - latents) - out) ** 2).mean()
        loss.backward()
        log["loss"].append(loss.item())
        log["grad_norm"].append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
        log["learning_rate"].append(RATE)
        optimizer.step()
        model.zero_grad()
    return log, {k: p.detach().float() for k, p in model.named_parameters()}


def with_references(data, seed):
    """Two reference images for each sample."""
    generator = torch.Generator().manual_seed(seed)
    return data | {k.replace("latents", f"reference_{n}"): torch.randn(v.shape, generator=generator)
                   for n in range(2) for k, v in data.items() if k.endswith(".latents")}


def train_edit(case, data, dtype):
    """The losses of qwen_image and of flux2 with tokens of reference images after the sample's, excluded from the loss:
    as in examples/dreambooth/train_dreambooth_lora_flux2_klein_img2img.py, without weighting, on all weights."""
    kind = Flux2Transformer2DModel if case == "flux2_edit" else QwenImageTransformer2DModel
    model = kind.from_pretrained(GOLDEN / EDITS[case][0] / "transformer")

    def loss_of(b, latents, eps, x, t):
        references, texts = [b["reference_0"], b["reference_1"]], b["encoder_hidden_states"]
        if case == "flux2_edit":
            packed = Flux2KleinPipeline._pack_latents
            places = Flux2KleinPipeline._prepare_image_ids([r[:1] for r in references]).expand(BATCH, -1, -1)
            out = model(hidden_states=torch.cat([packed(v) for v in (x, *references)], 1), timestep=t,
                        encoder_hidden_states=texts, txt_ids=Flux2KleinPipeline._prepare_text_ids(texts),
                        img_ids=torch.cat([Flux2KleinPipeline._prepare_latent_ids(latents), places], 1),
                        return_dict=False)[0]
        else:
            packed = pack
            mask = torch.arange(texts.shape[1])[None] < b["prompt_lengths"][:, None]
            shapes = [[(1, latents.shape[2] // 2, latents.shape[3] // 2)] * 3] * BATCH
            out = model(torch.cat([packed(v) for v in (x, *references)], 1), texts, mask, t, shapes).sample
        wanted = packed(eps - latents)
        return ((wanted - out[:, :wanted.shape[1]]) ** 2).mean()

    return flow_steps(model, data, dtype, loss_of)


def train_flux(case, data, dtype):
    folder, guidance, _ = FLUXES[case]
    model = FluxTransformer2DModel.from_pretrained(GOLDEN / "flux" / folder / "transformer")

    def loss_of(b, latents, eps, x, t):
        height, width = latents.shape[2:]
        places = FluxPipeline._prepare_latent_image_ids(BATCH, height // 2, width // 2, "cpu", dtype)
        embedded_guidance = None if guidance is None else torch.full((BATCH,), guidance, dtype=dtype)
        out = model(hidden_states=pack(x), timestep=t, guidance=embedded_guidance, pooled_projections=b["pooled_projections"],
                    encoder_hidden_states=b["encoder_hidden_states"], img_ids=places,
                    txt_ids=torch.zeros(b["encoder_hidden_states"].shape[1], 3, dtype=dtype)).sample
        return ((pack(eps - latents) - out) ** 2).mean()

    return flow_steps(model, data, dtype, loss_of)


def z_image_batches(seed):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    out = {}
    for i in range(STEPS):
        out |= {f"step{i}.latents": randn(BATCH, 16, 8, 6), f"step{i}.noise": randn(BATCH, 16, 8, 6),
                f"step{i}.timesteps": 1000 * torch.rand(BATCH, generator=generator),
                f"step{i}.encoder_hidden_states": randn(BATCH, 64, 16),
                f"step{i}.prompt_lengths": torch.tensor([5 + 7 * i, 32 - i], dtype=torch.int32)}
    return out


def train_z_image(case, data, dtype):
    """The loss of examples/dreambooth/train_dreambooth_lora_z_image.py without weighting, on all weights."""
    model = ZImageTransformer2DModel.from_pretrained(GOLDEN / "zimage" / Z_IMAGES[case][0] / "transformer")

    def loss_of(b, latents, eps, x, t):
        texts = [text[:n] for text, n in zip(b["encoder_hidden_states"], b["prompt_lengths"])]
        out = model(list(x.unsqueeze(2).unbind(0)), (1000 - b["timesteps"]) / 1000, texts, return_dict=False)[0]
        return ((eps - latents + torch.stack(out).squeeze(2)) ** 2).mean()

    return flow_steps(model, data, dtype, loss_of)


def train_qwen_image(case, data, dtype):
    """The loss of examples/dreambooth/train_dreambooth_lora_qwen_image.py without weighting, on all weights; batches are
    Z-Image's."""
    model = QwenImageTransformer2DModel.from_pretrained(GOLDEN / "qwenimage" / QWEN_IMAGES[case][0] / "transformer")

    def loss_of(b, latents, eps, x, t):
        texts = b["encoder_hidden_states"]
        mask = torch.arange(texts.shape[1])[None] < b["prompt_lengths"][:, None]
        height, width = latents.shape[2:]
        out = model(pack(x), texts, mask, t, [[(1, height // 2, width // 2)]] * BATCH).sample
        return ((pack(eps - latents) - out) ** 2).mean()

    return flow_steps(model, data, dtype, loss_of)


def bell(shift, dtype):
    """Timesteps of the shifted grid and their weights, with mean 1 and minimum 0."""
    u = torch.linspace(1, SIGMA_MIN, 1000, dtype=torch.float64)
    t = 1000 * shift * u / (1 + (shift - 1) * u)
    y = torch.exp(-2 * ((t - 500) / 1000) ** 2)
    y = y - y.min()
    return t.to(dtype), (y * 1000 / y.sum()).to(dtype)


def train_flow(case, data, dtype):
    folder, component, shift, _ = FLOWS[case]
    model = WanTransformer3DModel.from_pretrained(GOLDEN / "wan" / folder / component).to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)
    log = {"loss": [], "grad_norm": [], "learning_rate": []}
    for i in range(STEPS):
        b = {k.split(".")[1]: v.to(dtype) for k, v in data.items() if k.startswith(f"step{i}.")}
        latents, eps, sigma = b["latents"], b["noise"], b["sigmas"].reshape(-1, 1, 1, 1, 1)
        least = SIGMA_MIN if "timestep_lookup=reference_table" in FLOWS[case][-1] else 0
        t = (b["sigmas"] - least) / (1 - least) * 1000
        x = (1 - sigma) * latents + sigma * eps
        if "condition" in b:
            x = torch.cat([x, b["condition"]], 1)
        with kept_precision():
            out = model(x, t, b["encoder_hidden_states"], b.get("image_embeds")).sample
        per_sample = ((eps - latents - out) ** 2).mean(dim=(1, 2, 3, 4))
        if "contrastive_flow_matching=true" in FLOWS[case][-1]:
            per_sample = per_sample - 0.05 * (((eps - latents).roll(1, 0) - out) ** 2).mean(dim=(1, 2, 3, 4))
        if shift:
            grid, weights = bell(shift, dtype)
            per_sample = per_sample * weights[(grid[None] - t[:, None]).abs().argmin(1)]
        loss = per_sample.mean()
        loss.backward()
        used = [p for p in model.parameters() if p.grad is not None]
        log["loss"].append(loss.item())
        log["grad_norm"].append(torch.stack([p.grad.norm() for p in used]).norm().item())
        log["learning_rate"].append(RATE)
        optimizer.step()
        model.zero_grad()
    return log, {k: p.detach().float() for k, p in model.named_parameters()}


def train(case, data, dtype, disturbed=None):
    if case in FLOWS:
        return train_flow(case, data, dtype)
    if case in FLUXES:
        return train_flux(case, data, dtype)
    if case in FLUX2S:
        return train_flux2(case, data, dtype)
    if case in Z_IMAGES:
        return train_z_image(case, data, dtype)
    if case in QWEN_IMAGES:
        return train_qwen_image(case, data, dtype)
    if case in EDITS:
        return train_edit(case, data, dtype)
    folder, prediction, gamma, schedule, warmup, by_norm, by_value, words = CASES[case]
    unet = UNet2DConditionModel.from_pretrained(GOLDEN / "pipelines" / folder / "unet").to(dtype).train()
    noise = DDPMScheduler.from_pretrained(GOLDEN / "pipelines" / folder / "scheduler", prediction_type=prediction)
    noise.alphas_cumprod = noise.alphas_cumprod.to(dtype)
    rounded = "weights_dtype=bfloat16" in words
    masters = [torch.nn.Parameter(p.detach().clone()) for p in unet.parameters()] if rounded else []
    if disturbed is not None:
        generator = torch.Generator().manual_seed(disturbed)
        for master in masters:
            master.data *= 1 + 1e-7 * torch.randn(master.shape, generator=generator)

    def round_weights():
        for p, master in zip(unet.parameters(), masters):
            p.data = master.detach().to(torch.bfloat16).to(dtype)

    round_weights()
    optimizer = torch.optim.AdamW(masters or unet.parameters(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)
    power = {"power": 2} if schedule == "polynomial" else {}
    if schedule == "polynomial":
        from diffusers.optimization import get_polynomial_decay_schedule_with_warmup
        rates = get_polynomial_decay_schedule_with_warmup(optimizer, warmup, STEPS, **power)
    else:
        rates = get_scheduler(schedule, optimizer, num_warmup_steps=warmup, num_training_steps=STEPS, num_cycles=2)
    log = {"loss": [], "grad_norm": [], "learning_rate": []}
    for i in range(STEPS):
        b = {k.split(".")[1]: v for k, v in data.items() if k.startswith(f"step{i}.")}
        latents, eps, t = b["latents"].to(dtype), b["noise"].to(dtype), b["timesteps"].long()
        added = {k: b[k].to(dtype) for k in ("text_embeds", "time_ids") if k in b}
        out = unet(noise.add_noise(latents, eps, t), t, b["encoder_hidden_states"].to(dtype),
                   added_cond_kwargs=added or None).sample
        target = {"epsilon": eps, "v_prediction": noise.get_velocity(latents, eps, t), "sample": latents}[prediction]
        per_sample = ((out - target) ** 2).mean(dim=(1, 2, 3))
        if "contrastive_flow_matching=true" in words:
            other = noise.get_velocity(latents.roll(1, 0), eps.roll(1, 0), t)
            per_sample = per_sample - 0.2 * ((out - other) ** 2).mean(dim=(1, 2, 3))
        if gamma:
            snr = compute_snr(noise, t)
            weight = torch.minimum(snr, torch.full_like(snr, gamma))
            weight = {"epsilon": weight / snr, "v_prediction": weight / (snr + 1), "sample": weight}[prediction]
            per_sample = per_sample * weight
        loss = per_sample.mean()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in unet.parameters()]).norm()
        if by_value:
            torch.nn.utils.clip_grad_value_(unet.parameters(), by_value)
        if by_norm:
            torch.nn.utils.clip_grad_norm_(unet.parameters(), by_norm)
        log["learning_rate"].append(optimizer.param_groups[0]["lr"])
        for p, master in zip(unet.parameters(), masters):
            master.grad = p.grad
        optimizer.step()
        rates.step()
        unet.zero_grad()
        round_weights()
        log["loss"].append(loss.item())
        log["grad_norm"].append(norm.item())
    updated = masters or unet.parameters()
    return log, {k: p.detach().float() for (k, _), p in zip(unet.named_parameters(), updated)}


def main():
    diffusers.logging.set_verbosity_error()
    ROOT.mkdir(parents=True, exist_ok=True)
    chosen = sys.argv[1:]
    golden, weights_of_steps = {}, {}
    if chosen:
        data = {f: load_file(ROOT / f"batches_{f}.safetensors")
                for f in ("sd", "sdxl", "t2v", "a14b", "i2v", "flux", "zimage", "flux2", "qwen_edit", "flux2_edit")}
        golden = json.loads((ROOT / "golden.json").read_text())
        weights_of_steps = {k: v for k, v in load_file(ROOT / "golden.safetensors").items() if k.split(".")[0] not in chosen}
    else:
        data = {f: batches(f, seed) for f, seed in (("sd", 1), ("sdxl", 2))}
        data |= {f: flow_batches(f, seed) for f, seed in (("t2v", 3), ("a14b", 4), ("i2v", 5))}
        data |= {"flux": flux_batches(6), "zimage": z_image_batches(7), "flux2": flux2_batches(8)}
        data |= {"qwen_edit": with_references(z_image_batches(9), 10), "flux2_edit": with_references(flux2_batches(11), 12)}
        for folder, arrays in data.items():
            save_file(arrays, ROOT / f"batches_{folder}.safetensors")
    for case in chosen or [*CASES, *FLOWS, *FLUXES, *Z_IMAGES, *FLUX2S, *QWEN_IMAGES, *EDITS]:
        folder, *_, words = (CASES | FLOWS | FLUXES | Z_IMAGES | FLUX2S | QWEN_IMAGES | EDITS)[case]
        batch = case if case in EDITS else BATCHES.get(folder, folder)
        log, weights = train(case, data[batch], torch.float32)
        others = [train(case, data[batch], torch.float64)]
        if "weights_dtype=bfloat16" in words:
            others += [train(case, data[batch], torch.float32, seed) for seed in range(4)]
        distance = max(((weights[k] - w[k]).norm() / w[k].norm()).item() for _, w in others for k in w)
        relative = max(abs(a - b) / b for other, _ in others for key in ("loss", "grad_norm")
                       for a, b in zip(log[key], other[key]))
        place = {"folder": "wan/" + folder, "component": FLOWS[case][1]} if case in FLOWS else {
            "folder": "flux/" + folder, "component": "transformer"} if case in FLUXES else {
            "folder": "zimage/" + folder, "component": "transformer"} if case in Z_IMAGES else {
            "folder": "flux2/" + folder, "component": "transformer"} if case in FLUX2S else {
            "folder": "qwenimage/" + folder, "component": "transformer"} if case in QWEN_IMAGES else {
            "folder": folder, "component": "transformer"} if case in EDITS else {
            "folder": "pipelines/" + folder, "component": "unet"}
        golden[case] = {**place, "batches": batch, "words": words, **log, "noise_floor": {"metrics": relative, "weights": distance}}
        names = sorted((k for k in weights if weights[k].numel() < 1 << 16), key=lambda k: weights[k].numel())
        weights_of_steps |= {f"{case}.{k}": weights[k].contiguous() for k in names[:: max(1, len(names) // 16)]}
        print(case, log["loss"], f"noise floor of metrics {relative:.2g}, of weights {distance:.2g}")
    (ROOT / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    save_file(weights_of_steps, ROOT / "golden.safetensors")


if __name__ == "__main__":
    main()
