"""Writes the goldens of the models: tiny random configs run by diffusers and transformers.

For each case tests/golden/<case>/ gets
  config.json          as the library writes it
  weights.safetensors  published names; bf16 numbers, so that they take half the room and are exact in every type
  golden.safetensors   in.*    inputs, images channels last as the graph holds them
                       out.*   outputs
                       dot.*   fixed random tensors; the loss is the sum over outputs of sum(out * dot)
                       grad.*  gradients of the loss: every parameter by its name, and the floating inputs as in.*
                       metadata: noise_floor (below), versions
The numbers are those of a float64 run. noise_floor is the largest relative distance of the same run in float32 from
it, by the measure of the test (distance() below). Printed: how far a run with activations in bf16 is, for the bounds of
Bf16 in tests/golden/models_test.cc.
tests/golden/wan_names.json gets the names of the original program's parameters next to those that diffusers' converter
makes of them, wan_vae_names.json those of its autoencoders. tests/golden/full/ gets the published configs with the parameter names and shapes of the real models (no weights).

    python tools/golden/models.py [case ...]
"""

import contextlib
import json
import pathlib
import re
import sys

import diffusers
import torch
import transformers
from diffusers import (AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan, AutoencoderTiny,
                       ControlNetModel, Flux2KleinPipeline, Flux2Transformer2DModel, FluxTransformer2DModel,
                       QwenImageTransformer2DModel, UNet2DConditionModel, WanTransformer3DModel,
                       ZImageTransformer2DModel)
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers, convert_wan_vae_to_diffusers
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageAttentionBlock, QwenImageUpsample
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock, WanUpsample
from safetensors.torch import save_file
from transformers import (CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPVisionConfig,
                          CLIPVisionModel, CLIPVisionModelWithProjection, Qwen2_5_VLConfig, Qwen2_5_VLModel,
                          Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel, Qwen3Config,
                          Qwen3Model, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel)

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
CROSS_DOWN, CROSS_UP = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"

UNETS = {
    # SDXL's blocks and conditioning.
    "unet_sdxl": (
        dict(block_out_channels=[8, 16, 16], down_block_types=["DownBlock2D", CROSS_DOWN, CROSS_DOWN],
             up_block_types=[CROSS_UP, CROSS_UP, "UpBlock2D"], layers_per_block=1, attention_head_dim=[1, 2, 4],
             transformer_layers_per_block=[1, 1, 2], cross_attention_dim=12, use_linear_projection=True,
             norm_num_groups=4, addition_embed_type="text_time", addition_time_embed_dim=6,
             projection_class_embeddings_input_dim=46, sample_size=8),
        dict(size=(8, 8)),
    ),
    # SD 1.x: four levels, projections as convolutions, one number of heads.
    "unet_sd15": (
        dict(block_out_channels=[8, 8, 16, 16], down_block_types=[CROSS_DOWN] * 3 + ["DownBlock2D"],
             up_block_types=["UpBlock2D"] + [CROSS_UP] * 3, layers_per_block=1, attention_head_dim=4,
             cross_attention_dim=10, norm_num_groups=4, sample_size=8),
        dict(size=(16, 8)),
    ),
    # Every setting per level, sizes that halve to odd numbers, and rare members.
    "unet_mixed": (
        dict(block_out_channels=[8, 16, 24], down_block_types=[CROSS_DOWN, "DownBlock2D", CROSS_DOWN],
             up_block_types=[CROSS_UP, "UpBlock2D", CROSS_UP], layers_per_block=[1, 2, 1],
             attention_head_dim=[2, 4, 3], transformer_layers_per_block=[2, 1, 1], cross_attention_dim=[10, 10, 10],
             only_cross_attention=[True, False, True], norm_num_groups=8, norm_eps=1e-3, act_fn="gelu",
             upcast_attention=True, flip_sin_to_cos=False, freq_shift=1, mid_block_scale_factor=1.5,
             time_cond_proj_dim=5, use_linear_projection=True, in_channels=5, out_channels=3),
        dict(size=(7, 10), timestep_cond=5),
    ),
    # No attention anywhere, a mid block of one resnet, ControlNet's residuals, padding after only.
    "unet_plain": (
        dict(block_out_channels=[8, 12], down_block_types=["DownBlock2D"] * 2, up_block_types=["UpBlock2D"] * 2,
             mid_block_type="UNetMidBlock2D", layers_per_block=1, cross_attention_dim=10, norm_num_groups=4,
             downsample_padding=0, act_fn="mish"),
        dict(size=(6, 4), residuals=True),
    ),
    # Small, with layers to repeat: also run as loops and with recomputation.
    "unet_no_mid": (
        dict(block_out_channels=[8], down_block_types=[CROSS_DOWN], up_block_types=[CROSS_UP], mid_block_type=None,
             layers_per_block=1, attention_head_dim=2, transformer_layers_per_block=2, cross_attention_dim=10,
             norm_num_groups=2),
        dict(size=(5, 3)),
    ),
}

VAES = {
    "vae_sd": (
        dict(block_out_channels=[8, 16, 16], layers_per_block=2, norm_num_groups=4, latent_channels=4,
             scaling_factor=0.13025),
        (16, 24),
    ),
    "vae_no_quant": (
        dict(block_out_channels=[8, 16], layers_per_block=1, norm_num_groups=8, latent_channels=6,
             use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1159),
        (10, 6),
    ),
    "vae_no_attention": (
        dict(block_out_channels=[8], layers_per_block=1, norm_num_groups=2, latent_channels=3, in_channels=1,
             out_channels=1, mid_block_add_attention=False),
        (4, 4),
    ),
    # Sixteen channels of latents with a shift, no quant_conv or post_quant_conv.
    "vae_flux": (
        dict(block_out_channels=[4, 8], layers_per_block=1, norm_num_groups=4, latent_channels=16, use_quant_conv=False,
             use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1159),
        (6, 8),
    ),
}

# TAESD's pattern of levels, an activation other than the last one of a block.
TINY_VAES = {
    "tiny_vae": (
        dict(encoder_block_out_channels=[6, 6, 6], decoder_block_out_channels=[4, 4, 4], num_encoder_blocks=[1, 2, 1],
             num_decoder_blocks=[2, 1, 1], latent_channels=4, act_fn="silu"),
        (12, 8),
    ),
}

# Config; batch, frames, height and width.
WAN_VAES = {
    # Wan 2.1's pattern of levels.
    "wan_vae_21": (
        dict(base_dim=2, z_dim=3, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True]),
        (1, 9, 8, 8),
    ),
    # Attention in the encoder's levels, another width of the decoder.
    "wan_vae_attention": (
        dict(base_dim=2, decoder_base_dim=3, z_dim=2, dim_mult=[1, 2], num_res_blocks=1, attn_scales=[1.0, 0.5],
             temperal_downsample=[True], scale_factor_spatial=2, scale_factor_temporal=2),
        (2, 5, 6, 4),
    ),
    # Images, two blocks a level.
    "wan_vae_image": (
        dict(base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=2, temperal_downsample=[False],
             scale_factor_spatial=2, scale_factor_temporal=1),
        (2, 1, 6, 10),
    ),
    # Wan 2.2's shortcuts of the levels, patches, another width of the decoder.
    "wan_vae_22": (
        dict(base_dim=2, decoder_base_dim=3, z_dim=4, dim_mult=[1, 2, 1], num_res_blocks=1, is_residual=True,
             temperal_downsample=[True, True], in_channels=12, out_channels=12, patch_size=2),
        (1, 5, 8, 16),
    ),
    # Shortcuts that average over channels and repeat them, no patches.
    "wan_vae_residual": (
        dict(base_dim=2, z_dim=3, dim_mult=[1, 2, 2], num_res_blocks=1, is_residual=True,
             temperal_downsample=[True, False], scale_factor_spatial=4, scale_factor_temporal=2),
        (2, 9, 8, 4),
    ),
}

