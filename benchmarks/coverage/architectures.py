"""The architectures by library: name -> (config overrides, inputs)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.coverage import build
from benchmarks.coverage.plain import PLAIN

__all__ = ["ARCHITECTURES"]

_B = build.BATCH
_WORDS: Mapping[str, Mapping[str, Any]] = {
    # causal
    "GPT2LMHeadModel": {},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "GPTNeoXForCausalLM": {},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "BloomForCausalLM": {},
    "OPTForCausalLM": {"word_embed_proj_dim": 32},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 8},
    "MixtralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen2MoeForCausalLM": {"shared_expert_intermediate_size": 64},
    "Qwen3ForCausalLM": {},
    "Qwen3NextForCausalLM": {"shared_expert_intermediate_size": 64, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                             "linear_key_head_dim": 8, "linear_value_head_dim": 8,
                             "layer_types": ["linear_attention", "full_attention"]},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {},
    "PhiForCausalLM": {},
    "Phi3ForCausalLM": {},
    "FalconForCausalLM": {},
    "MptForCausalLM": {},
    "StableLmForCausalLM": {},
    "Starcoder2ForCausalLM": {},
    "CohereForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "OlmoeForCausalLM": {},
    "GraniteForCausalLM": {},
    "GraniteMoeForCausalLM": {},
    "GptOssForCausalLM": {},
    "DeepseekV3ForCausalLM": {"n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                              "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "MambaForCausalLM": {"state_size": 4},
    "Mamba2ForCausalLM": {"state_size": 4, "head_dim": 16, "num_heads": 4, "n_groups": 2, "chunk_size": 8},
    "FalconMambaForCausalLM": {"state_size": 4},
    "RecurrentGemmaForCausalLM": {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    "RwkvForCausalLM": {"attention_hidden_size": 32},
    "GlmForCausalLM": {},
    "NemotronForCausalLM": {},
    "PersimmonForCausalLM": {},
    "JambaForCausalLM": {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
                         "use_mamba_kernels": False},
    "XGLMForCausalLM": {"attention_heads": 4},
    "BioGptForCausalLM": {},
    "CTRLLMHeadModel": {},
    "OpenAIGPTLMHeadModel": {},
    "XLNetLMHeadModel": {"d_inner": 64},
    # masked
    "BertForMaskedLM": {},
    "RobertaForMaskedLM": {},
    "AlbertForMaskedLM": {},
    "DistilBertForMaskedLM": {},
    "ElectraForMaskedLM": {},
    "DebertaForMaskedLM": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "DebertaV2ForMaskedLM": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "MPNetForMaskedLM": {},
    "FunnelForMaskedLM": {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_head": 8},
    "BigBirdForMaskedLM": {"attention_type": "original_full"},
    "ReformerForMaskedLM": {"attn_layers": ["local", "local"], "is_decoder": False, "axial_pos_shape": [4, 4],
                            "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 4, "attention_head_size": 8,
                            "feed_forward_size": 64},
    "FNetForMaskedLM": {"tpu_short_seq_length": 16},
    "NystromformerForMaskedLM": {"num_landmarks": 4, "segment_means_seq_len": 16},
    "SqueezeBertForMaskedLM": {},
    "MobileBertForMaskedLM": {"intra_bottleneck_size": 16, "embedding_size": 16, "true_hidden_size": 16},
    "ConvBertForMaskedLM": {"embedding_size": 32, "num_groups": 2},
    "XLMWithLMHeadModel": {"mask_index": 5, "pad_index": 2},
    "ModernBertForMaskedLM": {"global_attn_every_n_layers": 2, "local_attention": 8, "reference_compile": False},
    "RoFormerForMaskedLM": {"embedding_size": 32},
    "LongformerForMaskedLM": {"attention_window": 4},
    # sequence to sequence
    "T5ForConditionalGeneration": {"decoder_start_token_id": 0},
    "BartForConditionalGeneration": {},
    "PegasusForConditionalGeneration": {},
    "MarianMTModel": {},
    "M2M100ForConditionalGeneration": {},
    "LEDForConditionalGeneration": {"attention_window": 4, "max_encoder_position_embeddings": 64,
                                    "max_decoder_position_embeddings": 64},
    "ProphetNetForConditionalGeneration": {},
    "SwitchTransformersForConditionalGeneration": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
                                                "decoder_start_token_id": 0},
    "LongT5ForConditionalGeneration": {"decoder_start_token_id": 0},
}  # fmt: skip

_SWIN = {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}
_IMAGES: Mapping[str, Mapping[str, Any]] = {
    "ViTForImageClassification": {},
    "DeiTForImageClassification": {},
    "BeitForImageClassification": {},
    "SwinForImageClassification": _SWIN,
    "Swinv2ForImageClassification": _SWIN,
    "ConvNextForImageClassification": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "ConvNextV2ForImageClassification": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "ResNetForImageClassification": {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16},
    "RegNetForImageClassification": {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16, "groups_width": 8},
    "MobileNetV1ForImageClassification": {"depth_multiplier": 0.25},
    "MobileNetV2ForImageClassification": {"depth_multiplier": 0.25},
    "MobileViTForImageClassification": {"hidden_sizes": [16, 16, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
                                        "patch_size": 2},
    "PoolFormerForImageClassification": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
                                         "patch_sizes": [7, 3, 3, 3]},
    "SegformerForSemanticSegmentation": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2,
                                         "decoder_hidden_size": 16, "num_attention_heads": [1, 2], "sr_ratios": [4, 2]},
    "CvtForImageClassification": {"embed_dim": [16, 16, 32], "depth": [1, 2, 3], "num_heads": [1, 2, 4]},
    "Dinov2ForImageClassification": {},
    "EfficientNetForImageClassification": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320,
                                          "initializer_range": 0.3},
    "PvtForImageClassification": {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
                                  "num_attention_heads": [1, 2, 2, 4], "sequence_reduction_ratios": [4, 2, 1, 1]},
    "FocalNetForImageClassification": {"embed_dim": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "focal_levels": [2, 2],
                                       "focal_windows": [3, 3], "patch_size": 4},
    "BitForImageClassification": {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16, "num_groups": 4},
    "YolosForObjectDetection": {"num_detection_tokens": 4, "image_size": [32, 32]},
    "GLPNForDepthEstimation": {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16,
                               "num_attention_heads": [1, 2, 2, 4]},
    "SwiftFormerForImageClassification": {"embed_dims": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
}  # fmt: skip

_OTHERS: Mapping[str, tuple[Mapping[str, Any], Any]] = {
    "CanineForSequenceClassification": ({"local_transformer_stride": 8, "num_hash_buckets": 64,
                                         "upsampling_kernel_size": 4, "downsampling_rate": 4}, "text"),
    "PerceiverForMaskedLM": ({"d_model": 32, "num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2,
                              "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "qk_channels": 32,
                              "v_channels": 32, "max_position_embeddings": 16}, "text"),
    "ImageGPTForImageClassification": ({}, "text"),
    "Wav2Vec2ForCTC": ({"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
                        "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
                        "apply_spec_augment": False}, "sound"),
    "HubertForCTC": ({"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
                      "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
                      "apply_spec_augment": False}, "sound"),
    "WavLMForCTC": ({"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
                     "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
                     "apply_spec_augment": False}, "sound"),
    "ASTForAudioClassification": ({"max_length": 64, "num_mel_bins": 16}, {"input_values": (_B, 64, 16)}),
    "WhisperForConditionalGeneration": ({"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 16},
                                        {"input_features": (_B, 16, 64), "decoder_input_ids": (_B, 8)}),
    "CLIPModel": ({"projection_dim": 16}, "both"),
    "SiglipModel": ({}, "both"),
    "ViltForQuestionAnswering": ({}, "both"),
    "BlipForConditionalGeneration": ({}, "both"),
    "LlavaForConditionalGeneration": ({"image_token_id": 95, "vision_config": {"model_type": "clip_vision_model",
                                       "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "image_size": 32,
                                       "num_attention_heads": 4, "patch_size": 8}, "vision_feature_layer": -1,
                                       "text_config": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
                                       "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                                       "vocab_size": 96, "use_cache": False}}, "text"),
    "PatchTSTForPrediction": ({"num_input_channels": 4, "context_length": 32, "patch_length": 8, "patch_stride": 8,
                               "prediction_length": 8, "loss": "mse"},
                              {"past_values": (_B, 32, 4), "future_values": (_B, 8, 4)}),
    "PatchTSMixerForPrediction": ({"num_input_channels": 4, "context_length": 32, "patch_length": 8, "patch_stride": 8,
                                   "prediction_length": 8}, {"past_values": (_B, 32, 4)}),
    "DecisionTransformerModel": ({"state_dim": 8, "act_dim": 4},
                                 {"states": (_B, 8, 8), "actions": (_B, 8, 4), "rewards": (_B, 8, 1),
                                  "returns_to_go": (_B, 8, 1), "timesteps": (_B, 8), "attention_mask": (_B, 8)}),
}  # fmt: skip

#: Name -> (config overrides, side length of the images).
_TIMM: Mapping[str, tuple[Mapping[str, Any], str]] = {
    **{name: ({}, "32") for name in (
        "resnet10t", "mobilenetv3_small_050", "efficientnet_lite0", "ghostnet_100", "regnetx_002", "regnety_002",
        "lcnet_035", "hrnet_w18_small", "convnext_atto", "repvgg_a0", "tinynet_e", "dla46_c", "resnest14d",
        "densenet121", "edgenext_xx_small",
    )},
    "eca_botnext26ts_256": ({"img_size": 64}, "64"),
    "mobilevit_xxs": ({}, "64"),
    "mixer_s32_224": ({"img_size": 64}, "64"),
    "resmlp_12_224": ({"img_size": 32}, "32"),
    "gmlp_ti16_224": ({"img_size": 32}, "32"),
    "vit_tiny_patch16_224": ({"img_size": 32, "depth": 2}, "32"),
    "vit_relpos_small_patch16_224": ({"img_size": 32, "depth": 2}, "32"),
    "xcit_nano_12_p16_224": ({"img_size": 32, "depth": 2}, "32"),
    "cait_xxs24_224": ({"img_size": 32, "depth": 2}, "32"),
    "eva02_tiny_patch14_224": ({"img_size": 28, "depth": 2}, "28"),
    "poolformerv2_s12": ({}, "32"),
    "davit_tiny": ({}, "64"),
    "levit_128s": ({"img_size": 64}, "64"),
    "efficientformer_l1": ({"depths": [1, 1, 1, 1]}, "64"),
    "coatnet_pico_rw_224": ({"img_size": 64}, "64"),
}  # fmt: skip

_TORCHVISION: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "squeezenet1_1": ({"num_classes": 8}, "32x32"),
    "shufflenet_v2_x0_5": ({"num_classes": 8}, "32x32"),
    "mnasnet0_5": ({"num_classes": 8}, "32x32"),
    "googlenet": ({"num_classes": 8, "aux_logits": False, "init_weights": False}, "32x32"),
    "lraspp_mobilenet_v3_large": ({"num_classes": 8, "weights_backbone": None}, "32x32"),
    "swin_v2_t": ({"num_classes": 8}, "32x32"),
    "r3d_18": ({"num_classes": 8}, "4x16x16"),
}

_UNET = {"block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1}
_LATENT = {"sample_size": 8, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8}
_DIFFUSERS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "UNet2DModel": (
        {**_UNET, "sample_size": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8},
        {"sample": (_B, 3, 16, 16), "timestep": (_B,)},
    ),
    "UNet2DConditionModel": (
        {**_UNET, "sample_size": 16, "cross_attention_dim": 32, "attention_head_dim": 8,
         "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        {"sample": (_B, 4, 16, 16), "timestep": (_B,), "encoder_hidden_states": (_B, 8, 32)},
    ),
    "AutoencoderKL": (
        {**_UNET, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": (_B, 3, 16, 16)},
    ),
    "VQModel": (
        {**_UNET, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": (_B, 3, 16, 16)},
    ),
    "DiTTransformer2DModel": (
        {**_LATENT, "num_embeds_ada_norm": 96},
        {"hidden_states": (_B, 4, 8, 8), "timestep": (_B,), "class_labels": (_B,)},
    ),
    "SD3Transformer2DModel": (
        {**_LATENT, "in_channels": 4, "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 16,
         "out_channels": 4, "pos_embed_max_size": 8},
        {"hidden_states": (_B, 4, 8, 8), "encoder_hidden_states": (_B, 6, 32), "pooled_projections": (_B, 16),
         "timestep": (_B,)},
    ),
    "PixArtTransformer2DModel": (
        {**_LATENT, "cross_attention_dim": 32, "caption_channels": 16, "use_additional_conditions": False},
        {"hidden_states": (_B, 4, 8, 8), "encoder_hidden_states": (_B, 6, 16), "timestep": (_B,)},
    ),
}  # fmt: skip


def _each(library: str, make: Callable[..., build.Example], table: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    return {f"{library}: {name}": functools.partial(make, name, *row) for name, row in table.items()}


ARCHITECTURES: Mapping[str, Callable[[], build.Example]] = {
    **_each("transformers", build.huggingface, {name: (changes, "words") for name, changes in _WORDS.items()}),
    **_each("transformers", build.huggingface, {name: (changes, "image") for name, changes in _IMAGES.items()}),
    **_each("transformers", build.huggingface, _OTHERS),
    **_each("timm", build.pytorch_image, _TIMM),
    **_each("torchvision", build.torchvision, _TORCHVISION),
    **_each("diffusers", build.diffusion, _DIFFUSERS),
    **{f"plain: {name}": make for name, make in PLAIN.items()},
}
"""Library and name -> builder of a model with example inputs, in float32."""
