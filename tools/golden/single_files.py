"""Writes the goldens of single files: which tensor of the original layout is which of diffusers' layout.

tests/golden/single_file/ gets
  sd2/                      configs of a tiny Stable Diffusion 2 (OpenCLIP's text encoder), without weights
  names.json                of tiny models (sd and sdxl of ../pipelines, ../refiner, sd2): original name → shape, the tensors of
                            diffusers' layout that make it up along the first axis, whether it is a transposed one
  published/<model>.txt     "name sizes" of the files of the published models; {0..n} means the numbers 0 to n

Nothing is taken on trust: the names are made here from the layout's rules, files of random tiny models are written under
them, and diffusers' from_single_file must read every tensor back, bit for bit; of the published sizes diffusers' own
converters must give every name of diffusers' models and no other.

    python tools/golden/single_files.py
"""

import json
import pathlib
import re
import shutil
import tempfile

import diffusers
import torch
from diffusers import (AutoencoderKL, ControlNetModel, DDIMScheduler, StableDiffusionPipeline,
                       StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline, UNet2DConditionModel)
from diffusers.loaders import single_file_utils as reader
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
ROOT = GOLDEN / "single_file"


def replaced(name, pairs):
    for a, b in pairs:
        name = re.sub(rf"(^|(?<=\.)){re.escape(a)}(?=\.|$)", b, name, count=1)
    return name


RESNET = [("norm1", "in_layers.0"), ("conv1", "in_layers.2"), ("norm2", "out_layers.0"), ("conv2", "out_layers.3"),
          ("time_emb_proj", "emb_layers.1"), ("conv_shortcut", "skip_connection")]


def block_name(name, layers, attention_up):
    """Names for a UNet or ControlNet whose levels all have `layers` resnets; attention_up: for each up block."""
    fixed = {"conv_in": "input_blocks.0.0", "conv_out": "out.2", "conv_norm_out": "out.0",
             "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
             "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
             "mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1",
             "mid_block.resnets.1": "middle_block.2", "controlnet_mid_block": "middle_block_out.0",
             "controlnet_cond_embedding.conv_in": "input_hint_block.0",
             "controlnet_cond_embedding.conv_out": "input_hint_block.14"}
    if m := re.match(r"down_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.*)", name):
        n = 1 + int(m[1]) * (layers + 1) + int(m[3])
        out = f"input_blocks.{n}.{0 if m[2] == 'resnets' else 1}.{m[4]}"
    elif m := re.match(r"down_blocks\.(\d+)\.downsamplers\.0\.conv\.(.*)", name):
        out = f"input_blocks.{(int(m[1]) + 1) * (layers + 1)}.0.op.{m[2]}"
    elif m := re.match(r"up_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.*)", name):
        out = f"output_blocks.{int(m[1]) * (layers + 1) + int(m[3])}.{0 if m[2] == 'resnets' else 1}.{m[4]}"
    elif m := re.match(r"up_blocks\.(\d+)\.upsamplers\.0\.(.*)", name):
        out = f"output_blocks.{(int(m[1]) + 1) * (layers + 1) - 1}.{2 if attention_up[int(m[1])] else 1}.{m[2]}"
    elif m := re.match(r"controlnet_down_blocks\.(\d+)\.(.*)", name):
        out = f"zero_convs.{m[1]}.0.{m[2]}"
    elif m := re.match(r"controlnet_cond_embedding\.blocks\.(\d+)\.(.*)", name):
        out = f"input_hint_block.{2 * int(m[1]) + 2}.{m[2]}"
    else:
        out = next(b + name[len(a):] for a, b in fixed.items() if name.startswith(a + "."))
    return replaced(out, RESNET) if "resnets" in name else out