# Wan 2.1's pattern for images; height and width.
QWEN_VAES = {
    "qwen_image_vae": (
        dict(base_dim=2, z_dim=3, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True],
             latents_mean=[0.1, -0.2, 0.3], latents_std=[1.5, 0.5, 2.0]),
        (24, 16),
    ),
    # Attention in the encoder's levels, two blocks per level, four pixel channels.
    "qwen_image_vae_attention": (
        dict(base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=2, attn_scales=[1.0, 0.5],
             temperal_downsample=[True], input_channels=4),
        (6, 10),
    ),
}

CLIPS = {
    # CLIP-L: quick GELU; the legacy eos id 2 means the largest id. Texts are padded with eos.
    "clip_legacy": (
        dict(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
             max_position_embeddings=9, hidden_act="quick_gelu", eos_token_id=2, bos_token_id=0, projection_dim=16),
        False, [[38, 5, 2, 7, 39, 39, 39, 39, 39], [38, 2, 39, 39, 39, 39, 39, 39, 39]],
    ),
    # bigG: GELU, a projection, and the real eos id, beyond which the text is padded with 0.
    "clip_projection": (
        dict(vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
             max_position_embeddings=11, hidden_act="gelu", eos_token_id=47, bos_token_id=46, projection_dim=10),
        True, [[46, 5, 49, 7, 8, 47, 0], [46, 47, 0, 0, 0, 0, 0]],
    ),
}

VISIONS = {
    # ViT-H's activation; pixels that no patch covers; no projection.
    "clip_vision": (
        dict(hidden_size=16, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2, image_size=11,
             patch_size=4, hidden_act="gelu"),
        CLIPVisionModel,
    ),
    # ViT-L's activation, other channels, a projection.
    "clip_vision_projection": (
        dict(hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3, num_channels=4,
             image_size=6, patch_size=2, hidden_act="quick_gelu", projection_dim=7, layer_norm_eps=1e-4),
        CLIPVisionModelWithProjection,
    ),
}

UMT5S = {
    # XXL's shape in small: heads wider together than the model, ranges of distance up to the last bucket.
    "umt5": (
        dict(vocab_size=40, d_model=16, d_kv=6, d_ff=24, num_layers=3, num_heads=4, relative_attention_num_buckets=8,
             relative_attention_max_distance=10),
        (24, [24, 9, 1]),
    ),
    # Without a gate, the default buckets, one layer.
    "umt5_relu": (
        dict(vocab_size=30, d_model=12, d_kv=4, d_ff=20, num_layers=1, num_heads=2, feed_forward_proj="relu",
             layer_norm_epsilon=1e-5),
        (40, [31, 40]),
    ),
    # Another gate, an odd number of buckets.
    "umt5_silu": (
        dict(vocab_size=30, d_model=10, d_kv=5, d_ff=14, num_layers=2, num_heads=2, feed_forward_proj="gated-silu",
             relative_attention_num_buckets=14, relative_attention_max_distance=20),
        (17, [17, 5]),
    ),
}

