"""Kinds of what has no rule: the kernels of traced graphs, and operators that are computed whole."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KERNELS"]

_NAMES = {
    "convolution": """
convolution.default convolution_backward.default _convolution.default conv_tbc.default
""",
    "attention": """
_scaled_dot_product_flash_attention.default _scaled_dot_product_flash_attention_backward.default
_scaled_dot_product_flash_attention_for_cpu.default _scaled_dot_product_flash_attention_for_cpu_backward.default
_scaled_dot_product_efficient_attention.default _scaled_dot_product_efficient_attention_backward.default
_scaled_dot_product_cudnn_attention.default _scaled_dot_product_cudnn_attention_backward.default
_scaled_dot_product_attention_math.default _scaled_dot_product_fused_attention_overrideable.default
_scaled_dot_product_fused_attention_overrideable_backward.default
""",
    "norm": """
native_layer_norm.default native_layer_norm_backward.default native_group_norm.default
native_group_norm_backward.default native_batch_norm.default native_batch_norm_backward.default
_native_batch_norm_legit.default _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional.default
_native_batch_norm_legit_no_training.default batch_norm_backward.default _batch_norm_with_update_functional.default
_batch_norm_no_update.default _fused_rms_norm.default _fused_rms_norm_backward.default instance_norm.default
_weight_norm.default _weight_norm_interface.default _weight_norm_interface_backward.default
linalg_vector_norm.default linalg_matrix_norm.default linalg_matrix_norm.str_ord linalg_norm.default
linalg_norm.ord_str
""",
    "softmax": """
_softmax_backward_data.default _log_softmax_backward_data.default _safe_softmax.default _masked_softmax.default
_masked_softmax_backward.default
""",
    "product": """
addbmm.default chain_matmul.default _grouped_mm.default _int_mm.default _scaled_mm.default linalg_matmul.default
matmul_backward.default
""",
    "gather": """
embedding_dense_backward.default embedding_backward.default embedding_bag.default embedding_bag.padding_idx
_embedding_bag.default _embedding_bag_dense_backward.default gather_backward.default index_select.default
index_select_backward.default index_add.default index_copy.default index_put.default index_reduce.default
index_fill.int_Scalar index_fill.int_Tensor _unsafe_index.Tensor _unsafe_index_put.default scatter.src scatter.value
scatter.reduce scatter.value_reduce scatter_add.default scatter_reduce.two select_scatter.default slice_scatter.default
diagonal_scatter.default as_strided_scatter.default masked_scatter.default masked_scatter_backward.default
nll_loss_forward.default nll_loss_backward.default nll_loss2d_forward.default nll_loss2d_backward.default
nll_loss.default nll_loss2d.default nll_loss_nd.default
""",
    "copy": """
copy.default select_backward.default slice_backward.default masked_select_backward.default fliplr.default
flipud.default repeat_interleave.self_int repeat_interleave.self_Tensor repeat_interleave.Tensor
reflection_pad1d.default reflection_pad1d_backward.default reflection_pad2d.default reflection_pad2d_backward.default
reflection_pad3d.default reflection_pad3d_backward.default replication_pad1d.default replication_pad1d_backward.default
replication_pad2d.default replication_pad2d_backward.default replication_pad3d.default
replication_pad3d_backward.default split_with_sizes_copy.default view_copy.default
""",
}
KERNELS: Mapping[str, str] = {f"aten.{name}": kind for kind, names in _NAMES.items() for name in names.split()}
"""Name of an operator -> one of ``costmodel.device.KINDS``; those that are not here are "pointwise"."""