def vae_name(name, levels):
    name = re.sub(r"down_blocks\.(\d+)\.resnets", r"down.\1.block", name)
    name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", name)
    name = re.sub(r"up_blocks\.(\d+)\.resnets", lambda m: f"up.{levels - 1 - int(m[1])}.block", name)
    name = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda m: f"up.{levels - 1 - int(m[1])}.upsample", name)
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    return replaced(name, [("mid_block.attentions.0", "mid.attn_1"), ("conv_shortcut", "nin_shortcut"),
                           ("group_norm", "norm"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out"),
                           ("conv_norm_out", "norm_out")])


def open_clip_name(name):
    """The name, and which third of it."""
    if name == "text_projection.weight":
        return "text_projection", None
    name = replaced(name.removeprefix("text_model."), [
        ("embeddings.token_embedding", "token_embedding"), ("embeddings.position_embedding.weight",
                                                            "positional_embedding"),
        ("final_layer_norm", "ln_final"), ("encoder.layers", "transformer.resblocks"), ("layer_norm1", "ln_1"),
        ("layer_norm2", "ln_2"), ("fc1", "c_fc"), ("fc2", "c_proj"), ("self_attn", "attn")])
    if m := re.match(r"(.*)\.(q|k|v)_proj\.(weight|bias)", name):
        return f"{m[1]}.in_proj_{m[3]}", "qkv".index(m[2])
    return name, None


OPEN_CLIP = {"sd2": "cond_stage_model.model.", "sdxl": "conditioner.embedders.1.model.",
             "refiner": "conditioner.embedders.0.model."}


def original(component, name, tensor, config, layout):
    """(original name, third or None, transposed, tensor as the file has it) of a tensor of diffusers' layout."""
    if component == "unet":
        up = [t.startswith("CrossAttn") for t in config["up_block_types"]]
        return "model.diffusion_model." + block_name(name, config["layers_per_block"], up), None, False, tensor
    if component == "vae":
        matrix = re.search(r"\.to_(q|k|v|out\.0)\.weight$", name)
        new = "first_stage_model." + vae_name(name, len(config["block_out_channels"]))
        return new, None, False, tensor[:, :, None, None] if matrix else tensor
    if layout == "sd" or (layout == "sdxl" and component == "text_encoder"):
        prefix = "cond_stage_model.transformer." if layout == "sd" else "conditioner.embedders.0.transformer."
        return prefix + name, None, False, tensor
    prefix = OPEN_CLIP[layout]
    new, third = open_clip_name(name)
    return prefix + new, third, new == "text_projection", tensor.T if new == "text_projection" else tensor


def published(model, name):
    """transformers 5 dropped a level of CLIPTextModel's names that files have."""
    return "text_model." + name if isinstance(model, CLIPTextModel) and not name.startswith("text_model.") else name


def parameters(model):
    return {published(model, k): v.detach() for k, v in model.named_parameters()}


def config_of(model):
    return model.config.to_dict() if hasattr(model.config, "to_dict") else dict(model.config)


def table_of(layout, models):
    """original name → record; and the tensors of the file."""
    table, file = {}, {}
    for component, model in models.items():
        for name, tensor in parameters(model).items():
            new, third, transposed, value = original(component, name, tensor, config_of(model), layout)
            record = table.setdefault(new, {"of": [], "transposed": transposed})
            record["of"].append((third or 0, f"{component}/{name}", value))
    for new, record in table.items():
        parts = sorted(record["of"], key=lambda p: p[0])
        assert len(parts) in (1, 3), new
        file[new] = torch.cat([p[2] for p in parts]).contiguous()
        table[new] = {"shape": list(file[new].shape), "of": [p[1] for p in parts]}
        if record["transposed"]:
            table[new]["transposed"] = True
    return table, file


def make_sd2(folder):
    """Configs only; the tokenizer is that of the tiny Stable Diffusion 1."""
    words = len(json.loads((GOLDEN / "pipelines/sd/tokenizer/tokenizer.json").read_text())["model"]["vocab"]) \
        if (GOLDEN / "pipelines/sd/tokenizer/tokenizer.json").exists() else None
    tokenizer = CLIPTokenizer.from_pretrained(GOLDEN / "pipelines/sd/tokenizer")
    words = words or len(tokenizer)
    down, up = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"
    pipe = StableDiffusionPipeline(
        vae=AutoencoderKL.from_config(GOLDEN / "pipelines/sd/vae"),
        unet=UNet2DConditionModel(
            block_out_channels=[8, 16], down_block_types=[down, "DownBlock2D"], up_block_types=["UpBlock2D", up],
            layers_per_block=1, attention_head_dim=[1, 2], cross_attention_dim=16, norm_num_groups=4, sample_size=8,
            use_linear_projection=True),
        text_encoder=CLIPTextModel(CLIPTextConfig(
            vocab_size=words, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
            max_position_embeddings=77, projection_dim=16, bos_token_id=words - 2, eos_token_id=words - 1,
            pad_token_id=words - 1, hidden_act="gelu")),
        tokenizer=tokenizer,
        scheduler=DDIMScheduler(beta_end=0.012, beta_schedule="scaled_linear", beta_start=0.00085, clip_sample=False,
                                set_alpha_to_one=False, steps_offset=1, prediction_type="v_prediction"),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    pipe.save_pretrained(folder)


def read_back(kind, folder, layout):
    """Random weights, written under the original names, as diffusers reads them."""
    pipe = kind.from_pretrained(folder, **({} if layout in ("sdxl", "refiner") else {"safety_checker": None}))
    names = [n for n in ("unet", "vae", "text_encoder", "text_encoder_2") if getattr(pipe, n, None) is not None]
    models = {n: getattr(pipe, n) for n in names}
    generator = torch.Generator().manual_seed(3)
    for model in models.values():
        for p in model.parameters():
            p.data = torch.randn(p.shape, generator=generator)
    table, file = table_of(layout, models)
    with tempfile.TemporaryDirectory() as place:
        save_file(file, place + "/model.safetensors")
        again = kind.from_single_file(place + "/model.safetensors", config=str(folder), local_files_only=True)
    for n in names:
        want, got = parameters(models[n]), parameters(getattr(again, n))
        assert want.keys() == got.keys()
        for name in want:
            assert torch.equal(want[name], got[name]), (n, name)
    print(f"{layout}: {len(table)} tensors, all read back by diffusers {diffusers.__version__}")
    return table


def collapsed(lines):
    groups = {}
    for line in lines:
        groups.setdefault(re.sub(r"\b(transformer_blocks|resblocks|layers)\.\d+\.", r"\1.#.", line), []).append(line)
    out = []
    for key, members in groups.items():
        whole = {key.replace("#", str(i)) for i in range(len(members))}
        out += [key.replace("#", f"{{0..{len(members) - 1}}}")] if "#" in key and whole == set(members) else members
    return sorted(out)


def full(name, layout, models):
    table, file = table_of(layout, models)
    config = config_of(models["unet"])
    assert set(reader.convert_ldm_unet_checkpoint(dict(file), config)) == set(parameters(models["unet"]))
    got = reader.convert_ldm_vae_checkpoint(
        {k.removeprefix("first_stage_model."): v for k, v in file.items() if k.startswith("first_stage_model.")},
        config_of(models["vae"]))
    assert set(got) == set(parameters(models["vae"]))
    for component in {"sd2": ["text_encoder"], "sdxl": ["text_encoder_2"], "refiner": ["text_encoder_2"]}.get(layout, []):
        got = reader.convert_open_clip_checkpoint(models[component], dict(file), OPEN_CLIP[layout])
        assert set(got) == set(parameters(models[component])), component
    write(name, file)


def write(name, file):
    lines = [f"{k} {'x'.join(map(str, v.shape))}" for k, v in file.items()]
    (ROOT / "published").mkdir(exist_ok=True)
    (ROOT / "published" / f"{name}.txt").write_text("\n".join(collapsed(lines)) + "\n")
    print(f"published/{name}: {len(lines)} tensors")


def meta(kind, config):
    with torch.device("meta"):
        return kind(config) if isinstance(config, CLIPTextConfig) else kind(**config)


def recorded(name):
    return {k: v for k, v in json.loads((GOLDEN / f"full/{name}.json").read_text()).items() if not k.startswith("_")}


def main():
    diffusers.logging.set_verbosity_error()
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    tables = {}
    with tempfile.TemporaryDirectory() as place:
        make_sd2(place)
        tables["sd2"] = read_back(StableDiffusionPipeline, pathlib.Path(place), "sd2")
        for file in pathlib.Path(place).rglob("*.json"):
            to = ROOT / "sd2" / file.relative_to(place)
            if "tokenizer" not in to.parts[-2] and not file.name.endswith("index.json") or file.name == "model_index.json":
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(file.read_bytes())
    tables["sd"] = read_back(StableDiffusionPipeline, GOLDEN / "pipelines/sd", "sd")
    tables["sdxl"] = read_back(StableDiffusionXLPipeline, GOLDEN / "pipelines/sdxl", "sdxl")
    tables["refiner"] = read_back(StableDiffusionXLImg2ImgPipeline, GOLDEN / "refiner/refiner", "refiner")
    rows = lambda table: ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(table.items()))
    text = ",\n".join(f"{json.dumps(k)}: {{\n{rows(v)}}}" for k, v in sorted(tables.items()))
    (ROOT / "names.json").write_text("{" + text + "}\n")

    vae = meta(AutoencoderKL, recorded("vae"))
    clip_l = meta(CLIPTextModel, CLIPTextConfig(**recorded("clip_l")))
    vit_h = meta(CLIPTextModel, CLIPTextConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=23,
                                               num_attention_heads=16, hidden_act="gelu", projection_dim=512))
    big_g = meta(CLIPTextModelWithProjection, CLIPTextConfig(**recorded("clip_bigg")))
    unets = {name: meta(UNet2DConditionModel, recorded("unet_" + name)) for name in ("sd15", "sd21", "sdxl")}
    full("sd15", "sd", {"unet": unets["sd15"], "vae": vae, "text_encoder": clip_l})
    full("sd21", "sd2", {"unet": unets["sd21"], "vae": vae, "text_encoder": vit_h})
    full("sdxl", "sdxl", {"unet": unets["sdxl"], "vae": vae, "text_encoder": clip_l, "text_encoder_2": big_g})
    refiner = meta(UNet2DConditionModel, recorded("unet_sdxl") | {
        "attention_head_dim": [6, 12, 24, 24], "block_out_channels": [384, 768, 1536, 1536], "cross_attention_dim": 1280,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": 4, "projection_class_embeddings_input_dim": 2560})
    full("refiner", "refiner", {"unet": refiner, "vae": vae, "text_encoder_2": big_g})
    with torch.device("meta"):
        control = ControlNetModel.from_unet(unets["sd15"], load_weights_from_unet=False)
    file = {"control_model." + block_name(k, 2, []): v for k, v in parameters(control).items()}
    assert set(reader.convert_controlnet_checkpoint(dict(file), config_of(control))) == set(parameters(control))
    write("controlnet_sd15", file)


if __name__ == "__main__":
    main()
