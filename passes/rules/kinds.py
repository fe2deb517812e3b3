"""Kinds of operators without a rule: the kernels of traced graphs, and operators that are computed whole."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KERNELS"]

_NAMES = {
    "convolution": "convolution convolution_backward _convolution conv_tbc",
    "attention": """
_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_fused_attention_overrideable_backward
""",
    "norm": """
native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm
native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional
_native_batch_norm_legit_no_training batch_norm_backward _batch_norm_with_update_functional _batch_norm_no_update
_fused_rms_norm _fused_rms_norm_backward instance_norm _weight_norm_interface _weight_norm_interface_backward
""",
    "softmax": "_softmax_backward_data _log_softmax_backward_data _safe_softmax _masked_softmax _masked_softmax_backward",
    "product": "addbmm _grouped_mm _int_mm _scaled_mm",
    "gather": """
embedding_dense_backward embedding_bag _embedding_bag _embedding_bag_dense_backward index_reduce
_unsafe_index.Tensor _unsafe_index_put scatter.reduce scatter.value_reduce diagonal_scatter as_strided_scatter
masked_scatter nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
""",
    "copy": """
copy select_backward slice_backward reflection_pad1d reflection_pad1d_backward reflection_pad2d
reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward
replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward replication_pad3d
replication_pad3d_backward
""",
}
KERNELS: Mapping[str, str] = {
    f"aten.{name if '.' in name else f'{name}.default'}": kind for kind, names in _NAMES.items() for name in names.split()
}
"""Name of an operator -> one of ``costmodel.KINDS``; operators that are not listed are "pointwise"."""
