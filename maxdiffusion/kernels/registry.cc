#include "maxdiffusion/kernels/kernels.h"

namespace md {

void* run_handler();
void* sum_of_squares_handler();
void* adamw_handler();
void* adamw8bit_handler();
void* lion_handler();
void* adafactor_handler();
void* came_handler();
void* convolution_handler();
void* convolution_input_grad_handler();
void* convolution_weight_grad_handler();
void* product_handler();
void* column_sums_handler();
void* add_handler();
void* concatenate_handler();
void* read_row_handler();
void* write_row_handler();
void* widen_handler();
void* widen_nf4_handler();
void* gelu_handler();
void* gelu_grad_handler();
void* attention_handler();
void* attention_grad_handler();
void* group_norm_handler();
void* group_norm_grad_handler();
void* layer_norm_handler();
void* layer_norm_grad_handler();
void* process_sum_handler();

const std::vector<Kernel>& cpu_kernels() {
  static const std::vector<Kernel> kernels = {{kFusedCallsKernel, run_handler()},
                                              {kSumOfSquaresKernel, sum_of_squares_handler()},
                                              {kAdamwKernel, adamw_handler()},
                                              {kAdamw8bitKernel, adamw8bit_handler()},
                                              {kLionKernel, lion_handler()},
                                              {kAdafactorKernel, adafactor_handler()},
                                              {kCameKernel, came_handler()},
                                              {kConvolutionKernel, convolution_handler()},
                                              {kConvolutionInputGradKernel, convolution_input_grad_handler()},
                                              {kConvolutionWeightGradKernel, convolution_weight_grad_handler()},
                                              {kProductKernel, product_handler()},
                                              {kColumnSumsKernel, column_sums_handler()},
                                              {kAddKernel, add_handler()},
                                              {kConcatenateKernel, concatenate_handler()},
                                              {kReadRowKernel, read_row_handler()},
                                              {kWriteRowKernel, write_row_handler()},
                                              {kWidenKernel, widen_handler()},
                                              {kWidenNf4Kernel, widen_nf4_handler()},
                                              {kGeluKernel, gelu_handler()},
                                              {kGeluGradKernel, gelu_grad_handler()},
                                              {kAttentionKernel, attention_handler()},
                                              {kAttentionGradKernel, attention_grad_handler()},
                                              {kGroupNormKernel, group_norm_handler()},
                                              {kGroupNormGradKernel, group_norm_grad_handler()},
                                              {kLayerNormKernel, layer_norm_handler()},
                                              {kLayerNormGradKernel, layer_norm_grad_handler()},
                                              {kProcessSumKernel, process_sum_handler()}};
  return kernels;
}

}  // namespace md