T5S = {
    # XXL's shape in small: one table of positions, of the first block, and no padding but what is masked.
    "t5": (
        dict(vocab_size=40, d_model=16, d_kv=6, d_ff=24, num_layers=3, num_heads=4, relative_attention_num_buckets=8,
             relative_attention_max_distance=10, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        (24, [24, 9]),
    ),
    # The first T5's feed-forward part, the default buckets.
    "t5_relu": (
        dict(vocab_size=30, d_model=12, d_kv=4, d_ff=20, num_layers=2, num_heads=2, feed_forward_proj="relu",
             layer_norm_epsilon=1e-5),
        (40, [40]),
    ),
}

QWEN3S = {
    # The published shape in small: heads in groups, wider together than the model. Texts shorter than the sequence.
    "qwen3": (
        dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=6, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
        (24, [24, 9, 1], [1, 2, 3]),
    ),
    # One group, biases, another theta and activation.
    "qwen3_bias": (
        dict(vocab_size=30, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3,
             num_key_value_heads=1, head_dim=4, attention_bias=True, hidden_act="gelu", rms_norm_eps=1e-5,
             rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        (17, [17, 5], [0, 2]),
    ),
    # Outputs of padding are compared too: it attends to the text before it, and not to padding.
    "qwen3_padded": (
        dict(vocab_size=40, hidden_size=12, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=6, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        (11, [3, 11, 1], [1, 2, 3]),
    ),
}

# Latents are packed patches, normalized by statistics that are weights. Values: rows and columns of pixels.
FLUX2_VAES = {
    "flux2_vae": (
        dict(block_out_channels=[4, 8], layers_per_block=1, norm_num_groups=4, latent_channels=3, sample_size=16),
        (12, 8),
    ),
    # A decoder with other widths, another epsilon, no quant_conv or post_quant_conv.
    "flux2_vae_narrow": (
        dict(block_out_channels=[4, 8, 8], decoder_block_out_channels=[4, 4, 12], layers_per_block=1, norm_num_groups=4,
             latent_channels=2, sample_size=16, use_quant_conv=False, use_post_quant_conv=False, batch_norm_eps=0.03),
        (8, 24),
    ),
}

# Rows and columns of tokens of the sample; those of reference images.
FLUX2S = {
    # As klein: no embedded guidance; two reference images of different sizes.
    "flux2_klein": (
        dict(num_attention_heads=2, attention_head_dim=16, axes_dims_rope=[4, 4, 4, 4], in_channels=12, num_layers=2,
             num_single_layers=2, joint_attention_dim=9, guidance_embeds=False, timestep_guidance_channels=32),
        (3, 4), [(2, 5), (4, 1)],
    ),
    # As dev; uneven axes, out_channels differs from in_channels, a rounded width of the feed-forward network.
    "flux2_dev": (
        dict(num_attention_heads=1, attention_head_dim=18, axes_dims_rope=[2, 6, 8, 2], in_channels=8, out_channels=6,
             num_layers=1, num_single_layers=3, joint_attention_dim=7, mlp_ratio=2.7, rope_theta=100.0, eps=1e-5,
             timestep_guidance_channels=24),
        (5, 1), [],
    ),
    # A single token, and one reference image.
    "flux2_small": (
        dict(num_attention_heads=3, attention_head_dim=8, axes_dims_rope=[2, 2, 2, 2], in_channels=4, num_layers=1,
             num_single_layers=1, joint_attention_dim=6, guidance_embeds=False, timestep_guidance_channels=16),
        (1, 1), [(1, 1)],
    ),
}

# The language part of Qwen2.5-VL.
QWEN25_VLS = {
    # The published shape in small: heads in groups, three sections of positions. Texts shorter than the sequence.
    "qwen25_vl": (
        dict(vocab_size=40, hidden_size=32, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, rms_norm_eps=1e-6,
             rope_parameters={"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 1, 1]}),
        (24, [24, 9, 1], [1, 2, 3]),
    ),
    # One head, another theta, sections and activation, the default epsilon.
    "qwen25_vl_one_head": (
        dict(vocab_size=30, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=1,
             num_key_value_heads=1, hidden_act="gelu",
             rope_parameters={"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 2, 3]}),
        (17, [17, 5], [0, 2]),
    ),
}

# For each text: sizes of its images, tokens before each of them, and tokens after the last one.
QWEN_VISIONS = {
    # Windows of 2 × 2 tokens, which divide neither image; texts of different lengths.
    "qwen_vision": (
        dict(text_config=dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                              num_attention_heads=2, num_key_value_heads=1, rms_norm_eps=1e-6,
                              rope_parameters={"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 1, 1]}),
             vision_config=dict(depth=3, hidden_size=16, intermediate_size=20, num_heads=2, out_hidden_size=16,
                                patch_size=2, window_size=8, fullatt_block_indexes=[1]), image_token_id=39),
        [(12, 20), (16, 4)], [3, 2], [6, 2],
    ),
    # One image, smaller than a window; another activation, 3 × 3 patches per token, one frame per patch.
    "qwen_vision_small": (
        dict(text_config=dict(vocab_size=30, hidden_size=12, intermediate_size=20, num_hidden_layers=1,
                              num_attention_heads=1, num_key_value_heads=1,
                              rope_parameters={"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 2, 3]}),
             vision_config=dict(depth=2, hidden_size=8, intermediate_size=12, num_heads=1, out_hidden_size=12, patch_size=1,
                                spatial_merge_size=3, temporal_patch_size=1, window_size=9, fullatt_block_indexes=[],
                                hidden_act="gelu"), image_token_id=29),
        [(6, 3)], [1], [4, 4],
    ),
}

# Rows and columns of tokens; tokens of each text, and of fields; optionally rows and columns of references.
QWEN_IMAGES = {
    # Texts of different lengths, more columns than rows, an odd number of rows.
    "qwen_image": (
        dict(num_attention_heads=2, attention_head_dim=6, axes_dims_rope=[2, 2, 2], in_channels=8, out_channels=2,
             num_layers=2, joint_attention_dim=7),
        (3, 4), [5, 9], 9,
    ),
    # Axes of several sizes, a text of one token, fields longer than every text; odd rows and columns.
    "qwen_image_odd": (
        dict(num_attention_heads=1, attention_head_dim=12, axes_dims_rope=[2, 6, 4], in_channels=4, out_channels=3,
             num_layers=3, joint_attention_dim=6),
        (7, 5), [1, 6, 3], 16,
    ),
    # Texts of the full length; one column.
    "qwen_image_full": (
        dict(num_attention_heads=3, attention_head_dim=8, axes_dims_rope=[4, 2, 2], in_channels=12, out_channels=3,
             num_layers=1, joint_attention_dim=5),
        (6, 1), [8, 8], 8,
    ),
    # Two references, larger and smaller than the sample, at the sample's time and at time 0.
    "qwen_image_edit": (
        dict(num_attention_heads=2, attention_head_dim=8, axes_dims_rope=[4, 2, 2], in_channels=8, out_channels=2,
             num_layers=2, joint_attention_dim=7),
        (3, 4), [5, 9], 9, [(5, 4), (2, 3)],
    ),
    "qwen_image_edit_zero": (
        dict(num_attention_heads=2, attention_head_dim=8, axes_dims_rope=[4, 2, 2], in_channels=8, out_channels=2,
             num_layers=2, joint_attention_dim=7, zero_cond_t=True),
        (3, 4), [5, 9], 9, [(5, 4), (2, 3)],
    ),
}

# Rows and columns of latents; tokens of each text, and of fields.
Z_IMAGES = {
    # Texts of different lengths; image tokens that do not fill 32.
    "z_image": (
        dict(dim=24, n_heads=2, n_kv_heads=2, axes_dims=[4, 4, 4], axes_lens=[80, 16, 16], in_channels=4, n_layers=2,
             n_refiner_layers=2, cap_feat_dim=7),
        (6, 10), [5, 40], 64,
    ),
    # A width that 3 does not divide, uneven axes, no norms of queries and keys; image tokens fill 32, and one text does.
    "z_image_odd": (
        dict(dim=16, n_heads=1, n_kv_heads=1, axes_dims=[4, 8, 4], axes_lens=[120, 8, 20], in_channels=3, n_layers=3,
             n_refiner_layers=1, cap_feat_dim=5, qk_norm=False, rope_theta=100.0, t_scale=500.0, norm_eps=1e-6),
        (8, 16), [33, 32, 1], 96,
    ),
    # Texts as long as there is room.
    "z_image_full": (
        dict(dim=12, n_heads=2, n_kv_heads=2, axes_dims=[2, 2, 2], axes_lens=[40, 8, 8], in_channels=2, n_layers=1,
             n_refiner_layers=1, cap_feat_dim=6),
        (6, 6), [32, 32], 32,
    ),
}

# Rows and columns of tokens.
FLUXES = {
    # As dev: embedded guidance.
    "flux_dev": (
        dict(num_attention_heads=2, attention_head_dim=6, axes_dims_rope=[2, 2, 2], in_channels=8, num_layers=2,
             num_single_layers=2, joint_attention_dim=7, pooled_projection_dim=5, guidance_embeds=True),
        (3, 4),
    ),
    # As schnell: no embedded guidance. Axes of several sizes; out_channels differs from in_channels.
    "flux_schnell": (
        dict(num_attention_heads=1, attention_head_dim=12, axes_dims_rope=[2, 6, 4], in_channels=4, out_channels=6,
             num_layers=1, num_single_layers=3, joint_attention_dim=6, pooled_projection_dim=4),
        (2, 5),
    ),
}

CONTROLNETS = {
    # SDXL's conditioning, an image with four times the latents' side, reversed channel order.
    "controlnet_sdxl": dict(
        block_out_channels=[8, 16], down_block_types=["DownBlock2D", CROSS_DOWN], layers_per_block=1,
        attention_head_dim=[1, 2], transformer_layers_per_block=[1, 2], cross_attention_dim=12,
        use_linear_projection=True, norm_num_groups=4, addition_embed_type="text_time", addition_time_embed_dim=6,
        projection_class_embeddings_input_dim=46, conditioning_embedding_out_channels=[4, 6, 8],
        controlnet_conditioning_channel_order="bgr"),
    # SD 1.x: residuals averaged over the image.
    "controlnet_sd15": dict(
        block_out_channels=[8, 8, 16], down_block_types=[CROSS_DOWN, CROSS_DOWN, "DownBlock2D"], layers_per_block=1,
        attention_head_dim=2, cross_attention_dim=10, norm_num_groups=4, conditioning_embedding_out_channels=[4, 6],
        global_pool_conditions=True),
}

# Frames, height and width of the latents, and what the inputs are beside them.
WANS = {
    # Text to video. A head's features do not divide evenly among frames, rows and columns.
    "wan_t2v": (
        dict(num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, text_dim=6, freq_dim=8,
             ffn_dim=20, num_layers=2),
        dict(size=(3, 4, 6)),
    ),
    # An image with separate keys and values; the latents have more channels than the prediction. diffusers assumes that
    # the text is the last 512 embeddings.
    "wan_i2v": (
        dict(num_attention_heads=1, attention_head_dim=12, in_channels=9, out_channels=4, text_dim=3, freq_dim=6,
             ffn_dim=16, num_layers=2, image_dim=6, added_kv_proj_dim=12),
        dict(size=(1, 6, 4), text=512, image=5),
    ),
    # Two images, first and last frame, whose embeddings have positions.
    "wan_flf2v": (
        dict(num_attention_heads=2, attention_head_dim=6, in_channels=5, out_channels=2, text_dim=3, freq_dim=6,
             ffn_dim=16, num_layers=1, image_dim=8, added_kv_proj_dim=12, pos_embed_seq_len=6),
        dict(size=(5, 2, 6), text=512, image=6),
    ),
    # A timestep for each token.
    "wan_ti2v": (
        dict(num_attention_heads=2, attention_head_dim=10, in_channels=6, out_channels=6, text_dim=5, freq_dim=8,
             ffn_dim=12, num_layers=2),
        dict(size=(2, 6, 4), times="tokens"),
    ),
    # Rare members: patches in time, no norm before cross attention, an image that is concatenated to the text, no
    # features of a head for rows and columns, and an odd freq_dim.
    "wan_mixed": (
        dict(num_attention_heads=3, attention_head_dim=4, in_channels=3, out_channels=None, text_dim=5, freq_dim=7,
             ffn_dim=9, num_layers=3, patch_size=[2, 1, 3], cross_attn_norm=False, image_dim=4, eps=1e-3,
             rope_max_seq_len=4),
        dict(size=(4, 3, 6), image=3),
    ),
}

# Published configs, members that differ from the library's defaults.
_SD = dict(block_out_channels=[320, 640, 1280, 1280], layers_per_block=2, sample_size=64)
_VAE = dict(block_out_channels=[128, 256, 512, 512], layers_per_block=2, latent_channels=4, sample_size=1024,
            scaling_factor=0.13025, down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4)
FULL = {
    "unet_sdxl": (UNet2DConditionModel, dict(
        block_out_channels=[320, 640, 1280], down_block_types=["DownBlock2D", CROSS_DOWN, CROSS_DOWN],
        up_block_types=[CROSS_UP, CROSS_UP, "UpBlock2D"], attention_head_dim=[5, 10, 20],
        transformer_layers_per_block=[1, 2, 10], cross_attention_dim=2048, use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
        layers_per_block=2, sample_size=128)),
    "unet_sd15": (UNet2DConditionModel, dict(_SD, attention_head_dim=8, cross_attention_dim=768)),
    "unet_sd21": (UNet2DConditionModel, dict(
        _SD, attention_head_dim=[5, 10, 20, 20], cross_attention_dim=1024, use_linear_projection=True,
        upcast_attention=True)),
    "vae": (AutoencoderKL, _VAE),
    "wan_vae_21": (AutoencoderKLWan, dict()),
    "wan_vae_22": (AutoencoderKLWan, dict(
        base_dim=160, decoder_base_dim=256, z_dim=48, is_residual=True, in_channels=12, out_channels=12, patch_size=2,
        scale_factor_spatial=16, latents_mean=[0.0] * 48, latents_std=[1.0] * 48)),
    "clip_l": (CLIPTextModel, dict(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, eos_token_id=2,
        bos_token_id=0, projection_dim=768, hidden_act="quick_gelu")),
    "clip_bigg": (CLIPTextModelWithProjection, dict(
        hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, eos_token_id=49407,
        bos_token_id=49406, projection_dim=1280, hidden_act="gelu")),
    "clip_vision_h": (CLIPVisionModel, dict(
        hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16, patch_size=14,
        projection_dim=1024, hidden_act="gelu")),
    "umt5_xxl": (UMT5EncoderModel, dict(
        vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64)),
    "t5_xxl": (T5EncoderModel, dict(
        vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False)),
    "vae_flux": (AutoencoderKL, dict(_VAE, latent_channels=16, scaling_factor=0.3611, shift_factor=0.1159,
                                     use_quant_conv=False, use_post_quant_conv=False)),
    "flux_dev": (FluxTransformer2DModel, dict(guidance_embeds=True)),
    "flux_schnell": (FluxTransformer2DModel, dict()),
    "flux2_klein_4b": (Flux2Transformer2DModel, dict(
        num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680, guidance_embeds=False)),
    "flux2_klein_9b": (Flux2Transformer2DModel, dict(
        num_layers=8, num_single_layers=24, num_attention_heads=32, joint_attention_dim=12288, guidance_embeds=False)),
    "z_image": (ZImageTransformer2DModel, dict(axes_lens=[1536, 512, 512])),
    "qwen3_4b": (Qwen3Model, dict(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128)),
    "qwen_image": (QwenImageTransformer2DModel, dict()),
    "qwen25_vl_7b": (Qwen2_5_VLTextModel, dict(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4)),
    "wan21_t2v_1_3b": (WanTransformer3DModel, dict(num_attention_heads=12, ffn_dim=8960, num_layers=30)),
    # Also both experts of Wan 2.2 T2V-A14B.
    "wan21_t2v_14b": (WanTransformer3DModel, dict()),
    # Of 480P and of 720P.
    "wan21_i2v_14b": (WanTransformer3DModel, dict(in_channels=36, image_dim=1280, added_kv_proj_dim=5120)),
    "wan21_flf2v_14b": (WanTransformer3DModel, dict(
        in_channels=36, image_dim=1280, added_kv_proj_dim=5120, pos_embed_seq_len=514)),
    "wan22_i2v_a14b": (WanTransformer3DModel, dict(in_channels=36)),
    "wan22_ti2v_5b": (WanTransformer3DModel, dict(
        num_attention_heads=24, in_channels=48, out_channels=48, ffn_dim=14336, num_layers=30)),
}


def published(model, name):
    """The name in published files; transformers 5 dropped the prefix from the CLIP models' own names."""
    if isinstance(model, (CLIPTextModel, CLIPTextModelWithProjection)):
        prefix, other = "text_model.", "text_projection."
    elif isinstance(model, (CLIPVisionModel, CLIPVisionModelWithProjection)):
        prefix, other = "vision_model.", "visual_projection."
    else:
        return name.removeprefix("language_model.")
    return name if name.startswith((prefix, other)) else prefix + name


def config_of(model):
    if isinstance(model, transformers.PreTrainedModel):
        config = model.config.to_dict()
        config["architectures"] = [type(model).__name__]
        return config
    config = {k: v for k, v in model.config.items() if k != "_use_default_values"}
    return {"_class_name": type(model).__name__, **config}


def randomize(model, generator):
    """Moves every parameter away from its neutral initial value; numbers are exact in bf16."""
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.ndim == 1:
            value = noise * 0.2 + (1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("gamma"):
            value = noise * 0.2 + 1.0
        elif ("embedding" in name or "shared" in name) and "weight" in name and isinstance(model, transformers.PreTrainedModel):
            value = noise * 0.3
        else:
            value = noise / p[0].numel() ** 0.5
        p.data = value.to(torch.bfloat16).to(torch.float32)


def last(t):
    """Channels last, as in the graph."""
    return t.movedim(1, -1).contiguous() if t.ndim > 3 else t.contiguous()


@contextlib.contextmanager
def kept_precision():
    """x.float(), which models call to compute parts in float32 at least, does not round float64."""
    plain = torch.Tensor.float
    torch.Tensor.float = lambda x: x if x.dtype == torch.float64 else plain(x)
    try:
        yield
    finally:
        torch.Tensor.float = plain


def distance(got, want):
    """Largest relative distance of a tensor; one that is zero by analysis (a bias before a norm) counts by the largest
    norm of its group."""
    norms = {k: v.double().norm().item() for k, v in want.items()}
    largest = max(norms.values())
    scale = {k: n if n > 1e-6 * largest else largest for k, n in norms.items()}
    return max((got[k].double() - want[k].double()).norm().item() / scale[k] for k in want)


def run(model, inputs, dots, forward, dtype, unread=()):
    """unread: substrings of the names of parameters on which no output depends."""
    model = model.to(dtype)
    model.zero_grad(set_to_none=True)
    live = {k: (v.detach().to(dtype).requires_grad_() if v.is_floating_point() else v) for k, v in inputs.items()}
    outputs = forward(model, live)
    if not dots:
        return outputs, {}
    sum((outputs[k] * dots[k].to(dtype)).sum() for k in dots).backward()
    grads = {published(model, k): torch.zeros_like(p) if p.grad is None and any(u in k for u in unread) else p.grad
             for k, p in model.named_parameters()}
    unused = [k for k, g in grads.items() if g is None]
    assert not unused, unused
    grads |= {"in." + k: v.grad for k, v in live.items() if v.is_floating_point() and v.grad is not None}
    return ({k: v.detach() for k, v in outputs.items()}, grads)


IN_BF16 = {"unet_no_mid", "vae_no_attention", "clip_projection", "clip_vision", "umt5", "wan_vae_attention"}


def autocast(forward):
    def in_bf16(m, i):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(m, i)

    return in_bf16


def write(case, model, inputs, forward, seed, unread=()):
    generator = torch.Generator().manual_seed(seed)
    randomize(model, generator)
    model.eval()
    with torch.no_grad():
        shapes, _ = run(model, inputs, {}, forward, torch.float32)
    dots = {k: torch.randn(v.shape, generator=generator) / v.numel() ** 0.5 for k, v in shapes.items()}
    out32, grad32 = run(model, inputs, dots, forward, torch.float32, unread)
    grad32 = {k: v.clone() for k, v in grad32.items()}
    out64, grad64 = run(model, inputs, dots, forward, torch.float64, unread)
    floors = distance(out32, out64), distance(grad32, grad64)
    if case in IN_BF16:
        out64, grad64 = ({k: v.clone() for k, v in group.items()} for group in (out64, grad64))
        out16, grad16 = run(model, inputs, dots, autocast(forward), torch.float32)
        of_all = sum((grad16[k].double() - v).norm() ** 2 for k, v in grad64.items()) / sum(
            v.norm() ** 2 for v in grad64.values())
        print(f"{case}: in bf16 outputs {distance(out16, out64):.3g}, gradients {distance(grad16, grad64):.3g}, of all "
              f"{of_all.sqrt().item():.3g}")

    folder = ROOT / case
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(model), indent=1, default=list) + "\n")
    weights = {published(model, k): p.detach().to(torch.bfloat16).contiguous() for k, p in model.named_parameters()}
    weights |= {k: b.to(torch.bfloat16) for k, b in model.named_buffers() if k.startswith("bn.running_")}
    save_file(weights, folder / "weights.safetensors")
    arrays = {"in." + k: last(v.detach() if v.is_floating_point() else v.to(torch.int32)) for k, v in inputs.items()}
    arrays |= {"out." + k: last(v.float()) for k, v in out64.items()}
    arrays |= {"dot." + k: last(v) for k, v in dots.items()}
    arrays |= {"grad." + k: (last(v.float()) if k.startswith("in.") else v.float().contiguous())
               for k, v in grad64.items()}
    save_file(arrays, folder / "golden.safetensors", metadata={
        "noise_floor_outputs": f"{floors[0]:.3g}", "noise_floor_gradients": f"{floors[1]:.3g}",
        "diffusers": diffusers.__version__, "transformers": transformers.__version__, "torch": torch.__version__})
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{case}: {sum(p.numel() for p in model.parameters())} parameters, noise floor of outputs {floors[0]:.2g}, "
          f"of gradients {floors[1]:.2g}, {size // 1024} KiB")


def unet(case, config, size, timestep_cond=None, residuals=False, seed=0):
    model = UNet2DConditionModel(**config)
    generator = torch.Generator().manual_seed(seed + 1)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    text = config["cross_attention_dim"]
    inputs = {"sample": randn(2, model.config.in_channels, *size), "timestep": torch.tensor([17.0, 803.5]),
              "encoder_hidden_states": randn(2, 7, text if isinstance(text, int) else text[0])}
    if model.config.addition_embed_type:
        width = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        inputs |= {"text_embeds": randn(2, width),
                   "time_ids": torch.tensor([[64.0, 48, 0, 3, 64, 64], [31, 64, 5, 0, 64, 64]])}
    if timestep_cond:
        inputs["timestep_cond"] = randn(2, timestep_cond)
    if residuals:
        h, w = size
        inputs |= {"down_residual.0": randn(2, 8, h, w), "down_residual.1": randn(2, 8, h, w),
                   "down_residual.2": randn(2, 8, h // 2, w // 2), "down_residual.3": randn(2, 12, h // 2, w // 2),
                   "mid_residual": randn(2, 12, h // 2, w // 2)}

    def forward(m, i):
        added = {k: i[k] for k in ("text_embeds", "time_ids") if k in i}
        down = [i[f"down_residual.{k}"] for k in range(4)] if residuals else None
        y = m(i["sample"], i["timestep"].detach(), i["encoder_hidden_states"], timestep_cond=i.get("timestep_cond"),
              added_cond_kwargs=added or None, down_block_additional_residuals=down,
              mid_block_additional_residual=i.get("mid_residual")).sample
        return {"sample": y}

    write(case, model, inputs, forward, seed)


def controlnet(case, config, seed=0):
    model = ControlNetModel(**config)
    generator = torch.Generator().manual_seed(seed + 1)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    side = 2 ** (len(config["conditioning_embedding_out_channels"]) - 1)
    inputs = {"sample": randn(2, 4, 6, 4), "timestep": torch.tensor([17.0, 803.5]),
              "encoder_hidden_states": randn(2, 7, config["cross_attention_dim"]),
              "picture": torch.rand(2, 3, 6 * side, 4 * side, generator=generator)}
    if model.config.addition_embed_type:
        inputs |= {"text_embeds": randn(2, 10),
                   "time_ids": torch.tensor([[64.0, 48, 0, 3, 64, 64], [31, 64, 5, 0, 64, 64]])}

    def forward(m, i):
        added = {k: i[k] for k in ("text_embeds", "time_ids") if k in i}
        y = m(i["sample"], i["timestep"].detach(), i["encoder_hidden_states"], i["picture"],
              added_cond_kwargs=added or None)
        down = y.down_block_res_samples
        if config.get("global_pool_conditions"):  # diffusers' model returns them pooled already
            assert down[0].shape[-1] == 1
        return {f"down.{k}": v for k, v in enumerate(down)} | {"mid": y.mid_block_res_sample}

    write(case, model, inputs, forward, seed)


def vae(case, config, size, seed=0):
    levels = len(config["block_out_channels"])
    model = AutoencoderKL(down_block_types=["DownEncoderBlock2D"] * levels,
                          up_block_types=["UpDecoderBlock2D"] * levels, **config)
    generator = torch.Generator().manual_seed(seed + 1)
    small = [s >> (levels - 1) for s in size]
    inputs = {"pixels": torch.rand(2, model.config.in_channels, *size, generator=generator) * 2 - 1,
              "latents": torch.randn(2, config["latent_channels"], *small, generator=generator)}

    def forward(m, i):
        posterior = m.encode(i["pixels"]).latent_dist
        return {"mean": posterior.mean, "logvar": posterior.logvar, "pixels": m.decode(i["latents"]).sample}

    write(case, model, inputs, forward, seed)


def tiny_vae(case, config, size, seed=0):
    model = AutoencoderTiny(**config)
    generator = torch.Generator().manual_seed(seed + 1)
    small = [s >> (len(config["decoder_block_out_channels"]) - 1) for s in size]
    inputs = {"pixels": torch.rand(2, 3, *size, generator=generator) * 2 - 1,
              "latents": torch.randn(2, config["latent_channels"], *small, generator=generator) * 3}
    write(case, model, inputs,
          lambda m, i: {"latents": m.encode(i["pixels"]).latents, "pixels": m.decode(i["latents"]).sample}, seed)


def qwen_vae(case, config, size, seed=0):
    model = AutoencoderKLQwenImage(**config)
    generator = torch.Generator().manual_seed(seed + 1)
    small = [s >> (len(config["dim_mult"]) - 1) for s in size]
    inputs = {"pixels": torch.rand(2, model.config.input_channels, *size, generator=generator) * 2 - 1,
              "latents": torch.randn(2, config["z_dim"], *small, generator=generator)}

    def forward(m, i):
        posterior = m.encode(i["pixels"].unsqueeze(2)).latent_dist
        outputs = {"mean": posterior.mean, "logvar": posterior.logvar, "pixels": m.decode(i["latents"].unsqueeze(2)).sample}
        return {k: v.squeeze(2) for k, v in outputs.items()}

    write(case, model, inputs, forward, seed, ["time_conv."])  # only videos use it


def wan_vae(case, config, size, seed=0):
    model = AutoencoderKLWan(**config)
    generator = torch.Generator().manual_seed(seed + 1)
    batch, frames, height, width = size
    side = (config.get("patch_size") or 1) << (len(config["dim_mult"]) - 1)
    latent = [batch, config["z_dim"], 1 + (frames - 1 >> sum(config["temperal_downsample"])), height // side,
              width // side]
    inputs = {"pixels": torch.rand(batch, 3, *size[1:], generator=generator) * 2 - 1,
              "latents": torch.randn(*latent, generator=generator)}

    def forward(m, i):
        posterior = m.encode(i["pixels"]).latent_dist
        return {"mean": posterior.mean, "logvar": posterior.logvar, "pixels": m.decode(i["latents"]).sample}

    write(case, model, inputs, forward, seed)


def clip(case, config, projection, ids, seed=0):
    model = (CLIPTextModelWithProjection if projection else CLIPTextModel)(
        CLIPTextConfig(pad_token_id=0, attn_implementation="sdpa", **config))

    def forward(m, i):
        y = m(i["ids"], output_hidden_states=True)
        outputs = {f"hidden.{k}": h for k, h in enumerate(y.hidden_states)}
        outputs |= {"last": y.last_hidden_state}
        return outputs | ({"text_embeds": y.text_embeds} if projection else {"pooled": y.pooler_output})

    write(case, model, {"ids": torch.tensor(ids)}, forward, seed)


def clip_vision(case, config, kind, seed=0):
    model = kind(CLIPVisionConfig(attn_implementation="sdpa", **config))
    generator = torch.Generator().manual_seed(seed + 1)
    size = model.config.image_size

    def forward(m, i):
        y = m(i["pixels"], output_hidden_states=True)
        outputs = {f"hidden.{k}": h for k, h in enumerate(y.hidden_states)}
        return outputs | ({"pooled": y.pooler_output} if kind is CLIPVisionModel else {"image_embeds": y.image_embeds})

    write(case, model, {"pixels": torch.randn(2, model.config.num_channels, size, size, generator=generator)}, forward,
          seed)


def t5(case, model, config, length, real, seed=0):
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(2, config["vocab_size"], (len(real), length), generator=generator)
    mask = (torch.arange(length)[None] < torch.tensor(real)[:, None]).long()
    ids = ids.scatter(1, torch.tensor(real)[:, None] - 1, 1) * mask  # the end token, then padding
    write(case, model, {"ids": ids, "mask": mask},
          lambda m, i: {"last": m(i["ids"], i["mask"]).last_hidden_state}, seed)


def decoder(case, model, config, length, real, layers, seed=0):
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(2, config["vocab_size"], (len(real), length), generator=generator)
    mask = (torch.arange(length)[None] < torch.tensor(real)[:, None]).long()

    def forward(m, i):
        states = m(i["ids"], attention_mask=mask, output_hidden_states=True).hidden_states
        if case == "qwen3_padded":
            return {f"state{n}": states[n] for n in layers}
        return {f"state{n}": states[n] * mask[..., None] for n in layers}  # outputs of padding are not used

    of_texts = {"lengths": torch.tensor(real)} if case == "qwen3_padded" else {"mask": mask}
    write(case, model, {"ids": ids * mask} | of_texts, forward, seed)


def qwen_vision(case, config, sizes, before, behind, seed=0):
    model = Qwen2_5_VLModel(Qwen2_5_VLConfig(attn_implementation="sdpa", **config))
    generator = torch.Generator().manual_seed(seed + 1)
    c, batch = model.config.vision_config, len(behind)
    p, m, t = c.patch_size, c.spatial_merge_size, c.temporal_patch_size
    images = {f"image{k}": torch.randn(batch, 3, *size, generator=generator) for k, size in enumerate(sizes)}
    grids = torch.tensor([[1, h // p, w // p] for h, w in sizes] * batch)
    types = []
    for n, (h, w) in zip(before, sizes):
        types += [0] * n + [1] * (h * w // (p * m) ** 2)
    types = torch.tensor([types + [0] * max(behind)] * batch)
    mask = (torch.arange(types.shape[1])[None] < types.shape[1] - max(behind) + torch.tensor(behind)[:, None]).long()
    ids = torch.randint(2, model.config.image_token_id, types.shape, generator=generator)
    ids = torch.where(types == 1, model.config.image_token_id, ids * mask)

    def patches(x):
        h, w = x.shape[1] // p, x.shape[2] // p
        x = x.reshape(3, h // m, m, p, w // m, m, p).permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        return x.expand(*x.shape[:5], t, p, p).reshape(h * w, -1)

    def forward(model, i):
        pixels = torch.cat([patches(i[name][b]) for b in range(batch) for name in images])
        with kept_precision():
            y = model(i["ids"], attention_mask=mask, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=types)
        return {"last": y.last_hidden_state * mask[..., None]}

    write(case, model, {"ids": ids, "mask": mask} | images, forward, seed)


def qwen_image(case, config, size, lengths, room, references=(), seed=0):
    model = QwenImageTransformer2DModel(**config)
    generator = torch.Generator().manual_seed(seed + 1)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    c, batch = model.config, len(lengths)
    mask = torch.arange(room)[None] < torch.tensor(lengths)[:, None]
    inputs = {"sample": randn(batch, size[0] * size[1], c.in_channels), "timestep": torch.tensor([17.0, 803.5, 500.0])[:batch],
              "text": randn(batch, room, c.joint_attention_dim), "lengths": torch.tensor(lengths)}
    inputs |= {f"reference{k}": randn(batch, h * w, c.in_channels) for k, (h, w) in enumerate(references)}
    shapes = [[(1, *s) for s in (size, *references)]] * batch

    def forward(m, i):
        with kept_precision():
            tokens = torch.cat([i["sample"]] + [i[f"reference{k}"] for k in range(len(references))], 1)
            y = m(tokens, i["text"], mask, i["timestep"].detach() / 1000, shapes)
        return {"sample": y.sample[:, :size[0] * size[1]]}

    # The last block's text output is not used.
    last_block = f"transformer_blocks.{c.num_layers - 1}."
    write(case, model, inputs, forward, seed, [last_block + n for n in ("attn.to_add_out.", "txt_mlp.", "attn.add_q_proj.",
                                                                        "attn.norm_added_q.")])


def z_image(case, config, size, lengths, room, seed=0):
    model = ZImageTransformer2DModel(**config)
    generator = torch.Generator().manual_seed(seed + 1)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    c, batch = model.config, len(lengths)
    inputs = {"sample": randn(batch, c.in_channels, *size), "time": torch.tensor([0.2, 0.95, 0.5])[:batch],
              "text": randn(batch, room, c.cap_feat_dim), "lengths": torch.tensor(lengths)}

    def forward(m, i):
        images = list(i["sample"].unsqueeze(2).unbind(0))
        texts = [text[:n] for text, n in zip(i["text"], lengths)]
        with kept_precision():
            y = m(images, i["time"].detach(), texts, return_dict=False)[0]
        return {"sample": torch.stack(y).squeeze(2)}

    write(case, model, inputs, forward, seed)


def flux2_vae(case, config, size, seed=0):
    levels = len(config["block_out_channels"])
    model = AutoencoderKLFlux2(down_block_types=["DownEncoderBlock2D"] * levels,
                               up_block_types=["UpDecoderBlock2D"] * levels, **config)
    generator = torch.Generator().manual_seed(seed + 1)
    channels = 4 * config["latent_channels"]
    measured(model, generator)
    small = [s >> levels for s in size]
    inputs = {"pixels": torch.rand(2, 3, *size, generator=generator) * 2 - 1,
              "latents": torch.randn(2, channels, *small, generator=generator)}
    patched, unpatched = Flux2KleinPipeline._patchify_latents, Flux2KleinPipeline._unpatchify_latents

    def forward(m, i):
        mean = m.bn.running_mean.reshape(1, -1, 1, 1)
        variance = m.bn.running_var.reshape(1, -1, 1, 1) + m.config.batch_norm_eps
        posterior = m.encode(i["pixels"]).latent_dist
        latents = unpatched(i["latents"] * variance.sqrt() + mean)
        return {"mean": (patched(posterior.mean) - mean) / variance.sqrt(),
                "logvar": patched(posterior.logvar) - variance.log(), "published": latents,
                "pixels": m.decode(latents).sample}

    write(case, model, inputs, forward, seed)


def measured(model, generator):
    """Statistics of latents; numbers are exact in bf16."""
    bn = model.bn
    bn.running_mean.copy_((0.5 * torch.randn(bn.num_features, generator=generator)).to(torch.bfloat16))
    bn.running_var.copy_((0.2 + torch.rand(bn.num_features, generator=generator)).to(torch.bfloat16))


def flux2(case, config, size, references, text=5, seed=0):
    model = Flux2Transformer2DModel(**config)
    generator = torch.Generator().manual_seed(seed + 1)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    c = model.config
    inputs = {"sample": randn(2, c.in_channels, *size), "timestep": torch.tensor([17.0, 803.5]),
              "text": randn(2, text, c.joint_attention_dim)}
    if c.guidance_embeds:
        inputs["guidance"] = torch.tensor([4.0, 1.25])
    inputs |= {f"reference_{n}": randn(2, c.in_channels, *r) for n, r in enumerate(references)}
    pack = Flux2KleinPipeline._pack_latents

    def forward(m, i):
        others = [i[f"reference_{n}"] for n in range(len(references))]
        places = Flux2KleinPipeline._prepare_latent_ids(i["sample"])[0]
        if others:
            extra = Flux2KleinPipeline._prepare_image_ids([x[:1] for x in others])[0]
            places = torch.cat([places, extra], 0)
        guidance = i["guidance"].detach() if "guidance" in i else None
        with kept_precision():
            y = m(hidden_states=torch.cat([pack(i["sample"]), *(pack(x) for x in others)], 1),
                  encoder_hidden_states=i["text"], timestep=i["timestep"].detach() / 1000, img_ids=places,
                  txt_ids=Flux2KleinPipeline._prepare_text_ids(i["text"])[0], guidance=guidance).sample
        rows, columns = size
        return {"sample": y[:, :rows * columns].mT.reshape(2, -1, rows, columns)}

    write(case, model, inputs, forward, seed)


def flux(case, config, size, text=5, seed=0):
    model = FluxTransformer2DModel(**config)
    generator = torch.Generator().manual_seed(seed + 1)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    c = model.config
    rows, columns = size
    places = torch.zeros(rows, columns, 3)
    places[..., 1] = torch.arange(rows)[:, None]
    places[..., 2] = torch.arange(columns)[None]
    inputs = {"sample": randn(2, rows * columns, c.in_channels), "timestep": torch.tensor([17.0, 803.5]),
              "text": randn(2, text, c.joint_attention_dim), "pooled": randn(2, c.pooled_projection_dim)}
    if c.guidance_embeds:
        inputs["guidance"] = torch.tensor([3.5, 1.25])

    def forward(m, i):
        guidance = {"guidance": i["guidance"].detach()} if "guidance" in i else {}
        with kept_precision():
            y = m(i["sample"], i["text"], i["pooled"], i["timestep"].detach() / 1000, places.reshape(-1, 3),
                  torch.zeros(text, 3), **guidance)
        return {"sample": y.sample}

    write(case, model, inputs, forward, seed)


def wan(case, config, size, text=7, image=0, times="samples", seed=0):
    model = WanTransformer3DModel(**config)
    generator = torch.Generator().manual_seed(seed + 1)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    c = model.config
    tokens = [n // p for n, p in zip(size, c.patch_size)]
    t = torch.tensor([17.0, 803.5])
    if times == "tokens":  # as in TI2V: the first frame is known
        t = t[:, None].repeat(1, tokens[0] * tokens[1] * tokens[2])
        t[:, :tokens[1] * tokens[2]] = 0
    inputs = {"sample": randn(2, c.in_channels, *size), "timestep": t, "text": randn(2, text, c.text_dim)}
    if image:
        inputs["image"] = randn(2, image, c.image_dim)

    def forward(m, i):
        image = i.get("image")
        if c.pos_embed_seq_len:  # diffusers takes the two images one after the other
            image = image.reshape(4, -1, c.image_dim)
        with kept_precision():
            y = m(i["sample"], i["timestep"].detach().to(torch.float32), i["text"], image)
        return {"sample": y.sample}

    write(case, model, inputs, forward, seed)


def wan_names():
    layers = lambda names: [f"{n}.{k}" for n in names for k in ("weight", "bias")]
    attention = layers("qkvo") + ["norm_q.weight", "norm_k.weight"]
    image = layers(["k_img", "v_img"]) + ["norm_k_img.weight"]
    originals = [f"blocks.12.self_attn.{n}" for n in attention] + [f"blocks.12.cross_attn.{n}" for n in attention + image]
    originals += [f"blocks.12.{n}" for n in layers(["ffn.0", "ffn.2", "norm3"]) + ["modulation"]]
    originals += layers(["patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0",
                         "time_embedding.2", "time_projection.1", "head.head"]) + ["head.modulation"]
    originals += layers(f"img_emb.proj.{i}" for i in (0, 1, 3, 4))
    pairs = {n: next(iter(convert_wan_transformer_to_diffusers({n: torch.zeros(1)}))) for n in originals}
    model = WanTransformer3DModel(**(WANS["wan_i2v"][0] | {"num_layers": 1}))
    wanted = {n.replace("blocks.0.", "blocks.12.") for n, _ in model.named_parameters()}
    assert set(pairs.values()) == wanted, set(pairs.values()) ^ wanted
    (ROOT / "wan_names.json").write_text(json.dumps(pairs, indent=1) + "\n")
    print(f"wan_names.json: {len(pairs)} names")


def wan_vae_names():
    """Names of the original program's autoencoders. Version 2.1: all that its modules could have, of which diffusers'
    converter makes names of AutoencoderKLWan. 2.2, which it does not convert: the program's lists of a level."""
    ends = [f"{m}.{k}" for m in ("residual.2", "residual.6", "shortcut", "resample.1", "time_conv", "to_qkv", "proj")
            for k in ("weight", "bias")] + ["residual.0.gamma", "residual.3.gamma", "norm.gamma"]
    blocks = [f"{side}.{at}" for side in ("encoder", "decoder")
              for at in [f"middle.{i}" for i in range(3)] + [f"{'down' if side == 'encoder' else 'up'}samples.{i}" for i in range(15)]]
    originals = [f"{b}.{e}" for b in blocks for e in ends] + [f"{c}.{k}" for c in ("conv1", "conv2") for k in ("weight", "bias")]
    originals += [f"{side}.{n}" for side in ("encoder", "decoder")
                  for n in ("conv1.weight", "conv1.bias", "head.0.gamma", "head.2.weight", "head.2.bias")]
    record = {}
    with torch.device("meta"):
        v21 = AutoencoderKLWan()
        v22 = AutoencoderKLWan(base_dim=160, decoder_base_dim=256, z_dim=48, is_residual=True, in_channels=12, out_channels=12,
                               patch_size=2, scale_factor_spatial=16, temperal_downsample=[False, True, True],
                               latents_mean=[0.0] * 48, latents_std=[1.0] * 48)
    wanted = set(v21.state_dict())
    pairs = {n: next(iter(convert_wan_vae_to_diffusers({n: torch.zeros(1)}))) for n in originals}
    pairs = {n: d for n, d in pairs.items() if d in wanted}
    assert set(pairs.values()) == wanted and len(pairs) == len(wanted), wanted ^ set(pairs.values())
    record["2.1"] = {"config": dict(v21.config), "names": pairs}

    same = {d: n for n, d in pairs.items()}
    def of_22(name):
        if name in same and "_blocks" not in name:
            return same[name]
        side, _, level, kind, rest = name.split(".", 4)
        listed = "downsamples" if side == "encoder" else "upsamples"
        resnets = v22.config.num_res_blocks + (side == "decoder")
        if kind in ("downsampler", "upsampler"):
            return f"{side}.{listed}.{level}.{listed}.{resnets}.{rest}"
        index, rest = rest.split(".", 1)
        layer = same[f"encoder.down_blocks.0.{rest}"] if "shortcut" not in rest else "x.y.z.shortcut" + rest[len("conv_shortcut"):]
        return f"{side}.{listed}.{level}.{listed}.{index}.{layer.split('.', 3)[3]}"
    record["2.2"] = {"config": dict(v22.config), "names": {of_22(n): n for n in v22.state_dict()}}
    for version in record.values():
        version["config"] = {k: v for k, v in version["config"].items() if not k.startswith("_")}
    (ROOT / "wan_vae_names.json").write_text(json.dumps(record, indent=0) + "\n")
    print("wan_vae_names.json:", {k: len(v["names"]) for k, v in record.items()})


def collapsed(names):
    """Lines "name sizes"; lines that differ in one number only, which counts from 0, as one with {0..n}."""
    groups = {}
    for line in names:
        groups.setdefault(re.sub(r"\b((?:\w*transformer_)?blocks|layers)\.\d+\.", r"\1.#.", line), []).append(line)
    lines = []
    for key, members in groups.items():
        whole = {key.replace("#", str(i)) for i in range(len(members))}
        lines += [key.replace("#", f"{{0..{len(members) - 1}}}")] if "#" in key and whole == set(members) else members
    return sorted(lines)


def full(name, kind, config):
    with torch.device("meta"):
        model = kind(kind.config_class(**config)) if issubclass(kind, transformers.PreTrainedModel) else kind(**config)
    folder = ROOT / "full"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(config_of(model), indent=1, default=list) + "\n")
    lines = sorted(f"{published(model, k)} {'x'.join(map(str, p.shape))}" for k, p in model.named_parameters())
    written = collapsed(lines) if name.startswith(("wan", "flux", "qwen", "z_image")) else lines
    (folder / f"{name}.txt").write_text("\n".join(written) + "\n")
    print(f"full/{name}: {sum(p.numel() for p in model.parameters())} parameters, {len(lines)} tensors")


def main(wanted):
    diffusers.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(True)
    # The original forward() rounds to float32.
    WanUpsample.forward = QwenImageUpsample.forward = torch.nn.Upsample.forward
    for kind in (WanAttentionBlock, QwenImageAttentionBlock):  # diffusers' encoders pass a cache that it does not accept
        kind.forward = lambda block, x, *cache, attend=kind.forward, **extra: attend(block, x)
    for seed, (case, (config, options)) in enumerate(UNETS.items()):
        if not wanted or case in wanted:
            unet(case, config, seed=100 * seed, **options)
    for seed, (case, config) in enumerate(CONTROLNETS.items()):
        if not wanted or case in wanted:
            controlnet(case, config, seed=3000 + 100 * seed)
    for seed, (case, (config, size)) in enumerate(VAES.items()):
        if not wanted or case in wanted:
            vae(case, config, size, seed=1000 + 100 * seed)
    for seed, (case, (config, size)) in enumerate(TINY_VAES.items()):
        if not wanted or case in wanted:
            tiny_vae(case, config, size, seed=7000 + 100 * seed)
    for seed, (case, (config, size)) in enumerate(WAN_VAES.items()):
        if not wanted or case in wanted:
            wan_vae(case, config, size, seed=4008 + 100 * seed)
    for seed, (case, (config, projection, ids)) in enumerate(CLIPS.items()):
        if not wanted or case in wanted:
            clip(case, config, projection, ids, seed=2000 + 100 * seed)
    for seed, (case, (config, kind)) in enumerate(VISIONS.items()):
        if not wanted or case in wanted:
            clip_vision(case, config, kind, seed=4000 + 100 * seed)
    for seed, (case, (config, (length, real))) in enumerate(UMT5S.items()):
        if not wanted or case in wanted:
            t5(case, UMT5EncoderModel(UMT5Config(**config)), config, length, real, seed=5000 + 100 * seed)
    for seed, (case, (config, (length, real))) in enumerate(T5S.items()):
        if not wanted or case in wanted:
            t5(case, T5EncoderModel(T5Config(**config)), config, length, real, seed=6000 + 100 * seed)
    for seed, (case, (config, (length, real, layers))) in enumerate(QWEN3S.items()):
        if not wanted or case in wanted:
            decoder(case, Qwen3Model(Qwen3Config(**config)), config, length, real, layers, seed=8000 + 100 * seed)
    for seed, (case, (config, (length, real, layers))) in enumerate(QWEN25_VLS.items()):
        if not wanted or case in wanted:
            decoder(case, Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**config)), config, length, real, layers,
                    seed=10000 + 100 * seed)
    for seed, (case, (config, *texts)) in enumerate(QWEN_VISIONS.items()):
        if not wanted or case in wanted:
            qwen_vision(case, config, *texts, seed=13000 + 100 * seed)
    for seed, (case, (config, *sizes)) in enumerate(QWEN_IMAGES.items()):
        if not wanted or case in wanted:
            qwen_image(case, config, *sizes, seed=11000 + 100 * seed)
    for seed, (case, (config, size)) in enumerate(QWEN_VAES.items()):
        if not wanted or case in wanted:
            qwen_vae(case, config, size, seed=12000 + 100 * seed)
    for seed, (case, (config, size, lengths, room)) in enumerate(Z_IMAGES.items()):
        if not wanted or case in wanted:
            z_image(case, config, size, lengths, room, seed=9000 + 100 * seed)
    for seed, (case, (config, size)) in enumerate(FLUX2_VAES.items()):
        if not wanted or case in wanted:
            flux2_vae(case, config, size, seed=11000 + 100 * seed)
    for seed, (case, (config, size, references)) in enumerate(FLUX2S.items()):
        if not wanted or case in wanted:
            flux2(case, config, size, references, seed=10000 + 100 * seed)
    for seed, (case, (config, size)) in enumerate(FLUXES.items()):
        if not wanted or case in wanted:
            flux(case, config, size, seed=7000 + 100 * seed)
    for seed, (case, (config, options)) in enumerate(WANS.items()):
        if not wanted or case in wanted:
            wan(case, config, seed=4000 + 100 * seed, **options)
    if not wanted or "wan_names" in wanted:
        wan_names()
    if not wanted or "wan_vae_names" in wanted:
        wan_vae_names()
    for name, (kind, config) in FULL.items():
        if not wanted or "full" in wanted or f"full/{name}" in wanted:
            full(name, kind, config)


if __name__ == "__main__":
    main(sys.argv[1:])
